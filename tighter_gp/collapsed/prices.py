r"""What the residual costs, by the name of the bound: the one table of prices.

A price is a function of noise variances and of the residual: of its variances :math:`d_n`, or, where points may be
correlated under q(f|u), of its covariances :math:`D` within sets of points. A new price is one more branch of :func:`price`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..conditionals import Blocks
from ..conditionals.base import Within
from ..maths.bounds import PENALTIES, block_penalty, neighbour_penalty
from ..prior import Prior

# Sets of points whose covariances are in memory together.
SETS = 512


def price(
    bound: str,
    residual: Tensor,
    noise: Tensor,
    within: Within,
    blocks: Blocks | None = None,
    sets: Tensor | None = None,
) -> Tensor:
    r"""The price of the residual in a collapsed bound, a sum over points.

    :param bound: One of :data:`~tighter_gp.maths.bounds.BOUNDS`.
    :param residual: :math:`d_n`, ``... x N``.
    :param noise: :math:`\sigma_n^2`, ``... x N``.
    :param within: :math:`D` within sets of points.
    :param blocks: For ``"block"``: the partition of the points.
    :param sets: For ``"neighbours"``: each point after its neighbours, as from :func:`earlier_neighbours`.
    """
    if bound == "neighbours":
        assert sets is not None
        return sum((neighbour_price(within, noise, part) for part in sets.split(SETS)), start=noise.new_zeros(()))
    if bound in PENALTIES:
        return PENALTIES[bound](residual, noise)
    if bound == "full":  # that of a single block
        blocks = Blocks(torch.zeros(residual.size(-1), dtype=torch.long, device=residual.device))
    if blocks is None:
        raise ValueError("bound='block' needs the labels of the training points: blocks=.")
    covariance, rows = blocks.residual_blocks(residual.size(-1), within)  # [..., K, S, S] and [K, S]
    return block_penalty(covariance, noise[..., rows].to(covariance.dtype))


def rows_within(prior: Prior, x: Tensor) -> Within:
    """D within sets of rows of ``x``, each of them projected once per call."""

    def within(sets: Tensor) -> Tensor:
        distinct, place = sets.unique(return_inverse=True)
        inputs = x[distinct]
        return prior.residual_within(prior(inputs), inputs, place)

    return within


def neighbour_price(within: Within, noise: Tensor, sets: Tensor) -> Tensor:
    """What some points cost, given those before them.

    :param noise: Noise variances of all points, ``N``.
    :param sets: Positions of each point after its neighbours, ``K x S``; -1 where there are fewer.
    """
    is_point = sets >= 0
    covariance = within(sets) * (is_point.unsqueeze(-1) & is_point.unsqueeze(-2))  # -1 is a row as well
    return neighbour_penalty(covariance.double(), noise[sets].double())


@torch.no_grad()
def earlier_neighbours(prior: Prior, x: Tensor, noise: Tensor, num_neighbours: int, seed: int = 0) -> Tensor:
    r"""For each point those before it, in a random order, that say most of its residual by themselves.

    By :math:`D_{nm}^2 / (d_m + \sigma_m^2)`, the variance that one of them takes away. Takes :math:`O(N^2 M)`.

    :param x: Inputs, ``N x D``.
    :param noise: :math:`\sigma_n^2`, ``N``.
    :param num_neighbours: At most so many; the nearest of more are the neighbours of fewer.
    :param seed: Of the order.
    :return: Positions, ``N x (num_neighbours + 1)``, each point last; -1 where there are fewer.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    x, noise, sets = x[order], noise[order], []
    p = prior(x)
    size = max(1, 2**22 // len(x))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        covariance = prior.residual_covariance(x[rows], x[: rows.stop], p.matrix[:, rows], p.matrix[:, : rows.stop])
        gain = covariance.square() / (p.residual + noise)[: rows.stop]
        gain = gain.tril(rows.start - 1)  # of earlier points
        values, found = gain.topk(min(num_neighbours, rows.stop))
        found = torch.where(values > 0, order[found], -1)
        missing = found.new_full((len(found), num_neighbours - found.size(-1)), -1)
        sets.append(torch.cat([missing, found.flip(-1), order[rows].unsqueeze(-1)], -1))
    return torch.cat(sets)
