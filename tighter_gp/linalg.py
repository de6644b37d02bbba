r"""Dense linear algebra: one Cholesky factor, one projection, one residual. Torch only.

Notation: :math:`L = \mathrm{chol}(K_{ZZ})`, :math:`A = L^{-1} K_{ZX}`,
:math:`d_n = k_{nn} - \lVert a_n \rVert^2`.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["cholesky", "project", "residual_variance", "solve_lower", "solve_lower_transposed"]

# Relative to the mean of the diagonal; each further try multiplies it by ten.
_FIRST_RETRY_JITTER = {torch.float64: 1e-8, torch.float32: 1e-6}
_MAX_TRIES = 7


def cholesky(matrix: Tensor, name: str = "matrix", scale: Tensor | None = None) -> Tensor:
    r"""Lower Cholesky factor that retries with a jitter proportional to the matrix's own scale.

    A matrix that is positive definite is factorised as it is. One that is not gets
    :math:`\epsilon \cdot \mathrm{mean}(\mathrm{diag})` on its diagonal, :math:`\epsilon` growing tenfold
    from 1e-8 (float64) or 1e-6 (float32), with a warning; only the failing members of a batch are touched.

    :param matrix: Symmetric, shape ``... x M x M``.
    :param name: What to call the matrix in messages.
    :param scale: What its rounding errors are relative to, shape ``...``, if not the mean of its diagonal: for a small
        difference of large matrices, the mean of theirs.
    :return: Shape ``... x M x M``.
    :raises torch.linalg.LinAlgError: If the matrix holds NaN or inf, or stays indefinite.

    Example:
        >>> tighter_gp.linalg.cholesky(torch.tensor([[4.0, 2.0], [2.0, 10.0]]))
        tensor([[2., 0.],
                [1., 3.]])
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if matrix.is_meta or not (info.any() | ~factor.diagonal(dim1=-1, dim2=-2).isfinite().all()):
        return factor
    _raise_if_not_finite(matrix, name)
    scale = mean_diagonal(matrix) if scale is None else scale
    jitter = _FIRST_RETRY_JITTER.get(matrix.dtype, 1e-6)
    added = torch.zeros_like(scale)
    for _ in range(_MAX_TRIES):
        added = torch.where(info > 0, jitter * scale, added)
        factor, info = torch.linalg.cholesky_ex(
            matrix + torch.diag_embed(added.unsqueeze(-1).expand(matrix.shape[:-1]))
        )
        if not info.any():
            warnings.warn(
                f"{name} ({_describe(matrix)}) was not positive definite: "
                f"added jitter {added.max().item():.1e} to its diagonal.",
                RuntimeWarning,
                stacklevel=2,
            )
            return factor
        jitter *= 10
    raise torch.linalg.LinAlgError(
        f"{name} ({_describe(matrix)}) is not positive definite: its smallest eigenvalue is "
        f"{_smallest_eigenvalue(matrix):.3e} with a mean diagonal of {mean_diagonal(matrix).mean().item():.3e}, and "
        f"adding up to {added.max().item():.1e} did not help."
    )


def mean_diagonal(matrix: Tensor) -> Tensor:
    """The scale of a covariance matrix, without a graph, shape ``...``."""
    return matrix.detach().diagonal(dim1=-1, dim2=-2).mean(-1).abs()


def _smallest_eigenvalue(matrix: Tensor) -> float:
    """For messages: NaN where the algorithm does not converge."""
    try:
        return torch.linalg.eigvalsh(matrix.detach().double()).min().item()
    except torch.linalg.LinAlgError:
        return math.nan


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """No autocast and no reduced-precision matrix products: the residual is a small difference of large numbers."""
    precision = torch.get_float32_matmul_precision()
    has_autocast = torch.amp.is_autocast_available(device_type)
    with torch.autocast(device_type, enabled=False) if has_autocast else nullcontext():
        if precision == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises where a graph of it is asked for, instead of leaving itself out of that graph."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "This training operation cannot be differentiated twice (create_graph=True). For second derivatives "
                "compute the bound from tighter_gp.moments.svgp_moments and tighter_gp.bounds."
            )
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad(), full_precision(grads[0].device.type):
            return backward(ctx, *grads)

    return checked


def _raise_if_not_finite(matrix: Tensor, name: str) -> None:
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        raise torch.linalg.LinAlgError(f"{name} ({_describe(matrix)}) has {bad} NaN or infinite entries.")


def _describe(matrix: Tensor) -> str:
    return f"{'x'.join(str(n) for n in matrix.shape)}, {str(matrix.dtype).removeprefix('torch.')}"


class _KnownFactor(torch.autograd.Function):
    """The Cholesky factor of a matrix when its value is at hand: only the derivative is left to do."""

    @staticmethod
    def forward(ctx, matrix: Tensor, factor: Tensor) -> Tensor:
        factor = factor.clone()
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, grad_factor: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        inner = (factor.mT @ grad_factor).tril()
        inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-1, dim2=-2))
        outer = solve_lower_transposed(factor, inner)
        outer = torch.linalg.solve_triangular(factor, outer, upper=False, left=False)
        return 0.5 * (outer + outer.mT), None


def reuse_cholesky(matrix: Tensor, factor: Tensor) -> Tensor:
    r"""A factor computed earlier, joined to the graph of ``matrix`` without factorising again.

    :param matrix: The matrix, ``... x M x M``; gradients flow into it.
    :param factor: Its lower Cholesky factor, without a graph.
    """
    return _KnownFactor.apply(matrix, factor)


def solve_lower(chol: Tensor, rhs: Tensor) -> Tensor:
    r""":math:`L^{-1} B`, by a solve from the right: for rows stored in order it needs no copies and is twice as fast.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.linalg.solve_lower(chol, torch.tensor([[2.0], [5.0]]))
        tensor([[1.],
                [1.]])
    """
    return torch.linalg.solve_triangular(chol.mT, rhs.mT, upper=True, left=False).mT


def solve_lower_transposed(chol: Tensor, rhs: Tensor) -> Tensor:
    r""":math:`L^{-\top} B`, as :func:`solve_lower`.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.linalg.solve_lower_transposed(chol, torch.tensor([[3.0], [4.0]]))
        tensor([[1.],
                [1.]])
    """
    return torch.linalg.solve_triangular(chol, rhs.mT, upper=False, left=False).mT


def project(chol: Tensor, cross: Tensor) -> Tensor:
    r"""Whitened cross-covariance :math:`A = L^{-1} K_{ZX}`, in the dtype of ``cross``.

    :param chol: :math:`L`, shape ``... x M x M``.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :return: Shape ``... x M x B``.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.linalg.project(chol, torch.tensor([[2.0, 0.0], [5.0, 2.0]]))
        tensor([[1.0000, 0.0000],
                [1.0000, 0.5000]])
    """
    return solve_lower(chol.to(cross.dtype), cross)


def residual_variance(prior_variance: Tensor, projection: Tensor) -> Tensor:
    r"""What the inducing variables leave unexplained, :math:`d_n = \max(0, k_{nn} - \lVert a_n \rVert^2)`.

    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param projection: :math:`A`, shape ``... x M x B``.
    :return: Shape ``... x B``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> tighter_gp.linalg.residual_variance(torch.ones(3), projection)
        tensor([0.0000, 0.5000, 1.0000])
    """
    return (prior_variance - projection.square().sum(-2)).clamp_min(0.0)
