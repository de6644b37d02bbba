r"""From kernel matrices and a whitened q to mean, explained and residual variance. Torch only.

The inducing variables are whitened, :math:`u = \mu(Z) + L w` with :math:`p(w) = \mathcal N(0, I)` and
:math:`q(w) = \mathcal N(m, S)`. Every strategy reduces to three numbers per point; SVGP gives :math:`f_n` the variance
:math:`s_n + d_n`, the tighter family :math:`s_n + m_n d_n`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .collapsed import collapse
from .derivatives import mean_and_explained
from .linalg import project, residual_variance

__all__ = [
    "Moments",
    "Whitened",
    "explained_root",
    "explained_variance",
    "optimal_whitened",
    "projected_mean",
    "projected_moments",
    "svgp_moments",
    "whitened_from_gram",
]


class Whitened(NamedTuple):
    r"""A Gaussian :math:`q(w) = \mathcal N(m, S)`.

    Exactly one of ``root`` and ``stddev`` is given, or neither for a point mass.

    :param mean: :math:`m`, shape ``... x M``.
    :param root: :math:`R` with :math:`S = R R^\top`, shape ``... x M x R``.
    :param stddev: Square root of a diagonal :math:`S`, shape ``... x M``.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.zeros(2), stddev=torch.tensor([1.0, 0.5]))
        >>> q.root is None, q.to(torch.float64).mean.dtype
        (True, torch.float64)
    """

    mean: Tensor
    root: Tensor | None = None
    stddev: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Whitened:
        """The same in another precision."""
        if self.mean.dtype == dtype:
            return self
        return Whitened(*(None if tensor is None else tensor.to(dtype) for tensor in self))  # type: ignore[arg-type]


class Moments(NamedTuple):
    r"""What a sparse approximation says of each point; all of shape ``... x B``.

    :param mean: :math:`a_n^\top m`, without the prior mean.
    :param explained: :math:`s_n = a_n^\top S a_n`.
    :param residual: :math:`d_n \ge 0`.

    Example:
        >>> moments = tighter_gp.maths.moments.Moments(
        ...     mean=torch.zeros(2), explained=torch.tensor([0.5, 0.25]), residual=torch.tensor([0.5, 0.75])
        ... )
        >>> moments.explained + moments.residual  # the variances of SVGP
        tensor([1., 1.])
    """

    mean: Tensor
    explained: Tensor
    residual: Tensor


def explained_root(projection: Tensor, q: Whitened) -> Tensor | None:
    r""":math:`R^\top A`, whose squared columns sum to :math:`s_n`; shape ``... x R x B``, None for a point mass.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.maths.moments.explained_root(projection, q)
        tensor([[0.5000, 0.2500],
                [0.0000, 0.5000]])
    """
    if q.root is not None:
        return q.root.mT @ projection
    if q.stddev is not None:
        return q.stddev.unsqueeze(-1) * projection
    return None


def projected_mean(projection: Tensor, q: Whitened) -> Tensor:
    r""":math:`A^\top m`, shape ``... x B``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.maths.moments.projected_mean(projection, q)
        tensor([2., 1.])
    """
    return (projection.mT @ q.mean.unsqueeze(-1)).squeeze(-1)


def explained_variance(projection: Tensor, q: Whitened) -> Tensor:
    r""":math:`s_n = a_n^\top S a_n`, as a sum of squares; shape ``... x B``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.maths.moments.explained_variance(projection, q)
        tensor([0.2500, 0.3125])
    """
    root = explained_root(projection, q)
    if root is None:
        return projection.new_zeros(*projection.shape[:-2], projection.size(-1))
    return root.square().sum(-2)


def projected_moments(projection: Tensor, prior_variance: Tensor, *parts: Whitened) -> Moments:
    r"""Moments from a projection, given one or several independent sets of inducing variables.

    :param projection: :math:`A`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param parts: The factors :math:`q(w_i)` in the order of the rows of :math:`A`.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> tighter_gp.maths.moments.projected_moments(torch.tensor([[1.0, 0.5], [0.0, 0.5]]), torch.ones(2), q, q).mean
        tensor([2., 2.])
    """
    return Moments(*explained_moments(projection, *parts), residual_variance(prior_variance, projection))


def explained_moments(projection: Tensor, *parts: Whitened) -> tuple[Tensor, Tensor]:
    r""":math:`A^\top m` and :math:`s_n`, summed over the independent factors of q(w).

    Parameters of :func:`projected_moments`.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> tighter_gp.maths.moments.explained_moments(torch.tensor([[1.0, 0.5], [0.0, 0.5]]), q, q)[0]
        tensor([2., 2.])
    """
    sizes = [q.mean.size(-1) for q in parts]
    total: tuple[Tensor, Tensor] | None = None
    for rows, q in zip(projection.split(sizes, dim=-2), parts, strict=True):  # a block of A per factor of q(w)
        if q.root is not None:
            found = mean_and_explained(rows, q.mean, q.root)
        else:
            found = projected_mean(rows, q), explained_variance(rows, q)
        total = found if total is None else (total[0] + found[0], total[1] + found[1])
    assert total is not None
    return total


def svgp_moments(chol: Tensor, cross: Tensor, prior_variance: Tensor, q: Whitened) -> Moments:
    r"""Moments given one set of inducing variables.

    .. math:: \mu_n = a_n^\top m, \qquad s_n = a_n^\top S a_n, \qquad d_n = \max(0, k_{nn} - a_n^\top a_n)

    :param chol: :math:`L`, shape ``... x M x M``.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param q: :math:`q(w)`.

    Example:
        >>> chol, cross = torch.eye(2), torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> moments = tighter_gp.maths.moments.svgp_moments(chol, cross, torch.ones(3), q)
        >>> moments.mean, moments.residual
        (tensor([2., 1., 0.]), tensor([0.0000, 0.5000, 1.0000]))
    """
    return projected_moments(project(chol, cross), prior_variance, q)


def optimal_whitened(projection: Tensor, targets: Tensor, noise: Tensor) -> Whitened:
    r"""The q(w) that maximises the bound under Gaussian noise, whatever the scales :math:`m_n`.

    .. math::

        B = I + \sum_n a_n a_n^\top / \sigma_n^2, \qquad
        q(w) = \mathcal N\bigl(B^{-1} \textstyle\sum_n a_n y_n / \sigma_n^2,\; B^{-1}\bigr)

    :param projection: :math:`A`, shape ``... x M x N``.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``... x N``.

    Example:
        >>> projection, targets = torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([1.0, 0.5, 0.0])
        >>> q = tighter_gp.maths.moments.optimal_whitened(projection, targets, torch.tensor(0.5))
        >>> q.mean, q.root
        (tensor([0.6250]), tensor([[0.5000]]))
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    weighted = projection / noise.unsqueeze(-2)  # a_n / noise_n  [..., M, N]
    return whitened_from_gram(weighted @ projection.mT, (weighted @ targets.unsqueeze(-1)).squeeze(-1))


def whitened_from_gram(gram: Tensor, linear: Tensor) -> Whitened:
    r"""The optimal q(w) from sums over the data, which may have been gathered in chunks.

    :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, shape ``... x M x M``.
    :param linear: :math:`\sum_n a_n y_n / \sigma_n^2`, shape ``... x M``.

    Example:
        >>> q = tighter_gp.maths.moments.whitened_from_gram(torch.tensor([[3.0]]), torch.tensor([2.0]))
        >>> q.mean, q.root  # 2 / (1 + 3), and the root of 1 / (1 + 3)
        (tensor([0.5000]), tensor([[0.5000]]))
    """
    core = collapse(gram, linear)
    return Whitened(core.weights, core.root)
