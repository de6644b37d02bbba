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

from . import models
from .data import Split, check_regression, check_sizes, load_regression
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session

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
    planned = [
        (dataset, split, num_inducing, seed)
        for dataset in args.datasets
        for num_inducing in args.num_inducing
        for split in args.splits
        for seed in args.seed
    ]
    session.plan([describe(args, *point, method) for point in planned for method in args.methods])
    for dataset, split, num_inducing, seed in planned:
        runs = [describe(args, dataset, split, num_inducing, seed, method) for method in args.methods]
        if session.all_done(runs):
            continue
        data = load_regression(dataset, split, data_dir=args.data_dir, dtype=args.dtype, device=args.device)
        start = models.make_start(data.train_x, num_inducing, seed)
        for one in runs:
            session.run(one, partial(train, one, data, start, args.traces))


def describe(
    args: argparse.Namespace, dataset: str, split: int, num_inducing: int, seed: int, method: str
) -> dict[str, Any]:
    """What tells a run from others."""
    return {
        "dataset": dataset,
        "split": split,
        "seed": seed,
        "method": method,
        "num_inducing": num_inducing,
        "config": {
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "recipe": models.RECIPE,
            "dtype": str(args.dtype).removeprefix("torch."),
            "kernel": "matern-3/2 ard",
            "noise_floor": models.NOISE_FLOOR,
        },
    }


class Trace:
    """Records the bound and the test scores a few times in training; its state is part of a checkpoint.

    :param times: How often.
    :param with_bound: Whether to record the bound, which takes a pass over the training data.
    """

    def __init__(self, data: Split, tighter: bool, epochs: int, times: int, with_bound: bool = True) -> None:
        self.data, self.tighter, self.with_bound = data, tighter, with_bound
        self.every = max(1, epochs // times) if times > 0 else 0
        self.points: list[dict[str, Any]] = []

    def __call__(self, state: Step) -> None:
        """Called after every step."""
        if self.every and state.epoch_end and state.epoch % self.every == 0:
            point = {"epoch": state.epoch, "step": state.step, "seconds": round(state.history.seconds, 3)}
            if self.with_bound:
                values = models.regression_bounds(state.model, state.likelihood, self.data)
                point["bound"] = values["bound_tighter" if self.tighter else "bound_base"]
            self.points.append({**point, **models.regression_scores(state.model, state.likelihood, self.data)})

    def state_dict(self) -> dict[str, Any]:
        """What was recorded."""
        return {"points": self.points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.points = state["points"]


def train(
    run: dict[str, Any], data: Split, start: models.Start, traces: int, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train one method and evaluate it."""
    method, config = run["method"], run["config"]
    tighter = models.METHODS[method].tighter
    model, likelihood = models.make_regression(method, start)
    trace = Trace(data, tighter, config["epochs"], traces)
    history = models.train(run, model, likelihood, data, trace, checkpoint, resume)
    values = models.regression_bounds(model, likelihood, data)
    scores = models.regression_scores(model, likelihood, data)
    test_std = float(data.test_y.double().std(correction=0))
    kernel = model.covar_module
    lengthscales = kernel.base_kernel.lengthscale.detach().flatten()
    return {
        "bound": values["bound_tighter" if tighter else "bound_base"],
        **values,
        **scores,
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
        "flags": ["learnt the mean"] if scores["rmse"] >= 0.98 * test_std else [],
        "trace": trace.points,
    }
