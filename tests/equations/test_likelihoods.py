"""Our likelihoods against numerical integration, and what the objective learns of any likelihood."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch import likelihoods as stock
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch.nn.functional import logsigmoid

from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tighter_gp.likelihoods.properties import (
    expected_log_prob,
    gaussian_noise,
    is_gaussian,
    is_log_concave,
    log_prob_of_samples,
    marginal_variance,
    observed,
)

MEAN = torch.tensor([-3.1, -0.4, 0.0, 0.7, 2.9], dtype=torch.float64)
VARIANCE = torch.tensor([0.3, 1.7, 1e-6, 2.5, 0.01], dtype=torch.float64)
LABELS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
COUNTS = torch.tensor([0.0, 3.0, 1.0, 6.0, 20.0], dtype=torch.float64)


def q(mean=MEAN, variance=VARIANCE) -> MultivariateNormal:
    return MultivariateNormal(mean, torch.diag_embed(variance))


def log_logit(y, f):
    return torch.where(y > 0, logsigmoid(f), logsigmoid(-f))


def log_poisson(y, f):
    return y * f - f.exp() - torch.lgamma(y + 1)


def integral(function, mean=MEAN, variance=VARIANCE) -> torch.Tensor:
    """Expectation under N(mean, variance) by the trapezoidal rule, exact to rounding for smooth functions."""
    nodes = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    weights = torch.exp(-0.5 * nodes**2) / math.sqrt(2 * math.pi) * (nodes[1] - nodes[0])
    values = function(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes)
    return (weights * values).sum(-1)


def fine_logit() -> BernoulliLogitLikelihood:
    with gpytorch.settings.num_gauss_hermite_locs(100):
        return BernoulliLogitLikelihood()


def fine_poisson() -> PoissonLikelihood:
    with gpytorch.settings.num_gauss_hermite_locs(100):
        return PoissonLikelihood()


# ---------------------------------------------------------------------------------------------------------------------
# Bernoulli, logistic link
# ---------------------------------------------------------------------------------------------------------------------


def test_logit_density_is_the_logistic_function():
    f = torch.randn(5)
    torch.testing.assert_close(BernoulliLogitLikelihood()(f).probs, 1 / (1 + torch.exp(-f)), rtol=1e-12, atol=0)
    torch.testing.assert_close(BernoulliLogitLikelihood()(f).log_prob(LABELS), log_logit(LABELS, f), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("make", "rtol"), [(BernoulliLogitLikelihood, 1e-4), (fine_logit, 1e-8)])
def test_logit_expected_log_prob_is_the_integral(make, rtol):
    expected = integral(lambda f: log_logit(LABELS.unsqueeze(-1), f))
    torch.testing.assert_close(make().expected_log_prob(LABELS, q()), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(("make", "rtol"), [(BernoulliLogitLikelihood, 1e-4), (fine_logit, 1e-8)])
def test_logit_log_marginal_is_the_log_of_the_integral(make, rtol):
    expected = integral(lambda f: log_logit(LABELS.unsqueeze(-1), f).exp()).log()
    torch.testing.assert_close(make().log_marginal(LABELS, q()), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(("make", "rtol"), [(BernoulliLogitLikelihood, 1e-4), (fine_logit, 1e-8)])
def test_logit_marginal_has_the_integrated_probabilities(make, rtol):
    marginal = make()(q())
    assert isinstance(marginal, torch.distributions.Bernoulli)
    torch.testing.assert_close(marginal.probs, integral(torch.sigmoid), rtol=rtol, atol=0)


@pytest.mark.parametrize("labels", [2 * LABELS - 1, LABELS.long(), LABELS.bool()])
@pytest.mark.parametrize("method", ["expected_log_prob", "log_marginal"])
def test_logit_labels_may_be_signs_integers_or_booleans(labels, method):
    likelihood = BernoulliLogitLikelihood()
    assert torch.equal(getattr(likelihood, method)(labels, q()), getattr(likelihood, method)(LABELS, q()))


def test_logit_expected_log_prob_is_finite_far_out_with_its_gradient():
    mean = torch.tensor([-800.0, 800.0, -800.0, 800.0], requires_grad=True)
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0])
    value = BernoulliLogitLikelihood().expected_log_prob(labels, q(mean, torch.ones(4)))
    torch.testing.assert_close(value, torch.tensor([-800.0, 0.0, 0.0, -800.0]), rtol=1e-9, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([1.0, 0.0, 0.0, -1.0]), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Poisson, exponential link
# ---------------------------------------------------------------------------------------------------------------------


def test_poisson_density_has_the_exponential_rate():
    f = torch.randn(5)
    torch.testing.assert_close(PoissonLikelihood()(f).rate, f.exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(PoissonLikelihood()(f).log_prob(COUNTS), log_poisson(COUNTS, f), rtol=1e-9, atol=1e-12)


def test_poisson_expected_log_prob_is_the_integral():
    expected = integral(lambda f: log_poisson(COUNTS.unsqueeze(-1), f))
    torch.testing.assert_close(PoissonLikelihood().expected_log_prob(COUNTS, q()), expected, rtol=1e-10, atol=1e-12)


def test_poisson_log_marginal_is_the_log_of_the_integral():
    expected = integral(lambda f: log_poisson(COUNTS.unsqueeze(-1), f).exp()).log()
    torch.testing.assert_close(fine_poisson().log_marginal(COUNTS, q()), expected, rtol=1e-6, atol=0)


# Nodes placed by q(f) alone miss a narrow p(y|f): 2.8 nats at a count of 50, -inf at 300.
def test_poisson_log_marginal_is_accurate_with_the_default_nodes():
    counts, mean, variance = (
        torch.tensor([6.0, 50.0, 300.0]),
        torch.tensor([0.7, 0.7, -3.0]),
        torch.tensor([2.5, 2.5, 0.3]),
    )
    nodes = torch.linspace(-30, 30, 60_001)
    log_weights = torch.distributions.Normal(0.0, 1.0).log_prob(nodes) + math.log(nodes[1] - nodes[0])
    f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes
    expected = torch.logsumexp(log_weights + log_poisson(counts.unsqueeze(-1), f), -1)
    actual = PoissonLikelihood().log_marginal(counts, q(mean, variance))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)


def test_poisson_marginal_is_a_mixture_with_the_integrated_rate():
    """GPyTorch's convention without a closed form: one Poisson for each sample of f, samples first."""
    mean, variance = MEAN[:3], VARIANCE[:3]
    with gpytorch.settings.num_likelihood_samples(40_000):
        marginal = PoissonLikelihood()(q(mean, variance))
    assert isinstance(marginal, torch.distributions.Poisson)
    assert marginal.rate.shape == (40_000, 3)
    torch.testing.assert_close(marginal.rate.mean(0), integral(torch.exp, mean, variance), rtol=0.05, atol=0)


