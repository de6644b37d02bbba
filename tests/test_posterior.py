"""The view on a trained model: prior blocks and q, the same for an uncollapsed and a collapsed model."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.variational import IndependentMultitaskVariationalStrategy, VariationalStrategy

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, double_problem, randomize_q
from tighter_gp.posterior import posterior_of, require_gaussian, tighter_strategy

P = double_problem()
N, M = len(P.x), len(P.z)
X = P.x[:7] + 0.13
JITTER = 1e-3


def k(a, b):
    return dense.rbf(a, b, P.variance, P.lengthscales)


def sparse(form="cholesky"):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    model = make_gp(P.z, kernel, distribution=Q_FORMS[form], mean=0.3, jitter_val=JITTER)
    return randomize_q(model).eval()


def collapsed(noise=P.noise[0], **kwargs):
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    return CollapsedGP(P.x, P.y, P.z, kernel, make_noise(noise), 0.3, jitter_val=JITTER, **kwargs).eval()


def chunked(noise=P.noise[0]):
    mean = gpytorch.means.ConstantMean()
    mean.initialize(constant=0.3)
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    return tighter_gp.CollapsedGP(
        P.x, P.y, P.z, kernel, make_noise(noise), mean, chunk_size=5, jitter_val=JITTER
    ).eval()


MODELS = pytest.mark.parametrize("make", [sparse, collapsed, chunked])


def test_the_view_fits_the_model():
    view = posterior_of(sparse())
    assert view.strategy is not None
    assert view.training is None
    for view in (posterior_of(collapsed()), posterior_of(chunked())):
        assert view.strategy is None
        assert torch.equal(view.training.x, P.x)


@pytest.mark.parametrize("last_term", ["drop", "exact", "optimal", "subset"])
def test_a_chunked_collapsed_model_predicts_as_the_kernel_does(last_term):
    expected = tighter_gp.predict(collapsed(), X, last_term)
    actual = tighter_gp.predict(chunked(), X, last_term)
    torch.testing.assert_close(actual.mean, expected.mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(actual.variance, expected.variance, rtol=1e-7, atol=1e-8)


@MODELS
def test_the_projection_and_residual_are_the_dense_ones(make):
    points = posterior_of(make()).projector(X)
    covariance = P.Kuu + JITTER * torch.eye(M)
    projection = torch.linalg.inv(torch.linalg.cholesky(covariance)) @ k(P.z, X)
    torch.testing.assert_close(points.mean, torch.full((7,), 0.3))
    torch.testing.assert_close(points.matrix, projection, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(points.residual, P.variance - (projection**2).sum(0), rtol=1e-9, atol=1e-10)


@MODELS
def test_covariances_between_two_sets_of_points(make):
    view = posterior_of(make())
    one, other = view.projector(X), view.projector(P.x)
    torch.testing.assert_close(view.projector.covariance(X, P.x), k(X, P.x))
    explained = k(X, P.z) @ torch.linalg.inv(P.Kuu + JITTER * torch.eye(M)) @ P.Kuf
    residual = view.projector.residual_covariance(X, P.x, one.matrix, other.matrix)
    torch.testing.assert_close(residual, k(X, P.x) - explained, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", Q_FORMS)
def test_the_moments_of_an_uncollapsed_model_are_its_prediction(form):
    model = sparse(form)
    view = posterior_of(model)
    mean, variance = view.moments(view.projector(X))
    expected = model(X)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(variance, expected.variance)


@pytest.mark.parametrize("noise", [P.noise[0], torch.linspace(0.02, 0.5, N, dtype=torch.float64)], ids=["one", "fixed"])
def test_the_q_of_a_collapsed_model_is_the_optimal_one(noise):
    view = posterior_of(collapsed(noise))
    sparse_model = sparse()
    tighter_gp.set_optimal_q(sparse_model, make_noise(noise), P.x, P.y)
    q = sparse_model.variational_strategy.variational_distribution
    torch.testing.assert_close(view.q.mean, q.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(view.q.root @ view.q.root.mT, q.covariance_matrix, rtol=1e-9, atol=1e-9)


def test_active_dims_of_a_collapsed_kernel_are_selected():
    wide = torch.cat([torch.randn(N, 1), P.x], dim=-1)
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    model = CollapsedGP(wide, P.y, P.z, kernel, make_noise(0.1), 0.3, jitter_val=JITTER, active_dims=(1, 2)).eval()
    x = torch.cat([torch.randn(7, 1), X], dim=-1)
    view, narrow = posterior_of(model), posterior_of(collapsed(0.1))
    for actual, expected in zip(view.projector(x), narrow.projector(X), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(view.projector.covariance(x, wide), k(X, P.x))
    torch.testing.assert_close(view.q.mean, narrow.q.mean)


def test_a_feature_extractor_of_a_collapsed_model_is_in_front_of_its_kernel():
    model, expected = collapsed(0.1), collapsed(0.1)
    forward = model.forward
    model.forward = lambda x: forward(2 * x)
    model.set_train_data(P.x / 2, P.y)
    for last_term in ("drop", "exact"):
        one, other = tighter_gp.predict(model, X / 2, last_term), tighter_gp.predict(expected, X, last_term)
        torch.testing.assert_close(one.mean, other.mean)
        torch.testing.assert_close(one.variance, other.variance)


def test_a_collapsed_model_returns_the_covariance_of_its_kernel():
    model = collapsed()
    forward = model.forward
    model.forward = lambda x: forward(x) + forward(x)
    with pytest.raises(TypeError, match="must return the covariance of its covar_module as it is; got Sum"):
        posterior_of(model)


@pytest.mark.parametrize("strategy", [VariationalStrategy, IndependentMultitaskVariationalStrategy])
def test_a_strategy_that_is_not_ours_is_refused(strategy):
    make = lambda model: VariationalStrategy(model, P.z, Q_FORMS["cholesky"](M, batch_shape=torch.Size([2])))
    wrap = lambda model: make(model) if strategy is VariationalStrategy else strategy(make(model), num_tasks=2)
    with pytest.raises(TypeError, match=f"not wrapped for several tasks; got GP with {strategy.__name__}"):
        tighter_strategy(GP(wrap))


def test_a_model_that_is_none_is_refused():
    with pytest.raises(TypeError, match="got Linear with NoneType"):
        posterior_of(torch.nn.Linear(1, 1))


def test_a_collapsed_model_needs_our_kernel():
    model = collapsed()
    model.covar_module = gpytorch.kernels.RBFKernel()
    with pytest.raises(TypeError, match=r"needs a TighterInducingPointKernel as its covar_module.* got RBFKernel"):
        posterior_of(model)


def test_a_gaussian_likelihood_is_required_by_name():
    require_gaussian(make_noise(0.1), "this")
    with pytest.raises(TypeError, match="this needs a Gaussian likelihood; got BernoulliLikelihood"):
        require_gaussian(BernoulliLikelihood(), "this")
