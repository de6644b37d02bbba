r"""Sums over the data, a chunk at a time: the one Gram loop, and the collapsed bound with its derivative.

Every collapsed bound needs the data only through :math:`\sum_n a_n a_n^\top/\sigma_n^2`,
:math:`\sum_n a_n y_n/\sigma_n^2`, a misfit and :math:`d_n/\sigma_n^2`. Sums are kept in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Rows
from ..maths.bounds import PENALTIES
from ..maths.collapsed import Collapsed, collapse, collapsed_log_prob
from ..maths.fused import factor_gradient, once_differentiable
from ..maths.linalg import full_precision, project, residual_variance, solve_lower_transposed
from ..modes import chunks
from ..prior import PriorBlocks, Projection, Projector

# Numbers of all projections together up to which they are kept, not computed again for the derivative.
_KEPT = 2**25


class DataSums(NamedTuple):
    r"""What a collapsed bound needs of the data, in float64.

    :param gram: :math:`\sum_n a_n a_n^\top \lambda_n`, ``... x M x M``.
    :param linear: :math:`\sum_n a_n (y_n - \mu(x_n)) \lambda_n`, ``... x M``.
    :param residual: :math:`d_n`, ``... x N``.
    """

    gram: Tensor
    linear: Tensor
    residual: Tensor

    def collapse(self) -> Collapsed:
        """The best q(w)."""
        return collapse(self.gram, self.linear)


@torch.no_grad()
def data_sums(batches: Iterable[tuple[Projection, Tensor, Tensor]]) -> DataSums:
    r"""Gather the sums.

    :param batches: Projection, targets and precisions :math:`\lambda_n = 1/\sigma_n^2` of each chunk; zero where a
        target is missing.
    """
    gram: Tensor | float = 0.0
    linear: Tensor | float = 0.0
    residuals = []
    for points, y, precision in batches:
        weighted = points.matrix * precision.to(points.matrix.dtype).unsqueeze(-2)
        gram = gram + (weighted @ points.matrix.mT).double()
        linear = linear + (weighted @ (y - points.mean).to(weighted.dtype).unsqueeze(-1)).squeeze(-1).double()
        residuals.append(points.residual.double())
    assert isinstance(gram, Tensor)
    assert isinstance(linear, Tensor)
    return DataSums(gram, linear, torch.cat(residuals, dim=-1))


def projected_batches(
    projector: Projector, x: Rows, y: Tensor, precision: Tensor, batch_size: int
) -> Iterator[tuple[Projection, Tensor, Tensor]]:
    """The chunks of a data set, for :func:`data_sums`."""
    for rows in chunks(len(x), batch_size):
        yield projector(x[rows]), y[..., rows], precision[..., rows]


class _Chunk(NamedTuple):
    rows: slice
    prior: PriorBlocks
    matrix: Tensor
    residual: Tensor


# A tensor of the caller, and what the prior is computed from in its place: the same, or a copy without its graph.
Leaf = tuple[Tensor, Tensor]


def leaves_of(*modules: torch.nn.Module) -> list[Leaf]:
    """The parameters of the prior's modules, each once.

    :raises TypeError: If a module has a tensor with a graph in place of a parameter, which would get no gradient.
    """
    for child in {id(child): child for module in modules for child in module.modules()}.values():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise TypeError(
                    f"{name} of {type(child).__name__} is a tensor with a gradient and no parameter, which a collapsed bound in "
                    "chunks does not follow: use TighterInducingPointKernel, or tighter_gp.bounds."
                )
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return [(parameter, parameter) for parameter in parameters.values()]


def stand_in(tensor: Tensor) -> Leaf:
    """A tensor and a copy that depends on no other leaf, as inducing points may on inputs."""
    return tensor, tensor.detach().requires_grad_(tensor.requires_grad)


class _KnownBound(torch.autograd.Function):
    """A value whose derivatives are at hand."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=True)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.to(gradient) * gradient for gradient in ctx.gradients)


def chunked_bound(
    projector: Projector, x: Tensor, y: Tensor, noise: Tensor, bound: str, chunk_size: int, leaves: list[Leaf]
) -> Tensor:
    r"""A collapsed bound of one model, summed over the data, whose derivative is written out.

    One pass over the data gathers the sums, a second one derives; kernels and projections of the first are kept for the
    second where they are few. No graph of a projection is ever built.

    :param projector: Of the model's prior, with its noise.
    :param x: Inputs, ``N x D``.
    :param y: Targets, ``N``.
    :param noise: Noise variances, ``N``.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
    :param chunk_size: Rows per chunk.
    :param leaves: The tensors that the prior depends on; gradients flow into them, ``y`` and ``noise``.
    :return: A scalar; it cannot be differentiated twice.
    """
    leaves = [leaf for leaf in leaves if leaf[0].requires_grad]
    needs_grad = torch.is_grad_enabled() and (bool(leaves) or y.requires_grad or noise.requires_grad)
    keeps = x.size(-2) * projector.num_inducing <= _KEPT
    with torch.no_grad(), full_precision(x.device.type):
        projector.settle(x[rows] for rows in chunks(x.size(-2), 65536))
        walk = lambda: _walk(projector, x, chunk_size, needs_grad)
        kept = list(walk()) if keeps else None
        source = (lambda: iter(kept)) if kept is not None else walk
        sums = data_sums(
            (
                Projection(chunk.prior.mean, chunk.matrix, chunk.residual),
                y[chunk.rows],
                noise[chunk.rows].reciprocal(),
            )
            for chunk in source()
        )
        core = sums.collapse()
        value, gradients = _derive(projector, source(), y, noise, bound, core, sums.residual, leaves, needs_grad)
        penalty = PENALTIES[bound](sums.residual, noise.double())
        log_prob = collapsed_log_prob(value, core.log_det, noise.double().log().sum(), len(y))
        result = (log_prob - penalty).to(y.dtype)
    if not gradients:
        return result
    tensors, slopes = zip(*gradients, strict=True)
    return _KnownBound.apply(result, slopes, *tensors)


