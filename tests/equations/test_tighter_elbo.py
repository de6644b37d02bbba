"""The objective: against dense formulas, against VariationalELBO, on mini-batches, with every Gaussian noise, in float32."""

from __future__ import annotations

import copy
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    StudentTLikelihood,
)
from gpytorch.mlls import GammaRobustVariationalELBO, PredictiveLogLikelihood, VariationalELBO
from gpytorch.settings import observation_nan_policy
from gpytorch.variational import VariationalStrategy
from linear_operator.operators import DiagLinearOperator

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, double_problem, randomize_q
from tighter_gp import TighterELBO
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tighter_gp.likelihoods.family import family

P = double_problem()
N, M = len(P.x), len(P.z)
FORMS = pytest.mark.parametrize("form", Q_FORMS)
UNEVEN = [slice(0, 6), slice(6, 12), slice(12, N)]


def gp(form="cholesky", strategy=tighter_gp.TighterVariationalStrategy, **kwargs):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    kwargs = {"mean": 0.3, **kwargs}
    return randomize_q(make_gp(P.z, kernel, distribution=Q_FORMS[form], strategy=strategy, **kwargs))


def conditional(name):
    return tighter_gp.PerPoint(N) if name == "per_point" else name


def call(model, x=P.x, rows=None):
    """q(f), with the rows named where the conditional wants them."""
    needs_index = isinstance(model.variational_strategy.conditional, tighter_gp.PerPoint)
    return model(x, index=torch.arange(N)[rows or slice(None)]) if needs_index else model(x)


class Dense:
    """The uncollapsed model written out from the values of ``model``'s parameters; differentiable."""

    def __init__(self, model, noise, x=P.x, y=P.y):
        strategy, kernel, q = model.variational_strategy, model.covar_module, model.variational_strategy
        values = kernel.outputscale, kernel.base_kernel.lengthscale
        z = strategy.inducing_points
        kuu = dense.rbf(z, z, *values) + strategy.jitter_val * torch.eye(M)
        kuf = dense.rbf(z, x, *values)
        weights = torch.linalg.inv(kuu) @ kuf
        root = torch.linalg.cholesky(kuu) @ q._variational_distribution.chol_variational_covar.tril()
        mean = torch.linalg.cholesky(kuu) @ q._variational_distribution.variational_mean
        self.y, self.noise = y, noise.expand(y.shape)
        self.mean = model.mean_module.constant + weights.T @ mean
        self.s = (weights.T @ root @ root.T @ weights).diagonal() + strategy.jitter_val
        self.d = (dense.rbf(x, x, *values) - kuf.T @ weights).diagonal()
        self.kl = dense.kl(mean, root @ root.T, torch.zeros(M), kuu)

    def log_likelihood(self, variance):
        """Expected log likelihood, one value per point."""
        return -0.5 * (torch.log(2 * math.pi * self.noise) + ((self.y - self.mean) ** 2 + variance) / self.noise)

    def per_datum(self, m):
        points = self.log_likelihood(self.s + m * self.d) - 0.5 * (m - 1 - torch.log(m))
        return points.mean() - self.kl / N

    @property
    def best(self):
        return self.noise / (self.noise + self.d)


def log_prob_of(likelihood, model, x=P.x, y=P.y, num_data=N, **kwargs):
    return TighterELBO(likelihood, model, num_data)(call(model, x), y, **kwargs)


# -- against dense formulas ---------------------------------------------------------------------------------------------


def scales(model, reference):
    own = model.variational_strategy.conditional
    return {
        "OptimalConditional": lambda: reference.best,
        "BetaConditional": lambda: own.beta / (own.beta + reference.d),
        "ScalarConditional": lambda: own.m.expand(N),
        "PerPoint": lambda: own.m,
    }[type(own).__name__]()


