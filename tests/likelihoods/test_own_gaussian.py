"""Gaussian likelihoods of users that override parts of GPyTorch's are taken at their word."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from linear_operator.operators import DiagLinearOperator

import tighter_gp

N = 40
GROWING = torch.linspace(0.1, 2.0, N, dtype=torch.float64)


class Tempered(gpytorch.likelihoods.GaussianLikelihood):
    """The root of a density."""

    def expected_log_prob(self, target, q, *args, **kwargs):
        return 0.5 * super().expected_log_prob(target, q, *args, **kwargs)


class Growing(gpytorch.likelihoods.GaussianLikelihood):
    """Noise of its own for each position."""

    def _shaped_noise_covar(self, shape, *args, **kwargs):
        return DiagLinearOperator(GROWING[: shape[-1]].expand(shape))


class Doubled(gpytorch.likelihoods.GaussianLikelihood):
    """Trained as usual, with a wider density of y."""

    def forward(self, f, *args, **kwargs):
        return torch.distributions.Normal(f, (2 * self.noise).sqrt())


@pytest.fixture
def problem():
    torch.manual_seed(0)
    x = torch.rand(N, 2, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(N, dtype=torch.float64)
    model = tighter_gp.models.Regression(inducing_points=x[:6].clone()).double()
    q = model.variational_strategy._variational_distribution
    with torch.no_grad():
        model(x)
        q.variational_mean.copy_(torch.randn(6))
        q.chol_variational_covar.copy_(0.3 * torch.eye(6))
    return model, x, y


def moments(model, x):
    """q(f) and the residual variance, by dense algebra."""
    z, kernel = model.variational_strategy.inducing_points, model.covar_module
    jitter = model.variational_strategy.jitter_val
    factor = torch.linalg.cholesky(kernel(z).to_dense() + jitter * torch.eye(len(z), dtype=z.dtype))
    projection = torch.linalg.solve_triangular(factor, kernel(z, x).to_dense(), upper=False)
    q = model.variational_strategy._variational_distribution
    root = q.chol_variational_covar.tril()
    explained = (root.mT @ projection).square().sum(0) + jitter  # which variances of this package have too
    residual = kernel(x, diag=True) - projection.square().sum(0)
    kl = 0.5 * (root.square().sum() + q.variational_mean.square().sum() - len(z)) - root.diagonal().log().sum()
    return model.mean_module(x) + projection.mT @ q.variational_mean, explained, residual, kl


@pytest.mark.parametrize("kind", [Tempered, Growing, Doubled])
def test_the_bound_is_that_of_its_own_expectation(kind, problem):
    model, x, y = problem
    likelihood = kind().double()
    likelihood.noise = 0.2
    mean, explained, residual, kl = moments(model, x)
    noise = GROWING if kind is Growing else torch.full_like(y, 0.2)
    power = 0.5 if kind is Tempered else 1.0
    # The best scale is 1 / (1 + power d / noise).
    misfit = (y - mean).square() + explained
    terms = power * (torch.log(2 * math.pi * noise) + misfit / noise) + torch.log1p(power * residual / noise)
    expected = -0.5 * terms.sum() - kl
    found = tighter_gp.evaluate_bound(model, likelihood, x, y)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=0)


def test_natural_gradients_go_to_the_optimum_of_its_own_expectation(problem):
    model, x, y = problem
    likelihood = Tempered().double()
    for parameter in [*model.parameters(), *likelihood.parameters()]:
        parameter.requires_grad_(False)
    q = model.variational_strategy._variational_distribution.requires_grad_(True)
    objective = gpytorch.mlls.VariationalELBO
    tighter_gp.fit(model, likelihood, x, y, steps=30, batch_size=None, objective=objective)
    bound = objective(likelihood, model.train(), N)(model(x), y)
    assert max(g.abs().max() for g in torch.autograd.grad(bound, list(q.parameters()))) < 1e-6


@pytest.mark.parametrize("kind", [Tempered, Growing, Doubled])
def test_predictions_are_as_the_likelihood_has_them(kind, problem):
    model, x, _ = problem
    likelihood = kind().double()
    likelihood.noise = 0.2
    found = tighter_gp.predict_y(model, likelihood, x)
    mean, explained, residual, _ = moments(model, x)
    noise = {Tempered: 0.2, Growing: GROWING, Doubled: 0.4}[kind]
    torch.testing.assert_close(found.mean, mean.detach(), rtol=1e-6, atol=1e-8)
    expected = explained + residual + noise
    torch.testing.assert_close(found.variance, expected.detach(), rtol=1e-5, atol=1e-6)


def test_closed_forms_for_gaussian_noise_refuse_another_expectation(problem):
    model, x, y = problem
    with pytest.raises(TypeError, match="set_optimal_q needs a Gaussian likelihood; got Tempered"):
        tighter_gp.set_optimal_q(model, Tempered().double(), x, y)
