"""Kernels are evaluated in the precision that is asked for, and the one that is asked for suffices."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel

from tighter_gp.kernels.precision import (
    covariance_block,
    covariances,
    covers_rounding,
    evaluate,
    sufficient_precision,
    unlowered_covariances,
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


@pytest.mark.parametrize("read", READINGS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_float32_kernel_is_evaluated_in_double_not_rounded_to_it(name, read):
    narrow, wide = OTHERS[name]().float(), OTHERS[name]()
    wide.load_state_dict(narrow.state_dict())
    x = torch.rand(5, 3).float().requires_grad_()
    covar, reading = narrow(x), READINGS[read]
    value = evaluate(covar, reading, torch.float64)
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
        torch.testing.assert_close(evaluate(covar, READINGS["matrix"], torch.float64), dense.to_dense())
    found = evaluate(dense, READINGS["matrix"], torch.float32)
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


def test_a_kernel_that_cannot_compute_in_another_precision_is_converted_from_its_own():
    kernel, x = Rigid().float(), torch.rand(5, 3).float()
    found = evaluate(kernel(x), READINGS["matrix"], torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, kernel(x).to_dense().double(), rtol=0, atol=0)


EITHER = {"lowered": lambda: ScaleKernel(RBFKernel(active_dims=[0, 2])), "other": OTHERS["active_dims"]}


@pytest.mark.parametrize("name", EITHER)
@pytest.mark.parametrize("make", [covariances, unlowered_covariances])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_a_float32_kernel_are_evaluated_in_the_precision_asked_for(name, make, dtype):
    kernel, wide = EITHER[name]().float(), EITHER[name]()
    wide.load_state_dict(kernel.state_dict())
    x1, x2 = torch.rand(5, 3).float(), torch.rand(4, 3).float()
    # Lowered kernels widen the values of hyperparameters that were transformed in float32.
    tolerance = 1e-6 if dtype == torch.float32 or make is covariances else 1e-14
    with gpytorch.settings.lazily_evaluate_kernels(False):  # as within another kernel
        covariance, variance = make(kernel, dtype)
        found = [covariance(x1, x2), covariance(x1, x1), variance(x1)]
    expected = [wide(x1.double(), x2.double()).to_dense(), wide(x1.double()).to_dense(), wide(x1.double(), diag=True)]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


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


def test_a_jitter_covers_rounding_up_to_a_variance():
    variance = torch.tensor([1.0, 100.0])
    assert covers_rounding(1e-4, variance, torch.float32)
    assert not covers_rounding(1e-4, 2 * variance, torch.float32)
    assert covers_rounding(1e-4, 2 * variance, torch.float64)


@pytest.mark.parametrize(
    ("noise", "variance", "correlation", "expected"),
    [
        (1e-2, 1.0, 0.0, torch.float32),
        (1e-7, 1.0, 0.0, torch.float64),  # less noise than rounding
        (1e-2, 1e5, 0.0, torch.float64),  # more rounding
        (1e-2, 1.0, 1 - 1e-10, torch.float64),  # points that almost coincide
        (torch.tensor([1.0, 1e-7]), 1.0, 0.0, torch.float64),
        (0.0, 1.0, 0.0, torch.float64),
    ],
)
def test_float32_suffices_where_its_errors_are_below_the_noise(noise, variance, correlation, expected):
    factor = torch.linalg.cholesky(variance * torch.tensor([[1.0, correlation], [correlation, 1.0]]))
    assert sufficient_precision(factor, noise, torch.float32) == expected
    assert sufficient_precision(factor, noise, torch.float64) == torch.float64
