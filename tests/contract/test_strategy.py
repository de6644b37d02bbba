"""The strategy: eval mode is GPyTorch's, training carries the residual, caches never go stale, bad input is refused."""

from __future__ import annotations

import copy
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    RBFKernel,
)
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    VariationalStrategy,
)
from linear_operator import to_linear_operator
from linear_operator.utils.errors import NanError

import tighter_gp
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, assert_state, double_problem, randomize_q, state
from tighter_gp.conditionals import BetaConditional

P = double_problem()
N, M = len(P.x), len(P.z)
X_TEST = P.x[:7] + 0.13
FORMS = pytest.mark.parametrize("form", Q_FORMS)
SHAPES = [((), ()), ((3,), ()), ((3,), (3,)), ((), (2, 3)), ((3,), (2, 1))]


def gp(form="cholesky", strategy=tighter_gp.TighterVariationalStrategy, seed=0, **kwargs):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    kwargs = {"jitter_val": 1e-5, "mean": 0.4, **kwargs}
    return randomize_q(make_gp(P.z, kernel, distribution=Q_FORMS[form], strategy=strategy, **kwargs), seed)


def stock_like(model, form="cholesky", **kwargs):
    """GPyTorch's own SVGP with the parameters of ``model``, never evaluated before."""
    stock = gp(form, VariationalStrategy, seed=99, **kwargs)
    stock.load_state_dict(model.state_dict())
    return stock.to(model.variational_strategy.inducing_points.dtype).eval()


def prediction(model, x=X_TEST):
    with torch.no_grad():
        q = model(x)
        return q.mean, q.variance, q.covariance_matrix


def assert_equal(left, right):
    for a, b in zip(left, right, strict=True):
        tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -- eval mode ----------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(
    ("batch", "data", "dtype"), [*((*shape, torch.float64) for shape in SHAPES), ((3,), (), torch.float32)]
)
def test_eval_mode_is_gpytorchs_to_rounding(form, batch, data, dtype):
    batch = torch.Size(batch)
    model = gp(form, batch_shape=batch, jitter_val=None).to(dtype).eval()
    stock = gp(form, VariationalStrategy, batch_shape=batch, jitter_val=None).to(dtype).eval()
    x = (X_TEST + 0.1 * torch.randn(*data, *X_TEST.shape)).to(dtype)
    assert_equal(prediction(model, x), prediction(stock, x))
    assert_equal(prediction(model, x), prediction(stock, x))  # from the cache


@pytest.mark.parametrize("conditional", ["beta", "scalar", "per_point"])
def test_eval_mode_does_not_depend_on_the_conditional(conditional):
    conditional = tighter_gp.PerPoint(N) if conditional == "per_point" else conditional
    model = gp(conditional=conditional).eval()
    assert_equal(prediction(model), prediction(gp(strategy=VariationalStrategy).eval()))


@FORMS
def test_training_has_no_effect_on_the_predictions_of_equal_parameters(form):
    model = gp(form)
    tighter_gp.TighterELBO(make_noise(0.1), model, N)(model(P.x), P.y).backward()
    assert_equal(prediction(model.eval()), prediction(stock_like(model, form)))


def test_prior_mode_is_the_prior():
    model = gp(conditional=tighter_gp.PerPoint(N))
    prior = model(P.x, prior=True, index=torch.arange(N))
    torch.testing.assert_close(prior.covariance_matrix, P.Kff)
    torch.testing.assert_close(prior.mean, torch.full((N,), 0.4))


# -- caches -------------------------------------------------------------------------------------------------------------


def change_outputscale(model):
    model.covar_module.outputscale = 2.3


def change_lengthscale(model):
    model.covar_module.base_kernel.lengthscale = torch.tensor([0.5, 1.9])


def change_mean(model):
    model.mean_module.initialize(constant=-1.0)


def change_inducing_points(model):
    model.variational_strategy.inducing_points.data.add_(0.2)


def change_q(model):
    randomize_q(model, seed=5)


def change_jitter(model):
    model.variational_strategy.jitter_val = 1e-2


CHANGES = [change_outputscale, change_lengthscale, change_mean, change_inducing_points, change_q]


