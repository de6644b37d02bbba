"""Is the default recipe of ``fit`` ever worse than simpler ones? Test NLPD after the same seconds, over data sets and splits.

T-SVGP from GPyTorch's own hyperparameters and k-means inducing points, trained by the default recipe for ``--epochs``, and by
Adam and natural gradients with fixed sizes for as many steps as take the same processor time. How long a step takes is
measured on a few steps of each, in turn. The default holds its own where its mean NLPD is at most .01, or two standard
errors of the paired difference, above that of every other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tighter_gp

from . import models, scores
from .data import Split, check_regression, check_sizes, load_split
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session

# What each recipe gives to ``fit`` besides the data, the budget and the seed.
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "adam .01": {"recipe": tighter_gp.Recipe(natural=0, lr=0.01)},
    "adam .05": {"recipe": tighter_gp.Recipe(natural=0, lr=0.05)},
    "adam .1": {"recipe": tighter_gp.Recipe(natural=0, lr=0.1)},
    "natural .1": {"recipe": tighter_gp.Recipe(natural=0.1, lr=0.05)},
}
DEFAULTS: dict[str, Any] = {
    "methods": list(METHODS),
    "datasets": [
        "wine",
        "solar",
        "airfoil",
        "pumadyn32nm",
        "pol",
        "elevators",
        "bike",
        "kin40k",
        "protein",
        "tamielectric",
        "keggdirected",
        "keggundirected",
    ],
    "splits": [0, 1, 2, 3, 4],
    "num_inducing": [256],
    "epochs": 15,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE = {"datasets": ["toy"], "splits": [0, 1], "num_inducing": [8], "epochs": 3, "batch_size": 64}

# A smaller difference of NLPDs does not count.
SLACK = 0.01

_PROBE_STEPS, _PROBES = 8, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Train by each recipe, and print the differences."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(METHODS))
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    session = Session("recipes", args)
    models.warm_up()
    config = {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "dtype": args.dtype,
        "noise_floor": models.NOISE_FLOOR,
    }
    planned = session.plan_splits(args, lambda _: [config])
    results = []
    for runs in planned:
        if session.all_done(runs):
            results += [session.run(one, _never) for one in runs]
            continue
        data = load_split(runs[0], args)
        start = models.make_start(data.train_x, runs[0]["num_inducing"], runs[0]["seed"])
        paces = _paces(args.methods, data, start, args.batch_size)
        for one in runs:
            results.append(session.run(one, partial(_train, one, data, start, paces)))
    print(f"\n{differences(results)}")


def _never(checkpoint: Path, resume: bool) -> dict[str, Any]:
    raise AssertionError("a finished run is not executed")


def _fit(method: str, data: Split, start: models.Start, **options: Any) -> tuple[Any, Any, Any, float]:
    """Model, likelihood and history, and the seconds of the processor that training took."""
    model, likelihood = models.make_regression("t-svgp", start)
    began = time.process_time()
    history = tighter_gp.fit(
        model, likelihood, data.train_x, data.train_y, **METHODS[method], progress=False, **options
    )
    return model, likelihood, history, time.process_time() - began


def _paces(methods: Sequence[str], data: Split, start: models.Start, batch_size: int) -> dict[str, float]:
    """Seconds of the processor per step, the least of several short runs in turn."""
    least = dict.fromkeys(["default", *methods], float("inf"))
    for _ in range(_PROBES):
        for method in least:
            seconds = [_fit(method, data, start, steps=n, batch_size=batch_size)[-1] for n in (1, 1 + _PROBE_STEPS)]
            least[method] = min(least[method], max(seconds[1] - seconds[0], 1e-6) / _PROBE_STEPS)
    return least


def _train(
    run: dict[str, Any], data: Split, start: models.Start, paces: dict[str, float], checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train for as long as the default takes, and score the test set."""
    method, config = run["method"], run["config"]
    steps = config["epochs"] * -(-len(data.train_y) // config["batch_size"])
    steps = max(1, round(steps * paces["default"] / paces[method]))
    model, likelihood, history, seconds = _fit(
        method, data, start, steps=steps, batch_size=config["batch_size"], seed=run["seed"]
    )
    found = models.regression_scores(model, likelihood, data)
    test_std = float(data.test_y.double().std(correction=0))
    return {
        **found,
        "num_train": len(data.train_y),
        "steps": steps,
        "skipped": len(history.skipped),
        "processor_seconds": round(seconds, 3),
        "seconds": round(history.seconds, 3),
        "flags": scores.flags_of_scores(found["rmse"], test_std),
    }


def differences(results: Sequence[dict[str, Any]]) -> str:
    """NLPD of the default recipe less that of each other, mean and standard error, and whether it holds its own."""
    others = [method for method in METHODS if method != "default"]
    rows = []
    for (dataset, number, _), group in scores.grouped(results).items():
        nlpd: dict[str, dict[tuple[int, int], float]] = {method: {} for method in METHODS}
        for one in group:
            nlpd[one["method"]][one["split"], one["seed"]] = one["nlpd"]
        own = nlpd["default"]
        default = scores.mean(own.values())
        if default is None:
            continue
        found = [scores.mean(own[at] - value for at, value in nlpd[other].items() if at in own) for other in others]
        holds = all(one is None or one.value <= max(SLACK, 2 * (one.error or 0.0)) for one in found)
        shown = ["" if one is None else one.show(3, signed=True) for one in found]
        rows.append([dataset, str(number), default.show(3), *shown, "yes" if holds else "no"])
    less = [f"less {other}" for other in others]
    header = ["data", "M", "NLPD of the default", *less, "holds its own"]
    return scores.table(header, rows)
