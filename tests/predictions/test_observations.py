"""Predictions of y against dense integrals in numpy and scipy that share no code with the package."""

from __future__ import annotations

import math
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import special, stats

import tighter_gp
from tests.strategies.test_deep_gp import two_layers
from tests.strategies.test_wrappers import make_model
from tests.tools.factories import make_gp, make_noise
from tests.tools.support import LargestOutput, randomize_q
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tighter_gp.predictions import distribution
from tighter_gp.predictions.distribution import PredictiveDistribution, distribution_of_y
from tighter_gp.predictions.marginals import LaplaceMarginal, StudentTMarginal
from tighter_gp.predictions.pointwise import FunctionValues

MEAN = np.array([0.3, -1.2, 1.7, 0.0, 2.5])
VARIANCE = np.array([0.5, 1.3, 0.04, 2.0, 1e-4])
GRID = np.linspace(-14, 14, 200_001)
WEIGHT = stats.norm.pdf(GRID) * (GRID[1] - GRID[0])


def q_of(mean=MEAN, variance=VARIANCE) -> MultivariateNormal:
    return MultivariateNormal(torch.as_tensor(mean), DiagLinearOperator(torch.as_tensor(variance)))


def close(actual, expected, rtol=1e-8, atol=1e-10):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)


def integrate(function):
    """E[function(f)] at each of the five points."""
    return np.array([(WEIGHT * function(m + math.sqrt(v) * GRID)).sum() for m, v in zip(MEAN, VARIANCE, strict=True)])


def softplus(f):
    return np.logaddexp(0, f)


def student_t():
    likelihood = likelihoods.StudentTLikelihood()
    likelihood.deg_free, likelihood.noise = 3.5, 0.2
    return likelihood


def laplace():
    likelihood = likelihoods.LaplaceLikelihood()
    likelihood.noise = 0.3
    return likelihood


def beta():
    likelihood = likelihoods.BetaLikelihood()
    likelihood.scale = 6.0
    return likelihood


def negative_binomial(num_failures_param=False):
    likelihood = likelihoods.NegativeBinomialLikelihood(num_failures_param=num_failures_param)
    likelihood.probs = 0.6
    return likelihood


# name: likelihood, p(y|f) in scipy, targets
CONTINUOUS = {
    "gaussian": (lambda: make_noise(0.3), lambda f: stats.norm(f, math.sqrt(0.3)), [0.1, -2.0, 1.5, 6.0, 2.4]),
    "student-t": (student_t, lambda f: stats.t(3.5, f, math.sqrt(0.2)), [0.1, -3.0, 1.5, 9.0, 2.4]),
    "laplace": (laplace, lambda f: stats.laplace(f, math.sqrt(0.3)), [0.1, -3.0, 1.5, 9.0, 2.4]),
    "beta": (
        beta,
        lambda f: stats.beta(1 + 6 * special.expit(f), 1 + 6 - 6 * special.expit(f)),
        [0.5, 0.01, 0.93, 0.6, 0.8],
    ),
}
COUNTS = {
    "poisson-exp": (PoissonLikelihood, lambda f: stats.poisson(np.exp(f)), [0, 3, 5, 11, 12]),
    "poisson-softplus": (likelihoods.PoissonLikelihood, lambda f: stats.poisson(softplus(f)), [0, 3, 1, 8, 2]),
    "negative-binomial": (
        negative_binomial,
        lambda f: stats.nbinom(softplus(f) * 0.4 / 0.6, 0.4),
        [0, 3, 1, 8, 2],
    ),
    "negative-binomial-failures": (
        lambda: negative_binomial(True),
        lambda f: stats.nbinom(softplus(f), 0.4),
        [0, 3, 1, 8, 2],
    ),
}
ALL = {**CONTINUOUS, **COUNTS}


