"""Sixty-four float32 problems that break sparse GPs: every combination of six ways to be badly conditioned."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import gpytorch
from torch import Tensor

from tests.tools.factories import GP

N, M, D = 60, 15, 2


class Setting(NamedTuple):
    """One combination. Names of the fields are the ways, the values as they were measured."""

    targets: str  # "unit", or "unscaled": a thousand times larger, with an outputscale of 1e6
    lengthscale: str  # "short", or "long": a hundred times the range of the inputs
    points: str  # "spread" inducing points, or "coinciding": all at three places
    noise: float
    lr: float
    kernel: str

    def __str__(self) -> str:
        return f"{self.targets}-{self.lengthscale}-{self.points}-noise{self.noise:g}-lr{self.lr:g}-{self.kernel}"


SETTINGS = [
    Setting(*values)
    for values in itertools.product(
        ("unit", "unscaled"),
        ("short", "long"),
        ("spread", "coinciding"),
        (1e-2, 1e-6),
        (0.1, 1.0),
        ("rbf", "matern52"),
    )
]


class Problem(NamedTuple):
    model: GP
    likelihood: gpytorch.likelihoods.GaussianLikelihood
    x: Tensor
    y: Tensor
