"""Cholesky with a scale-aware retry, the projection and the residual."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.tools import dense
from tighter_gp.maths import linalg
from tighter_gp.maths import fused

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


# ---------------------------------------------------------------------------------------------------------------------
# cholesky
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_positive_definite_matrix_is_factorised_as_it_is(shape):
    matrix = spd(*shape)
    assert torch.equal(linalg.cholesky(matrix), torch.linalg.cholesky(matrix))


def test_gradient_of_the_plain_factor_is_right():
    root = torch.randn(4, 6, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: linalg.cholesky(r @ r.mT + torch.eye(4)), root)


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


def test_float32_ladder_starts_at_one_in_a_million():
    matrix = 4 * torch.ones(3, 3, dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match=r"float32\).* a jitter of its own scale was added"):
        factor = linalg.cholesky(matrix)
    assert factor.dtype == torch.float32
    # Float32 rounds numbers near four by up to 2.4e-7.
    torch.testing.assert_close(gram(factor.double()), matrix.double() + 4e-6 * torch.eye(3), rtol=0, atol=5e-7)


def test_warning_names_the_matrix_its_size_and_dtype_and_is_the_same_each_time():
    said = set()
    for last in (-0.2e-8, -3e-6):
        with pytest.warns(RuntimeWarning, match=r"^K_ZZ \(4x4, float64\) was not positive definite") as caught:
            linalg.cholesky(symmetric(1.0, 0.7, 0.3, last), name="K_ZZ")
        said |= {str(warning.message) for warning in caught}
    assert len(said) == 1


def test_jitter_is_reported_to_whoever_asks():
    said = []
    linalg.cholesky(symmetric(1.0, 0.7, 0.3, -0.2e-8), name="K_ZZ", report=lambda *what: said.append(what))
    assert [name for name, _ in said] == ["K_ZZ"]


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


def test_the_error_is_raised_where_eigenvalues_cannot_be_computed(monkeypatch):
    def fail(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", fail)
    with pytest.raises(torch.linalg.LinAlgError, match=r"its smallest eigenvalue is nan with a mean diagonal of 1\.0"):
        linalg.cholesky(-torch.eye(3))


def test_indefinite_member_of_a_batch_raises():
    with pytest.raises(torch.linalg.LinAlgError, match=r"2x3x3, float64\) is not positive definite.*-5\.000e-01"):
        linalg.cholesky(torch.stack([torch.eye(3), symmetric(1.0, 1.0, -0.5)]))


def test_zero_matrix_raises_instead_of_getting_an_arbitrary_jitter():
    with pytest.raises(torch.linalg.LinAlgError, match=r"smallest eigenvalue is 0\.000e\+00"):
        linalg.cholesky(torch.zeros(3, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_matrix_raises_and_counts_the_entries(value):
    matrix = spd(2)
    matrix[1, 2, 3] = matrix[1, 3, 2] = value
    with pytest.raises(torch.linalg.LinAlgError, match=r"K_ZZ \(2x5x5, float64\) has 2 NaN or infinite entries"):
        linalg.cholesky(matrix, name="K_ZZ")


# The factor of a lone infinite variance is itself infinite, and LAPACK sees nothing wrong with it.
def test_infinite_variance_raises():
    matrix = spd()
    matrix[4, 4] = float("inf")
    with pytest.raises(torch.linalg.LinAlgError, match="has 1 NaN or infinite"):
        linalg.cholesky(matrix)


# ---------------------------------------------------------------------------------------------------------------------
# reuse_cholesky
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_reused_factor_has_the_value_it_was_given(shape):
    matrix = spd(*shape)
    factor = torch.linalg.cholesky(matrix)
    assert torch.equal(fused.reuse_cholesky(matrix, factor), factor)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_reused_factor_has_the_gradient_of_torch_cholesky(shape):
    matrix, weights = spd(*shape).requires_grad_(), torch.randn(*shape, 5, 5)
    (expected,) = torch.autograd.grad((weights * torch.linalg.cholesky(matrix).sin()).sum(), matrix)
    factor = torch.linalg.cholesky(matrix.detach())
    (actual,) = torch.autograd.grad((weights * fused.reuse_cholesky(matrix, factor).sin()).sum(), matrix)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_reused_factor_has_the_second_derivative_of_torch_cholesky():
    weights, direction = torch.randn(5, 5), torch.randn(5, 5)
    matrix = spd().requires_grad_()

    def second(factorise):
        (first,) = torch.autograd.grad((weights * factorise(matrix).pow(3)).sum(), matrix, create_graph=True)
        return torch.autograd.grad((direction * first).sum(), matrix)[0]

    expected = second(torch.linalg.cholesky)
    actual = second(lambda m: fused.reuse_cholesky(m, torch.linalg.cholesky(m.detach())))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_reused_factor_passes_gradcheck_to_second_order():
    root = torch.randn(4, 6, requires_grad=True)

    def function(r):
        matrix = r @ r.mT + torch.eye(4)
        return fused.reuse_cholesky(matrix, torch.linalg.cholesky(matrix.detach()))

    assert torch.autograd.gradcheck(function, root)
    assert torch.autograd.gradgradcheck(function, root)


def test_reused_factor_and_its_gradient_factorise_nothing(monkeypatch):
    matrix = spd().requires_grad_()
    factor = torch.linalg.cholesky(matrix.detach())

    def forbidden(*args, **kwargs):
        raise AssertionError("factorised again")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", forbidden)
    monkeypatch.setattr(torch.linalg, "cholesky", forbidden)
    fused.reuse_cholesky(matrix, factor).sum().backward()
    assert matrix.grad.abs().sum() > 0


def test_reused_factor_does_not_change_with_the_tensor_it_came_from():
    matrix = spd().requires_grad_()
    factor = torch.linalg.cholesky(matrix.detach())
    output = fused.reuse_cholesky(matrix, factor)
    before = output.detach().clone()
    factor.zero_()
    assert torch.equal(output, before)


# ---------------------------------------------------------------------------------------------------------------------
# project, residual_variance
# ---------------------------------------------------------------------------------------------------------------------


def test_projection_is_the_inverse_factor_times_the_cross_covariance():
    p = dense.problem()
    chol = torch.linalg.cholesky(p.Kuu)
    torch.testing.assert_close(linalg.project(chol, p.Kuf), torch.linalg.inv(chol) @ p.Kuf, rtol=1e-9, atol=1e-12)


def test_projection_passes_gradcheck():
    chol = torch.linalg.cholesky(spd()).requires_grad_()
    cross = torch.randn(5, 7, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, k: linalg.project(c.tril(), k), (chol, cross))


@pytest.mark.parametrize(("chol_shape", "cross_shape"), [((2, 3), (2, 3)), ((), (2, 3)), ((3,), (2, 1)), ((2, 3), ())])
def test_projection_broadcasts_over_leading_dimensions(chol_shape, cross_shape):
    chol, cross = torch.linalg.cholesky(spd(*chol_shape)), torch.randn(*cross_shape, 5, 7)
    actual = linalg.project(chol, cross)
    assert actual.shape == (2, 3, 5, 7)
    chol, cross = chol.expand(2, 3, 5, 5), cross.expand(2, 3, 5, 7)
    for i in range(2):
        for j in range(3):
            expected = torch.linalg.inv(chol[i, j]) @ cross[i, j]
            torch.testing.assert_close(actual[i, j], expected, rtol=1e-9, atol=1e-12)


def test_projection_takes_the_dtype_of_the_cross_covariance():
    p = dense.problem()
    projection = linalg.project(torch.linalg.cholesky(p.Kuu), p.Kuf.float())
    assert projection.dtype == torch.float32


def test_residual_is_the_diagonal_of_the_conditional_covariance():
    p = dense.problem()
    projection = torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf
    torch.testing.assert_close(linalg.residual_variance(p.Kff.diagonal(), projection), p.d, rtol=1e-9, atol=1e-12)


def test_residual_passes_gradcheck_where_it_is_positive():
    projection, extra = torch.randn(5, 7, requires_grad=True), torch.rand(7)
    prior = (projection.detach().square().sum(0) + 0.1 + extra).requires_grad_()
    assert torch.autograd.gradcheck(linalg.residual_variance, (prior, projection))


def test_residual_is_never_negative_and_has_no_gradient_where_it_was_clamped():
    projection = torch.tensor([[1.0, 1.0, 1.0]], requires_grad=True)
    prior = torch.tensor([1.0 - 1e-7, 0.4, 1.5], requires_grad=True)
    residual = linalg.residual_variance(prior, projection)
    assert torch.equal(residual, torch.tensor([0.0, 0.0, 0.5]))
    residual.sum().backward()
    assert torch.equal(prior.grad, torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(projection.grad, torch.tensor([[0.0, 0.0, -2.0]]))


def test_residual_stays_non_negative_in_float32_at_the_inducing_points():
    p = dense.problem(n=23, m=11, kernel="matern32")
    kernel = dense.KERNELS[p.kernel]
    z = p.z.float()
    Kuu, Kuf = (kernel(z, b, p.variance, p.lengthscales.float()) for b in (z, torch.cat([z, p.x.float()])))
    projection = linalg.project(torch.linalg.cholesky(Kuu), Kuf)
    unclamped = Kuf.new_full((34,), p.variance) - projection.square().sum(0)
    assert (unclamped < 0).any(), "the case must need the clamp"
    residual = linalg.residual_variance(Kuf.new_full((34,), p.variance), projection)
    assert residual.dtype == torch.float32
    assert (residual >= 0).all()
    assert residual[:11].max() < 1e-5


def test_residual_broadcasts_over_leading_dimensions():
    projection, prior = 0.3 * torch.randn(2, 1, 5, 7), 1 + torch.rand(3, 7)
    actual = linalg.residual_variance(prior, projection)
    assert actual.shape == (2, 3, 7)
    for i in range(2):
        for j in range(3):
            expected = (prior[j] - (projection[i, 0].T @ projection[i, 0]).diagonal()).clamp_min(0)
            torch.testing.assert_close(actual[i, j], expected, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# full_precision, once_differentiable
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("allowed", [True, False])
def test_the_one_switch_of_older_versions_is_turned_off_and_put_back(monkeypatch, allowed):
    matmul = types.SimpleNamespace(allow_tf32=allowed)
    backends = types.SimpleNamespace(cuda=types.SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(linalg, "torch", types.SimpleNamespace(backends=backends))
    guard = linalg._Ieee()
    guard.enter()
    assert matmul.allow_tf32 is False
    guard.leave()
    assert matmul.allow_tf32 is allowed


@pytest.mark.parametrize("switch", ["_older", "_newer", "_newest"])
def test_full_precision_turns_every_switch_of_reduced_products_off_and_puts_it_back(switch):
    # In a process of its own: torch remembers for good which of its interfaces was used.
    subprocess.run([sys.executable, "-W", "ignore", "-c", SWITCHES.replace("SWITCH", switch)], check=True, cwd=ROOT)


def test_full_precision_holds_until_the_last_thread_leaves():
    with mock.patch.object(linalg, "_reduced", return_value=[]) as reduced:
        with linalg.full_precision("cpu"), linalg.full_precision("cpu"):
            pass
        assert reduced.call_count == 1


class Square(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @fused.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_once_differentiable_gives_the_first_derivative_and_refuses_the_second():
    x = torch.randn(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(Square.apply(x).sum(), x)
    assert torch.equal(gradient, 2 * x)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
