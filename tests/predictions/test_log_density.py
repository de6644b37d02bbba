"""Log predictive densities against dense integration, likelihood by likelihood."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import BlockInterleavedLinearOperator, DenseLinearOperator, DiagLinearOperator
from scipy import integrate, special, stats

import tighter_gp
from tighter_gp import log_density
from tighter_gp.predictions.distribution import distribution_of_y

MEANS, VARIANCES = (-1.3, 0.2, 2.1, 0.0), (0.04, 0.9, 2.5, 9.0)


def by_scipy(density, mean, variance, points=()) -> float:
    """The log of the integral of ``density(f)`` times a normal density, by adaptive quadrature."""
    stddev = math.sqrt(variance)
    inside = [p for p in (mean, *points) if abs(p - mean) < 12 * stddev]
    value, _ = integrate.quad(
        lambda f: density(f) * stats.norm.pdf(f, mean, stddev),
        mean - 12 * stddev,
        mean + 12 * stddev,
        points=inside,
        limit=1000,
        epsabs=1e-14,
        epsrel=1e-10,
    )
    return math.log(value)


def with_(likelihood, **values):
    likelihood.initialize(**values)
    return likelihood


softplus = lambda f: np.logaddexp(0, f)
CASES = {
    "probit": (likelihoods.BernoulliLikelihood, (0.0, 1.0, 1.0, 0.0), lambda y, f: stats.norm.cdf((2 * y - 1) * f)),
    "probit signs": (likelihoods.BernoulliLikelihood, (-1.0, 1.0, 1.0, -1.0), lambda y, f: stats.norm.cdf(y * f)),
    "logit": (
        tighter_gp.likelihoods.BernoulliLogitLikelihood,
        (0.0, 1.0, 0.0, 1.0),
        lambda y, f: special.expit((2 * y - 1) * f),
    ),
    "logit signs": (
        tighter_gp.likelihoods.BernoulliLogitLikelihood,
        (-1.0, 1.0, -1.0, 1.0),
        lambda y, f: special.expit(y * f),
    ),
    "poisson": (
        tighter_gp.likelihoods.PoissonLikelihood,
        (0.0, 3.0, 40.0, 1.0),
        lambda y, f: stats.poisson.pmf(y, np.exp(f)),
    ),
    "softplus poisson": (
        likelihoods.PoissonLikelihood,
        (0.0, 2.0, 7.0, 1.0),
        lambda y, f: stats.poisson.pmf(y, softplus(f)),
    ),
    "laplace": (
        lambda: with_(likelihoods.LaplaceLikelihood(), noise=0.01),
        (-1.0, 4.0, 2.0, 0.5),
        lambda y, f: stats.laplace.pdf(y, f, 0.1),
    ),
    "student": (
        lambda: with_(likelihoods.StudentTLikelihood(), noise=1e-4, deg_free=4.0),
        (-1.0, 4.0, 2.0, 0.5),
        lambda y, f: stats.t.pdf(y, 4.0, f, 0.01),
    ),
    "beta": (
        lambda: with_(likelihoods.BetaLikelihood(), scale=5.0),
        (0.1, 0.6, 0.99, 0.4),
        lambda y, f: stats.beta.pdf(y, 5 * special.expit(f) + 1, 6 - 5 * special.expit(f)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_function_per_point(case):
    make, targets, density = CASES[case]
    likelihood = make()
    if case == "beta":
        f = torch.tensor(0.3)
        ours = likelihood.forward(f)
        assert (ours.concentration1 + ours.concentration0).item() == pytest.approx(7.0)
    q = MultivariateNormal(torch.tensor(MEANS), torch.diag(torch.tensor(VARIANCES)))
    with torch.no_grad():
        found = log_density(likelihood, q, torch.tensor(targets))
    expected = [
        by_scipy(lambda f, y=y: density(y, f), mean, variance, (y,))
        for y, mean, variance in zip(targets, MEANS, VARIANCES, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_negative_binomial_in_both_forms_sums_to_one_over_counts():
    kinds = [likelihoods.NegativeBinomialLikelihood()]
    counts = torch.arange(400.0)
    q = MultivariateNormal(torch.full((400,), 0.4), 0.5 * torch.eye(400))
    for likelihood in kinds:
        with torch.no_grad():
            assert log_density(likelihood, q, counts).exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_fixed_noise_is_counted_once_and_what_was_learned_is_added():
    likelihood = likelihoods.FixedNoiseGaussianLikelihood(torch.ones(9), learn_additional_noise=True)
    likelihood.second_noise = 0.7
    mean, variance, noise, y = torch.randn(4), torch.rand(4), torch.rand(4) + 0.1, torch.randn(4)
    found = log_density(likelihood, MultivariateNormal(mean, torch.diag(variance)), y, noise=noise)
    expected = stats.norm.logpdf(y, mean, (variance + noise + 0.7).sqrt())
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-10)


def correlated(num_points: int, num_tasks: int, interleaved: bool = True, seed: int = 0):
    """q(f) with correlated tasks, its means, and the covariance of each point's tasks."""
    generator = torch.Generator().manual_seed(seed)
    size = num_points * num_tasks
    root = torch.randn(size, size, generator=generator) / math.sqrt(size)
    covariance = root @ root.mT + 0.05 * torch.eye(size)
    mean = torch.randn(num_points, num_tasks, generator=generator)
    q = MultitaskMultivariateNormal(mean, DenseLinearOperator(covariance), interleaved=interleaved)
    blocks = []
    for n in range(num_points):
        rows = [n * num_tasks + t if interleaved else t * num_points + n for t in range(num_tasks)]
        blocks.append(covariance[rows][:, rows])
    return q, mean, blocks


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_gaussian_tasks_are_joint_in_latent_function_and_noise(rank, interleaved):
    q, mean, blocks = correlated(5, 3, interleaved)
    likelihood = likelihoods.MultitaskGaussianLikelihood(num_tasks=3, rank=rank)
    likelihood.noise = 0.3
    if rank:
        factor = likelihood.task_noise_covar_factor.detach()
        noise = factor @ factor.mT + 0.3 * torch.eye(3)
    else:
        likelihood.task_noises = torch.tensor([0.1, 0.4, 0.8])
        noise = torch.diag(likelihood.task_noises.detach()) + 0.3 * torch.eye(3)
    y = torch.randn(5, 3)
    y[1, 2] = y[3, 0] = y[3, 1] = y[4, :] = math.nan
    with torch.no_grad():
        found = log_density(likelihood, q, y)
    expected = []
    for n in range(5):
        seen = ~torch.isnan(y[n])
        if not bool(seen.any()):
            expected.append(math.nan)
            continue
        covariance = (blocks[n] + noise)[seen][:, seen]
        expected.append(stats.multivariate_normal.logpdf(y[n][seen], mean[n][seen], covariance))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_points", [2, 3, 5])
