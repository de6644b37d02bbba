"""f, or y under Gaussian noise, at each point by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from ..likelihoods.properties import event_variance, has_gaussian_noise, has_own_noise


class FunctionValues(NamedTuple):
    """What is known of f, or of y under Gaussian noise, at each point by itself.

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

    def rows(self, rows: slice) -> FunctionValues:
        """Some of the points."""
        cut = lambda value, dim: value.narrow(dim, rows.start, rows.stop - rows.start)
        covariance = None if self.covariance is None else cut(self.covariance, -3)
        dim = self.point_dim
        return FunctionValues(cut(self.mean, dim), cut(self.variance, dim), covariance, self.is_several)

    def map(self, function: Callable[[Tensor], Tensor]) -> FunctionValues:
        """The same function of all tensors."""
        covariance = None if self.covariance is None else function(self.covariance)
        return FunctionValues(function(self.mean), function(self.variance), covariance, self.is_several)

    def draw(self) -> Tensor:
        """One draw, the functions of a point together."""
        return self.place(torch.randn(self.mean.shape, dtype=self.mean.dtype, device=self.mean.device))

    def place(self, draws: Tensor) -> Tensor:
        """Values from standard normal draws, ``K x ... x N x T``."""
        if self.covariance is None:
            return self.mean + self.variance.clamp_min(0).sqrt() * draws
        scales, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * scales.clamp_min(0).sqrt().unsqueeze(-2)
        return self.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)


def function_values(q: MultivariateNormal) -> FunctionValues:
    """The marginals of q(f) at each point; functions that are correlated keep their covariance.

    :param q: q(f), ``... x N`` or ``... x N x T``.
    """
    covar = q.lazy_covariance_matrix
    if not isinstance(q, MultitaskMultivariateNormal):
        return FunctionValues(q.mean, event_variance(q))
    num_points, num_tasks = q.event_shape
    # Blocks of the points of a task: the tasks are independent.
    blocks = BlockInterleavedLinearOperator if q._interleaved else BlockDiagLinearOperator
    if isinstance(covar, blocks) or (q._interleaved and isinstance(covar, DiagLinearOperator)):
        return FunctionValues(q.mean, event_variance(q), None, True)
    if q._interleaved:
        covariance = _point_blocks(covar, num_tasks)
    else:
        matrix = to_dense(covar).unflatten(-1, (num_tasks, num_points)).unflatten(-3, (num_tasks, num_points))
        covariance = matrix.diagonal(dim1=-3, dim2=-1).movedim(-1, -3)
    return FunctionValues(q.mean, covariance.diagonal(dim1=-1, dim2=-2), covariance, True)


def as_distribution(f: FunctionValues) -> MultivariateNormal:
    """The Gaussian with these marginals in which points are independent."""
    if not f.is_several:
        return MultivariateNormal(f.mean, DiagLinearOperator(f.variance))
    if f.covariance is None:
        return MultitaskMultivariateNormal(f.mean, DiagLinearOperator(f.variance.flatten(-2)))
    return MultitaskMultivariateNormal(f.mean, BlockDiagLinearOperator(DenseLinearOperator(f.covariance)))


def joined(
    parts: Iterable[tuple[slice, FunctionValues]], num_points: int, dtype: torch.dtype | None = None
) -> FunctionValues:
    """The points of all chunks, at least one.

    Room for all is made at once: results kept chunk by chunk would lie between the large arrays and fragment the memory.

    :param parts: Which points, and what is known of them.
    :param num_points: Of all.
    :param dtype: Of the result; default that of the first chunk.
    """
    whole: FunctionValues | None = None
    for rows, f in parts:
        if whole is None:
            room = lambda value, dim: value.new_empty(
                [*value.shape[:dim], num_points, *value.shape[dim:][1:]], dtype=dtype
            )
            covariance = None if f.covariance is None else room(f.covariance, -3)
            mean, variance = (room(value, f.point_dim) for value in (f.mean, f.variance))
            whole = FunctionValues(mean, variance, covariance, f.is_several)
        for target, source in zip(whole.rows(rows)[:3], f[:3], strict=True):
            if target is not None and source is not None:
                target.copy_(source)
    assert whole is not None
    return whole