@pytest.mark.parametrize("name", ["optimal", "beta", "scalar", "per_point"])
@pytest.mark.parametrize("jitter_val", [0.0, 1e-3])
def test_values_and_gradients_are_those_of_the_dense_formula(name, jitter_val):
    """In the parameters and in the inputs."""
    model, likelihood = gp(conditional=conditional(name), jitter_val=jitter_val), make_noise(0.07)
    x, own = P.x.clone().requires_grad_(), model.variational_strategy.conditional
    if name == "beta":
        own.beta = 0.25
    if name == "per_point":
        own.m = torch.linspace(0.2, 0.9, N)
    actual = TighterELBO(likelihood, model, N)(call(model, x), P.y)
    reference = Dense(model, likelihood.noise, x)
    expected = reference.per_datum(scales(model, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0.0)

    leaves = {"x": x, **dict([*model.named_parameters(), *likelihood.named_parameters()])}
    gradients, wanted = (torch.autograd.grad(value, list(leaves.values())) for value in (actual, expected))
    for label, gradient, target in zip(leaves, gradients, wanted, strict=True):
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        assert gradient.abs().max() > 1e-6, label
        torch.testing.assert_close(gradient, target, rtol=1e-8, atol=1e-9, msg=lambda text, at=label: f"{at}: {text}")


@pytest.mark.parametrize("name", ["optimal", "beta", "scalar", "per_point"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_gradient_in_the_targets_is_the_dense_one(name, is_whole):
    """Targets may come from a transformation that is learned too."""
    model, likelihood, y = gp(conditional=conditional(name)), make_noise(0.07), P.y.clone().requires_grad_()
    expected = (Dense(model, likelihood.noise).mean - P.y).detach() / (0.07 * N)
    with observation_nan_policy("ignore" if is_whole else "fill"):
        actual = torch.autograd.grad(TighterELBO(likelihood, model, N)(call(model), y), y)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_terms_of_a_batch_are_those_of_the_objective():
    model, likelihood = gp(), make_noise(0.07)
    reference = Dense(model, likelihood.noise)
    terms = tighter_gp.mlls.data_terms(likelihood, model(P.x), P.y)
    variance = reference.s + reference.best * reference.d
    torch.testing.assert_close(terms.log_likelihood, reference.log_likelihood(variance).sum())
    torch.testing.assert_close(terms.conditional, 0.5 * (reference.best - 1 - torch.log(reference.best)).sum())


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.5])
def test_beta_tempers_the_kl_and_the_conditional_alike(beta):
    model, likelihood = gp(), make_noise(0.07)
    mll = TighterELBO(likelihood, model, N, beta=beta, combine_terms=False)
    terms, reference = mll(model(P.x), P.y), Dense(model, likelihood.noise)
    m = beta * reference.noise / (beta * reference.noise + reference.d)
    torch.testing.assert_close(terms.log_likelihood, reference.log_likelihood(reference.s + m * reference.d).mean())
    torch.testing.assert_close(terms.kl_divergence, beta * reference.kl / N)
    torch.testing.assert_close(terms.conditional, beta * 0.5 * (m - 1 - torch.log(m)).mean())
    price = 0.5 * beta * torch.log1p(reference.d / (beta * reference.noise))
    whole = (reference.log_likelihood(reference.s) - price).mean() - beta * reference.kl / N
    torch.testing.assert_close(terms.bound, whole)


# -- against VariationalELBO --------------------------------------------------------------------------------------------

LIKELIHOODS = {
    "gaussian": (lambda: make_noise(0.07), P.y),
    "probit": (BernoulliLikelihood, (P.y > 0).double()),
    "logit": (BernoulliLogitLikelihood, (P.y > 0).double()),
}


@FORMS
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_huge_beta_is_variational_elbo(form, kind):
    make, y = LIKELIHOODS[kind]
    model, stock = gp(form, conditional="beta"), gp(form, VariationalStrategy)
    model.variational_strategy.conditional.beta = 1e12
    actual = log_prob_of(make(), model, y=y)
    torch.testing.assert_close(actual, VariationalELBO(make(), stock, N)(stock(P.x), y), rtol=1e-12, atol=0.0)


@FORMS
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_variational_elbo_on_the_optimal_conditional_is_svgp(form, kind):
    make, y = LIKELIHOODS[kind]
    model, stock = gp(form, jitter_val=1e-4), gp(form, VariationalStrategy, jitter_val=1e-4)
    actual = VariationalELBO(make(), model, N)(model(P.x), y)
    torch.testing.assert_close(actual, VariationalELBO(make(), stock, N)(stock(P.x), y), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("objective", [PredictiveLogLikelihood, GammaRobustVariationalELBO])
def test_other_objectives_on_the_optimal_conditional_are_those_of_svgp(objective):
    model, stock = gp(jitter_val=1e-4), gp(strategy=VariationalStrategy, jitter_val=1e-4)
    actual, expected = (objective(make_noise(0.07), each, num_data=N)(each(P.x), P.y) for each in (model, stock))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0.0)


# -- terms, batches, modes ----------------------------------------------------------------------------------------------


class Extra(gpytorch.mlls.AddedLossTerm):
    def loss(self):
        return torch.tensor(0.125)


@pytest.mark.parametrize("name", ["optimal", "beta", "scalar", "per_point"])
def test_the_terms_add_up_to_the_bound(name):
    model = gp(conditional=conditional(name))
    likelihood = GaussianLikelihood(noise_prior=gpytorch.priors.GammaPrior(2.0, 3.0))
    model.covar_module.register_prior("scale_prior", gpytorch.priors.GammaPrior(1.5, 2.0), "outputscale")
    model.register_added_loss_term("extra")
    model.update_added_loss_term("extra", Extra())
    terms = TighterELBO(likelihood, model, N, beta=0.7, combine_terms=False)(call(model), P.y)
    assert terms._fields == ("log_likelihood", "kl_divergence", "log_prior", "added_loss", "conditional")
    assert terms.added_loss == 0.125
    prior = gpytorch.priors.GammaPrior(2.0, 3.0).log_prob(likelihood.noise).sum()
    prior = prior + gpytorch.priors.GammaPrior(1.5, 2.0).log_prob(model.covar_module.outputscale)
    torch.testing.assert_close(terms.log_prior, prior / N)
    whole = TighterELBO(likelihood, model, N, beta=0.7)(call(model), P.y)
    total = terms.log_likelihood - terms.kl_divergence + terms.log_prior - terms.added_loss - terms.conditional
    torch.testing.assert_close(whole, total, rtol=1e-14, atol=0.0)
    assert terms.bound == whole
    assert min(terms.kl_divergence, terms.conditional) > 0


@pytest.mark.parametrize("name", ["optimal", "beta", "scalar", "per_point"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_mini_batches_average_to_the_full_bound(name, kind):
    if name == "optimal" and kind != "gaussian":
        pytest.skip("no closed form")
    make, y = LIKELIHOODS[kind]
    model = gp(conditional=conditional(name), jitter_val=1e-3)
    mll = TighterELBO(make(), model, N)
    weighted = sum(
        (rows.stop - rows.start) / N * mll(call(model, P.x[rows], rows), y[rows]) for rows in UNEVEN
    )  # the last batch is smaller
    torch.testing.assert_close(weighted, mll(call(model), y), rtol=1e-12, atol=0.0)


# -- Gaussian noise in all of GPyTorch's forms --------------------------------------------------------------------------

FIXED = torch.linspace(0.02, 0.5, N, dtype=torch.float64)


def fixed_noise(learned):
    likelihood = FixedNoiseGaussianLikelihood(FIXED.clone(), learn_additional_noise=learned is not None)
    if learned is not None:
        likelihood.second_noise = learned
    return likelihood


@pytest.mark.parametrize("learned", [None, 0.11])
def test_fixed_noise_on_mini_batches(learned):
    model, likelihood = gp(), fixed_noise(learned)
    mll = TighterELBO(likelihood, model, N)
    weighted = 0.0
    for rows in UNEVEN:
        value = mll(model(P.x[rows]), P.y[rows], noise=FIXED[rows])
        reference = Dense(model, FIXED[rows] + (learned or 0.0), P.x[rows], P.y[rows])
        torch.testing.assert_close(value, reference.per_datum(reference.best), rtol=1e-11, atol=0.0)
        weighted = weighted + (rows.stop - rows.start) / N * value
    torch.testing.assert_close(weighted, mll(model(P.x), P.y), rtol=1e-12, atol=0.0)


MISSING = torch.tensor([1, 4, 16])


def with_missing(y):
    return y.clone().index_fill_(0, MISSING, float("nan"))


def missing_obs_likelihood():
    with pytest.warns(DeprecationWarning, match="observation_nan_policy"):
        likelihood = GaussianLikelihoodWithMissingObs(noise_constraint=gpytorch.constraints.Positive())
    likelihood.noise = 0.07
    return likelihood, "ignore"


NAN_TREATMENTS = {
    "missing_obs": missing_obs_likelihood,
    "mask": lambda: (make_noise(0.07), "mask"),
    "fill": lambda: (make_noise(0.07), "fill"),
    "fixed_noise_mask": lambda: (fixed_noise(None), "mask"),
}


@pytest.mark.parametrize("treatment", NAN_TREATMENTS)
@pytest.mark.parametrize("name", ["optimal", "beta", "per_point"])
def test_missing_targets_are_left_out_with_their_price(treatment, name):
    likelihood, policy = NAN_TREATMENTS[treatment]()
    model = gp(conditional=conditional(name))
    with observation_nan_policy(policy):
        actual = TighterELBO(likelihood, model, N)(call(model), with_missing(P.y))
    noise = FIXED if treatment == "fixed_noise_mask" else torch.tensor(0.07)
    reference = Dense(model, noise)
    m = scales(model, reference)
    points = reference.log_likelihood(reference.s + m * reference.d) - 0.5 * (m - 1 - torch.log(m))
    seen = torch.ones(N, dtype=torch.bool).index_fill_(0, MISSING, False)
    expected = points[seen].sum() / N - reference.kl / N  # a mean over all rows: what is missing adds nothing
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0.0)
    parameters = [p for p in [*model.parameters(), *likelihood.parameters()] if p.requires_grad]
    gradients = torch.autograd.grad(actual, parameters)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, parameters, allow_unused=True), strict=True):
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        assert torch.isfinite(gradient).all()
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("policy", ["mask", "fill"])
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (BernoulliLogitLikelihood, (P.y > 0).double()),
        (BernoulliLikelihood, (P.y > 0).double()),
        (PoissonLikelihood, P.y.abs().round()),
        (LaplaceLikelihood, P.y),
    ],
    ids=["logit", "probit", "poisson", "laplace"],
)
def test_missing_targets_of_other_likelihoods_are_left_out_too(policy, likelihood, targets):
    model, likelihood = gp(conditional="beta"), likelihood()
    mll = TighterELBO(likelihood, model, N, combine_terms=False)
    seen = torch.ones(N, dtype=torch.bool).index_fill_(0, MISSING, False)
    wanted = mll(model(P.x[seen]), targets[seen])
    with observation_nan_policy(policy):
        terms = mll(model(P.x), with_missing(targets))
        gradients = torch.autograd.grad(terms.bound, list(model.parameters()))
    share = seen.sum() / N
    torch.testing.assert_close(terms.log_likelihood, share * wanted.log_likelihood)
    torch.testing.assert_close(terms.conditional, share * wanted.conditional)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


