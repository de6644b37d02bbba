r"""The covariance of q(f) in training, which carries :math:`(s, d, m)` through GPyTorch's wrappers.

GPyTorch's objectives see q(f) only, often after a multitask or deep wrapper has changed its shape. The residual
variance therefore travels inside the covariance operator: :func:`iter_carriers` finds it in whatever tree of
operators the wrappers have built, and :func:`replace_variance` puts other variances into the same tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    DenseLinearOperator,
    DiagLinearOperator,
    InterpolatedLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from .conditionals.base import ResidualBlocks


class ImplicitLinearOperator(LinearOperator):
    """A covariance whose diagonal is at hand, and whose other entries are computed when somebody asks for them.

    :param variance: The diagonal, ``... x N``.
    :param dense: Makes the matrix, ``... x N x N``.
    """

    def __init__(self, variance: Tensor, dense: Callable[[], Tensor]) -> None:
        super().__init__(variance, dense=dense)
        self.variance, self.dense = variance, dense

    @functools.cached_property
    def whole(self) -> LinearOperator:
        """The matrix, computed once."""
        return DenseLinearOperator(self.dense().expand(self.shape))

    def representation(self) -> tuple[Tensor, ...]:
        return self.whole.representation()

    def representation_tree(self) -> Any:
        return self.whole.representation_tree()

    def _diagonal(self) -> Tensor:
        return self.variance

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.whole._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.variance.shape + self.variance.shape[-1:]

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._map(lambda tensor, inner: tensor.mT if inner == 2 else tensor)

    def to_dense(self) -> Tensor:
        return self.whole.to_dense()

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> ImplicitLinearOperator:
        """Apply a function of a tensor and the number of its last dimensions that are not batch to all that is held."""
        return ImplicitLinearOperator(function(self.variance, 1), lambda: function(self.to_dense(), 2))

    def detach(self) -> ImplicitLinearOperator:
        return self._map(lambda tensor, _: tensor.detach())

    def detach_(self) -> LinearOperator:
        self._set_requires_grad(False)
        return self

    def _set_requires_grad(self, val: bool) -> None:
        """From here on the matrix stands for itself, as a leaf, unless nothing changes."""
        if val and self.variance.requires_grad:
            return  # a Kronecker product asks for what its factors have
        matrix = self.to_dense().detach().clone().requires_grad_(val)
        self.dense, self.variance = lambda: matrix, matrix.diagonal(dim1=-1, dim2=-2)
        self.__dict__.pop("whole", None)
        self._args = (self.variance,)

    def clone(self) -> LinearOperator:
        return self._map(lambda tensor, _: tensor.clone())

    def type(self, dtype: torch.dtype) -> LinearOperator:
        return self._map(lambda tensor, _: tensor.type(dtype))

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        return self._map(lambda tensor, _: tensor.to(*args, **kwargs))

    def __reduce__(self) -> Any:
        # Closures cannot be copied or pickled: the matrix itself is.
        plain = self.detach()
        return _restored, (self.__class__, plain.variance, plain.to_dense(), *plain._carried())

    def _carried(self) -> tuple[Any, ...]:
        """What this was made from beside the matrix."""
        return ()

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        return self.whole._get_indices(row_index, col_index, *batch_indices)

    def _getitem(self, row_index, col_index, *batch_indices) -> LinearOperator:
        # The same points from both sides are a covariance again.
        is_selection = row_index is col_index or (isinstance(row_index, slice) and row_index == col_index)
        if is_selection and all(isinstance(index, slice) and index == slice(None) for index in batch_indices):
            return ImplicitLinearOperator(
                self.variance[..., row_index], lambda: self.to_dense()[..., row_index, :][..., col_index]
            )
        return self.whole._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self._map(lambda tensor, inner: tensor.expand(*batch_shape, *tensor.shape[tensor.dim() - inner :]))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._map(lambda tensor, inner: tensor.permute(*dims, *range(-inner, 0)))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._map(lambda tensor, _: tensor.unsqueeze(dim))


def _restored(kind: type, variance: Tensor, matrix: Tensor, *rest: Any) -> ImplicitLinearOperator:
    return kind(variance, lambda: matrix, *rest)


class Carrier(ImplicitLinearOperator):
    r"""Covariance of q(f) that remembers how its diagonal was made.

    :param variance: The diagonal: :math:`s_n + m_n d_n` in training, :math:`s_n + d_n` in eval mode.
    :param dense: Makes the matrix.
    :param explained: :math:`s_n`, shape ``... x N``.
    :param residual: :math:`d_n`, shape ``... x N``.
    :param strategy: The variational strategy that made it.
    :param index: Positions of the points in the training set, if the call gave them.
    :param blocks: Residual covariances within blocks of points, if the conditional needs them.
    :param copied: Which batch dimensions hold copies of one function, made by ``expand``; default none.
    :param chosen: Scales :math:`m_n` of a learned conditional and their price, shape ``... x N`` each.
    """

    def __init__(
        self,
        variance: Tensor,
        dense: Callable[[], Tensor],
        explained: Tensor,
        residual: Tensor,
        strategy: Any,
        index: Tensor | None = None,
        blocks: ResidualBlocks | None = None,
        copied: tuple[bool, ...] | None = None,
        chosen: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        LinearOperator.__init__(
            self,
            variance,
            dense=dense,
            explained=explained,
            residual=residual,
            strategy=strategy,
            index=index,
            blocks=blocks,
            copied=copied,
            chosen=chosen,
        )
        self.variance, self.dense, self.explained, self.residual = variance, dense, explained, residual
        self.strategy, self.index, self.blocks, self.chosen = strategy, index, blocks, chosen
        self.copied = (False,) * len(self.batch_shape) if copied is None else copied

    def _carried(self) -> tuple[Any, ...]:
        return self.explained, self.residual, self.strategy, self.index, self.blocks, self.copied, self.chosen

    def _map(self, function: Callable[[Tensor, int], Tensor], copied: tuple[bool, ...] | None = None) -> Carrier:
        blocks = self.blocks
        if blocks is not None:
            blocks = blocks._replace(covariance=function(blocks.covariance, 3))
        return Carrier(
            function(self.variance, 1),
            lambda: function(self.to_dense(), 2),
            function(self.explained, 1),
            function(self.residual, 1),
            self.strategy,
            self.index,
            blocks,
            self.copied if copied is None else copied,
            None if self.chosen is None else (function(self.chosen[0], 1), function(self.chosen[1], 1)),
        )

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        added = len(batch_shape) - len(self.batch_shape)
        before = zip((1,) * added + tuple(self.batch_shape), (False,) * added + self.copied, strict=True)
        return self._map(
            lambda tensor, inner: tensor.expand(*batch_shape, *tensor.shape[tensor.dim() - inner :]),
            tuple(was or old != new for (old, was), new in zip(before, batch_shape, strict=True)),
        )

    def _permute_batch(self, *dims: int) -> LinearOperator:
        copied = tuple(self.copied[dim] for dim in dims)
        return self._map(lambda tensor, inner: tensor.permute(*dims, *range(-inner, 0)), copied)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        copied = (*self.copied[:dim], False, *self.copied[dim:])
        return self._map(lambda tensor, _: tensor.unsqueeze(dim), copied)

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
    return [factor.expand(*shape) for factor in (left, right)]


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


def iter_carriers(operator: LinearOperator) -> Iterator[Carrier]:
    """Every :class:`Carrier` in a tree of operators."""
    if isinstance(operator, Carrier):
        yield operator
        return
    for argument in operator._args:
        if isinstance(argument, LinearOperator):
            yield from iter_carriers(argument)


def mixes_points(operator: LinearOperator) -> bool:
    """Whether a tree makes variances from covariances between the points of a :class:`Carrier`: by products with matrices."""
    if isinstance(operator, Carrier):
        return False
    factors = [argument for argument in operator._args if isinstance(argument, LinearOperator)]
    carrying = [factor for factor in factors if any(True for _ in iter_carriers(factor))]
    others = [factor for factor in factors if all(factor is not other for other in carrying)]
    if isinstance(operator, MatmulLinearOperator) and not all(isinstance(one, DiagLinearOperator) for one in others):
        return bool(carrying)
    if isinstance(operator, (RootLinearOperator, InterpolatedLinearOperator)):
        return bool(carrying)
    return any(map(mixes_points, carrying))


def replace_variance(operator: LinearOperator, diagonal: Tensor) -> LinearOperator:
    """The same tree with :class:`Carrier` replaced by a :class:`VarianceLinearOperator`.

    Only the diagonal of the result is meaningful, and only that is ever asked for.
    """
    if isinstance(operator, Carrier):
        return VarianceLinearOperator(diagonal)
    arguments = [
        replace_variance(argument, diagonal)
        if isinstance(argument, LinearOperator) and any(True for _ in iter_carriers(argument))
        else argument
        for argument in operator._args
    ]
    return operator.__class__(*arguments, **operator._kwargs)
