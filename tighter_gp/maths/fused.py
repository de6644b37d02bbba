r"""Operations with hand-written derivatives. Torch only.

Each is a plain function of :mod:`~tighter_gp.maths.linalg` or :mod:`~tighter_gp.maths.moments` whose backward pass takes
fewer products than the one torch would derive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .bounds import whitened_kl
from .linalg import full_precision, project, solve_lower_transposed
from .moments import Moments, Whitened, explained_root

_LOG_2PI = math.log(2 * math.pi)

__all__ = ["factor_gradient", "fused_gaussian_terms", "fused_kl", "fused_moments"]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises where a graph of it is asked for, instead of leaving itself out of that graph."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "This training operation cannot be differentiated twice (create_graph=True). For second derivatives "
                "compute the bound from tighter_gp.moments.svgp_moments and tighter_gp.bounds."
            )
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad(), full_precision(grads[0].device.type):
            return backward(ctx, *grads)

    return checked


class _KnownFactor(torch.autograd.Function):
    """The Cholesky factor of a matrix when its value is at hand: only the derivative is left to do."""

    @staticmethod
    def forward(ctx, matrix: Tensor, factor: Tensor) -> Tensor:
        factor = factor.clone()
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, grad_factor: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return -factor_gradient(factor, factor.mT @ grad_factor), None


def reuse_cholesky(matrix: Tensor, factor: Tensor) -> Tensor:
    r"""A factor computed earlier, joined to the graph of ``matrix`` without factorising again.

    :param matrix: The matrix, ``... x M x M``; gradients flow into it.
    :param factor: Its lower Cholesky factor, without a graph.
    """
    return _KnownFactor.apply(matrix, factor)


def fused_moments(
    inducing_covar: Tensor,
    chol: Tensor,
    cross: Tensor,
    prior_variance: Tensor,
    *parts: Whitened,
    projection: Tensor | None = None,
) -> Moments:
    r""":func:`~tighter_gp.maths.moments.svgp_moments` of :math:`L = \mathrm{chol}(K_{ZZ})` as one operation, for training.

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
        is then evaluated and projected once. Nothing is computed for a part that needs no gradient.
    :param projection: :math:`A`, if it is known already.

    Example:
        >>> covar, cross = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> q = tighter_gp.moments.Whitened(torch.tensor([2.0, 0.0]), stddev=torch.tensor([0.5, 1.0]))
        >>> moments = tighter_gp.maths.fused.fused_moments(covar, torch.eye(2), cross, torch.ones(3), q)
        >>> moments.residual.sum().backward()
        >>> covar.grad.diagonal()
        tensor([1.2500, 0.2500])
    """
    tensors = [tensor for part in parts for tensor in part]
    if projection is None:
        with torch.no_grad():
            projection = project(chol, cross)
    return Moments(*_FusedMoments.apply(inducing_covar, chol, cross, prior_variance, projection, *tensors))


class _FusedMoments(torch.autograd.Function):
    """See :func:`fused_moments`."""

    @staticmethod
    def forward(ctx, inducing_covar, chol, cross, prior_variance, projection, *tensors):
        residual = prior_variance - projection.square().sum(-2)
        is_negative = residual < 0
        means: list[Tensor] = []
        variances: list[Tensor] = []
        kept: list[Tensor | None] = []
        for rows, q in _split(projection, tensors):
            means.append((rows.mT @ q.mean.unsqueeze(-1)).squeeze(-1))
            if q.root is not None and _prefers_covariance(rows):
                smoothed = q.root @ q.root.mT @ rows  # S A
                variances.append((rows * smoothed).sum(-2).clamp_min_(0.0))
                kept.append(smoothed)
            else:
                root = explained_root(rows, q)  # R' A
                if root is not None:
                    variances.append(root.square().sum(-2))
                kept.append(root)
        ctx.save_for_backward(chol, projection, is_negative, *kept, *tensors)
        ctx.shapes = inducing_covar.shape, cross.shape, prior_variance.shape
        explained = _total(variances) if variances else torch.zeros_like(residual)
        if explained.dim() < residual.dim():
            explained = explained.expand_as(residual)
        return _total(means), explained, residual.clamp_min_(0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_mean, grad_explained, grad_residual):
        chol, projection, is_negative, *rest = ctx.saved_tensors
        inducing_shape, cross_shape, variance_shape = ctx.shapes
        num_parts = len(rest) // 4
        kept, tensors = rest[:num_parts], rest[num_parts:]
        grad_residual = grad_residual.masked_fill(is_negative, 0.0)
        row_mean, row_explained = grad_mean.unsqueeze(-2), (2 * grad_explained).unsqueeze(-2)

        # dA = m g_mean' + 2 S A diag(g_s) - 2 A diag(g_d), summed over the batches that share A
        shared = grad_residual.sum_to_size(*projection.shape[:-2], grad_residual.size(-1))
        grad_projection = projection * (-2 * shared).unsqueeze(-2)
        grads: list[Tensor | None] = []
        needed = ctx.needs_input_grad[5:]
        for i, ((rows, q), (target, _), keep) in enumerate(
            zip(_split(projection, tensors), _split(grad_projection, tensors), kept, strict=True)
        ):
            needs_mean, needs_root, needs_stddev = needed[3 * i : 3 * i + 3]
            batch = rows.shape[:-2]
            target += _outer(q.mean.unsqueeze(-1), row_mean, batch)
            grad_q_mean = grad_root = grad_stddev = None
            if q.root is not None and _prefers_covariance(rows):
                target += (keep * row_explained).sum_to_size(rows.shape)
                if needs_root:
                    grad_root = ((rows * row_explained) @ rows.mT @ q.root).sum_to_size(q.root.shape)
            elif q.root is not None:
                weighted = keep * row_explained
                target += _outer(q.root, weighted, batch)
                if needs_root:
                    grad_root = (rows @ weighted.mT).sum_to_size(q.root.shape)
            elif q.stddev is not None:
                weighted = keep * row_explained
                target += (q.stddev.unsqueeze(-1) * weighted).sum_to_size(rows.shape)
                if needs_stddev:
                    grad_stddev = (rows * weighted).sum(-1).sum_to_size(q.stddev.shape)
            if needs_mean:
                grad_q_mean = (rows @ grad_mean.unsqueeze(-1)).squeeze(-1).sum_to_size(q.mean.shape)
            grads += [grad_q_mean, grad_root, grad_stddev]

        grad_cross = solve_lower_transposed(chol.to(projection.dtype), grad_projection)
        grad_inducing = factor_gradient(chol, (grad_projection @ projection.mT).to(chol.dtype))
        grad_inducing = grad_inducing.to(projection.dtype).sum_to_size(inducing_shape)
        return (
            grad_inducing,
            None,
            grad_cross.sum_to_size(cross_shape),
            grad_residual.sum_to_size(variance_shape),
            None,
            *grads,
        )


def _total(tensors: Sequence[Tensor]) -> Tensor:
    first, *others = tensors
    return functools.reduce(torch.add, others, first)


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


def factor_gradient(chol: Tensor, outer: Tensor) -> Tensor:
    r"""What reaches :math:`K_{ZZ}` through :math:`A = L^{-1} K_{ZX}`, given :math:`\bar A A^\top`.

    :math:`L^\top \bar L = -\bar A A^\top`, so the derivative of the factor never needs :math:`\bar L` itself.

    :param chol: :math:`L`, ``... x M x M``.
    :param outer: :math:`\bar A A^\top`, ``... x M x M``; overwritten.

    Example:
        >>> tighter_gp.maths.fused.factor_gradient(torch.eye(1), torch.tensor([[2.0]]))
        tensor([[-1.]])
    """
    solved = solve_lower_transposed(chol, _half_lower(outer))
    solved = torch.linalg.solve_triangular(chol, solved, upper=False, left=False)
    return -0.5 * (solved + solved.mT)


def _half_lower(matrix: Tensor) -> Tensor:
    """Lower triangle with half its diagonal, in place."""
    matrix = matrix.tril_()
    matrix.diagonal(dim1=-1, dim2=-2).mul_(0.5)
    return matrix


def fused_kl(q: Whitened) -> Tensor:
    r""":func:`~tighter_gp.maths.bounds.whitened_kl` with a backward pass of a few operations.

    :math:`\partial / \partial R = R - \mathrm{diag}(1 / R_{ii})`, the standard deviations likewise, and
    :math:`\partial / \partial m = m`.

    Example:
        >>> q = tighter_gp.moments.Whitened(torch.tensor([1.0, 0.0]), stddev=torch.ones(2))
        >>> tighter_gp.maths.fused.fused_kl(q)
        tensor(0.5000)
    """
    return _FusedKL.apply(*q)


class _FusedKL(torch.autograd.Function):
    """See :func:`fused_kl`."""

    @staticmethod
    def forward(ctx, mean, root, stddev):
        ctx.save_for_backward(mean, root, stddev)
        return whitened_kl(Whitened(mean, root, stddev))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        mean, root, stddev = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        grad_mean = (grad * mean).sum_to_size(mean.shape)
        if root is not None:
            by_root = grad.unsqueeze(-1) * root
            by_root.diagonal(dim1=-1, dim2=-2).sub_(grad * _inverse(root.diagonal(dim1=-1, dim2=-2)))
            return grad_mean, by_root.sum_to_size(root.shape), None
        return grad_mean, None, (grad * (stddev - _inverse(stddev))).sum_to_size(stddev.shape)


def _inverse(stddev: Tensor) -> Tensor:
    """One over it, and zero for zero."""
    return stddev.reciprocal().nan_to_num_(nan=torch.nan, posinf=0, neginf=0)


def fused_gaussian_terms(
    targets: Tensor, mean: Tensor, explained: Tensor, residual: Tensor, noise: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    r"""Expected log density under Gaussian noise at the best scales, and their price: sums over the points of a batch.

    .. math::

        -\tfrac12 \sum_n \Bigl( \log 2\pi\sigma_n^2 + \frac{(y_n - \mu_n)^2 + s_n + m_n d_n}{\sigma_n^2} \Bigr)
        \quad\text{and}\quad
        \tfrac12 \sum_n \bigl( \log(1 + r_n) - r_n m_n \bigr), \qquad
        r_n = \frac{d_n}{\beta \sigma_n^2}, \quad m_n = \frac{1}{1 + r_n}

    :param targets: :math:`y_n`, ``... x B``.
    :param mean: :math:`\mu_n`, ``... x B``.
    :param explained: :math:`s_n`, ``... x B``.
    :param residual: :math:`d_n`, ``... x B``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``... x B``.
    :param beta: Factor that the price will get.

    Example:
        >>> zeros = torch.zeros(2)
        >>> tighter_gp.maths.fused.fused_gaussian_terms(zeros, zeros, zeros, torch.ones(2), torch.tensor(1.0), 1.0)
        (tensor(-2.3379), tensor(0.1931))
    """
    return _FusedGaussian.apply(targets, mean, explained, residual, noise, beta)


class _FusedGaussian(torch.autograd.Function):
    """See :func:`fused_gaussian_terms`."""

    @staticmethod
    def forward(ctx, targets, mean, explained, residual, noise, beta):
        precision, difference = noise.reciprocal(), targets - mean
        ratio = residual * (precision if beta == 1 else precision / beta)
        scale = (1 + ratio).reciprocal()
        lost = ratio * scale  # 1 - m_n, which does not round to zero
        misfit = difference.square() + explained + residual * scale
        log_prob = (torch.addcmul(noise.log(), misfit, precision).sum(-1) + misfit.size(-1) * _LOG_2PI) * -0.5
        price = (torch.log1p(ratio) - lost).sum(-1) * 0.5
        ctx.save_for_backward(precision, difference, residual, scale, lost, misfit)
        ctx.shapes = targets.shape, mean.shape, explained.shape, residual.shape, noise.shape
        ctx.beta = beta
        return log_prob, price

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_price):
        precision, difference, residual, scale, lost, misfit = ctx.saved_tensors
        rate = grad_log_prob.unsqueeze(-1) * precision
        price_rate = (grad_price / ctx.beta).unsqueeze(-1) * precision
        by_explained = (rate * -0.5).expand(misfit.shape)
        # d(m d)/dd = m^2, and the price grows at the rate r m^2 / (2 beta sigma^2)
        by_residual = (price_rate * lost).sub_(rate * scale).mul_(scale).mul_(0.5)
        by_noise = None
        if ctx.needs_input_grad[4]:
            # through 1/sigma^2, through m d, and through r in the price
            direct = torch.addcmul(misfit, residual * scale, lost, value=-1).mul_(precision)
            squared = lost.square().mul_(grad_price.unsqueeze(-1) * precision)
            by_noise = torch.addcmul(squared, 1 - direct, rate).mul_(-0.5)
        by_mean, shapes = rate * difference, ctx.shapes
        return (
            -by_mean.sum_to_size(shapes[0]) if ctx.needs_input_grad[0] else None,
            by_mean.sum_to_size(shapes[1]),
            by_explained.sum_to_size(shapes[2]),
            by_residual.sum_to_size(shapes[3]),
            None if by_noise is None else by_noise.sum_to_size(shapes[4]),
            None,
        )
