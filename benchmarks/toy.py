r"""One-dimensional regression data: a toy set made by a formula, or a CSV file.

The toy set needs no download. Its 200 training and 1000 test points are

.. math:: y_n = \sin(2 x_n) + \tfrac12 \cos(3 x_n + 1) + 0.1 \, \epsilon_n, \qquad
          x_n \sim \mathrm{Uniform}(0, 6), \quad \epsilon_n \sim \mathcal N(0, 1),

drawn by ``numpy.random.RandomState(0)``, whose stream NumPy keeps fixed: training inputs, training noise, test inputs,
test noise, in this order. Function and noise were chosen among several so that five inducing points are too few and the
bounds differ visibly; more noise or more inducing points bring them together.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import UserError

SEED = 0
NOISE_STDDEV = 0.1
NUM_TRAIN, NUM_TEST = 200, 1000

MIN_ROWS = 10
MAX_ROWS = 5000  # the exact evidence is a dense Cholesky factorisation


class Data(NamedTuple):
    """A training and a test set in float64: inputs ``N x 1``, targets ``N``.

    :param name: For the results.
    :param held_out: Whether the test set is apart from the training set.
    :param noise: The noise variance the data were made with, if known.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    held_out: bool = True
    noise: float | None = None


def toy_function(x: np.ndarray) -> np.ndarray:
    """The toy set's function without noise."""
    return np.sin(2 * x) + 0.5 * np.cos(3 * x + 1)


def make_toy() -> Data:
    """The toy set; the same on every machine."""
    random = np.random.RandomState(SEED)
    x = random.uniform(0, 6, NUM_TRAIN)
    y = toy_function(x) + NOISE_STDDEV * random.standard_normal(NUM_TRAIN)
    test_x = random.uniform(0, 6, NUM_TEST)
    test_y = toy_function(test_x) + NOISE_STDDEV * random.standard_normal(NUM_TEST)
    column = lambda values: torch.from_numpy(values).unsqueeze(-1)
    return Data("toy", column(x), torch.from_numpy(y), column(test_x), torch.from_numpy(test_y), noise=NOISE_STDDEV**2)


def read_csv(path: Path, test_fraction: float = 0.0, seed: int = 0, standardise: bool = False) -> Data:
    """Read a file of ``input,target`` lines; words in the first line are taken for column names.

    :param test_fraction: Share of the rows to hold out, drawn with ``seed``. With 0 the test set is the training set.
    :param standardise: Shift and scale inputs and targets to mean 0 and variance 1 of the training rows.
    """
    rows = torch.from_numpy(_read_rows(path))
    if not MIN_ROWS <= len(rows) <= MAX_ROWS:
        raise UserError(f"{path}: needs {MIN_ROWS} to {MAX_ROWS} rows; got {len(rows)}.")
    num_test = round(test_fraction * len(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    train = rows[order[num_test:].sort().values]
    test = rows[order[:num_test].sort().values] if num_test else train
    if standardise:
        mean, stddev = train.mean(0), train.std(0)
        if not bool((stddev > 0).all()):
            raise UserError(f"{path}: all inputs or all targets are equal, so they cannot be standardised.")
        train, test = (train - mean) / stddev, (test - mean) / stddev
    return Data(path.stem, train[:, :1], train[:, 1], test[:, :1], test[:, 1], held_out=num_test > 0)


def _read_rows(path: Path) -> np.ndarray:
    """Two columns of numbers; a first line of words is left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        named = bool(lines) and not lines[0].replace(",", "").strip()[:1].lstrip("+-.").isdigit()
        rows = np.loadtxt(lines[named:], delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {str(error).splitlines()[0]}; lines of input,target were wanted."
        ) from error
    if rows.size and (rows.shape[1] != 2 or not np.isfinite(rows).all()):
        raise UserError(f"{path}: two finite numbers per line were wanted, input,target.")
    return rows
