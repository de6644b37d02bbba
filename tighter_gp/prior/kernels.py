r"""Covariances as a recursion over the kernels met most often, with squared distances in float64.

A squared distance is a small difference of large numbers; in float64 it costs little beside the other products of a step.
RBF, Matérn, rational quadratic and linear kernels, scaled, added and multiplied, with ARD, ``active_dims`` and batch shapes,
are evaluated here. Any other part of a kernel is left to GPyTorch. The inputs decide the precision of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add, mul
from typing import Any

import torch
from gpytorch import kernels, settings
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor

from ..maths.derivatives import once_differentiable
from ..settings import float32_factor

# Dimensions up to which the norms ride in the product of a squared distance.
_FEW_DIMENSIONS = 64

# From squared distances, which are overwritten, to the covariance and its derivative in them, but for a factor.
Profile = Callable[[Tensor], tuple[Tensor, Tensor, float]]


def covariance(kernel: Kernel, x: Tensor, rows: slice, columns: slice, *, is_selected: bool = False) -> Tensor:
    """Covariances between some inputs and others of the same tensor, ``... x N1 x N2``, in its dtype.

    :param kernel: Any kernel of GPyTorch.
    :param x: All inputs, ``... x N x D``.
    :param rows: Which of them are the first.
    :param columns: Which are the second; variances are exact where both begin with the same.
    :param is_selected: Whether the kernel's ``active_dims`` were selected already.
    """
    kind = type(kernel)
    if kernel.active_dims is not None and not is_selected:
        x = x.index_select(-1, kernel.active_dims)
    if kind is kernels.ScaleKernel:  # GPyTorch's has taken over the active_dims of its base
        scale, base = kernel.outputscale.to(x.dtype).unsqueeze(-1).unsqueeze(-1), kernel.base_kernel
        profile = _profile(base)
        if profile is not None:  # in one pass over the matrix
            return _stationary(_scaled(base, x, rows), rows, columns, scale, profile)
        return scale * covariance(base, x, rows, columns, is_selected=True)
    if kind in _COMBINED:
        return reduce(_COMBINED[kind], (covariance(part, x, rows, columns) for part in kernel.kernels))
    if kind is kernels.LinearKernel:
        return (x[..., rows, :] * kernel.variance.to(x.dtype)) @ x[..., columns, :].mT
    if kind is kernels.RQKernel:
        alpha = kernel.alpha.to(x.dtype).unsqueeze(-1)  # [..., 1, 1]
        squared = _stationary(_scaled(kernel, x, rows), rows, columns, None, _squared)  # r^2  [..., N1, N2]
        return torch.exp(-alpha * torch.log1p(squared / (2 * alpha)))
    if kind is kernels.MaternKernel and kernel.nu == 0.5:  # its kink asks for distances from differences
        scaled = _scaled(kernel, x, rows)
        first, second = scaled[..., rows, :], scaled[..., columns, :]
        return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist").neg().exp()
    profile = _profile(kernel)
    if profile is not None:
        return _stationary(_scaled(kernel, x, rows), rows, columns, None, profile)
    return _by_gpytorch(kernel, x[..., rows, :], x[..., columns, :])


def variance(kernel: Kernel, x: Tensor, *, is_selected: bool = False) -> Tensor:
    """The diagonal of :func:`covariance`, ``... x N``.

    :param x: ``... x N x D``.
    """
    kind = type(kernel)
    if kernel.active_dims is not None and not is_selected:
        x = x.index_select(-1, kernel.active_dims)
    if kind is kernels.ScaleKernel:
        return kernel.outputscale.to(x.dtype).unsqueeze(-1) * variance(kernel.base_kernel, x, is_selected=True)
    if kind in _COMBINED:
        return reduce(_COMBINED[kind], (variance(part, x) for part in kernel.kernels))
    if kind is kernels.LinearKernel:
        return (x.square() * kernel.variance.to(x.dtype)).sum(-1)
    if kind in _STATIONARY:
        batch = torch.broadcast_shapes(kernel.batch_shape, x.shape[:-2])
        return x.new_ones(()).expand(*batch, x.size(-2))
    return _by_gpytorch(kernel, x, x, diag=True)


@torch.no_grad()
def spread(kernel: Kernel, x: Tensor, *, is_selected: bool = False) -> Tensor | float:
    """Variance of the inputs in squared lengthscales: by it gradients in a lengthscale lose digits.

    The largest over dimensions and parts of a kernel, zero for those that know no lengthscale or are left to GPyTorch.
    """
    kind = type(kernel)
    if kernel.active_dims is not None and not is_selected:
        x = x.index_select(-1, kernel.active_dims)
    if kind is kernels.ScaleKernel:
        return spread(kernel.base_kernel, x, is_selected=True)
    if kind in _COMBINED:
        return max(spread(part, x) for part in kernel.kernels)
    if kind not in _STATIONARY or not x.numel():
        return 0.0
    variance = x.var(-2, unbiased=False).unsqueeze(-2)  # [..., 1, D]
    return (variance / kernel.lengthscale.square()).amax()


_COMBINED: dict[type, Callable[[Tensor, Tensor], Tensor]] = {kernels.AdditiveKernel: add, kernels.ProductKernel: mul}
_STATIONARY = (kernels.RBFKernel, kernels.MaternKernel, kernels.RQKernel)


def _scaled(kernel: Kernel, x: Tensor, rows: slice) -> Tensor:
    """Inputs in lengthscales, around the middle of the first: far from zero they have few digits left to lose."""
    lengthscale = kernel.lengthscale.to(x.dtype)  # [..., 1, D or 1]
    return (x - x.detach()[..., rows, :].mean(-2, keepdim=True)) * lengthscale.reciprocal()


# ---- stationary kernels: k(x, x') = g(r^2) ---------------------------------------------------------------------------


def _squared(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    return squared, torch.ones_like(squared), 1.0


def _rbf(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    value = squared.mul_(-0.5).exp_()
    return value, value, -0.5


def _matern32(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    distance = squared.mul_(3).sqrt_()  # sqrt(3) r
    decay = distance.neg().exp_()
    return distance.add_(1).mul_(decay), decay, -1.5


def _matern52(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    distance = squared.mul_(5).sqrt()  # sqrt(5) r
    decay = distance.neg().exp_()
    slope = (distance + 1).mul_(decay)
    return squared.div_(3).add_(distance).add_(1).mul_(decay), slope, -5 / 6


def _profile(kernel: Kernel) -> Profile | None:
    """The profile of a kernel that is linear in small squared distances, or None."""
    if type(kernel) is kernels.RBFKernel:
        return _rbf
    return {1.5: _matern32, 2.5: _matern52}.get(kernel.nu) if type(kernel) is kernels.MaternKernel else None


def _stationary(x: Tensor, rows: slice, columns: slice, scale: Tensor | None, profile: Profile) -> Tensor:
    if torch.jit.is_tracing():  # a trace keeps no function of Python
        value, *_ = profile(squared_distance(x, rows, columns))
        return value if scale is None else scale * value
    return _Stationary.apply(x, rows, columns, scale, profile)


class _Stationary(torch.autograd.Function):
    """A scaled function of squared distances, with a backward pass of two thin products and no root to differentiate."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: slice, columns: slice, scale: Tensor | None, profile: Profile) -> Tensor:
        value, slope, ctx.factor = profile(squared_distance(x, rows, columns))  # [..., N1, N2]
        value = value if scale is None else scale * value
        ctx.save_for_backward(x, scale, slope, value)
        ctx.slices = rows, columns
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, slope, value = ctx.saved_tensors
        rows, columns = ctx.slices
        weights, factor, by_scale, by_x = grad * slope, 2 * ctx.factor, None, None  # [..., N1, N2]
        if scale is not None:
            factor = factor * scale
            by_scale = ((grad * value).sum((-1, -2), keepdim=True) / scale).sum_to_size(scale.shape)
        if ctx.needs_input_grad[0]:
            # The derivative of |a - b|^2 is 2 (a - b) in a and the opposite in b.
            first, second, by_x = x[..., rows, :], x[..., columns, :], torch.zeros_like(x)
            by_x[..., columns, :] = torch.addcmul(-(weights.mT @ first), weights.sum(-2).unsqueeze(-1), second)
            by_x[..., rows, :] += weights.sum(-1, keepdim=True) * first - weights @ second
            by_x.mul_(factor)
        return by_x, None, None, by_scale, None


