r"""Natural gradients for a Gaussian q(w) in closed form. Torch only.

In whitened coordinates :math:`q(w) = \mathcal N(P^{-1} h, P^{-1})`. With the slopes of the expected log likelihood per
point, :math:`g_n = \partial / \partial \mu_n` and :math:`\lambda_n = -2\, \partial / \partial s_n`, a step of size
:math:`\rho` on a batch :math:`B` of :math:`N` points is

.. math::

    P \leftarrow (1 - \rho) P + \rho \Bigl(I + \frac{N}{\beta |B|} \sum_n \lambda_n a_n a_n^\top\Bigr), \qquad
    h \leftarrow (1 - \rho) h + \rho \frac{N}{\beta |B|} \sum_n (g_n + \lambda_n a_n^\top m)\, a_n

with :math:`m = P^{-1} h`. The price of the conditional does not depend on q(u), so the tighter bound changes nothing
here. :math:`\rho` is the fraction of the way to the optimum of the batch, whatever :math:`\beta` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["data_sums", "natural_step", "reversed_factor"]


def reversed_factor(precision: Tensor) -> tuple[Tensor, Tensor]:
    r"""The lower triangular :math:`T` with :math:`P = T^\top T`, and whether there is one, a flag on the device.

    :math:`T` is the transposed factor of the matrix with its rows and columns reversed, reversed back.

    Example:
        >>> factor, ok = tighter_gp.maths.natural.reversed_factor(torch.tensor([[5.0, 2.0], [2.0, 4.0]]))
        >>> factor.mT @ factor, bool(ok)
        (tensor([[5., 2.],
                [2., 4.]]), True)
    """
    factor, info = torch.linalg.cholesky_ex(precision.flip(-1, -2))  # of P with its order reversed  [..., M, M]
    ok = (info == 0).all() & torch.isfinite(factor.diagonal(dim1=-1, dim2=-2)).all()
    return factor.mT.flip(-1, -2), ok  # in the order of its memory, which is by columns


def data_sums(
    projection: Tensor, slope: Tensor, curvature: Tensor, batch_shape: torch.Size = torch.Size(), diagonal: bool = False
) -> tuple[Tensor, Tensor]:
    r""":math:`\sum_n \lambda_n a_n a_n^\top` and :math:`\sum_n g_n a_n` over a batch; one product of order :math:`M^2 B`.

    :param projection: :math:`A`, ``... x M x B``; its batch may be smaller than that of the slopes, or larger.
    :param slope: :math:`g_n`, ``... x B``.
    :param curvature: :math:`\lambda_n \ge 0`, ``... x B``.
    :param batch_shape: Batch shape of q(u); dimensions that it does not have are summed over.
    :param diagonal: Whether only the diagonal of the Gram matrix is wanted.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5]])
        >>> tighter_gp.maths.natural.data_sums(projection, torch.tensor([1.0, 2.0]), torch.tensor([4.0, 4.0]))
        (tensor([[5.]]), tensor([2.]))
    """
    vector = (projection @ slope.to(projection.dtype).unsqueeze(-1)).squeeze(-1)  # [..., M]
    weighted = projection * curvature.to(projection.dtype).unsqueeze(-2)  # lambda_n a_n  [..., M, B]
    gram = (weighted * projection).sum(-1) if diagonal else weighted @ projection.mT
    inner = gram.shape[gram.dim() - (1 if diagonal else 2) :]
    return sum_to(gram, batch_shape, inner), sum_to(vector, batch_shape, vector.shape[-1:])


def natural_step(precision: Tensor, gram: Tensor, size: float | Tensor, diagonal: bool = False) -> Tensor:
    r"""The new :math:`P` after a step of size :math:`\rho`; nothing is factorised, and nothing checked.

    :param precision: :math:`P`, ``... x M x M``; its diagonal, ``... x M``, for a mean-field q.
    :param gram: :math:`\sum_n \lambda_n a_n a_n^\top` of :func:`data_sums`, of the same shape.
    :param size: :math:`\rho`.
    :param diagonal: Whether only the diagonals are there.

    Example:
        >>> tighter_gp.maths.natural.natural_step(torch.eye(1), 3 * torch.eye(1), size=0.5)
        tensor([[2.5000]])
    """
    if diagonal:
        return torch.lerp(precision, 1 + gram, size)
    moved = torch.lerp(precision, gram, size)  # (1 - rho) P + rho sum lambda_n a_n a_n'
    moved.diagonal(dim1=-1, dim2=-2).add_(size)  # + rho I
    return moved


def sum_to(tensor: Tensor, batch_shape: torch.Size, inner: torch.Size) -> Tensor:
    """Sum over batch dimensions that q(u) does not have; those it has more of get copies."""
    shape = (*batch_shape, *inner)
    if tensor.shape == shape:  # nearly always
        return tensor
    return tensor.expand(torch.broadcast_shapes(tensor.shape, shape)).sum_to_size(shape)
