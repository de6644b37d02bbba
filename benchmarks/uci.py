"""Large-scale regression: SVGP, T-SVGP, SOLVE-GP and T-SOLVE-GP on up to two million points (the paper's Section 5.3).

Matérn-3/2 kernel with one lengthscale per dimension, mini-batches, the default recipe of ``fit`` for every method. Methods
that are compared share inducing points, seed, batches and budget. Both bounds are evaluated on the whole training set at
each run's own parameters. Numbers are in units of the standardised target. A pair is called converged if twice the
``--epochs`` change its difference of bounds by less than its standard error or a tenth.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from tighter_gp.training import Step

from . import models, scores
from .data import Split, check_regression, check_sizes, load_split
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session
from .traces import Trace, at_epochs, place

DEFAULTS: dict[str, Any] = {
    "methods": list(models.METHODS),
    "datasets": ["kin40k", "protein", "keggdirected", "keggundirected"],
    "splits": [0, 1, 2],
    "num_inducing": [256],
    "epochs": 60,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE = {"datasets": ["toy"], "splits": [0], "num_inducing": [8], "epochs": 6, "batch_size": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument(
        "--traces", type=int, default=12, metavar="N", help="times to evaluate bound and test scores in training (12)"
    )


def run(args: argparse.Namespace) -> None:
    """Train and evaluate each method on each split."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(models.METHODS))
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    session = Session("uci", args)
    models.warm_up()
    common = settings(args)
    planned = session.plan_splits(args, lambda _: [common])
    for runs in planned:
        if session.all_done(runs):
            continue
        data = load_split(runs[0], args)
        start = models.make_start(data.train_x, runs[0]["num_inducing"], runs[0]["seed"])
        for one in runs:
            session.run(one, partial(train, one, data, start, args.traces))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a command have in common."""
    return {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "recipe": models.RECIPE,
        "dtype": args.dtype,
        "kernel": "matern-3/2 ard",
        "noise_floor": models.NOISE_FLOOR,
    }


def measure(data: Split, bound: str | None, state: Step) -> dict[str, Any]:
    """The test scores in training, and the bound of that name, which takes a pass over the training data."""
    point = place(state)
    if bound is not None:
        point["bound"] = models.regression_bounds(state.model, state.likelihood, data)[bound]
    return {**point, **models.regression_scores(state.model, state.likelihood, data)}


def train(
    run: dict[str, Any], data: Split, start: models.Start, traces: int, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train one method and evaluate it."""
    method, config = run["method"], run["config"]
    bound = models.METHODS[method].bound
    model, likelihood = models.make_regression(method, start)
    trace = Trace(partial(measure, data, bound), at_epochs(config["epochs"], traces))
    history = models.train(run, model, likelihood, data, trace, checkpoint, resume)
    values = models.regression_bounds(model, likelihood, data)
    found = models.regression_scores(model, likelihood, data)
    test_std = float(data.test_y.double().std(correction=0))
    kernel = model.covar_module
    lengthscales = kernel.base_kernel.lengthscale.detach().flatten()
    return {
        "bound": values[bound],
        **values,
        **found,
        "noise": likelihood.noise.item(),
        "outputscale": kernel.outputscale.item(),
        "lengthscales": {
            "min": float(lengthscales.min()),
            "median": float(lengthscales.median()),
            "max": float(lengthscales.max()),
        },
        "num_train": len(data.train_y),
        "num_test": len(data.test_y),
        "num_inputs": data.train_x.size(-1),
        "target_std": data.target_std,
        "test_std": test_std,
        "seconds": round(history.seconds, 3),
        "steps": history.steps,
        "skipped": len(history.skipped),
        "flags": scores.flags_of_scores(found["rmse"], test_std),
        "trace": trace.points,
    }
