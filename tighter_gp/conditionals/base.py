r"""Who chooses the scales :math:`m_n` of q(f|u): what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import Module
from gpytorch.mlls import AddedLossTerm
from torch import Tensor

# From positions of points, ``K x S``, to D within each of these sets, ``... x K x S x S``.
Within = Callable[[Tensor], Tensor]


class Conditional(Module, ABC):
    r"""Chooses :math:`m_n` given the residual :math:`d_n`.

    :ivar bool is_learned: Whether the scales are set by the model alone. If so the strategy applies them in training,
        if not the objective does, since they depend on the likelihood.
    :ivar bool is_strict: Whether the objective is a lower bound on the evidence for every likelihood.
    :ivar bool is_gaussian_only: Whether the scales are known for Gaussian noise alone.
    :ivar bool needs_index: Whether a call in training must say which training points it holds, ``model(x, index=rows)``.
    :ivar bool needs_double: Whether it factorises residual covariances, which float32 does not know to within the noise.

    Example:
        >>> residual, noise = torch.tensor([0.0, 1.0, 3.0]), torch.tensor(2.0)
        >>> kept, penalty = tighter_gp.conditionals.OptimalConditional().optimum(residual, 1 / noise)
        >>> kept
        tensor([0.0000, 0.6667, 1.2000])
    """

    is_learned: bool = True
    is_strict: bool = False
    is_gaussian_only: bool = False
    needs_index: bool = False
    needs_double: bool = False
    batch_shape: torch.Size = torch.Size()

    @abstractmethod
    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`m_n`, broadcastable to ``residual``."""

    @abstractmethod
    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`-\phi(m_n) \ge 0` per point, broadcastable to ``residual``."""


class ConditionalAddedLossTerm(AddedLossTerm):
    """Marks a model whose q(f) has scaled variances, so that an objective which forgets their price raises."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def loss(self, *params: Any) -> Tensor:
        if not self.strategy.training:
            return self.strategy.inducing_points.new_zeros(())
        raise TypeError(
            f"This model's q(f) was narrowed by {type(self.strategy.conditional).__name__}, and only "
            "tighter_gp.TighterELBO subtracts what that costs; any other objective would overstate the bound. Use "
            "TighterELBO, or build the strategy with conditional='optimal' to train plain SVGP."
        )
