"""Cholesky with a scale-aware retry, the projection and the residual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tighter_gp.maths import linalg

ROOT = Path(__file__).resolve().parents[2]


def spd(*shape: int, size: int = 5) -> torch.Tensor:
    root = torch.randn(*shape, size, size + 2)
    return root @ root.mT / size + 0.1 * torch.eye(size)


def symmetric(*eigenvalues: float, seed: int = 0) -> torch.Tensor:
    """A dense symmetric matrix with these eigenvalues."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed))).Q
    matrix = basis @ torch.diag(torch.tensor(eigenvalues)) @ basis.T
    return 0.5 * (matrix + matrix.T)


def gram(factor: torch.Tensor) -> torch.Tensor:
    return factor @ factor.mT


# ---- cholesky ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eigenvalue", "relative_jitter"), [(-0.2e-8, 1e-8), (-4e-8, 1e-7), (-4e-7, 1e-6), (-4e-4, 1e-3)]
)
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e7])
def test_jitter_is_the_first_rung_that_suffices_times_the_mean_diagonal(eigenvalue, relative_jitter, scale):
    matrix = scale * symmetric(1.0, 0.7, 0.3, eigenvalue)
    with pytest.warns(RuntimeWarning, match="was not positive definite"):
        factor = linalg.cholesky(matrix)
    jitter = relative_jitter * matrix.diagonal().mean()
    torch.testing.assert_close(gram(factor) - matrix, jitter * torch.eye(4), rtol=1e-5, atol=1e-15 * scale)


def test_only_the_failing_members_of_a_batch_are_touched():
    good, slightly, badly = symmetric(2.0, 1.0, 0.5), symmetric(1.0, 0.7, -0.2e-8), symmetric(3.0, 0.7, -4e-6)
    with pytest.warns(RuntimeWarning, match="3x3x3"):
        factor = linalg.cholesky(torch.stack([good, slightly, badly]))
    assert torch.equal(factor[0], torch.linalg.cholesky(good))
    for i, (matrix, relative) in enumerate([(slightly, 1e-8), (badly, 1e-5)], start=1):
        expected = relative * matrix.diagonal().mean() * torch.eye(3)
        torch.testing.assert_close(gram(factor[i]) - matrix, expected, rtol=1e-5, atol=1e-14)


def test_gradient_of_a_jittered_factor_is_that_of_the_matrix_it_factorised():
    matrix = symmetric(1.0, 0.7, 0.3, -4e-4).requires_grad_()
    weights = torch.randn(4, 4).tril()
    with pytest.warns(RuntimeWarning, match="not positive definite"):
        (actual,) = torch.autograd.grad((weights * linalg.cholesky(matrix)).sum(), matrix)
    jittered = (matrix + 1e-3 * matrix.detach().diagonal().mean() * torch.eye(4)).detach().requires_grad_()
    (expected,) = torch.autograd.grad((weights * torch.linalg.cholesky(jittered)).sum(), jittered)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


def test_indefinite_matrix_raises_and_says_how_far_it_is():
    matrix = symmetric(1.0, 0.7, 0.3, -0.25)
    message = (
        r"K_ZZ \(4x4, float64\) is not positive definite: its smallest eigenvalue is -2\.500e-01 "
        r"with a mean diagonal of 4\.375e-01, and adding up to 4\.4e-03 did not help"
    )
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        linalg.cholesky(matrix, name="K_ZZ")


def test_jitter_is_relative_to_a_scale_that_is_given():
    """For a difference of large matrices, which may be zero or less by their rounding."""
    with pytest.warns(RuntimeWarning, match="a jitter of its own scale"):
        factor = linalg.cholesky(torch.zeros(3, 3), scale=torch.tensor(1e6))
    torch.testing.assert_close(factor @ factor.mT, 1e-2 * torch.eye(3))


def test_zero_matrix_raises_instead_of_getting_an_arbitrary_jitter():
    with pytest.raises(torch.linalg.LinAlgError, match=r"smallest eigenvalue is 0\.000e\+00"):
        linalg.cholesky(torch.zeros(3, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_matrix_raises_and_counts_the_entries(value):
    matrix = spd(2)
    matrix[1, 2, 3] = matrix[1, 3, 2] = value
    with pytest.raises(torch.linalg.LinAlgError, match=r"K_ZZ \(2x5x5, float64\) has 2 NaN or infinite entries"):
        linalg.cholesky(matrix, name="K_ZZ")


# ---- project, residual_variance ---------------------------------------------------------------------------------------


def test_residual_is_never_negative_and_has_no_gradient_where_it_was_clamped():
    projection = torch.tensor([[1.0, 1.0, 1.0]], requires_grad=True)
    prior = torch.tensor([1.0 - 1e-7, 0.4, 1.5], requires_grad=True)
    residual = linalg.residual_variance(prior, projection)
    assert torch.equal(residual, torch.tensor([0.0, 0.0, 0.5]))
    residual.sum().backward()
    assert torch.equal(prior.grad, torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(projection.grad, torch.tensor([[0.0, 0.0, -2.0]]))


# ---- full_precision, once_differentiable ------------------------------------------------------------------------------


def test_full_precision_switches_autocast_off():
    matrix = torch.randn(3, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        with linalg.full_precision("cpu"):
            assert (matrix @ matrix).dtype == torch.float32
        assert (matrix @ matrix).dtype == torch.bfloat16


def _older(precision):
    torch.set_float32_matmul_precision({"tf32": "high", "ieee": "highest"}[precision])


def _newer(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def _newest(precision):
    torch.backends.fp32_precision = precision


SWITCHES = """
import torch
from tests.equations.test_linalg import _newer, _newest, _older
from tighter_gp.maths import linalg
switches = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)
SWITCH("tf32")
before = switches()
assert before[0] == "tf32"
try:
    with linalg.full_precision("cpu"), linalg.full_precision("cpu"):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
        raise ValueError
except ValueError:
    pass
assert switches() == before
"""


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["_older", "_newer", "_newest"])
def test_full_precision_turns_every_switch_of_reduced_products_off_and_puts_it_back(switch):
    # In a process of its own: torch remembers for good which of its interfaces was used.
    subprocess.run([sys.executable, "-W", "ignore", "-c", SWITCHES.replace("SWITCH", switch)], check=True, cwd=ROOT)