# -- float32 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["uniform", "normal"])
@pytest.mark.parametrize(("dim", "lengthscale"), [(2, 0.3), (4, 1.5)])
def test_float32_at_tiny_noise_stays_close_to_float64_and_below_the_evidence(draw, dim, lengthscale):
    num_data, num_inducing, noise = 600, 512, 1e-4
    x = draw(num_data, dim).float().double()
    kernel = make_kernel("rbf", 1.0, torch.full((dim,), lengthscale))
    covariance = kernel(x).to_dense().detach() + noise * torch.eye(num_data)
    y = (torch.linalg.cholesky(covariance) @ torch.randn(num_data)).float().double()
    model, likelihood = make_gp(x[torch.randperm(num_data)[:num_inducing]], kernel, jitter_val=1e-6), make_noise(noise)
    tighter_gp.set_optimal_q(model, likelihood, x, y)
    model, likelihood = model.float().double(), likelihood.float().double()  # both precisions see the same parameters
    with torch.no_grad():
        exact = log_prob_of(likelihood, model, x, y, num_data)
    narrow, narrow_likelihood = copy.deepcopy(model).float(), copy.deepcopy(likelihood).float()
    value = log_prob_of(narrow_likelihood, narrow, x.float(), y.float(), num_data)
    value.backward()
    for parameter in [*narrow.parameters(), *narrow_likelihood.parameters()]:
        assert torch.isfinite(parameter.grad).all()
    evidence = torch.distributions.MultivariateNormal(torch.zeros(num_data), covariance).log_prob(y) / num_data
    assert value.dtype == torch.float32
    assert value.double() < evidence
    assert (value.double() - exact).abs() < 0.02


