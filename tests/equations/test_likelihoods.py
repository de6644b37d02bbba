"""Our likelihoods against numerical integration, and what the objective learns of any likelihood."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch import likelihoods as stock
from gpytorch.distributions import MultivariateNormal
from torch.nn.functional import logsigmoid

from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tighter_gp.likelihoods.expectations import expected_log_prob, log_prob_of_samples
from tighter_gp.likelihoods.family import family, gaussian_noise, observed

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


# ---- Bernoulli, logistic link -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "rtol"), [(BernoulliLogitLikelihood, 1e-4), (fine_logit, 1e-8)])
def test_logit_expectations_are_integrals(make, rtol):
    likelihood, log_prob = make(), lambda f: log_logit(LABELS.unsqueeze(-1), f)
    torch.testing.assert_close(likelihood.expected_log_prob(LABELS, q()), integral(log_prob), rtol=rtol, atol=0)
    expected = integral(lambda f: log_prob(f).exp()).log()
    torch.testing.assert_close(likelihood.log_marginal(LABELS, q()), expected, rtol=rtol, atol=0)
    marginal = likelihood(q())
    assert isinstance(marginal, torch.distributions.Bernoulli)
    torch.testing.assert_close(marginal.probs, integral(torch.sigmoid), rtol=rtol, atol=0)


def test_logit_expected_log_prob_is_finite_far_out_with_its_gradient():
    mean = torch.tensor([-800.0, 800.0, -800.0, 800.0], requires_grad=True)
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0])
    value = BernoulliLogitLikelihood().expected_log_prob(labels, q(mean, torch.ones(4)))
    torch.testing.assert_close(value, torch.tensor([-800.0, 0.0, 0.0, -800.0]), rtol=1e-9, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([1.0, 0.0, 0.0, -1.0]), rtol=1e-9, atol=1e-12)


# ---- Poisson, exponential link ----------------------------------------------------------------------------------------


def test_poisson_expected_log_prob_is_the_integral():
    expected = integral(lambda f: log_poisson(COUNTS.unsqueeze(-1), f))
    torch.testing.assert_close(PoissonLikelihood().expected_log_prob(COUNTS, q()), expected, rtol=1e-10, atol=1e-12)


def test_poisson_log_marginal_is_the_log_of_the_integral():
    expected = integral(lambda f: log_poisson(COUNTS.unsqueeze(-1), f).exp()).log()
    torch.testing.assert_close(fine_poisson().log_marginal(COUNTS, q()), expected, rtol=1e-6, atol=0)


# Nodes placed by q(f) alone miss a narrow p(y|f): 2.8 nats at a count of 50, -inf at 300.
def test_poisson_log_marginal_is_accurate_with_the_default_nodes():
    counts, mean = torch.tensor([6.0, 50.0, 300.0]), torch.tensor([0.7, 0.7, -3.0])
    variance = torch.tensor([2.5, 2.5, 0.3])
    nodes = torch.linspace(-30, 30, 60_001)
    log_weights = torch.distributions.Normal(0.0, 1.0).log_prob(nodes) + math.log(nodes[1] - nodes[0])
    f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes
    expected = torch.logsumexp(log_weights + log_poisson(counts.unsqueeze(-1), f), -1)
    actual = PoissonLikelihood().log_marginal(counts, q(mean, variance))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)


# ---- Both -------------------------------------------------------------------------------------------------------------

OURS = {"logit": (fine_logit, LABELS), "poisson": (fine_poisson, COUNTS)}


@pytest.mark.parametrize("method", ["expected_log_prob", "log_marginal"])
@pytest.mark.parametrize("name", OURS)
def test_gradients_in_mean_and_variance_pass_gradcheck(name, method):
    make, targets = OURS[name]
    likelihood = make()
    mean, variance = MEAN.clone().requires_grad_(), (VARIANCE + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: getattr(likelihood, method)(targets, q(m, v)), (mean, variance))


# ---- Properties: Gaussian or not, log-concave or not ------------------------------------------------------------------


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
def test_gaussian_and_log_concave_likelihoods_are_told_from_the_others(name):
    found = family(make_stock(name))
    assert (found.is_gaussian, found.is_log_concave) == (name in GAUSSIAN, name not in NOT_LOG_CONCAVE)


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


@pytest.mark.parametrize("declared", [True, False])
def test_an_attribute_decides_over_the_class(declared):
    class Own(stock.LaplaceLikelihood):
        is_log_concave = declared

    assert family(Own()).is_log_concave is declared


# ---- Properties: the noise of each point ------------------------------------------------------------------------------


def size(*shape: int) -> torch.Size:
    return torch.Size(shape)


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


# ---- Properties: which targets count ----------------------------------------------------------------------------------

NAN = float("nan")


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


# ---- Several functions and one label ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", [True, False])
def test_softmax_log_probability_is_gpytorchs(mixing):
    """On a number of points that GPyTorch does not take for the features."""
    likelihood = stock.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=mixing)
    samples, labels = torch.randn(5, 4, 3), torch.tensor([0, 2, 1, 1])
    expected = likelihood.forward(samples).log_prob(labels)
    torch.testing.assert_close(log_prob_of_samples(likelihood, labels, samples), expected)
