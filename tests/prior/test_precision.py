"""Kernels are evaluated in the precision that is asked for, and the one that is asked for suffices."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from tighter_gp.prior.precision import (
    covariance_block,
    covariance_within,
    covers_rounding,
    in_precision,
    noise_tolerance,
    read,
    unlowered_spread,
)

BATCH = torch.Size([2])

OTHERS = {
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "active_dims": lambda: ScaleKernel(PeriodicKernel(active_dims=[0, 2])),
    "sum": lambda: PeriodicKernel() + ScaleKernel(RBFKernel(active_dims=[1])),
    "batch": lambda: ScaleKernel(PeriodicKernel(batch_shape=BATCH), batch_shape=BATCH),
}
READINGS = {
    "matrix": lambda covar: covar.to_dense(),
    "diagonal": lambda covar: covar.diagonal(dim1=-1, dim2=-2),
    "block": lambda covar: covar[..., :2, 2:].to_dense(),
}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_float32_kernel_is_evaluated_in_double_not_rounded_to_it(name, reading):
    narrow, wide = OTHERS[name]().float(), OTHERS[name]()
    wide.load_state_dict(narrow.state_dict())
    x = torch.rand(5, 3).float().requires_grad_()
    covar, reading = narrow(x), READINGS[reading]
    value = read(covar, reading, torch.float64)
    expected = reading(wide(x.double()))
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-14)
    assert narrow.dtype == torch.float32
    value.square().sum().backward()
    expected.square().sum().backward()
    for (key, parameter), other in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, key  # a diagonal may not depend on it
        else:
            torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-6, atol=1e-6, msg=key)


def test_what_is_in_the_precision_already_or_no_kernel_is_only_read():
    kernel, x = PeriodicKernel(), torch.rand(5, 3)
    dense = kernel(x).evaluate_kernel()
    for covar in (kernel(x), dense):
        torch.testing.assert_close(read(covar, READINGS["matrix"], torch.float64), dense.to_dense())
    found = read(dense, READINGS["matrix"], torch.float32)
    torch.testing.assert_close(found, dense.to_dense().float())


class Rigid(gpytorch.kernels.Kernel):
    """Has a constant that is no buffer, and so stays in float32."""

    has_lengthscale = True

    def __init__(self):
        super().__init__()
        self.constant = torch.eye(3, dtype=torch.float32)

    def forward(self, x1, x2, diag=False, **params):
        product = (x1 @ self.constant) @ x2.mT / self.lengthscale
        return product.diagonal(dim1=-1, dim2=-2) if diag else product


def test_constants_of_a_kernel_that_are_no_buffers_are_converted_too():
    kernel, x = Rigid().float(), torch.rand(5, 3).float()
    found = read(kernel(x), READINGS["matrix"], torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, kernel(x).to_dense().double(), rtol=1e-6, atol=1e-6)


EITHER = {"lowered": lambda: ScaleKernel(RBFKernel(active_dims=[0, 2])), "other": OTHERS["active_dims"]}


def test_a_copy_in_another_precision_leaves_the_kernel_as_it_was():
    """A part that is used twice is one part, its parameters are the optimiser's, and gradients reach them."""
    shared = RBFKernel().float()
    kernel = (ScaleKernel(shared) + ScaleKernel(shared * gpytorch.kernels.LinearKernel())).float()
    before = {name: id(parameter) for name, parameter in kernel.named_parameters()}
    wide = in_precision(kernel, torch.float64)
    x = torch.rand(5, 3)
    value = wide(x).to_dense()
    assert value.dtype == torch.float64
    assert {name: id(parameter) for name, parameter in kernel.named_parameters()} == before
    assert all(isinstance(p, torch.nn.Parameter) and p.dtype == torch.float32 for p in kernel.parameters())
    value.sum().backward()
    assert shared.raw_lengthscale.grad is not None
    narrow = torch.autograd.grad(kernel(x.float()).to_dense().sum(), shared.raw_lengthscale)[0]
    torch.testing.assert_close(shared.raw_lengthscale.grad, narrow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EITHER)
def test_blocks_of_a_covariance_that_add_up(name):
    """At a variance of 1e6 in float32: blocks from other numbers than each other leave no positive definite rest."""
    kernel = EITHER[name]().float()
    kernel.outputscale = 1e6
    x = torch.rand(9, 3).float()
    first, last, everything = slice(None, 4), slice(4, None), slice(None)
    whole = covariance_block(kernel(x), everything, everything, torch.float64)
    assert torch.equal(whole.diagonal(), whole[0, 0].expand(9))
    for rows in (first, last):
        for columns in (first, last):
            block = covariance_block(kernel(x), rows, columns, torch.float64)
            torch.testing.assert_close(block, whole[rows, columns], rtol=1e-12, atol=1e-8)


