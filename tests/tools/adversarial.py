"""Sixty-four float32 problems that break sparse GPs: every combination of six ways to be badly conditioned."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import gpytorch
import torch
from torch import Tensor

import tighter_gp
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
        ("unit", "unscaled"), ("short", "long"), ("spread", "coinciding"), (1e-2, 1e-6), (0.1, 1.0), ("rbf", "matern52")
    )
]


class Problem(NamedTuple):
    model: GP
    likelihood: gpytorch.likelihoods.GaussianLikelihood
    x: Tensor
    y: Tensor


def build(
    setting: Setting,
    strategy=tighter_gp.TighterVariationalStrategy,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    jitter_val: float | None = None,
) -> Problem:
    """Data and an untrained model of a setting; the numbers are those of float32 in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(N, D, generator=generator, dtype=torch.float32)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(N, generator=generator, dtype=torch.float32)
    z = x[:M].clone() if setting.points == "spread" else x[torch.arange(M) % 3].clone()
    variance = 1.0
    if setting.targets == "unscaled":
        y, variance = 1e3 * y, 1e6
    base = gpytorch.kernels.RBFKernel() if setting.kernel == "rbf" else gpytorch.kernels.MaternKernel(2.5)
    kernel = gpytorch.kernels.ScaleKernel(base)
    kernel.outputscale = variance
    kernel.base_kernel.lengthscale = 0.3 if setting.lengthscale == "short" else 100.0
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    likelihood.noise = setting.noise
    x, y, z = x.to(dtype), y.to(dtype), z.to(dtype)
    q = gpytorch.variational.CholeskyVariationalDistribution(M)
    model = GP(lambda model: strategy(model, z, q, jitter_val=jitter_val), kernel)
    return Problem(model.to(dtype), likelihood.to(dtype), x, y)


def parameters(problem: Problem) -> dict[str, Tensor]:
    """Every parameter of model and likelihood, by name."""
    modules = {"model": problem.model, "likelihood": problem.likelihood}
    return {f"{key}.{name}": value for key, module in modules.items() for name, value in module.named_parameters()}


def all_finite(problem: Problem) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in parameters(problem).values())
