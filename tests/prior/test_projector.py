"""The one thing that turns a prior and inputs into (mean, A, d), and its one decision about precision."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from linear_operator.utils.warnings import NumericalWarning

import tighter_gp
from tighter_gp.prior import Projector
from tighter_gp.prior.projector import FactorCache

KERNELS = {"lowered": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)), "other": lambda: ScaleKernel(PeriodicKernel())}


def problem(dtype=torch.float64, num_points=9):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return draw(5, 2), draw(num_points, 2)


def prior_of(kernel, mean=0.3):
    return lambda x: MultivariateNormal(torch.full_like(x[..., 0], mean), kernel(x))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lower", [True, False])
def test_projection_and_covariances_are_the_dense_ones(name, lower):
    kernel, (z, x) = KERNELS[name](), problem()
    projector = Projector(prior_of(kernel), z, jitter=1e-3, lower=lower)
    points = projector(x)
    with torch.no_grad():
        chol = torch.linalg.cholesky(kernel(z).to_dense() + 1e-3 * torch.eye(5))
        matrix = torch.linalg.inv(chol) @ kernel(z, x).to_dense()
        whole = kernel(x).to_dense()
    torch.testing.assert_close(points.mean, torch.full((9,), 0.3))
    torch.testing.assert_close(points.matrix, matrix, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(points.residual, whole.diagonal() - (matrix**2).sum(0), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(projector.covariance(x, z), kernel(x, z).to_dense(), rtol=1e-9, atol=1e-10)
    residual = projector.residual_covariance(x, x, points.matrix, points.matrix)
    torch.testing.assert_close(residual, whole - matrix.T @ matrix, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_of_the_projection_are_those_of_dense_algebra(name):
    kernel, (z, x) = KERNELS[name](), problem()
    weights = torch.randn(5, 9)
    found = (weights * Projector(prior_of(kernel), z.requires_grad_(), jitter=1e-3)(x).matrix).sum()
    chol = torch.linalg.cholesky(kernel(z).to_dense() + 1e-3 * torch.eye(5))
    expected = (weights * torch.linalg.solve_triangular(chol, kernel(z, x).to_dense(), upper=False)).sum()
    leaves = [z, *(p for p in kernel.parameters() if p.requires_grad)]
    for actual, wanted in zip(
        torch.autograd.grad(found, leaves, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        if wanted is not None:
            torch.testing.assert_close(actual, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"jitter": 1e-4}, torch.float32),
        ({"jitter": 1e-6}, torch.float64),
        ({"jitter": 1e-4, "outputscale": 1e3}, torch.float64),
        ({"jitter": 1e-4, "lengthscale": 1e-2}, torch.float64),  # inputs that span hundreds of lengthscales
        ({"noise": torch.tensor(0.1), "jitter": 1e-3}, torch.float32),
        ({"noise": torch.tensor(1e-7), "jitter": 1e-3}, torch.float64),
        ({"jitter": 1e-6, "precision": torch.float32}, torch.float32),
    ],
)
def test_the_precision_is_the_one_that_suffices(options, expected):
    kernel, (z, x) = ScaleKernel(MaternKernel(1.5)), problem(torch.float32)
    kernel.outputscale, kernel.base_kernel.lengthscale = (
        options.pop("outputscale", 1.0),
        options.pop("lengthscale", 1.0),
    )
    projector = Projector(prior_of(kernel.float()), z, **options)
    assert projector(x).matrix.dtype == expected
    assert projector.precision == expected


@pytest.mark.parametrize(("lengthscale", "expected"), [(1.0, torch.float32), (1e-2, torch.float64)])
def test_a_kernel_that_is_not_lowered_has_the_precision_that_its_inputs_ask_for(lengthscale, expected):
    kernel, (z, x) = ScaleKernel(MaternKernel(1.5)).float(), problem(torch.float32)
    kernel.base_kernel.lengthscale = lengthscale
    assert Projector(prior_of(kernel), z, jitter=1e-3, lower=False)(x).matrix.dtype == expected


def test_the_precision_is_that_of_all_chunks():
    kernel, (z, x) = ScaleKernel(MaternKernel(1.5)).float(), problem(torch.float32)
    far = torch.cat([x, x + 100.0])
    projector = Projector(prior_of(kernel), z, jitter=1e-4).settle([far[:9], far[9:]])
    assert projector(far[:9]).matrix.dtype == torch.float64


def test_a_later_chunk_that_asks_for_more_gets_it():
    kernel, (z, x) = ScaleKernel(MaternKernel(1.5)).float(), problem(torch.float32)
    projector = Projector(prior_of(kernel), z, jitter=1e-4)
    assert projector(x).matrix.dtype == torch.float32
    assert projector(x + 100.0).matrix.dtype == torch.float64


def test_nan_is_named_and_a_singular_matrix_gets_a_jitter_once():
    kernel, (z, x) = ScaleKernel(RBFKernel()), problem()
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 9 rows"):
        Projector(prior_of(kernel), z, jitter=1e-6)(torch.where(torch.arange(9).unsqueeze(-1) == 3, torch.nan, x))
    warned: set[str] = set()
    twice = z[[0, 0, 1, 1, 2]]
    with pytest.warns(NumericalWarning, match="K_ZZ .* was not positive definite"):
        Projector(prior_of(kernel), twice, warned=warned)(x)
    Projector(prior_of(kernel), twice, warned=warned)(x)  # a second warning would be an error


def test_a_float32_factor_where_it_is_asked_for_and_works():
    kernel, (z, x) = ScaleKernel(RBFKernel()).float(), problem(torch.float32)
    wide = Projector(prior_of(kernel), z, jitter=1e-4)
    expected = wide(x)
    assert wide.factor.dtype == torch.float64
    with tighter_gp.settings.float32_factor():
        narrow = Projector(prior_of(kernel), z, jitter=1e-4)
        torch.testing.assert_close(narrow(x).residual, expected.residual, rtol=1e-3, atol=1e-4)
        assert narrow.factor.dtype == torch.float32
        kernel.outputscale = 1e5
        assert Projector(prior_of(kernel), z, jitter=1e-4)(x).matrix.dtype == torch.float64


def test_training_with_a_float32_factor_has_nearly_the_same_gradients():
    torch.manual_seed(0)
    x, y = torch.rand(40, 2).float(), torch.randn(40).float()
    model = tighter_gp.models.Regression(inducing_points=x[:8].clone()).float()
    mll = tighter_gp.TighterELBO(model.likelihood, model, 40)
    mll(model(x), y)
    found = []
    for on in (False, True):
        mll.zero_grad()
        with tighter_gp.settings.float32_factor(on):
            (-mll(model(x), y)).backward()
        found.append([p.grad.clone() for p in mll.parameters() if p.grad is not None])
    for wide, narrow in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=1e-3 * float(wide.abs().max()) + 1e-6)


def test_gpytorch_is_not_told_to_evaluate_what_nobody_asks_for():
    """A step of a multitask model makes one projection, and no covariance between points."""
    x, y = torch.rand(30, 2), torch.randn(30, 3)
    model = tighter_gp.models.MultiOutputRegression(3, inducing_points=x[:6].clone())
    q = model(x)
    carriers = list(tighter_gp.carrier.iter_carriers(q.lazy_covariance_matrix))
    (-tighter_gp.TighterELBO(model.likelihood, model, 30)(q, y)).backward()
    assert "whole" not in vars(carriers[0])
    assert gpytorch.settings.lazily_evaluate_kernels.on()


def test_a_factor_from_inference_mode_can_be_used_in_a_graph():
    cache, matrix = FactorCache(), torch.eye(2)
    with torch.inference_mode():
        factor = torch.ones(2, 2)
        cache.put(matrix, factor)
        assert cache.get(matrix) is factor
    outside = cache.get(matrix)
    assert not outside.is_inference()
    assert torch.equal(outside, torch.ones(2, 2))
    assert cache.get(2 * matrix) is None


def test_nothing_is_known_of_the_spread_of_inputs_before_there_are_any():
    kernel, (z, x) = ScaleKernel(RBFKernel()).float(), problem(torch.float32)
    projector = Projector(prior_of(kernel), z, jitter=1e-4)
    assert projector.least_spread == 0.0
    assert projector.settle([x]).least_spread > 0.0


@pytest.mark.parametrize("lower", [True, False])
def test_the_spread_of_all_inputs_is_the_largest(lower):
    """In lengthscales, with a margin for kernels of which nothing is known."""
    kernel, (z, x) = ScaleKernel(RBFKernel()).float(), problem(torch.float32)
    kernel.base_kernel.lengthscale = 2.0
    chunks = [x, x + 30.0, x + 3.0]
    projector = Projector(prior_of(kernel), z, jitter=1e-4, lower=lower).settle(chunks)
    whole = Projector(prior_of(kernel), z, jitter=1e-4, lower=lower).settle([chunks[1]])
    assert torch.equal(projector.least_spread, whole.least_spread)
    norm = torch.cat([z, chunks[1]]).div(2.0).square().sum(-1).amax()
    factor = float(projector.least_spread / norm)
    assert factor == pytest.approx(16.0) if not lower else factor < 4.0


def test_inputs_beyond_those_that_were_settled_get_the_precision_they_ask_for():
    kernel, (z, x) = ScaleKernel(MaternKernel(1.5)).float(), problem(torch.float32)
    projector = Projector(prior_of(kernel), z, jitter=1e-4).settle([x])
    assert projector(x).matrix.dtype == torch.float32
    assert projector(x + 100.0).matrix.dtype == torch.float64
