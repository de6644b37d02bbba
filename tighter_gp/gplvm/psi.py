r"""Expectations of an RBF-ARD kernel under Gaussian inputs, in closed form. Torch only.

For :math:`k(x, x') = s^2 \exp\bigl(-\tfrac12 \sum_q (x_q - x'_q)^2 / \ell_q^2\bigr)` and
:math:`q(x_n) = \mathcal N(\mu_n, \mathrm{diag}\, S_n)`:

.. math::

    \psi_{0n} = \langle k(x_n, x_n) \rangle, \qquad
    \Psi_1[n, i] = \langle k(x_n, z_i) \rangle, \qquad
    \Psi_2^{(n)}[i, j] = \langle k(x_n, z_i)\, k(x_n, z_j) \rangle

:math:`\Psi_2^{(n)}` is symmetric: only its :math:`M(M+1)/2` pairs :math:`i \le j` are computed and kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def psi0(mean: Tensor, outputscale: Tensor) -> Tensor:
    r""":math:`\psi_{0n} = s^2`, shape ``N``.

    :param mean: :math:`\mu`, shape ``N x Q``.
    :param outputscale: :math:`s^2`, a scalar.

    Example:
        >>> tighter_gp.gplvm.psi.psi0(torch.zeros(3, 1), torch.tensor(2.0))
        tensor([2., 2., 2.])
    """
    return outputscale.expand(mean.size(-2))


def psi1(mean: Tensor, variance: Tensor, inducing_points: Tensor, outputscale: Tensor, lengthscale: Tensor) -> Tensor:
    r"""The expected cross-covariance.

    .. math:: \Psi_1[n, i] = s^2 \prod_q (1 + S_{nq}/\ell_q^2)^{-1/2}
              \exp\Bigl(-\tfrac12 \frac{(\mu_{nq} - z_{iq})^2}{\ell_q^2 + S_{nq}}\Bigr)

    :param mean: :math:`\mu`, shape ``N x Q``.
    :param variance: :math:`S`, shape ``N x Q``.
    :param inducing_points: :math:`Z`, shape ``M x Q``.
    :param outputscale: :math:`s^2`, a scalar.
    :param lengthscale: :math:`\ell`, shape ``Q``.
    :return: Shape ``N x M``.

    Example:
        >>> mean, variance = torch.zeros(2, 1), torch.tensor([[0.0], [3.0]])
        >>> tighter_gp.gplvm.psi.psi1(mean, variance, torch.zeros(1, 1), torch.tensor(2.0), torch.ones(1))
        tensor([[2.],
                [1.]])
    """
    squared = lengthscale.square()
    distance = (mean.unsqueeze(-2) - inducing_points).square() / (squared + variance).unsqueeze(-2)
    log_width = torch.log1p(variance / squared).sum(-1, keepdim=True)
    return outputscale * torch.exp(-0.5 * (distance.sum(-1) + log_width))


def psi2_pairs(
    mean: Tensor, variance: Tensor, inducing_points: Tensor, outputscale: Tensor, lengthscale: Tensor
) -> Tensor:
    r"""The expected products of two cross-covariances, row by row; :func:`unpack_pairs` makes matrices of them.

    .. math::

        \Psi_2^{(n)}[i, j] = s^4 \prod_q (1 + 2 S_{nq}/\ell_q^2)^{-1/2}
        \exp\Bigl(-\frac{(z_{iq} - z_{jq})^2}{4 \ell_q^2} - \frac{(\mu_{nq} - \bar z_q)^2}{\ell_q^2 + 2 S_{nq}}\Bigr),
        \qquad \bar z = \tfrac12 (z_i + z_j)

    :return: Shape ``N x M(M+1)/2``; the parameters are those of :func:`psi1`.

    Example:
        >>> mean, variance = torch.zeros(2, 1), torch.tensor([[0.0], [1.5]])
        >>> tighter_gp.gplvm.psi.psi2_pairs(mean, variance, torch.zeros(1, 1), torch.tensor(2.0), torch.ones(1))
        tensor([[4.],
                [2.]])
    """
    squared = lengthscale.square()
    first, second = torch.triu_indices(
        inducing_points.size(-2), inducing_points.size(-2), device=inducing_points.device
    ).unbind()
    # The squares are multiplied out into one product of N x (2Q+2) and (2Q+2) x pairs, so that nothing larger than the
    # result is formed; an origin amid the inducing points keeps the rounding small.
    origin = inducing_points.detach().mean(-2)
    z, centred = inducing_points - origin, mean - origin
    midpoint = 0.5 * (z[first] + z[second])  # pairs x Q
    apart = ((z[first] - z[second]).square() / (4 * squared)).sum(-1, keepdim=True)  # pairs x 1
    weight = (squared + 2 * variance).reciprocal()  # N x Q
    log_width = 0.5 * torch.log1p(2 * variance / squared)  # N x Q
    own = (weight * centred.square() + log_width).sum(-1, keepdim=True) - 2 * outputscale.log()  # N x 1
    rows = torch.cat([2 * weight * centred, -weight, -own, -torch.ones_like(own)], dim=-1)
    columns = torch.cat([midpoint, midpoint.square(), torch.ones_like(apart), apart], dim=-1)
    return torch.exp(rows @ columns.mT)


def pack_pairs(matrix: Tensor) -> Tensor:
    """The pairs :math:`i \\le j` of symmetric matrices, ``... x M x M`` to ``... x M(M+1)/2``.

    Example:
        >>> tighter_gp.gplvm.psi.pack_pairs(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """
    first, second = torch.triu_indices(matrix.size(-1), matrix.size(-1), device=matrix.device).unbind()
    return matrix[..., first, second]


def unpack_pairs(pairs: Tensor, size: int) -> Tensor:
    """Symmetric matrices from their pairs, ``... x M(M+1)/2`` to ``... x M x M``.

    Example:
        >>> tighter_gp.gplvm.psi.unpack_pairs(torch.tensor([1.0, 2.0, 3.0]), size=2)
        tensor([[1., 2.],
                [2., 3.]])
    """
    first, second = torch.triu_indices(size, size, device=pairs.device).unbind()
    position = torch.empty(size, size, dtype=torch.long, device=pairs.device)
    position[first, second] = position[second, first] = torch.arange(first.numel(), device=pairs.device)
    return pairs[..., position]
