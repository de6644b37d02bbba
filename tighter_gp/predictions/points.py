"""f, or y under Gaussian noise, at each point by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from linear_operator import to_dense
from linear_operator.operators import (
    BlockDiagLinearOperator,
    BlockInterleavedLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    SumBatchLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from ..likelihoods.expectations import event_variance
from ..likelihoods.family import gaussian_noise, has_own_noise


class Marginals(NamedTuple):
    """A Gaussian for each point.

    :param mean: ``... x N``, or ``... x N x T`` for several functions.
    :param variance: Like the mean.
    :param covariance: ``... x N x T x T`` if the functions are correlated.
    :param is_several: Whether there is a dimension of functions.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    is_several: bool = False

    @property
    def point_dim(self) -> int:
        """The dimension of the mean that counts the points, from the end."""
        return -2 if self.is_several else -1

    @property
    def num_points(self) -> int:
        """Number of points."""
        return self.mean.size(self.point_dim)

    def rows(self, rows: slice) -> Marginals:
        """Some of the points."""
        take = lambda value, dim: value.narrow(dim, rows.start, max(0, min(rows.stop, value.size(dim)) - rows.start))
        covariance = None if self.covariance is None else take(self.covariance, -3)
        return Marginals(
            take(self.mean, self.point_dim), take(self.variance, self.point_dim), covariance, self.is_several
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Marginals:
        """The same function of all tensors."""
        covariance = None if self.covariance is None else function(self.covariance)
        return Marginals(function(self.mean), function(self.variance), covariance, self.is_several)

    def place(self, draws: Tensor) -> Tensor:
        """Values of f from standard normal draws, ``K x ... x N x T``; the functions of a point together."""
        if self.covariance is None:
            return self.mean + self.variance.clamp_min(0).sqrt() * draws
        scales, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * scales.clamp_min(0).sqrt().unsqueeze(-2)  # [..., N, T, T]
        return self.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)

    def distribution(self) -> MultivariateNormal:
        """The multivariate normal with these marginals in which points are independent."""
        if not self.is_several:
            return MultivariateNormal(self.mean, DiagLinearOperator(self.variance))
        if self.covariance is None:
            return MultitaskMultivariateNormal(self.mean, DiagLinearOperator(self.variance.flatten(-2)))
        return MultitaskMultivariateNormal(self.mean, BlockDiagLinearOperator(DenseLinearOperator(self.covariance)))


def marginals(q: MultivariateNormal) -> Marginals:
    """Those of q(f), ``... x N`` or ``... x N x T``; functions that are correlated keep their covariance."""
    if not isinstance(q, MultitaskMultivariateNormal):
        return Marginals(q.mean, event_variance(q))
    independent = (
        BlockInterleavedLinearOperator if q._interleaved else BlockDiagLinearOperator
    )  # blocks of a task's points
    if isinstance(q.lazy_covariance_matrix, (independent, DiagLinearOperator)):
        return Marginals(q.mean, event_variance(q), None, True)
    covariance = _point_blocks(q.lazy_covariance_matrix, q.event_shape, q._interleaved)
    return Marginals(q.mean, covariance.diagonal(dim1=-1, dim2=-2), covariance, True)


def _point_blocks(covar: Any, shape: torch.Size, interleaved: bool = True) -> Tensor:
    """Covariance of the tasks of each point, ``... x N x T x T``, without the whole matrix where its form is known."""
    if isinstance(covar, SumLinearOperator):
        return sum(_point_blocks(part, shape, interleaved) for part in covar.linear_ops)  # type: ignore[return-value]
    if isinstance(covar, SumBatchLinearOperator):
        return _point_blocks(covar.base_linear_op, shape, interleaved).sum(-4)
    if isinstance(covar, KroneckerProductLinearOperator) and interleaved and len(covar.linear_ops) == 2:
        points, tasks = covar.linear_ops  # as in an LMC
        return points.diagonal(dim1=-1, dim2=-2)[..., None, None] * to_dense(tasks).unsqueeze(-3)
    if isinstance(covar, BlockDiagLinearOperator) and interleaved:  # as predict returns it
        return to_dense(covar.base_linear_op)
    if isinstance(covar, DiagLinearOperator) and interleaved:
        return torch.diag_embed(covar.diagonal(dim1=-1, dim2=-2).unflatten(-1, shape))
    sizes = shape if interleaved else shape[::-1]
    blocks = to_dense(covar).unflatten(-1, sizes).unflatten(-3, sizes)  # [..., N, T, N, T]
    return (
        blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        if interleaved
        else blocks.diagonal(dim1=-3, dim2=-1).movedim(-1, -3)
    )


def joined(parts: Sequence[Marginals]) -> Marginals:
    """The points of all chunks, one chunk after the other."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    covariance = None if first.covariance is None else torch.cat([part.covariance for part in parts], -3)  # type: ignore[misc]
    mean, variance = (torch.cat([part[i] for part in parts], first.point_dim) for i in (0, 1))  # type: ignore[misc]
    return Marginals(mean, variance, covariance, first.is_several)


def add_noise(likelihood: Any, f: Marginals, inputs: Any = None, **given: Tensor) -> Marginals:
    """Y under a Gaussian likelihood: f with the noise added, once.

    :param inputs: The points, or what gives them for a slice, for noise that depends on them.
    :param given: ``noise=``, a variance per point or one for all; ``tasks=``, the task of each point.
    """
    shape = f.mean.shape
    if isinstance(likelihood, likelihoods.DirichletClassificationLikelihood):
        raise TypeError(
            "Gaussian noise on Dirichlet labels is no class: take the softmax of draws from predict's q(f)."
        )
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
        matrix = likelihood._shaped_noise_covar(torch.Size([*shape[:-2], 1, shape[-1]])).to_dense()
        return _add_matrix(f, matrix.unsqueeze(-3), has_covariance=getattr(likelihood, "rank", 0) > 0)
    if inputs is not None and has_own_noise(likelihood):
        noise = likelihood._shaped_noise_covar(shape, inputs[:], **given).diagonal(dim1=-1, dim2=-2)
    else:
        column = getattr(likelihood, "task_feature_index", None)
        if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood) and "noise" not in given:
            raise ValueError(
                f"{type(likelihood).__name__} knows the noise of the training points only: pass noise=, one variance per "
                "point, or one number for all."
            )
        if inputs is not None and column is not None and "tasks" not in given:
            given = {"tasks": inputs[:][..., column].reshape(-1)}
        if "noise" in given:
            given = {"noise": given["noise"].to(f.mean).expand(*given["noise"].shape[:-1], shape[-1])}
        noise = gaussian_noise(likelihood, shape[: f.point_dim], shape[f.point_dim :], **given)
    variance = (f.variance + noise).expand(shape)
    if f.covariance is None:
        return f._replace(variance=variance)
    return f._replace(variance=variance, covariance=f.covariance + torch.diag_embed(variance - f.variance))


def _add_matrix(f: Marginals, matrix: Tensor, has_covariance: bool) -> Marginals:
    """F with a covariance of the noise of the tasks, ``... x 1 x T x T``."""
    variance = (f.variance + matrix.diagonal(dim1=-1, dim2=-2)).expand(f.mean.shape)
    if f.covariance is None and not has_covariance:
        return f._replace(variance=variance)
    covariance = torch.diag_embed(f.variance) if f.covariance is None else f.covariance
    return f._replace(variance=variance, covariance=covariance + matrix)
