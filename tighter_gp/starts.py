r"""Lengthscales to start from, by one rule for the ready-made models and for :func:`~tighter_gp.initialize`."""

from __future__ import annotations

import torch
from torch import Tensor

# The floor as a fraction of the median distance, and the rows looked at for it.
_FLOOR, _MOST_ROWS = 0.25, 1000


@torch.no_grad()
def start_lengthscales(rows: Tensor, centres: Tensor) -> Tensor:
    r"""One lengthscale per input, which suits inputs in any units and cannot be tiny.

    .. math:: \ell_j = \max\bigl(\sqrt D \operatorname{std}(z_j),\ \min(r / 4, \sqrt D \operatorname{std}(x_j))\bigr)

    with :math:`r` the median distance of rows. Centres of k-means hardly differ in an input that few rows have, such as a
    pixel at the border: the second term is for these.

    :param rows: Training inputs, ``N x D``.
    :param centres: Inducing points, ``M x D``.
    :return: Shape ``D``.

    Example:
        >>> tighter_gp.starts.start_lengthscales(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
        tensor([0.5000, 0.5000])
    """
    some = rows[:: -(-len(rows) // _MOST_ROWS)]
    distances = torch.nn.functional.pdist(some)
    positive = distances[distances > 0]
    floor = _FLOOR * (positive.median() if len(positive) else distances.new_tensor(4.0))
    root = rows.size(-1) ** 0.5
    spread = root * some.std(-2, correction=0)
    lowest = torch.where(spread > 0, torch.minimum(spread, floor), floor)  # a constant input has no say
    return torch.maximum(root * centres.std(-2, correction=0), lowest)
