r"""Who chooses the scales :math:`m_n` of q(f|u): what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch import Module
from gpytorch.mlls import AddedLossTerm
from torch import Tensor

from ..checks import check_range
from ..maths.bounds import optimal_scale, optimal_scale_penalty


class ResidualBlocks(NamedTuple):
    r"""Residual covariances within the blocks of a batch.

    :param covariance: :math:`D_{bb}`, ``... x K x S x S``, zero where a block is filled up.
    :param rows: Positions of the points in the batch, ``K x S``, -1 where a block is filled up.

    Example:
        >>> conditional, residual = tighter_gp.Blocks(torch.tensor([0, 1, 1])), torch.tensor([0.5, 1.0, 2.0])
        >>> covariance = torch.diag(residual)
        >>> blocks = conditional.residual_blocks(residual, lambda rows: covariance[rows.unsqueeze(-1), rows.unsqueeze(-2)])
        >>> blocks.rows
        tensor([[ 0, -1],
                [ 1,  2]])
    """

    covariance: Tensor
    rows: Tensor


class Conditional(Module, ABC):
    r"""Chooses :math:`m_n` given the residual :math:`d_n`.

    :ivar bool is_learned: Whether the scales are set by the model alone. If so the strategy applies them in training,
        if not the objective does, since they depend on the likelihood.
    :ivar bool is_strict: Whether the objective is a lower bound on the evidence for every likelihood.
    :ivar bool is_gaussian_only: Whether the scales are known for Gaussian noise alone.
    :ivar bool needs_blocks: Whether the objective needs residual covariances within blocks, :meth:`residual_blocks`.
    :ivar bool needs_index: Whether a call in training must say which training points it holds, ``model(x, index=rows)``.
    :ivar bool needs_double: Whether it factorises residual covariances, which float32 does not know to within the noise.

    Example:
        >>> residual = torch.tensor([0.0, 1.0, 3.0])
        >>> noise = torch.tensor(2.0)
        >>> remaining, penalty = tighter_gp.conditionals.OptimalConditional().optimum(residual, 1 / noise)
        >>> remaining
        tensor([0.0000, 0.6667, 1.2000])
    """

    is_learned: bool = True
    is_strict: bool = False
    is_gaussian_only: bool = False
    needs_blocks: bool = False
    needs_index: bool = False
    needs_double: bool = False
    batch_shape: torch.Size = torch.Size()

    def check_index(self, index: Tensor | None, num_points: int) -> Tensor | None:
        """The index, or an error before anything is computed if this conditional cannot use it."""
        return index

    @abstractmethod
    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`m_n`, broadcastable to ``residual``."""

    @abstractmethod
    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`-\phi(m_n) \ge 0` per point, broadcastable to ``residual``."""

    def residual_blocks(
        self, residual: Tensor, covariance: Callable[[Tensor], Tensor], *, index: Tensor | None = None
    ) -> ResidualBlocks | None:
        r"""What else of the residual the objective will need: None, or covariances within blocks of the batch.

        :param residual: :math:`d_n`, ``... x B``.
        :param covariance: Computes :math:`D` within sets of points: from positions in the batch, ``K x S``, to
            ``... x K x S x S``.
        :param index: Positions of the batch in the training set.
        """
        return None

    def optimum(
        self, residual: Tensor, precision: Tensor, blocks: ResidualBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""The best conditional where the expected log likelihood falls with the variance at rate :math:`\lambda_n/2`.

        :param residual: :math:`d_n`, ``... x B``.
        :param precision: :math:`\lambda_n \ge 0`, broadcastable to ``residual``; :math:`1/\sigma_n^2` for Gaussian noise.
        :param blocks: From :meth:`residual_blocks`.
        :return: What it leaves of the residual variance, :math:`m_n d_n`, and the penalty :math:`-\phi(m_n)` per point.
        """
        return residual * optimal_scale(residual, precision), optimal_scale_penalty(residual, precision)


def block_table(labels: Tensor) -> Tensor:
    r"""The positions of the points of each block.

    :param labels: Label of each point, shape ``N``.
    :return: ``K x S``, a row for each label that occurs, in increasing order; filled up with -1.

    Example:
        >>> tighter_gp.conditionals.block_table(torch.tensor([2, 0, 2]))
        tensor([[ 1, -1],
                [ 0,  2]])
    """
    _, block, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    order = torch.argsort(block, stable=True)
    column = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[block[order]]
    table = order.new_full((len(counts), int(counts.max())), -1)
    table[block[order], column] = order
    return table


def checked_index(index: Tensor, num_points: int, num_data: int, name: str) -> Tensor:
    """The positions of a batch in the training set, or a clear error if they cannot be that."""
    if index.dtype not in (torch.int32, torch.int64) or index.shape != (num_points,):
        raise ValueError(
            f"{name} needs one integer index per row of x, shape ({num_points},); "
            f"got {str(index.dtype).removeprefix('torch.')} of shape {tuple(index.shape)}."
        )
    check_range(index, num_data, f"{name}(num_data={num_data})")
    return index


class ConditionalAddedLossTerm(AddedLossTerm):
    """Marks a model whose q(f) has scaled variances, so that an objective which forgets their price raises."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def loss(self, *params: Any) -> Tensor:
        if not self.strategy.training:
            return torch.zeros(
                (), dtype=self.strategy.inducing_points.dtype, device=self.strategy.inducing_points.device
            )
        raise TypeError(
            f"This model's q(f) was narrowed by {type(self.strategy.conditional).__name__}, and only "
            "tighter_gp.TighterELBO subtracts what that costs; any other objective would overstate the bound. Use "
            "TighterELBO, or build the strategy with conditional='optimal' to train plain SVGP."
        )
