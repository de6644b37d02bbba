"""Slope and curvature of a likelihood per point."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood

import tighter_gp
from tighter_gp.likelihoods.properties import expected_log_prob, sampled_curvature
from tighter_gp.likelihoods.slopes import expected_slopes, sampled_log_prob


def normal(n=5):
    return MultivariateNormal(torch.randn(n), torch.diag(0.1 + torch.rand(n)))


def multitask(n=5, tasks=3, correlated=False):
    mean = torch.randn(n, tasks)
    blocks = torch.randn(n, tasks, tasks)
    blocks = blocks @ blocks.mT + 0.1 * torch.eye(tasks)
    if not correlated:
        covar = torch.diag_embed(blocks.diagonal(dim1=-1, dim2=-2).mT)
        return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean.mT, covar)), blocks
    return MultitaskMultivariateNormal(mean, torch.block_diag(*blocks)), blocks


def test_gaussian_noise_has_a_closed_form():
    q, y, noise = normal(), torch.randn(5), torch.rand(5) + 0.1
    slopes = expected_slopes(gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise), y, q)
    torch.testing.assert_close(slopes.slope, (y - q.mean) / noise)
    torch.testing.assert_close(slopes.curvature, 1 / noise)


def test_a_poisson_likelihood_has_the_slopes_of_its_closed_form():
    q, y = normal(), torch.tensor([0.0, 1.0, 2.0, 3.0, 7.0])
    rate = torch.exp(q.mean + q.variance / 2)
    slopes = expected_slopes(tighter_gp.likelihoods.PoissonLikelihood(), y, q)
    torch.testing.assert_close(slopes.slope, y - rate)
    torch.testing.assert_close(slopes.curvature, rate)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("correlated", [False, True])
def test_the_curvature_of_a_softmax_is_that_of_second_derivatives(weights, correlated):
    q, blocks = multitask(correlated=correlated)
    y = torch.tensor([0, 1, 2, 3, 0]) if weights else torch.tensor([0, 1, 2, 1, 0])
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=4 if weights else 3, mixing_weights=weights)
    draws = torch.randn(6, 5, 3)
    slopes = expected_slopes(likelihood, y, q, draws)
    root = torch.linalg.cholesky(blocks) if correlated else torch.diag_embed(blocks.diagonal(dim1=-1, dim2=-2).sqrt())
    samples = q.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)
    matrix = sampled_curvature(likelihood, y, samples, 3)
    expected = matrix if correlated else matrix.diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(slopes.curvature, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correlated", [False, True])
def test_a_recorded_expectation_has_the_value_and_the_slope_of_the_plain_one(correlated):
    q, _ = multitask(correlated=correlated)
    y = torch.tensor([0, 1, 2, 1, 0])
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=3)
    found = []
    for function in (sampled_log_prob, expected_log_prob):
        mean = q.mean.detach().clone().requires_grad_()
        moved = MultitaskMultivariateNormal(mean, q.lazy_covariance_matrix, interleaved=q._interleaved)
        torch.manual_seed(1)
        value = function(likelihood, y, moved)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), [mean, likelihood.mixing_weights])))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


def test_the_slope_in_the_variance_is_half_the_curvature():
    mean, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    variance = (0.2 + torch.rand(4, 3)).requires_grad_()
    q = MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean.mT, torch.diag_embed(variance.mT)))
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    torch.manual_seed(2)
    (slope,) = torch.autograd.grad(sampled_log_prob(likelihood, y, q).sum(), variance)
    torch.manual_seed(2)
    torch.testing.assert_close(slope, -0.5 * expected_slopes(likelihood, y, q).curvature)
    assert (slope <= 0).all()


def test_the_slope_in_a_covariance_between_tasks_is_half_the_curvature():
    mean, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    _, blocks = multitask(4, correlated=True)
    blocks.requires_grad_()
    q = MultitaskMultivariateNormal(mean, torch.block_diag(*blocks))
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    torch.manual_seed(2)
    (slope,) = torch.autograd.grad(sampled_log_prob(likelihood, y, q).sum(), blocks)
    torch.manual_seed(2)
    torch.testing.assert_close(slope, -0.5 * expected_slopes(likelihood, y, q).curvature, rtol=1e-5, atol=1e-6)
    assert (slope.diagonal(dim1=-1, dim2=-2) < 0).all()