def test_poisson_counts_may_be_integers():
    likelihood = PoissonLikelihood()
    expected = likelihood.expected_log_prob(COUNTS, q())
    torch.testing.assert_close(likelihood.expected_log_prob(COUNTS.long(), q()), expected, rtol=1e-14, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Both
# ---------------------------------------------------------------------------------------------------------------------

OURS = {"logit": (fine_logit, LABELS), "poisson": (fine_poisson, COUNTS)}


@pytest.mark.parametrize("method", ["expected_log_prob", "log_marginal"])
@pytest.mark.parametrize("name", OURS)
def test_gradients_in_mean_and_variance_pass_gradcheck(name, method):
    make, targets = OURS[name]
    likelihood = make()
    mean, variance = MEAN.clone().requires_grad_(), (VARIANCE + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: getattr(likelihood, method)(targets, q(m, v)), (mean, variance))


@pytest.mark.parametrize("name", OURS)
def test_more_variance_never_raises_the_expected_log_prob(name):
    """What log-concavity is needed for."""
    make, targets = OURS[name]
    values = torch.stack([make().expected_log_prob(targets, q(MEAN, v * torch.ones(5))) for v in (0.1, 0.5, 2.0, 5.0)])
    assert (values.diff(dim=0) < 0).all()


@pytest.mark.parametrize("method", ["expected_log_prob", "log_marginal"])
@pytest.mark.parametrize("name", OURS)
def test_a_batch_is_a_loop_over_its_members(name, method):
    make, targets = OURS[name]
    likelihood, mean, variance = make(), torch.randn(2, 3, 5), 0.1 + torch.rand(2, 3, 5)
    actual = getattr(likelihood, method)(targets, q(mean, variance))
    assert actual.shape == (2, 3, 5)
    for i in range(2):
        for j in range(3):
            expected = getattr(likelihood, method)(targets, q(mean[i, j], variance[i, j]))
            torch.testing.assert_close(actual[i, j], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OURS)
def test_float32_stays_float32(name):
    make, targets = OURS[name]
    value = make().float().expected_log_prob(targets.float(), q(MEAN.float(), VARIANCE.float()))
    assert value.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Properties: Gaussian or not, log-concave or not
# ---------------------------------------------------------------------------------------------------------------------


def make_stock(name: str):
    if name == "FixedNoiseGaussianLikelihood":
        return stock.FixedNoiseGaussianLikelihood(torch.ones(3))
    if name == "DirichletClassificationLikelihood":
        return stock.DirichletClassificationLikelihood(torch.tensor([0, 1, 2]))
    if name in ("MultitaskGaussianLikelihood", "HadamardGaussianLikelihood"):
        return getattr(stock, name)(num_tasks=2)
    if name == "SoftmaxLikelihood":
        return stock.SoftmaxLikelihood(num_features=2, num_classes=3)
    return getattr(stock, name)()


GAUSSIAN = (
    "GaussianLikelihood",
    "FixedNoiseGaussianLikelihood",
    "GaussianLikelihoodWithMissingObs",
    "MultitaskGaussianLikelihood",
    "DirichletClassificationLikelihood",
)
LOG_CONCAVE = ("BernoulliLikelihood", "LaplaceLikelihood", "SoftmaxLikelihood")
NOT_LOG_CONCAVE = ("StudentTLikelihood", "BetaLikelihood")


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
@pytest.mark.parametrize("name", [*GAUSSIAN, *LOG_CONCAVE, *NOT_LOG_CONCAVE])
def test_gaussian_likelihoods_are_told_from_the_others(name):
    assert is_gaussian(make_stock(name)) == (name in GAUSSIAN)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
@pytest.mark.parametrize("name", [*GAUSSIAN, *LOG_CONCAVE, *NOT_LOG_CONCAVE])
def test_log_concave_likelihoods_are_told_from_the_others(name):
    assert is_log_concave(make_stock(name)) == (name not in NOT_LOG_CONCAVE)


@pytest.mark.parametrize(
    ("name", "targets", "parameters"),
    [("LaplaceLikelihood", 0.3, {"noise": 0.4}), ("BernoulliLikelihood", 1.0, {}), ("BernoulliLikelihood", 0.0, {})],
)
def test_what_is_called_log_concave_is(name, targets, parameters):
    likelihood = make_stock(name).initialize(**parameters)
    f = torch.linspace(-4, 4, 161)
    log_prob = likelihood(f).log_prob(torch.full_like(f, targets))
    assert (log_prob[2:] - 2 * log_prob[1:-1] + log_prob[:-2] <= 1e-9).all()


@pytest.mark.parametrize("batch", [(), (2,)])
def test_laplace_expectation_is_the_dense_integral(batch):
    likelihood = stock.LaplaceLikelihood(batch_shape=torch.Size(batch))
    likelihood.noise = torch.linspace(0.2, 0.7, max(1, sum(batch))).reshape(*batch, 1)
    y, mean = torch.randn(*batch, 7), torch.randn(*batch, 7)
    variance = torch.tensor([1e-4, 0.01, 0.1, 0.5, 1.0, 3.0, 20.0]).expand(*batch, 7)
    z = torch.linspace(-12, 12, 200001).reshape(-1, *(1 for _ in mean.shape))
    log_prob = -(y - mean - variance.sqrt() * z).abs() / likelihood.noise.sqrt() - (2 * likelihood.noise.sqrt()).log()
    weights = torch.exp(-0.5 * z.square())
    expected = (weights * log_prob).sum(0) / weights.sum()
    q = gpytorch.distributions.MultivariateNormal(mean, torch.diag_embed(variance))
    torch.testing.assert_close(expected_log_prob(likelihood, y, q), expected, rtol=1e-7, atol=1e-7)


def test_what_is_not_called_log_concave_is_not():
    f = torch.linspace(-9, 9, 161)
    for likelihood, target in ((stock.StudentTLikelihood(), 0.0), (stock.BetaLikelihood(), 0.5)):
        log_prob = likelihood(f).log_prob(torch.full_like(f, target))
        assert (log_prob[2:] - 2 * log_prob[1:-1] + log_prob[:-2]).max() > 1e-4


def test_our_likelihoods_say_that_they_are_log_concave():
    assert is_log_concave(BernoulliLogitLikelihood())
    assert is_log_concave(PoissonLikelihood())


@pytest.mark.parametrize("declared", [True, False])
def test_an_attribute_decides_over_the_class(declared):
    class Own(stock.LaplaceLikelihood):
        is_log_concave = declared

    assert is_log_concave(Own()) is declared


# ---------------------------------------------------------------------------------------------------------------------
# Properties: the noise of each point
# ---------------------------------------------------------------------------------------------------------------------


def size(*shape: int) -> torch.Size:
    return torch.Size(shape)


def test_noise_of_one_variance_for_all():
    likelihood = stock.GaussianLikelihood()
    likelihood.noise = 0.37
    noise = gaussian_noise(likelihood, size(2), size(7)).expand(2, 7)
    torch.testing.assert_close(noise, torch.full((2, 7), 0.37), rtol=1e-9, atol=0)


def test_noise_of_a_batch_of_variances():
    likelihood, values = stock.GaussianLikelihood(batch_shape=size(3)), torch.tensor([[0.2], [0.3], [0.4]])
    likelihood.noise = values
    noise = gaussian_noise(likelihood, size(2, 3), size(7)).expand(2, 3, 7)
    torch.testing.assert_close(noise, values.expand(2, 3, 7), rtol=1e-9, atol=0)


def test_one_variance_serves_all_points_and_tasks():
    likelihood = stock.GaussianLikelihood(batch_shape=size(2))
    likelihood.noise = torch.tensor([[0.2], [0.3]])
    noise = gaussian_noise(likelihood, size(2), size(7, 3)).expand(2, 7, 3)
    torch.testing.assert_close(noise[0], torch.full((7, 3), 0.2), rtol=1e-9, atol=0)
    torch.testing.assert_close(noise[1], torch.full((7, 3), 0.3), rtol=1e-9, atol=0)


def test_noise_given_in_the_call_replaces_that_of_a_plain_gaussian():
    values = 0.1 + torch.rand(7)
    assert torch.equal(gaussian_noise(stock.GaussianLikelihood(), size(), size(7), noise=values), values)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
def test_noise_with_missing_observations():
    likelihood = stock.GaussianLikelihoodWithMissingObs()
    likelihood.noise = 0.37
    assert gaussian_noise(likelihood, size(), size(7)).expand(7)[3].item() == pytest.approx(0.37)


@pytest.mark.parametrize("shape", [(7,), (2, 7)])
def test_fixed_noise_is_that_of_each_point(shape):
    values = 0.1 + torch.rand(shape)
    noise = gaussian_noise(stock.FixedNoiseGaussianLikelihood(values), size(*shape[:-1]), size(7))
    assert torch.equal(noise, values)


def test_fixed_noise_of_a_batch_of_points_is_given_in_the_call():
    values, rows = 0.1 + torch.rand(7), torch.tensor([4, 0, 6])
    noise = gaussian_noise(stock.FixedNoiseGaussianLikelihood(values), size(), size(3), noise=values[rows])
    assert torch.equal(noise, values[rows])


def test_fixed_noise_of_another_length_raises():
    likelihood = stock.FixedNoiseGaussianLikelihood(0.1 + torch.rand(7))
    stored = r"one noise variance per point: got 7 stored noise variances for a batch of 3.*noise=noise\[rows\]"
    with pytest.raises(ValueError, match=stored):
        gaussian_noise(likelihood, size(), size(3))
    with pytest.raises(ValueError, match="got noise= of 7 for a batch of 3"):
        gaussian_noise(likelihood, size(), size(3), noise=torch.ones(7))


@pytest.mark.parametrize("in_call", [False, True])
def test_learned_noise_is_added_to_the_fixed_noise_once(in_call):
    values = 0.1 + torch.rand(7)
    likelihood = stock.FixedNoiseGaussianLikelihood(values, learn_additional_noise=True)
    likelihood.second_noise = 0.37
    kwargs = {"noise": values[:3]} if in_call else {}
    count = 3 if in_call else 7
    noise = gaussian_noise(likelihood, size(), size(count), **kwargs)
    torch.testing.assert_close(noise, values[:count] + 0.37, rtol=1e-9, atol=0)
    (gradient,) = torch.autograd.grad(noise.sum(), likelihood.second_noise_covar.raw_noise)
    assert gradient.item() > 0


def test_learned_noise_of_a_batch_is_added_to_the_fixed_noise():
    values, second = 0.1 + torch.rand(7), torch.tensor([[0.2], [0.3]])
    likelihood = stock.FixedNoiseGaussianLikelihood(values, learn_additional_noise=True, batch_shape=size(2))
    likelihood.second_noise = second
    torch.testing.assert_close(gaussian_noise(likelihood, size(2), size(7)), values + second, rtol=1e-9, atol=0)


def test_noise_of_dirichlet_classification_is_that_of_each_class_and_point():
    likelihood = stock.DirichletClassificationLikelihood(torch.tensor([0, 1, 2, 1]), dtype=torch.float64)
    assert torch.equal(gaussian_noise(likelihood, size(3), size(4)), likelihood.noise)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("has_global", "has_task"), [(True, True), (True, False), (False, True)])
