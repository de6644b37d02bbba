"""Millions of rows from a memory map: delays of 3,000,000 flights by SVGP, T-SVGP, a linear model and boosted trees.

``--methods neighbours`` is T-SVGP with neighbours, in one process.

Inputs are the minute of the day, the days of week and year, the distance, and where origin and destination lie. The file has
no positions: they are found by classical multidimensional scaling of the distances between airports, which are inputs, on a
plane. 100,000 flights drawn at random are the test set; numbers are in units of the training delays' standard deviation.

The two GPs share points, start, batches and the default recipe of ``fit``; the trees are scikit-learn's
HistGradientBoostingRegressor, the noise of their Gaussian predictions is estimated on training rows that they have not seen.
Under ``torchrun --nproc-per-node 2 -m benchmarks million`` two processes share every batch. The peak of memory is that of the
first process, with the pages of the memory map that it has read.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tighter_gp
from tighter_gp.training import distributed

from . import flights, models, uci
from .data import Split
from .errors import UserError
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe
from .traces import Trace, at_epochs

GPS, BASELINES = ("svgp", "t-svgp", "neighbours"), ("linear", "trees")
DEFAULTS: dict[str, Any] = {
    "methods": [*BASELINES, "svgp", "t-svgp"],
    "datasets": ["flights3m"],
    "splits": [0],
    "num_inducing": [256],
    "epochs": 3,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE: dict[str, Any] = {"datasets": ["made-up"], "num_inducing": [8], "epochs": 2, "batch_size": 128}
DATASETS = ("flights3m", "made-up")

TREES = {"max_iter": 500, "early_stopping": True, "validation_fraction": 0.1, "random_state": 0}

# Rows for the start of the GPs; one row in this many tells the trees' noise.
_START_ROWS, _HELD_OUT = 50_000, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Train and score each method."""
    args = resolve(args, DEFAULTS, SMOKE, (*BASELINES, *GPS), DATASETS)
    if distributed.world_size() > 1:
        args.methods = [method for method in args.methods if method in ("svgp", "t-svgp")]
        if not args.methods:
            raise UserError("linear model, trees and neighbours are for one process.")
    session = Session("million", args)
    planned = [
        describe(dataset, number if method in GPS else None, seed, method, settings(args, method), split)
        for dataset in args.datasets
        for split in args.splits
        for method in args.methods
        for number in (args.num_inducing if method in GPS else args.num_inducing[:1])
        for seed in (args.seed if method in GPS else args.seed[:1])
    ]
    session.plan(planned)
    models.warm_up()
    for one in planned:
        if session.all_done([one]):
            continue
        rows = load(one, args, session.path.parent)
        if (one["num_inducing"] or 1) > len(rows.train_y):
            raise UserError(f"{one['num_inducing']} inducing points are more than the {len(rows.train_y)} rows.")
        session.run(one, partial(METHODS[one["method"]], one, rows, args.device))