# -- is it a bound? -----------------------------------------------------------------------------------------------------


class Concave(StudentTLikelihood):
    is_log_concave = True


@pytest.mark.parametrize("name", ["beta", "per_point"])
def test_a_likelihood_that_may_not_be_log_concave_warns_once(name):
    model, likelihood = gp(conditional=conditional(name)), StudentTLikelihood()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mll = TighterELBO(likelihood, model, N)
        for _ in range(3):
            mll(call(model), P.y).backward()
        tighter_gp.evaluate_bound(model, likelihood, P.x, P.y)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "StudentTLikelihood is not known to be log-concave" in text
    assert "not a strict bound; conditional='scalar' is strict" in text


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("scalar", StudentTLikelihood), ("beta", Concave), ("beta", LaplaceLikelihood), ("beta", BernoulliLikelihood)],
)
def test_no_warning_where_the_bound_is_strict(name, likelihood):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TighterELBO(likelihood(), gp(conditional=name), N)


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar", "blocks"])
def test_q_from_eval_mode_has_the_value_of_training(conditional, dtype):
    if conditional == "blocks":
        conditional = tighter_gp.Blocks(torch.arange(N) % 3)
    model, likelihood = gp(conditional=conditional).to(dtype), make_noise(0.1).to(dtype)
    mll, x, y = TighterELBO(likelihood, model, N), P.x.to(dtype), P.y.to(dtype)
    expected = mll(model(x), y)
    found = mll(model.eval()(x), y)
    torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=0)


