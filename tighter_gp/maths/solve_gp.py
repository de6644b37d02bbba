r"""SOLVE-GP: two sets of inducing variables, the second orthogonal to the first under the prior. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from .bounds import log_penalty, sum_of_squares, trace_penalty
from .collapsed import add_identity_cholesky, collapse, collapsed_log_prob
from .linalg import project
from .moments import Moments, Whitened, projected_moments, whitened_from_gram

__all__ = [
    "join_whitened",
    "optimal_solve_gp_whitened",
    "solve_gp_bound",
    "solve_gp_log_prob",
    "solve_gp_moments",
    "solve_gp_whitened_from_gram",
    "tighter_solve_gp_bound",
]


def solve_gp_moments(chol: Tensor, cross: Tensor, prior_variance: Tensor, q_u: Whitened, q_v: Whitened) -> Moments:
    r"""Moments given two sets of inducing variables with independent q.

    .. math::

        \mu_n = a_n^\top m_u + b_n^\top m_v, \qquad s_n = a_n^\top S_u a_n + b_n^\top S_v b_n, \qquad
        d_n = \max(0, k_{nn} - a_n^\top a_n - b_n^\top b_n)

    where :math:`A = L_u^{-1} K_{ZX}` and :math:`B = L_v^{-1} (K_{OX} - W^\top A)` are the rows of
    :math:`H = L^{-1} K_{(Z, O)X}`.

    :param chol: :math:`L`, the Cholesky factor of all points' covariance, shape ``... x M x M``.
    :param cross: :math:`K_{(Z, O)X}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param q_u: :math:`q(w_u)`.
    :param q_v: :math:`q(w_v)`.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> cross = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
        >>> moments = tighter_gp.maths.solve_gp.solve_gp_moments(torch.eye(2), cross, torch.ones(2), q, q)
        >>> moments.mean, moments.residual
        (tensor([2., 2.]), tensor([0.0000, 0.5000]))
    """
    return projected_moments(project(chol, cross), prior_variance, q_u, q_v)


def join_whitened(q_u: Whitened, q_v: Whitened) -> Whitened:
    r""":math:`q(w_u)\,q(w_v)` as one Gaussian over the stacked :math:`w`, with a block-diagonal root.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([2.0]), stddev=torch.tensor([0.5]))
        >>> tighter_gp.maths.solve_gp.join_whitened(q, q).stddev
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
        >>> q_u, q_v = tighter_gp.maths.solve_gp.optimal_solve_gp_whitened(
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
        >>> q_u, q_v = tighter_gp.maths.solve_gp.solve_gp_whitened_from_gram(gram, linear, num_inducing=1)
        >>> q_u.mean, q_v.mean  # 2 / (1 + 3) and 1 / (1 + 1)
        (tensor([0.5000]), tensor([0.5000]))
    """
    mean = collapse(gram, linear).weights  # of both sets together  [..., M]
    rows = slice(num_inducing), slice(num_inducing, None)
    q_u, q_v = (whitened_from_gram(gram[..., part, part], linear[..., part]) for part in rows)
    return q_u._replace(mean=mean[..., rows[0]]), q_v._replace(mean=mean[..., rows[1]])


def solve_gp_log_prob(projection: Tensor, targets: Tensor, noise: Tensor, num_inducing: int) -> Tensor:
    r"""What is left of the SOLVE-GP bound without the price of the residual, at the best :math:`q(u)\,q(v)`.

    .. math::

        -\tfrac12 \Bigl[ \sum_n \log 2\pi\sigma_n^2 + y^\top (H^\top H + \Sigma)^{-1} y
        + \log |I + A \Sigma^{-1} A^\top| + \log |I + B \Sigma^{-1} B^\top| \Bigr], \qquad H = [A; B]

    :func:`~tighter_gp.maths.bounds.nystrom_log_prob` of :math:`H` has the determinant of
    :math:`I + H \Sigma^{-1} H^\top` instead, which is never larger than the product of the
    two: this is what independent q(u) and q(v) cost.

    :param projection: :math:`H`, shape ``... x M x N``; see :func:`~tighter_gp.maths.solve_gp.solve_gp_moments`.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``targets``.
    :param num_inducing: ``M_u``, the number of rows of :math:`A`.
    :return: Shape ``...``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.5], [0.0, 0.5, 0.25]])  # a row of A above a row of B
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.solve_gp.solve_gp_log_prob(projection, targets, noise, num_inducing=1)
        tensor(-3.1214)
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    stddev = noise.sqrt()
    scaled, whitened = projection / stddev.unsqueeze(-2), (targets / stddev).unsqueeze(-1)
    gram = scaled @ scaled.mT  # H Sigma^-1 H'  [..., M, M]
    core = collapse(gram, (scaled @ whitened).squeeze(-1))
    quadratic = sum_of_squares(scaled, whitened, core.weights)
    log_det = torch.zeros_like(quadratic)
    for part in (slice(num_inducing), slice(num_inducing, None)):
        factor = add_identity_cholesky(gram[..., part, part])  # of each set alone
        log_det = log_det + 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    return collapsed_log_prob(quadratic, log_det, noise.log().sum(-1), targets.size(-1))


def solve_gp_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor, num_inducing: int) -> Tensor:
    r"""The SOLVE-GP bound at its best q: :func:`solve_gp_log_prob` less :func:`~tighter_gp.maths.bounds.trace_penalty`.

    :param residual: :math:`d_n`, shape ``... x N``; the others as in :func:`solve_gp_log_prob`.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5], [0.0, 0.5, 0.25]]), torch.tensor([0.0, 0.5, 0.6875])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.solve_gp.solve_gp_bound(projection, targets, noise, residual, num_inducing=1)
        tensor(-4.3089)
    """
    return solve_gp_log_prob(projection, targets, noise, num_inducing) - trace_penalty(residual, noise)


def tighter_solve_gp_bound(
    projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor, num_inducing: int
) -> Tensor:
    r"""The tighter SOLVE-GP bound at its best q: :func:`solve_gp_log_prob` less :func:`~tighter_gp.maths.bounds.log_penalty`.

    Parameters of :func:`solve_gp_bound`.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5], [0.0, 0.5, 0.25]]), torch.tensor([0.0, 0.5, 0.6875])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.solve_gp.tighter_solve_gp_bound(projection, targets, noise, residual, num_inducing=1)
        tensor(-3.9005)
    """
    return solve_gp_log_prob(projection, targets, noise, num_inducing) - log_penalty(residual, noise)
