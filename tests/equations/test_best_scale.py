"""The best scale of each point against bisection, and the gradient of the objective there against finite differences."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools.factories import make_gp


def bisected(log_rate, residual):
    """The root of m (1 + d exp(log_rate + m d / 2)) = 1 by halving."""
    low, high = torch.zeros_like(residual), torch.ones_like(residual)
    for _ in range(200):
        middle = (low + high) / 2
        is_high = middle * (1 + residual * torch.exp(log_rate + middle * residual / 2)) > 1
        low, high = torch.where(is_high, low, middle), torch.where(is_high, middle, high)
    return (low + high) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [-20.0, -5.0, 0.0, 4.0])
def test_a_poisson_rate_at_any_residual(mean, dtype):
    residual = torch.tensor([0.0, 1e-3, 0.5, 5.0, 60.0, 100.0, 400.0, 5000.0], dtype=dtype)
    explained = torch.full_like(residual, 0.1)
    likelihood = tighter_gp.likelihoods.PoissonLikelihood()
    found = likelihood.best_scale(torch.full_like(residual, mean), explained, residual)
    expected = bisected(mean + explained.double() / 2, residual.double())
    torch.testing.assert_close(found.double(), expected, rtol=2e-4 if dtype is torch.float32 else 1e-9, atol=0)


@pytest.mark.parametrize("outputscale", [1.0, 30.0, 130.0])
def test_the_gradient_is_that_of_the_objective(outputscale):
    """The scale is a constant of the gradient, as it is the best: by central differences."""
    torch.manual_seed(0)
    x, y = 6 * torch.rand(12, 1), torch.poisson(torch.ones(12))
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model = make_gp(x[:3], kernel, (torch.zeros(3), 0.1 * torch.eye(3)), jitter_val=1e-6, mean=-3.0)
    mll = tighter_gp.TighterELBO(tighter_gp.likelihoods.PoissonLikelihood(), model, num_data=12)

    def value(scale):
        kernel.outputscale = scale
        return float(mll(model(x), y).detach())

    kernel.outputscale = outputscale
    mll(model(x), y).backward()
    slope = math.exp(-outputscale) * -1 + 1  # d softplus / d raw
    step = 1e-4 * outputscale
    difference = (value(outputscale + step) - value(outputscale - step)) / (2 * step)
    assert float(kernel.raw_outputscale.grad) == pytest.approx(difference * slope, rel=1e-4, abs=1e-8)
