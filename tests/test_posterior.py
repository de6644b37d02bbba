"""What a trained model of a kind other than the plain one predicts from: its own dimensions, features and data."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.variational import IndependentMultitaskVariationalStrategy, VariationalStrategy

import tighter_gp
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import double_problem
from tighter_gp.posterior import require_gaussian, tighter_copy, tighter_strategy

P = double_problem()
N, M = len(P.x), len(P.z)
X = P.x[:7] + 0.13
LAST_TERMS = pytest.mark.parametrize("last_term", ["drop", "exact"])


def collapsed(x=P.x, **kwargs):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    return CollapsedGP(x, P.y, P.z, kernel, make_noise(0.1), 0.3, jitter_val=1e-3, **kwargs).eval()


def assert_same(one, other):
    torch.testing.assert_close((one.mean, one.variance), (other.mean, other.variance))


@LAST_TERMS
def test_active_dims_of_a_collapsed_kernel_are_selected(last_term):
    model = collapsed(torch.cat([torch.randn(N, 1), P.x], -1), active_dims=(1, 2))
    x = torch.cat([torch.randn(7, 1), X], -1)
    assert_same(tighter_gp.predict(model, x, last_term), tighter_gp.predict(collapsed(), X, last_term))


@LAST_TERMS
def test_a_feature_extractor_of_a_collapsed_model_is_in_front_of_its_kernel(last_term):
    model = collapsed()
    forward = model.forward
    model.forward = lambda x: forward(2 * x)
    model.set_train_data(P.x / 2, P.y)
    assert_same(tighter_gp.predict(model, X / 2, last_term), tighter_gp.predict(collapsed(), X, last_term))


@LAST_TERMS
def test_a_chunked_collapsed_model_predicts_as_the_kernel_does(last_term):
    kernel, mean = make_kernel("rbf", P.variance, P.lengthscales), gpytorch.means.ConstantMean()
    mean.initialize(constant=0.3)
    model = tighter_gp.CollapsedGP(P.x, P.y, P.z, kernel, make_noise(0.1), mean, chunk_size=5, jitter_val=1e-3)
    assert_same(tighter_gp.predict(model, X, last_term), tighter_gp.predict(collapsed(), X, last_term))


def test_a_copy_of_gpytorchs_own_model_has_its_q_and_leaves_it_alone():
    model = make_gp(P.z, strategy=VariationalStrategy, jitter_val=1e-3, q=(torch.randn(M), torch.rand(M, M).tril()))
    copied = tighter_copy(model)
    assert_same(tighter_gp.predict(copied, X), tighter_gp.predict(model, X))
    copied.covar_module.outputscale = 9.0
    assert type(model.variational_strategy) is VariationalStrategy
    assert model.covar_module.outputscale.item() != 9.0


def other_covariance():
    model = collapsed()
    model.forward = lambda x: gpytorch.distributions.MultivariateNormal(x[:, 0], model.covar_module(x) * 2)
    return lambda: tighter_gp.predict(model, X)


def other_kernel():
    model = collapsed()
    model.covar_module = model.covar_module.base_kernel
    return lambda: tighter_gp.predict(model, X, "exact")


def wrapped():
    wrap = IndependentMultitaskVariationalStrategy
    model = make_gp(P.z, strategy=lambda *args, **kwargs: wrap(VariationalStrategy(*args, **kwargs), num_tasks=2))
    return lambda: tighter_strategy(model)


class Called(GP):
    def __call__(self, x):
        return super().__call__(2 * x)


REFUSED = {
    "other covariance": (other_covariance, "must return the covariance of its covar_module as it is"),
    "other kernel": (other_kernel, r"TighterInducingPointKernel as its covar_module.* got ScaleKernel"),
    "wrapped": (wrapped, "not wrapped for several tasks; got GP with IndependentMultitaskVariationalStrategy"),
    "a call of its own": (
        lambda: lambda: tighter_strategy(Called(lambda m: make_gp(P.z).variational_strategy)),
        "__call__ of its own",
    ),
    "likelihood": (
        lambda: lambda: require_gaussian(BernoulliLikelihood(), "it"),
        "it needs a Gaussian likelihood; got",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_view_is_refused(name):
    make, message = REFUSED[name]
    call = make()
    with pytest.raises(TypeError, match=message):
        call()
