r"""The covariance of q(f), which carries :math:`(s, d)` and their origin through GPyTorch's wrappers.

GPyTorch's objectives see q(f) only, often after a multitask or deep wrapper has changed its shape. The residual
variance therefore travels inside the covariance operator: :func:`find_carriers` finds it in whatever tree of operators the
wrappers have built, and :func:`replace_variance` puts other variances into the same tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    DiagLinearOperator,
    InterpolatedLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from .maths.moments import Whitened
from .prior import Projection


class Origin(NamedTuple):
    r"""What a strategy made q(f) of.

    :param strategy: The strategy.
    :param x: Its inputs, ``... x B x D``.
    :param index: Positions of the points in the training set, if the call gave them.
    :param projection: Prior mean, A and d.
    :param mean: :math:`A^\top m`, ``... x B``.
    :param explained: :math:`s_n` without jitter, ``... x B``.
    :param q: The factors of q(w), in the order of the rows of A.
    """

    strategy: Any
    x: Tensor
    index: Any  # Tensor | None
    projection: Projection
    mean: Tensor
    explained: Tensor
    q: list[Whitened]


class Carrier(LinearOperator):
    r"""Covariance of q(f) that remembers how its diagonal was made.

    :param variance: The diagonal: :math:`s_n + m_n d_n` for a learned conditional in training, else :math:`s_n + d_n`.
    :param explained: :math:`s_n`, shape ``... x B``.
    :param residual: :math:`d_n`, shape ``... x B``.
    :param learned: Of a learned conditional :math:`m_n` and its price, shape ``... x B`` each.
    :param lazy: Makes the whole covariance; without it only the diagonal counts.
    :param origin: What q(f) was made of.
    :param copied: Which batch dimensions hold copies of one function, made by ``expand``; default none.
    """

    def __init__(
        self,
        variance: Tensor,
        explained: Tensor,
        residual: Tensor,
        *learned: Tensor,
        lazy: Callable[[], LinearOperator] | None = None,
        origin: Any = None,
        copied: tuple[bool, ...] | None = None,
    ) -> None:
        super().__init__(variance, explained, residual, *learned, lazy=lazy, origin=origin, copied=copied)
        self.variance, self.explained, self.residual, self.learned = variance, explained, residual, learned
        self.lazy, self.origin, self.copied = lazy, origin, copied or (False,) * (variance.dim() - 1)

    @functools.cached_property
    def whole(self) -> LinearOperator:
        """All entries, evaluated lazily."""
        return DiagLinearOperator(self.variance) if self.lazy is None else self.lazy()

    def representation(self) -> tuple[Tensor, ...]:
        return super().representation() if self.lazy is None else self.whole.representation()

    def representation_tree(self) -> Any:
        return super().representation_tree() if self.lazy is None else self.whole.representation_tree()

    def _diagonal(self) -> Tensor:
        return self.variance

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.variance.unsqueeze(-1) * rhs if self.lazy is None else self.whole._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.variance.shape + self.variance.shape[-1:]

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def to_dense(self) -> Tensor:
        return self.whole.to_dense()

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        return self.whole._get_indices(row_index, col_index, *batch_indices)

    def _getitem(self, row_index, col_index, *batch_indices) -> LinearOperator:
        return self.whole._getitem(row_index, col_index, *batch_indices)

    def _map(
        self,
        function: Callable[[Tensor], Tensor],
        of_whole: Callable[[LinearOperator], LinearOperator],
        copied: tuple[bool, ...],
    ) -> Carrier:
        tensors = map(function, (self.variance, self.explained, self.residual, *self.learned))
        lazy = None if self.lazy is None else lambda: of_whole(self.whole)
        return Carrier(*tensors, lazy=lazy, origin=self.origin, copied=copied)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        added = len(batch_shape) - len(self.batch_shape)
        before = zip((1,) * added + tuple(self.batch_shape), (False,) * added + self.copied, strict=True)
        return self._map(
            lambda tensor: tensor.expand(*batch_shape, tensor.size(-1)),
            lambda whole: whole._expand_batch(batch_shape),
            tuple(was or old != new for (old, was), new in zip(before, batch_shape, strict=True)),
        )

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._map(
            lambda tensor: tensor.permute(*dims, -1),
            lambda whole: whole._permute_batch(*dims),
            tuple(self.copied[dim] for dim in dims),
        )

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._map(
            lambda tensor: tensor.unsqueeze(dim),
            lambda whole: whole._unsqueeze_batch(dim),
            (*self.copied[:dim], False, *self.copied[dim:]),
        )

    def _mul_matrix(self, other: Tensor | LinearOperator) -> LinearOperator:
        return HadamardLinearOperator(*_broadcast(self, other))


class HadamardLinearOperator(LinearOperator):
    """Elementwise product of two operators that keeps both: GPyTorch selects a task for each point by one.

    :param left: Shape ``... x N x N``.
    :param right: The same shape.
    """

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        super().__init__(left, right)
        self.left, self.right = left, right

    def _diagonal(self) -> Tensor:
        return self.left._diagonal() * self.right._diagonal()

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _size(self) -> torch.Size:
        return self.left.shape

    def to_dense(self) -> Tensor:
        return self.left.to_dense() * self.right.to_dense()

    def _each(self, function: Callable[[LinearOperator], LinearOperator]) -> LinearOperator:
        return self.__class__(function(self.left), function(self.right))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._each(lambda factor: factor._transpose_nonbatch())

    def _get_indices(self, row_index, col_index, *batch_indices) -> Tensor:
        left, right = (factor._get_indices(row_index, col_index, *batch_indices) for factor in (self.left, self.right))
        return left * right

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self._each(lambda factor: factor._expand_batch(batch_shape))

    def _mul_matrix(self, other: Tensor | LinearOperator) -> LinearOperator:
        return self.__class__(*_broadcast(self, other))


def _broadcast(left: LinearOperator, right: Tensor | LinearOperator) -> list[LinearOperator]:
    right = to_linear_operator(right).to(left.dtype)
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return [factor.expand(*shape) for factor in (left, right)]


def find_carriers(operator: LinearOperator) -> list[Carrier]:
    """Every :class:`Carrier` in a tree of operators."""
    if isinstance(operator, Carrier):
        return [operator]
    return [found for part in operator._args if isinstance(part, LinearOperator) for found in find_carriers(part)]


def mixes_points(operator: LinearOperator) -> bool:
    """Whether a tree makes variances from covariances between the points of a :class:`Carrier`: by products with matrices."""
    if isinstance(operator, Carrier):
        return False
    parts = [part for part in operator._args if isinstance(part, LinearOperator)]
    carrying = [part for part in parts if find_carriers(part)]
    is_product = isinstance(operator, (MatmulLinearOperator, RootLinearOperator, InterpolatedLinearOperator))
    is_scaled = isinstance(operator, MatmulLinearOperator) and all(
        isinstance(part, DiagLinearOperator) or find_carriers(part) for part in parts
    )
    return (bool(carrying) and is_product and not is_scaled) or any(map(mixes_points, carrying))


def replace_variance(operator: LinearOperator, variance: Tensor) -> LinearOperator:
    """The same tree with other variances in its :class:`Carrier`; only the diagonal of the result is meaningful."""
    if isinstance(operator, Carrier):
        return DiagLinearOperator(variance)
    parts = [replace_variance(part, variance) if isinstance(part, LinearOperator) else part for part in operator._args]
    return operator.__class__(*parts, **operator._kwargs)
