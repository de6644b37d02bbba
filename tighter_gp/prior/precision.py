"""Covariances in a precision that is asked for, and the one rule for which precision suffices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from ..settings import float32_factor
from .kernels import lower_lazy

_wide: ContextVar[bool] = ContextVar("wide", default=False)


@contextmanager
def wide_precision() -> Iterator[None]:
    """Every projection in the precision of the factor, for values that are reported.

    A mean is a sum of rounded projections times whitened means, which can be hundreds where inducing points coincide. Beside
    a noise of a millionth that is several per cent of a bound. A training step does not wait for it.
    """
    token = _wide.set(True)
    try:
        yield
    finally:
        _wide.reset(token)


def is_wide() -> bool:
    """Whether projections are asked for in the precision of the factor."""
    return _wide.get() and not float32_factor.on()


# A jitter below this many units of rounding keeps directions in which a covariance is all error.
_LEAST_JITTER = 256

# How much steeper a kernel that is not lowered may be in the squared distance than those that are.
_UNKNOWN_PROFILE = 16

# How much more than a collapsed bound its derivative in a lengthscale suffers from errors of squared distances: it is
# often a small sum of large terms. Found by trying kernels, widths and noises.
_DERIVATIVES = 32

# Kernels known to have no kink where two inputs coincide; of one that nobody knows the worst is assumed.
_SMOOTH = (
    kernels.AdditiveKernel,
    kernels.CosineKernel,
    kernels.LinearKernel,
    kernels.PeriodicKernel,
    kernels.PolynomialKernel,
    kernels.ProductKernel,
    kernels.RBFKernel,
    kernels.RQKernel,
    kernels.ScaleKernel,
    kernels.SpectralMixtureKernel,
)


def jitter_suffices(jitter: float, dtype: torch.dtype) -> bool:
    """Whether a jitter may be enough for a precision; :func:`covers_rounding` looks at the values too."""
    return jitter >= _LEAST_JITTER * torch.finfo(dtype).eps


def covers_rounding(
    tolerance: Tensor | float,
    variance: Tensor,
    dtype: torch.dtype,
    spread: Tensor | float = 0.0,
    *,
    is_collapsed: bool = False,
) -> Tensor:
    r"""Whether an error that does no harm is larger than what rounding makes of covariances.

    Rounding errors of a covariance are of the size of the largest variance. A squared distance is a difference of
    squared norms, so its error grows with :math:`|x/\ell|^2`.

    :param tolerance: The error that does no harm, such as a jitter.
    :param variance: Prior variances; the largest counts.
    :param dtype: The precision in which the covariances are evaluated.
    :param spread: Largest squared norm of the inputs in lengthscales.
    :param is_collapsed: Whether the tolerance is that of a collapsed bound, whose derivatives suffer more.
    """
    slope = 0.5 * _DERIVATIVES if is_collapsed else 0.5
    return (8 + slope * spread) * variance.amax() <= tolerance / torch.finfo(dtype).eps


@torch.no_grad()
def unlowered_spread(covar: LinearOperator) -> Tensor | float:
    """What stands for the spread of a kernel that is not lowered: the most that it can be, from all its units.

    :param covar: Covariance of some inputs, as models return it.
    """
    if not isinstance(covar, LazyEvaluatedKernelTensor):
        return 0.0
    modules = [module for module in covar.kernel.modules() if isinstance(module, Kernel)]
    units = [getattr(module, name, None) for module in modules for name in ("lengthscale", "period_length")]
    frequencies = [getattr(module, "mixture_means", None) for module in modules]
    factors = [unit.reciprocal().amax() for unit in units if isinstance(unit, Tensor)]
    factors += [frequency.amax() for frequency in frequencies if isinstance(frequency, Tensor)]
    if not factors:
        return 0.0
    spread = _UNKNOWN_PROFILE * (covar.x1 * torch.stack(factors).amax().to(covar.x1.dtype)).square().sum(-1).amax()
    if all(_is_smooth(module) for module in modules):
        return spread
    # With a kink the error of a covariance is the root of that of a squared distance.
    return 2 * (spread / torch.finfo(spread.dtype).eps).sqrt()


def _is_smooth(kernel: Kernel) -> bool:
    return type(kernel) in _SMOOTH or (type(kernel) is kernels.MaternKernel and kernel.nu > 0.5)


@torch.no_grad()
def noise_tolerance(factor: Tensor, noise: Tensor | float) -> Tensor:
    r"""The error of a covariance that stays below the noise in what the inducing points leave of a variance.

    An error of a covariance becomes :math:`\sqrt{k/p}` times as large there, with :math:`k` the largest variance and
    :math:`p` the smallest pivot of :math:`K_{ZZ}`.

    :param factor: :math:`\mathrm{chol}(K_{ZZ})`, ``... x M x M``.
    :param noise: Noise variances; the smallest counts.
    """
    variance = factor.square().sum(-1).amax()
    pivot = factor.diagonal(dim1=-1, dim2=-2).amin().square()
    smallest = torch.as_tensor(noise, dtype=factor.dtype, device=factor.device).amin()
    return smallest * (pivot / variance).sqrt()


# ---------------------------------------------------------------------------------------------------------------------
# Covariances in a precision
# ---------------------------------------------------------------------------------------------------------------------


def in_precision(kernel: Kernel, dtype: torch.dtype) -> Kernel:
    """A private copy of a kernel that computes in another precision; gradients flow to the kernel's own parameters.

    The user's kernel is not touched, so threads may share it and a part that is used twice stays one part.
    """
    memo: dict[int, Any] = {}
    for module in kernel.modules():
        if "_memoize_cache" in vars(module):
            memo[id(module._memoize_cache)] = {}
        for values in (module._parameters, module._buffers, vars(module)):
            for value in values.values():
                if isinstance(value, Tensor):
                    memo[id(value)] = value.to(dtype) if value.is_floating_point() else value
    return copy.deepcopy(kernel, memo)


def read(covar: LinearOperator, reading: Callable[[LinearOperator], Tensor], dtype: torch.dtype) -> Tensor:
    """What is read from a covariance, in some precision: not only rounded to it, if a kernel has yet to be evaluated.

    :param covar: A covariance, as models return it.
    :param reading: ``LinearOperator -> Tensor``, such as its diagonal.
    :param dtype: The precision.
    """
    if isinstance(covar, LazyEvaluatedKernelTensor):
        # Kernels that keep a matrix in eval mode would give that of other parameters.
        for module in covar.kernel.modules():
            if hasattr(module, "_cached_kernel_mat"):
                module._clear_cache()
    if isinstance(covar, LazyEvaluatedKernelTensor) and covar.x1.dtype != dtype:
        covar = LazyEvaluatedKernelTensor(
            covar.x1.to(dtype),
            covar.x2.to(dtype),
            kernel=in_precision(covar.kernel, dtype),
            last_dim_is_batch=covar.last_dim_is_batch,
            **covar.params,
        )
    return reading(covar).to(dtype)


def diagonal(covar: LinearOperator) -> Tensor:
    """Variances."""
    return covar.diagonal(dim1=-1, dim2=-2)


def covariance_block(
    covar: LinearOperator, rows: slice, columns: slice, dtype: torch.dtype, lower: bool = True
) -> Tensor:
    """A block of a covariance, as models return it: lowered if its kernel is one of the common ones.

    The numbers behind a lowered kernel and one that GPyTorch evaluates differ by rounding in the precision of the
    parameters: what is subtracted from each other has to come from the same.

    :param covar: Covariance of some inputs with themselves.
    :param rows: Which of the inputs.
    :param columns: With which.
    :param dtype: The precision.
    :param lower: Whether a common kernel is lowered.
    """
    lowered = lower_lazy(covar) if lower else None
    if lowered is None:
        return read(covar[..., rows, columns], to_dense, dtype)
    # What the kernel sees: the inputs after any feature extractor and selection of dimensions.
    features, values = covar.x1.to(dtype), [value.to(dtype) for value in lowered.values]
    first = features[..., rows, :]
    return lowered.covariance(values, first, first if rows == columns else features[..., columns, :])


def covariance_within(covar: LinearOperator, sets: Tensor, dtype: torch.dtype, lower: bool = True) -> Tensor:
    """Covariances within sets of points, without a second look at the inputs: ``K x S`` positions to ``... x K x S x S``.

    :param covar: Covariance of some inputs with themselves, ``... x N x N``.
    :param sets: Positions of the points of each set.
    :param dtype: The precision.
    :param lower: Whether a common kernel is lowered.
    """
    if not isinstance(covar, LazyEvaluatedKernelTensor):
        return covar.to_dense()[..., sets.unsqueeze(-1), sets.unsqueeze(-2)].to(dtype)
    # The sets come first, so that batches of the kernel still broadcast.
    features = covar.x1.expand(*covar.batch_shape, *covar.x1.shape[-2:])[..., sets, :].movedim(-3, 0)
    within = LazyEvaluatedKernelTensor(
        features, features, kernel=covar.kernel, last_dim_is_batch=covar.last_dim_is_batch, **covar.params
    )
    everything = slice(None)
    return covariance_block(within, everything, everything, dtype, lower).movedim(0, -3)
