r"""The core of every collapsed bound: from sums over the data to q(w) and a log probability. Torch only.

With :math:`G = \sum_n a_n a_n^\top / \sigma_n^2` and :math:`l = \sum_n a_n y_n / \sigma_n^2` the best q(w) is
:math:`\mathcal N(B^{-1} l, B^{-1})`, :math:`B = I + G`. A bound is the log probability below, less a price.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import cholesky, solve_lower_transposed

__all__ = ["Collapsed", "collapse", "collapsed_log_prob"]

_LOG_2PI = math.log(2 * math.pi)


class Collapsed(NamedTuple):
    r"""What sums over the data come down to.

    :param factor: :math:`L_B = \mathrm{chol}(I + G)`, ``... x M x M``.
    :param weights: :math:`B^{-1} l`, the mean of q(w), ``... x M``.

    Example:
        >>> core = tighter_gp.maths.collapsed.collapse(torch.tensor([[3.0]]), torch.tensor([2.0]))
        >>> core.weights, core.log_det  # 2 / (1 + 3), and log 4
        (tensor([0.5000]), tensor(1.3863))
    """

    factor: Tensor
    weights: Tensor

    @property
    def log_det(self) -> Tensor:
        r""":math:`\log |I + G|`, shape ``...``."""
        return 2 * self.factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)

    @property
    def root(self) -> Tensor:
        r"""Upper triangular root of :math:`B^{-1}`, ``... x M x M``."""
        identity = torch.eye(self.factor.size(-1), dtype=self.factor.dtype, device=self.factor.device)  # [M, M]
        return solve_lower_transposed(self.factor, identity.expand_as(self.factor))


def add_identity(gram: Tensor) -> Tensor:
    r""":math:`I + G`."""
    return gram + torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)


def add_identity_cholesky(gram: Tensor, scale: Tensor | None = None) -> Tensor:
    r""":math:`\mathrm{chol}(I + G)`, well conditioned from below for every Gram matrix :math:`G`.

    :param scale: See :func:`~tighter_gp.maths.linalg.cholesky`.
    """
    return cholesky(add_identity(gram), "I + A A'/noise", scale)


def collapse(gram: Tensor, linear: Tensor, factorize: Callable[[Tensor], Tensor] = add_identity_cholesky) -> Collapsed:
    r"""The best q(w) from sums over the data, which may have been gathered in chunks.

    :param gram: :math:`G`, ``... x M x M``.
    :param linear: :math:`l`, ``... x M``.
    :param factorize: Makes :math:`\mathrm{chol}(I + G)`.

    Example:
        >>> tighter_gp.maths.collapsed.collapse(torch.tensor([[3.0]]), torch.tensor([2.0])).root
        tensor([[0.5000]])
    """
    factor = factorize(gram)  # L_B  [..., M, M]
    return Collapsed(factor, torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1))


def collapsed_log_prob(quadratic: Tensor, log_det: Tensor, log_noise: Tensor, num_data: int | Tensor) -> Tensor:
    r""":math:`-\tfrac12 [N \log 2\pi + y^\top (A^\top A + \Sigma)^{-1} y + \log |I + G| + \sum_n \log \sigma_n^2]`.

    :param quadratic: The quadratic form. As :math:`\sum_n (y_n - a_n^\top w)^2/\sigma_n^2 + \lVert w \rVert^2` with
        :math:`w = B^{-1} l` it is a sum of squares, so that small noise cancels nothing.
    :param log_det: :math:`\log |I + G|`.
    :param log_noise: :math:`\sum_n \log \sigma_n^2`.
    :param num_data: :math:`N`.

    Example:
        >>> tighter_gp.maths.collapsed.collapsed_log_prob(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(0.0), 3)
        tensor(-3.7568)
    """
    return -0.5 * (num_data * _LOG_2PI + quadratic + log_det + log_noise)
