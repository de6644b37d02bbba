"""The strategy is GPyTorch's in eval mode, and with the optimal conditional in training; its parameters, modes and graphs."""

from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, NaturalVariationalDistribution, VariationalStrategy
from packaging.version import Version

import tighter_gp
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, double_problem, randomize_q
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


def test_prior_mode_is_the_prior():
    model = gp(conditional=tighter_gp.PerPoint(N))
    prior = model(P.x, prior=True, index=torch.arange(N))
    torch.testing.assert_close(prior.covariance_matrix, P.Kff)
    torch.testing.assert_close(prior.mean, torch.full((N,), 0.4))


# -- caches -------------------------------------------------------------------------------------------------------------


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


# -- parameters ---------------------------------------------------------------------------------------------------------


@FORMS
def test_state_dicts_of_svgp_load_strictly_both_ways(form):
    model, stock = gp(form), gp(form, VariationalStrategy, seed=3)
    stock.covar_module.outputscale = 2.3
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_equal(prediction(model.eval()), prediction(stock.eval()))
    other = gp(form, VariationalStrategy, seed=4)
    other.load_state_dict(model.state_dict(), strict=True)
    assert_equal(prediction(other.eval()), prediction(model))


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


@pytest.mark.skipif(Version(gpytorch.__version__) < Version("1.15"), reason="earlier versions have no diag=")
@FORMS
def test_training_with_diag_false_has_svgps_covariance(form):
    ours, stock = (gp(form, strategy)(P.x, diag=False).covariance_matrix for strategy in STRATEGIES)
    torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-11)


def test_index_is_taken_out_before_the_models_forward_sees_it():
    class Recorder(GP):
        def forward(self, x, **kwargs):
            self.seen = kwargs
            return super().forward(x)

    q, conditional = CholeskyVariationalDistribution(M), tighter_gp.PerPoint(N)
    model = Recorder(lambda m: tighter_gp.TighterVariationalStrategy(m, P.z, q, conditional=conditional))
    model(P.x, index=torch.arange(N), flag=3)
    assert model.seen == {"flag": 3}
    model.eval()(P.x, index=torch.arange(N), flag=4)
    assert model.seen == {"flag": 4}


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_a_prior_on_beta_enters_the_bound():
    prior = gpytorch.priors.GammaPrior(2.0, 3.0)
    model = gp(conditional=BetaConditional(beta_prior=prior))
    mll = tighter_gp.TighterELBO(make_noise(0.1), model, N, combine_terms=False)
    torch.testing.assert_close(mll(model(P.x), P.y).log_prior, prior.log_prob(torch.tensor(1.0)) / N)


@pytest.mark.parametrize("look", [tighter_gp.evaluate_bound, tighter_gp.diagnose])
def test_a_q_that_was_set_by_hand_is_the_one_that_is_looked_at(look):
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales)), make_noise(0.3)
    mean = torch.linspace(-3, 3, M)
    distribution = model.variational_strategy._variational_distribution
    distribution.variational_mean.data.copy_(mean)
    look(model, likelihood, P.x, P.y)
    assert torch.equal(distribution.variational_mean, mean)


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


def test_a_form_of_ones_own_may_have_any_covariance():
    class Dense(CholeskyVariationalDistribution):
        def forward(self):
            root = self.chol_variational_covar.tril()
            return gpytorch.distributions.MultivariateNormal(self.variational_mean, root @ root.mT)

    model = gp()
    own = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), distribution=Dense, jitter_val=1e-5, mean=0.4)
    own.load_state_dict(model.state_dict())
    assert_equal(prediction(own.eval()), prediction(model.eval()))