def squared_distance(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Squared Euclidean distances by one product in float64, ``... x N1 x N2``, in the dtype of the inputs.

    Zero on the main diagonal if both begin with the same inputs.
    """
    wide = x if float32_factor.on() else x.double()  # [..., N, D]
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square()  # |x|^2  [..., N, 1]
    first, second, norm1, norm2 = wide[..., rows, :], wide[..., columns, :], norms[..., rows, :], norms[..., columns, :]
    if x.size(-1) <= _FEW_DIMENSIONS:  # |a|^2 - 2 a'b + |b|^2 as one product
        left = torch.cat([first * -2, norm1, torch.ones_like(norm1)], -1)
        right = torch.cat([second, torch.ones_like(norm2), norm2], -1)
        squared = (left @ right.mT).to(x.dtype)
    else:
        squared = (first @ second.mT).mul_(-2).add_(norm1).add_(norm2.mT).to(x.dtype)
    squared = squared.clamp_min_(0)  # [..., N1, N2]
    if (rows.start or 0) == (columns.start or 0):
        squared.diagonal(dim1=-1, dim2=-2).zero_()
    return squared


# ---- any other kernel -------------------------------------------------------------------------------------------------


class _Dense(torch.nn.Module):
    """A kernel as a module that returns dense values, for ``functional_call``."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool) -> Tensor:
        kernel, dims = self.kernel, self.kernel.active_dims
        kernel.active_dims = None  # selected already, as in GPyTorch's lazily evaluated kernels
        try:
            with settings.lazily_evaluate_kernels(False):
                return to_dense(kernel(x1, x2, diag=diag))
        finally:
            kernel.active_dims = dims


def _by_gpytorch(kernel: Kernel, x1: Tensor, x2: Tensor, diag: bool = False) -> Tensor:
    """A kernel by GPyTorch, in float64: nothing is known of its errors."""
    module, dtype = _Dense(kernel), x1.dtype if float32_factor.on() else torch.float64
    tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    wide = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return torch.func.functional_call(module, wide, (x1.to(dtype), x2.to(dtype), diag)).to(x1.dtype)
