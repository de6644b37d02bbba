"""The chunked collapsed bound equals the dense one, and its model predicts from sums."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.support import LargestOutput, randomize_q
from tighter_gp.collapsed import core

DENSE = {"titsias": dense.f1, "spherical": dense.f5, "tighter": dense.f4}


class Plain(gpytorch.kernels.RBFKernel):
    """A class of its own: evaluated by GPyTorch, not by the package."""


@pytest.mark.parametrize("bound", DENSE)
@pytest.mark.parametrize("chunk_size", [1, 5, 17, 100])
@pytest.mark.parametrize("hetero", [False, True])
def test_chunked_bound_is_the_dense_bound(bound, chunk_size, hetero):
    p = dense.problem(3, hetero=hetero)
    kernel = make_kernel(p.kernel, p.variance, p.lengthscales)
    value = tighter_gp.collapsed_bound(kernel, p.z, p.x, p.y, p.noise, bound=bound, chunk_size=chunk_size)
    torch.testing.assert_close(value, DENSE[bound](p), rtol=1e-10, atol=0)


@pytest.mark.parametrize("bound", DENSE)
@pytest.mark.parametrize("kept", [10**6, 0])
def test_chunked_gradient_is_that_of_the_unchunked_bound(bound, kept, monkeypatch):
    monkeypatch.setattr(core, "_KEPT", kept)  # graphs of the first pass kept, or not
    p = dense.problem(4)
    kernel = make_kernel(p.kernel, p.variance, p.lengthscales)
    z, y, noise = p.z.clone().requires_grad_(), p.y.clone().requires_grad_(), p.noise[:1].clone().requires_grad_()
    tensors = [z, y, noise, *kernel.parameters()]

    def gradients(value):
        return torch.autograd.grad(value, tensors)

    functions = {
        "titsias": tighter_gp.maths.bounds.titsias_bound,
        "spherical": tighter_gp.maths.bounds.spherical_bound,
        "tighter": tighter_gp.maths.bounds.tighter_bound,
    }
    projection = torch.linalg.solve_triangular(
        torch.linalg.cholesky(kernel(z).to_dense()), kernel(z, p.x).to_dense(), upper=False
    )
    residual = kernel(p.x, diag=True) - projection.square().sum(0)
    expected = gradients(functions[bound](projection, y, noise, residual))
    chunked = gradients(tighter_gp.collapsed_bound(kernel, z, p.x, y, noise, bound=bound, chunk_size=4))
    for mine, theirs in zip(chunked, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)


def make_model(p, **kwargs):
    kernel, likelihood = make_kernel(p.kernel, p.variance, p.lengthscales), make_noise(p.noise[0])
    return tighter_gp.CollapsedGP(p.x, p.y, p.z, kernel, likelihood, chunk_size=5, **kwargs)


def test_model_predicts_as_the_dense_posterior():
    p = dense.problem(7)
    mean, cov = dense.optimal_q(p)
    x = 3 * torch.rand(6, 2)
    k = dense.KERNELS[p.kernel]
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ k(p.z, x, p.variance, p.lengthscales)
    q = make_model(p).predict(x)
    torch.testing.assert_close(q.mean, a.T @ mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        q.variance, p.variance - (a * a).sum(0) + (a.T @ cov @ a).diagonal(), rtol=1e-9, atol=1e-9
    )


def test_test_inputs_come_in_batches_or_not_at_all():
    p = dense.problem(7)
    model = make_model(p)
    x = 3 * torch.rand(2, 6, 2)
    together = model.predict(x)
    for i in range(2):
        alone = model.predict(x[i])
        torch.testing.assert_close(together.mean[i], alone.mean)
        torch.testing.assert_close(together.variance[i], alone.variance)
    assert model.predict(x[0, :0]).mean.shape == model.predict(x[0, :0]).variance.shape == (0,)


# -- float32 ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*was not positive definite")
@pytest.mark.parametrize("base", [gpytorch.kernels.RBFKernel, Plain])
@pytest.mark.parametrize(
    ("outputscale", "lengthscale", "noise"),
    [(1.0, 0.3, 1e-2), (1.0, 100.0, 1e-6), (1e6, 0.3, 1e-2), (1e6, 1.0, 1e-2), (1e6, 100.0, 1e-2)],
)
def test_bound_gradient_and_predictions_in_float32_are_those_of_float64(outputscale, lengthscale, noise, base):
    x = torch.rand(50, 2).float()
    y = outputscale**0.5 * torch.sin(6 * x[:, 0])
    kernel = gpytorch.kernels.ScaleKernel(base())
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, lengthscale
    model = tighter_gp.CollapsedGP(x, y, x[:15], kernel, make_noise(noise)).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        twin = copy.deepcopy(model).to(dtype)
        value, q = twin.bound(), twin.predict(x[:20].to(dtype) + 0.01)
        value.backward()
        variance = q.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)  # .variance rounds up
        gradient = kernel_gradient(twin)
        found.append([tensor.detach().double() for tensor in (value, gradient, q.mean, variance)])
    for narrow, wide, rtol in zip(*found, (1e-5, 1e-3, 1e-3, 1e-3), strict=True):
        torch.testing.assert_close(narrow, wide, rtol=rtol, atol=1e-5 * float(wide.abs().max()))


def kernel_gradient(model):
    return torch.stack([parameter.grad.flatten() for parameter in model.covar_module.parameters()])


def test_a_pass_keeps_no_array_of_n_times_m():

    x, y = torch.rand(4000, 2), torch.randn(4000)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=2))
    z = x[:40].clone().requires_grad_()
    with LargestOutput() as seen:
        tighter_gp.collapsed_bound(kernel, z, x, y, torch.tensor(0.1), chunk_size=100).backward()
    assert seen.largest <= 2 * 4040  # data and inducing points; a chunk is 40 x 100


def test_float64_arrays_make_a_model_in_float64():
    """As the ready-made models do; the kernel and likelihood given become part of it."""
    torch.set_default_dtype(torch.float32)
    p = dense.problem(9)
    x, y, z = (tensor.double().numpy() for tensor in (p.x, p.y, p.z))
    kernel, likelihood = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()), make_noise(0.1)
    model = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    wide = tighter_gp.collapsed_bound(kernel, z, x, y, 0.1)
    assert model.bound().dtype == wide.dtype == model.predict(x).mean.dtype == torch.float64
    torch.testing.assert_close(model.bound(), wide, rtol=1e-5, atol=0)  # parameters have float32's digits


def dense_bound(kernel, z, x, y, mean, noise):
    factor = torch.linalg.cholesky(kernel(z).to_dense())
    a = torch.linalg.solve_triangular(factor, kernel(z, x).to_dense(), upper=False)
    residual = kernel(x).to_dense().diagonal() - a.square().sum(0)
    q = torch.distributions.MultivariateNormal(mean, a.mT @ a + noise * torch.eye(len(y)))
    return q.log_prob(y) - 0.5 * torch.log1p(residual / noise).sum()


class Features(gpytorch.kernels.Kernel):
    def __init__(self, net):
        super().__init__()
        self.net, self.base = net, gpytorch.kernels.RBFKernel()

    def forward(self, a, b, diag=False, **kwargs):
        return self.base(self.net(a), self.net(b), diag=diag, **kwargs)


class FeatureMean(gpytorch.means.Mean):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, a):
        return self.net(a).sum(-1)


def toy():
    torch.manual_seed(0)
    return 3 * torch.rand(20, 2), torch.randn(20), torch.tensor(0.1)


def test_a_network_that_mean_and_kernel_share_has_its_gradient_once():
    x, y, noise = toy()
    net = torch.nn.Linear(2, 2)
    model = tighter_gp.CollapsedGP(x, y, x[::5], Features(net), make_noise(noise), FeatureMean(net))
    expected = dense_bound(model.covar_module, model.inducing_points, x, y, model.mean_module(x), noise)
    found, wanted = (torch.autograd.grad(value, net.weight)[0] for value in (model.bound(), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [7, 100])
def test_inducing_points_may_depend_on_the_inputs(chunk_size):
    raw, y, noise = toy()
    weight = torch.randn(2, 2, requires_grad=True)
    kernel = gpytorch.kernels.RBFKernel()
    x = raw @ weight
    found = tighter_gp.collapsed_bound(kernel, x[::5], x, y, noise, chunk_size=chunk_size)
    expected = dense_bound(kernel, x[::5], x, y, torch.zeros(20), noise)
    torch.testing.assert_close(found, expected)
    leaves = [weight, *kernel.parameters()]
    for one, other in zip(
        *(torch.autograd.grad(value, leaves, retain_graph=True) for value in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def wide_data(dtype, width=1000):
    generator = torch.Generator().manual_seed(4)
    x = (torch.rand(200, 1, generator=generator, dtype=torch.float64) * width).float().double()
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype), x[:40].clone().to(dtype)


@pytest.mark.parametrize("kind", ["collapsed", "sparse"])
@pytest.mark.parametrize("outputscale", [1.0, 1000.0])
@pytest.mark.parametrize("make", [lambda: MaternKernel(0.5), lambda: MaternKernel(1.5), RBFKernel, RQKernel])
@pytest.mark.parametrize("width", [100, 300, 1000])
def test_float32_inputs_that_span_a_thousand_lengthscales(kind, outputscale, make, width):
    values, slopes = {}, {}
    for dtype in (torch.float64, torch.float32):
        x, y, z = wide_data(dtype, width)
        kernel = ScaleKernel(make()).to(dtype)
        kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 1.0
        likelihood = make_noise(0.1).to(dtype)
        if kind == "collapsed":
            value = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood, jitter_val=1e-4).bound() / len(x)
        else:
            model = randomize_q(make_gp(z, kernel, jitter_val=1e-4).to(dtype))
            value = tighter_gp.TighterELBO(likelihood, model, len(x))(model(x), y)
        value.backward()
        values[dtype] = value.item()
        slopes[dtype] = kernel.base_kernel.raw_lengthscale.grad.item()
    assert values[torch.float32] == pytest.approx(values[torch.float64], rel=1e-4)
    assert slopes[torch.float32] == pytest.approx(slopes[torch.float64], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matern_12_leaves_nothing_at_an_inducing_point_however_wide_the_inputs(dtype):
    x, y, _ = wide_data(dtype, 3000)
    model = tighter_gp.CollapsedGP(x, y, x, ScaleKernel(MaternKernel(0.5)).to(dtype), make_noise(1e-3).to(dtype))
    model.covar_module.outputscale = 1000.0
    model.likelihood.noise = 1e-3
    x = x.double()
    covariance = 1000 * torch.exp(-(x - x.mT).abs() / model.covar_module.base_kernel.lengthscale.double())
    noise = model.likelihood.noise.double() * torch.eye(len(x), dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), covariance + noise)
    assert model.bound().item() == pytest.approx(prior.log_prob(y.double()).item(), rel=1e-5)
