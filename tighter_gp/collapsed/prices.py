r"""What the residual costs, by the name of the bound: the one table of prices.

A price is a function of noise variances and of the residual: of its variances :math:`d_n`, or, where points may be
correlated under q(f|u), of its covariances :math:`D` within sets of points. A new price is one more branch of :func:`price`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..conditionals import Blocks
from ..maths.bounds import PENALTIES, block_penalty
from ..prior import Projector

# From positions of points, ``K x S``, to D within each of these sets, ``... x K x S x S``.
Within = Callable[[Tensor], Tensor]


def price(bound: str, residual: Tensor, noise: Tensor, within: Within, blocks: Blocks | None = None) -> Tensor:
    r"""The price of the residual in a collapsed bound, a sum over points.

    :param bound: One of :data:`~tighter_gp.maths.bounds.BOUNDS`.
    :param residual: :math:`d_n`, ``... x N``.
    :param noise: :math:`\sigma_n^2`, ``... x N``.
    :param within: :math:`D` within sets of points; see :func:`residual_within`.
    :param blocks: For ``"block"``: the partition of the points.
    """
    if bound in PENALTIES:
        return PENALTIES[bound](residual, noise)
    if bound == "full":  # that of a single block
        blocks = Blocks(torch.zeros(residual.size(-1), dtype=torch.long, device=residual.device))
    if blocks is None:
        raise ValueError("bound='block' needs the labels of the training points: blocks=.")
    covariance, rows = blocks.residual_blocks(residual, within)  # [..., K, S, S] and [K, S]
    return block_penalty(covariance, noise[..., rows].to(covariance.dtype))


def residual_within(projector: Projector, x: Tensor, matrix: Tensor, sets: Tensor) -> Tensor:
    """:math:`D` within sets of points, ``... x K x S x S``.

    :param x: Inputs, ``... x N x D``.
    :param matrix: Their projection A, ``... x M x N``.
    :param sets: Positions of the points of each set, ``K x S``.
    """
    x = x.expand(*matrix.shape[:-2], *x.shape[-2:])
    inputs = x[..., sets, :].movedim(-3, 0)  # [K, ..., S, D]: a batch of inputs, over which kernels broadcast
    columns = matrix[..., sets].movedim(-2, 0)  # [K, ..., M, S]
    return projector.residual_covariance(inputs, inputs, columns, columns).movedim(0, -3)
