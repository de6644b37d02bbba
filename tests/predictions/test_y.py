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
from tests.equations.test_deep_gp import two_layers
from tests.tools.factories import make_gp, make_noise
from tests.tools.support import LargestOutput, randomize_q
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood

MEAN = np.array([0.3, -1.2, 1.7, 0.0, 2.5])
VARIANCE = np.array([0.5, 1.3, 0.04, 2.0, 1e-4])
GRID = np.linspace(-14, 14, 200_001)
WEIGHT = stats.norm.pdf(GRID) * (GRID[1] - GRID[0])


def q_of(mean=MEAN, variance=VARIANCE) -> MultivariateNormal:
    return MultivariateNormal(torch.as_tensor(mean), DiagLinearOperator(torch.as_tensor(variance)))


def close(actual, expected, rtol=1e-8, atol=1e-10):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)


def integrate(function, *values):
    """E[function(f, value)] at each of the five points, which have a value each."""
    points = zip(MEAN, VARIANCE, *values, strict=True)
    return np.array([(WEIGHT * function(m + math.sqrt(v) * GRID, *own)).sum() for m, v, *own in points])


def softplus(f):
    return np.logaddexp(0, f)


def student_t():
    return likelihoods.StudentTLikelihood().initialize(deg_free=3.5, noise=0.2)


def laplace():
    return likelihoods.LaplaceLikelihood().initialize(noise=0.3)


def beta():
    return likelihoods.BetaLikelihood().initialize(scale=6.0)


