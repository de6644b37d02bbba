r"""From kernel matrices and a whitened q to mean, explained and residual variance. Torch only.

The inducing variables are whitened, :math:`u = \mu(Z) + L w` with :math:`p(w) = \mathcal N(0, I)` and
:math:`q(w) = \mathcal N(m, S)`. Every strategy reduces to three numbers per point; SVGP gives :math:`f_n` the variance
:math:`s_n + d_n`, the tighter family :math:`s_n + m_n d_n`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .collapsed import add_identity, collapse
from .linalg import (
    cholesky,
    mean_diagonal,
    project,
    residual_variance,
    solve_lower,
)

__all__ = [
    "Moments",
    "Whitened",
    "explained_root",
    "explained_variance",
    "join_whitened",
    "optimal_solve_gp_whitened",
    "optimal_whitened",
    "orthogonal_cholesky",
    "projected_mean",
    "projected_moments",
    "solve_gp_moments",
    "solve_gp_whitened_from_gram",
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
        >>> q = tighter_gp.moments.Whitened(torch.zeros(2), stddev=torch.tensor([1.0, 0.5]))
        >>> q.root is None, q.to(torch.float64).mean.dtype
        (True, torch.float64)
    """

    mean: Tensor
    root: Tensor | None = None
    stddev: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Whitened:
        """The same in another precision."""
        return Whitened(*(None if tensor is None else tensor.to(dtype) for tensor in self))  # type: ignore[arg-type]


class Moments(NamedTuple):
    r"""What a sparse approximation says of each point; all of shape ``... x B``.

    :param mean: :math:`a_n^\top m`, without the prior mean.
    :param explained: :math:`s_n = a_n^\top S a_n`.
    :param residual: :math:`d_n \ge 0`.

    Example:
        >>> moments = tighter_gp.moments.Moments(
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
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.moments.explained_root(projection, q)
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
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.moments.projected_mean(projection, q)
        tensor([2., 1.])
    """
    return (projection.mT @ q.mean.unsqueeze(-1)).squeeze(-1)


def explained_variance(projection: Tensor, q: Whitened) -> Tensor:
    r""":math:`s_n = a_n^\top S a_n`, as a sum of squares; shape ``... x B``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> tighter_gp.moments.explained_variance(projection, q)
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
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> tighter_gp.moments.projected_moments(torch.tensor([[1.0, 0.5], [0.0, 0.5]]), torch.ones(2), q, q).mean
        tensor([2., 2.])
    """
    rows = projection.split([q.mean.size(-1) for q in parts], dim=-2)
    mean, *means = (projected_mean(part, q) for part, q in zip(rows, parts, strict=True))
    explained, *others = (explained_variance(part, q) for part, q in zip(rows, parts, strict=True))
    return Moments(sum(means, start=mean), sum(others, start=explained), residual_variance(prior_variance, projection))


