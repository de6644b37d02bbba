"""Every regression and non-Gaussian case of vectors.json, through the public classes.

The golden values are sums over the data. GPyTorch adds its jitter to the data's diagonal as well; that rides in the
explained variance, so an uncollapsed bound is the golden one less half the sum of jitter/noise, and the predictive
variance of a T-SVGP the golden one plus the jitter.
"""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO

import tighter_gp
from tests.tools import dense
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.golden import VECTORS
from tests.tools.support import Q_FORMS, for_last_term

RELATIVE = 1e-9


def close(actual, expected, relative=RELATIVE):
    torch.testing.assert_close(actual, expected, rtol=relative, atol=relative * expected.abs().max().item())


class Case:
    """A golden case as tensors and models."""

    def __init__(self, entry):
        self.entry = entry
        for name in ("X", "Z", "y", "X_test", "q_whitened_mean", "q_whitened_chol"):
            if name in entry:
                setattr(self, name, torch.tensor(entry[name]))
        self.jitter, self.mean, self.beta = entry.get("jitter", 0.0), entry.get("mean_constant", 0.0), entry["beta"]
        self.size = len(self.y)
        self.noise = torch.tensor(entry.get("noise_variances") or entry.get("noise_variance") or 0.0)
        self.kernel_kind = entry["kernel"]["type"]
        self.kernel_values = entry["kernel"]["variance"], torch.tensor(entry["kernel"]["lengthscales"])

    def __getitem__(self, name):
        return torch.tensor(self.entry["expected"][name])

    def kernel(self):
        return make_kernel(self.kernel_kind, *self.kernel_values)

    def gp(self, conditional="optimal", at_q=True, **kwargs):
        q = (self.q_whitened_mean, self.q_whitened_chol) if at_q else None
        model = make_gp(
            self.Z, self.kernel(), q, jitter_val=self.jitter, mean=self.mean, conditional=conditional, **kwargs
        )
        if conditional == "beta":
            model.variational_strategy.conditional.beta = self.beta
        if conditional == "scalar":
            model.variational_strategy.conditional.m = self.entry["scalar_m"]
        return model

    def collapsed(self, bound="tighter"):
        options = {"bound": bound, "jitter_val": self.jitter}
        return CollapsedGP(self.X, self.y, self.Z, self.kernel(), make_noise(self.noise), self.mean, **options)

    @property
    def jitter_cost(self):
        return 0.5 * (self.jitter / self.noise.expand(self.size)).sum()


REGRESSION = [pytest.param(entry, id=entry["name"]) for entry in VECTORS["regression"]]
NON_GAUSSIAN = [pytest.param(entry, id=entry["name"]) for entry in VECTORS["non_gaussian"]]


@pytest.fixture(params=REGRESSION)
def case(request):
    return Case(request.param)


def bound_at(model, likelihood, case, **kwargs):
    return case.size * tighter_gp.TighterELBO(likelihood, model, case.size)(model(case.X, **kwargs), case.y)


# -- regression: uncollapsed --------------------------------------------------------------------------------------------


def test_tighter_elbo_with_the_optimal_conditional(case):
    value = bound_at(case.gp(), make_noise(case.noise), case)
    close(value, case["tsvgp_at_q_beta_opt"] - case.jitter_cost)


def test_tighter_elbo_with_a_shared_beta(case):
    value = bound_at(case.gp("beta"), make_noise(case.noise), case)
    close(value, case["tsvgp_at_q"] - case.jitter_cost)


def test_tighter_elbo_with_per_point_scales(case):
    model = case.gp(tighter_gp.PerPoint(case.size))
    d = case["d"].clamp_min(1e-14)  # PerPoint's scales stay below one
    model.variational_strategy.conditional.m = case.beta / (case.beta + d)
    value = bound_at(model, make_noise(case.noise), case, index=torch.arange(case.size))
    close(value, case["tsvgp_at_q"] - case.jitter_cost)


def test_tighter_elbo_in_float32(case):
    model, likelihood = case.gp().float(), make_noise(case.noise).float()
    mll = tighter_gp.TighterELBO(likelihood, model, case.size)
    value = case.size * mll(model(case.X.float()), case.y.float())
    assert value.dtype == torch.float32
    close(value.double(), case["tsvgp_at_q_beta_opt"] - case.jitter_cost, 1e-4)