def negative_binomial(num_failures_param=False):
    return likelihoods.NegativeBinomialLikelihood(num_failures_param=num_failures_param).initialize(probs=0.6)


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
    "negative-binomial": (negative_binomial, lambda f: stats.nbinom(softplus(f) * 0.4 / 0.6, 0.4), [0, 3, 1, 8, 2]),
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
    y = tighter_gp.PredictiveDistribution(make(), q_of())
    mean = integrate(lambda f: conditional(f).mean())
    close(y.mean, mean)
    close(y.variance, [*integrate(lambda f: conditional(f).var() + conditional(f).mean() ** 2)] - mean**2, rtol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_log_density_is_the_logarithm_of_the_dense_integral(name):
    make, conditional, targets = ALL[name]
    density = lambda f, value: getattr(conditional(f), "pmf" if name in COUNTS else "pdf")(value)
    expected = np.log(integrate(density, targets))
    close(tighter_gp.log_density(make(), q_of(), torch.tensor(targets)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("p", [0.001, 0.025, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ALL)
def test_quantile_is_where_the_dense_distribution_function_reaches_p(name, p):
    make, conditional, _ = ALL[name]
    quantile = tighter_gp.PredictiveDistribution(make(), q_of()).quantile(p)
    below = lambda values: integrate(lambda f, value: conditional(f).cdf(value), np.asarray(values))
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
    y = tighter_gp.PredictiveDistribution(likelihood(), q_of())
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
    with pytest.raises(ValueError, match="0 and 1, or -1 and 1"):
        y.log_prob(labels + 1)


def test_improbable_label_has_its_logarithm():
    """Far in the tail the probability underflows or rounds to one; its logarithm does not."""
    q = q_of([30.0, -200.0], [1.0, 4.0])
    actual = tighter_gp.log_density(BernoulliLogitLikelihood(), q, torch.tensor([0, 1]))
    close(actual, [-30 + 0.5, -200 + 2.0], rtol=1e-9)  # E[exp(-f)] for f far from zero
    actual = tighter_gp.log_density(likelihoods.BernoulliLikelihood(), q, torch.tensor([0, 1]))
    close(actual, special.log_ndtr(np.array([-30.0, -200.0]) / np.sqrt([2.0, 5.0])))


def test_an_outlier_has_its_density():
    """A thousand scales away, where a rule around the mean or around the peak of the noise would miss what counts."""
    q, y, scale = q_of([2.5, 0.3], [1e-4, 0.5]), torch.tensor([60.0, -40.0]), 0.03
    likelihood = likelihoods.LaplaceLikelihood().initialize(noise=scale**2)
    variance, distance = np.array([1e-4, 0.5]), np.array([57.5, 40.3])
    # The other side of the kink counts nothing.
    close(tighter_gp.log_density(likelihood, q, y), variance / (2 * scale**2) - distance / scale - math.log(2 * scale))
    likelihood = likelihoods.StudentTLikelihood().initialize(deg_free=4.0, noise=scale**2)
    expected = stats.t(4.0, [2.5, 0.3], scale).logpdf(y)  # that of f counts nothing, nearly
    close(tighter_gp.log_density(likelihood, q, y), expected, atol=0.01)


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
    y = tighter_gp.PredictiveDistribution(likelihood, q)
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
    y = tighter_gp.PredictiveDistribution(likelihood, q)
    close(y.probs, probs, atol=2e-5)
    close(y.variance, probs * (1 - probs), atol=2e-5)
    labels = torch.arange(num_points) % num_classes
    close(y.log_prob(labels), np.log(probs[np.arange(num_points), labels.numpy()]), atol=2e-4)
    with pytest.raises(TypeError, match="classes, which have no quantiles"):
        y.quantile(0.5)
    with pytest.raises(ValueError, match=f"0..{num_classes - 1}"):
        y.log_prob(labels + num_classes)


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


class Trials(likelihoods.Likelihood):
    """Counts of successes among as many trials as each point has."""

    def forward(self, function_samples, trials=None, **kwargs):
        return torch.distributions.Binomial(trials, logits=function_samples)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_each_point_has_the_support_of_its_own_arguments(batch_size):
    trials = torch.tensor([1.0, 9.0, 4.0, 2.0, 7.0])
    y = tighter_gp.PredictiveDistribution(Trials(), q_of(), batch_size=batch_size, trials=trials)
    counts = torch.tensor([1.0, 9.0, 3.0, 0.0, 6.0])
    probability = lambda f, n, count: stats.binom(n, special.expit(f)).pmf(count)
    wanted = np.log(integrate(probability, trials.numpy(), counts.numpy()))
    close(y.log_prob(counts), wanted, rtol=1e-6)
    missing = torch.where(torch.arange(5) == 1, torch.nan, counts)
    close(y.log_prob(missing), np.where(np.arange(5) == 1, np.nan, wanted), rtol=1e-6)
    impossible = y.log_prob(torch.tensor([1.0, 9.0, 3.0, 3.0, 6.0]))
    close(impossible, np.where(np.arange(5) == 3, -np.inf, wanted), rtol=1e-6)


def test_own_likelihood_without_a_distribution_function_is_sampled():
    y = tighter_gp.PredictiveDistribution(Gumbel(), q_of(), num_samples=20_000)
    draws = MEAN + np.sqrt(VARIANCE) * np.random.default_rng(0).standard_normal((100_000, 5))
    draws = draws + np.random.default_rng(1).gumbel(0, 0.5, draws.shape)
    close(y.quantile(0.8), np.quantile(draws, 0.8, axis=0), rtol=0, atol=0.05)
    before = torch.get_rng_state()
    assert torch.equal(y.quantile(0.8), y.quantile(0.8))
    assert (y.quantile(0.81) >= y.quantile(0.8)).all()
    assert torch.equal(torch.get_rng_state(), before)
    other = tighter_gp.PredictiveDistribution(Gumbel(), q_of(), num_samples=20_000, seed=1)
    assert not torch.equal(y.quantile(0.8), other.quantile(0.8))


D = torch.distributions
# name: p(y | f) in torch and in scipy
OWN = {
    "falling": (lambda f: D.Normal(-3 * f, torch.tensor(0.05)), lambda f: stats.norm(-3 * f, 0.05)),
    "not monotone": (lambda f: D.Normal(f.square(), torch.tensor(0.05)), lambda f: stats.norm(f**2, 0.05)),
    "student-t": (lambda f: D.StudentT(torch.full_like(f, 3.0), f, torch.tensor(0.5)), lambda f: stats.t(3.0, f, 0.5)),
    "falling counts": (lambda f: D.Poisson(1000 * torch.exp(-f)), lambda f: stats.poisson(1000 * np.exp(-f))),
    "geometric": (lambda f: D.Geometric(torch.sigmoid(f)), lambda f: stats.geom(special.expit(f), loc=-1)),
    "binomial": (lambda f: D.Binomial(20, torch.sigmoid(f)), lambda f: stats.binom(20, special.expit(f))),
}
OWN_COUNTS = ("falling counts", "geometric", "binomial")


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("name", OWN)
def test_quantiles_of_own_likelihoods(name, p):
    make, conditional = OWN[name]
    tolerance = 4e-3 if name == "not monotone" else 2e-4

    class Own(likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, function_samples, **kwargs):
            return make(function_samples)

    grid = GRID[::20]
    weight = stats.norm.pdf(grid) * (grid[1] - grid[0])
    quantile = tighter_gp.PredictiveDistribution(Own(), q_of()).quantile(p).numpy()
    for mean, variance, value in zip(MEAN, VARIANCE, quantile, strict=True):
        below = lambda y, f=mean + math.sqrt(variance) * grid: (weight * conditional(f).cdf(y)).sum()
        if name in OWN_COUNTS:
            assert value == round(value)
            assert below(value - 1) - tolerance < p <= below(value) + tolerance
        else:
            assert abs(below(value) - p) < tolerance


def test_own_likelihood_of_two_functions():
    num_points = 4
    mean, variance = torch.randn(2, num_points), torch.rand(2, num_points)
    q = MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, DiagLinearOperator(variance)))
    y = tighter_gp.PredictiveDistribution(Heteroscedastic(), q)
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


@pytest.mark.parametrize("name", ALL)
def test_samples_have_the_moments(name):
    y = tighter_gp.PredictiveDistribution(ALL[name][0](), q_of())
    draws = y.sample(40_000)
    assert draws.shape == (40_000, 5)
    error = (draws.mean(0) - y.mean).abs() / (y.stddev / math.sqrt(40_000))
    assert error.max() < 4.5


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


NOISE = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)


def fixed(learned=False):
    likelihood = likelihoods.FixedNoiseGaussianLikelihood(torch.ones(50), learn_additional_noise=learned)
    if learned:
        likelihood.second_noise = 0.7
    return likelihood


def hadamard():
    likelihood = likelihoods.HadamardGaussianLikelihood(num_tasks=2, task_feature_index=1)
    likelihood.noise = torch.tensor([0.1, 0.9])
    return likelihood


class Varying(likelihoods.GaussianLikelihood):
    """Noise that depends on the inputs."""

    def _shaped_noise_covar(self, shape, x, **kwargs):
        return DiagLinearOperator(x[:, 0])


INPUTS = torch.stack([NOISE, torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)], -1)
KINDS_OF_NOISE = {
    "fixed": (fixed, {"noise": NOISE}, NOISE),
    "fixed, one for all": (fixed, {"noise": 0.3}, 0.3),
    "fixed and learned": (lambda: fixed(True), {"noise": NOISE}, NOISE + 0.7),
    "in place of its own": (lambda: make_noise(9.0), {"noise": NOISE}, NOISE),
    "of the task": (hadamard, {"tasks": INPUTS[:, 1].long()}, np.where(INPUTS[:, 1] == 1, 0.9, 0.1)),
    "of the task in a column": (hadamard, {"inputs": INPUTS}, np.where(INPUTS[:, 1] == 1, 0.9, 0.1)),
    "of the inputs": (Varying, {"inputs": INPUTS}, NOISE),
}