@pytest.mark.parametrize("name", ALL)
def test_moments_are_those_of_the_dense_integral(name):
    make, conditional, _ = ALL[name]
    y = distribution_of_y(make(), q_of())
    mean = integrate(lambda f: conditional(f).mean())
    close(y.mean, mean)
    close(y.variance, [*integrate(lambda f: conditional(f).var() + conditional(f).mean() ** 2)] - mean**2, rtol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_log_density_is_the_logarithm_of_the_dense_integral(name):
    make, conditional, targets = ALL[name]
    density = lambda f, value: getattr(conditional(f), "pmf" if name in COUNTS else "pdf")(value)
    expected = [
        np.log((WEIGHT * density(m + math.sqrt(v) * GRID, value)).sum())
        for m, v, value in zip(MEAN, VARIANCE, targets, strict=True)
    ]
    close(tighter_gp.log_density(make(), q_of(), torch.tensor(targets)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("p", [0.001, 0.025, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ALL)
def test_quantile_is_where_the_dense_distribution_function_reaches_p(name, p):
    make, conditional, _ = ALL[name]
    quantile = distribution_of_y(make(), q_of()).quantile(p)
    below = lambda values: np.array(
        [
            (WEIGHT * conditional(m + math.sqrt(v) * GRID).cdf(value)).sum()
            for m, v, value in zip(MEAN, VARIANCE, np.asarray(values), strict=True)
        ]
    )
    if name in COUNTS:
        assert (below(quantile) >= p - 1e-9).all()
        assert (below(quantile - 1) < p).all()
    else:
        close(below(quantile), p, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("likelihood", "link"),
    [(likelihoods.BernoulliLikelihood, special.ndtr), (BernoulliLogitLikelihood, special.expit)],
    ids=["probit", "logit"],
)
def test_two_classes(likelihood, link):
    y = distribution_of_y(likelihood(), q_of())
    probs = integrate(link)
    close(y.probs, probs)
    close(y.mean, probs)
    close(y.variance, probs * (1 - probs))
    labels = torch.tensor([0, 1, 0, 1, 0])
    expected = np.where(labels == 1, np.log(probs), np.log(integrate(lambda f: link(-f))))
    close(y.log_prob(labels), expected)
    close(y.log_prob(2 * labels - 1), expected)  # labels -1 and 1
    with pytest.raises(TypeError, match="classes, which have no quantiles"):
        y.interval()
    with pytest.raises(ValueError, match=r"0 and 1, or -1 and 1; got values from 1 to 2"):
        y.log_prob(labels + 1)


def test_improbable_label_has_its_logarithm():
    """Far in the tail the probability underflows or rounds to one; its logarithm does not."""
    q = q_of([30.0, -200.0], [1.0, 4.0])
    actual = tighter_gp.log_density(BernoulliLogitLikelihood(), q, torch.tensor([0, 1]))
    close(actual, [-30 + 0.5, -200 + 2.0], rtol=1e-9)  # E[exp(-f)] for f far from zero
    actual = tighter_gp.log_density(likelihoods.BernoulliLikelihood(), q, torch.tensor([0, 1]))
    close(actual, special.log_ndtr(np.array([-30.0, -200.0]) / np.sqrt([2.0, 5.0])))


@pytest.mark.parametrize("noise", [1e-8, 1e-4, 1.0, 1e4])
def test_noise_much_smaller_or_larger_than_the_variance_of_f(noise):
    """Where a fixed rule of quadrature misses the peak: the Gaussian answer is the limit of many degrees of freedom."""
    likelihood = student_t()
    likelihood.deg_free, likelihood.noise = 1e7, noise
    targets = torch.tensor([0.2, -1.0, 1.9, -3.0, 2.5])
    expected = stats.norm(MEAN, np.sqrt(VARIANCE + noise)).logpdf(targets)
    close(tighter_gp.log_density(likelihood, q_of(), targets), expected, rtol=1e-4, atol=1e-4)
    quantile = distribution_of_y(likelihood, q_of()).quantile(0.9)
    close(quantile, stats.norm(MEAN, np.sqrt(VARIANCE + noise)).ppf(0.9), rtol=1e-4, atol=1e-6)


def test_large_counts():
    """p(y|f) is a hundred times narrower than q(f)."""
    mean, stddev, count = 9.0, 1.0, 12_345
    f = np.linspace(mean - 12, mean + 12, 4_000_001)
    weight = stats.norm(mean, stddev).pdf(f) * (f[1] - f[0])
    y = distribution_of_y(PoissonLikelihood(), q_of([mean], [stddev**2]))
    close(y.log_prob(torch.tensor([count])), np.log((weight * stats.poisson(np.exp(f)).pmf(count)).sum()), rtol=1e-8)
    quantile = int(y.quantile(0.975))
    below = lambda k: (weight * stats.poisson(np.exp(f)).cdf(k)).sum()
    assert below(quantile - 2) < 0.975 <= below(quantile + 2)


# ---------------------------------------------------------------------------------------------------------------------
# Gaussian noise of every kind
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [False, True])
def test_fixed_noise_is_that_of_the_test_points_and_the_learned_part_is_added_once(learned):
    likelihood = likelihoods.FixedNoiseGaussianLikelihood(torch.rand(50) + 0.1, learn_additional_noise=learned)
    if learned:
        likelihood.second_noise = 0.7
    noise = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    y = distribution_of_y(likelihood, q_of(), noise=noise)
    variance = VARIANCE + noise.numpy() + 0.7 * learned
    close(y.variance, variance)
    close(y.log_prob(torch.zeros(5)), stats.norm(MEAN, np.sqrt(variance)).logpdf(0.0))
    with pytest.raises(ValueError, match="pass noise="):
        distribution_of_y(likelihood, q_of())
    with pytest.raises(ValueError, match="one value per point, 5"):
        distribution_of_y(likelihood, q_of(), noise=noise[:3])


def test_missing_targets_give_nan_and_leave_the_others_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        missing = likelihoods.GaussianLikelihoodWithMissingObs()
    for likelihood in (missing, make_noise(0.5), BernoulliLogitLikelihood(), PoissonLikelihood(), beta()):
        targets = torch.full((5,), 0.5) if isinstance(likelihood, likelihoods.BetaLikelihood) else torch.ones(5)
        whole = tighter_gp.log_density(likelihood, q_of(), targets)
        targets[1] = torch.nan
        part = tighter_gp.log_density(likelihood, q_of(), targets)
        assert torch.isnan(part[1])
        close(part[[0, 2, 3, 4]], whole[[0, 2, 3, 4]])
        assert torch.isnan(tighter_gp.log_density(likelihood, q_of(), torch.full((5,), torch.nan))).all()


def test_hadamard_noise_is_that_of_the_task():
    likelihood = likelihoods.HadamardGaussianLikelihood(num_tasks=2, task_feature_index=1)
    likelihood.noise = torch.tensor([0.1, 0.9])
    tasks = torch.tensor([0, 1, 1, 0, 1])
    y = distribution_of_y(likelihood, q_of(), tasks=tasks)
    close(y.variance, VARIANCE + np.where(tasks == 1, 0.9, 0.1))
    inputs = torch.stack([torch.randn(5), tasks.double()], -1)
    close(distribution_of_y(likelihood, q_of(), inputs=inputs).variance, y.variance)
    with pytest.raises(ValueError, match="pass tasks="):
        distribution_of_y(likelihood, q_of())


@pytest.mark.parametrize("noise", [0.3, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])])
def test_noise_takes_the_place_of_the_likelihoods_own(noise):
    y = distribution_of_y(make_noise(0.9), q_of(), noise=noise)
    close(y.variance, VARIANCE + np.asarray(noise))
    with pytest.raises(ValueError, match="one value per point, 5; got"):
        distribution_of_y(make_noise(0.9), q_of(), noise=torch.ones(4))


def test_noise_that_depends_on_the_inputs():
    class NoiseModel(torch.nn.Module):
        def forward(self, x):
            return MultivariateNormal(x[:, 0], torch.eye(len(x)))

    covar = likelihoods.HeteroskedasticNoise(NoiseModel(), noise_constraint=gpytorch.constraints.Positive())
    likelihood = likelihoods._GaussianLikelihoodBase(covar)
    x = torch.linspace(-1, 1, 5).unsqueeze(-1)
    y = distribution_of_y(likelihood, q_of(), inputs=x)
    close(y.variance, VARIANCE + softplus(x[:, 0].numpy()))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tasks_of_a_point_are_scored_together(rank, interleaved):
    num_points, num_tasks = 4, 3
    likelihood = likelihoods.MultitaskGaussianLikelihood(num_tasks, rank=rank)
    root = torch.randn(num_points * num_tasks, num_points * num_tasks)
    covariance = root @ root.mT + torch.eye(len(root))
    mean = torch.randn(num_points, num_tasks)
    q = MultitaskMultivariateNormal(mean, covariance, interleaved=interleaved)
    noise = torch.diag(likelihood.task_noises) if rank == 0 else likelihood.task_noise_covar
    noise = (noise + likelihood.noise * torch.eye(num_tasks)).detach().numpy()
    targets = torch.randn(num_points, num_tasks)
    targets[1, 2] = targets[2, :2] = targets[3] = torch.nan
    y = distribution_of_y(likelihood, q)
    for point, value in enumerate(y.log_prob(targets)):
        places = [point * num_tasks + t if interleaved else point + t * num_points for t in range(num_tasks)]
        block = covariance[places][:, places].numpy() + noise
        close(y.covariance[point], block)
        close(y.quantile(0.9)[point], stats.norm(mean[point], np.sqrt(np.diag(block))).ppf(0.9))
        seen = ~np.isnan(targets[point].numpy())
        if not seen.any():
            assert torch.isnan(value)
            continue
        density = stats.multivariate_normal(mean[point][seen].numpy(), block[np.ix_(seen, seen)])
        close(value, density.logpdf(targets[point][seen].numpy()))


# ---------------------------------------------------------------------------------------------------------------------
# Softmax
# ---------------------------------------------------------------------------------------------------------------------


def two_functions(likelihood, num_points):
    """q(f) of correlated functions, and the class probabilities by a dense integral over both."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(num_points, 2, generator=generator)
    root = torch.randn(num_points, 2, 2, generator=generator)
    blocks = root @ root.mT + 0.1 * torch.eye(2)
    line = np.linspace(-7, 7, 281)
    z = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    weight = stats.norm.pdf(z).prod(-1) * (line[1] - line[0]) ** 2
    weights = np.eye(2) if likelihood.mixing_weights is None else likelihood.mixing_weights.detach().numpy()
    probs = [
        weight @ special.softmax((m.numpy() + z @ torch.linalg.cholesky(b).numpy().T) @ weights.T, -1)
        for m, b in zip(mean, blocks, strict=True)
    ]
    return MultitaskMultivariateNormal(mean, torch.block_diag(*blocks)), np.array(probs)


@pytest.mark.parametrize("num_points", [1, 2, 3, 7])
@pytest.mark.parametrize("mixing", [False, True])
def test_softmax_of_correlated_functions(mixing, num_points):
    """Also with as many points as functions, which GPyTorch reads transposed."""
    num_classes = 4 if mixing else 2
    likelihood = likelihoods.SoftmaxLikelihood(num_features=2, num_classes=num_classes, mixing_weights=mixing)
    if mixing:
        likelihood.mixing_weights.data.mul_(3)
    q, probs = two_functions(likelihood, num_points)
    y = distribution_of_y(likelihood, q)
    close(y.probs, probs, atol=2e-5)
    close(y.variance, probs * (1 - probs), atol=2e-5)
    labels = torch.arange(num_points) % num_classes
    close(y.log_prob(labels), np.log(probs[np.arange(num_points), labels.numpy()]), atol=2e-4)
    with pytest.raises(TypeError, match="classes, which have no quantiles"):
        y.quantile(0.5)
    with pytest.raises(ValueError, match=f"integers from 0 to {num_classes - 1}"):
        y.log_prob(labels + num_classes)


def test_softmax_of_many_functions_is_close_to_a_million_draws():
    num_points, num_classes = 6, 5
    likelihood = likelihoods.SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False)
    mean, variance = torch.randn(num_classes, num_points), torch.rand(num_classes, num_points) * 3
    q = MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, DiagLinearOperator(variance)))
    y = distribution_of_y(likelihood, q)
    draws = mean.T + variance.T.sqrt() * torch.randn(400_000, num_points, num_classes)
    expected = torch.softmax(draws, -1).mean(0)
    close(y.probs, expected, rtol=0, atol=3e-3)
    again = distribution_of_y(likelihood, q)
    assert torch.equal(again.probs, y.probs)


def test_dirichlet_predicts_classes():
    labels = torch.tensor([0, 1, 2, 1, 0])
    likelihood = likelihoods.DirichletClassificationLikelihood(labels, dtype=torch.float64)
    mean, variance = torch.randn(3, 5), torch.rand(3, 5)
    y = distribution_of_y(likelihood, MultivariateNormal(mean, DiagLinearOperator(variance)))
    draws = mean.T + variance.T.sqrt() * torch.randn(200_000, 5, 3)
    close(y.probs, torch.softmax(draws, -1).mean(0), rtol=0, atol=3e-3)
    assert y.log_prob(labels).shape == (5,)


# ---------------------------------------------------------------------------------------------------------------------
# Likelihoods of one's own
# ---------------------------------------------------------------------------------------------------------------------


class Exponential(likelihoods.likelihood._OneDimensionalLikelihood):
    def forward(self, function_samples, exposure=None, **kwargs):
        rate = torch.exp(-function_samples)
        return torch.distributions.Exponential(rate if exposure is None else rate / exposure)


class Gumbel(likelihoods.likelihood._OneDimensionalLikelihood):
    """Without a distribution function."""

    def forward(self, function_samples, **kwargs):
        class NoCdf(torch.distributions.Gumbel):
            cdf = torch.distributions.Distribution.cdf

        return NoCdf(function_samples, torch.tensor(0.5))


class Heteroscedastic(likelihoods.Likelihood):
    """Mean and noise, a function each."""

    def forward(self, function_samples, **kwargs):
        return torch.distributions.Normal(function_samples[..., 0], function_samples[..., 1].exp())


def test_own_likelihood_with_an_argument_per_point():
    exposure = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    y = distribution_of_y(Exponential(), q_of(), batch_size=2, exposure=exposure)
    close(y.mean, exposure.numpy() * np.exp(MEAN + VARIANCE / 2))
    below = [
        (WEIGHT * stats.expon(scale=e * np.exp(m + math.sqrt(v) * GRID)).cdf(value)).sum()
        for m, v, e, value in zip(MEAN, VARIANCE, exposure.numpy(), y.quantile(0.3).numpy(), strict=True)
    ]
    close(below, 0.3, rtol=1e-6)
    with pytest.raises(ValueError, match="must lie in"):
        y.log_prob(-torch.ones(5))


class Trials(likelihoods.Likelihood):
    """Counts of successes among as many trials as each point has."""

    def forward(self, function_samples, trials=None, **kwargs):
        return torch.distributions.Binomial(trials, logits=function_samples)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_each_point_has_the_support_of_its_own_arguments(batch_size):
    trials = torch.tensor([1.0, 9.0, 4.0, 2.0, 7.0])
    y = distribution_of_y(Trials(), q_of(), batch_size=batch_size, trials=trials)
    counts = torch.tensor([1.0, 9.0, 3.0, 0.0, 6.0])
    probs = 1 / (1 + np.exp(-(MEAN[:, None] + np.sqrt(VARIANCE)[:, None] * GRID)))
    wanted = [
        np.log((WEIGHT * stats.binom(n, p).pmf(count)).sum())
        for n, p, count in zip(trials.numpy(), probs, counts.numpy(), strict=True)
    ]
    close(y.log_prob(counts), wanted, rtol=1e-6)
    missing = torch.where(torch.arange(5) == 1, torch.nan, counts)
    close(y.log_prob(missing), np.where(np.arange(5) == 1, np.nan, wanted), rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"Trials must lie in the support of p\(y\|f\) at their point; got values from 3 to 3"
    ):
        y.log_prob(torch.tensor([1.0, 9.0, 3.0, 3.0, 6.0]))


def test_own_likelihood_without_a_distribution_function_is_sampled():
    y = distribution_of_y(Gumbel(), q_of(), num_samples=20_000)
    draws = MEAN + np.sqrt(VARIANCE) * np.random.default_rng(0).standard_normal((100_000, 5))
    draws = draws + np.random.default_rng(1).gumbel(0, 0.5, draws.shape)
    close(y.quantile(0.8), np.quantile(draws, 0.8, axis=0), rtol=0, atol=0.05)
    before = torch.get_rng_state()
    assert torch.equal(y.quantile(0.8), y.quantile(0.8))
    assert (y.quantile(0.81) >= y.quantile(0.8)).all()
    assert torch.equal(torch.get_rng_state(), before)
    other = distribution_of_y(Gumbel(), q_of(), num_samples=20_000, seed=1)
    assert not torch.equal(y.quantile(0.8), other.quantile(0.8))


OWN = {
    # p(y | f) by torch, its distribution function by scipy, whether y is a count, error of a probability
    "falling": (
        lambda f: torch.distributions.Normal(-3 * f, torch.tensor(0.05)),
        lambda f, y: stats.norm(-3 * f, 0.05).cdf(y),
        False,
        2e-4,
    ),
    "not monotone": (
        lambda f: torch.distributions.Normal(f.square(), torch.tensor(0.05)),
        lambda f, y: stats.norm(f**2, 0.05).cdf(y),
        False,
        4e-3,
    ),
    "falling counts": (
        lambda f: torch.distributions.Poisson(1000 * torch.exp(-f)),
        lambda f, y: stats.poisson(1000 * np.exp(-f)).cdf(y),
        True,
        2e-4,
    ),
    "geometric": (
        lambda f: torch.distributions.Geometric(torch.sigmoid(f)),
        lambda f, y: stats.geom(special.expit(f), loc=-1).cdf(y),
        True,
        2e-4,
    ),
    "binomial": (
        lambda f: torch.distributions.Binomial(20, torch.sigmoid(f)),
        lambda f, y: stats.binom(20, special.expit(f)).cdf(y),
        True,
        2e-4,
    ),
    "student-t": (
        lambda f: torch.distributions.StudentT(torch.full_like(f, 3.0), f, torch.tensor(0.5)),
        lambda f, y: stats.t(3.0, f, 0.5).cdf(y),
        False,
        2e-4,
    ),
}


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("name", OWN)
def test_quantiles_of_own_likelihoods(name, p):
    make, below, is_count, tolerance = OWN[name]

    class Own(likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, function_samples, **kwargs):
            return make(function_samples)

    grid = GRID[::20]
    weight = stats.norm.pdf(grid) * (grid[1] - grid[0])
    quantile = distribution_of_y(Own(), q_of()).quantile(p).numpy()
    for mean, variance, value in zip(MEAN, VARIANCE, quantile, strict=True):
        f = mean + math.sqrt(variance) * grid
        reached = (weight * below(f, value)).sum()
        if is_count:
            assert value == round(value)
            assert (weight * below(f, value - 1)).sum() - tolerance < p <= reached + tolerance
        else:
            assert abs(reached - p) < tolerance


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_density_where_a_link_function_underflows(mean, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # which Pyro turns off

    class Rate(likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, function_samples, **kwargs):
            return torch.distributions.Exponential(function_samples.exp())

    q = q_of(np.full(3, mean), np.array([4.0, 9.0, 25.0]))
    targets = np.array([0.3, 1.0, 20.0])
    found = tighter_gp.log_density(Rate(), q, torch.as_tensor(targets))
    for variance, y, value in zip((4.0, 9.0, 25.0), targets, found, strict=True):
        f = mean + math.sqrt(variance) * GRID
        close(value, special.logsumexp(np.log(WEIGHT) + f - np.exp(f) * y), rtol=1e-7)
    assert torch.distributions.Distribution._validate_args  # torch looks at parameters as before


def test_own_likelihood_of_two_functions():
    num_points = 4
    mean, variance = torch.randn(2, num_points), torch.rand(2, num_points)
    q = MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, DiagLinearOperator(variance)))
    y = distribution_of_y(Heteroscedastic(), q)
    targets = torch.randn(num_points)
    g = GRID[::100]
    weight = stats.norm.pdf(g) * (g[1] - g[0])
    for point in range(num_points):
        noise = np.exp(2 * (mean[1, point].item() + variance[1, point].sqrt().item() * g))
        total = variance[0, point].item() + noise
        density = (weight * stats.norm(mean[0, point].item(), np.sqrt(total)).pdf(targets[point].item())).sum()
        close(y.log_prob(targets)[point], np.log(density), atol=1e-2)
        close(y.variance[point], (weight * total).sum(), rtol=1e-5)
        below = (weight * stats.norm(mean[0, point].item(), np.sqrt(total)).cdf(y.quantile(0.9)[point].item())).sum()
        close(below, 0.9, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Samples, shapes, states
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_samples_have_the_moments(name):
    y = distribution_of_y(ALL[name][0](), q_of())
    draws = y.sample(40_000)
    assert draws.shape == (40_000, 5)
    error = (draws.mean(0) - y.mean).abs() / (y.stddev / math.sqrt(40_000))
    assert error.max() < 4.5


def test_answer_does_not_change_when_the_likelihood_does():
    likelihood = student_t()
    y = distribution_of_y(likelihood, q_of())
    likelihood.noise = 5.0
    close(y.variance, VARIANCE + 0.2 * 3.5 / 1.5)


def test_targets_of_another_shape_are_refused():
    y = distribution_of_y(make_noise(0.1), q_of())
    with pytest.raises(ValueError, match=r"shape \(5,\); got \(5, 1\). Squeeze"):
        y.log_prob(torch.zeros(5, 1))
    with pytest.raises(ValueError, match="both excluded; got 95"):
        y.quantile(95)
    with pytest.raises(TypeError, match="no probs"):
        _ = y.probs
    with pytest.raises(TypeError, match="several tasks"):
        _ = y.covariance
    assert "FixedNoise" not in repr(y)


def test_likelihood_list_is_refused():
    with pytest.raises(TypeError, match="LikelihoodList"):
        distribution_of_y(likelihoods.LikelihoodList(make_noise(0.1)), q_of())


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def regression_model(num_dims=2):
    z = torch.randn(6, num_dims)
    return randomize_q(make_gp(z, jitter_val=1e-6)).eval()


def test_chunks_arrays_and_memory_maps_give_the_same(tmp_path):
    model, likelihood, x = regression_model(), make_noise(0.3), torch.randn(23, 2)
    expected = likelihood(model(x))
    path = tmp_path / "x.npy"
    np.save(path, x.numpy())
    for inputs in (x, x.numpy(), np.load(path, mmap_mode="r")):
        y = tighter_gp.predict_y(model.train(), likelihood, inputs, batch_size=5)
        assert model.training
        close(y.mean, expected.mean.detach())
        close(y.variance, expected.variance.detach())
        assert not y.mean.requires_grad


@pytest.mark.parametrize("make", [lambda: make_noise(0.3), student_t, PoissonLikelihood])
def test_memory_is_the_answer_and_a_chunk(make):
    model, num_points = regression_model(), 8_000
    x = torch.randn(num_points, 2)
    with LargestOutput() as seen:
        y = tighter_gp.predict_y(model, make(), x, batch_size=50)
        y.log_prob(torch.ones(num_points))
        _ = y.mean, y.quantile(0.9)
    assert seen.largest <= 2 * num_points  # mean and variance in one


def test_one_dimensional_inputs():
    model, x = regression_model(1), torch.randn(9)
    close(
        tighter_gp.predict_y(model, make_noise(0.3), x).mean,
        tighter_gp.predict_y(model, make_noise(0.3), x.unsqueeze(-1)).mean,
    )


def test_noise_per_test_point_goes_with_its_chunk():
    model, x, noise = regression_model(), torch.randn(11, 2), torch.rand(11) + 0.1
    likelihood = make_noise(torch.full((30,), 0.2))
    y = tighter_gp.predict_y(model, likelihood, x, batch_size=4, noise=noise.numpy())
    close(y.variance, tighter_gp.predict(model, x).variance + noise)
    with pytest.raises(ValueError, match="one value per point, 11"):
        tighter_gp.predict_y(model, likelihood, x, noise=noise[:4])


def test_independent_tasks():
    wrap = lambda s: gpytorch.variational.IndependentMultitaskVariationalStrategy(s, num_tasks=3)
    model, x = make_model(wrap, (3,)).eval(), torch.randn(11, 2)
    likelihood = likelihoods.MultitaskGaussianLikelihood(3)
    y = tighter_gp.predict_y(model, likelihood, x, batch_size=4)
    expected = likelihood(model(x))
    close(y.mean, expected.mean.detach())
    close(y.variance, expected.variance.detach())
    targets = torch.randn(11, 3)
    density = stats.norm(expected.mean.detach(), expected.variance.detach().sqrt()).logpdf(targets)
    close(y.log_prob(targets), density.sum(-1))
    assert y.sample(7).shape == (7, 11, 3)
    counts = tighter_gp.predict_y(model, PoissonLikelihood(), x)
    assert counts.quantile(0.5).shape == (11, 3)
    assert counts.log_prob(torch.ones(11, 3)).shape == (11,)


def test_tasks_that_share_functions_stay_correlated():
    wrap = lambda s: gpytorch.variational.LMCVariationalStrategy(s, num_tasks=3, num_latents=2)
    model, x = make_model(wrap, (2,)).eval(), torch.randn(11, 2)
    likelihood = likelihoods.MultitaskGaussianLikelihood(3, rank=1)
    y = tighter_gp.predict_y(model, likelihood, x, batch_size=4)
    noise = likelihood.task_noise_covar + likelihood.noise * torch.eye(3)
    targets = torch.randn(11, 3)
    for point in range(11):
        q = model(x[point : point + 1])
        density = stats.multivariate_normal(q.mean[0].detach().numpy(), (q.covariance_matrix + noise).detach().numpy())
        close(y.log_prob(targets)[point], density.logpdf(targets[point]))


def test_correlated_functions_of_a_count_likelihood():
    """Joint over the tasks: not the sum of the tasks' own densities."""
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    q = MultitaskMultivariateNormal(torch.zeros(1, 2), covariance)
    line = np.linspace(-8, 8, 801)
    z = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    weight = stats.norm.pdf(z).prod(-1) * (line[1] - line[0]) ** 2
    f = z @ np.linalg.cholesky(covariance.numpy()).T
    expected = np.log((weight * stats.poisson(np.exp(f)).pmf([3, 4]).prod(-1)).sum())
    close(tighter_gp.log_density(PoissonLikelihood(), q, torch.tensor([[3, 4]])), [expected], rtol=1e-5)


def test_solve_gp_and_collapsed_models():
    x, y, z = torch.rand(30, 2), torch.randn(30), torch.rand(5, 2)
    kernel, likelihood = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()), make_noise(0.2)
    model = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood, jitter_val=1e-6)
    test_x = torch.rand(7, 2)
    answer = tighter_gp.predict_y(model, likelihood, test_x, batch_size=3)
    close(answer.variance, model.predict(test_x).variance.detach() + 0.2, rtol=1e-7)


