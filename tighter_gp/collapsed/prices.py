r"""What the residual costs, by the name of the bound: the one table of prices.

A price is a function of noise variances and of the residual: of its variances :math:`d_n`, or, where points may be
correlated under q(f|u), of its covariances :math:`D` within sets of points. A new price is one more branch of :func:`price`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..conditionals import Blocks
from ..maths.bounds import PENALTIES, block_penalty, neighbour_penalty
from ..modes import chunks
from ..prior import Projector

# From positions of points, ``K x S``, to D within each of these sets, ``... x K x S x S``.
Within = Callable[[Tensor], Tensor]


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
    :param within: :math:`D` within sets of points; see :func:`residual_within`.
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


def rows_within(projector: Projector, x: Tensor) -> Within:
    """D within sets of rows of ``x``, each of them projected once per call."""

    def within(sets: Tensor) -> Tensor:
        distinct, place = sets.unique(return_inverse=True)
        inputs = x[distinct]
        return residual_within(projector, inputs, projector(inputs).matrix, place)

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
def earlier_neighbours(projector: Projector, x: Tensor, noise: Tensor, num_neighbours: int, seed: int = 0) -> Tensor:
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
    p = projector(x)
    for rows in chunks(len(x), max(1, 2**22 // len(x))):
        covariance = projector.residual_covariance(x[rows], x[: rows.stop], p.matrix[:, rows], p.matrix[:, : rows.stop])
        gain = covariance.square() / (p.residual + noise)[: rows.stop]
        gain = gain.tril(rows.start - 1)  # of earlier points
        values, found = gain.topk(min(num_neighbours, rows.stop))
        found = torch.where(values > 0, order[found], -1)
        missing = found.new_full((len(found), num_neighbours - found.size(-1)), -1)
        sets.append(torch.cat([missing, found.flip(-1), order[rows].unsqueeze(-1)], -1))
    return torch.cat(sets)