@pytest.mark.parametrize("kind", KINDS_OF_NOISE)
def test_gaussian_noise_is_added_once(kind):
    make, given, noise = KINDS_OF_NOISE[kind]
    y = tighter_gp.PredictiveDistribution(make(), q_of(), **given)
    normal = stats.norm(MEAN, np.sqrt(VARIANCE + np.asarray(noise)))
    close(y.variance, normal.var())
    close(y.log_prob(torch.zeros(5)), normal.logpdf(0.0))
    for actual, wanted in zip(y.interval(0.5), normal.interval(0.5), strict=True):
        close(actual, wanted)


def test_correlated_functions_of_a_count_likelihood():
    """Joint over the tasks: not the sum of the tasks' own densities."""
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    q = MultitaskMultivariateNormal(torch.zeros(1, 2), covariance)
    line = np.linspace(-8, 8, 801)
    z = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    weight = stats.norm.pdf(z).prod(-1) * (line[1] - line[0]) ** 2
    pmf = stats.poisson(np.exp(z @ np.linalg.cholesky(covariance.numpy()).T)).pmf([3, 4])
    density = lambda y: tighter_gp.log_density(PoissonLikelihood(), q, torch.tensor([y]))
    close(density([3.0, 4.0]), [np.log((weight * pmf.prod(-1)).sum())], rtol=1e-5)
    close(density([3.0, math.nan]), [np.log((weight * pmf[:, 0]).sum())], rtol=1e-5)
    assert torch.isnan(density([math.nan, math.nan]))


