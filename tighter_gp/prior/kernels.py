r"""Common kernels as pure functions of two tensors.

GPyTorch evaluates a kernel through lazy tensors and reads values back to the host on the way. A training step needs
dense blocks :math:`K_{ZZ}`, :math:`K_{ZX}` and a diagonal, so the kernels met most often are *lowered* to plain tensor
functions with the same values and gradients: RBF, Matérn, rational quadratic, linear, constant, scaled, and sums and
products of these, with ARD, ``active_dims`` and batch shapes. :func:`lower` returns None for any other kernel, which
is then evaluated by GPyTorch itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator
from torch import Tensor

from ..maths.fused import once_differentiable
from ..modes import spans


class Leaf(NamedTuple):
    """A hyperparameter: its module and the name of its constrained value."""

    module: Kernel
    name: str

    @property
    def value(self) -> Tensor:
        return getattr(self.module, self.name)


Values = Sequence[Tensor]


class LoweredKernel(NamedTuple):
    """A kernel as pure functions of the values of its leaves.

    :param leaves: The hyperparameters, in the order in which ``values`` are given.
    :param covariance: ``(values, x1, x2) -> ... x N1 x N2``; pass the same tensor twice for a symmetric matrix.
    :param variance: ``(values, x) -> ... x N``, its diagonal.
    :param spread: ``(values, x1, x2) -> Tensor``, the largest squared norm of ``x2`` around the middle of ``x1``, in
        lengthscales; None where no distance is computed.
    :param blocks: ``(values, x, M) -> K_ZZ, K_ZX, spread`` of the first ``M`` rows of ``x`` with themselves and with the
        others, in one pass over both; None where there is none.
    """

    leaves: tuple[Leaf, ...]
    covariance: Callable[[Values, Tensor, Tensor], Tensor]
    variance: Callable[[Values, Tensor], Tensor]
    spread: Callable[[Values, Tensor, Tensor], Tensor] | None = None
    blocks: Callable[[Values, Tensor, int], tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def values(self) -> list[Tensor]:
        return [leaf.value for leaf in self.leaves]


# ---------------------------------------------------------------------------------------------------------------------
# Stationary kernels: k(x, x') = v g(r^2), r the distance of the scaled inputs
# ---------------------------------------------------------------------------------------------------------------------


def _rbf(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    value = squared.mul_(-0.5).exp_()
    return value, value, -0.5


def _matern32(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    distance = squared.sqrt_().mul_(math.sqrt(3))
    decay = distance.neg().exp_()
    return distance.add_(1).mul_(decay), decay, -1.5


def _matern52(squared: Tensor) -> tuple[Tensor, Tensor, float]:
    distance = squared.mul_(5).sqrt()
    decay = distance.neg().exp_()
    slope = (distance + 1).mul_(decay)
    return squared.div_(3).add_(distance).add_(1).mul_(decay), slope, -5 / 6


_PROFILES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, float]]] = {
    "rbf": _rbf,
    "matern32": _matern32,
    "matern52": _matern52,
}


def scaled(x1: Tensor, x2: Tensor, lengthscale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both inputs around the middle of the first, in lengthscales; None for a second that is the first.

    The middle is subtracted before the division: inputs far from zero have few digits left to lose.
    """
    with torch.no_grad():  # a stationary kernel does not depend on it
        centre = x1.mean(-2, keepdim=True)
    return (x1 - centre) / lengthscale, None if x1 is x2 else (x2 - centre) / lengthscale


@torch.no_grad()
def _spread(values: Values, x1: Tensor, x2: Tensor) -> Tensor:
    squared = scaled(x1, x2, values[0])[1].square().sum(-1)  # type: ignore[union-attr]
    return squared.amax() if squared.numel() else squared.new_zeros(())  # GPyTorch asks for the prior at no points, too


def squared_distance(x1: Tensor, x2: Tensor) -> Tensor:
    """Squared Euclidean distances by one matrix product; exactly zero on the diagonal if the two are one tensor.

    Exact to rounding in their squared norms: inputs should be around zero.
    """
    same = x1 is x2
    norm1, norm2 = x1.square().sum(-1, keepdim=True), x2.square().sum(-1, keepdim=True)
    left = torch.cat([-2 * x1, norm1, torch.ones_like(norm1)], -1)
    right = torch.cat([x2, torch.ones_like(norm2), norm2], -1)
    squared = (left @ right.mT).clamp_min_(0)
    if same:
        squared.diagonal(dim1=-1, dim2=-2).zero_()
    return squared


