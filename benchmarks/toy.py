r"""One-dimensional regression data made by a formula.

Nothing is downloaded. The 200 training and 1000 test points are

.. math:: y_n = \sin(2 x_n) + \tfrac12 \cos(3 x_n + 1) + 0.1 \, \epsilon_n, \qquad
          x_n \sim \mathrm{Uniform}(0, 6), \quad \epsilon_n \sim \mathcal N(0, 1),

drawn by ``numpy.random.RandomState(0)``, whose stream NumPy keeps fixed: training inputs, training noise, test inputs,
test noise, in this order. Function and noise were chosen among several so that five inducing points are too few and the
bounds differ visibly; more noise or more inducing points bring them together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SEED = 0
NOISE_STDDEV = 0.1
NUM_TRAIN, NUM_TEST = 200, 1000


class Data(NamedTuple):
    """A training and a test set in float64: inputs ``N x 1``, targets ``N``.

    :param name: For the results.
    :param noise: The noise variance the data were made with.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    noise: float


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
