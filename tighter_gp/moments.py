r"""From kernel matrices and a whitened q to mean, explained and residual variance. Torch only.

The inducing variables are whitened, :math:`u = \mu(Z) + L w` with :math:`p(w) = \mathcal N(0, I)` and
:math:`q(w) = \mathcal N(m, S)`. Every strategy reduces to three numbers a point; SVGP gives :math:`f_n` the variance
:math:`s_n + d_n`, the tighter family :math:`s_n + m_n d_n`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import cholesky, project, residual_variance


class Whitened(NamedTuple):
    r"""A Gaussian :math:`q(w) = \mathcal N(m, S)`.

    Exactly one of ``root`` and ``stddev`` is given, or neither for a point mass.

    :param mean: :math:`m`, shape ``... x M``.
    :param root: :math:`R` with :math:`S = R R^\top`, shape ``... x M x R``.
    :param stddev: Square root of a diagonal :math:`S`, shape ``... x M``.
    """

    mean: Tensor
    root: Tensor | None = None
    stddev: Tensor | None = None


class Moments(NamedTuple):
    r"""What a sparse approximation says of each point; all of shape ``... x B``.

    :param mean: :math:`a_n^\top m`, without the prior mean.
    :param explained: :math:`s_n = a_n^\top S a_n`.
    :param residual: :math:`d_n \ge 0`.
    """

    mean: Tensor
    explained: Tensor
    residual: Tensor


def explained_root(projection: Tensor, q: Whitened) -> Tensor | None:
    r""":math:`R^\top A`, whose squared columns sum to :math:`s_n`; shape ``... x R x B``, None for a point mass."""
    if q.root is not None:
        return q.root.mT @ projection
    if q.stddev is not None:
        return q.stddev.unsqueeze(-1) * projection
    return None


def projected_mean(projection: Tensor, q: Whitened) -> Tensor:
    r""":math:`A^\top m`, shape ``... x B``."""
    return (projection.mT @ q.mean.unsqueeze(-1)).squeeze(-1)


def explained_variance(projection: Tensor, q: Whitened) -> Tensor:
    r""":math:`s_n = a_n^\top S a_n`, as a sum of squares; shape ``... x B``."""
    root = explained_root(projection, q)
    if root is None:
        return torch.zeros_like(projection[..., 0, :])
    return root.square().sum(-2)


def svgp_moments(chol: Tensor, cross: Tensor, prior_variance: Tensor, q: Whitened) -> Moments:
    r"""Moments given one set of inducing variables.

    .. math:: \mu_n = a_n^\top m, \qquad s_n = a_n^\top S a_n, \qquad d_n = k_{nn} - a_n^\top a_n

    :param chol: :math:`L`, shape ``... x M x M``.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param q: :math:`q(w)`.
    """
    projection = project(chol, cross)
    return Moments(
        projected_mean(projection, q),
        explained_variance(projection, q),
        residual_variance(prior_variance, projection),
    )


def optimal_whitened(projection: Tensor, targets: Tensor, noise: Tensor) -> Whitened:
    r"""The q(w) that maximises the bound under Gaussian noise, whatever the scales :math:`m_n`.

    .. math::

        B = I + \sum_n a_n a_n^\top / \sigma_n^2, \qquad
        q(w) = \mathcal N\bigl(B^{-1} \textstyle\sum_n a_n y_n / \sigma_n^2,\; B^{-1}\bigr)

    :param projection: :math:`A`, shape ``... x M x N``.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``... x N``.
    """
    weighted = projection / noise.unsqueeze(-2)
    return whitened_from_gram(weighted @ projection.mT, (weighted @ targets.unsqueeze(-1)).squeeze(-1))


def whitened_from_gram(gram: Tensor, linear: Tensor) -> Whitened:
    r"""The optimal q(w) from sums over the data, which may have been gathered in chunks.

    :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, shape ``... x M x M``.
    :param linear: :math:`\sum_n a_n y_n / \sigma_n^2`, shape ``... x M``.
    """
    factor = add_identity_cholesky(gram)
    mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device).expand_as(factor)
    # B^{-1} = F^{-T} F^{-1}: its root is upper triangular.
    return Whitened(mean, torch.linalg.solve_triangular(factor.mT, identity, upper=True))


def add_identity(gram: Tensor) -> Tensor:
    r""":math:`I + G`."""
    return gram + torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)


def add_identity_cholesky(gram: Tensor) -> Tensor:
    r""":math:`\mathrm{chol}(I + G)`, well conditioned from below for every Gram matrix :math:`G`."""
    return cholesky(add_identity(gram), name="I + A A'/noise")
