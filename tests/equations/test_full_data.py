"""The bound of a whole data set and the optimal q: independent of chunks, and nothing else in the model is touched."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.settings import observation_nan_policy
from gpytorch.variational import VariationalStrategy

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, assert_state, double_problem, randomize_q, state
from tighter_gp import TighterELBO, evaluate_bound, set_optimal_q

P = double_problem()
N, M = len(P.x), len(P.z)
NOISE = 0.07
FIXED = torch.linspace(0.02, 0.5, N, dtype=torch.float64)
FORMS = pytest.mark.parametrize("form", Q_FORMS)
SIZES = pytest.mark.parametrize("batch_size", [1, 5, N, 1024])


def gp(form="cholesky", **kwargs):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    return randomize_q(make_gp(P.z, kernel, distribution=Q_FORMS[form], **{"mean": 0.3, **kwargs}))


# -- evaluate_bound -----------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar", "per_point"])
def test_the_value_is_the_objective_on_all_data(batch_size, conditional):
    given = tighter_gp.PerPoint(N) if conditional == "per_point" else conditional
    model, likelihood = gp(conditional=given, jitter_val=1e-3), make_noise(NOISE)
    q = model(P.x, index=torch.arange(N)) if conditional == "per_point" else model(P.x)
    expected = N * TighterELBO(likelihood, model, N)(q, P.y)
    actual = evaluate_bound(model, likelihood, P.x, P.y, batch_size)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=0.0)
    assert not actual.requires_grad


@FORMS
def test_the_standard_bound_at_the_same_parameters(form):
    model, likelihood = gp(form), make_noise(NOISE)
    expected = N * VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    actual = evaluate_bound(model, likelihood, P.x, P.y, 5, objective=VariationalELBO)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=0.0)


def test_the_bound_of_a_model_on_a_strategy_of_gpytorchs():
    model, likelihood = gp(strategy=VariationalStrategy), make_noise(NOISE)
    expected = N * VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    actual = evaluate_bound(model, likelihood, P.x, P.y, 5)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=0.0)


def test_the_bound_in_float32_has_the_jitter_of_float32():
    """GPyTorch's default jitter follows the dtype, and with another one the whitened q(u) is that of another model."""
    torch.manual_seed(0)
    x = torch.rand(60, 1, dtype=torch.float32) * 6
    model, likelihood = gp(strategy=VariationalStrategy).float(), make_noise(NOISE).float()
    model.variational_strategy.inducing_points.data = torch.linspace(0, 6, M, dtype=torch.float32).unsqueeze(-1)
    model.variational_strategy._jitter_val = None
    model.covar_module.base_kernel.lengthscale = 4.0
    y = torch.sin(x[:, 0])
    expected = 60 * VariationalELBO(likelihood, model, 60)(model(x), y)
    torch.testing.assert_close(evaluate_bound(model, likelihood, x, y), expected.detach(), rtol=1e-2, atol=0.0)


def test_the_best_q_of_a_model_on_a_strategy_of_gpytorchs():
    """The optimum is the same for the standard and the tighter family."""
    model, ours, likelihood = gp(strategy=VariationalStrategy), gp(), make_noise(NOISE)
    for each in (model, ours):
        tighter_gp.set_optimal_q(each, likelihood, P.x, P.y)
    q, expected = (each.variational_strategy._variational_distribution for each in (model, ours))
    torch.testing.assert_close(q.variational_mean, expected.variational_mean)
    assert bool(model.variational_strategy.variational_params_initialized)


@SIZES
@pytest.mark.parametrize("learned", [None, 0.11])
@pytest.mark.parametrize("given", [False, True])
def test_fixed_noise_is_sliced_with_the_data(batch_size, learned, given):
    stored = torch.ones(3) if given else FIXED.clone()
    likelihood = FixedNoiseGaussianLikelihood(stored, learn_additional_noise=learned is not None)
    if learned is not None:
        likelihood.second_noise = learned
    model = gp()
    expected = N * TighterELBO(likelihood, model, N)(model(P.x), P.y, noise=FIXED)
    actual = evaluate_bound(model, likelihood, P.x, P.y, batch_size, **({"noise": FIXED} if given else {}))
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=0.0)


def test_priors_are_left_out():
    model, likelihood = gp(), make_noise(NOISE)
    before = evaluate_bound(model, likelihood, P.x, P.y)
    model.covar_module.register_prior("scale_prior", gpytorch.priors.GammaPrior(1.5, 2.0), "outputscale")
    assert evaluate_bound(model, likelihood, P.x, P.y) == before