def test_noise_of_tasks_is_the_sum_of_the_global_and_their_own(has_global, has_task, batch):
    likelihood = stock.MultitaskGaussianLikelihood(num_tasks=3, has_global_noise=has_global, has_task_noise=has_task)
    expected = torch.zeros(3)
    if has_global:
        likelihood.noise = torch.tensor([0.37])
        expected = expected + 0.37
    if has_task:
        likelihood.task_noises = torch.tensor([0.1, 0.2, 0.3])
        expected = expected + torch.tensor([0.1, 0.2, 0.3])
    noise = gaussian_noise(likelihood, size(*batch), size(7, 3)).expand(*batch, 7, 3)
    torch.testing.assert_close(noise, expected.expand(*batch, 7, 3), rtol=1e-9, atol=0)


def test_noise_that_correlates_the_tasks_raises():
    with pytest.raises(TypeError, match=r"MultitaskGaussianLikelihood with rank > 0 correlates.*build.*with rank=0"):
        gaussian_noise(stock.MultitaskGaussianLikelihood(num_tasks=3, rank=1), size(), size(7, 3))


@pytest.mark.parametrize("name", ["plain", "fixed", "fixed and learned", "tasks"])
def test_noise_is_what_gpytorch_adds_to_the_marginal(name):
    values = 0.1 + torch.rand(7)
    likelihood = {
        "plain": stock.GaussianLikelihood(),
        "fixed": stock.FixedNoiseGaussianLikelihood(values),
        "fixed and learned": stock.FixedNoiseGaussianLikelihood(values, learn_additional_noise=True),
        "tasks": stock.MultitaskGaussianLikelihood(num_tasks=3),
    }[name]
    if name == "tasks":
        likelihood.task_noises = torch.tensor([0.1, 0.2, 0.3])
        f = gpytorch.distributions.MultitaskMultivariateNormal(torch.zeros(7, 3), torch.eye(21))
    else:
        f = MultivariateNormal(torch.zeros(7), torch.eye(7))
    noise = gaussian_noise(likelihood, f.batch_shape, f.event_shape)
    torch.testing.assert_close(noise.expand(f.event_shape), likelihood(f).variance - 1, rtol=1e-9, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Properties: which targets count
# ---------------------------------------------------------------------------------------------------------------------

NAN = float("nan")


def test_all_targets_count_unless_told_otherwise():
    assert observed(stock.GaussianLikelihood(), torch.tensor([1.0, NAN]), size(2)) is None


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
def test_nan_is_missing_for_the_likelihood_with_missing_observations():
    mask = observed(stock.GaussianLikelihoodWithMissingObs(), torch.tensor([1.0, NAN, 2.0]), size(3))
    assert mask.tolist() == [True, False, True]


def test_nan_is_missing_under_the_fill_policy():
    targets = torch.tensor([[1.0, NAN, 2.0], [NAN, 1.0, 2.0]])
    with gpytorch.settings.observation_nan_policy("fill"):
        mask = observed(stock.GaussianLikelihood(), targets, size(3))
    assert torch.equal(mask, ~targets.isnan())


def test_mask_policy_drops_a_point_for_the_whole_batch():
    targets = torch.tensor([[1.0, NAN, 2.0, 3.0], [1.0, 1.0, NAN, 2.0]])
    with gpytorch.settings.observation_nan_policy("mask"):
        mask = observed(stock.GaussianLikelihood(), targets, size(4))
    assert mask.tolist() == 2 * [[True, False, False, True]]


# ---------------------------------------------------------------------------------------------------------------------
# Several functions and one label
# ---------------------------------------------------------------------------------------------------------------------


def several(interleaved=True):
    """Three functions at four points, correlated within each function."""
    torch.manual_seed(0)
    factor = torch.randn(12, 12)
    return MultitaskMultivariateNormal(torch.randn(4, 3), factor @ factor.mT, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [True, False])
def test_marginal_variance_is_gpytorchs(interleaved):
    distribution = several(interleaved)
    torch.testing.assert_close(marginal_variance(distribution), distribution.variance)
    torch.testing.assert_close(marginal_variance(q()), q().variance)


@pytest.mark.parametrize("mixing", [True, False])
def test_softmax_log_probability_is_gpytorchs(mixing):
    """On a number of points that GPyTorch does not take for the features."""
    likelihood = stock.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=mixing)
    samples, labels = torch.randn(5, 4, 3), torch.tensor([0, 2, 1, 1])
    expected = likelihood.forward(samples).log_prob(labels)
    torch.testing.assert_close(log_prob_of_samples(likelihood, labels, samples), expected)


def test_softmax_with_another_number_of_functions_or_classes_is_refused():
    likelihood = stock.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    with pytest.raises(ValueError, match="3 features for 2 latent functions"):
        log_prob_of_samples(likelihood, torch.tensor([0, 1]), torch.randn(5, 2, 2))
    with pytest.raises(ValueError, match=r"Labels must lie in 0\.\.2, as there are 3 classes; got values from 0 to 3"):
        log_prob_of_samples(likelihood, torch.tensor([0, 3]), torch.randn(5, 2, 3))


def test_a_softmax_with_a_forward_of_its_own_is_asked():
    class Flat(stock.SoftmaxLikelihood):
        def forward(self, function_samples, *args, **kwargs):
            return torch.distributions.Categorical(logits=torch.zeros_like(function_samples))

    likelihood = Flat(num_features=3, num_classes=3, mixing_weights=False)
    log_prob = log_prob_of_samples(likelihood, torch.tensor([0, 1]), torch.randn(5, 2, 3))
    torch.testing.assert_close(log_prob, torch.full((5, 2), -math.log(3)))
