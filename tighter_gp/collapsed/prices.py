r"""What the residual costs, by the name of the bound: the one table of prices.

A price is a function of noise variances and of the residual: of its variances :math:`d_n`, or, where points may be
correlated under q(f|u), of its covariances :math:`D` within sets of points. Sets are positions, ``K x S``, filled up with -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..conditionals.base import Within
from ..maths.bounds import PENALTIES, block_penalty, neighbour_penalty
from ..prior import Prior

# Points in sets that are in memory together.
_MOST_POINTS = 2**14


def price(bound: str, residual: Tensor, noise: Tensor, within: Within, sets: Tensor | None = None) -> Tensor:
    r"""The price of the residual in a collapsed bound, a sum over points.

    :param bound: One of :data:`~tighter_gp.maths.bounds.BOUNDS`, or ``"neighbours"``.
    :param residual: :math:`d_n`, ``... x N``.
    :param noise: :math:`\sigma_n^2`, ``... x N``.
    :param within: :math:`D` within sets of points.
    :param sets: For ``"block"`` the points of each block, for ``"neighbours"`` each point after its neighbours.
    """
    if bound in PENALTIES:
        return PENALTIES[bound](residual, noise)
    return sum(prices_of_sets(bound, noise, within, sets), start=noise.new_zeros(()))


def prices_of_sets(bound: str, noise: Tensor, within: Within, sets: Tensor | None = None) -> Iterator[Tensor]:
    """The price in parts, few enough sets at a time; none for a price of variances alone."""
    if bound in PENALTIES:
        return
    if sets is None:  # "full": a single block
        sets = torch.arange(noise.size(-1), device=noise.device).unsqueeze(0)
    penalty = neighbour_penalty if bound == "neighbours" else block_penalty
    for part in sets.split(max(1, _MOST_POINTS // sets.size(-1))):
        is_point = part >= 0  # [K, S]
        covariance = within(part) * (is_point.unsqueeze(-1) & is_point.unsqueeze(-2))  # -1 is a row as well
        yield penalty(covariance.double(), noise[..., part].double())


def rows_within(prior: Prior, at: Callable[[Tensor], Tensor]) -> Within:
    """D within sets of rows, each of them projected once per call; ``at`` gives the inputs of rows."""

    def within(sets: Tensor) -> Tensor:
        distinct, place = sets.clamp_min(0).unique(return_inverse=True)
        inputs = at(distinct)
        return prior.residual_within(prior(inputs), inputs, place)

    return within


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
    p = prior(x)  # A  [M, N] and d  [N]
    size = max(1, 2**22 // len(x))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        # D of these points with all up to them  [B, stop]
        covariance = prior.residual_covariance(x[rows], x[: rows.stop], p.matrix[:, rows], p.matrix[:, : rows.stop])
        gain = covariance.square() / (p.residual + noise)[: rows.stop]  # D_nm^2 / (d_m + sigma_m^2)
        gain = gain.tril(rows.start - 1)  # of earlier points
        values, found = gain.topk(min(num_neighbours, rows.stop))  # [B, k]
        found = torch.where(values > 0, order[found], -1)
        missing = found.new_full((len(found), num_neighbours - found.size(-1)), -1)
        sets.append(torch.cat([missing, found.flip(-1), order[rows].unsqueeze(-1)], -1))
    return torch.cat(sets)