def test_scaled_points_are_not_mixed():
    model, likelihood = gp(), make_noise(0.3)
    q = model(P.x)
    scale = torch.linspace(0.5, 2, N)
    operator = DiagLinearOperator(scale)
    scaled = q.__class__(scale * q.mean, operator @ q.lazy_covariance_matrix @ operator)
    value = TighterELBO(likelihood, model, N)(scaled, P.y)
    residual, explained = q.lazy_covariance_matrix.residual, q.lazy_covariance_matrix.explained
    ratio = scale.square() * residual / 0.3
    misfit = ((P.y - scale * q.mean).square() + scale.square() * explained) / 0.3
    terms = -0.5 * (math.log(2 * math.pi * 0.3) + misfit + ratio.log1p()).sum()
    torch.testing.assert_close(N * value, terms - model.variational_strategy.kl_divergence())


class T10(gpytorch.likelihoods.GaussianLikelihood):
    def expected_log_prob(self, y, q, *args, **kwargs):
        return -torch.log1p((y - q.mean).square() + q.variance)


def test_a_density_derived_from_a_log_concave_one_is_not_known_to_be():
    assert family(gpytorch.likelihoods.GaussianLikelihood()).is_log_concave
    assert not family(T10()).is_log_concave
    with pytest.warns(UserWarning, match="not known to be log-concave"):
        TighterELBO(T10(), gp(), N)


class Hundredfold(gpytorch.likelihoods.noise_models.HomoskedasticNoise):
    def forward(self, *params, shape=None, **kwargs):
        return 100.0 * super().forward(*params, shape=shape, **kwargs)


def test_a_noise_model_of_the_users_own_is_the_noise():
    own, plain = make_noise(0.02), make_noise(2.0)
    own.noise_covar = Hundredfold(noise_constraint=gpytorch.constraints.Positive())
    own.noise = 0.02
    model = gp()
    values = [TighterELBO(likelihood, model, N)(model(P.x), P.y) for likelihood in (own, plain)]
    torch.testing.assert_close(*values)
    predicted = [tighter_gp.predict_y(model.eval(), likelihood.eval(), P.x).variance for likelihood in (own, plain)]
    torch.testing.assert_close(*predicted)
