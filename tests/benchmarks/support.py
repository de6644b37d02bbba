"""What the tests of the experiments share: a command line without a network, a data set of one's own, results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.__main__ as command_line

EXPERIMENTS = ("snelson", "prediction", "uci", "mnist")
SHARED = Path(os.environ.get("TIGHTER_GP_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (SHARED / "uci" / "wine").is_dir(), reason="needs the data: set TIGHTER_GP_DATA to a folder with uci/wine"
)


def refuse(*args, **kwargs):
    raise OSError("no network in tests")


def run_main(monkeypatch, *argv) -> int:
    """``python -m benchmarks ...`` in this process; returns the exit code."""
    monkeypatch.setattr(command_line, "EXPERIMENTS", (*EXPERIMENTS, "report"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, argv)])
    torch.set_default_dtype(torch.float32)  # as outside of the tests
    return command_line.main(list(map(str, argv)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_set(folder: Path, rows: int = 60, inputs: int = 2, name: str = "mine") -> Path:
    """A data set of the user's own in the layout of the others."""
    generator = np.random.RandomState(0)
    x = 5 + 3 * generator.randn(rows, inputs)
    table = np.column_stack([x, np.sin(x[:, 0]) + 0.1 * generator.randn(rows)])
    target = folder / "uci" / name
    target.mkdir(parents=True)
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    np.savetxt(target / "test_mask.csv.gz", np.eye(10)[np.arange(rows) % 10], delimiter=",", fmt="%d")
    return target


SMALL = (
    "uci",
    "--datasets",
    "mine",
    "--splits",
    "0",
    "2",
    "--num-inducing",
    "5",
    "--epochs",
    "6",
    "--batch-size",
    "16",
)


def result(method: str, split: int, bound: float, nlpd: float, rmse: float, **kwargs) -> dict:
    return {
        "experiment": "uci",
        "dataset": "kin40k",
        "split": split,
        "seed": 0,
        "method": method,
        "num_inducing": 64,
        "config": {"epochs": 2},
        "bound": bound,
        "nlpd": nlpd,
        "rmse": rmse,
        "bound_tighter": bound,
        "bound_base": bound - 0.01 * (split + 1),
        "trace": [{"epoch": epoch, "bound": bound - 1 / epoch, "nlpd": nlpd, "rmse": rmse} for epoch in (1, 2)],
        **kwargs,
    }


def results() -> list[dict]:
    base = [(-1.0, 0.5, 0.3), (-1.1, 0.6, 0.31), (-1.2, 0.7, 0.32)]
    gains = [(0.1, -0.05, -0.02), (0.2, -0.001, 0.01), (0.3, 0.03, -0.001)]
    made = []
    for split, (values, gain) in enumerate(zip(base, gains, strict=True)):
        made.append(result("svgp", split, *values))
        made.append(result("t-svgp", split, *(value + change for value, change in zip(values, gain, strict=True))))
    return made
