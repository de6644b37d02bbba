"""The flags that the experiments share, checked before anything is run."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tighter_gp.training import distributed

from .errors import UserError

DTYPES = {"float32": torch.float32, "float64": torch.float64}

# Lists of values, and single ones. An experiment has those flags for which it has a default.
_LISTS = {
    "methods": (str, "methods to compare"),
    "datasets": (str, "data sets"),
    "splits": (int, "train/test splits, 0 to 9"),
    "num_inducing": (int, "numbers of inducing points"),
    "seed": (int, "seeds; each is a run"),
}
_NUMBERS = {
    "epochs": (int, "passes over the training data"),
    "batch_size": (int, "points per step"),
    "lr": (float, "learning rate at the start"),
}
_POSITIVE = ("num_inducing", "epochs", "batch_size", "lr")


def add_arguments(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Add the common flags.

    :param defaults: Value of each flag by default.
    """
    for name, (kind, text) in {**_LISTS, **_NUMBERS}.items():
        if name in defaults:
            count, flag = "+" if name in _LISTS else None, f"--{name.replace('_', '-')}"
            parser.add_argument(flag, nargs=count, type=kind, metavar="X", help=f"{text} (default: {defaults[name]})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help=f"precision (default: {defaults['dtype']})")
    parser.add_argument("--data-dir", type=Path, help="folder with the data (default: $TIGHTER_GP_DATA, or downloads)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: results)")
    parser.add_argument("--resume", action="store_true", help="skip finished runs, continue an interrupted one")
    parser.add_argument("--quiet-machine", action="store_true", help="nothing else runs here: the lines say so")
    parser.add_argument("--smoke", action="store_true", help="a few seconds on embedded data, to see that all works")


def resolve(
    args: argparse.Namespace,
    defaults: dict[str, Any],
    smoke: dict[str, Any],
    methods: Sequence[str],
    datasets: Iterable[str] | None = None,
) -> argparse.Namespace:
    """Fill in what was not given, and complain about what makes no sense.

    :param smoke: What ``--smoke`` changes in the defaults.
    :param methods: The methods of the experiment.
    :param datasets: Its data sets, if they are few and fixed.
    """
    for name, value in {**defaults, **(smoke if args.smoke else {})}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    for kind, known in {"methods": methods, "datasets": datasets}.items():
        unknown = [name for name in getattr(args, kind) if known is not None and name not in known]
        if unknown:
            raise UserError(f"unknown {kind[:-1]} {unknown[0]!r}; choose from {', '.join(known or ())}.")
    for name in {**_LISTS, **_NUMBERS}:
        given = getattr(args, name, [])
        values = given if isinstance(given, list) else [given]
        if len(set(values)) != len(values):
            raise UserError(f"--{name.replace('_', '-')} names something twice: {' '.join(map(str, values))}.")
        if name in _POSITIVE and not all(0 < value < math.inf for value in values):
            raise UserError(f"--{name.replace('_', '-')} must be positive and finite; got {given}.")
    args.dtype, args.device = DTYPES[args.dtype], _device(args.device)
    return args


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return distributed.start(device)


def writable_folder(path: Path) -> Path:
    """Make a folder for results, or say why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot make this folder ({error.strerror}).") from None
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"--out {path}: cannot write there ({error.strerror}).") from None
    return path