class _Stationary(torch.autograd.Function):
    r""":math:`v\, g(r^2)` with a backward pass of two thin matrix products and no square root to differentiate."""

    @staticmethod
    def forward(ctx, x1: Tensor, x2: Tensor | None, scale: Tensor | None, profile: str) -> Tensor:
        other = x1 if x2 is None else x2
        value, slope, factor = _PROFILES[profile](squared_distance(x1, other))
        if scale is not None:
            value = scale * value
        ctx.factor = factor
        ctx.save_for_backward(x1, x2, scale, slope, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x1, x2, scale, slope, value = ctx.saved_tensors
        weight = grad * slope
        grad_scale = None
        if scale is not None:
            if ctx.needs_input_grad[2]:
                grad_scale = ((grad * value).sum((-1, -2), keepdim=True) / scale).sum_to_size(scale.shape)
            weight.mul_(scale)
        factor = 2 * ctx.factor
        if x2 is None:
            # Both arguments are x1: the weights act from the left and from the right.
            weight = weight + weight.mT
            grad_x1 = _pull(weight, x1, x1, factor) if ctx.needs_input_grad[0] else None
            return grad_x1, None, grad_scale, None
        grad_x1 = _pull(weight, x1, x2, factor) if ctx.needs_input_grad[0] else None
        grad_x2 = _pull(weight.mT, x2, x1, factor) if ctx.needs_input_grad[1] else None
        return grad_x1, grad_x2, grad_scale, None


def _pull(weight: Tensor, to: Tensor, other: Tensor, factor: float) -> Tensor:
    """Gradient of ``sum(weight * squared_distance(to, other))`` in ``to``, times half of ``factor``."""
    gradient = weight.sum(-1, keepdim=True) * to - weight @ other
    return gradient.mul_(factor).sum_to_size(to.shape)


def _stationary(values: Values, x1: Tensor, x2: Tensor, profile: str) -> Tensor:
    lengthscale, *scale = values
    variance = scale[0].unsqueeze(-1).unsqueeze(-1) if scale else None
    return _Stationary.apply(*scaled(x1, x2, lengthscale), variance, profile)


class _StationaryBlocks(torch.autograd.Function):
    r""":math:`K_{ZZ}` and :math:`K_{ZX}` in one pass over both, from inputs as they are to their gradients."""

    @staticmethod
    def forward(
        ctx, x: Tensor, lengthscale: Tensor, scale: Tensor | None, size: int, profile: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape, x = x.shape, (x - x[..., :size, :].mean(-2, keepdim=True)).div(lengthscale)
        norm = x.square().sum(-1, keepdim=True)
        one = torch.ones_like(norm)
        z = x[..., :size, :]
        left = torch.cat([-2 * z, norm[..., :size, :], one[..., :size, :]], -1)
        squared = (left @ torch.cat([x, one, norm], -1).mT).clamp_min_(0)
        squared.diagonal(dim1=-1, dim2=-2).zero_()
        value, slope, ctx.factor = _PROFILES[profile](squared)
        if scale is not None:
            value = scale * value
        ctx.size, ctx.shape = size, shape
        ctx.save_for_backward(x, lengthscale, scale, slope, value)
        spread = norm.amax()
        ctx.mark_non_differentiable(spread)
        return value[..., :size].contiguous(), value[..., size:].contiguous(), spread

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_inducing: Tensor, grad_cross: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, lengthscale, scale, slope, value = ctx.saved_tensors
        grad = torch.cat([grad_inducing, grad_cross], -1)
        weight, grad_scale = grad * slope, None
        if scale is not None:
            if ctx.needs_input_grad[2]:
                grad_scale = ((grad * value).sum((-1, -2), keepdim=True) / scale).sum_to_size(scale.shape)
            weight.mul_(scale)
        # The weights act on Z from the right and on all inputs, Z among them, from the left.
        z = x[..., : ctx.size, :]
        by_x = weight.sum(-2).unsqueeze(-1) * x - weight.mT @ z
        by_x[..., : ctx.size, :] += weight.sum(-1, keepdim=True) * z - weight @ x
        by_x = by_x.mul_(2 * ctx.factor).div_(lengthscale)
        grad_lengthscale = None
        if ctx.needs_input_grad[1]:
            grad_lengthscale = (by_x * x).sum(-2, keepdim=True).neg_().sum_to_size(lengthscale.shape)
        return by_x.sum_to_size(ctx.shape), grad_lengthscale, grad_scale, None, None


def _stationary_blocks(values: Values, x: Tensor, size: int, profile: str) -> tuple[Tensor, Tensor, Tensor]:
    lengthscale, *scale = values
    variance = scale[0].unsqueeze(-1).unsqueeze(-1) if scale else None
    return _StationaryBlocks.apply(x, lengthscale, variance, size, profile)


def _constant_variance(values: Values, x: Tensor) -> Tensor:
    lengthscale, *scale = values
    batch = torch.broadcast_shapes(lengthscale.shape[:-2], x.shape[:-2])
    one = scale[0].unsqueeze(-1) if scale else torch.ones((), dtype=x.dtype, device=x.device)
    return one.expand(*torch.broadcast_shapes(one.shape[:-1], batch), x.size(-2))


def _is_smooth(kernel: Kernel) -> bool:
    """Whether a kernel is a function of the squared distance that is linear near zero."""
    return type(kernel) is kernels.RBFKernel or (type(kernel) is kernels.MaternKernel and kernel.nu > 0.5)


def _lower_stationary(kernel: Kernel) -> LoweredKernel:
    profile = "rbf" if type(kernel) is kernels.RBFKernel else f"matern{int(2 * kernel.nu)}2"
    return LoweredKernel(
        (Leaf(kernel, "lengthscale"),),
        lambda values, x1, x2: _stationary(values, x1, x2, profile),
        _constant_variance,
        _spread,
        lambda values, x, size: _stationary_blocks(values, x, size, profile),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The others, and compositions
# ---------------------------------------------------------------------------------------------------------------------


def _lower_exponential(kernel: Kernel) -> LoweredKernel:
    """Matérn-1/2, whose kink makes the error of a distance that of its square's root: distances come from differences."""

    def covariance(values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        first, second = scaled(x1, x2, values[0])
        second = first if second is None else second
        return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist").neg().exp()

    return LoweredKernel((Leaf(kernel, "lengthscale"),), covariance, _constant_variance, _spread)


def _lower_rational_quadratic(kernel: Kernel) -> LoweredKernel:
    def covariance(values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        lengthscale, alpha = values
        alpha = alpha.unsqueeze(-1)
        squared = _SquaredDistance.apply(*scaled(x1, x2, lengthscale))
        return torch.exp(-alpha * torch.log1p(squared / (2 * alpha)))

    leaves = Leaf(kernel, "lengthscale"), Leaf(kernel, "alpha")
    return LoweredKernel(leaves, covariance, lambda values, x: _constant_variance(values[:1], x), _spread)


class _SquaredDistance(torch.autograd.Function):
    """:func:`squared_distance` with a gradient that never passes through the clamp."""

    @staticmethod
    def forward(ctx, x1: Tensor, x2: Tensor | None) -> Tensor:
        ctx.save_for_backward(x1, x2)
        return squared_distance(x1, x1 if x2 is None else x2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x1, x2 = ctx.saved_tensors
        if x2 is None:
            return _pull(grad + grad.mT, x1, x1, 2.0), None
        return _pull(grad, x1, x2, 2.0), _pull(grad.mT, x2, x1, 2.0)


def _lower_linear(kernel: Kernel) -> LoweredKernel:
    return LoweredKernel(
        (Leaf(kernel, "variance"),),
        lambda values, x1, x2: (x1 * values[0]) @ x2.mT,
        lambda values, x: (x.square() * values[0]).sum(-1),
    )


def _lower_scale(kernel: Kernel) -> LoweredKernel | None:
    base = lower(kernel.base_kernel, ignore_active_dims=True)  # the scale kernel has taken them over
    if base is None:
        return None
    leaves = (*base.leaves, Leaf(kernel, "outputscale"))
    if _is_smooth(kernel.base_kernel):
        # Takes the scale into the same pass over the matrix.
        return base._replace(leaves=leaves)
    return LoweredKernel(
        leaves,
        lambda values, x1, x2: values[-1].unsqueeze(-1).unsqueeze(-1) * base.covariance(values[:-1], x1, x2),
        lambda values, x: values[-1].unsqueeze(-1) * base.variance(values[:-1], x),
        base.spread,
    )


def _lower_composition(kernel: Kernel, combine: Callable[[Tensor, Tensor], Tensor]) -> LoweredKernel | None:
    parts = [lower(part) for part in kernel.kernels]
    if any(part is None for part in parts):
        return None
    lowered = [part for part in parts if part is not None]
    pairs = list(zip(lowered, spans(len(part.leaves) for part in lowered), strict=True))

    fold = functools.partial(functools.reduce, combine)

    def blocks(values: Values, x: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        found = [part.blocks(values[span], x, size) for part, span in pairs]  # type: ignore[misc]
        inducing, cross, spread = (list(results) for results in zip(*found, strict=True))
        return fold(inducing), fold(cross), torch.stack(spread).amax()

    spreads = [(part.spread, span) for part, span in pairs if part.spread is not None]
    return LoweredKernel(
        tuple(leaf for part in lowered for leaf in part.leaves),
        lambda values, x1, x2: fold([part.covariance(values[span], x1, x2) for part, span in pairs]),
        lambda values, x: fold([part.variance(values[span], x) for part, span in pairs]),
        (lambda values, x1, x2: torch.stack([spread(values[span], x1, x2) for spread, span in spreads]).amax())
        if spreads
        else None,
        blocks if all(part.blocks is not None for part in lowered) else None,
    )


def lower(kernel: Kernel, *, ignore_active_dims: bool = False) -> LoweredKernel | None:
    """Lower a kernel with its current parameters, or return None if it is not one of the common ones.

    Subclasses of the common kernels are not lowered: they may compute something else.

    :param kernel: Any GPyTorch kernel.
    :param ignore_active_dims: Whether the inputs have been selected already, as in a lazily evaluated kernel.
    """
    kind = type(kernel)
    lowered: LoweredKernel | None
    if _is_smooth(kernel):
        lowered = _lower_stationary(kernel)
    elif kind is kernels.MaternKernel:
        lowered = _lower_exponential(kernel)
    elif kind is kernels.RQKernel:
        lowered = _lower_rational_quadratic(kernel)
    elif kind is kernels.LinearKernel:
        lowered = _lower_linear(kernel)
    elif kind is kernels.ScaleKernel:
        lowered = _lower_scale(kernel)
    elif kind is kernels.AdditiveKernel:
        lowered = _lower_composition(kernel, torch.add)
    elif kind is kernels.ProductKernel:
        lowered = _lower_composition(kernel, torch.mul)
    else:
        lowered = None
    if lowered is None or kernel.active_dims is None or ignore_active_dims:
        return lowered
    return _select(lowered, kernel.active_dims)


def _select(lowered: LoweredKernel, dims: Tensor) -> LoweredKernel:
    def covariance(values: Values, x1: Tensor, x2: Tensor) -> Tensor:
        first = x1.index_select(-1, dims)
        return lowered.covariance(values, first, first if x1 is x2 else x2.index_select(-1, dims))

    spread, blocks = lowered.spread, lowered.blocks
    return LoweredKernel(
        lowered.leaves,
        covariance,
        lambda values, x: lowered.variance(values, x.index_select(-1, dims)),
        None
        if spread is None
        else lambda values, x1, x2: spread(values, x1.index_select(-1, dims), x2.index_select(-1, dims)),
        None if blocks is None else lambda values, x, size: blocks(values, x.index_select(-1, dims), size),
    )


def lower_lazy(covar: LinearOperator) -> LoweredKernel | None:
    """The lowered kernel of a lazily evaluated one, if it is of a common kind and compares the inputs with themselves."""
    if not isinstance(covar, LazyEvaluatedKernelTensor) or covar.x1 is not covar.x2:
        return None
    if covar.last_dim_is_batch or covar.params:
        return None
    return lower(covar.kernel, ignore_active_dims=True)