def test_deep_gp_is_a_mixture_over_draws_of_its_layers():
    model, likelihood, x = two_layers().eval(), make_noise(0.3), torch.randn(6, 3)
    y = tighter_gp.predict_y(model, likelihood, x, num_samples=200, batch_size=4)
    f = y._f
    assert f.mean.shape == (200, 6)
    close(y.mean, f.mean.mean(0))
    close(y.variance, f.variance.mean(0) + f.mean.var(0, correction=0))
    density = stats.norm(f.mean.numpy(), f.variance.sqrt().numpy())
    targets = torch.randn(6)
    close(y.log_prob(targets), np.log(density.pdf(targets.numpy()).mean(0)))
    close(density.cdf(y.quantile(0.8).numpy()).mean(0), 0.8)
    assert y.sample(9).shape == (9, 6)
    state = torch.get_rng_state()
    again = tighter_gp.predict_y(model, likelihood, x, num_samples=200, batch_size=4)
    assert torch.equal(again.mean, y.mean)
    assert torch.equal(torch.get_rng_state(), state)
    binary = tighter_gp.predict_y(model, BernoulliLogitLikelihood(), x)
    close(binary.variance, binary.probs * (1 - binary.probs))


def test_float32_model_has_float32_answers():
    torch.set_default_dtype(torch.float32)
    model, likelihood = regression_model(), laplace()
    y = tighter_gp.predict_y(model, likelihood, torch.randn(8, 2))
    for value in (y.mean, y.variance, y.quantile(0.9), y.log_prob(torch.zeros(8)), y.sample(2)):
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all()