@FORMS
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_changed_in_eval_mode_changes_the_prediction(form, change):
    model = gp(form).eval()
    model(X_TEST).variance.sum()  # with a graph
    before = prediction(model)  # and without
    change(model)
    after = prediction(model)
    assert not torch.equal(before[0], after[0]) or not torch.equal(before[1], after[1])
    assert_equal(after, prediction(stock_like(model, form)))


def test_a_jitter_changed_in_eval_mode_changes_the_prediction():
    model = gp().eval()
    prediction(model)
    change_jitter(model)
    assert_equal(prediction(model), prediction(stock_like(model, jitter_val=1e-2)))


@FORMS
def test_other_batch_shapes_in_turn(form):
    model = gp(form, batch_shape=torch.Size([3])).eval()
    for data in ((), (3,), (2, 1), (), (2, 3)):
        x = X_TEST + 0.1 * torch.randn(*data, *X_TEST.shape)
        stock = stock_like(model, form, batch_shape=torch.Size([3]))
        assert_equal(prediction(model, x), prediction(stock, x))


def gradients(model, x):
    """Of a function of mean and covariance, with respect to x and to every parameter that takes part."""
    x = x.clone().requires_grad_()
    q = model(x)
    value = q.mean.sin().sum() + q.variance.log().sum() + q.covariance_matrix[0, 1]
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    return torch.autograd.grad(value, inputs, allow_unused=True)


@FORMS
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_passes_in_eval_mode_can_be_repeated(form, frozen):
    model = gp(form).eval()
    model.requires_grad_(not frozen)
    stock = stock_like(model, form).requires_grad_(not frozen)
    expected = gradients(stock, X_TEST)
    prediction(model)
    for _ in range(3):
        for actual, wanted in zip(gradients(model, X_TEST), expected, strict=True):
            assert (actual is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-10)


@FORMS
@pytest.mark.parametrize("frozen", [False, True])
def test_inference_mode_leaves_nothing_behind_that_autograd_cannot_use(form, frozen):
    model = gp(form).eval()
    model.requires_grad_(not frozen)
    with torch.inference_mode():
        first = model(X_TEST).variance.clone()
    gradient = gradients(model, X_TEST)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(X_TEST).variance, first, rtol=1e-9, atol=1e-10)
    with torch.inference_mode():
        assert torch.equal(model(X_TEST).variance, first)
    expected = gradients(stock_like(model, form), X_TEST)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar"])
@pytest.mark.parametrize("diag", [True, False])
def test_the_training_covariance_has_the_training_variance_on_its_diagonal(conditional, diag):
    model = gp("cholesky", conditional=conditional).train()
    covar = model(P.x, diag=diag).lazy_covariance_matrix
    scale = model.variational_strategy.conditional.scale(covar.residual)
    expected = covar.explained + scale * covar.residual
    torch.testing.assert_close(covar.diagonal(dim1=-1, dim2=-2), expected)
    torch.testing.assert_close(covar.to_dense().diagonal(dim1=-1, dim2=-2), expected)


@FORMS
def test_inference_mode_leaves_nothing_behind_where_float32_is_computed_in_double(form):
    model = gp(form).float().eval().requires_grad_(False)
    model.variational_strategy.jitter_val = 1e-7
    x = X_TEST.float()
    with torch.inference_mode():
        model(x)
    gradient, expected = (gradients(m, x)[0] for m in (model, copy.deepcopy(model)))
    torch.testing.assert_close(gradient, expected)


def fresh(model):
    pass


def trained(model):
    model.train()
    model(P.x)


def trained_with_backward(model):
    model.train()
    tighter_gp.TighterELBO(make_noise(0.1), model, N)(model(P.x), P.y).backward()


def evaluated(model):
    prediction(model.eval())


def evaluated_with_graph(model):
    model.eval()(X_TEST).variance.sum()


def evaluated_in_inference_mode(model):
    with torch.inference_mode():
        model.eval()(X_TEST).variance.sum()


