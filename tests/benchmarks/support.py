"""A data set of one's own, and the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.__main__ as command_line

SHARED = Path(os.environ.get("TIGHTER_GP_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (SHARED / "uci" / "wine").is_dir(), reason="needs the data: set TIGHTER_GP_DATA to a folder with uci/wine"
)


def command(*argv) -> int:
    """``python -m benchmarks ...`` in this process; returns the exit code."""
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