def _point_blocks(covar: Any, num_tasks: int) -> Tensor:
    """Covariance of the tasks of each point, ``... x N x T x T``, without the whole matrix where its form is known."""
    if isinstance(covar, SumLinearOperator):
        first, *others = (_point_blocks(part, num_tasks) for part in covar.linear_ops)
        return sum(others, start=first)
    if isinstance(covar, SumBatchLinearOperator):
        return _point_blocks(covar.base_linear_op, num_tasks).sum(-4)
    if isinstance(covar, KroneckerProductLinearOperator) and covar.linear_ops[-1].size(-1) == num_tasks:
        *points, tasks = covar.linear_ops
        if len(points) == 1:
            variance = points[0].diagonal(dim1=-1, dim2=-2)
            return variance.unsqueeze(-1).unsqueeze(-1) * to_dense(tasks).unsqueeze(-3)
    if isinstance(covar, BlockDiagLinearOperator) and covar.base_linear_op.size(-1) == num_tasks:
        return to_dense(covar.base_linear_op)
    if isinstance(covar, DiagLinearOperator):
        return torch.diag_embed(covar.diagonal(dim1=-1, dim2=-2).unflatten(-1, (-1, num_tasks)))
    count = covar.size(-1) // num_tasks
    blocks = to_dense(covar).unflatten(-1, (count, num_tasks)).unflatten(-3, (count, num_tasks))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def takes_noise(likelihood: Any) -> bool:
    """Whether y is f and Gaussian noise; labels with a Dirichlet likelihood are not, though it is trained as if."""
    dirichlet = likelihoods.DirichletClassificationLikelihood
    return has_gaussian_noise(likelihood) and not isinstance(likelihood, dirichlet)


def add_noise(
    likelihood: Any, f: FunctionValues, *, inputs: Tensor | None = None, noise: Any = None, tasks: Any = None
) -> FunctionValues:
    """Moments of y under a Gaussian likelihood: f with the noise added, once.

    :param likelihood: Any Gaussian likelihood.
    :param f: f at the points.
    :param inputs: The points, for noise that depends on them.
    :param noise: Variance per point, ``... x N``, or one: needed for
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`, else in place of the likelihood's own.
    :param tasks: For :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood`: the task of each point, ``N``.
    """
    mean = f.mean
    is_own = has_own_noise(likelihood)
    if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood) and not is_own:
        if noise is None:
            raise ValueError(
                f"{type(likelihood).__name__} knows the noise of the training points only: pass noise=, one variance per "
                "point, or one number for all."
            )
        added = _variances(noise, mean) + likelihood.second_noise
    elif isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
        matrix = likelihood._shaped_noise_covar(torch.Size([*mean.shape[:-2], 1, mean.size(-1)])).to_dense()
        return _add_matrix(f, matrix.detach().unsqueeze(-3), getattr(likelihood, "rank", 0) > 0)
    elif isinstance(likelihood, likelihoods.HadamardGaussianLikelihood) and not is_own:
        added = likelihood.noise[..., _task_of_each_point(likelihood, inputs, tasks, mean)]
    elif isinstance(likelihood, likelihoods.GaussianLikelihood) and not is_own and noise is not None:
        added = _variances(noise, mean)
    elif isinstance(likelihood, likelihoods.GaussianLikelihood) and not is_own:
        value = likelihood.noise
        added = value.reshape(*value.shape[:-1], *(1 for _ in range(-f.point_dim)))
    else:
        given = () if inputs is None else (inputs,)
        further = {name: value for name, value in {"noise": noise, "tasks": tasks}.items() if value is not None}
        added = likelihood._shaped_noise_covar(mean.shape, *given, **further).diagonal(dim1=-1, dim2=-2)
    variance = (f.variance + added.detach()).expand(mean.shape)
    if f.covariance is None:
        return f._replace(variance=variance)
    return f._replace(variance=variance, covariance=f.covariance + torch.diag_embed(variance - f.variance))


def _add_matrix(f: FunctionValues, matrix: Tensor, is_full: bool) -> FunctionValues:
    variance = (f.variance + matrix.diagonal(dim1=-1, dim2=-2)).expand(f.mean.shape)
    if f.covariance is None and not is_full:
        return f._replace(variance=variance)
    covariance = torch.diag_embed(f.variance) if f.covariance is None else f.covariance
    return f._replace(variance=variance, covariance=covariance + matrix)


def _variances(noise: Any, mean: Tensor) -> Tensor:
    noise = torch.as_tensor(noise, dtype=mean.dtype, device=mean.device)
    if noise.dim() and noise.size(-1) != mean.size(-1):
        raise ValueError(f"noise= must have one value per point, {mean.size(-1)}; got {tuple(noise.shape)}.")
    return noise


def _task_of_each_point(likelihood: Any, inputs: Tensor | None, tasks: Any, mean: Tensor) -> Tensor:
    if tasks is None:
        if inputs is None or likelihood.task_feature_index is None:
            raise ValueError(
                f"{type(likelihood).__name__} needs the task of each point: pass tasks=, integers of shape N, or build the "
                "likelihood with task_feature_index=."
            )
        tasks = inputs[..., likelihood.task_feature_index]
    tasks = torch.as_tensor(tasks, device=mean.device).long().reshape(-1)
    if len(tasks) != mean.size(-1):
        raise ValueError(f"tasks= must have one value per point, {mean.size(-1)}; got {len(tasks)}.")
    return tasks