def _walk(projector: Projector, x: Tensor, chunk_size: int, with_graph: bool) -> Iterator[_Chunk]:
    for rows in chunks(x.size(-2), chunk_size):
        with torch.set_grad_enabled(with_graph):
            prior, factor = projector.factorized(x[rows])
        matrix = project(factor, prior.cross_covar)
        yield _Chunk(rows, prior, matrix, residual_variance(prior.data_variance, matrix))


def _penalty_slope(bound: str, residual: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    r"""Derivatives of the price in :math:`d_n` and in :math:`\sigma_n^2`."""
    if bound == "tighter":
        slope = 0.5 / (noise + residual)
    elif bound == "titsias":
        slope = 0.5 / noise
    else:
        slope = 0.5 / (noise * (1 + (residual / noise).mean()))
    return slope, -slope * residual / noise


@torch.no_grad()
def _derive(
    projector: Projector,
    source: Iterator[_Chunk],
    y: Tensor,
    noise: Tensor,
    bound: str,
    core: Collapsed,
    residual: Tensor,
    leaves: list[Leaf],
    needs_grad: bool,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    r"""The quadratic form as a sum of squares, and the bound's gradients.

    With :math:`w` at its optimum, and :math:`r_n = y_n - a_n^\top w`,

    .. math:: \frac{\partial F}{\partial a_n} = 2 u_n a_n - \frac{B^{-1} a_n - r_n w}{\sigma_n^2}, \qquad
              u_n = \frac{\partial}{\partial d_n} \text{price}
    """
    weights = core.weights
    quadratic = weights.square().sum()
    inverse = torch.cholesky_inverse(core.factor) if needs_grad else None
    slope_d, slope_noise = _penalty_slope(bound, residual, noise.double())
    sums = [torch.zeros_like(leaf) for leaf, _ in leaves]
    outer = torch.zeros_like(core.factor)
    grad_y, grad_noise = torch.zeros_like(y), torch.zeros_like(noise)
    for rows, prior, matrix, _ in source:
        dtype = matrix.dtype
        precision = noise[rows].to(dtype).reciprocal()
        misfit = (y[rows] - prior.mean).to(dtype) - weights.to(dtype) @ matrix
        quadratic = quadratic + (misfit.square() * precision).double().sum()
        if inverse is None:
            continue
        smoothed = inverse.to(dtype) @ matrix
        slope = slope_d[rows].to(dtype)
        pull = (misfit * precision).unsqueeze(-2)
        grad_matrix = matrix * (2 * slope) - smoothed * precision + weights.to(dtype).unsqueeze(-1) * pull
        outer += (grad_matrix @ matrix.mT).double()
        explained = (matrix * smoothed).sum(-2)
        grad_y[rows] = -(misfit * precision)
        grad_noise[rows] = (
            0.5 * precision * ((explained + misfit.square()) * precision - 1) - slope_noise[rows].to(dtype)
        ).to(noise.dtype)
        outputs = [prior.cross_covar, prior.data_variance, prior.mean]
        assert projector.factor is not None
        cotangents = [
            solve_lower_transposed(projector.factor.to(dtype), grad_matrix),
            -slope,
            (misfit * precision).to(prior.mean.dtype),
        ]
        if rows.stop == len(y):
            # With the last chunk: what K_ZZ and K_ZX give cancels, in their precision and not in that of the leaves.
            outputs.append(prior.inducing_covar)
            cotangents.append(factor_gradient(projector.factor, outer).to(prior.inducing_covar.dtype))
        _add_gradients(sums, outputs, cotangents, [inner for _, inner in leaves])
    if inverse is None:
        return quadratic, []
    found = [*zip((leaf for leaf, _ in leaves), sums, strict=True), (y, grad_y), (noise, grad_noise)]
    return quadratic, [(tensor, gradient) for tensor, gradient in found if tensor.requires_grad]


def _add_gradients(sums: list[Tensor], outputs: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor]) -> None:
    kept = [(output, cotangent) for output, cotangent in zip(outputs, cotangents, strict=True) if output.requires_grad]
    if not kept or not leaves:
        return
    gradients = torch.autograd.grad(
        [output for output, _ in kept],
        leaves,
        [cotangent for _, cotangent in kept],
        allow_unused=True,
        retain_graph=True,
    )
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total += gradient
