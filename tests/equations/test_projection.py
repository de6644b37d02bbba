"""(prior mean, A, d) of any kernel against dense float64 references, their gradients, and the one rule of precision."""

from __future__ import annotations

import itertools

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning

import tighter_gp
from tests.tools.audit import covariance as dense
from tests.tools.factories import GP
from tighter_gp.prior.kernels import squared_distance

B, M, D = 11, 5, 3


def ard(kernel, dims=D):
    kernel.lengthscale = 0.5 + torch.rand(dims)
    return kernel


KERNELS = {
    "rbf": lambda: ard(kernels.RBFKernel(ard_num_dims=D)),
    "matern12": lambda: ard(kernels.MaternKernel(0.5, ard_num_dims=D)),
    "matern32": lambda: kernels.ScaleKernel(ard(kernels.MaternKernel(1.5, ard_num_dims=D))),
    "matern52": lambda: kernels.ScaleKernel(ard(kernels.MaternKernel(2.5, ard_num_dims=D))),
    "rq": lambda: kernels.ScaleKernel(ard(kernels.RQKernel(ard_num_dims=D))),
    "linear": lambda: kernels.ScaleKernel(kernels.LinearKernel()) + kernels.RBFKernel(),
    "periodic": lambda: kernels.ScaleKernel(kernels.PeriodicKernel()) * kernels.RBFKernel(),
    "sum of products": lambda: (
        kernels.ScaleKernel(ard(kernels.RBFKernel(ard_num_dims=2, active_dims=(0, 2)), 2))
        + kernels.MaternKernel(1.5) * kernels.MaternKernel(2.5, active_dims=(1,))
    ),
    "scaled selection": lambda: kernels.ScaleKernel(kernels.RBFKernel(active_dims=(2,))) + kernels.RBFKernel(),
    "batch": lambda: kernels.ScaleKernel(
        kernels.MaternKernel(1.5, ard_num_dims=D, batch_shape=torch.Size([2])), batch_shape=torch.Size([2])
    ),
}


def model_of(kernel, z, jitter=1e-6, forward=None, **kwargs):
    shape = kernel.batch_shape
    q = gpytorch.variational.CholeskyVariationalDistribution(len(z), shape)
    model = GP(lambda m: tighter_gp.TighterVariationalStrategy(m, z, q, jitter_val=jitter, **kwargs), kernel)
    if forward is not None:
        model.forward = forward
    return model.to(z.dtype).train()


def reference(covariance, x, z, jitter):
    chol = torch.linalg.cholesky(covariance(z, z) + jitter * torch.eye(len(z)))
    matrix = torch.linalg.inv(chol) @ covariance(z, x)
    return matrix, covariance(x, x).diagonal(dim1=-1, dim2=-2) - matrix.square().sum(-2)


@pytest.mark.parametrize("name", KERNELS)
def test_a_and_d_and_their_gradients(name):
    torch.manual_seed(1)
    kernel, x, z = KERNELS[name](), torch.randn(B, D), torch.randn(M, D)
    for parameter in kernel.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model = model_of(kernel, z)
    points, inputs = model.variational_strategy.inducing_points, x.clone().requires_grad_()
    leaves = [*kernel.parameters(), points, inputs]
    found = model.variational_strategy.project(inputs)
    matrix, residual = reference(lambda a, b: dense(kernel, a, b), inputs, points, 1e-6)
    torch.testing.assert_close(found.matrix, matrix, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.residual, residual, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.mean, torch.zeros(B))
    value = lambda matrix, residual: (matrix * torch.arange(1.0, B + 1).sin()).sum() + (residual + 1).log().sum()
    ours, theirs = (
        torch.autograd.grad(value(*pair), leaves) for pair in ((found.matrix, found.residual), (matrix, residual))
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [kernels.RBFKernel, lambda: kernels.ScaleKernel(kernels.MaternKernel(1.5))])
def test_many_dimensions(make):
    """Distances are another product there."""
    torch.manual_seed(1)
    kernel, x, z = make(), torch.randn(B, 90) / 5, torch.randn(M, 90) / 5
    inputs = x.clone().requires_grad_()
    found = model_of(kernel, z).variational_strategy.project(inputs)
    matrix, residual = reference(lambda a, b: dense(kernel, a, b), inputs, z, 1e-6)
    torch.testing.assert_close(found.residual, residual, rtol=1e-8, atol=1e-8)
    slopes = (torch.autograd.grad(each.sin().sum(), inputs)[0] for each in (found.matrix, matrix))
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)


def test_inputs_that_are_inducing_points_leave_nothing():
    torch.manual_seed(0)
    z = torch.randn(M, D)
    model = model_of(kernels.ScaleKernel(kernels.MaternKernel(1.5)), z, jitter=0.0)
    assert float(model.variational_strategy.project(z).residual.detach().max()) < 1e-12


@pytest.mark.parametrize("size", [0, 1])
def test_few_rows(size):
    model = model_of(kernels.RBFKernel(), torch.randn(M, D))
    assert model.variational_strategy.project(torch.randn(size, D)).residual.shape == (size,)


