r"""The covariance of q(f) in training, which carries :math:`(s, d, m)` through GPyTorch's wrappers.

GPyTorch's objectives see q(f) only, often after a multitask or deep wrapper has changed its shape. The residual
variance therefore travels inside the covariance operator: :func:`iter_residuals` finds it in whatever tree of
operators the wrappers have built, and :func:`replace_residual` puts other variances into the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor


class ResidualLinearOperator(LinearOperator):
    r"""Covariance of q(f) whose diagonal is :math:`s_n + m_n d_n` and which remembers the three.

    :param covar: The covariance itself; only its diagonal is promised if the caller asked for ``diag=True``.
    :param explained: :math:`s_n`, shape ``... x N``.
    :param residual: :math:`d_n`, shape ``... x N``.
    :param scale: :math:`m_n`, shape ``... x N``.
    :param penalty: :math:`-\phi(m_n)`, shape ``... x N``.
    :param strategy: The variational strategy that made it.
    """

    def __init__(
        self,
        covar: LinearOperator,
        explained: Tensor,
        residual: Tensor,
        scale: Tensor,
        penalty: Tensor,
        strategy: Any,
    ) -> None:
        super().__init__(covar, explained, residual, scale, penalty, strategy=strategy)
        self.covar = covar
        self.explained = explained
        self.residual = residual
        self.scale = scale
        self.penalty = penalty
        self.strategy = strategy

    def _map(self, covar: LinearOperator, function: Callable[[Tensor], Tensor]) -> ResidualLinearOperator:
        explained, residual, scale, penalty = map(function, (self.explained, self.residual, self.scale, self.penalty))
        return self.__class__(covar, explained, residual, scale, penalty, strategy=self.strategy)

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
        return self._map(
            self.covar.expand(*batch_shape, *self.matrix_shape),
            lambda tensor: tensor.expand(*batch_shape, tensor.size(-1)),
        )

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._map(self.covar.permute(*dims, -2, -1), lambda tensor: tensor.permute(*dims, -1))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._map(self.covar.unsqueeze(dim), lambda tensor: tensor.unsqueeze(dim))


def iter_residuals(operator: LinearOperator) -> Iterator[ResidualLinearOperator]:
    """Every :class:`ResidualLinearOperator` in a tree of operators."""
    if isinstance(operator, ResidualLinearOperator):
        yield operator
        return
    for argument in operator._args:
        if isinstance(argument, LinearOperator):
            yield from iter_residuals(argument)


def replace_residual(operator: LinearOperator, diagonal: Tensor) -> LinearOperator:
    """The same tree with :class:`ResidualLinearOperator` replaced by a diagonal operator.

    Only the diagonal of the result is meaningful, and only that is ever asked for.
    """
    if isinstance(operator, ResidualLinearOperator):
        return DiagLinearOperator(diagonal)
    arguments = [
        replace_residual(argument, diagonal)
        if isinstance(argument, LinearOperator) and any(True for _ in iter_residuals(argument))
        else argument
        for argument in operator._args
    ]
    return operator.__class__(*arguments, **operator._kwargs)
