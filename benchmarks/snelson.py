"""One-dimensional regression: SGPR, T-SGPR, SVGP and T-SVGP on Snelson's data (the paper's Figure 1).

RBF kernel, zero mean, five inducing points, all hyperparameters at 1 at the start. The collapsed bounds are trained with
L-BFGS, the uncollapsed ones with Adam, all on the full data in its own units.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution
from torch import Tensor

import tighter_gp

from .data import load_snelson
from .errors import UserError
from .models import NOISE_FLOOR, warm_up
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe
from .toy import make_toy

METHODS = ("sgpr", "t-sgpr", "svgp", "t-svgp")
DEFAULTS: dict[str, Any] = {
    "methods": list(METHODS),
    "datasets": ["snelson"],
    "num_inducing": [5],
    "epochs": 2000,
    "lr": 0.05,
    "dtype": "float64",
    "seed": [0],
}
SMOKE = {"datasets": ["toy"], "num_inducing": [6], "epochs": 20}

SCHEDULE = "cosine"
DATASETS = ("snelson", "toy")

# The inducing inputs are the first rows of numpy's permutation with this seed, plus --seed.
_PLACEMENT_SEED = 42
_TRACE_POINTS = 200


class Collapsed(gpytorch.models.ExactGP):
    """SGPR, or T-SGPR."""

    def __init__(self, x: Tensor, y: Tensor, points: Tensor, kernel: Kernel, likelihood: Any, bound: str) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = tighter_gp.TighterInducingPointKernel(kernel, points.clone(), likelihood, bound=bound)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The sparse prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Uncollapsed(gpytorch.models.ApproximateGP):
    """SVGP, or T-SVGP."""

    def __init__(self, points: Tensor, kernel: Kernel) -> None:
        q = CholeskyVariationalDistribution(len(points))
        super().__init__(tighter_gp.TighterVariationalStrategy(self, points.clone(), q))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Train each method and keep its trace and its fit."""
    args = resolve(args, DEFAULTS, SMOKE, METHODS, DATASETS)
    loaded = {name: _load(name, args) for name in args.datasets}
    if max(args.num_inducing) > 200:
        raise UserError(f"{max(args.num_inducing)} inducing points are more than the 200 training points.")
    session = Session("snelson", args)
    config = {
        "epochs": args.epochs,
        "lr": args.lr,
        "schedule": SCHEDULE,
        "dtype": args.dtype,
        "kernel": "rbf",
        "noise_floor": NOISE_FLOOR,
    }
    planned = [describe(*point, config) for point in product(args.datasets, args.num_inducing, args.seed, args.methods)]
    session.plan(planned)
    warm_up()
    for one in planned:
        session.run(one, partial(train, one, *loaded[one["dataset"]]))


def _load(name: str, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    if name == "toy":
        toy = make_toy()
        x, y = toy.x, toy.y
    else:
        x, y = load_snelson(args.data_dir)
    return x.to(device=args.device, dtype=args.dtype), y.to(device=args.device, dtype=args.dtype)


def train(run: dict[str, Any], x: Tensor, y: Tensor, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Train one method; returns its bound, hyperparameters, trace and fit."""
    method, config = run["method"], run["config"]
    tighter, collapsed = method.startswith("t-"), method.endswith("sgpr")
    rows = np.random.RandomState(_PLACEMENT_SEED + run["seed"]).permutation(len(x))[: run["num_inducing"]]
    points = x[torch.from_numpy(rows).to(x.device)]
    kernel = ScaleKernel(RBFKernel())
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(NOISE_FLOOR))
    model: Any
    if collapsed:
        model = Collapsed(x, y, points, kernel, likelihood, "tighter" if tighter else "titsias")
    else:
        model = Uncollapsed(points, kernel)
    model, likelihood = model.to(x), likelihood.to(x)
    kernel.outputscale, kernel.base_kernel.lengthscale, likelihood.noise = 1.0, 1.0, 1.0
    history = tighter_gp.fit(
        model,
        likelihood,
        x,
        y,
        objective=tighter_gp.TighterELBO if tighter or collapsed else VariationalELBO,
        epochs=config["epochs"],
        batch_size=None,
        recipe=tighter_gp.Recipe(lr=config["lr"], schedule=config["schedule"]),
        seed=run["seed"],
        checkpoint=checkpoint,
        resume=resume,
    )
    model.eval()
    likelihood.eval()
    values = _bounds(model, likelihood, x, y)
    every = max(1, history.steps // _TRACE_POINTS)
    return {
        "bound": values["bound_tighter" if tighter else "bound_base"],
        **values,
        "noise": likelihood.noise.item(),
        "outputscale": kernel.outputscale.item(),
        "lengthscale": kernel.base_kernel.lengthscale.item(),
        "num_train": len(y),
        "num_inputs": 1,
        "seconds": round(history.seconds, 3),
        "steps": history.steps,
        "skipped": len(history.skipped),
        "flags": [],
        "trace": [{"step": step, "bound": -history.loss[step]} for step in range(0, history.steps, every)],
    }


def _bounds(model: Any, likelihood: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Both bounds at a model's own parameters, nats per training point."""
    if not isinstance(model, Collapsed):
        kinds = {"bound_tighter": tighter_gp.TighterELBO, "bound_base": VariationalELBO}
        return {
            name: float(tighter_gp.evaluate_bound(model, likelihood, x, y, objective=kind)) / len(y)
            for name, kind in kinds.items()
        }
    kernel, values = model.covar_module, {}
    trained = kernel.bound
    for name, bound in {"bound_tighter": "tighter", "bound_base": "titsias"}.items():
        kernel.bound = bound
        values[name] = float(tighter_gp.evaluate_bound(model, likelihood, x, y)) / len(y)
    kernel.bound = trained
    return values
