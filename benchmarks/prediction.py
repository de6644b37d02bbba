"""Predictive variances with and without their last term (the paper's Table 1).

T-SGPR with a Matérn-3/2 kernel is trained once per split and start: from the median distance of two rows as lengthscale of all
inputs, from which some sets are not learnt, or from the data (``--start data``, see tighter_gp.initialize; older lines had a
start of their own). Then the test set is predicted with the last term dropped, which
costs nothing beyond SVGP, and with the exact term, which needs the eigenvectors of an N x N matrix. ``optimal`` and ``subset``
are two other ways, see tighter_gp.predict. Seconds are those of the prediction.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

import tighter_gp

from . import scores
from .data import Split, check_regression, check_sizes, load_split
from .models import NOISE_FLOOR, make_start, warm_up
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe

METHODS = ("drop", "exact", "optimal", "subset")
DEFAULTS: dict[str, Any] = {
    "methods": ["drop", "exact"],
    "datasets": ["wine", "solar", "pumadyn32nm"],
    "splits": list(range(10)),
    "num_inducing": [100],
    "epochs": 200,
    "dtype": "float64",
    "seed": [0],
}
OWN_DEFAULTS = {"start": ["median", "data"]}
SMOKE = {
    "datasets": ["toy"],
    "splits": [0],
    "num_inducing": [8],
    "epochs": 10,
    "methods": list(METHODS),
    "start": ["median"],
}
STARTS = ("median", "data")

# Fewer splits by default where the exact term takes minutes.
FEW_SPLITS = {"pumadyn32nm": [0, 1, 2]}


class SGPR(gpytorch.models.ExactGP):
    """T-SGPR.

    :param points: Inducing points.
    :param lengthscale: Of the start, one for all inputs or one each.
    """

    def __init__(self, data: Split, points: Tensor, lengthscale: Tensor) -> None:
        likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(NOISE_FLOOR))
        super().__init__(data.train_x, data.train_y, likelihood)
        kernel = ScaleKernel(MaternKernel(1.5, ard_num_dims=data.train_x.size(-1)))
        kernel.outputscale, kernel.base_kernel.lengthscale, likelihood.noise = 1.0, lengthscale, 0.1
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = tighter_gp.TighterInducingPointKernel(kernel, points.clone(), likelihood, jitter_val=1e-6)
        self.to(points)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The sparse prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument("--start", nargs="+", choices=STARTS, help="where training starts (default: median data)")


def run(args: argparse.Namespace) -> None:
    """Train once per split and start, and predict with each method."""
    few = FEW_SPLITS if args.splits is None and not args.smoke else {}
    args = resolve(args, {**DEFAULTS, **OWN_DEFAULTS}, SMOKE, METHODS)
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    session = Session("prediction", args)
    planned = [
        [describe(dataset, number, seed, method, settings(args, start), split) for method in args.methods]
        for dataset in args.datasets
        for start in args.start
        for split in few.get(dataset, args.splits)
        for number in args.num_inducing
        for seed in args.seed
    ]
    session.plan(list(chain(*planned)))
    warm_up()
    for runs in planned:
        if session.all_done(runs):
            continue
        data = load_split(runs[0], args)
        points, lengthscale = make_start(data.train_x, runs[0]["num_inducing"], runs[0]["seed"])
        model = SGPR(data, points, lengthscale)
        trained: dict[str, Any] = {}
        training = session.shared(runs[0])
        for one in runs:
            session.run(one, partial(evaluate, one, data, model, trained, training))
        session.forget(training)


def settings(args: argparse.Namespace, start: str) -> dict[str, Any]:
    """What the runs from a start have in common."""
    config = {"epochs": args.epochs, "dtype": args.dtype, "kernel": "matern-3/2 ard", "noise_floor": NOISE_FLOOR}
    return config if start == "median" else {**config, "start": start}  # lines without a start have the median


def evaluate(
    run: dict[str, Any],
    data: Split,
    model: SGPR,
    trained: dict[str, Any],
    training: Path,
    checkpoint: Path,
    resume: bool,
) -> dict[str, Any]:
    """Predict the test set; the first method of a split trains the model, whose checkpoint is kept for the others."""
    likelihood = model.likelihood
    if not trained:
        if run["config"].get("start") == "data":
            tighter_gp.initialize(model, likelihood, data.train_x, data.train_y, seed=run["seed"])
        history = tighter_gp.fit(
            model,
            likelihood,
            data.train_x,
            data.train_y,
            epochs=run["config"]["epochs"],
            seed=run["seed"],
            checkpoint=training,
            recipe=tighter_gp.Recipe(checkpoint_every=20),
            resume=resume,
        )
        bound = tighter_gp.evaluate_bound(model, likelihood, data.train_x, data.train_y)
        trained.update(
            bound=float(bound) / len(data.train_y),
            noise=likelihood.noise.item(),
            outputscale=model.covar_module.base_kernel.outputscale.item(),
            train_seconds=round(history.seconds, 3),
            steps=history.steps,
            skipped=len(history.skipped),
            mean=tighter_gp.predict(model, data.test_x).mean,
        )
    started = time.perf_counter()
    q = tighter_gp.predict(model, data.test_x, run["method"])
    variance = q.variance + likelihood.noise.detach()
    if data.test_x.is_cuda:
        torch.cuda.synchronize(data.test_x.device)
    seconds = time.perf_counter() - started
    density = torch.distributions.Normal(q.mean, variance.sqrt()).log_prob(data.test_y)
    rmse = float((q.mean - data.test_y).square().mean().sqrt())
    test_std = float(data.test_y.std(correction=0))
    return {
        **{name: value for name, value in trained.items() if name != "mean"},
        "rmse": rmse,
        "nlpd": -float(density.mean()),
        # Of the mean and variance of the training targets, which are 0 and 1.
        "nlpd_mean": -float(torch.distributions.Normal(0.0, 1.0).log_prob(data.test_y).mean()),
        "mean_difference": float((q.mean - trained["mean"]).abs().max()),
        "latent_variance": float(q.variance.mean()),
        "num_train": len(data.train_y),
        "num_test": len(data.test_y),
        "num_inputs": data.train_x.size(-1),
        "target_std": data.target_std,
        "test_std": test_std,
        "seconds": round(seconds, 4),
        "flags": scores.flags_of_scores(rmse, test_std),
    }