def test_variational_elbo_on_the_optimal_conditional_is_svgp(case):
    model = case.gp()
    value = case.size * VariationalELBO(make_noise(case.noise), model, case.size)(model(case.X), case.y)
    close(value, case["svgp_at_q"] - case.jitter_cost)
    if case.jitter:
        close(value, case["svgp_at_q_data_jitter"])


def test_terms_of_the_bound(case):
    model = case.gp("beta")
    mll = tighter_gp.TighterELBO(make_noise(case.noise), model, case.size, combine_terms=False)
    terms = mll(model(case.X), case.y)
    close(case.size * terms.kl_divergence, case["kl_u_at_q"])
    close(-case.size * terms.conditional, case["middle_term_at_beta"])


def test_residual_is_the_variance_that_a_point_mass_leaves(case):
    model = case.gp(at_q=False, distribution=Q_FORMS["delta"])
    variance = model(case.X).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)  # .variance rounds zeros up
    close(variance, case["d"] + case.jitter)


def test_training_variance_at_the_optimal_q_and_scales(case):
    if case.noise.dim():
        pytest.skip("one beta cannot be the noise of every point")
    model = case.gp("beta")
    model.variational_strategy.conditional.beta = case.noise
    tighter_gp.set_optimal_q(model, make_noise(case.noise), case.X, case.y)
    close(model(case.X).variance, case["train_latent_var_mnd"] + case.jitter)


# -- regression: the optimal q ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1024, 5])
def test_set_optimal_q(case, batch_size):
    model = case.gp()
    tighter_gp.set_optimal_q(model, make_noise(case.noise), case.X, case.y, batch_size=batch_size)
    q = model.variational_strategy.variational_distribution
    close(q.mean, case["q_opt_whitened_mean"])
    close(q.covariance_matrix, case["q_opt_whitened_cov"])
    covariance = dense.KERNELS[case.kernel_kind](case.Z, case.Z, *case.kernel_values)
    root = torch.linalg.cholesky(covariance + case.jitter * torch.eye(len(case.Z)))
    close(root @ q.mean, case["q_opt_u_mean_residual"])
    close(root @ q.covariance_matrix @ root.T, case["q_opt_u_cov"])


@pytest.mark.parametrize("batch_size", [1024, 5])
def test_evaluate_bound_at_the_optimal_q_is_the_collapsed_bound(case, batch_size):
    model, likelihood = case.gp(), make_noise(case.noise)
    tighter_gp.set_optimal_q(model, likelihood, case.X, case.y)
    value = tighter_gp.evaluate_bound(model, likelihood, case.X, case.y, batch_size)
    close(value, case["F4"] - case.jitter_cost)
    svgp = tighter_gp.evaluate_bound(model, likelihood, case.X, case.y, batch_size, objective=VariationalELBO)
    close(svgp, case["F1"] - case.jitter_cost)


# -- regression: collapsed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "name"), [("titsias", "F1"), ("spherical", "F5"), ("tighter", "F4")])
def test_drop_in_kernel(case, bound, name):
    if name not in case.entry["expected"]:
        pytest.skip("the golden case has one noise variance per point")
    model = case.collapsed(bound)
    value = case.size * ExactMarginalLogLikelihood(model.likelihood, model)(model(case.X), case.y)
    close(value, case[name])
    close(tighter_gp.evaluate_bound(model, model.likelihood, case.X, case.y), case[name])


def test_order_of_the_bounds(case):
    names = ["F1", "F5", "F4", "F8", "log_marginal_likelihood"]
    values = [case.entry["expected"][name] for name in names if name in case.entry["expected"]]
    assert values == sorted(values)


# -- regression: predictions --------------------------------------------------------------------------------------------

LAST_TERMS = {name: f"pred_var_{name}" for name in ("drop", "exact", "subset")} | {"optimal": "pred_var_optimal_C"}