def svgp_moments(chol: Tensor, cross: Tensor, prior_variance: Tensor, q: Whitened) -> Moments:
    r"""Moments given one set of inducing variables.

    .. math:: \mu_n = a_n^\top m, \qquad s_n = a_n^\top S a_n, \qquad d_n = \max(0, k_{nn} - a_n^\top a_n)

    :param chol: :math:`L`, shape ``... x M x M``.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param q: :math:`q(w)`.

    Example:
        >>> chol, cross = torch.eye(2), torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> moments = tighter_gp.moments.svgp_moments(chol, cross, torch.ones(3), q)
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
        >>> q = tighter_gp.moments.optimal_whitened(projection, targets, torch.tensor(0.5))
        >>> q.mean, q.root
        (tensor([0.6250]), tensor([[0.5000]]))
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    weighted = projection / noise.unsqueeze(-2)
    return whitened_from_gram(weighted @ projection.mT, (weighted @ targets.unsqueeze(-1)).squeeze(-1))


def whitened_from_gram(gram: Tensor, linear: Tensor) -> Whitened:
    r"""The optimal q(w) from sums over the data, which may have been gathered in chunks.

    :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, shape ``... x M x M``.
    :param linear: :math:`\sum_n a_n y_n / \sigma_n^2`, shape ``... x M``.

    Example:
        >>> q = tighter_gp.moments.whitened_from_gram(torch.tensor([[3.0]]), torch.tensor([2.0]))
        >>> q.mean, q.root  # 2 / (1 + 3), and the root of 1 / (1 + 3)
        (tensor([0.5000]), tensor([[0.5000]]))
    """
    core = collapse(gram, linear)
    return Whitened(core.weights, core.root)


# ---------------------------------------------------------------------------------------------------------------------
# Two sets of inducing variables: SOLVE-GP
# ---------------------------------------------------------------------------------------------------------------------


def orthogonal_cholesky(
    covariance: Tensor, num_inducing: int, factorize: Callable[[Tensor, str, Tensor], Tensor] = cholesky
) -> Tensor:
    r"""Cholesky factor of the covariance of :math:`(u, v)`, block by block: the largest matrix factorised is a block.

    .. math::

        L = \begin{pmatrix} L_u & 0 \\ W^\top & L_v \end{pmatrix}, \qquad
        W = L_u^{-1} K_{uv}, \qquad L_v L_v^\top = C_{vv} = K_{vv} - W^\top W

    Whitened by it, :math:`u = L_u w_u` and :math:`v = W^\top w_u + L_v w_v`: :math:`w_v` is what :math:`v` adds to
    :math:`u`, orthogonal to it under the prior.

    :param covariance: Covariance of the inducing and the orthogonal variables, ``... x M x M``, ``M = M_u + M_v``.
    :param num_inducing: ``M_u``.
    :param factorize: Makes the factor of a block, given the block, its name and the scale of its rounding errors.
    :return: Shape ``... x M x M``, lower triangular.

    Example:
        >>> covariance = torch.tensor([[4.0, 2.0], [2.0, 10.0]])
        >>> tighter_gp.moments.orthogonal_cholesky(covariance, num_inducing=1)
        tensor([[2., 0.],
                [1., 3.]])
    """
    rest = covariance.size(-1) - num_inducing
    top, bottom = covariance.split([num_inducing, rest], dim=-2)
    inducing, orthogonal = top[..., :num_inducing], bottom[..., num_inducing:]
    factor = factorize(inducing, "K_ZZ", mean_diagonal(inducing))
    if not rest:
        return factor
    whitened = solve_lower(factor, top[..., num_inducing:])
    # A difference, perhaps a small one: its errors are of the scale of what it is taken from.
    rest_factor = factorize(orthogonal - whitened.mT @ whitened, "C_OO", mean_diagonal(orthogonal))
    return _stack_rows(factor, torch.cat([whitened.mT, rest_factor], dim=-1))


def solve_gp_moments(chol: Tensor, cross: Tensor, prior_variance: Tensor, q_u: Whitened, q_v: Whitened) -> Moments:
    r"""Moments given two sets of inducing variables with independent q.

    .. math::

        \mu_n = a_n^\top m_u + b_n^\top m_v, \qquad s_n = a_n^\top S_u a_n + b_n^\top S_v b_n, \qquad
        d_n = \max(0, k_{nn} - a_n^\top a_n - b_n^\top b_n)

    where :math:`A = L_u^{-1} K_{ZX}` and :math:`B = L_v^{-1} (K_{OX} - W^\top A)` are the rows of
    :math:`H = L^{-1} K_{(Z, O)X}`.

    :param chol: :math:`L` of :func:`orthogonal_cholesky`, shape ``... x M x M``.
    :param cross: :math:`K_{(Z, O)X}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param q_u: :math:`q(w_u)`.
    :param q_v: :math:`q(w_v)`.

    Example:
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> cross = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> moments = tighter_gp.moments.solve_gp_moments(torch.eye(2), cross, torch.ones(2), q, q)
        >>> moments.mean, moments.residual
        (tensor([2., 2.]), tensor([0.0000, 0.5000]))
    """
    return projected_moments(project(chol, cross), prior_variance, q_u, q_v)


def join_whitened(q_u: Whitened, q_v: Whitened) -> Whitened:
    r""":math:`q(w_u)\,q(w_v)` as one Gaussian over the stacked :math:`w`, with a block-diagonal root.

    Example:
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> tighter_gp.moments.join_whitened(q, q).stddev
        tensor([0.5000, 0.5000])
    """
    mean = torch.cat([q_u.mean, q_v.mean], dim=-1)
    if q_u.root is None and q_v.root is None:
        if q_u.stddev is None and q_v.stddev is None:
            return Whitened(mean)
        stddevs = [torch.zeros_like(q.mean) if q.stddev is None else q.stddev for q in (q_u, q_v)]
        return Whitened(mean, stddev=torch.cat(stddevs, dim=-1))
    first, second = map(_root, (q_u, q_v))
    return Whitened(mean, _stack_rows(first, torch.nn.functional.pad(second, (first.size(-1), 0))))


def _root(q: Whitened) -> Tensor:
    if q.root is not None:
        return q.root
    return q.mean.new_zeros(*q.mean.shape, 0) if q.stddev is None else torch.diag_embed(q.stddev)


def _stack_rows(top: Tensor, bottom: Tensor) -> Tensor:
    """One matrix above the other, the narrower top one filled up with zeros on its right."""
    return torch.cat([torch.nn.functional.pad(top, (0, bottom.size(-1) - top.size(-1))), bottom], dim=-2)


def optimal_solve_gp_whitened(
    projection: Tensor, targets: Tensor, noise: Tensor, num_inducing: int
) -> tuple[Whitened, Whitened]:
    r"""The :math:`q(w_u)` and :math:`q(w_v)` that maximise the bound under Gaussian noise, whatever the scales.

    .. math::

        S_u^{-1} = I + \sum_n a_n a_n^\top / \sigma_n^2, \qquad S_v^{-1} = I + \sum_n b_n b_n^\top / \sigma_n^2, \qquad
        \begin{pmatrix} m_u \\ m_v \end{pmatrix}
        = \Bigl(I + \sum_n h_n h_n^\top / \sigma_n^2\Bigr)^{-1} \sum_n h_n y_n / \sigma_n^2

    with :math:`h_n = (a_n, b_n)`: each covariance is that of its own set, the means are those of the joint problem.

    :param projection: :math:`H = [A; B]`, shape ``... x M x N``; see :func:`solve_gp_moments`.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``... x N``.
    :param num_inducing: ``M_u``, the number of rows of :math:`A`.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.5], [0.0, 0.5, 0.25]])
        >>> q_u, q_v = tighter_gp.moments.optimal_solve_gp_whitened(
        ...     projection, torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5), num_inducing=1
        ... )
        >>> q_u.mean, q_v.mean
        (tensor([0.6211]), tensor([0.0211]))
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    weighted = projection / noise.unsqueeze(-2)
    gram, linear = weighted @ projection.mT, (weighted @ targets.unsqueeze(-1)).squeeze(-1)
    return solve_gp_whitened_from_gram(gram, linear, num_inducing)


def solve_gp_whitened_from_gram(gram: Tensor, linear: Tensor, num_inducing: int) -> tuple[Whitened, Whitened]:
    r"""The optimum of :func:`optimal_solve_gp_whitened` from sums over the data.

    :param gram: :math:`\sum_n h_n h_n^\top / \sigma_n^2`, shape ``... x M x M``.
    :param linear: :math:`\sum_n h_n y_n / \sigma_n^2`, shape ``... x M``.
    :param num_inducing: ``M_u``.

    Example:
        >>> gram, linear = torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([2.0, 1.0])
        >>> q_u, q_v = tighter_gp.moments.solve_gp_whitened_from_gram(gram, linear, num_inducing=1)
        >>> q_u.mean, q_v.mean  # 2 / (1 + 3) and 1 / (1 + 1)
        (tensor([0.5000]), tensor([0.5000]))
    """
    mean = collapse(gram, linear, lambda gram: orthogonal_cholesky(add_identity(gram), num_inducing)).weights
    rows = slice(num_inducing), slice(num_inducing, None)
    q_u, q_v = (whitened_from_gram(gram[..., part, part], linear[..., part]) for part in rows)
    return q_u._replace(mean=mean[..., rows[0]]), q_v._replace(mean=mean[..., rows[1]])