@pytest.mark.parametrize("name", [*EITHER, "dense"])
def test_covariances_within_sets_are_those_of_the_whole(name):
    kernel, x = (RBFKernel() if name == "dense" else EITHER[name]()), torch.rand(9, 3)
    covar = kernel(x).evaluate_kernel() if name == "dense" else kernel(x)
    sets = torch.tensor([[0, 4, 2], [8, 1, 3]])
    expected = kernel(x).to_dense()[sets.unsqueeze(-1), sets.unsqueeze(-2)]
    torch.testing.assert_close(covariance_within(covar, sets, torch.float64), expected, rtol=1e-9, atol=1e-9)


def test_a_jitter_covers_rounding_up_to_a_variance():
    variance = torch.tensor([1.0, 100.0])
    assert covers_rounding(1e-4, variance, torch.float32)
    assert not covers_rounding(1e-4, 2 * variance, torch.float32)
    assert covers_rounding(1e-4, 2 * variance, torch.float64)


def test_a_jitter_covers_rounding_up_to_a_spread_of_the_inputs():
    assert covers_rounding(1e-4, torch.ones(1), torch.float32, spread=20.0**2)
    assert not covers_rounding(1e-4, torch.ones(1), torch.float32, spread=150.0**2)
    assert covers_rounding(1e-4, torch.ones(1), torch.float64, spread=150.0**2)


@pytest.mark.parametrize(("is_collapsed", "slope"), [(False, 0.5), (True, 16.0)])
def test_the_error_that_does_no_harm_is_compared_with_that_of_the_largest_variance(is_collapsed, slope):
    variance, spread = torch.tensor([0.3, 7.0], dtype=torch.float64), 11.0
    error = (8 + slope * spread) * 7.0 * torch.finfo(torch.float64).eps
    assert covers_rounding(1.01 * error, variance, torch.float64, spread, is_collapsed=is_collapsed)
    assert not covers_rounding(0.99 * error, variance, torch.float64, spread, is_collapsed=is_collapsed)


def test_derivatives_of_a_collapsed_bound_ask_for_more():
    assert covers_rounding(1e-2, torch.ones(1), torch.float32, spread=100.0**2)
    assert not covers_rounding(1e-2, torch.ones(1), torch.float32, spread=100.0**2, is_collapsed=True)
    assert covers_rounding(1e-2, torch.ones(1), torch.float32, spread=30.0**2, is_collapsed=True)


@pytest.mark.parametrize(
    ("noise", "variance", "correlation", "expected"),
    [
        (1e-2, 1.0, 0.0, True),
        (1e-7, 1.0, 0.0, False),  # less noise than rounding
        (1e-2, 1e5, 0.0, False),  # more rounding
        (1e-2, 1.0, 1 - 1e-10, False),  # points that almost coincide
        (torch.tensor([1.0, 1e-7]), 1.0, 0.0, False),
        (0.0, 1.0, 0.0, False),
    ],
)
def test_float32_suffices_where_its_errors_are_below_the_noise(noise, variance, correlation, expected):
    matrix = variance * torch.tensor([[1.0, correlation], [correlation, 1.0]])
    tolerance = noise_tolerance(torch.linalg.cholesky(matrix), noise)
    assert bool(covers_rounding(tolerance, matrix.diagonal(), torch.float32)) == expected


def test_the_tolerance_is_the_least_noise_times_the_root_of_the_smallest_pivot_over_the_largest_variance():
    factor = torch.tensor([[1.0, 0.0], [1.5, 1.2]])
    found = noise_tolerance(factor, torch.tensor([0.3, 0.2]))
    torch.testing.assert_close(found, torch.tensor(0.2 / math.sqrt(1.5**2 + 1.2**2)))


def test_the_spread_of_a_kernel_that_is_not_lowered_is_in_its_smallest_unit():
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    periodic, rbf, mixture = PeriodicKernel(), RBFKernel(), SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)
    periodic.period_length, periodic.lengthscale, rbf.lengthscale = 0.5, 2.0, 0.1
    mixture.initialize(mixture_means=torch.tensor([[[0.1, 0.2]], [[3.0, 0.3]]]))
    for kernel, factor in ((ScaleKernel(periodic), 2.0), (periodic + rbf, 10.0), (mixture, 3.0)):
        torch.testing.assert_close(unlowered_spread(kernel(x)), torch.tensor(16 * 25 * factor**2))
    # With a kink where inputs coincide: .5 spread eps is the root of what it is without.
    kinked = PiecewisePolynomialKernel(q=0)
    kinked.lengthscale = 1.0
    error = 0.5 * unlowered_spread(kinked(x)) * torch.finfo(x.dtype).eps
    torch.testing.assert_close(error, torch.tensor(16 * 25 * torch.finfo(x.dtype).eps).sqrt())
    for nu, is_kinked in {0.5: True, 1.5: False, 2.5: False}.items():
        matern = MaternKernel(nu=nu)
        matern.lengthscale = 1.0
        assert bool(unlowered_spread(matern(x)) > 16 * 25) == is_kinked
    assert unlowered_spread(LinearKernel()(x)) == 0
    assert unlowered_spread(rbf(x).evaluate_kernel()) == 0
