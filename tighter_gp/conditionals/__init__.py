r"""Who chooses the scales :math:`m_n` of q(f|u).

A conditional is chosen by name or as an object: ``TighterVariationalStrategy(..., conditional="beta")``.

=================  =============================  ===================================================================
``"optimal"``      :class:`OptimalConditional`    the best :math:`m_n` for any likelihood at the current q, no parameter
``"beta"``         :class:`BetaConditional`       :math:`m_n = \beta/(\beta + d_n)`, one learned :math:`\beta`
``"scalar"``       :class:`ScalarConditional`     one learned :math:`m \le 1`; a strict bound for every likelihood
an object          :class:`PerPoint`              one learned :math:`m_n` per training point
an object          :class:`~tighter_gp.Blocks`    Gaussian noise: the best block-diagonal :math:`M`, no parameter
=================  =============================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Conditional
from .blocks import Blocks, block_table
from .learned import BetaConditional, PerPoint, ScalarConditional
from .optimal import OptimalConditional

__all__ = [
    "BetaConditional",
    "Blocks",
    "Conditional",
    "OptimalConditional",
    "PerPoint",
    "ScalarConditional",
    "block_table",
]

_BY_NAME: dict[str, Callable[[torch.Size], Conditional]] = {
    "optimal": lambda batch_shape: OptimalConditional(),
    "beta": BetaConditional,
    "scalar": ScalarConditional,
}


def make_conditional(conditional: str | Conditional, batch_shape: torch.Size, like: Tensor) -> Conditional:
    r"""Resolve a name to a conditional for a batch of latent functions; an object is checked and passed through.

    :param conditional: A key of the table above or a :class:`Conditional`.
    :param batch_shape: Batch shape of the variational distribution.
    :param like: Tensor whose dtype and device the parameters take.
    """
    if isinstance(conditional, str):
        if conditional not in _BY_NAME:
            names = ", ".join(repr(name) for name in _BY_NAME)
            raise ValueError(
                f"Unknown conditional {conditional!r}; choose {names}, or pass a Conditional such as PerPoint."
            )
        return _BY_NAME[conditional](batch_shape).to(dtype=like.dtype, device=like.device)
    if not isinstance(conditional, Conditional):
        raise TypeError(f"conditional must be a name or a Conditional; got {type(conditional).__name__}.")
    if torch.broadcast_shapes(conditional.batch_shape, batch_shape) != batch_shape:
        raise ValueError(
            f"{type(conditional).__name__} has batch_shape {tuple(conditional.batch_shape)}, which does not fit the "
            f"variational distribution's {tuple(batch_shape)}; build it with batch_shape={tuple(batch_shape)}."
        )
    return conditional