STAGES = [fresh, trained, trained_with_backward, evaluated, evaluated_with_graph, evaluated_in_inference_mode]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("form", ["cholesky", "natural"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_predict_the_same_and_live_on_their_own(form, stage, duplicate):
    model = gp(form)
    stage(model)
    twin = duplicate(model)
    assert twin.variational_strategy.model is twin
    expected = prediction(model.eval())
    assert_equal(prediction(twin.eval()), expected)
    for change in CHANGES:
        change(twin)
    assert_equal(prediction(model), expected)
    assert_equal(prediction(twin), prediction(stock_like(twin, form)))


@FORMS
def test_load_state_dict_in_eval_mode(form):
    model, other = gp(form).eval(), gp(form, seed=7)
    change_outputscale(other)
    prediction(model)
    model.load_state_dict(other.state_dict())
    assert_equal(prediction(model), prediction(stock_like(other, form)))


@FORMS
def test_a_change_of_dtype_in_eval_mode(form):
    model = gp(form).eval()
    prediction(model)
    expected = prediction(model)
    model.float()
    # The jitter is too small for float32, so that ours is computed in float64 and GPyTorch's is not.
    for ours, stock, wide in zip(
        prediction(model, X_TEST.float()),
        prediction(stock_like(model, form), X_TEST.float()),
        expected,
        strict=True,
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.double(), wide, rtol=1e-6, atol=1e-6)
    model.double()
    assert_equal(prediction(model), prediction(stock_like(model, form)))


@FORMS
def test_the_kl_divergence_in_training_follows_a_changed_q(form):
    model = gp(form)
    strategy = model.variational_strategy
    model(P.x)
    strategy.kl_divergence()
    change_q(model)
    expected = stock_like(model, form).variational_strategy.kl_divergence()
    torch.testing.assert_close(strategy.kl_divergence(), expected)


@FORMS
def test_backward_passes_in_training_can_be_repeated(form):
    model = gp(form)
    strategy, q = model.variational_strategy, list(model.variational_parameters())
    tighter_gp.TighterELBO(make_noise(0.1), model, N)(model(P.x), P.y).backward()
    first = torch.autograd.grad(strategy.kl_divergence().sum(), q)
    second = torch.autograd.grad(strategy.kl_divergence().sum(), q)
    assert_equal(first, second)


def test_no_grad_in_training_leaves_no_q_without_a_graph():
    model = gp("natural")
    with torch.no_grad():
        model(P.x)
        model.variational_strategy.kl_divergence()
    assert model.variational_strategy.kl_divergence().requires_grad


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.parametrize("training", [True, False])
def test_fantasies_follow_a_changed_parameter(training):
    model = gp(jitter_val=1e-4).train(training)
    model.likelihood = make_noise(0.1)
    first = model.get_fantasy_model(P.x[:3], P.y[:3])(X_TEST).mean
    change_outputscale(model)
    change_q(model)
    second = model.get_fantasy_model(P.x[:3], P.y[:3])(X_TEST).mean
    fresh = gp(jitter_val=1e-4)
    change_outputscale(fresh)
    change_q(fresh)
    fresh.likelihood = make_noise(0.1)
    assert (first - second).abs().max() > 1e-2
    torch.testing.assert_close(second, fresh.get_fantasy_model(P.x[:3], P.y[:3])(X_TEST).mean)


@FORMS
@pytest.mark.parametrize("change", [change_q, change_inducing_points, change_jitter])
def test_a_kept_q_of_f_stays_what_it_was(form, change):
    model = gp(form).eval()
    expected = prediction(model)
    with torch.no_grad():
        kept = model(X_TEST)
    change(model)
    assert (model(X_TEST).covariance_matrix - expected[2]).abs().max() > 1e-4 or form == "delta"
    assert_equal((kept.mean, kept.variance, kept.covariance_matrix), expected)


@pytest.mark.parametrize("change", [change_outputscale, change_lengthscale])
def test_a_covariance_of_other_hyperparameters_is_refused(change):
    model = gp().eval()
    kept, asked = model(X_TEST), model(X_TEST)
    before = asked.covariance_matrix
    change(model)
    torch.testing.assert_close(asked.covariance_matrix, before)
    with pytest.raises(RuntimeError, match="hyperparameters of the model have changed since this q"):
        _ = kept.covariance_matrix


# -- parameters ---------------------------------------------------------------------------------------------------------


@FORMS
def test_state_dicts_of_svgp_load_strictly_both_ways(form):
    model, stock = gp(form), gp(form, VariationalStrategy, seed=3)
    change_outputscale(stock)
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_equal(prediction(model.eval()), prediction(stock.eval()))
    other = gp(form, VariationalStrategy, seed=4)
    other.load_state_dict(model.state_dict(), strict=True)
    assert_equal(prediction(other.eval()), prediction(model))


def test_the_optimal_conditional_adds_no_parameter():
    names = [name for name, _ in gp().named_parameters()]
    assert names == [name for name, _ in gp(strategy=VariationalStrategy).named_parameters()]


@pytest.mark.parametrize(
    ("conditional", "name"),
    [("beta", "raw_beta"), ("scalar", "raw_m"), (lambda: tighter_gp.PerPoint(N), "raw_m")],
    ids=["beta", "scalar", "per_point"],
)
def test_learned_conditionals_are_hyperparameters(conditional, name):
    model = gp(conditional=conditional if isinstance(conditional, str) else conditional())
    own = f"variational_strategy.conditional.{name}"
    assert own in dict(model.named_hyperparameters())
    assert own not in dict(model.named_variational_parameters())
    assert own in model.state_dict()


def test_beta_starts_at_one_and_scalar_at_nine_tenths():
    torch.testing.assert_close(gp(conditional="beta").variational_strategy.conditional.beta, torch.tensor(1.0))
    torch.testing.assert_close(gp(conditional="scalar").variational_strategy.conditional.m, torch.tensor(0.9))


def test_one_beta_for_each_latent_function():
    batch = torch.Size([3])
    model = gp(conditional="beta", batch_shape=batch)
    betas = torch.tensor([0.1, 1.0, 10.0])
    model.variational_strategy.conditional.beta = betas
    variance, narrowest = model(P.x).variance, gp("delta", jitter_val=1e-5)(P.x).variance - 1e-5
    stock = gp(strategy=VariationalStrategy, batch_shape=batch).eval()(P.x).variance
    scale = betas.unsqueeze(-1) / (betas.unsqueeze(-1) + narrowest)
    torch.testing.assert_close(variance, stock - (1 - scale) * narrowest)


def test_the_conditionals_parameters_take_the_dtype_of_the_inducing_points():
    for conditional in ("beta", "scalar"):
        strategy = make_gp(P.z.float(), conditional=conditional).variational_strategy
        assert {p.dtype for p in strategy.conditional.parameters()} == {torch.float32}


# -- training mode ------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(("batch", "data", "size"), [*((*shape, N) for shape in SHAPES), ((3,), (), M - 2)])
def test_training_with_the_optimal_conditional_has_svgps_moments(form, batch, data, size):
    batch, x = torch.Size(batch), P.x[:size] + 0.1 * torch.randn(*data, size, 2)
    ours, stock = (gp(form, strategy, batch_shape=batch)(x) for strategy in STRATEGIES)
    assert ours.batch_shape == stock.batch_shape
    assert ours.event_shape == stock.event_shape
    torch.testing.assert_close(ours.mean, stock.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.variance, stock.variance, rtol=1e-11, atol=1e-12)


STRATEGIES = (tighter_gp.TighterVariationalStrategy, VariationalStrategy)


@FORMS
def test_training_with_diag_false_has_svgps_covariance(form):
    ours, stock = (gp(form, strategy)(P.x, diag=False).covariance_matrix for strategy in STRATEGIES)
    torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-11)


def test_the_scalar_conditional_scales_the_residual_covariance():
    model = gp(conditional="scalar")
    model.variational_strategy.conditional.m = 0.3
    covar = model(P.x, diag=False).covariance_matrix
    whole = gp()(P.x, diag=False).covariance_matrix
    inverse = torch.linalg.inv(P.Kuu + 1e-5 * torch.eye(M))
    torch.testing.assert_close(whole - covar, 0.7 * (P.Kff - P.Kuf.T @ inverse @ P.Kuf))


@pytest.mark.parametrize("conditional", ["beta", "per_point"])
def test_the_full_covariance_of_a_learned_conditional_has_its_variances(conditional):
    conditional = tighter_gp.PerPoint(N) if conditional == "per_point" else conditional
    model, index = gp(conditional=conditional), torch.arange(N)
    q = model(P.x, diag=False, index=index)
    torch.testing.assert_close(q.covariance_matrix.diagonal(), model(P.x, index=index).variance)
    assert torch.linalg.eigvalsh(q.covariance_matrix).min() > 0


def test_index_is_taken_out_before_the_models_forward_sees_it():
    class Recorder(GP):
        def forward(self, x, **kwargs):
            self.seen = kwargs
            return super().forward(x)

    model = Recorder(
        lambda model: tighter_gp.TighterVariationalStrategy(
            model, P.z, CholeskyVariationalDistribution(M), conditional=tighter_gp.PerPoint(N)
        )
    )
    model(P.x, index=torch.arange(N), flag=3)
    assert model.seen == {"flag": 3}
    model.eval()(P.x, index=torch.arange(N), flag=4)
    assert model.seen == {"flag": 4}


def test_per_point_gradients_are_sparse_and_touch_the_batch_only():
    model = gp(conditional=tighter_gp.PerPoint(N))
    rows = torch.tensor([11, 2, 5, 8])
    tighter_gp.TighterELBO(make_noise(0.1), model, N)(model(P.x[rows], index=rows), P.y[rows]).backward()
    gradient = model.variational_strategy.conditional.raw_m.grad
    assert gradient.is_sparse
    assert gradient.coalesce().indices().flatten().tolist() == sorted(rows.tolist())


# -- bad input ----------------------------------------------------------------------------------------------------------

NAN, INF = (torch.full((1, 2), value).expand(2, 2) for value in (float("nan"), float("inf")))
BAD_CALLS = {
    "nan": (torch.cat([P.x, NAN]), {}, ValueError, r"NaN or infinity in 2 of 19 rows; drop or impute"),
    "inf": (torch.cat([P.x, INF]), {}, ValueError, r"NaN or infinity in 2 of 19 rows; drop or impute"),
    "dimensions": (P.x[:, :1], {}, ValueError, r"shape \.\.\. x N x 2 like the inducing points; got \(17, 1\)"),
    "integers": (P.x.long(), {}, TypeError, r"floating point tensor; got torch.int64"),
    "batch shape": (P.x.expand(4, N, 2), {}, ValueError, r"Batch shapes do not broadcast: inputs \(4,\)"),
}


def untouched(**kwargs):
    """A model that was never called."""
    return make_gp(P.z, batch_shape=torch.Size([3]), **kwargs)


@pytest.mark.parametrize(("x", "kwargs", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.parametrize("training", [True, False])
def test_bad_inputs_are_refused_before_anything_is_touched(x, kwargs, error, message, training):
    model = untouched().train(training)
    before = state(model)
    with pytest.raises(error, match=message):
        model(x, **kwargs)
    assert model.variational_strategy.variational_params_initialized == 0
    assert_state(model, before)


BAD_INDICES = {
    "missing": (None, ValueError, r"call model\(x, index=rows\) in training"),
    "float": (torch.arange(N) + 0.0, ValueError, r"one integer index per row of x, shape \(17,\); got float"),
    "short": (torch.arange(3), ValueError, r"shape \(17,\); got int64 of shape \(3,\)"),
    "too large": (torch.arange(1, N + 1), IndexError, r"lie in 0\.\.16 .* got values from 1 to 17"),
    "negative": (torch.arange(-1, N - 1), IndexError, r"got values from -1 to 15"),
}


@pytest.mark.parametrize(("index", "error", "message"), BAD_INDICES.values(), ids=BAD_INDICES)
def test_per_point_refuses_a_bad_index_before_anything_is_touched(index, error, message):
    model = untouched(conditional=tighter_gp.PerPoint(N, batch_shape=torch.Size([3])))
    before = state(model)
    with pytest.raises(error, match=message):
        model(P.x, **({} if index is None else {"index": index}))
    assert model.variational_strategy.variational_params_initialized == 0
    assert_state(model, before)


def test_per_point_needs_no_index_in_eval_mode():
    model = gp(conditional=tighter_gp.PerPoint(N)).eval()
    assert_equal(prediction(model), prediction(gp().eval()))


@pytest.mark.parametrize("beta", [-1.0, 0.0, float("nan"), float("inf")])
def test_beta_must_be_positive_and_finite(beta):
    model = gp(conditional="beta")
    before = state(model)
    with pytest.raises(ValueError, match="beta must be positive and finite; got"):
        model.variational_strategy.conditional.beta = beta
    assert_state(model, before)


@pytest.mark.parametrize("conditional", ["scalar", "per_point"])
@pytest.mark.parametrize("scale", [-0.1, 0.0, 1.0, 1.5, float("nan")])
def test_scales_must_lie_between_zero_and_one(conditional, scale):
    model = gp(conditional=tighter_gp.PerPoint(N) if conditional == "per_point" else conditional)
    before = state(model)
    with pytest.raises(ValueError, match="strictly between 0 and 1; got"):
        model.variational_strategy.conditional.m = scale
    assert_state(model, before)


def test_an_unknown_conditional_is_named_with_its_alternatives():
    with pytest.raises(ValueError, match=r"'tight'; choose 'optimal', 'beta', 'scalar'.*PerPoint"):
        gp(conditional="tight")
    with pytest.raises(TypeError, match="a name or a Conditional; got float"):
        gp(conditional=0.5)


def test_a_conditional_for_another_batch_is_refused():
    with pytest.raises(
        ValueError, match=r"batch_shape \(2,\), which does not fit .* \(3,\); build it with batch_shape"
    ):
        gp(conditional=BetaConditional(torch.Size([2])), batch_shape=torch.Size([3]))


@pytest.mark.parametrize("training", [True, False])
def test_a_failed_factorisation_names_the_matrix_and_the_hyperparameters(training):
    model = gp().train(training)
    model.covar_module.base_kernel.raw_lengthscale.data.fill_(float("nan"))
    with pytest.raises(
        NanError, match=r"K_ZZ \(5x5, float64\) has .* jitter_val was 1e-05.*base_kernel\.lengthscale=nan"
    ):
        model(P.x)


def test_a_prior_on_beta_enters_the_bound():
    prior = gpytorch.priors.GammaPrior(2.0, 3.0)
    model = gp(conditional=BetaConditional(beta_prior=prior))
    mll = tighter_gp.TighterELBO(make_noise(0.1), model, N, combine_terms=False)
    torch.testing.assert_close(mll(model(P.x), P.y).log_prior, prior.log_prob(torch.tensor(1.0)) / N)


def test_the_factor_that_others_ask_for_has_the_jitter():
    strategy = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), jitter_val=0.3).variational_strategy
    root = torch.randn(M, M)
    factor = strategy._cholesky_factor(to_linear_operator(root @ root.mT)).to_dense()
    torch.testing.assert_close(factor @ factor.mT, root @ root.mT + 0.3 * torch.eye(M))


@pytest.mark.parametrize("look", [tighter_gp.evaluate_bound, tighter_gp.diagnose])
def test_a_q_that_was_set_by_hand_is_the_one_that_is_looked_at(look):
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales)), make_noise(0.3)
    mean = torch.linspace(-3, 3, M)
    distribution = model.variational_strategy._variational_distribution
    distribution.variational_mean.data.copy_(mean)
    look(model, likelihood, P.x, P.y)
    assert torch.equal(distribution.variational_mean, mean)


