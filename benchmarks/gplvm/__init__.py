"""Bayesian GPLVM on the oil flow: V-BGPLVM against TV-BGPLVM (the paper's Section 6.5).

Ten latent dimensions with one lengthscale each, 25 and 50 inducing points. Methods that are compared share seed, start,
batches, draws of x, budget and evaluation. By default they train in mini-batches. The GPLVM has many local optima, and
two runs from principal components that differ in anything at all end further apart than the bounds are
(``--warmup-epochs 0`` shows it); so both methods continue from the same warm start, which is trained from principal
components with the *base* bound, for half the epochs that each then trains with its own. Both bounds are
evaluated at each run's own parameters.

A quarter of the entries of the test rows is hidden, the latents of these rows are inferred from the rest, and the hidden
entries predicted. The data are scaled to unit variance, and so are bounds and errors: ``bound_raw`` is the bound in the
data's own units.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..options import add_arguments as add_common
from ..options import resolve
from ..runs import Session, describe
from .rows import DATASETS, Data, load
from .scores import HIDDEN, hidden_entries, separation
from .training import FIRST_NOISE, LATENT_DIM, train_batches

METHODS = ("v-bgplvm", "tv-bgplvm")
DEFAULTS: dict[str, Any] = {
    "methods": list(METHODS),
    "datasets": ["oil"],
    "num_inducing": [25, 50],
    "epochs": 800,
    "batch_size": 500,
    "lr": 0.03,
    "dtype": "float64",
    "seed": [0, 1, 2],
}
OWN_DEFAULTS = {"warmup_epochs": 400}
SMOKE: dict[str, Any] = {
    "datasets": ["phases"],
    "num_inducing": [8],
    "epochs": 8,
    "batch_size": 40,
    "seed": [0],
    "warmup_epochs": 4,
}
WARMUP_LR = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument(
        "--warmup-epochs",
        type=int,
        metavar="X",
        help=f"epochs with the base bound, common to a pair; 0 for none (default: {OWN_DEFAULTS['warmup_epochs']})",
    )


def run(args: argparse.Namespace) -> None:
    """Train and score each method."""
    args = resolve(args, {**DEFAULTS, **OWN_DEFAULTS}, SMOKE, METHODS, DATASETS)
    if args.warmup_epochs < 0:
        raise UserError(f"--warmup-epochs must not be negative; got {args.warmup_epochs}.")
    loaded = {name: load(name, args) for name in args.datasets}
    for name, data in loaded.items():
        if max(args.num_inducing) > len(data.train):
            raise UserError(
                f"{max(args.num_inducing)} inducing points are more than the {len(data.train)} rows of {name}."
            )
    session = Session("gplvm", args)
    planned = [
        describe(*point, settings(args)) for point in product(args.datasets, args.num_inducing, args.seed, args.methods)
    ]
    session.plan(planned)
    if not args.resume:
        for one in planned:
            session.forget(session.shared(one))
    for one in planned:
        session.run(one, partial(train, one, loaded[one["dataset"]], session.shared(one)))
    for one in planned:
        session.forget(session.shared(one))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the runs have in common."""
    return {
        "latent_dim": LATENT_DIM,
        "first_noise": FIRST_NOISE,
        "hidden": HIDDEN,
        "infer_steps": 30 if args.smoke else 100,
        "dtype": args.dtype,
        "warmup_epochs": args.warmup_epochs,
        "warmup_lr": WARMUP_LR,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "lr": args.lr,
    }


def train(run: dict[str, Any], data: Data, warm: Path, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Train one method and score it.

    :param warm: Checkpoint of the common warm start.
    """
    started = time.process_time()
    tighter = run["method"].startswith("t")
    model, outcome = train_batches(run, data, tighter, warm, checkpoint, resume)
    bound = outcome["bound_tighter" if tighter else "bound_base"]
    return {
        "bound": bound,
        "bound_raw": bound - data.stddev.log().sum().item(),
        **outcome,
        **separation(model, data),
        **hidden_entries(model, data, tighter, run["seed"], run["config"]["infer_steps"]),
        "noise": model.likelihood.noise.item(),
        "outputscale": model.covar_module.outputscale.item(),
        "num_train": len(data.train),
        "num_inputs": data.train.size(-1),
        "cpu_seconds": round(time.process_time() - started, 3),
    }