def test_outputs_of_a_deep_gp_are_scored_together():
    model, x = two_layers(num_outputs=2).eval(), torch.randn(5, 3)
    likelihood, targets = likelihoods.MultitaskGaussianLikelihood(2, rank=1), torch.randn(5, 2)
    y = tighter_gp.predict_y(model, likelihood, x, num_samples=20)
    q = likelihood(tighter_gp.predict(model, x, num_samples=20))
    densities = [
        stats.multivariate_normal(q.mean[s, 2].detach(), q[s].covariance_matrix[4:6, 4:6].detach()) for s in range(20)
    ]
    close(y.log_prob(targets)[2], np.log(np.mean([density.pdf(targets[2]) for density in densities])))
    softmax = likelihoods.SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    classes = tighter_gp.predict_y(model, softmax, x, num_samples=200)
    close(classes.probs.sum(-1), 1.0)
    close(classes.log_prob(torch.tensor([0, 1, 0, 0, 1])).exp(), classes.probs[torch.arange(5), [0, 1, 0, 0, 1]])
    assert classes.sample(4).shape == (4, 5)


def test_the_answer_is_fixed_and_of_the_models_precision():
    likelihood = student_t()
    y = tighter_gp.PredictiveDistribution(likelihood, q_of())
    likelihood.noise = 5.0
    close(y.variance, VARIANCE + 0.2 * 3.5 / 1.5)  # that of the likelihood as it was
    narrow = tighter_gp.PredictiveDistribution(laplace().float(), q_of(MEAN.astype("f4"), VARIANCE.astype("f4")))
    values = narrow.mean, narrow.variance, narrow.quantile(0.9), narrow.log_prob(torch.zeros(5)), narrow.sample(2)
    assert {value.dtype for value in values} == {torch.float32}
    wanted = torch.stack([y.quantile(0.1), y.quantile(0.9)])
    for p in ([0.1, 0.9], np.array([0.1, 0.9]), torch.tensor([0.1, 0.9])):
        assert torch.equal(y.quantile(p), wanted)


@pytest.mark.parametrize("make", [lambda: make_noise(0.3), student_t, PoissonLikelihood, BernoulliLogitLikelihood])
@pytest.mark.parametrize("num_points", [0, 2000])
def test_memory_is_the_answer_and_a_chunk(make, num_points):
    model = randomize_q(make_gp(torch.randn(6, 2), jitter_val=1e-6)).eval()
    x = torch.randn(num_points, 2)
    with LargestOutput() as seen:
        y = tighter_gp.predict_y(model, make(), x, batch_size=50)
        values = [y.log_prob(torch.ones(num_points)), y.mean, y.variance]
        values += [] if make is BernoulliLogitLikelihood else y.interval(0.9)
    assert all(value.shape == (num_points,) for value in values)
    assert seen.largest <= max(2 * num_points, 256 * 50)


REFUSED = {
    "shape": (lambda y: y.log_prob(torch.zeros(5, 1)), ValueError, r"shape \(5,\); got \(5, 1\). Squeeze"),
    "level": (lambda y: y.quantile(95), ValueError, "both excluded; got 95"),
    "coverage": (lambda y: y.interval(95), ValueError, r"For 95 per cent pass 0\.95"),
    "probs": (lambda y: y.probs, TypeError, "no probs"),
    "covariance": (lambda y: y.covariance, TypeError, "several tasks"),
    "list": (lambda y: tighter_gp.log_density(likelihoods.LikelihoodList(beta()), q_of(), MEAN), TypeError, "several models"),
    "dspp": (
        lambda y: tighter_gp.predict_y(gpytorch.models.deep_gps.dspp.DSPP(3), make_noise(0.1), torch.rand(3, 2)),
        TypeError,
        "weights of their own",
    ),
    "dirichlet": (
        lambda y: tighter_gp.log_density(
            likelihoods.DirichletClassificationLikelihood(torch.tensor([0, 1]), dtype=torch.float64), q_of(), MEAN
        ),
        TypeError,
        "Dirichlet labels",
    ),
    "no noise": (lambda y: tighter_gp.PredictiveDistribution(fixed(), q_of()), ValueError, "pass noise="),
    "no tasks": (lambda y: tighter_gp.PredictiveDistribution(hadamard(), q_of()), ValueError, "pass tasks="),
    "length": (
        lambda y: tighter_gp.predict_y(make_gp(torch.rand(4, 2)), fixed(), torch.rand(11, 2), noise=torch.ones(12)),
        ValueError,
        "one value per point, 11; got",
    ),
    "labels": (
        lambda y: tighter_gp.log_density(BernoulliLogitLikelihood(), q_of(), torch.arange(5)),
        ValueError,
        "labels 0 and 1, or -1 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_answer_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(tighter_gp.PredictiveDistribution(make_noise(0.1), q_of()))
