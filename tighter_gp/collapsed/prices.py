r"""What the residual costs, by the name of the bound: the one table of prices.

A price is a function of noise variances and of the residual: of its variances :math:`d_n`, or, where points may be
correlated under q(f|u), of its covariances :math:`D` within sets of points. A new price is one more branch of :func:`price`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..conditionals import Blocks
from ..conditionals.base import Within
from ..maths.bounds import PENALTIES, block_penalty


def price(bound: str, residual: Tensor, noise: Tensor, within: Within, blocks: Blocks | None = None) -> Tensor:
    r"""The price of the residual in a collapsed bound, a sum over points.

    :param bound: One of :data:`~tighter_gp.maths.bounds.BOUNDS`.
    :param residual: :math:`d_n`, ``... x N``.
    :param noise: :math:`\sigma_n^2`, ``... x N``.
    :param within: :math:`D` within sets of points.
    :param blocks: For ``"block"``: the partition of the points.
    """
    if bound in PENALTIES:
        return PENALTIES[bound](residual, noise)
    if bound == "full":  # that of a single block
        blocks = Blocks(torch.zeros(residual.size(-1), dtype=torch.long, device=residual.device))
    if blocks is None:
        raise ValueError("bound='block' needs the labels of the training points: blocks=.")
    covariance, rows = blocks.residual_blocks(residual.size(-1), within)  # [..., K, S, S] and [K, S]
    return block_penalty(covariance, noise[..., rows].to(covariance.dtype))
