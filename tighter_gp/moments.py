r"""From kernel matrices and a whitened q to mean, explained and residual variance. Torch only.

The inducing variables are whitened, :math:`u = \mu(Z) + L w` with :math:`p(w) = \mathcal N(0, I)` and
:math:`q(w) = \mathcal N(m, S)`. Every strategy reduces to three numbers a point; SVGP gives :math:`f_n` the variance
:math:`s_n + d_n`, the tighter family :math:`s_n + m_n d_n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import (
    cholesky,
    mean_diagonal,
    once_differentiable,
    project,
    residual_variance,
    solve_lower,
    solve_lower_transposed,
)

__all__ = [
    "Moments",
    "Whitened",
    "explained_root",
    "explained_variance",
    "fused_moments",
    "join_whitened",
    "optimal_solve_gp_whitened",
    "optimal_whitened",
    "orthogonal_cholesky",
    "projected_mean",
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
        return torch.zeros_like(projection[..., 0, :])
    return root.square().sum(-2)


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
    projection = project(chol, cross)
    return Moments(
        projected_mean(projection, q),
        explained_variance(projection, q),
        residual_variance(prior_variance, projection),
    )


def fused_moments(
    inducing_covar: Tensor, chol: Tensor, cross: Tensor, prior_variance: Tensor, *parts: Whitened
) -> Moments:
    r""":func:`svgp_moments` of :math:`L = \mathrm{chol}(K_{ZZ})` as one operation, for training.

    The inducing variables may come in independent parts, :math:`q(w) = \prod_i q(w_i)`, as in SOLVE-GP; then :math:`L` is
    the factor of their joint covariance. The backward pass takes three or four products of order :math:`M^2 B` and two
    triangular solves of order :math:`M^3`, with no derivative of :math:`L` in between, and keeps no ``B x B`` array. It
    cannot be differentiated twice and says so.

    :param inducing_covar: :math:`K_{ZZ}`, shape ``... x M x M``: where the gradient through the factor goes.
    :param chol: :math:`L`, the factor of :math:`K_{ZZ}` with its jitter, without a graph; the backward pass solves with
        it in its own dtype.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param parts: The factors :math:`q(w_i)` in the order of the rows. Their batch may be larger than the kernel's, which
        is then evaluated and projected once.

    Example:
        >>> covar, cross = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> moments = tighter_gp.moments.fused_moments(covar, torch.eye(2), cross, torch.ones(3), q)
        >>> moments.residual.sum().backward()
        >>> covar.grad.diagonal()
        tensor([1.2500, 0.2500])
    """
    tensors = [tensor for part in parts for tensor in part]
    return Moments(*_FusedMoments.apply(inducing_covar, chol, cross, prior_variance, *tensors))


class _FusedMoments(torch.autograd.Function):
    """See :func:`fused_moments`."""

    @staticmethod
    def forward(ctx, inducing_covar, chol, cross, prior_variance, *tensors):
        projection = project(chol, cross)
        residual = prior_variance - projection.square().sum(-2)
        is_positive = residual >= 0
        mean: Tensor | float = 0.0
        explained: Tensor = torch.zeros_like(residual)
        kept: list[Tensor | None] = []
        for rows, q in _split(projection, tensors):
            mean = mean + (rows.mT @ q.mean.unsqueeze(-1)).squeeze(-1)
            if q.root is not None and _prefers_covariance(rows):
                smoothed = q.root @ q.root.mT @ rows  # S A
                explained = explained + (rows * smoothed).sum(-2).clamp_min_(0.0)
                kept.append(smoothed)
            else:
                root = explained_root(rows, q)  # R' A
                explained = explained if root is None else explained + root.square().sum(-2)
                kept.append(root)
        ctx.save_for_backward(chol, projection, is_positive, *kept, *tensors)
        ctx.shapes = inducing_covar.shape, cross.shape, prior_variance.shape
        return mean, explained, residual.clamp_min_(0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_mean, grad_explained, grad_residual):
        chol, projection, is_positive, *rest = ctx.saved_tensors
        inducing_shape, cross_shape, variance_shape = ctx.shapes
        num_parts = len(rest) // 4
        kept, tensors = rest[:num_parts], rest[num_parts:]
        grad_residual = torch.where(is_positive, grad_residual, torch.zeros_like(grad_residual))
        row_mean, row_explained = grad_mean.unsqueeze(-2), (2 * grad_explained).unsqueeze(-2)

        # dA = m g_mean' + 2 S A diag(g_s) - 2 A diag(g_d), summed over the batches that share A
        shared = grad_residual.sum_to_size(*projection.shape[:-2], grad_residual.size(-1))
        grad_projection = projection * (-2 * shared).unsqueeze(-2)
        grads: list[Tensor | None] = []
        for (rows, q), (target, _), keep in zip(
            _split(projection, tensors), _split(grad_projection, tensors), kept, strict=True
        ):
            batch = rows.shape[:-2]
            target += _outer(q.mean.unsqueeze(-1), row_mean, batch)
            grad_root = grad_stddev = None
            if q.root is not None and _prefers_covariance(rows):
                target += (keep * row_explained).sum_to_size(rows.shape)
                grad_root = ((rows * row_explained) @ rows.mT @ q.root).sum_to_size(q.root.shape)
            elif q.root is not None:
                weighted = keep * row_explained
                target += _outer(q.root, weighted, batch)
                grad_root = (rows @ weighted.mT).sum_to_size(q.root.shape)
            elif q.stddev is not None:
                weighted = keep * row_explained
                target += (q.stddev.unsqueeze(-1) * weighted).sum_to_size(rows.shape)
                grad_stddev = (rows * weighted).sum(-1).sum_to_size(q.stddev.shape)
            grad_q_mean = (rows @ grad_mean.unsqueeze(-1)).squeeze(-1).sum_to_size(q.mean.shape)
            grads += [grad_q_mean, grad_root, grad_stddev]

        grad_cross = solve_lower_transposed(chol.to(projection.dtype), grad_projection)
        # L' dL = -dA A', so the derivative of the factor never needs dL itself.
        inner = _half_lower((grad_projection @ projection.mT).to(chol.dtype))
        outer = solve_lower_transposed(chol, inner)
        outer = torch.linalg.solve_triangular(chol, outer, upper=False, left=False)
        grad_inducing = (-0.5 * (outer + outer.mT)).to(projection.dtype).sum_to_size(inducing_shape)
        return (
            grad_inducing,
            None,
            grad_cross.sum_to_size(cross_shape),
            grad_residual.sum_to_size(variance_shape),
            *grads,
        )


def _split(matrix: Tensor, tensors: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Whitened]]:
    """The rows of a matrix that belong to each part of q, with the part."""
    start = 0
    for i in range(0, len(tensors), 3):
        q = Whitened(*tensors[i : i + 3])  # type: ignore[arg-type]
        stop = start + q.mean.size(-1)
        yield matrix[..., start:stop, :], q
        start = stop


def _prefers_covariance(rows: Tensor) -> bool:
    """Whether forming S = R R' first takes fewer products: it trades one of order M^2 B for two of order M^3."""
    return rows.size(-1) > 2 * rows.size(-2)