def predictions(case, last_term, x=None, **kwargs):
    """The prediction of a T-SGPR and of a T-SVGP at the optimal q, the latter without GPyTorch's extra jitter."""
    x = case.X_test if x is None else x
    collapsed = tighter_gp.predict(case.collapsed(), x, last_term, **kwargs)
    model, likelihood = case.gp(), make_noise(case.noise)
    tighter_gp.set_optimal_q(model, likelihood, case.X, case.y)
    given = for_last_term(last_term, likelihood=likelihood, train_x=case.X)
    sparse = tighter_gp.predict(model, x, last_term, **given, **kwargs)
    return (collapsed.mean, collapsed.variance), (sparse.mean, sparse.variance - case.jitter)


@pytest.mark.parametrize("last_term", LAST_TERMS)
@pytest.mark.parametrize("batch_size", [1024, 3])
def test_predict(case, last_term, batch_size):
    subset = case["subset_indices"]
    for mean, variance in predictions(case, last_term, subset=subset, batch_size=batch_size):
        close(mean, case["pred_mean"])
        close(variance, case[LAST_TERMS[last_term]], 1e-7 if last_term == "exact" else RELATIVE)


def test_predict_exactly_at_the_training_inputs(case):
    for _, variance in predictions(case, "exact", case.X):
        close(variance, case["train_latent_var_exact"], 1e-7)


def test_predict_with_all_points_as_subset_is_exact(case):
    for _, variance in predictions(case, "subset", subset=case.size):
        close(variance, case["pred_var_exact"], 1e-7)


# -- non-Gaussian likelihoods -------------------------------------------------------------------------------------------


def make_likelihood(name):
    if name == "student_t":
        likelihood = gpytorch.likelihoods.StudentTLikelihood()
        likelihood.initialize(deg_free=4.0, noise=0.25)
        return likelihood
    return {
        "logit": tighter_gp.likelihoods.BernoulliLogitLikelihood,
        "probit": gpytorch.likelihoods.BernoulliLikelihood,
        "poisson": tighter_gp.likelihoods.PoissonLikelihood,
    }[name]()


@pytest.fixture(params=NON_GAUSSIAN)
def counted(request):
    """A non-Gaussian case with labels as GPyTorch has them, its likelihood and its tolerance."""
    case, name = Case(request.param), request.param["name"]
    if name == "probit":
        case.y = (case.y > 0).to(case.y)
    return case, make_likelihood(name), {"probit": 5e-4, "student_t": 1e-4}.get(name, RELATIVE)


def objective(likelihood, model, case):
    """TighterELBO, which says that Student-t is not log-concave."""
    not_strict = isinstance(likelihood, gpytorch.likelihoods.StudentTLikelihood)
    if not_strict and not model.variational_strategy.conditional.is_strict:
        with pytest.warns(UserWarning, match="not known to be log-concave"):
            return tighter_gp.TighterELBO(likelihood, model, case.size)
    return tighter_gp.TighterELBO(likelihood, model, case.size)


@pytest.mark.parametrize(("conditional", "name"), [("beta", "tsvgp_at_q"), ("scalar", "scalar_m_at_q")])
def test_learned_conditionals(counted, conditional, name):
    case, likelihood, tolerance = counted
    model = case.gp(conditional)
    close(case.size * objective(likelihood, model, case)(model(case.X), case.y), case[name], tolerance)


def test_learned_per_point_scales(counted):
    case, likelihood, tolerance = counted
    model = case.gp(tighter_gp.PerPoint(case.size))
    model.variational_strategy.conditional.m = case.beta / (case.beta + case["d"])
    mll = objective(likelihood, model, case)
    value = case.size * mll(model(case.X, index=torch.arange(case.size)), case.y)
    close(value, case["tsvgp_at_q"], tolerance)


def test_variational_elbo_is_svgp(counted):
    case, likelihood, tolerance = counted
    model = case.gp()
    value = case.size * VariationalELBO(likelihood, model, case.size)(model(case.X), case.y)
    close(value, case["svgp_at_q"], tolerance)


def test_moments_and_kl(counted):
    case = counted[0]
    model = case.gp("beta")
    q = model(case.X)
    close(q.mean, case["marginal_mean"])
    close(q.variance, case["S_term"] + case["d"] * case.beta / (case.beta + case["d"]))
    close(model.variational_strategy.kl_divergence(), case["kl_u"])
