"""Slope and curvature of a likelihood per point."""

from __future__ import annotations

import math

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood

from tighter_gp.likelihoods.expectations import expected_log_prob, expected_slopes, sampled_curvature, sampled_log_prob


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_gaussian_noise_per_task_has_a_closed_form(interleaved):
    mean, y, variance, noise = torch.randn(5, 2), torch.randn(5, 2), 0.1 + torch.rand(5, 2), torch.tensor([0.3, 0.7])
    flat = variance.flatten() if interleaved else variance.mT.flatten()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, has_global_noise=False)
    likelihood.task_noises = noise
    slopes = expected_slopes(
        likelihood, y, MultitaskMultivariateNormal(mean, torch.diag(flat), interleaved=interleaved)
    )
    value = -0.5 * (torch.log(2 * math.pi * noise) + ((y - mean) ** 2 + variance) / noise)
    torch.testing.assert_close(slopes.value, value)
    torch.testing.assert_close(slopes.slope, (y - mean) / noise)
    torch.testing.assert_close(slopes.curvature, (1 / noise).expand(5, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_tasks_that_are_correlated_in_blocks_are_those_of_the_dense_covariance(interleaved):
    dense, blocks = multitask(correlated=True)
    covar = linear_operator.operators.BlockDiagLinearOperator(linear_operator.to_linear_operator(blocks))
    if not interleaved:  # entries ordered by task, a block per point put apart
        covar = linear_operator.operators.BlockInterleavedLinearOperator(linear_operator.to_linear_operator(blocks))
    q = MultitaskMultivariateNormal(dense.mean, covar, interleaved=interleaved)
    likelihood, y = SoftmaxLikelihood(num_classes=3, mixing_weights=False), torch.tensor([0, 1, 2, 0, 1])
    draws = torch.randn(6, 5, 3)
    expected = expected_slopes(likelihood, y, dense, draws=draws)
    for found, wanted in zip(expected_slopes(likelihood, y, q, draws=draws), expected, strict=True):
        torch.testing.assert_close(found, wanted)


class Counts(gpytorch.likelihoods.Likelihood):
    """A likelihood of one function, whose expectations GPyTorch samples."""

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Poisson(function_samples.exp())


class MeanAndNoise(gpytorch.likelihoods.Likelihood):
    """One of two functions is the mean of a normal distribution, the other the logarithm of its variance."""

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Normal(function_samples[..., 0], (0.5 * function_samples[..., 1]).exp())


def test_a_sampled_likelihood_of_one_function_has_the_mean_slope_of_its_samples_and_the_exact_curvature():
    q, y, draws = normal(), torch.tensor([0.0, 1.0, 2.0, 3.0, 7.0]), torch.randn(6, 5)
    slopes = expected_slopes(Counts(), y, q, draws)
    rate = torch.exp(q.mean + q.stddev * draws)
    torch.testing.assert_close(slopes.value, (y * rate.log() - rate - torch.lgamma(y + 1)).mean(0))
    torch.testing.assert_close(slopes.slope, (y - rate).mean(0))
    torch.testing.assert_close(slopes.curvature, torch.exp(q.mean + q.variance / 2), rtol=1e-6, atol=0.0)


class Kinked(gpytorch.likelihoods.Likelihood):
    """A sampled likelihood whose second derivative is zero wherever there is one."""

    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Laplace(function_samples, 0.4)


def test_the_kink_of_a_density_is_part_of_its_curvature():
    q, y = normal(), torch.randn(5)
    slopes = expected_slopes(Kinked(), y, q)
    expected = 2 / 0.4 * torch.distributions.Normal(q.mean, q.stddev).log_prob(y).exp()
    torch.testing.assert_close(slopes.curvature, expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("correlated", [False, True])
def test_a_sampled_likelihood_of_two_functions_has_mean_derivatives_over_its_samples(correlated):
    (q, blocks), y, draws = multitask(tasks=2, correlated=correlated), torch.randn(5), torch.randn(6, 5, 2)
    slopes = expected_slopes(MeanAndNoise(), y, q, draws)
    root = torch.linalg.cholesky(blocks) if correlated else torch.diag_embed(blocks.diagonal(dim1=-1, dim2=-2).sqrt())
    mean, log_noise = (q.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)).unbind(-1)
    scaled, precision = (y - mean) * torch.exp(-log_noise), torch.exp(-log_noise)
    slope = torch.stack([scaled, 0.5 * ((y - mean) * scaled - 1)], -1).mean(0)
    rows = [[precision, scaled], [scaled, 0.5 * (y - mean) * scaled]]
    matrix = torch.stack([torch.stack(row, -1) for row in rows], -2).mean(0)
    torch.testing.assert_close(slopes.slope, slope, rtol=1e-4, atol=1e-5)
    expected = matrix if correlated else matrix.diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(slopes.curvature, expected, rtol=1e-4, atol=1e-5)


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
    matrix = sampled_curvature(likelihood, y, samples)
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
