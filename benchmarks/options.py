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

# Flags, and what an experiment must say of each: its value by default, and with --smoke.
_LISTS = {
    "methods": (str, "methods to compare"),
    "datasets": (str, "data sets"),
    "splits": (int, "train/test splits, 0 to 9"),
    "num-inducing": (int, "numbers of inducing points"),
    "seed": (int, "seeds; each is a run"),
}
_NUMBERS = {
    "epochs": (int, "passes over the training data"),
    "batch-size": (int, "points per step"),
    "lr": (float, "learning rate at the start"),
}


def add_arguments(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Add the common flags.

    :param defaults: Value of each flag by default; one that is not in it has no meaning here, and is refused.
    """
    for name, (kind, text) in {**_LISTS, **_NUMBERS}.items():
        value = defaults.get(_key(name))
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        note = "not for this experiment" if value is None else f"default: {shown}"
        count = "+" if name in _LISTS else None
        parser.add_argument(f"--{name}", nargs=count, type=kind, metavar="X", help=f"{text} ({note})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help=f"precision (default: {defaults['dtype']})")
    parser.add_argument(
        "--data-dir", type=Path, help="folder with the data (default: $TIGHTER_GP_DATA, else downloads)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: results)")
    parser.add_argument("--resume", action="store_true", help="skip finished runs, continue an interrupted one")
    parser.add_argument(
        "--quiet-machine",
        action="store_true",
        help="nothing else runs on the machine: the lines say so, tables show seconds",
    )
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
    for name in map(_key, (*_LISTS, *_NUMBERS)):
        given = getattr(args, name, None)
        if given is not None and name not in defaults and (name, given) != ("splits", [0]):
            only = "there is one split, 0" if name == "splits" else "it has no meaning here"
            raise UserError(f"--{name.replace('_', '-')} is not for this experiment: {only}.")
    values = {**defaults, **(smoke if args.smoke else {})}
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    unknown = [method for method in args.methods if method not in methods]
    if unknown:
        raise UserError(f"unknown method {unknown[0]!r}; choose from {', '.join(methods)}.")
    unknown = [] if datasets is None else [name for name in args.datasets if name not in datasets]
    if unknown:
        raise UserError(f"unknown dataset {unknown[0]!r}; choose from {', '.join(datasets or ())}.")
    for name in ("methods", "datasets", "splits", "num_inducing", "seed"):
        given = getattr(args, name, None)
        if given is not None and len(set(given)) != len(given):
            raise UserError(f"--{name.replace('_', '-')} names something twice: {' '.join(map(str, given))}.")
    for name in ("num_inducing", "epochs", "batch_size", "lr"):
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')} must be positive and finite; got {value}.")
    for seed in args.seed:
        if not 0 <= seed < 2**31:
            raise UserError(f"--seed must lie between 0 and 2**31 - 1; got {seed}.")
    args.dtype = DTYPES[args.dtype]
    args.device = _device(args.device)
    return args


def _key(flag: str) -> str:
    return flag.replace("-", "_")


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
