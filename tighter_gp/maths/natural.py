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

from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import triangular_inverse

__all__ = ["NaturalParameters", "Sums", "data_sums", "lower_root", "natural_step", "reversed_factor"]


class NaturalParameters(NamedTuple):
    r"""q(w) by its natural parameters, in float64.

    :param precision: :math:`P`, shape ``... x M x M``; its diagonal, ``... x M``, for a mean-field q.
    :param linear: :math:`h = P m`, shape ``... x M``.

    Example:
        >>> q = tighter_gp.maths.natural.NaturalParameters(torch.tensor([[4.0]]), torch.tensor([2.0]))
        >>> q.is_mean_field
        False
    """

    precision: Tensor
    linear: Tensor

    @property
    def is_mean_field(self) -> bool:
        """Whether only the diagonal of the precision is there."""
        return self.precision.dim() == self.linear.dim()


class Sums(NamedTuple):
    r"""What a step needs to know of a batch, scaled up to all data and divided by :math:`\beta`.

    :param gram: :math:`\sum_n \lambda_n a_n a_n^\top`, ``... x M x M``; its diagonal for a mean-field q.
    :param slope: :math:`\sum_n g_n a_n`, ``... x M``.

    Example:
        >>> tighter_gp.maths.natural.Sums(torch.eye(2), torch.ones(2)).slope
        tensor([1., 1.])
    """

    gram: Tensor
    slope: Tensor


def reversed_factor(precision: Tensor) -> tuple[Tensor, Tensor]:
    r"""The lower triangular :math:`T` with :math:`P = T^\top T`, and whether there is one, a flag on the device.

    :math:`T` is the transposed factor of the matrix with its rows and columns reversed, reversed back.

    Example:
        >>> factor, ok = tighter_gp.maths.natural.reversed_factor(torch.tensor([[5.0, 2.0], [2.0, 4.0]]))
        >>> factor.mT @ factor, bool(ok)
        (tensor([[5., 2.],
                [2., 4.]]), True)
    """
    factor, info = torch.linalg.cholesky_ex(precision.flip(-1, -2))
    ok = (info == 0).all() & torch.isfinite(factor.diagonal(dim1=-1, dim2=-2)).all()
    return factor.mT.flip(-1, -2), ok  # in the order of its memory, which is by columns


def lower_root(precision: Tensor) -> tuple[Tensor, Tensor]:
    r"""The lower triangular :math:`R` with :math:`R R^\top = P^{-1}`, and whether there is one, a flag on the device.

    Example:
        >>> root, ok = tighter_gp.maths.natural.lower_root(torch.tensor([[4.0]]))
        >>> root, bool(ok)
        (tensor([[0.5000]]), True)
    """
    factor, ok = reversed_factor(precision)
    return triangular_inverse(factor), ok


def data_sums(
    projection: Tensor, slope: Tensor, curvature: Tensor, batch_shape: torch.Size = torch.Size(), diagonal: bool = False
) -> Sums:
    r"""The sums over a batch, in the precision of the projection; one product of order :math:`M^2 B`.

    :param projection: :math:`A`, ``... x M x B``; its batch may be smaller than that of the slopes, or larger.
    :param slope: :math:`g_n`, ``... x B``.
    :param curvature: :math:`\lambda_n \ge 0`, ``... x B``.
    :param batch_shape: Batch shape of q(u); dimensions that it does not have are summed over.
    :param diagonal: Whether only the diagonal of the Gram matrix is wanted.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5]])
        >>> tighter_gp.maths.natural.data_sums(projection, torch.tensor([1.0, 2.0]), torch.tensor([4.0, 4.0]))
        Sums(gram=tensor([[5.]]), slope=tensor([2.]))
    """
    vector = (projection @ slope.to(projection.dtype).unsqueeze(-1)).squeeze(-1)
    weighted = projection * curvature.to(projection.dtype).unsqueeze(-2)
    gram = (weighted * projection).sum(-1) if diagonal else weighted @ projection.mT
    inner = gram.shape[gram.dim() - (1 if diagonal else 2) :]
    return Sums(sum_to(gram, batch_shape, inner), sum_to(vector, batch_shape, vector.shape[-1:]))


def natural_step(
    q: NaturalParameters, sums: Sums, mean: Tensor, size: float | Tensor, mean_size: float | Tensor | None = None
) -> NaturalParameters:
    r"""One step of size :math:`\rho`; nothing is factorised, and nothing checked.

    :param q: Where it starts.
    :param sums: Of the batch.
    :param mean: The :math:`m` at which the slopes were taken, ``... x M``.
    :param size: :math:`\rho`.
    :param mean_size: Size of the step of the mean, which may have to be smaller where several q share the data; default
        ``size``.

    Example:
        >>> natural = tighter_gp.maths.natural
        >>> prior, sums = natural.NaturalParameters(torch.eye(1), torch.zeros(1)), natural.Sums(3 * torch.eye(1), torch.ones(1))
        >>> natural.natural_step(prior, sums, torch.zeros(1), size=1.0)
        NaturalParameters(precision=tensor([[4.]]), linear=tensor([1.]))
    """
    slope, mean = sums.slope.to(q.precision.dtype), mean.to(q.precision.dtype)
    gram = sums.gram.to(q.precision.dtype, copy=True)  # fresh memory costs more than the sums: P is made in place
    if q.is_mean_field:
        precision = torch.lerp(q.precision, 1 + gram, size.to(q.precision) if isinstance(size, Tensor) else size)
        moved = mean + (size if mean_size is None else mean_size) * (slope - mean) / precision
        return NaturalParameters(precision, precision * moved)
    target = slope + (gram @ mean.unsqueeze(-1)).squeeze(-1)
    precision = gram.lerp_(q.precision, (1 - size).to(gram) if isinstance(size, Tensor) else 1 - size)
    precision.diagonal(dim1=-1, dim2=-2).add_(size)
    linear = q.linear * (1 - size) + target * size
    if mean_size is not None and not (isinstance(mean_size, float) and mean_size == size):
        linear = linear + (mean_size - size) * (slope - mean)
    return NaturalParameters(precision, linear)


def sum_to(tensor: Tensor, batch_shape: torch.Size, inner: torch.Size) -> Tensor:
    """Sum over batch dimensions that q(u) does not have; those it has more of get copies."""
    shape = (*batch_shape, *inner)
    if tensor.shape == shape:  # nearly always
        return tensor
    return tensor.expand(torch.broadcast_shapes(tensor.shape, shape)).sum_to_size(shape)
