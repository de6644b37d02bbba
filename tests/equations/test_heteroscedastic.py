"""Noise that depends on the input: closed forms against quadrature, a strict bound, and predictions near the truth."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from torch.distributions import Normal

import tighter_gp
from tests.tools import dense
from tighter_gp.likelihoods import HeteroscedasticGaussianLikelihood


def nodes(num: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A product rule for a standard normal: ``K x dim`` and ``K``."""
    x, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(num))
    grids = [torch.stack(torch.meshgrid(*(v for _ in range(dim)), indexing="ij"), -1).reshape(-1, dim) for v in (x, w)]
    return grids[0], (grids[1].prod(-1) / grids[1].prod(-1).sum())


def test_expectation_is_that_of_quadrature():
    mean, variance, y = torch.randn(5, 2), 0.2 + torch.rand(5, 2), torch.randn(5)
    x, w = nodes(40, 2)
    samples = mean + variance.sqrt() * x.unsqueeze(1)  # [K, N, 2]
    likelihood = HeteroscedasticGaussianLikelihood()
    expected = (w.unsqueeze(-1) * likelihood.forward(samples).log_prob(y)).sum(0)
    torch.testing.assert_close(likelihood.expected_log_prob_of_moments(y, mean, variance), expected)


def problem(seed: int, n: int = 3):
    """A model at inputs that its two inducing points do not explain, at random parameters."""
    torch.manual_seed(seed)
    x, y = 3 * torch.rand(n, 1), torch.randn(n)
    model = tighter_gp.models.HeteroscedasticRegression(inducing_points=3 * torch.rand(2, 1))
    q = model.variational_strategy.base_variational_strategy._variational_distribution
    model.variational_strategy.base_variational_strategy.variational_params_initialized.fill_(1)
    q.variational_mean.data.normal_(std=0.5)
    q.chol_variational_covar.data.mul_(0.5)
    model.covar_module.outputscale = 0.3 + torch.rand(2)
    return model, x, y


def test_bound_is_above_the_standard_one_and_below_the_evidence():
    for seed in range(12):
        model, x, y = problem(seed)
        bound = tighter_gp.evaluate_bound(model, model.likelihood, x, y)
        scale, length = model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale.view(2, 1)
        covariances = [dense.matern32(x, x, scale[i].item(), length[i].detach()) for i in range(2)]
        z, w = nodes(14, len(y))
        g = model.mean_module.constant[1] + z @ torch.linalg.cholesky(covariances[1]).T  # [K, N]
        total = covariances[0] + torch.diag_embed(g.exp())
        given_g = torch.distributions.MultivariateNormal(model.mean_module.constant[0].expand(len(y)), total)
        evidence = (w.log() + given_g.log_prob(y)).logsumexp(0)
        standard = tighter_gp.evaluate_bound(model, model.likelihood, x, y, objective=gpytorch.mlls.VariationalELBO)
        assert standard < bound < evidence


def test_scales_are_the_best_of_both_functions_together():
    model, x, y = problem(1, n=20)
    value = tighter_gp.evaluate_bound(model, model.likelihood, x, y)
    base = model.variational_strategy.base_variational_strategy
    p, q = base.project(x), base.whitened()
    explained = (q.root.mT @ p.matrix).square().sum(-2) + base.jitter_val  # [2, N]
    mean = (p.mean + (p.matrix.mT @ q.mean.unsqueeze(-1)).squeeze(-1)).detach()
    logs = torch.zeros_like(p.residual).requires_grad_()
    optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def loss():
        optimizer.zero_grad()
        variance = explained.detach() + logs.exp() * p.residual.detach()
        fit = model.likelihood.expected_log_prob_of_moments(y, mean.mT, variance.mT).sum()
        value = -fit + tighter_gp.maths.bounds.scale_penalty(logs.exp()).sum()
        value.backward()
        return value

    optimizer.step(loss)
    best = (-loss() - base.kl_divergence().sum()).detach()
    torch.testing.assert_close(value, best, rtol=1e-4, atol=0)
    assert value <= best + 1e-8


def test_predictions_are_near_the_truth():
    torch.manual_seed(0)
    x = 6 * torch.rand(1500, 1)
    noise = 0.05 + 0.4 * (x[:, 0] / 6) ** 2
    y = torch.sin(2 * x[:, 0]) + noise * torch.randn(1500)
    train, test = slice(0, 1000), slice(1000, None)
    model = tighter_gp.models.HeteroscedasticRegression(x[train], num_inducing=24)
    tighter_gp.fit(model, model.likelihood, x[train], y[train], steps=100, progress=False)
    found = tighter_gp.predict_y(model, model.likelihood, x[test])
    truth = Normal(torch.sin(2 * x[test, 0]), noise[test]).log_prob(y[test]).mean()
    assert found.log_prob(y[test]).mean() > truth - 0.05
    low, high = found.interval(0.9)
    assert 0.85 < ((low < y[test]) & (y[test] < high)).double().mean() < 0.95
    wide = (high - low)[x[test, 0] > 5].mean() / (high - low)[x[test, 0] < 1].mean()
    assert wide > 4


def test_quantiles_moments_and_draws_against_a_grid():
    """Y = f + e^(g/2) noise: its distribution function by a sum over a fine grid of g."""
    mean, stddev = torch.tensor([[0.3, -1.0], [-2.0, 1.5]]), torch.tensor([[0.5, 0.8], [0.1, 1.5]])
    q = gpytorch.distributions.MultitaskMultivariateNormal(mean, torch.diag_embed(stddev.square().flatten()))
    y = tighter_gp.PredictiveDistribution(tighter_gp.likelihoods.HeteroscedasticGaussianLikelihood(), q)
    t = torch.linspace(-12, 12, 20001)
    weights = torch.softmax(-0.5 * t.square(), 0)
    for n in range(2):
        noise = torch.exp(mean[n, 1] + stddev[n, 1] * t)
        width = (stddev[n, 0].square() + noise).sqrt()
        for p in (0.01, 0.5, 0.95):
            reached = (weights * torch.special.ndtr((y.quantile(p)[n] - mean[n, 0]) / width)).sum()
            assert float(reached) == pytest.approx(p, abs=1e-6)
        assert float(y.variance[n]) == pytest.approx(float(stddev[n, 0] ** 2 + (weights * noise).sum()), rel=1e-6)
        density = (weights * torch.exp(-0.5 * ((1.0 - mean[n, 0]) / width).square()) / width).sum() / (
            2 * torch.pi
        ) ** 0.5
        assert float(y.log_prob(torch.ones(2))[n]) == pytest.approx(float(density.log()), rel=1e-6)
    torch.manual_seed(0)
    draws = y.sample(200_000)
    torch.testing.assert_close(draws.median(0).values, y.quantile(0.5), rtol=0.0, atol=0.02)