def settings(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Those of a method."""
    config: dict[str, Any] = {"num_test": 150 if args.smoke else 100_000, "airports": "scaling of distances, plane"}
    if method in GPS:
        config |= {**uci.settings(args), "processes": distributed.world_size()}
    elif method == "trees":
        config |= TREES
    return config


def load(run: dict[str, Any], args: argparse.Namespace, parent: Path) -> flights.Rows:
    """The memory maps of a split, which the first process writes if need be."""
    num_test = run["config"]["num_test"]
    folder = flights.rows_folder(parent, run["dataset"], num_test, run["split"])
    if distributed.rank() == 0 and not folder.exists():
        table = flights.read_flights(args.data_dir) if run["dataset"] == "flights3m" else flights.make_flights()
        flights.memory_maps(table, folder, num_test, run["split"])
    distributed.barrier()
    return flights.load_rows(folder)


def train_gp(
    run: dict[str, Any], rows: flights.Rows, device: torch.device, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """SVGP or T-SVGP, perhaps with neighbours."""
    has_neighbours = run["method"] == "neighbours"
    run = {**run, "method": "t-svgp" if has_neighbours else run["method"]}
    method, config, num_train = run["method"], run["config"], len(rows.train_y)
    dtype = getattr(torch, config["dtype"])
    as_tensor = lambda array: torch.from_numpy(np.array(array)).to(device=device, dtype=dtype)
    drawn = np.sort(np.random.RandomState(run["seed"]).permutation(num_train)[:_START_ROWS])
    start = models.make_start(as_tensor(rows.train_x[drawn]), run["num_inducing"], run["seed"])
    model, likelihood = models.make_regression(method, start)
    # The training rows stay on the disk: `fit` and `evaluate_bound` take memory maps.
    maps: Any = (rows.train_x, rows.train_y)
    data = Split(run["dataset"], *maps, as_tensor(rows.test_x), as_tensor(rows.test_y), rows.target_std)
    trace = Trace(partial(uci.measure, data, None), at_epochs(config["epochs"], config["epochs"]))
    history = models.train(run, model, likelihood, data, trace, checkpoint, resume)
    values = models.regression_bounds(model, likelihood, data)
    return {
        "bound": values[models.METHODS[method].bound],
        **values,
        **models.regression_scores(model, likelihood, data),
        "noise": likelihood.noise.item(),
        "outputscale": model.covar_module.outputscale.item(),
        "lengthscales": dict(
            zip(flights.INPUTS, model.covar_module.base_kernel.lengthscale.flatten().tolist(), strict=True)
        ),
        **_size(rows),
        "seconds": round(history.seconds, 3),
        "rows_per_second": round(num_train * config["epochs"] / history.seconds, 1),
        "steps": history.steps,
        "skipped": len(history.skipped),
        "flags": [],
        "trace": trace.points,
        **(with_neighbours(model, likelihood, data) if has_neighbours else {}),
    }


def with_neighbours(model: Any, likelihood: Any, data: Split) -> dict[str, Any]:
    """Scores with neighbours in place of the usual ones, which have names of their own, and how long they take."""
    started = time.perf_counter()
    near = tighter_gp.NeighbourGP(model, likelihood, data.train_x, data.train_y)
    built = time.perf_counter()
    found = models.regression_scores(near, near.likelihood, data)
    return {
        "bound": None,
        **found,
        "usual": models.regression_scores(model, likelihood, data),
        "neighbours_kept": near.num_neighbours,
        "build_seconds": round(built - started, 3),
        "predictions_per_second": round(len(data.test_y) / (time.perf_counter() - built), 1),
    }


def train_linear(
    run: dict[str, Any], rows: flights.Rows, device: torch.device, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Least squares with an intercept."""
    started = time.perf_counter()
    width = rows.train_x.shape[1] + 2
    products = np.zeros((width, width))
    for begin in range(0, len(rows.train_y), 100_000):
        part = slice(begin, begin + 100_000)
        x, y = rows.train_x[part].astype(np.float64), rows.train_y[part].astype(np.float64)
        table = np.column_stack([x, np.ones(len(y)), y])
        products += table.T @ table
    weights = np.linalg.solve(products[:-1, :-1], products[:-1, -1])
    noise = (products[-1, -1] - weights @ products[:-1, -1]) / len(rows.train_y)
    seconds = time.perf_counter() - started
    mean = rows.test_x.astype(np.float64) @ weights[:-1] + weights[-1]
    return _baseline(rows, mean, noise, seconds, 1)


def train_trees(
    run: dict[str, Any], rows: flights.Rows, device: torch.device, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Gradient-boosted trees."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    held_out = np.random.RandomState(run["seed"]).permutation(len(rows.train_y)) % _HELD_OUT == 0
    started = time.perf_counter()
    trees = HistGradientBoostingRegressor(**TREES).fit(rows.train_x[~held_out], rows.train_y[~held_out])
    seconds = time.perf_counter() - started
    noise = np.square(trees.predict(rows.train_x[held_out]) - rows.train_y[held_out], dtype=np.float64).mean()
    return {**_baseline(rows, trees.predict(rows.test_x), float(noise), seconds, trees.n_iter_), "trees": trees.n_iter_}


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "linear": train_linear,
    "trees": train_trees,
    "svgp": train_gp,
    "t-svgp": train_gp,
    "neighbours": train_gp,
}


def _baseline(rows: flights.Rows, mean: np.ndarray, noise: float, seconds: float, passes: int) -> dict[str, Any]:
    """Scores of Gaussian predictions with the same variance everywhere."""
    error = float(np.square(mean - rows.test_y.astype(np.float64)).mean())
    return {
        "rmse": math.sqrt(error),
        "nlpd": 0.5 * math.log(2 * math.pi * noise) + 0.5 * error / noise,
        "noise": float(noise),
        **_size(rows),
        "seconds": round(seconds, 3),
        "rows_per_second": round(len(rows.train_y) * passes / seconds, 1),
        "flags": [],
    }


def _size(rows: flights.Rows) -> dict[str, Any]:
    return {
        "num_train": len(rows.train_y),
        "num_test": len(rows.test_y),
        "num_inputs": rows.train_x.shape[1],
        "target_std": rows.target_std,
    }
