"""f, or y under Gaussian noise, at each point by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    BlockDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    SumBatchLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from ..data import input_rows
from ..likelihoods.expectations import correlates_tasks, event_variance
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
        place = (..., rows, slice(None)) if self.is_several else (..., rows)
        covariance = None if self.covariance is None else self.covariance[..., rows, :, :]
        return Marginals(self.mean[place], self.variance[place], covariance, self.is_several)

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
    if not correlates_tasks(q):
        return Marginals(q.mean, event_variance(q), None, isinstance(q, MultitaskMultivariateNormal))
    covariance = _within_points(q.lazy_covariance_matrix, q.event_shape, q._interleaved)
    return Marginals(q.mean, covariance.diagonal(dim1=-1, dim2=-2), covariance, True)


def _within_points(covar: LinearOperator, shape: torch.Size, interleaved: bool) -> Tensor:
    """Covariance of the tasks of each point, ``... x N x T x T``, without the whole matrix where its form is known."""
    if isinstance(covar, SumLinearOperator):
        return reduce(torch.add, (_within_points(part, shape, interleaved) for part in covar.linear_ops))
    if isinstance(covar, SumBatchLinearOperator):
        return _within_points(covar.base_linear_op, shape, interleaved).sum(-4)
    if isinstance(covar, KroneckerProductLinearOperator) and interleaved and len(covar.linear_ops) == 2:
        points, tasks = covar.linear_ops  # as in an LMC
        return points.diagonal(dim1=-1, dim2=-2)[..., None, None] * to_dense(tasks).unsqueeze(-3)  # k_nn times T x T
    places = torch.arange(shape.numel(), device=covar.device)
    places = (places.view(shape) if interleaved else places.view(shape[::-1]).mT).unsqueeze(-1)  # [N, T, 1]
    return covar[..., places, places.mT]


def joined(parts: Sequence[Marginals]) -> Marginals:
    """The points of all chunks, one chunk after the other."""
    if len(parts) == 1:
        return parts[0]
    is_several = parts[0].is_several
    means, variances, covariances, _ = zip(*parts, strict=True)
    covariance = None if covariances[0] is None else torch.cat(covariances, -3)
    dim = parts[0].point_dim
    return Marginals(torch.cat(means, dim), torch.cat(variances, dim), covariance, is_several)


def add_noise(likelihood: Any, f: Marginals, inputs: Any = None, **given: Tensor) -> Marginals:
    """Y under a Gaussian likelihood: f with the noise added, once.

    :param inputs: The points, for noise that depends on them.
    :param given: ``noise=``, a variance per point or one for all; ``tasks=``, the task of each point.
    """
    if isinstance(likelihood, likelihoods.DirichletClassificationLikelihood):
        raise TypeError(
            "Gaussian noise on Dirichlet labels is no class: take the softmax of draws from predict's q(f)."
        )
    shape, matrix = f.mean.shape, None
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
        one = torch.Size([*shape[:-2], 1, shape[-1]])
        matrix = likelihood._shaped_noise_covar(one).to_dense().unsqueeze(-3)  # [..., 1, T, T]
        noise = matrix.diagonal(dim1=-1, dim2=-2)
        if getattr(likelihood, "rank", 0) > 0 and f.covariance is None:
            f = f._replace(covariance=torch.diag_embed(f.variance))
    else:
        noise = _noise_at(likelihood, f, inputs, **given)
    variance = (f.variance + noise).expand(shape)  # [..., N] or [..., N, T]
    if f.covariance is None:
        return f._replace(variance=variance)
    matrix = torch.diag_embed(noise.expand(shape)) if matrix is None else matrix
    return f._replace(variance=variance, covariance=f.covariance + matrix)


def _noise_at(likelihood: Any, f: Marginals, inputs: Any, **given: Tensor) -> Tensor:
    """Noise variances, broadcastable to the mean of f."""
    shape, column = f.mean.shape, getattr(likelihood, "task_feature_index", None)
    if inputs is not None and has_own_noise(likelihood):
        x = input_rows(inputs, f.mean)[:]
        return likelihood._shaped_noise_covar(shape, x, **given).diagonal(dim1=-1, dim2=-2)
    if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood) and "noise" not in given:
        raise ValueError(
            f"{type(likelihood).__name__} knows the noise of the training points only: pass noise=, one variance per "
            "point, or one number for all."
        )
    if "noise" in given:
        given["noise"] = given["noise"].to(f.mean).expand(*given["noise"].shape[:-1], shape[-1])
    if inputs is not None and column is not None and "tasks" not in given:
        given["tasks"] = input_rows(inputs, f.mean)[:][..., column].reshape(-1)
    return gaussian_noise(likelihood, shape[: f.point_dim], shape[f.point_dim :], **given)