def _outer(left: Tensor, right: Tensor, batch: torch.Size) -> Tensor:
    """``left @ right`` summed over the leading dimensions that ``batch`` does not have, as one product if it has none."""
    if len(batch) == 0 and left.dim() > 2 and left.shape[:-2] == right.shape[:-2]:
        return left.reshape(-1, *left.shape[-2:]).movedim(0, 1).flatten(1) @ right.reshape(-1, right.size(-1))
    product = left @ right
    return product.sum_to_size(*batch, *product.shape[-2:])


def _half_lower(matrix: Tensor) -> Tensor:
    """Lower triangle with half its diagonal, in place."""
    matrix = matrix.tril_()
    matrix.diagonal(dim1=-1, dim2=-2).mul_(0.5)
    return matrix


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
    factor = add_identity_cholesky(gram)
    mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device).expand_as(factor)
    # B^{-1} = F^{-T} F^{-1}: its root is upper triangular.
    return Whitened(mean, solve_lower_transposed(factor, identity))


def add_identity(gram: Tensor) -> Tensor:
    r""":math:`I + G`."""
    return gram + torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)


def add_identity_cholesky(gram: Tensor, scale: Tensor | None = None) -> Tensor:
    r""":math:`\mathrm{chol}(I + G)`, well conditioned from below for every Gram matrix :math:`G`.

    :param scale: See :func:`~tighter_gp.linalg.cholesky`.
    """
    return cholesky(add_identity(gram), "I + A A'/noise", scale)


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
    projection = project(chol, cross)
    first, second = projection.split([q_u.mean.size(-1), q_v.mean.size(-1)], dim=-2)
    return Moments(
        projected_mean(first, q_u) + projected_mean(second, q_v),
        explained_variance(first, q_u) + explained_variance(second, q_v),
        residual_variance(prior_variance, projection),
    )


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
    factor = orthogonal_cholesky(add_identity(gram), num_inducing)
    mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    rows = slice(num_inducing), slice(num_inducing, None)
    q_u, q_v = (whitened_from_gram(gram[..., part, part], linear[..., part]) for part in rows)
    return q_u._replace(mean=mean[..., rows[0]]), q_v._replace(mean=mean[..., rows[1]])