@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_is_never_read_transposed(num_points, mixing):
    """As many points as classes, or not: equal points have equal densities, those of dense integration."""
    likelihood = likelihoods.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=mixing)
    if mixing:
        likelihood.mixing_weights.data = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.5], [0.3, 0.0, 1.0]])
    weights = likelihood.mixing_weights.detach() if mixing else torch.eye(3)
    mean, variance = torch.tensor([1.0, -0.5, 0.2]), torch.tensor([0.5, 1.5, 0.1])
    covariances = torch.stack([value * torch.eye(num_points) for value in variance])
    q = MultitaskMultivariateNormal(
        mean.expand(num_points, 3), BlockInterleavedLinearOperator(DenseLinearOperator(covariances))
    )
    labels = torch.full((num_points,), 1)
    with torch.no_grad():
        found = log_density(likelihood, q, labels)
    # A tensor-product Gauss-Hermite rule.
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(24)
    grid = torch.tensor(np.array(np.meshgrid(nodes, nodes, nodes, indexing="ij")).reshape(3, -1).T)
    product = torch.tensor(np.einsum("i,j,k->ijk", *[node_weights / node_weights.sum()] * 3).reshape(-1))
    f = mean + grid * variance.sqrt()
    expected = (product * torch.softmax(f @ weights.mT, -1)[:, 1]).sum().log()
    assert torch.allclose(found, found[0])
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=2e-3)


def test_the_tasks_of_a_softmax_are_drawn_jointly():
    """Two functions that move together say nothing about their classes, however uncertain they are."""
    covariance = torch.tensor([[9.0, 9.0 - 1e-6], [9.0 - 1e-6, 9.0]])
    q = MultitaskMultivariateNormal(torch.tensor([[2.0, 0.0]]), DenseLinearOperator(covariance))
    likelihood = likelihoods.SoftmaxLikelihood(num_features=2, num_classes=2, mixing_weights=False)
    with torch.no_grad():
        found = log_density(likelihood, q, torch.tensor([0]))
    assert found.item() == pytest.approx(math.log(1 / (1 + math.exp(-2.0))), abs=1e-3)


