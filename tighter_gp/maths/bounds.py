r"""One function per equation. Every bound is a sum over the data, never divided by N. Torch only.

Order, for Gaussian noise: titsias (:math:`F_1`) <= spherical (:math:`F_5`) <= tighter (:math:`F_4`)
<= full (:math:`F_8`) <= log evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .collapsed import add_identity_cholesky, collapse, collapsed_log_prob
from .linalg import cholesky
from .moments import Whitened

_LOG_2PI = math.log(2 * math.pi)


# ---------------------------------------------------------------------------------------------------------------------
# The price of the residual variance
# ---------------------------------------------------------------------------------------------------------------------


def trace_penalty(residual: Tensor, noise: Tensor) -> Tensor:
    r"""What SVGP and SGPR pay for the variance that the inducing variables leave unexplained.

    .. math:: \tfrac12 \sum_n d_n / \sigma_n^2

    :param residual: :math:`d_n \ge 0`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2 > 0`, broadcastable to ``residual``.
    :return: Sum over ``N``, shape ``...``.

    Example:
        >>> residual, noise = torch.tensor([1.0, 3.0]), torch.tensor(2.0)
        >>> tighter_gp.maths.bounds.trace_penalty(residual, noise)
        tensor(1.)
    """
    return 0.5 * (residual / noise).sum(-1)


def spherical_penalty(residual: Tensor, noise: Tensor) -> Tensor:
    r"""The same price when one scale serves all points, :math:`C = mD` with the best :math:`m`.

    .. math:: \tfrac N2 \log\Bigl(1 + \tfrac1N \sum_n d_n / \sigma_n^2\Bigr)

    Parameters as in :func:`trace_penalty`.

    Example:
        >>> residual, noise = torch.tensor([1.0, 3.0]), torch.tensor(2.0)
        >>> tighter_gp.maths.bounds.spherical_penalty(residual, noise)
        tensor(0.6931)
    """
    count = residual.size(-1)
    return 0.5 * count * torch.log1p((residual / noise).sum(-1) / max(count, 1))


def log_penalty(residual: Tensor, noise: Tensor) -> Tensor:
    r"""Cost of the variance that the inducing variables leave unexplained, at the best :math:`m_n`.

    .. math:: \tfrac12 \sum_n \log\bigl(1 + d_n / \sigma_n^2\bigr)

    SVGP pays :func:`trace_penalty` instead; this is never more, and equal only where :math:`d_n = 0`.
    Parameters as in :func:`trace_penalty`.

    Example:
        >>> residual, noise = torch.tensor([1.0, 3.0]), torch.tensor(2.0)
        >>> tighter_gp.maths.bounds.log_penalty(residual, noise)
        tensor(0.6609)
    """
    return 0.5 * torch.log1p(residual / noise).sum(-1)


def full_penalty(residual_covariance: Tensor, noise: Tensor) -> Tensor:
    r"""The same price when :math:`\mathrm{Cov}[f \mid u]` is free, :math:`C = (D^{-1} + \Sigma^{-1})^{-1}`.

    .. math:: \tfrac12 \log\bigl|I + \Sigma^{-1/2} D \Sigma^{-1/2}\bigr|

    :param residual_covariance: :math:`D`, shape ``... x N x N``.
    :param noise: :math:`\sigma_n^2`, shape ``... x N``.

    Example:
        >>> covariance = torch.tensor([[1.0, 1.0], [1.0, 3.0]])
        >>> tighter_gp.maths.bounds.full_penalty(covariance, torch.tensor([2.0, 2.0]))
        tensor(0.6264)
    """
    stddev = noise.sqrt()
    scaled = residual_covariance / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2))  # Sigma^-1/2 D Sigma^-1/2  [..., N, N]
    return add_identity_cholesky(scaled).diagonal(dim1=-1, dim2=-2).log().sum(-1)


def scale_penalty(scale: Tensor) -> Tensor:
    r"""KL divergence between the conditionals q(f|u) and p(f|u), point by point.

    .. math:: -\phi(m_n) = \tfrac12 (m_n - 1 - \log m_n) \ge 0

    :param scale: :math:`m_n > 0`, any shape.
    :return: Same shape; zero where :math:`m_n = 1`.

    Example:
        >>> tighter_gp.maths.bounds.scale_penalty(torch.tensor([1.0, 0.5]))
        tensor([0.0000, 0.0966])
    """
    return 0.5 * (scale - 1 - scale.log())


def optimal_scale(residual: Tensor, precision: Tensor) -> Tensor:
    r"""The best scale where the log likelihood falls with the variance at rate :math:`\lambda_n / 2`.

    .. math:: m_n = \frac{1}{1 + \lambda_n d_n}

    For Gaussian noise :math:`\lambda_n = 1/\sigma_n^2`, so :math:`m_n = \sigma_n^2 / (\sigma_n^2 + d_n)`.

    :param residual: :math:`d_n`, shape ``... x N``.
    :param precision: :math:`\lambda_n \ge 0`, broadcastable to ``residual``.

    Example:
        >>> noise = torch.tensor(2.0)
        >>> tighter_gp.maths.bounds.optimal_scale(torch.tensor([0.0, 1.0, 3.0]), 1 / noise)
        tensor([1.0000, 0.6667, 0.4000])
    """
    return (1 + precision * residual).reciprocal()


def optimal_scale_penalty(residual: Tensor, precision: Tensor) -> Tensor:
    r""":func:`scale_penalty` at :func:`optimal_scale`, safe where the scale underflows or rounds to one.

    .. math:: -\phi(m_n) = \tfrac12 \Bigl(\log(1 + x_n) - \frac{x_n}{1 + x_n}\Bigr), \qquad x_n = \lambda_n d_n

    Parameters as in :func:`optimal_scale`; returns one value per point.

    Example:
        >>> noise = torch.tensor(2.0)
        >>> tighter_gp.maths.bounds.optimal_scale_penalty(torch.tensor([0.0, 1.0, 3.0]), 1 / noise)
        tensor([0.0000, 0.0361, 0.1581])
    """
    ratio = precision * residual  # x_n  [..., N]
    return 0.5 * (torch.log1p(ratio) - ratio / (1 + ratio))


# The bounds by name, from loose to tight; those of a residual variance per point have a price of (residual, noise).
BOUNDS = ("titsias", "spherical", "tighter", "block", "full")
PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "titsias": trace_penalty,
    "spherical": spherical_penalty,
    "tighter": log_penalty,
}


def check_bound(bound: str, allowed: Sequence[str] = BOUNDS) -> None:
    """Raise unless a bound is one of those allowed.

    Example:
        >>> tighter_gp.maths.bounds.check_bound("tighter")
    """
    if bound not in allowed:
        raise ValueError(f"Unknown bound {bound!r}; choose {', '.join(map(repr, allowed))}.")


# ---------------------------------------------------------------------------------------------------------------------
# Collapsed bounds, Gaussian noise
# ---------------------------------------------------------------------------------------------------------------------


def nystrom_log_prob(projection: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    r"""Log density of the targets under the explained part of the prior plus noise.

    .. math::

        \log \mathcal N(y; 0, A^\top A + \Sigma)
        = -\tfrac12 \Bigl[ \sum_n \log 2\pi\sigma_n^2 + \lVert r \rVert^2 + \lVert w \rVert^2 \Bigr]
          - \sum_i \log (L_B)_{ii}

    with :math:`\tilde A = A\Sigma^{-1/2}`, :math:`\tilde y = \Sigma^{-1/2}y`,
    :math:`L_B = \mathrm{chol}(I + \tilde A \tilde A^\top)`, :math:`w = L_B^{-\top} L_B^{-1} \tilde A \tilde y` and
    :math:`r = \tilde y - \tilde A^\top w`. The quadratic form is a sum of squares, so small noise cancels nothing.

    :param projection: :math:`A`, shape ``... x M x N``.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``targets``.
    :return: Shape ``...``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.5]])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.bounds.nystrom_log_prob(projection, targets, noise)
        tensor(-2.8790)
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    stddev = noise.sqrt()
    scaled, whitened = projection / stddev.unsqueeze(-2), (targets / stddev).unsqueeze(-1)
    core = collapse(scaled @ scaled.mT, (scaled @ whitened).squeeze(-1))
    quadratic = sum_of_squares(scaled, whitened, core.weights)  # |r|^2 + |w|^2  [...]
    return collapsed_log_prob(quadratic, core.log_det, noise.log().sum(-1), targets.size(-1))


def sum_of_squares(scaled: Tensor, whitened: Tensor, weights: Tensor) -> Tensor:
    r"""The quadratic form of a collapsed bound, :math:`\lVert \tilde y - \tilde A^\top w \rVert^2 + \lVert w \rVert^2`.

    :param scaled: :math:`\tilde A`, ``... x M x N``.
    :param whitened: :math:`\tilde y`, ``... x N x 1``.
    :param weights: :math:`w`, ``... x M``.

    Example:
        >>> tighter_gp.maths.bounds.sum_of_squares(torch.eye(1), torch.tensor([[3.0]]), torch.tensor([1.0]))
        tensor(5.)
    """
    misfit = whitened - scaled.mT @ weights.unsqueeze(-1)  # r  [..., N, 1]
    return misfit.square().sum((-1, -2)) + weights.square().sum(-1)


def titsias_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor) -> Tensor:
    r""":math:`F_1`, the collapsed SGPR bound: :func:`nystrom_log_prob` less :func:`trace_penalty`.

    :param projection: :math:`A`, shape ``... x M x N``.
    :param targets: :math:`y - \mu(X)`, shape ``... x N``.
    :param noise: :math:`\sigma_n^2`, broadcastable to ``targets``.
    :param residual: :math:`d_n`, shape ``... x N``.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([0.0, 0.75, 0.75])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.bounds.titsias_bound(projection, targets, noise, residual)
        tensor(-4.3790)
    """
    return nystrom_log_prob(projection, targets, noise) - trace_penalty(residual, noise)


def spherical_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor) -> Tensor:
    r""":math:`F_5 = F_9`: :func:`nystrom_log_prob` less :func:`spherical_penalty`. Parameters of :func:`titsias_bound`.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([0.0, 0.75, 0.75])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.bounds.spherical_bound(projection, targets, noise, residual)
        tensor(-3.9187)
    """
    return nystrom_log_prob(projection, targets, noise) - spherical_penalty(residual, noise)


def tighter_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor) -> Tensor:
    r""":math:`F_4`, the tighter bound: :func:`nystrom_log_prob` less :func:`log_penalty`.

    Parameters of :func:`titsias_bound`.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([0.0, 0.75, 0.75])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> tighter_gp.maths.bounds.tighter_bound(projection, targets, noise, residual)
        tensor(-3.7953)
    """
    return nystrom_log_prob(projection, targets, noise) - log_penalty(residual, noise)


def scaled_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
    r""":math:`F_3(M)`, the collapsed bound at any scales; :func:`tighter_bound` is its maximum over them.

    .. math:: F_3 = \log \mathcal N(y; 0, A^\top A + \Sigma) - \tfrac12 \sum_n
              \bigl[ m_n d_n / \sigma_n^2 - 1 - \log m_n + m_n \bigr]

    :param scale: :math:`m_n > 0`, broadcastable to ``residual``; the others as in :func:`titsias_bound`.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([0.0, 0.75, 0.75])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> scale = torch.tensor([1.0, 0.4, 0.4])  # the best: noise / (noise + residual)
        >>> tighter_gp.maths.bounds.scaled_bound(projection, targets, noise, residual, scale)
        tensor(-3.7953)
    """
    penalty = trace_penalty(scale * residual, noise) + scale_penalty(scale.expand_as(residual)).sum(-1)
    return nystrom_log_prob(projection, targets, noise) - penalty


def full_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual_covariance: Tensor) -> Tensor:
    r""":math:`F_8`, the best bound that keeps the prior's conditional mean; :math:`O(N^3)`.

    :func:`nystrom_log_prob` less :func:`full_penalty`.

    :param residual_covariance: :math:`D`, shape ``... x N x N``; the others as in :func:`titsias_bound`.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.5]])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> covariance = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.75, 0.5], [0.0, 0.5, 0.75]])
        >>> tighter_gp.maths.bounds.full_bound(projection, targets, noise, covariance)
        tensor(-3.7081)
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    return nystrom_log_prob(projection, targets, noise) - full_penalty(residual_covariance, noise)


def exact_log_evidence(covariance: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    r""":math:`\log \mathcal N(y; 0, K + \Sigma)`, what every bound is below; :math:`O(N^3)`.

    :param covariance: :math:`K`, shape ``... x N x N``; the others as in :func:`titsias_bound`.

    Example:
        >>> covariance = torch.tensor([[1.0, 0.5, 0.5], [0.5, 1.0, 0.75], [0.5, 0.75, 1.0]])
        >>> tighter_gp.maths.bounds.exact_log_evidence(covariance, torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5))
        tensor(-3.5613)
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    factor = cholesky(covariance + torch.diag_embed(noise), name="K + noise")  # [..., N, N]
    whitened = torch.linalg.solve_triangular(factor, targets.unsqueeze(-1), upper=False)  # [..., N, 1]
    log_det = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)  # log |K + Sigma|  [...]
    return -0.5 * (targets.size(-1) * _LOG_2PI + whitened.square().sum((-1, -2)) + log_det)


# ---------------------------------------------------------------------------------------------------------------------
# Uncollapsed terms
# ---------------------------------------------------------------------------------------------------------------------


def whitened_kl(q: Whitened) -> Tensor:
    r"""KL divergence from the whitened prior.

    .. math:: \mathrm{KL}[q(w) \,\Vert\, \mathcal N(0, I)]
              = \tfrac12 \bigl( \mathrm{tr}\, S + \lVert m \rVert^2 - M - \log |S| \bigr)

    A large step of Adam can land on a standard deviation of exactly zero, where this is infinite. It counts as the
    smallest positive number, with no gradient: the value is that of a q(w) next to it, so a bound stays a bound.

    :param q: A Gaussian with a triangular ``root`` or a ``stddev``.
    :return: Shape ``...``.

    Example:
        >>> q = tighter_gp.maths.moments.Whitened(torch.tensor([1.0, 0.0]), stddev=torch.ones(2))
        >>> tighter_gp.maths.bounds.whitened_kl(q)
        tensor(0.5000)
    """
    if q.root is not None:
        trace, diagonal = q.root.square().sum((-1, -2)), q.root.diagonal(dim1=-1, dim2=-2)
    elif q.stddev is not None:
        trace, diagonal = q.stddev.square().sum(-1), q.stddev
    else:
        raise ValueError(
            "whitened_kl needs a Gaussian q(w) with a root or a stddev; got a point mass, whose KL is infinite."
        )
    smallest = torch.finfo(diagonal.dtype).tiny
    log_root = diagonal.abs().clamp_min(smallest).log().sum(-1)  # log |R|  [...]
    return 0.5 * (trace + q.mean.square().sum(-1) - q.mean.size(-1)) - log_root


def gaussian_expected_log_prob(targets: Tensor, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    r"""Expected log density under Gaussian noise, point by point.

    .. math:: -\tfrac12 \bigl( \log 2\pi\sigma_n^2 + [(y_n - \mu_n)^2 + v_n] / \sigma_n^2 \bigr)

    :param targets: :math:`y_n`.
    :param mean: :math:`\mu_n`.
    :param variance: :math:`v_n`.
    :param noise: :math:`\sigma_n^2`; all four broadcast.

    Example:
        >>> mean, variance = torch.zeros(2), torch.tensor([0.0, 0.5])
        >>> tighter_gp.maths.bounds.gaussian_expected_log_prob(torch.tensor([0.0, 1.0]), mean, variance, torch.tensor(1.0))
        tensor([-0.9189, -1.6689])
    """
    return -0.5 * (_LOG_2PI + noise.log() + ((targets - mean).square() + variance) / noise)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of points, Gaussian noise
# ---------------------------------------------------------------------------------------------------------------------


def block_penalty(residual_blocks: Tensor, noise: Tensor) -> Tensor:
    r"""The price of the residual when q(f|u) may correlate the points of a block, at the best block-diagonal :math:`M`.

    .. math:: \tfrac12 \sum_b \log\bigl|I + \Sigma_b^{-1/2} D_{bb} \Sigma_b^{-1/2}\bigr|,
              \qquad M_b = \bigl(I + \Sigma_b^{-1/2} D_{bb} \Sigma_b^{-1/2}\bigr)^{-1}

    One point per block is :func:`log_penalty`, one block :func:`full_penalty`; merging blocks never raises it.

    :param residual_blocks: :math:`D_{bb}`, shape ``... x K x S x S``. A block with fewer than ``S`` points is filled up
        with rows and columns of zeros, which cost nothing.
    :param noise: :math:`\sigma_n^2` in the same layout, ``... x K x S``; any positive number where a block is filled up.
    :return: Sum over blocks, shape ``...``.

    Example:
        >>> blocks = torch.tensor([[[1.0, 1.0], [1.0, 3.0]], [[1.0, 0.0], [0.0, 0.0]]])  # two points, and one filled up
        >>> tighter_gp.maths.bounds.block_penalty(blocks, torch.full((2, 2), 2.0))
        tensor(0.8291)
    """
    return full_penalty(residual_blocks, noise).sum(-1)


def neighbour_penalty(residual_sets: Tensor, noise: Tensor) -> Tensor:
    r"""The price of the residual when q(f|u) may correlate each point with a few that come before it in some order.

    With :math:`B = I + \Sigma^{-1/2} D \Sigma^{-1/2}`, whose log determinant is :func:`full_penalty`, and points
    :math:`c(n)` before :math:`n`,

    .. math:: \tfrac12 \sum_n \log \bigl(B_{nn} - B_{nc} B_{cc}^{-1} B_{cn}\bigr)

    Without neighbours this is :func:`log_penalty`, with the earlier points of a block :func:`block_penalty`, with all
    earlier points :func:`full_penalty`; in one order it falls with every point added to a set.

    :param residual_sets: :math:`D` within each set, the point itself last, ``... x N x S x S``. A set with fewer than ``S``
        points is filled up with rows and columns of zeros.
    :param noise: :math:`\sigma_n^2` in the same layout, ``... x N x S``; any positive number where a set is filled up.
    :return: Sum over ``N``, shape ``...``.

    Example:
        >>> sets = torch.tensor([[[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 3.0]]])  # a first point, and one after it
        >>> tighter_gp.maths.bounds.neighbour_penalty(sets, torch.full((2, 2), 2.0))
        tensor(0.6264)
    """
    stddev = noise.sqrt()
    scaled = residual_sets / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2))  # B within each set, less I  [..., N, S, S]
    # The last pivot of the Cholesky factor is the root of the variance given the others.
    return add_identity_cholesky(scaled)[..., -1, -1].log().sum(-1)


def block_bound(projection: Tensor, targets: Tensor, noise: Tensor, residual_blocks: Tensor, rows: Tensor) -> Tensor:
    r""":math:`F_B`, between :func:`tighter_bound` and :func:`full_bound`.

    :func:`nystrom_log_prob` less :func:`block_penalty`; :math:`O(S^2 (M + S))` per block.

    :param residual_blocks: :math:`D_{bb}`, shape ``... x K x S x S``.
    :param rows: The points of each block, ``K x S``, -1 where it is filled up; the others as in :func:`titsias_bound`.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.5]])
        >>> targets, noise = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.5)
        >>> rows = tighter_gp.conditionals.block_table(torch.tensor([0, 1, 1]))  # the second and third point together
        >>> blocks = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.75, 0.5], [0.5, 0.75]]])
        >>> tighter_gp.maths.bounds.block_bound(projection, targets, noise, blocks, rows)
        tensor(-3.7081)
    """
    noise = noise.expand(torch.broadcast_shapes(noise.shape, targets.shape))
    penalty = block_penalty(residual_blocks, noise[..., rows])
    return nystrom_log_prob(projection, targets, noise) - penalty