def test_model_that_returns_no_distribution_is_refused():
    with pytest.raises(TypeError, match="MultivariateNormal in eval mode"):
        tighter_gp.predict_y(torch.nn.Linear(2, 1), make_noise(0.1), torch.randn(3, 2))
    with pytest.raises(ValueError, match="no test points"):
        tighter_gp.predict_y(regression_model(), make_noise(0.1), torch.randn(0, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of other likelihoods, batches, BoTorch
# ---------------------------------------------------------------------------------------------------------------------


def test_classes_of_a_deep_gp():
    model, x = two_layers(num_outputs=3).eval(), torch.randn(5, 3)
    likelihood = likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    y = tighter_gp.predict_y(model, likelihood, x, num_samples=300)
    f = y._f
    draws = f.mean + f.variance.sqrt() * torch.randn(500, *f.mean.shape)
    close(y.probs, torch.softmax(draws, -1).mean((0, 1)), rtol=0, atol=0.02)
    close(y.probs.sum(-1), 1.0)
    close(y.log_prob(torch.tensor([0, 1, 2, 0, 1])).exp(), y.probs[torch.arange(5), [0, 1, 2, 0, 1]])
    assert y.sample(4).shape == (4, 5)


def test_outputs_of_a_deep_gp_are_scored_together():
    model, x = two_layers(num_outputs=2).eval(), torch.randn(5, 3)
    likelihood = likelihoods.MultitaskGaussianLikelihood(2, rank=1)
    y = tighter_gp.predict_y(model, likelihood, x, num_samples=20)
    targets = torch.randn(5, 2)
    for point in range(5):
        densities = [
            stats.multivariate_normal(m.numpy(), c.numpy()).pdf(targets[point].numpy())
            for m, c in zip(y._f.mean[:, point], y._f.covariance[:, point], strict=True)
        ]
        close(y.log_prob(targets)[point], np.log(np.mean(densities)))


def test_quadrature_sites_of_a_dspp_have_their_weights():
    class Layer(gpytorch.models.deep_gps.dspp.DSPPLayer):
        def __init__(self, num_inputs, num_outputs):
            shape = torch.Size([]) if num_outputs is None else torch.Size([num_outputs])
            q = gpytorch.variational.CholeskyVariationalDistribution(4, batch_shape=shape)
            strategy = tighter_gp.TighterVariationalStrategy(self, torch.randn(4, num_inputs), q)
            super().__init__(strategy, num_inputs, num_outputs, num_quad_sites=3)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=shape)

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Model(gpytorch.models.deep_gps.dspp.DSPP):
        def __init__(self):
            super().__init__(3)
            self.first, self.second = Layer(2, 2), Layer(2, None)

        def forward(self, x):
            return self.second(self.first(x))

    model = Model().eval()
    y = tighter_gp.predict_y(model, make_noise(0.3), torch.randn(4, 2))
    weights = torch.softmax(model.raw_quad_weights.detach(), 0)
    close(y.mean, weights @ y._f.mean)


def test_batch_of_models_is_scored_member_by_member():
    mean, variance = torch.randn(2, 5), torch.rand(2, 5) + 0.1
    q = MultivariateNormal(mean, DiagLinearOperator(variance))
    for likelihood in (make_noise(0.3), PoissonLikelihood(), laplace()):
        targets = torch.arange(5.0)
        whole = distribution_of_y(likelihood, q)
        for member in range(2):
            alone = distribution_of_y(likelihood, q_of(mean[member], variance[member]))
            close(whole.log_prob(targets)[member], alone.log_prob(targets))
            close(whole.quantile(0.7)[member], alone.quantile(0.7))
            close(whole.variance[member], alone.variance)


@pytest.mark.filterwarnings("ignore")  # BoTorch's advice on transforms
def test_inputs_of_a_botorch_model_are_transformed():
    from botorch.models.approximate_gp import SingleTaskVariationalGP
    from botorch.models.transforms import Normalize, Standardize

    x = torch.rand(20, 2) * 50
    model = SingleTaskVariationalGP(x, inducing_points=6, input_transform=Normalize(2)).eval()
    y = tighter_gp.predict_y(model, model.likelihood, x[:7])
    close(y.mean, model.posterior(x[:7]).mean.squeeze(-1).detach())
    target = torch.randn(20, 1)
    model = SingleTaskVariationalGP(x, target, inducing_points=6, outcome_transform=Standardize(1))
    with pytest.raises(TypeError, match="transforms its targets"):
        tighter_gp.predict_y(model, model.likelihood, x)


@pytest.mark.parametrize("coverage", [0.5, 0.95])
def test_an_interval_leaves_as_much_below_as_above(coverage):
    low, high = distribution_of_y(make_noise(0.3), q_of()).interval(coverage)
    wanted = stats.norm(MEAN, np.sqrt(VARIANCE + 0.3)).interval(coverage)
    close(low, wanted[0])
    close(high, wanted[1])


@pytest.mark.parametrize(("make", "kind"), [(student_t, StudentTMarginal), (laplace, LaplaceMarginal)])
def test_the_slope_of_a_distribution_function_is_its_derivative(make, kind):
    mean, variance = torch.as_tensor(MEAN), torch.as_tensor(VARIANCE)
    function = kind(make()).distribution_function(FunctionValues(mean, variance), 0.3)
    y = (mean + 0.4).requires_grad_()
    value, slope = function(y)
    (expected,) = torch.autograd.grad(value.sum(), y)
    close(slope.detach(), expected, rtol=1e-6)


def test_targets_that_are_all_missing_give_a_score_per_point():
    q = MultitaskMultivariateNormal(torch.zeros(5, 2), torch.eye(10))
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    found = tighter_gp.log_density(likelihood, q, torch.full((5, 2), torch.nan))
    assert found.shape == (5,)
    assert torch.isnan(found).all()


@pytest.mark.parametrize(("functions", "size"), [(1, 3), (3, 5)])
def test_chunks_have_the_nodes_of_their_likelihood_in_memory(functions, size, monkeypatch):
    """Quadrature for one function per point, draws for several."""
    monkeypatch.setattr(distribution, "_LARGEST", 3 * distribution._NODES if functions == 1 else 5 * 3 * 64)
    sizes = []
    original = PredictiveDistribution._marginal
    record = lambda self, rows, f: sizes.append(rows.stop - rows.start) or original(self, rows, f)
    monkeypatch.setattr(PredictiveDistribution, "_marginal", record)
    if functions == 1:
        q, likelihood, y = MultivariateNormal(torch.zeros(12), torch.eye(12)), PoissonLikelihood(), torch.ones(12)
    else:
        q = MultitaskMultivariateNormal.from_batch_mvn(
            MultivariateNormal(torch.zeros(3, 12), torch.eye(12).expand(3, 12, 12))
        )
        likelihood, y = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False), torch.zeros(12)
    distribution_of_y(likelihood, q, num_samples=64).log_prob(y)
    assert max(sizes) == size


