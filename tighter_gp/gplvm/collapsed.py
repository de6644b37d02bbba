r"""Collapsed bounds of the Bayesian GPLVM with an RBF-ARD kernel and Gaussian noise. Torch only.

q(u) is at its optimum and the expectations over q(x) are those of :mod:`~tighter_gp.gplvm.psi`. Every bound is
:math:`core - \mathrm{KL}_x` less the price of the residual variance, a sum over rows and outputs, never divided by N:

=============================  =======================================================================  ========================
bound                          price of the residual variance                                           name
=============================  =======================================================================  ========================
:func:`titsias_bound`          :math:`\tfrac12 \sum_{np} \langle d_n \rangle / \sigma_p^2`              V-BGPLVM
:func:`constant_scale_bound`   :math:`\tfrac12 \sum_{np} \log(1 + \langle d_n \rangle / \sigma_p^2)`    one :math:`m_n` for all x
:func:`tighter_bound`          :math:`\tfrac12 \sum_{np} \langle \log(1 + d_n(x_n)/\sigma_p^2)\rangle`  TV-BGPLVM
=============================  =======================================================================  ========================

in increasing order. The paper prints the middle one with another scale, :math:`\langle \sigma^2/(\sigma^2 + d_n)
\rangle`, which is not the best constant, and a factor :math:`\tfrac12` too many in the trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..maths.collapsed import collapse, collapsed_log_prob
from ..maths.linalg import cholesky, project, residual_variance
from ..maths.quadrature import sobol_normal
from .psi import pack_pairs, psi0, psi1, psi2_pairs, unpack_pairs


class LatentProblem(NamedTuple):
    r"""A GPLVM with everything given; what all the functions below take.

    :param mean: :math:`\mu` of q(x), ``N x Q``.
    :param variance: :math:`S` of q(x), ``N x Q``.
    :param inducing_points: :math:`Z`, ``M x Q``.
    :param outputscale: :math:`s^2` of the kernel, a scalar.
    :param lengthscale: :math:`\ell` of the kernel, ``Q``.
    :param noise: :math:`\sigma^2`, a scalar, or one per output, ``P``.
    :param targets: :math:`Y`, ``N x P``; entries that are not observed are ignored.
    :param observed: Which entries count, ``N x P``; None for all.
    :param jitter: Added to the diagonal of :math:`K_{ZZ}`.

    Example:
        >>> from tighter_gp.gplvm import collapsed
        >>> problem = collapsed.LatentProblem(
        ...     mean=torch.randn(8, 1),
        ...     variance=torch.full((8, 1), 0.1),
        ...     inducing_points=torch.tensor([[-1.0], [0.0], [1.0]]),
        ...     outputscale=torch.tensor(1.0),
        ...     lengthscale=torch.ones(1),
        ...     noise=torch.tensor(0.1),
        ...     targets=torch.randn(8, 2),
        ... )
        >>> nodes, weights = collapsed.gauss_hermite_nodes(20, 1, problem.targets)
        >>> standard, constant = collapsed.titsias_bound(problem), collapsed.constant_scale_bound(problem)
        >>> bool(standard <= constant <= collapsed.tighter_bound(problem, nodes, weights))
        True
    """

    mean: Tensor
    variance: Tensor
    inducing_points: Tensor
    outputscale: Tensor
    lengthscale: Tensor
    noise: Tensor
    targets: Tensor
    observed: Tensor | None = None
    jitter: float = 0.0

    @property
    def seen(self) -> Tensor:
        """Which entries count, ``N x P``."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self.observed is None else self.observed

    def double(self) -> LatentProblem:
        """In float64, in which all functions compute: float32 does not hold the digits that their differences need."""
        tensors: dict[str, Any] = {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return self._replace(**{name: value.double() for name, value in tensors.items() if value.is_floating_point()})


class Statistics(NamedTuple):
    r"""Whitened sums over the data; ``G`` is 1 if all outputs share one noise and every entry is observed, else ``P``.

    :param chol: :math:`L = \mathrm{chol}(K_{ZZ})`, ``M x M``.
    :param gram: :math:`L^{-1} \Psi_2 L^{-\top} / \sigma_p^2`, ``G x M x M``; :math:`\Psi_2` sums over observed rows.
    :param linear: :math:`L^{-1} \Psi_1^\top y_p / \sigma_p^2`, ``P x M``.
    :param mean_residual: :math:`\langle d_n \rangle`, ``N``.

    Example:
        >>> sums = tighter_gp.gplvm.collapsed.statistics(problem)
        >>> sums.chol.shape, sums.linear.shape, sums.mean_residual.shape
        (torch.Size([3, 3]), torch.Size([2, 3]), torch.Size([8]))
    """

    chol: Tensor
    gram: Tensor
    linear: Tensor
    mean_residual: Tensor


def _rbf(x1: Tensor, x2: Tensor, outputscale: Tensor, lengthscale: Tensor) -> Tensor:
    r""":math:`s^2 \exp(-\tfrac12 \sum_q (x_q - x'_q)^2/\ell_q^2)`, ``A x Q`` and ``B x Q`` to ``A x B``."""
    # Multiplied out into one product, so that no A x B x Q is formed; an origin amid the points keeps rounding small.
    origin = x1.detach().mean(-2)
    x1, x2 = (x1 - origin) / lengthscale, (x2 - origin) / lengthscale
    norm1, norm2 = (0.5 * x.square().sum(-1, keepdim=True) for x in (x1, x2))
    rows = torch.cat([x1, outputscale.log() - norm1, -torch.ones_like(norm1)], dim=-1)
    columns = torch.cat([x2, torch.ones_like(norm2), norm2], dim=-1)
    return torch.exp(rows @ columns.mT)  # [A, B]


def statistics(problem: LatentProblem) -> Statistics:
    r"""All that the bounds need of the data, in :math:`O(N M^2 (Q + G))`.

    Example:
        >>> sums = tighter_gp.gplvm.collapsed.statistics(problem)
        >>> bool((sums.mean_residual >= 0).all())
        True
    """
    problem = problem.double()
    mean, variance, z, outputscale, lengthscale, noise, _, observed, _ = problem
    num_inducing = z.size(-2)
    inducing = _rbf(z, z, outputscale, lengthscale)  # K_ZZ: [M, M]
    jitter = problem.jitter * torch.eye(num_inducing, dtype=z.dtype, device=z.device)
    chol = cholesky(inducing + jitter, name="K_ZZ")
    pairs = psi2_pairs(mean, variance, z, outputscale, lengthscale)  # N x M(M+1)/2
    summed = pairs.sum(0, keepdim=True) if observed is None else observed.to(pairs).mT @ pairs
    psi2 = unpack_pairs(summed, num_inducing)  # 1 x M x M, or P x M x M
    gram = project(chol, project(chol, psi2).mT) / noise.reshape(-1, 1, 1)  # G x M x M
    # tr(K_ZZ^{-1} Psi_2^{(n)}): each pair off the diagonal counts twice.
    inverse = torch.cholesky_inverse(chol)  # [M, M]
    weights = pack_pairs(2 * inverse - torch.diag_embed(inverse.diagonal()))
    residual = (psi0(mean, outputscale) - pairs @ weights).clamp_min(0.0)  # <d_n>: [N]
    filled = _filled(problem)
    linear = project(chol, psi1(mean, variance, z, outputscale, lengthscale).mT @ filled).mT / noise.reshape(-1, 1)
    return Statistics(chol, 0.5 * (gram + gram.mT), linear, residual)


def _filled(problem: LatentProblem) -> Tensor:
    """Targets with zeros where nothing was observed, ``N x P``."""
    return torch.where(problem.seen, problem.targets, 0.0)


def _total(problem: LatentProblem, values: Tensor) -> Tensor:
    """Sum over the observed entries of ``values``, which broadcast to ``N x P``."""
    return torch.where(problem.seen, values, 0.0).sum()


def collapsed_core(problem: LatentProblem, sums: Statistics) -> Tensor:
    r"""What all the bounds share, without :math:`\mathrm{KL}_x` and the residual's price.

    .. math::

        \sum_p \Bigl\{ -\tfrac N2 \log 2\pi\sigma^2 + \tfrac12 \log \frac{|K_{ZZ}|}{|W|} - \frac{y_p^\top y_p}{2\sigma^2}
        + \frac{1}{2\sigma^4}\, y_p^\top \Psi_1 W^{-1} \Psi_1^\top y_p \Bigr\},
        \qquad W = K_{ZZ} + \Psi_2/\sigma^2

    Example:
        >>> core = tighter_gp.gplvm.collapsed.collapsed_core(problem, tighter_gp.gplvm.collapsed.statistics(problem))
        >>> bool(core > tighter_gp.gplvm.collapsed.tighter_bound(problem, torch.zeros(1, 1, 1)))
        True
    """
    problem = problem.double()
    noise = problem.noise.reshape(1, -1)  # [1, P] or [1, 1]
    num_outputs = sums.linear.size(0)
    core = collapse(sums.gram.expand(num_outputs, -1, -1), sums.linear)
    log_noise = _total(problem, noise.log())
    quadratic = (_filled(problem).square() / noise).sum() - (sums.linear * core.weights).sum()
    return collapsed_log_prob(quadratic, core.log_det.sum(), log_noise, problem.seen.sum())


def latent_kl(problem: LatentProblem) -> Tensor:
    r""":math:`\sum_n \mathrm{KL}[q(x_n) \Vert \mathcal N(0, I)]`.

    Example:
        >>> at_prior = problem._replace(mean=torch.zeros(8, 1), variance=torch.ones(8, 1))
        >>> tighter_gp.gplvm.collapsed.latent_kl(at_prior)
        tensor(0.)
    """
    variance = problem.variance
    return 0.5 * (variance + problem.mean.square() - 1 - variance.log()).sum()


def residual_at(problem: LatentProblem, chol: Tensor, nodes: Tensor) -> Tensor:
    r""":math:`d_n(x_n)` at :math:`x_n = \mu_n + S_n^{1/2} \epsilon`.

    :param nodes: :math:`\epsilon`, ``S x N x Q``, or ``S x 1 x Q`` for the same nodes in every row.
    :return: Shape ``S x N``.

    Example:
        >>> chol = tighter_gp.gplvm.collapsed.statistics(problem).chol
        >>> tighter_gp.gplvm.collapsed.residual_at(problem, chol, torch.zeros(5, 1, 1)).shape
        torch.Size([5, 8])
    """
    problem = problem.double()
    x = problem.mean + problem.variance.sqrt() * nodes  # [S, N, Q]
    cross = _rbf(problem.inducing_points, x.flatten(0, 1), problem.outputscale, problem.lengthscale)
    return residual_variance(problem.outputscale, project(chol, cross)).reshape(x.shape[:-1])


def _bound(problem: LatentProblem, sums: Statistics, price: Tensor, kl: Tensor | None) -> Tensor:
    kl = latent_kl(problem) if kl is None else kl
    value = collapsed_core(problem, sums) - kl - 0.5 * _total(problem, price)
    return value.to(problem.targets.dtype)


def titsias_bound(problem: LatentProblem, sums: Statistics | None = None, kl: Tensor | None = None) -> Tensor:
    r"""V-BGPLVM: an entry pays :math:`\tfrac12 \langle d_n \rangle / \sigma_p^2`.

    :param problem: The model and the data.
    :param sums: :func:`statistics` of the problem, if they are at hand.
    :param kl: :math:`\mathrm{KL}_x`, for another prior than :math:`\mathcal N(0, I)`.

    Example:
        >>> bool(tighter_gp.gplvm.collapsed.titsias_bound(problem).isfinite())
        True
    """
    sums = statistics(problem) if sums is None else sums
    return _bound(problem, sums, sums.mean_residual.unsqueeze(-1) / problem.noise, kl)


def constant_scale_bound(problem: LatentProblem, sums: Statistics | None = None, kl: Tensor | None = None) -> Tensor:
    r"""Scales that do not depend on x: an entry pays :math:`\tfrac12 \log(1 + \langle d_n \rangle / \sigma_p^2)`.

    The best such scale is :math:`m_{np} = \sigma_p^2 / (\sigma_p^2 + \langle d_n \rangle)`. In closed form like
    :func:`titsias_bound`, whose parameters it has, and never below it.

    Example:
        >>> constant = tighter_gp.gplvm.collapsed.constant_scale_bound(problem)
        >>> bool(constant > tighter_gp.gplvm.collapsed.titsias_bound(problem))
        True
    """
    sums = statistics(problem) if sums is None else sums
    return _bound(problem, sums, torch.log1p(sums.mean_residual.unsqueeze(-1) / problem.noise), kl)


def tighter_bound(
    problem: LatentProblem,
    nodes: Tensor,
    weights: Tensor | None = None,
    sums: Statistics | None = None,
    kl: Tensor | None = None,
) -> Tensor:
    r"""TV-BGPLVM: an entry pays :math:`\tfrac12 \langle \log(1 + d_n(x_n)/\sigma_p^2) \rangle`, summed over nodes.

    With :func:`gauss_hermite_nodes` the expectation is a quadrature, with independent standard normal draws for each row
    an unbiased sample. The other parameters are those of :func:`titsias_bound`.

    :param nodes: Standard normal nodes, ``S x N x Q``, or ``S x 1 x Q`` for the same in every row.
    :param weights: Weight of each node, ``S``; default equal.

    Example:
        >>> nodes, weights = tighter_gp.gplvm.collapsed.gauss_hermite_nodes(20, 1, problem.targets)
        >>> tighter = tighter_gp.gplvm.collapsed.tighter_bound(problem, nodes, weights)
        >>> bool(tighter > tighter_gp.gplvm.collapsed.titsias_bound(problem))
        True
    """
    sums = statistics(problem) if sums is None else sums
    price = torch.log1p(residual_at(problem, sums.chol, nodes).unsqueeze(-1) / problem.noise)  # [S, N, P or 1]
    price = price.mean(0) if weights is None else torch.tensordot(weights.double(), price, dims=1)
    return _bound(problem, sums, price, kl)


def gauss_hermite_nodes(order: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""A product grid for expectations under :math:`\mathcal N(0, I)`: ``order**dim`` nodes, for few dimensions.

    :return: Nodes ``S x 1 x Q`` and weights ``S``.

    Example:
        >>> nodes, weights = tighter_gp.gplvm.collapsed.gauss_hermite_nodes(3, 2, torch.zeros(()))
        >>> nodes.shape, round((weights * nodes[:, 0, 0] ** 2).sum().item(), 4)
        (torch.Size([9, 1, 2]), 1.0)
    """
    if order**dim > 10**6:
        raise ValueError(
            f"A grid of {order} nodes in {dim} dimensions has {order**dim} of them; use random or Sobol draws."
        )
    # Eigenvalues of the Jacobi matrix of Hermite polynomials, and squares of the first entries of its eigenvectors.
    beside = torch.arange(1, order, dtype=torch.float64).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag_embed(beside, -1))
    grid = torch.cartesian_prod(*[points] * dim).reshape(-1, 1, dim)
    weights = torch.cartesian_prod(*[vectors[0].square()] * dim).reshape(-1, dim).prod(-1)
    return grid.to(like), weights.to(like)


def sobol_nodes(num_nodes: int, dim: int, like: Tensor, seed: int | None = None) -> Tensor:
    r"""Scrambled Sobol points mapped to :math:`\mathcal N(0, I)`, ``S x 1 x Q``: many dimensions, equal weights.

    Example:
        >>> tighter_gp.gplvm.collapsed.sobol_nodes(64, 5, torch.zeros(()), seed=0).shape
        torch.Size([64, 1, 5])
    """
    return sobol_normal(num_nodes, dim, seed).to(like).unsqueeze(1)