@pytest.mark.parametrize("bound", ["titsias", "spherical", "tighter"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("noise", [NOISE, FIXED], ids=["one", "fixed"])
def test_a_collapsed_model_has_its_objective(bound, training, noise):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    model = CollapsedGP(P.x, P.y, P.z, kernel, make_noise(noise), 0.3, bound=bound)
    expected = N * ExactMarginalLogLikelihood(model.likelihood, model)(model(P.x), P.y)
    model.train(training)
    before = state(model)
    actual = evaluate_bound(model, model.likelihood, P.x, P.y)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=0.0)
    assert model.training == model.covar_module.training == model.likelihood.training == training
    assert_state(model, before)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_gpytorchs_own_sgpr_and_exact_gp_have_their_objective(is_sparse):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    model = CollapsedGP(P.x, P.y, P.z, kernel, make_noise(NOISE), bound="titsias")
    sparse = gpytorch.kernels.InducingPointKernel(kernel, P.z.clone(), model.likelihood)
    model.covar_module = sparse if is_sparse else kernel
    expected = (dense.f1 if is_sparse else dense.evidence)(P._replace(noise=torch.full((N,), NOISE)))
    found = evaluate_bound(model, model.likelihood, P.x, P.y)
    torch.testing.assert_close(found, expected, rtol=1e-4 if is_sparse else 1e-9, atol=0.0)  # its kernel adds a jitter


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_and_dropout_are_left_alone(training):
    model, likelihood = make_gp(P.z, jitter_val=1e-4), make_noise(NOISE)
    layers = torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(), torch.nn.Dropout(0.5)
    model.features = torch.nn.Sequential(*layers)
    model.forward = lambda x: GP.forward(model, model.features(x))
    for _ in range(3):
        model(P.x)  # statistics that are not the initial ones
    model.train(training)
    model.mean_module.train(not training)
    modes, before = [module.training for module in model.modules()], state(model)
    values = [evaluate_bound(model, likelihood, P.x, P.y, batch_size) for batch_size in (5, 1024, 1024)]
    assert [module.training for module in model.modules()] == modes
    assert_state(model, before)
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0.0)
    assert values[1] == values[2]


# -- set_optimal_q ------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("hetero", [False, True])
def test_the_optimum_is_the_dense_one(batch_size, hetero):
    p = dense.problem(3, hetero=hetero)
    model = make_gp(p.z, make_kernel("rbf", p.variance, p.lengthscales))
    set_optimal_q(model, make_noise(p.noise if hetero else p.noise[0]), p.x, p.y, batch_size)
    mean, covariance = dense.optimal_q(p)
    q = model.variational_strategy.variational_distribution
    torch.testing.assert_close(q.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q.covariance_matrix, covariance, rtol=1e-8, atol=1e-8)


@FORMS
@pytest.mark.parametrize("conditional", ["optimal", "beta"])
@pytest.mark.parametrize("noise", [NOISE, FIXED], ids=["one", "fixed"])
def test_the_optimum_is_a_maximum_within_the_form(form, conditional, noise):
    model, likelihood = gp(form, conditional=conditional), make_noise(noise)
    start = evaluate_bound(model, likelihood, P.x, P.y)
    set_optimal_q(model, likelihood, P.x, P.y, 5)
    best = evaluate_bound(model, likelihood, P.x, P.y)
    assert best > start + 1.0
    TighterELBO(likelihood, model, N)(model(P.x), P.y).backward()
    for name, parameter in model.named_variational_parameters():
        assert parameter.grad.abs().max() < 1e-9, name
        at_best = parameter.detach().clone()
        for step in (1e-3, 1e-2):
            for _ in range(4):
                change = step * torch.randn_like(at_best)
                if name.endswith(("chol_variational_covar", "natural_tril_mat")):
                    change = change.tril()
                if name.endswith("natural_mat"):
                    change = change + change.mT
                parameter.data.copy_(at_best + change)
                assert evaluate_bound(model, likelihood, P.x, P.y) < best, name
        parameter.data.copy_(at_best)
    assert evaluate_bound(model, likelihood, P.x, P.y) == best


@pytest.mark.parametrize("form", ["cholesky", "natural", "tril_natural"])
def test_the_bound_there_is_the_collapsed_one(form):
    kernel, likelihood = make_kernel("rbf", P.variance, P.lengthscales), make_noise(P.noise[0])
    model = make_gp(P.z, kernel, distribution=Q_FORMS[form])
    set_optimal_q(model, likelihood, P.x, P.y)
    torch.testing.assert_close(evaluate_bound(model, likelihood, P.x, P.y), dense.f4(P), rtol=1e-9, atol=0.0)
    svgp = evaluate_bound(model, likelihood, P.x, P.y, objective=VariationalELBO)
    torch.testing.assert_close(svgp, dense.f1(P), rtol=1e-9, atol=0.0)


def test_only_q_changes():
    model = gp(conditional="beta").eval()
    before = state(model)
    set_optimal_q(model, make_noise(NOISE), P.x, P.y)
    assert not model.training
    for name, value in model.state_dict().items():
        assert ("_variational_distribution" in name) != torch.equal(value, before[name]), name


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_targets_have_no_say_in_the_optimum(policy):
    seen = torch.arange(N) % 4 != 1
    one, other, likelihood = gp(), gp(), make_noise(NOISE)
    set_optimal_q(one, likelihood, P.x[seen], P.y[seen])
    with observation_nan_policy(policy):
        set_optimal_q(other, likelihood, P.x, torch.where(seen, P.y, torch.tensor(float("nan"))), 5)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-9, atol=1e-11)