def test_a_missing_label_counts_nothing():
    for likelihood in (likelihoods.BernoulliLikelihood(), tighter_gp.likelihoods.BernoulliLogitLikelihood()):
        q = MultivariateNormal(torch.tensor([0.5, 1.0, -1.0]), torch.eye(3))
        whole = log_density(likelihood, q, torch.tensor([1.0, 0.0, 1.0]))
        found = log_density(likelihood, q, torch.tensor([1.0, math.nan, 1.0]))
        torch.testing.assert_close(
            found, torch.where(torch.tensor([True, False, True]), whole, math.nan), equal_nan=True
        )


def test_a_likelihood_of_ones_own_is_integrated_or_asked():
    class Cauchy(likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, function_samples, *args, **kwargs):
            return torch.distributions.Cauchy(function_samples, 0.3)

    class Known(Cauchy):
        def log_marginal(self, observations, function_dist, *args, **kwargs):
            return torch.full_like(observations, -7.0)

    q = MultivariateNormal(torch.tensor([0.5, 1.0]), torch.diag(torch.tensor([0.5, 2.0])))
    y = torch.tensor([0.2, 6.0])
    found = log_density(Cauchy(), q, y)
    expected = [
        by_scipy(lambda f, v=value: stats.cauchy.pdf(v, f, 0.3), mean, variance, (value,))
        for value, mean, variance in ((0.2, 0.5, 0.5), (6.0, 1.0, 2.0))
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert log_density(Known(), q, y).tolist() == [-7.0, -7.0]


def test_binary_tasks_that_are_correlated_are_joint():
    covariance = torch.tensor([[4.0, 3.9], [3.9, 4.0]])
    q = MultitaskMultivariateNormal(torch.zeros(1, 2), DenseLinearOperator(covariance))
    likelihood = likelihoods.BernoulliLikelihood()
    found = log_density(likelihood, q, torch.tensor([[1.0, 1.0]]))
    # An orthant probability: probit noise adds one to each variance.
    correlation = 3.9 / 5.0
    assert found.exp().item() == pytest.approx(0.25 + math.asin(correlation) / (2 * math.pi), abs=2e-3)


def test_a_missing_task_of_correlated_ones_is_scored_on_the_others():
    covariance = torch.tensor([[4.0, 3.9], [3.9, 2.0]])
    q = MultitaskMultivariateNormal(torch.tensor([[0.5, 1.0]]), DenseLinearOperator(covariance + torch.eye(2)))
    found = log_density(likelihoods.BernoulliLikelihood(), q, torch.tensor([[1.0, math.nan]]))
    assert found.exp().item() == pytest.approx(stats.norm.cdf(0.5 / math.sqrt(6.0)), abs=2e-3)


class Cubed(likelihoods.likelihood._OneDimensionalLikelihood):
    def forward(self, function_samples, *args, **kwargs):
        return torch.distributions.Normal(function_samples**3, 0.1)


def test_a_function_without_variance_has_the_density_of_its_noise():
    """Or with less than none, by rounding."""
    y, mean = torch.tensor([0.3, -1.2]), torch.tensor([0.1, 0.4])
    for variance in (0.0, -1e-18):
        q = MultivariateNormal(mean, DiagLinearOperator(torch.full((2,), variance)))
        likelihood = likelihoods.LaplaceLikelihood()
        likelihood.noise = 0.25
        expected = stats.laplace.logpdf(y.numpy(), mean.numpy(), 0.5)
        torch.testing.assert_close(log_density(likelihood, q, y), torch.as_tensor(expected), rtol=1e-6, atol=1e-6)
        found = distribution_of_y(Cubed(), q).mean
        torch.testing.assert_close(found, mean**3, rtol=1e-6, atol=1e-9)


def test_densities_are_those_of_float64_to_float32_rounding():
    q = lambda dtype: MultivariateNormal(torch.zeros(3, dtype=dtype), 2 * torch.eye(3, dtype=dtype))
    for likelihood in (tighter_gp.likelihoods.PoissonLikelihood(), gpytorch.likelihoods.GaussianLikelihood()):
        y = torch.tensor([0.0, 1.0, 3.0])
        narrow = log_density(likelihood.float(), q(torch.float32), y.float())
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(
            narrow.double(), log_density(likelihood.double(), q(torch.float64), y), rtol=1e-5, atol=1e-5
        )
