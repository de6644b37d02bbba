"""Kernels evaluated in a precision that is asked for, lowered or by GPyTorch, and which precision that should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch import settings
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator, to_dense
from torch import Tensor
from torch.func import functional_call

from .._checks import passed
from ..linalg import cholesky
from .lowering import lower, lower_lazy


class _Reader(torch.nn.Module):
    """Reads a covariance whose kernel is a submodule, so that its parameters can be exchanged for the time of it."""

    def __init__(self, kernel: Kernel, read: Callable[[], Tensor]) -> None:
        super().__init__()
        self.kernel, self.read = kernel, read

    def forward(self) -> Tensor:
        return self.read()


def evaluate(covar: LinearOperator, read: Callable[[LinearOperator], Tensor], dtype: torch.dtype) -> Tensor:
    """What is read from a covariance, in some precision: not only rounded to it, if a kernel has yet to be evaluated.

    :param covar: A covariance, as models return it.
    :param read: ``LinearOperator -> Tensor``, such as its diagonal.
    :param dtype: The precision, in which kernels with constants of another one may be unable to compute; what they
        return in their own is then converted.
    """
    if not isinstance(covar, LazyEvaluatedKernelTensor) or covar.x1.dtype == dtype:
        return read(covar).to(dtype)
    kernel, inputs = covar.kernel, (covar.x1.to(dtype), covar.x2.to(dtype))
    wide = LazyEvaluatedKernelTensor(*inputs, kernel=kernel, last_dim_is_batch=covar.last_dim_is_batch, **covar.params)
    reader = _Reader(kernel, lambda: read(wide))
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in itertools.chain(reader.named_parameters(), reader.named_buffers())
        if tensor.is_floating_point()
    }
    try:
        return functional_call(reader, tensors, ()).to(dtype)
    except RuntimeError:
        return read(covar).to(dtype)


def covariance_block(covar: LinearOperator, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """A block of a covariance, as models return it: lowered if its kernel is one of the common ones.

    The numbers behind a lowered kernel and one that GPyTorch evaluates differ by rounding in the precision of the
    parameters: what is subtracted from each other has to come from the same.

    :param covar: Covariance of some inputs with themselves.
    :param rows: Which of the inputs.
    :param columns: With which.
    :param dtype: The precision.
    """
    lowered = lower_lazy(covar)
    if lowered is None:
        return evaluate(covar[..., rows, columns], to_dense, dtype)
    # What the kernel sees: the inputs after any feature extractor and selection of dimensions.
    features, values = covar.x1.to(dtype), [value.to(dtype) for value in lowered.values]
    first = features[..., rows, :]
    return lowered.covariance(values, first, first if rows == columns else features[..., columns, :])


class Covariances(NamedTuple):
    """A kernel as dense functions of inputs, evaluated in one precision.

    :param covariance: ``(x1, x2) -> ... x N1 x N2``; pass the same tensor twice for a symmetric matrix.
    :param variance: ``x -> ... x N``, its diagonal.
    """

    covariance: Callable[[Tensor, Tensor], Tensor]
    variance: Callable[[Tensor], Tensor]


def covariances(kernel: Kernel, dtype: torch.dtype) -> Covariances:
    """The functions of a kernel with its current parameters, lowered if it is one of the common ones.

    :param kernel: Any GPyTorch kernel.
    :param dtype: The precision, whatever that of the kernel and of the inputs.
    """
    lowered = lower(kernel)
    if lowered is None:
        return unlowered_covariances(kernel, dtype)
    values = [value.to(dtype) for value in lowered.values]

    def covariance(x1: Tensor, x2: Tensor) -> Tensor:
        first = x1.to(dtype)
        return lowered.covariance(values, first, first if x1 is x2 else x2.to(dtype))

    return Covariances(covariance, lambda x: lowered.variance(values, x.to(dtype)))


def unlowered_covariances(kernel: Kernel, dtype: torch.dtype) -> Covariances:
    """The same with GPyTorch's own values, to the last bit, and second derivatives."""

    def read(x1: Tensor, x2: Tensor | None, reading: Callable[[LinearOperator], Tensor]) -> Tensor:
        with settings.lazily_evaluate_kernels(True):  # which GPyTorch turns off within a kernel
            return evaluate(kernel(x1, x2), reading, dtype)

    return Covariances(
        lambda x1, x2: read(x1, None if x1 is x2 else x2, to_dense),
        lambda x: read(x, None, lambda covar: covar.diagonal(dim1=-1, dim2=-2)),
    )


def inducing_cholesky(prior: Covariances, inducing_points: Tensor, jitter_val: float) -> Tensor:
    r""":math:`L = \mathrm{chol}(K_{ZZ} + \epsilon I)`, with a jitter of the kernel's scale where one is needed.

    :param prior: A kernel in the precision of the factor.
    :param inducing_points: :math:`Z`, shape ``... x M x D``.
    :param jitter_val: :math:`\epsilon`.
    """
    matrix = prior.covariance(inducing_points, inducing_points)
    identity = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
    return cholesky(matrix + jitter_val * identity, name="K_ZZ")


def covers_rounding(size: Tensor | float, variance: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether something is larger than what rounding makes of covariances.

    :param size: How large it is, such as a jitter.
    :param variance: Prior variances; the largest counts.
    :param dtype: The precision in which the covariances are evaluated.
    """
    return 8 * torch.finfo(dtype).eps * variance.amax() <= size


def sufficient_precision(factor: Tensor, noise: Tensor | float, dtype: torch.dtype) -> torch.dtype:
    r"""Precision for covariances with the inducing points: the one asked for, or that of the factor.

    Rounding errors of a covariance are of the size of the largest variance :math:`k`. In what the inducing points leave of
    a variance they are :math:`\sqrt{k/p}` times that, with :math:`p` the smallest pivot of :math:`K_{ZZ}`, and have to
    stay below the noise.

    :param factor: :math:`\mathrm{chol}(K_{ZZ})` in the wider precision, ``... x M x M``.
    :param noise: Noise variances; the smallest counts.
    :param dtype: The precision asked for.
    """
    factor = factor.detach()
    variance = factor.square().sum(-1).amax()
    pivot = factor.diagonal(dim1=-1, dim2=-2).amin().square()
    smallest = torch.as_tensor(noise, dtype=factor.dtype, device=factor.device).detach().amin()
    return dtype if passed(covers_rounding(smallest * (pivot / variance).sqrt(), variance, dtype)) else factor.dtype