def test_quantiles_are_looked_for_around_the_mean_in_standard_deviations():
    f = FunctionValues(torch.tensor([0.5, 1.0]), torch.tensor([0.4, 0.9]))
    likelihood = likelihoods.StudentTLikelihood()
    likelihood.initialize(noise=0.3, deg_free=5.0)
    place, distance = StudentTMarginal(likelihood, {}, 16, 0).around(f)
    torch.testing.assert_close((place, distance.square()), (f.mean, f.variance + 0.3))
    place, distance = LaplaceMarginal(likelihoods.LaplaceLikelihood().initialize(noise=0.3), {}, 16, 0).around(f)
    torch.testing.assert_close((place, distance.square()), (f.mean, f.variance + 0.6))


@pytest.mark.parametrize("make", [lambda: make_noise(0.3), laplace, PoissonLikelihood])
def test_several_quantiles_are_the_first_dimension(make):
    y = distribution_of_y(make(), q_of())
    wanted = torch.stack([y.quantile(0.1), y.quantile(0.9)])
    for p in ([0.1, 0.9], np.array([0.1, 0.9]), torch.tensor([0.1, 0.9], dtype=torch.float64)):
        assert torch.equal(y.quantile(p), wanted)
    assert torch.equal(y.quantile(torch.tensor(0.9, dtype=torch.float64)), wanted[1])


@pytest.mark.parametrize(
    ("coverage", "message"), [(95, r"got 95\. For 95 per cent pass 0\.95\."), (0, "got 0\\.$"), (-1, "got -1\\.$")]
)
def test_a_coverage_out_of_range_is_named(coverage, message):
    y = distribution_of_y(make_noise(0.3), q_of())
    with pytest.raises(ValueError, match=f"coverage must lie between 0 and 1, both excluded; {message}"):
        y.interval(coverage)


def test_the_likelihood_comes_second():
    model, x = make_gp(torch.rand(4, 2)), torch.rand(3, 2)
    with pytest.raises(TypeError, match="first argument is the model, the second its likelihood; got GP and Tensor"):
        tighter_gp.predict_y(model, x, make_noise(0.3))


def test_a_single_row_needs_a_dimension_of_points():
    model, x = make_gp(torch.rand(4, 2)), torch.rand(3, 2)
    with pytest.raises(ValueError, match=r"Inputs must have shape \.\.\. x N x 2 .* Of a single row pass x\[None\]\."):
        tighter_gp.predict_y(model, make_noise(0.3), x[0])
    assert tighter_gp.predict_y(model, make_noise(0.3), x[0][None]).mean.shape == (1,)
