"""Lowered kernels have GPyTorch's values and gradients."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

from tests.tools.factories import make_gp
from tighter_gp.prior.kernels import lower, lower_lazy

BATCH = torch.Size([2])

KERNELS = {
    "rbf": lambda: RBFKernel(),
    "rbf_ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern12": lambda: ScaleKernel(MaternKernel(0.5, ard_num_dims=3)),
    "matern32": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=3)),
    "matern52": lambda: MaternKernel(2.5, ard_num_dims=3),
    "rational_quadratic": lambda: ScaleKernel(RQKernel(ard_num_dims=3)),
    "linear": lambda: ScaleKernel(LinearKernel()),
    "linear_ard": lambda: LinearKernel(ard_num_dims=3),
    "active_dims": lambda: ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[0, 2])),
    "sum": lambda: LinearKernel() + ScaleKernel(RBFKernel(active_dims=[1])) + MaternKernel(1.5),
    "product": lambda: ScaleKernel(RBFKernel(active_dims=[1]) * MaternKernel(2.5, active_dims=[0, 2])),
    "scaled_scale": lambda: ScaleKernel(ScaleKernel(MaternKernel(1.5))),
    "batch": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=3, batch_shape=BATCH), batch_shape=BATCH),
    "batch_scale": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=3), batch_shape=BATCH),
    "batch_rq": lambda: ScaleKernel(RQKernel(batch_shape=BATCH), batch_shape=BATCH),
    "batch_sum": lambda: ScaleKernel(RBFKernel(batch_shape=BATCH), batch_shape=BATCH) + LinearKernel(),
}


def perturbed(kernel):
    for parameter in kernel.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return kernel


def gradients(value, weights, tensors):
    return torch.autograd.grad((value * weights).sum(), tensors)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("same", [True, False], ids=["symmetric", "cross"])
def test_values_and_gradients_are_gpytorchs(name, same):
    kernel = perturbed(KERNELS[name]())
    x1 = torch.randn(7, 3, requires_grad=True)
    x2 = x1 if same else torch.randn(5, 3, requires_grad=True)
    lowered = lower(kernel)
    ours, theirs = lowered.covariance(lowered.values, x1, x2), kernel(x1, x2).to_dense()
    # GPyTorch's distance of a point from itself is the root of a rounding error, which Matérn-1/2 shows.
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-7 if name == "matern12" else 1e-9)
    weights, tensors = torch.randn_like(ours), [x1, x2, *kernel.parameters()]
    for mine, other in zip(gradients(ours, weights, tensors), gradients(theirs, weights, tensors), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_variance_is_the_diagonal(name):
    kernel = perturbed(KERNELS[name]())
    x, lowered = torch.randn(7, 3), lower(kernel)
    torch.testing.assert_close(lowered.variance(lowered.values, x), kernel(x, diag=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["matern32", "batch", "sum"])
def test_batches_of_inputs_broadcast_with_batches_of_kernels(name):
    kernel = perturbed(KERNELS[name]())
    x1, x2 = torch.randn(4, 1, 7, 3), torch.randn(4, 1, 5, 3)
    lowered = lower(kernel)
    ours = lowered.covariance(lowered.values, x1, x2)
    torch.testing.assert_close(ours, kernel(x1, x2).to_dense().expand_as(ours), rtol=1e-10, atol=1e-9)


def test_symmetric_matrix_has_an_exact_diagonal_in_float32():
    kernel = MaternKernel(0.5).float()
    x = (1e3 + torch.randn(50, 3)).float()
    lowered = lower(kernel)
    torch.testing.assert_close(
        lowered.covariance(lowered.values, x, x).diagonal(), torch.ones(50).float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["rbf_ard", "matern32", "matern52", "rational_quadratic"])
@pytest.mark.parametrize("same", [True, False], ids=["symmetric", "cross"])
def test_inputs_far_from_zero_keep_their_digits_in_float32(name, same):
    """Such as dates: a division by the lengthscale, before anything else, would round a tenth of a lengthscale away."""
    found, x1, x2 = [], (1e5 + torch.rand(7, 3)).float(), (1e5 + torch.rand(5, 3)).float()
    weights = torch.randn(7, 7 if same else 5)
    for dtype in (torch.float32, torch.float64):
        kernel = KERNELS[name]().to(dtype)
        (kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel).lengthscale = 0.1
        lowered, a = lower(kernel), x1.to(dtype).requires_grad_()
        value = lowered.covariance(lowered.values, a, a if same else x2.to(dtype))
        found.append([value.detach(), *gradients(value, weights.to(dtype), [a, *kernel.parameters()])])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-5 * float(wide.abs().max()))


def test_lowered_kernel_says_that_it_cannot_be_differentiated_twice():
    lowered, x = lower(RBFKernel()), torch.randn(4, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(lowered.covariance(lowered.values, x, x).sum(), x, create_graph=True)


class Doubled(RBFKernel):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    "kernel", [PeriodicKernel(), ScaleKernel(PeriodicKernel()), RBFKernel() + PeriodicKernel(), Doubled()], ids=str
)
def test_other_kernels_are_left_to_gpytorch(kernel):
    assert lower(kernel) is None


def test_lazy_tensors_of_two_different_inputs_are_not_lowered():
    assert lower_lazy(RBFKernel()(torch.randn(4, 2), torch.randn(4, 2))) is None
    assert lower_lazy(RBFKernel()(torch.randn(4, 2))) is not None


def test_a_deep_kernel_is_taken_from_what_forward_returns():
    """The model's covar_module sees features, not inputs."""

    def build(kernel):
        torch.manual_seed(1)
        model = make_gp(torch.randn(4, 2), kernel, jitter_val=1e-6)
        net = torch.nn.Linear(2, 3)
        mean = gpytorch.means.ZeroMean()
        model.forward = lambda x: gpytorch.distributions.MultivariateNormal(mean(x), model.covar_module(net(x)))
        return model, net

    class Fallback(RBFKernel):
        """Computes the same but is not lowered."""

    x, y = torch.randn(9, 2), torch.randn(9)
    grads = []
    for kind in (RBFKernel, Fallback):
        model, net = build(ScaleKernel(kind(ard_num_dims=3)))
        mll = gpytorch.mlls.VariationalELBO(gpytorch.likelihoods.GaussianLikelihood(), model, 9)
        torch.manual_seed(2)
        value = mll(model(x), y)
        value.backward()
        grads.append((value.detach(), net.weight.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_are_those_of_the_covariance(name):
    kernel, x = perturbed(KERNELS[name]()), torch.randn(7, 3)
    lowered = lower(kernel)
    if lowered.blocks is None:
        assert name not in ("rbf", "matern32", "active_dims")
        return
    inducing, cross, largest = lowered.blocks(lowered.values, x.requires_grad_(), 3)
    whole = lowered.covariance(lowered.values, x, x)
    torch.testing.assert_close(inducing, whole[..., :3, :3], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cross, whole[..., :3, 3:], rtol=1e-10, atol=1e-10)
    assert 0.25 < float(largest / lowered.spread(lowered.values, x[:3], x[3:])) < 4  # around another middle
    weights, tensors = torch.randn_like(whole[..., :3, :]), [x, *kernel.parameters()]
    found = gradients(torch.cat([inducing, cross], -1), weights, tensors)
    for mine, other in zip(found, gradients(whole[..., :3, :], weights, tensors), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


def test_spread_is_the_largest_squared_norm_in_lengthscales_of_any_part():
    z, x = torch.randn(4, 3), torch.randn(7, 3)
    wide, narrow = RBFKernel(active_dims=[0, 2]), MaternKernel(1.5)
    wide.lengthscale, narrow.lengthscale = 2.0, 0.5
    norms = ((x - z.mean(0)) / torch.tensor([[2.0], [0.5]]).unsqueeze(-1)).square()
    parts = [norms[0][:, [0, 2]].sum(-1).amax(), norms[1].sum(-1).amax()]
    for kernel, expected in {wide: parts[0], narrow: parts[1], wide + narrow: parts[1], wide * wide: parts[0]}.items():
        lowered = lower(kernel)
        torch.testing.assert_close(lowered.spread(lowered.values, z, x), expected)
    assert lower(LinearKernel()).spread is None
    assert lower(LinearKernel() + LinearKernel()).spread is None
    assert lower(LinearKernel(active_dims=[1])).spread is None
