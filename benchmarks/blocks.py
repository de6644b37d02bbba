"""Blocks of points: SGPR, T-SGPR, T-SGPR with blocks and the exact GP on 5,000 rows of kin40k, trained by L-BFGS.

The setting of Bui and Titsias (2025), Table 1. All methods start from the same k-means inducing points and hyperparameters.
Data and results are in units of the target standardised by the training rows.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

import tighter_gp

from . import scores
from .data import Split, check_regression, load_split
from .errors import UserError
from .models import NOISE_FLOOR
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe

METHODS = {"exact": None, "sgpr": "titsias", "t-sgpr": "tighter", "block": "block", "full": "full"}
DEFAULTS: dict[str, Any] = {
    "methods": ["exact", "sgpr", "t-sgpr", "block"],
    "datasets": ["kin40k"],
    "splits": [0],
    "num_inducing": [256],
    "seed": [0],
    "dtype": "float64",
    "num_train": 5000,
    "num_blocks": [50, 10],
    "max_iter": 1000,
}
SMOKE = {"datasets": ["toy"], "num_inducing": [5], "num_train": 150, "num_blocks": [4], "max_iter": 10}

_JITTER = 1e-6


class Collapsed(gpytorch.models.ExactGP):
    """Regression with an RBF-ARD kernel: collapsed on inducing points, or exact where there is no bound."""

    def __init__(self, data: Split, points: Tensor, bound: str | None, blocks: Tensor | None) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_constraint=gpytorch.constraints.GreaterThan(NOISE_FLOOR)
        )
        super().__init__(data.train_x, data.train_y, likelihood)
        dim = data.train_x.size(-1)
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=dim))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = base
        if bound is not None:
            self.covar_module = tighter_gp.TighterInducingPointKernel(
                base, points.clone(), likelihood, bound=bound, blocks=blocks, jitter_val=_JITTER
            )
        self.to(points)
        base.outputscale, base.base_kernel.lengthscale, likelihood.noise = 1.0, math.sqrt(dim), 0.1

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    for name, text in (("num-train", "training rows, drawn at random"), ("max-iter", "most iterations of L-BFGS")):
        default = DEFAULTS[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=int, metavar="X", help=f"{text} (default: {default})")
    parser.add_argument("--num-blocks", type=int, nargs="+", metavar="X", help="blocks of a partition (default: 50 10)")


def run(args: argparse.Namespace) -> None:
    """Train each method."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(METHODS))
    for name, values in (
        ("num-train", [args.num_train]),
        ("num-blocks", args.num_blocks),
        ("max-iter", [args.max_iter]),
    ):
        if min(values) < 1:
            raise UserError(f"--{name} must be positive; got {min(values)}.")
    if max(*args.num_inducing, *args.num_blocks) > args.num_train:
        raise UserError(f"more inducing points or blocks than the {args.num_train} training rows.")
    check_regression(args.datasets, args.splits, args.data_dir)
    session = Session("blocks", args)
    planned = [
        describe(dataset, number, seed, method, settings(args, num_blocks), split)
        for dataset in args.datasets
        for split in args.splits
        for seed in args.seed
        for method in args.methods
        for number in (args.num_inducing if method != "exact" else [None])
        for num_blocks in (args.num_blocks if method == "block" else [None])
    ]
    session.plan(planned)
    for one in planned:
        session.run(one, partial(execute, one, load(one, args)))


def settings(args: argparse.Namespace, num_blocks: int | None) -> dict[str, Any]:
    """Those of a run."""
    return {
        "num_train": args.num_train,
        "num_blocks": num_blocks,
        "max_iter": args.max_iter,
        "dtype": args.dtype,
        "kernel": "rbf-ard",
        "noise_floor": NOISE_FLOOR,
    }


def load(run: dict[str, Any], args: argparse.Namespace) -> Split:
    """Random training rows of a split, standardised by themselves, and all of its test rows."""
    data = load_split(run, args)
    if args.num_train > len(data.train_y):
        raise UserError(
            f"--num-train {args.num_train} is more than the {len(data.train_y)} training rows of {run['dataset']}."
        )
    rows = np.random.default_rng(run["seed"]).permutation(len(data.train_y))[: args.num_train]
    x, y = data.train_x[torch.from_numpy(rows)], data.train_y[torch.from_numpy(rows)]
    x_mean, x_std, y_mean, y_std = x.mean(0), x.std(0, correction=0), y.mean(), y.std(correction=0)
    x_std = torch.where(x_std > 0, x_std, 1.0)
    return Split(
        run["dataset"],
        (x - x_mean) / x_std,
        (y - y_mean) / y_std,
        (data.test_x - x_mean) / x_std,
        (data.test_y - y_mean) / y_std,
        data.target_std * float(y_std),
    )


def execute(run: dict[str, Any], data: Split, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Train one method from the common start; returns its bound per point, noise and test errors."""
    method, config, seed = run["method"], run["config"], run["seed"]
    points, blocks = data.train_x[:1], None  # the exact GP has no inducing points
    if method != "exact":
        points = tighter_gp.inducing.kmeans(data.train_x, run["num_inducing"], seed=seed)
    if method == "block":
        blocks = tighter_gp.blocks.partition(data.train_x, config["num_blocks"], seed=seed)
    model = Collapsed(data, points, METHODS[method], blocks)
    started = time.perf_counter()
    # Cholesky factors where GPyTorch would iterate, for the exact GP.
    with gpytorch.settings.fast_computations(*[False] * 3) if method == "exact" else nullcontext():
        options = {"steps": config["max_iter"], "progress": False}
        history = tighter_gp.fit(model, model.likelihood, data.train_x, data.train_y, **options)
        seconds = time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            q = model(data.test_x) if method == "exact" else tighter_gp.predict(model, data.test_x)
            mean, variance = q.mean, q.variance + model.likelihood.noise
    error = data.test_y - mean
    log_density = -0.5 * (torch.log(2 * math.pi * variance) + error.square() / variance)
    rmse = error.square().mean().sqrt().item()
    return {
        "bound": -history.loss[-1],
        "bound_at_half": -history.loss[(history.steps - 1) // 2],
        "rmse": rmse,
        "nlpd": -log_density.mean().item(),
        "noise": model.likelihood.noise.item(),
        "converged": history.steps < config["max_iter"],
        "seconds": round(seconds, 3),
        "flags": scores.flags_of_scores(rmse, data.test_y.std().item()),
    }
