"""Predictions with neighbours beside the usual ones and boosted trees: RMSE, NLPD and coverage of 95 % intervals.

The ready-made T-SVGP after ``--epochs`` of the default recipe; the same model as a NeighbourGP; scikit-learn's
HistGradientBoostingRegressor, whose Gaussian predictions have the squared error of a tenth of the training rows as variance.
``--methods exact`` is the exact GP at the hyperparameters that the NeighbourGP ends with, for as many rows as memory allows.
Seconds are the processor's, those with neighbours without training.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tighter_gp

from .data import Split, check_regression, check_sizes, load_split
from .models import warm_up
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session

DEFAULTS: dict[str, Any] = {
    "methods": ["t-svgp", "neighbours", "trees"],
    "datasets": ["kin40k", "protein", "bike", "pol", "elevators", "pumadyn32nm", "keggdirected"],
    "splits": [0, 1],
    "num_inducing": [256],
    "epochs": 15,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE = {"datasets": ["toy"], "splits": [0], "num_inducing": [8], "epochs": 3, "batch_size": 64}
_NUM_NEIGHBOURS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Train and score each method on each split."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(METHODS))
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    session = Session("neighbours", args)
    config = {"epochs": args.epochs, "batch_size": args.batch_size, "neighbours": _NUM_NEIGHBOURS, "dtype": args.dtype}
    planned = session.plan_splits(args, lambda _: [config])
    warm_up()
    for runs in planned:
        if session.all_done(runs):
            continue
        data = load_split(runs[0], args)
        trained = lru_cache(partial(train, runs[0], data))
        for one in runs:
            session.run(one, partial(_scored, METHODS[one["method"]], data, trained))


def train(run: dict[str, Any], data: Split) -> tuple[Any, float]:
    """The model, which two methods share, and the seconds of its training."""
    started, config = time.process_time(), run["config"]
    torch.manual_seed(run["seed"])
    model = tighter_gp.models.Regression(data.train_x, num_inducing=run["num_inducing"])
    options = {"epochs": config["epochs"], "batch_size": config["batch_size"], "seed": run["seed"], "progress": False}
    tighter_gp.fit(model, model.likelihood, data.train_x, data.train_y, **options)
    return model, time.process_time() - started


def usual(data: Split, trained: Callable[[], tuple[Any, float]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """T-SVGP's own predictions."""
    model, seconds = trained()
    y = tighter_gp.predict_y(model, model.likelihood, data.test_x)
    return y.mean, y.variance, {"processor_seconds": round(seconds, 3)}


def with_neighbours(data: Split, trained: Callable[[], tuple[Any, float]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The same model with neighbours."""
    (model, seconds), started = trained(), time.process_time()
    near = tighter_gp.NeighbourGP(model, model.likelihood, data.train_x, data.train_y, num_neighbours=_NUM_NEIGHBOURS)
    y = tighter_gp.predict_y(near, near.likelihood, data.test_x)
    noted = {"processor_seconds": round(time.process_time() - started, 3), "training_seconds": round(seconds, 3)}
    return y.mean, y.variance, {**noted, "neighbours_kept": near.num_neighbours}


def trees(data: Split, trained: Callable[[], tuple[Any, float]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Gradient-boosted trees with one variance everywhere."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, y, started = data.train_x.numpy(), data.train_y.numpy(), time.process_time()
    held_out = np.random.RandomState(0).permutation(len(y)) % 10 == 0
    options = {"max_iter": 500, "early_stopping": True, "random_state": 0}
    found = HistGradientBoostingRegressor(**options).fit(x[~held_out], y[~held_out])
    variance = np.square(found.predict(x[held_out]) - y[held_out]).mean()
    mean = torch.from_numpy(found.predict(data.test_x.numpy())).to(data.test_y)
    return mean, torch.full_like(mean, float(variance)), {"processor_seconds": round(time.process_time() - started, 3)}


def exact(data: Split, trained: Callable[[], tuple[Any, float]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What neighbours come near to: the exact GP at the same hyperparameters, in float64."""
    model, _ = trained()
    near = tighter_gp.NeighbourGP(model, model.likelihood, data.train_x, data.train_y, num_neighbours=_NUM_NEIGHBOURS)
    gp, started = near.model.double(), time.process_time()
    x, y, test = data.train_x.double(), data.train_y.double(), data.test_x.double()
    noise = near.noise.double().mean()
    with torch.no_grad():
        covariance = gp.covar_module(x).to_dense()
        covariance.diagonal().add_(noise)
        factor = torch.linalg.cholesky(covariance)
        half = torch.linalg.solve_triangular(factor, gp.covar_module(x, test).to_dense(), upper=False)
        white = torch.linalg.solve_triangular(factor, (y - gp.mean_module(x)).unsqueeze(-1), upper=False)
        mean = gp.mean_module(test) + (half.mT @ white).squeeze(-1)
        variance = gp.covar_module(test, diag=True) - half.square().sum(-2) + noise
    seconds = round(time.process_time() - started, 3)
    return mean, variance * near.scale.double(), {"processor_seconds": seconds}


METHODS = {"t-svgp": usual, "neighbours": with_neighbours, "trees": trees, "exact": exact}


def _scored(method: Callable[..., Any], data: Split, trained: Any, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Scores of Gaussian predictions, in units of the training targets' standard deviation."""
    mean, variance, noted = method(data, trained)
    squared = (mean - data.test_y).double().square()
    variance = variance.double()
    return {
        "rmse": float(squared.mean().sqrt()),
        "nlpd": float((0.5 * (math.log(2 * math.pi) + variance.log() + squared / variance)).mean()),
        "coverage": float((squared <= 1.959964**2 * variance).double().mean()),
        "num_train": len(data.train_y),
        "num_test": len(data.test_y),
        "flags": [],
        **noted,
    }