COVARIANCES = {
    "times a number": lambda k, x: k(x) * 2.0,
    "with jitter": lambda k, x: k(x).add_jitter(0.1),
    "sum of two": lambda k, x: k(x) + k(x) * 0.5,
    "evaluated": lambda k, x: k(x).evaluate_kernel(),
}


@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_that_a_forward_has_changed(name):
    """In float32, of a jitter that only float64 keeps."""
    torch.manual_seed(0)
    kernel, x, z = kernels.ScaleKernel(kernels.RBFKernel()), torch.rand(B, 1), torch.linspace(0, 1, M).unsqueeze(-1)
    kernel.outputscale, covariance = 1.7, COVARIANCES[name]
    forward = lambda x: gpytorch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), covariance(kernel, x))
    wide = model_of(kernel, z, forward=forward).variational_strategy.project(x)
    matrix, residual = reference_of(covariance, kernel, x, z)
    torch.testing.assert_close(wide.matrix, matrix, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(wide.residual, residual, rtol=1e-5, atol=1e-9)
    if name != "evaluated":  # which is float32 before anyone can ask for more
        narrow = model_of(kernel.float(), z.float(), forward=forward).variational_strategy.project(x.float())
        torch.testing.assert_close(narrow.residual.double(), residual, rtol=0.05, atol=3e-7)


def reference_of(covariance, kernel, x, z):
    joint = covariance(kernel, torch.cat([z, x])).to_dense()
    chol = torch.linalg.cholesky(joint[:M, :M] + 1e-6 * torch.eye(M))
    matrix = torch.linalg.inv(chol) @ joint[:M, M:]
    return matrix, joint[M:, M:].diagonal() - matrix.square().sum(-2)


SETTINGS = list(itertools.product((1, 8), (0.05, 0.5, 5.0), (0.1, 1.0, 30.0), (1e-4, 1e-6), (0.0, 100.0)))


@pytest.mark.parametrize("kind", ["rbf", "matern32"])
def test_float32_is_as_good_as_its_jitter(kind):
    """The error of d, relative to d + jitter, over dimensions, lengthscales, variances, jitters and offsets of the inputs."""
    worst = 0.0
    for seed, (dims, lengthscale, variance, jitter, offset) in enumerate(SETTINGS):
        torch.manual_seed(seed)
        x = (torch.randn(60, dims) + offset).float()
        z = x[:20] + 0.01 * torch.randn(20, dims).float()
        base = kernels.RBFKernel() if kind == "rbf" else kernels.MaternKernel(1.5)
        kernel = kernels.ScaleKernel(base)
        kernel.outputscale, base.lengthscale = variance, lengthscale
        model = model_of(kernel.float(), z, jitter=jitter)
        found = model.variational_strategy.project(x).residual.detach().double()
        wide = kernel.double()
        with torch.no_grad():
            _, residual = reference(lambda a, b, k=wide: dense(k, a, b), x.double(), z.double(), jitter)
        worst = max(worst, float(((found - residual.clamp_min(0)).abs() / (residual.clamp_min(0) + jitter)).max()))
    assert worst < 0.05


def test_the_variance_of_the_data_counts_for_the_precision():
    """A kernel that grows with its inputs: rounding of k_nn far from Z is more than the jitter."""
    kernel, z, x = kernels.LinearKernel(), 0.01 * torch.randn(M, 2).float(), 300 * torch.randn(B, 2).float()
    found = model_of(kernel.float(), z, jitter=1e-4).variational_strategy.project(x).residual
    wide = kernel.double()
    _, residual = reference(lambda a, b: dense(wide, a, b), x.double(), z.double(), 1e-4)
    torch.testing.assert_close(found.double(), residual, rtol=1e-5, atol=1e-3)


def test_a_matrix_that_cannot_be_factorised():
    z = torch.zeros(M, 1)
    kernel = kernels.RBFKernel()
    forward = lambda x: gpytorch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), kernel(x) * -1.0)
    model = model_of(kernel, z, forward=forward)
    with pytest.raises(NotPSDError, match=r"K_ZZ \(5x5, float64\).*jitter_val was 1e-06.*larger jitter_val"):
        model.variational_strategy.project(torch.zeros(2, 1))
    unchecked = model.variational_strategy.project(torch.zeros(2, 1), check=False)
    assert bool(unchecked.residual.isnan().all())


def test_points_that_coincide_are_factorised_with_a_jitter_of_their_scale():
    kernel = kernels.ScaleKernel(kernels.RBFKernel())
    kernel.outputscale = 1e6
    model = model_of(kernel, torch.zeros(M, 1), jitter=0.0)
    with pytest.warns(NumericalWarning, match="K_ZZ .* was not positive definite"):
        found = model.variational_strategy.project(torch.zeros(2, 1))
    assert float(found.residual.detach().max()) < 1e6 * 1e-5


def test_squared_distances_of_a_batch():
    """In float32, each as good as its own digits."""
    torch.manual_seed(0)
    x = torch.randn(3, 900, 2).float()
    rows, columns = slice(None, 850), slice(None)
    found = squared_distance(x, rows, columns)
    assert found.dtype == torch.float32
    expected = torch.cdist(x.double()[:, rows], x.double()).square()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
