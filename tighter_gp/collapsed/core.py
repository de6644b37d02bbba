r"""The one collapsed core: sums over the data, the best q(w), and the terms of the bound at that q(w).

The data enter the best q(w) only through :math:`\sum_n a_n a_n^\top/\sigma_n^2` and :math:`\sum_n a_n y_n/\sigma_n^2`. A
collapsed bound is the uncollapsed one there,

.. math:: \sum_n \mathbb E_{\mathcal N(\mu_n, s_n)} [\log p(y_n \mid f_n)] - \mathrm{KL}[q(w) \Vert p(w)] - \text{price}(d)

and since q(w) is the best, the derivative of these terms with q(w) held fixed is that of the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..maths.bounds import PENALTIES, gaussian_expected_log_prob, whitened_kl
from ..maths.collapsed import collapse
from ..maths.derivatives import once_differentiable
from ..maths.linalg import full_precision
from ..maths.moments import Whitened, projected_mean
from ..prior import Prior, Projection
from .prices import prices_of_sets, rows_within

# Numbers of all projections together up to which their graphs are kept; beyond, each chunk is projected twice.
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

    def best_q(self) -> Whitened:
        r"""The best q(w), :math:`\mathcal N(B^{-1} l, B^{-1})` with :math:`B = I + G`."""
        core = collapse(self.gram, self.linear)
        return Whitened(core.weights, core.root)


@torch.no_grad()
def data_sums(batches: Iterable[tuple[Projection, Tensor, Tensor]]) -> DataSums:
    r"""Gather the sums.

    :param batches: Projection, targets and precisions :math:`\lambda_n = 1/\sigma_n^2` of each chunk; zero where a
        target is missing.
    """
    gram = linear = torch.zeros((), dtype=torch.float64, device="cpu")
    residuals = []
    for points, y, precision in batches:  # A  [..., M, B], y and 1 / sigma_n^2  [..., B]
        weighted = points.matrix * precision.to(points.matrix.dtype).unsqueeze(-2)  # [..., M, B]
        misfit = (y - points.mean).to(weighted.dtype).unsqueeze(-1)  # [..., B, 1]
        gram = gram + (weighted @ points.matrix.mT).double()  # [..., M, M]
        linear = linear + (weighted @ misfit).squeeze(-1).double()  # [..., M]
        residuals.append(points.residual.double())
    return DataSums(gram, linear, torch.cat(residuals, dim=-1))


def sums_of(q: Whitened) -> dict[str, Tensor]:
    """The sums over data of which q(w) would be the best; a point mass gets a tiny variance."""
    stddev = torch.full_like(q.mean, 1e-6) if q.stddev is None else q.stddev
    root = (torch.diag_embed(stddev) if q.root is None else q.root).double()
    precision = torch.cholesky_inverse(torch.linalg.cholesky(root @ root.mT))  # S^-1 = I + G  [M, M]
    return {"gram": precision - torch.eye(len(root)).to(root), "linear": precision @ q.mean.double()}


def expected_log_prob(points: Projection, y: Tensor, noise: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    r""":math:`\sum_n \mathbb E_{\mathcal N(\mu_n, s_n)} [\log p(y_n \mid f_n)]`, the data term without its residual.

    :param mean: :math:`m` of q(w), ``... x M``: a constant here.
    :param covariance: :math:`S` of q(w), ``... x M x M``.
    """
    matrix = points.matrix
    location = points.mean + projected_mean(matrix, Whitened(mean.to(matrix.dtype)))  # mu_n  [..., B]
    explained = (matrix * (covariance.to(matrix.dtype) @ matrix.detach())).sum(-2)  # s_n = a_n'S a_n
    explained = 2 * explained - explained.detach()  # whose slope in a_n is 2 S a_n: one product, not two
    return gaussian_expected_log_prob(y, location, explained, noise.to(explained.dtype)).double().sum(-1)


class _Differentiated(torch.autograd.Function):
    """A value whose gradients were computed along with it."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=True)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.to(gradient) * gradient for gradient in ctx.gradients)


def chunked_bound(
    prior: Prior,
    at: Callable[[Any], Tensor],
    y: Tensor,
    noise: Tensor,
    bound: str,
    chunk_size: int,
    leaves: Sequence[tuple[Tensor, Tensor]] = (),
    sets: Tensor | None = None,
) -> Tensor:
    r"""A collapsed bound, summed over the data, with its gradient.

    One pass over the data gathers the sums, a second one differentiates the terms chunk by chunk.

    :param prior: The model's prior.
    :param at: From a slice or positions of rows to their inputs, ``... x B x D``.
    :param y: Targets, ``... x N``.
    :param noise: Noise variances, ``... x N``.
    :param bound: What the residual costs; see :func:`~tighter_gp.collapsed.prices.price`.
    :param chunk_size: Rows per chunk.
    :param leaves: What the bound depends on: tensors of the caller, each with the leaf that is seen here in its place.
    :param sets: For ``"block"`` and ``"neighbours"``: the points that may be correlated.
    :return: Shape ``...``; it cannot be differentiated twice.
    """
    pairs = [pair for pair in leaves if pair[0].requires_grad and torch.is_grad_enabled()]
    outside, inside = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    gradients = [torch.zeros_like(tensor) for tensor in inside]

    def add_gradients(value: Tensor) -> None:
        found = torch.autograd.grad(value, inside, allow_unused=True, retain_graph=True)
        for total, gradient in zip(gradients, found, strict=True):
            total += 0 if gradient is None else gradient

    num_data = y.size(-1)
    rows_of = [slice(start, start + chunk_size) for start in range(0, max(1, num_data), chunk_size)]
    with torch.set_grad_enabled(bool(pairs)), full_precision(y.device.type):
        prior = prior.factorized(at(rows_of[0]))
        project = lambda rows: prior(at(rows))
        kept = list(map(project, rows_of)) if num_data * prior.num_inducing <= _KEPT else None
        walk = lambda: zip(rows_of, map(project, rows_of) if kept is None else kept, strict=True)
        precision = noise.detach().reciprocal()  # 1 / sigma_n^2  [..., N]
        sums = data_sums((points, y[..., rows], precision[..., rows]) for rows, points in walk())
        best, residual = collapse(sums.gram, sums.linear), sums.residual.requires_grad_(bool(pairs))
        covariance = torch.cholesky_inverse(best.factor)  # S = (I + G)^-1  [..., M, M]
        cost = PENALTIES[bound](residual, noise.double()) if bound in PENALTIES else residual.sum(-1) * 0
        # d price / d d_n  [..., N]
        slope = torch.autograd.grad(cost, residual, retain_graph=True)[0] if pairs else torch.zeros_like(residual)
        # Values so far, and terms whose gradients are still to be taken.
        total, waiting = -whitened_kl(Whitened(best.weights, best.root)) - cost.detach(), -cost
        for rows, points in walk():
            term = expected_log_prob(points, y[..., rows], noise[..., rows], best.weights, covariance)
            total = total + term.detach()
            # The price moves with d at this rate.
            waiting = waiting + term - (slope[..., rows] * points.residual).sum(-1)
            if pairs and (kept is None or rows is rows_of[-1]):
                add_gradients(waiting)
                waiting = torch.zeros_like(total)
        for cost in prices_of_sets(bound, noise, rows_within(prior, at), sets):
            total = total - cost.detach()
            if pairs:
                add_gradients(-cost)
    value = total.to(y.dtype)
    return _Differentiated.apply(value, gradients, *outside) if pairs else value


def detached(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor, and its values as a leaf of another graph."""
    return tensor, tensor.detach().requires_grad_(tensor.requires_grad)
