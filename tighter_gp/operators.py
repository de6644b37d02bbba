r"""The covariance of q(f) in training, which carries :math:`(s, d, m)` through GPyTorch's wrappers.

GPyTorch's objectives see q(f) only, often after a multitask or deep wrapper has changed its shape. The residual
variance therefore travels inside the covariance operator: :func:`iter_residuals` finds it in whatever tree of
operators the wrappers have built, and :func:`replace_residual` puts other variances into the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

from .conditionals import ResidualBlocks


class ResidualLinearOperator(LinearOperator):
    r"""Covariance of q(f) whose diagonal is :math:`s_n + m_n d_n` and which remembers the three.

    :param covar: The covariance itself; only its diagonal is promised if the caller asked for ``diag=True``.
    :param explained: :math:`s_n`, shape ``... x N``.
    :param residual: :math:`d_n`, shape ``... x N``.
    :param scale: :math:`m_n`, shape ``... x N``.
    :param penalty: :math:`-\phi(m_n)`, shape ``... x N``.
    :param strategy: The variational strategy that made it.
    :param blocks: Residual covariances within blocks of points, if the conditional needs them.
    :param copied: Which batch dimensions hold copies of one function, made by ``expand``; default none.
    """

    def __init__(
        self,
        covar: LinearOperator,
        explained: Tensor,
        residual: Tensor,
        scale: Tensor,
        penalty: Tensor,
        strategy: Any,
        blocks: ResidualBlocks | None = None,
        copied: tuple[bool, ...] | None = None,
    ) -> None:
        copied = (False,) * len(covar.batch_shape) if copied is None else copied
        super().__init__(covar, explained, residual, scale, penalty, strategy=strategy, blocks=blocks, copied=copied)
        self.covar = covar
        self.explained = explained
        self.residual = residual
        self.scale = scale
        self.penalty = penalty
        self.strategy = strategy
        self.blocks = blocks
        self.copied = copied

    def _map(
        self, covar: LinearOperator, function: Callable[[Tensor, int], Tensor], copied: tuple[bool, ...]
    ) -> ResidualLinearOperator:
        """Apply a function of a tensor and the number of its last dimensions that are not batch to all that is carried."""
        blocks = self.blocks
        if blocks is not None:
            blocks = blocks._replace(covariance=function(blocks.covariance, 3))
        return self.__class__(
            covar,
            function(self.explained, 1),
            function(self.residual, 1),
            function(self.scale, 1),
            function(self.penalty, 1),
            strategy=self.strategy,
            blocks=blocks,
            copied=copied,
        )

    def _diagonal(self) -> Tensor:
        return self.explained + self.scale * self.residual

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.covar._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.covar.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def to_dense(self) -> Tensor:
        return self.covar.to_dense()

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        return self.covar._get_indices(row_index, col_index, *batch_indices)

    def _getitem(self, row_index, col_index, *batch_indices) -> LinearOperator:
        # A selection of points is no longer the batch that was asked for: hand out the plain covariance.
        return self.covar._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        added = len(batch_shape) - len(self.batch_shape)
        before = zip((1,) * added + tuple(self.batch_shape), (False,) * added + self.copied, strict=True)
        return self._map(
            self.covar.expand(*batch_shape, *self.matrix_shape),
            lambda tensor, inner: tensor.expand(*batch_shape, *tensor.shape[tensor.dim() - inner :]),
            tuple(was or old != new for (old, was), new in zip(before, batch_shape, strict=True)),
        )

    def _permute_batch(self, *dims: int) -> LinearOperator:
        # A lazily evaluated kernel permutes its inputs but not its own batch of hyperparameters.
        return self._map(
            self.covar.evaluate_kernel().permute(*dims, -2, -1),
            lambda tensor, inner: tensor.permute(*dims, *range(-inner, 0)),
            tuple(self.copied[dim] for dim in dims),
        )

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._map(
            self.covar.unsqueeze(dim),
            lambda tensor, inner: tensor.unsqueeze(dim),
            (*self.copied[:dim], False, *self.copied[dim:]),
        )

    def _mul_matrix(self, other: Tensor | LinearOperator) -> LinearOperator:
        return HadamardLinearOperator(*_broadcast(self, other))


class HadamardLinearOperator(LinearOperator):
    """Elementwise product of two operators that keeps both, so that what one of them carries is not lost.

    GPyTorch's multitask strategies make one to select a task for each point.

    :param left: Shape ``... x N x N``.
    :param right: The same shape.
    """

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__(left, right)
        self.left = left
        self.right = right

    def _diagonal(self) -> Tensor:
        return self.left._diagonal() * self.right._diagonal()

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _size(self) -> torch.Size:
        return self.left.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self.__class__(self.left._transpose_nonbatch(), self.right._transpose_nonbatch())

    def to_dense(self) -> Tensor:
        return self.left.to_dense() * self.right.to_dense()

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        left, right = (factor._get_indices(row_index, col_index, *batch_indices) for factor in (self.left, self.right))
        return left * right

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self.__class__(*(factor._expand_batch(batch_shape) for factor in (self.left, self.right)))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.__class__(*(factor._permute_batch(*dims) for factor in (self.left, self.right)))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.__class__(*(factor._unsqueeze_batch(dim) for factor in (self.left, self.right)))

    def _mul_matrix(self, other: Tensor | LinearOperator) -> LinearOperator:
        return self.__class__(*_broadcast(self, other))


def _broadcast(left: LinearOperator, right: Tensor | LinearOperator) -> list[LinearOperator]:
    right = to_linear_operator(right).to(left.dtype)
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return [factor if factor.shape == shape else factor.expand(*shape) for factor in (left, right)]


class VarianceLinearOperator(LinearOperator):
    """A diagonal covariance that stays what it is inside other operators, which may fold plain diagonal ones away.

    :param variance: Shape ``... x N``.
    """

    def __init__(self, variance: Tensor) -> None:
        super().__init__(variance)
        self.variance = variance

    def _diagonal(self) -> Tensor:
        return self.variance

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.variance.unsqueeze(-1) * rhs

    def _size(self) -> torch.Size:
        return self.variance.shape + self.variance.shape[-1:]

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def to_dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        return self.variance[(*batch_indices, row_index)] * (row_index == col_index)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self.__class__(self.variance.expand(*batch_shape, self.variance.size(-1)))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.__class__(self.variance.permute(*dims, -1))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.__class__(self.variance.unsqueeze(dim))


def iter_residuals(operator: LinearOperator) -> Iterator[ResidualLinearOperator]:
    """Every :class:`ResidualLinearOperator` in a tree of operators."""
    if isinstance(operator, ResidualLinearOperator):
        yield operator
        return
    for argument in operator._args:
        if isinstance(argument, LinearOperator):
            yield from iter_residuals(argument)


def replace_residual(operator: LinearOperator, diagonal: Tensor) -> LinearOperator:
    """The same tree with :class:`ResidualLinearOperator` replaced by a :class:`VarianceLinearOperator`.

    Only the diagonal of the result is meaningful, and only that is ever asked for.
    """
    if isinstance(operator, ResidualLinearOperator):
        return VarianceLinearOperator(diagonal)
    arguments = [
        replace_residual(argument, diagonal)
        if isinstance(argument, LinearOperator) and any(True for _ in iter_residuals(argument))
        else argument
        for argument in operator._args
    ]
    return operator.__class__(*arguments, **operator._kwargs)
