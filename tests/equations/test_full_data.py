"""The bound of a whole data set and the optimal q: independent of chunks, and nothing else in the model is touched."""

from __future__ import annotations

import copy

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
    actual = evaluate_bound(model, likelihood, P.x, P.y, 5, objective=VariationalELBO)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=0.0)
    with pytest.raises(TypeError, match=r"evaluate_bound use with objective=gpytorch\.mlls\.VariationalELBO"):
        evaluate_bound(model, likelihood, P.x, P.y)


def test_the_standard_bound_of_a_learned_conditional_raises():
    with pytest.raises(TypeError, match=r"only tighter_gp\.TighterELBO"):
        evaluate_bound(gp(conditional="beta"), make_noise(NOISE), P.x, P.y, objective=VariationalELBO)


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


@SIZES
@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_targets_are_left_out(batch_size, policy):
    model, likelihood, seen = gp(), make_noise(NOISE), torch.arange(N) % 4 != 1
    y = torch.where(seen, P.y, torch.tensor(float("nan")))
    expected = evaluate_bound(model, likelihood, P.x[seen], P.y[seen])
    with observation_nan_policy(policy):
        actual = evaluate_bound(model, likelihood, P.x, y, batch_size)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0.0)


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


class DeepKernelGP(GP):
    def __init__(self):
        super().__init__(
            lambda model: tighter_gp.TighterVariationalStrategy(model, P.z, Q_FORMS["cholesky"](M), jitter_val=1e-4)
        )
        self.features = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(), torch.nn.Dropout(0.5)
        )

    def forward(self, x):
        return super().forward(self.features(x))


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_and_dropout_are_left_alone(training):
    model, likelihood = DeepKernelGP(), make_noise(NOISE)
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


def test_modes_are_restored_after_an_error():
    model, likelihood = DeepKernelGP(), make_noise(NOISE)
    model(P.x)
    model.eval()
    model.features.train()
    modes, before = [module.training for module in model.modules()], state(model)
    with pytest.raises(ValueError, match="NaN or infinite"):
        evaluate_bound(model, likelihood, P.x, P.y / 0)
    assert [module.training for module in model.modules()] == modes
    assert_state(model, before)


@FORMS
@pytest.mark.parametrize("training", [True, False])
def test_predictions_after_it_are_those_before_it(form, training):
    model, likelihood = gp(form).train(training), make_noise(NOISE)
    evaluate_bound(model, likelihood, P.x, P.y, 5)
    with torch.no_grad():
        actual = model.eval()(P.x[:3] + 0.1)
        expected = gp(form).eval()(P.x[:3] + 0.1)
    assert torch.equal(actual.mean, expected.mean)
    assert torch.equal(actual.variance, expected.variance)
    model.train()
    value = TighterELBO(likelihood, model, N)(model(P.x), P.y)
    value.backward()
    torch.testing.assert_close(N * value.detach(), evaluate_bound(model, likelihood, P.x, P.y), rtol=1e-12, atol=0.0)


def test_it_can_be_called_between_the_two_halves_of_a_step():
    model, likelihood = gp("natural"), make_noise(NOISE)
    mll = TighterELBO(likelihood, model, N)
    q = model(P.x[:6])
    evaluate_bound(model, likelihood, P.x, P.y)
    value = mll(q, P.y[:6])
    value.backward()
    torch.testing.assert_close(value, mll(model(P.x[:6]), P.y[:6]), rtol=1e-12, atol=0.0)
    assert all(parameter.grad is not None for parameter in model.parameters())


BAD_DATA = {
    "column": (P.x, P.y.unsqueeze(-1), ValueError, r"got \((17|5), 1\)"),
    "few targets": (P.x, P.y[:9], ValueError, r"got \((9|4),\)"),
    "many targets": (P.x[:9], P.y, ValueError, r"got \(17,\)"),
    "nan targets": (P.x, P.y / 0, ValueError, "targets are NaN or infinite"),
    "nan inputs": (P.x / 0, P.y, ValueError, "Inputs hold NaN or infinity in"),
    "dimension": (P.x[:, :1], P.y, ValueError, r"shape \.\.\. x N x 2 like the inducing points; got \((17|5), 1\)"),
}


@pytest.mark.parametrize(("x", "y", "error", "message"), BAD_DATA.values(), ids=BAD_DATA)
@pytest.mark.parametrize(
    "function",
    [evaluate_bound, lambda *args: evaluate_bound(*args, 5), set_optimal_q, lambda *args: set_optimal_q(*args, 5)],
    ids=["evaluate_bound", "evaluate_bound in chunks", "set_optimal_q", "set_optimal_q in chunks"],
)
def test_bad_data_are_refused_and_leave_the_model_as_it_was(x, y, error, message, function):
    model = gp()
    modes, before = [module.training for module in model.modules()], state(model)
    with pytest.raises(error, match=message):
        function(model, make_noise(NOISE), x, y)
    assert_state(model, before)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("function", [evaluate_bound, set_optimal_q])
