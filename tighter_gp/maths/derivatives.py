r"""The two operations whose derivatives are written by hand: :math:`A = L^{-1} K_{ZX}`, and the moments of q(f) from it.

Torch would differentiate the Cholesky factor and keep more arrays of the size of a batch. Torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .linalg import full_precision, solve_lower, solve_lower_transposed

__all__ = ["mean_and_explained", "through_factor", "whiten"]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass in full precision, which raises where a graph of it is asked for."""

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "This training operation cannot be differentiated twice (create_graph=True). For second derivatives "
                "compute the bound from tighter_gp.maths.moments and tighter_gp.maths.bounds in float64."
            )
        with torch.no_grad(), full_precision(grads[0].device.type):
            return backward(ctx, *grads)

    return guarded


def whiten(inducing_covar: Tensor, chol: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`A = L^{-1} K_{ZX}` and the squared norms :math:`a_n^\top a_n` of its columns, in the dtype of ``cross``.

    With :math:`G` the gradient of :math:`A`, :math:`K_{ZX}` gets :math:`L^{-\top} G` and :math:`K_{ZZ}` gets
    :math:`-L^{-\top} \mathrm{tril}(G A^\top)\, L^{-1}` made symmetric: :math:`\bar L` is never formed.

    :param inducing_covar: :func:`through_factor` of :math:`K_{ZZ}`, ``... x M x M``.
    :param chol: :math:`L`, the factor of :math:`K_{ZZ}` with its jitter, without a graph, perhaps in a wider dtype.
    :param cross: :math:`K_{ZX}`, ``... x M x B``.
    :return: ``... x M x B`` and ``... x B``.

    Example:
        >>> covar, cross = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> through = tighter_gp.maths.derivatives.through_factor(covar, torch.eye(2))
        >>> matrix, norms = tighter_gp.maths.derivatives.whiten(through, torch.eye(2), cross)
        >>> norms.sum().backward()
        >>> covar.grad.diagonal()
        tensor([-1.2500, -0.2500])
    """
    if torch.jit.is_tracing():  # a trace keeps no function of Python
        matrix = solve_lower(chol.to(cross.dtype), cross)
        return matrix, matrix.square().sum(-2)
    return _Whiten.apply(inducing_covar, chol, cross)


def through_factor(inducing_covar: Tensor, chol: Tensor) -> Tensor:
    r""":math:`K_{ZZ}` for :func:`whiten`: several calls share the two solves of their gradient.

    :param inducing_covar: :math:`K_{ZZ}`, ``... x M x M``.
    :param chol: :math:`L`, without a graph.

    Example:
        >>> tighter_gp.maths.derivatives.through_factor(torch.eye(1), torch.eye(1))
        tensor([[1.]])
    """
    return inducing_covar if torch.jit.is_tracing() else _ThroughFactor.apply(inducing_covar, chol)


class _ThroughFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inducing_covar, chol):
        ctx.save_for_backward(chol)
        return inducing_covar.view_as(inducing_covar)

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (chol,) = ctx.saved_tensors
        half = outer.to(chol.dtype).tril()  # G A'  [..., M, M]
        half.diagonal(dim1=-1, dim2=-2).mul_(0.5)
        half = torch.linalg.solve_triangular(chol, solve_lower_transposed(chol, half), upper=False, left=False)
        return (half + half.mT).mul_(-0.5).to(outer.dtype), None


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inducing_covar, chol, cross):
        matrix = solve_lower(chol.to(cross.dtype), cross)
        ctx.save_for_backward(chol, matrix)
        ctx.shapes = inducing_covar.shape, cross.shape, inducing_covar.dtype
        return matrix, matrix.square().sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_matrix, grad_norms):
        chol, matrix = ctx.saved_tensors
        inducing_shape, cross_shape, dtype = ctx.shapes
        grad = torch.addcmul(grad_matrix, matrix, (2 * grad_norms).unsqueeze(-2))  # G  [..., M, B]
        by_cross = solve_lower_transposed(chol.to(grad.dtype), grad)  # L^-T G  [..., M, B]
        outer = (grad @ matrix.mT).to(dtype).sum_to_size(inducing_shape) if ctx.needs_input_grad[0] else None
        return outer, None, by_cross.sum_to_size(cross_shape)


def mean_and_explained(matrix: Tensor, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and explained variance at each point; by :math:`S A` in training on many points, else by :math:`R^\top A`.

    :param matrix: :math:`A`, ``... x M x B``.
    :param mean: :math:`m`, ``... x M``; its batch and that of the root may be larger than that of the projection.
    :param root: :math:`R`, ``... x M x R``.

    Example:
        >>> matrix, root = torch.tensor([[1.0, 0.5], [0.0, 0.5]]), torch.tensor([[0.5, 0.0], [0.0, 1.0]])
        >>> tighter_gp.maths.derivatives.mean_and_explained(matrix, torch.tensor([2.0, 0.0]), root)
        (tensor([2., 1.]), tensor([0.2500, 0.3125]))
    """
    if torch.jit.is_tracing():
        return (matrix.mT @ mean.unsqueeze(-1)).squeeze(-1), (root.mT @ matrix).square().sum(-2)
    is_trained = torch.is_grad_enabled() and (matrix.requires_grad or root.requires_grad)
    # Two products of order M^3 and one of M^2 B in place of two of M^2 B, of which the backward pass repeats one.
    return _Moments.apply(matrix, mean, root, is_trained and matrix.size(-1) > 2 * matrix.size(-2))


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, mean, root, by_covariance):
        ctx.by_covariance = by_covariance
        kept = root @ root.mT @ matrix if by_covariance else root.mT @ matrix  # S A or R' A  [..., M, B]
        ctx.save_for_backward(matrix, mean, root, kept)
        explained = (matrix * kept).sum(-2).clamp_min_(0) if by_covariance else kept.square().sum(-2)
        return (matrix.mT @ mean.unsqueeze(-1)).squeeze(-1), explained

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_mean, grad_explained):
        matrix, mean, root, kept = ctx.saved_tensors
        weights = (2 * grad_explained).unsqueeze(-2)  # [..., 1, B]
        weighted, by_matrix, by_mean, by_root = kept * weights, None, None, None
        if ctx.needs_input_grad[0]:  # m g' + 2 S A diag(g_s)
            by_matrix = _add_outer(None, mean.unsqueeze(-1), grad_mean.unsqueeze(-2), matrix.shape)
            if ctx.by_covariance:
                by_matrix = by_matrix.add_(weighted.sum_to_size(matrix.shape))
            else:
                by_matrix = _add_outer(by_matrix, root, weighted, matrix.shape)
        if ctx.needs_input_grad[1]:
            by_mean = (matrix @ grad_mean.unsqueeze(-1)).squeeze(-1).sum_to_size(mean.shape)  # A g  [..., M]
        if ctx.needs_input_grad[2]:
            by_root = (matrix * weights) @ matrix.mT @ root if ctx.by_covariance else matrix @ weighted.mT
            by_root = by_root.sum_to_size(root.shape)
        return by_matrix, by_mean, by_root, None


def _add_outer(total: Tensor | None, left: Tensor, right: Tensor, shape: torch.Size) -> Tensor:
    """``total + left @ right`` summed to a shape, as one product where all of the batch is summed over."""
    if len(shape) == 2 and left.dim() > 2 and left.shape[:-2] == right.shape[:-2]:
        left, right = left.reshape(-1, *left.shape[-2:]).movedim(0, 1).flatten(1), right.reshape(-1, right.size(-1))
    if total is not None and left.dim() == right.dim() == 2:
        return total.addmm_(left, right)
    product = (left @ right).sum_to_size(shape)
    return product if total is None else total.add_(product)