def test_a_frozen_part_of_q_stays_as_it_is():
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales)), make_noise(0.3)
    distribution = model.variational_strategy._variational_distribution
    distribution.variational_mean.requires_grad_(False)
    tighter_gp.fit(model, likelihood, P.x, P.y, steps=2)
    assert torch.equal(distribution.variational_mean, torch.zeros(M))


def test_a_conditional_that_is_put_in_later_has_its_price():
    model, likelihood = gp(), make_noise(0.3)
    VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    model.variational_strategy.conditional = tighter_gp.conditionals.ScalarConditional()
    with pytest.raises(TypeError, match=r"only tighter_gp\.TighterELBO subtracts"):
        VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    model.variational_strategy.conditional = tighter_gp.conditionals.OptimalConditional()
    VariationalELBO(likelihood, model, N)(model(P.x), P.y)


@pytest.mark.parametrize("distribution", [NaturalVariationalDistribution, CholeskyVariationalDistribution])
def test_a_batch_of_distributions_starts_in_float32(distribution):
    batch = torch.Size([10])
    z = torch.rand(64, 2, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_gp(z, RBFKernel(), distribution=distribution, batch_shape=batch, jitter_val=1e-4).float()
        q = model(torch.rand(7, 2, dtype=torch.float32))
    assert q.mean.shape == (10, 7)
    assert torch.isfinite(q.mean).all()
    assert q.mean.abs().max() < 0.1  # the prior, but for a little noise
    torch.testing.assert_close(q.variance, torch.ones(10, 7, dtype=torch.float32), rtol=0, atol=1e-2)