def test_other_bad_calls(function):
    with pytest.raises(ValueError, match=r"at least (1|one).*got 0"):
        function(gp(), make_noise(NOISE), P.x, P.y, 0)
    with pytest.raises(TypeError, match=r"got .*VariationalStrategy"):
        function(make_gp(P.z, strategy=VariationalStrategy), make_noise(NOISE), P.x, P.y)
    with pytest.raises(ValueError, match=r"3 stored noise variances|noise= of 3|3 noise variances"):
        function(gp(), FixedNoiseGaussianLikelihood(torch.ones(3)), P.x, P.y)


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


@FORMS
def test_it_is_marked_initialised_and_the_first_training_call_keeps_it(form):
    model = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), distribution=Q_FORMS[form])
    spread = model.variational_strategy._variational_distribution.mean_init_std
    set_optimal_q(model, make_noise(NOISE), P.x, P.y)
    assert model.variational_strategy.variational_params_initialized == 1
    assert model.variational_strategy._variational_distribution.mean_init_std == spread
    before = state(model)
    model(P.x)
    assert_state(model, before)


@FORMS
def test_predictions_see_the_new_q(form):
    model = gp(form).eval()
    with torch.no_grad():
        before = model(P.x).mean
        set_optimal_q(model, make_noise(NOISE), P.x, P.y)
        after = model(P.x).mean
    assert (before - after).abs().max() > 0.1
    assert (after - P.y).square().mean() < (before - P.y).square().mean()


def test_only_q_changes():
    model = gp(conditional="beta").eval()
    before = state(model)
    set_optimal_q(model, make_noise(NOISE), P.x, P.y)
    assert not model.training
    for name, value in model.state_dict().items():
        assert ("_variational_distribution" in name) != torch.equal(value, before[name]), name


def test_noise_given_for_the_data():
    one, other = gp(), gp()
    set_optimal_q(one, make_noise(FIXED), P.x, P.y)
    set_optimal_q(other, FixedNoiseGaussianLikelihood(torch.ones(3)), P.x, P.y, 5, noise=FIXED)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_targets_have_no_say_in_the_optimum(policy):
    seen = torch.arange(N) % 4 != 1
    one, other, likelihood = gp(), gp(), make_noise(NOISE)
    set_optimal_q(one, likelihood, P.x[seen], P.y[seen])
    with observation_nan_policy(policy):
        set_optimal_q(other, likelihood, P.x, torch.where(seen, P.y, torch.tensor(float("nan"))), 5)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-9, atol=1e-11)


def test_a_likelihood_that_is_not_gaussian():
    model = gp(conditional="beta")
    before = state(model)
    with pytest.raises(TypeError, match="set_optimal_q needs a Gaussian likelihood; got BernoulliLikelihood"):
        set_optimal_q(model, gpytorch.likelihoods.BernoulliLikelihood(), P.x, P.y)
    assert_state(model, before)


def test_a_float32_model_gets_the_optimum_of_float64():
    narrow, wide = gp(jitter_val=1e-4).float(), gp(jitter_val=1e-4)
    set_optimal_q(narrow, make_noise(NOISE).float(), P.x.float(), P.y.float())
    set_optimal_q(wide, make_noise(NOISE), P.x, P.y)
    for name, value in wide.state_dict().items():
        actual = narrow.state_dict()[name]
        torch.testing.assert_close(actual.to(value.dtype), value, rtol=1e-3, atol=1e-4)


def test_a_float32_model_has_the_bound_of_its_float64_copy_where_inducing_points_nearly_coincide_and_noise_is_tiny():
    torch.manual_seed(0)
    x = torch.rand(60, 1)
    y, z = torch.sin(20 * x[:, 0]).float(), torch.cat([x[:8], x[:8] + 1e-4])
    x, likelihood = x.float(), make_noise(1e-6).float()
    model = make_gp(z, make_kernel("rbf", 1.0, torch.tensor([0.1])), jitter_val=1e-4).float()
    tighter_gp.set_optimal_q(model, likelihood, x, y)
    value = tighter_gp.evaluate_bound(model, likelihood, x, y)
    copies = copy.deepcopy(model).double(), copy.deepcopy(likelihood).double()
    expected = tighter_gp.evaluate_bound(*copies, x.double(), y.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
