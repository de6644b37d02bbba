"""Likelihoods of users that override parts of GPyTorch's, Gaussian ones above all, are taken at their word."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from linear_operator.operators import DiagLinearOperator

import tighter_gp
from tighter_gp.likelihoods.expectations import expected_log_prob
from tighter_gp.likelihoods.family import family

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
    """A wider density."""

    is_log_concave = True

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
    noise = {Tempered: torch.full_like(y, 0.2), Growing: GROWING, Doubled: torch.full_like(y, 0.4)}[kind]
    power = 0.5 if kind is Tempered else 1.0
    # The best scale is 1 / (1 + power d / noise).
    misfit = (y - mean).square() + explained
    terms = power * (torch.log(2 * math.pi * noise) + misfit / noise) + torch.log1p(power * residual / noise)
    expected = -0.5 * terms.sum() - kl
    found = tighter_gp.evaluate_bound(model, likelihood, x, y)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=0)


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


# -- densities of their own ----------------------------------------------------------------------------------------------


class Multiplicative(gpytorch.likelihoods.GaussianLikelihood):
    """Noise on the exponential of f."""

    def forward(self, f, *args, exposure=1.0, **kwargs):
        return torch.distributions.Normal(exposure * f.exp(), self.noise.sqrt())

    @staticmethod
    def log_prob(f, y):
        return -0.5 * (np.log(2 * np.pi * 0.2) + (y - np.exp(f)) ** 2 / 0.2)


class CLogLog(gpytorch.likelihoods.BernoulliLikelihood):
    """Labels by the complementary log-log link."""

    def forward(self, f, *args, **kwargs):
        return torch.distributions.Bernoulli(probs=(-torch.expm1(-f.exp())).clamp(1e-300, 1 - 1e-15))

    @staticmethod
    def log_prob(f, y):
        return np.where(y > 0, np.log(-np.expm1(-np.exp(f))), -np.exp(f))


class Threefold(tighter_gp.likelihoods.PoissonLikelihood):
    """Counts at three times the rate."""

    def forward(self, f, *args, **kwargs):
        return torch.distributions.Poisson(3 * f.exp())

    @staticmethod
    def log_prob(f, y):
        factorial = np.array([math.lgamma(count + 1) for count in y])
        return y * (f + np.log(3)) - 3 * np.exp(f) - factorial


TARGETS = {
    Multiplicative: torch.linspace(0.2, 2.0, N, dtype=torch.float64),
    CLogLog: torch.arange(N, dtype=torch.float64) % 2,
    Threefold: torch.arange(N, dtype=torch.float64) % 5,
}


def make(kind):
    likelihood = kind().double()
    if kind is Multiplicative:
        likelihood.noise = 0.2
    return likelihood


def integral(kind, mean, variance, targets):
    """E[log p(y | f)] on a dense grid."""
    grid = np.linspace(-9, 9, 4001)[:, None]
    weights = np.exp(-0.5 * grid**2)
    values = kind.log_prob(mean.numpy() + np.sqrt(variance.numpy()) * grid, targets.numpy())
    return torch.as_tensor((weights * values).sum(0) / weights.sum(0))


def small(model):
    """Means and variances that a rule of twenty nodes is exact for."""
    q = model.variational_strategy._variational_distribution
    with torch.no_grad():
        q.variational_mean.mul_(0.3)
        model.covar_module.outputscale = 0.2
    return model


@pytest.mark.parametrize("kind", [Multiplicative, CLogLog, Threefold])
def test_the_density_that_is_trained_is_that_of_forward(kind, problem):
    model, x, _ = problem
    conditional = tighter_gp.conditionals.ScalarConditional()
    conditional.m = 0.6
    small(model).variational_strategy.conditional = conditional.double()
    with torch.no_grad():
        mean, explained, residual, kl = moments(model, x)
    expected = integral(kind, mean, explained + 0.6 * residual, TARGETS[kind]).sum()
    price = 0.5 * N * (0.6 - 1 - math.log(0.6))
    found = tighter_gp.evaluate_bound(model, make(kind), x, TARGETS[kind])
    torch.testing.assert_close(found, expected - price - kl.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [Multiplicative, CLogLog, Threefold])
@pytest.mark.filterwarnings("ignore:.*not known to be log-concave")
def test_natural_gradients_go_to_the_optimum_of_the_density_of_forward(kind, problem):
    model, x, _ = problem
    small(model)
    likelihood = make(kind)
    for parameter in [*model.parameters(), *likelihood.parameters()]:
        parameter.requires_grad_(False)
    q = model.variational_strategy._variational_distribution.requires_grad_(True)
    tighter_gp.fit(
        model, likelihood, x, TARGETS[kind], steps=60, batch_size=None, recipe=tighter_gp.Recipe(natural=0.5)
    )
    bound = tighter_gp.TighterELBO(likelihood, model.train(), N)(model(x), TARGETS[kind])
    assert max(g.abs().max() for g in torch.autograd.grad(bound, list(q.parameters()))) < 1e-4
    # Fitted to its own density: the mean prediction is near that of the targets.
    predicted = tighter_gp.predict_y(model, likelihood, x).mean.mean()
    assert abs(predicted - TARGETS[kind].mean()) < 0.25 * TARGETS[kind].mean()


class Wide(gpytorch.likelihoods.MultitaskGaussianLikelihood):
    """Tasks with twice the noise and a common density."""

    def forward(self, f, *args, **kwargs):
        return torch.distributions.Independent(torch.distributions.Normal(f, (2 * self.noise).sqrt()), 1)


def test_a_density_of_several_functions_is_sampled():
    likelihood = Wide(num_tasks=3, has_task_noise=False).double()
    likelihood.noise = 0.3
    mean, y = torch.randn(4, 3), torch.randn(4, 3)
    q = gpytorch.distributions.MultitaskMultivariateNormal(mean, DiagLinearOperator(torch.full((12,), 0.5)))
    assert family(likelihood).is_sampled
    with gpytorch.settings.num_likelihood_samples(20000):
        found = expected_log_prob(likelihood, y, q)
    expected = -0.5 * (math.log(2 * math.pi * 0.6) + ((y - mean).square() + 0.5) / 0.6).sum(-1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


class Ruled(gpytorch.likelihoods.Likelihood):
    """A rule for any density: its value at the mean."""

    def expected_log_prob(self, y, q, *args, **kwargs):
        return self.forward(q.mean).log_prob(y)


class RuledNormal(Ruled):
    def forward(self, f, *args, **kwargs):
        return torch.distributions.Normal(f, 1.0)


class Restored(Multiplicative):
    def expected_log_prob(self, y, q, *args, **kwargs):
        return self.forward(q.mean).log_prob(y)


@pytest.mark.parametrize("kind", [RuledNormal, Restored])
def test_an_expectation_of_the_users_own_is_used(kind):
    mean, y, likelihood = torch.randn(5), torch.rand(5), kind().double()
    q = gpytorch.distributions.MultivariateNormal(mean, torch.eye(5))
    torch.testing.assert_close(expected_log_prob(likelihood, y, q), likelihood.forward(mean).log_prob(y))


def test_an_argument_of_the_own_density_reaches_training_and_prediction(problem):
    model, x, _ = problem
    likelihood, exposure = make(Multiplicative), torch.linspace(0.5, 2, N)
    y = tighter_gp.predict_y(model, likelihood, x, exposure=exposure).mean
    torch.testing.assert_close(y, exposure * tighter_gp.predict_y(model, likelihood, x).mean)
    bounds = [tighter_gp.evaluate_bound(model, likelihood, x, y, **given) for given in ({}, {"exposure": exposure})]
    assert bounds[0] != bounds[1]
