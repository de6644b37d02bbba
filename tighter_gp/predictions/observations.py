"""Predictions of y from a trained model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from torch import Tensor

from ..checks import check_device
from ..collapsed import CollapsedGP
from ..draws import seeded
from ..kernels import TighterInducingPointKernel
from ..modes import chunks, temporary_mode
from ..strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .distribution import PredictiveDistribution, check_arguments
from .latent import predict
from .pointwise import FunctionValues, add_noise, function_values, is_gaussian


@torch.no_grad()
def predict_y(
    model: Any,
    likelihood: Any,
    x: Tensor | np.ndarray,
    *,
    batch_size: int = 1024,
    num_samples: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> PredictiveDistribution:
    r"""What the model says about y at test points, each by itself: means, intervals, densities, classes, samples.

    Every likelihood of GPyTorch and of this package has its own formula or quadrature rule; softmax is integrated over draws
    of all its functions together. Tasks that are correlated stay so within a point.

    :param model: A trained model: a strategy or a collapsed model of this package, GPyTorch's wrappers for several tasks
        around a strategy, a deep GP (a mixture over draws of its hidden layers), or any other that returns q(f). It is left
        in the mode it was in.
    :param likelihood: Its likelihood.
    :param x: Test inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is in
        memory at a time.
    :param batch_size: Points per chunk.
    :param num_samples: Draws where there is no rule: of the functions of a softmax, default 1024, or of the hidden layers
        of a deep GP, default 64.
    :param seed: Of these draws; the global random state is left as it was.
    :param kwargs: Arguments of the likelihood: ``noise=``, one variance per test point, for fixed noise; ``tasks=``, the
        task of each point, for :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood` without ``task_feature_index``;
        those that ``forward`` of a likelihood of your own names, one value per point. Any other is a TypeError.
    :return: A :class:`~tighter_gp.PredictiveDistribution`.

    Example:
        >>> y = tighter_gp.predict_y(model, likelihood, test_x)
        >>> nlpd = -y.log_prob(test_y).mean()
        >>> low, high = y.interval(0.95)
        >>> low.shape == test_y.shape
        True
    """
    check_arguments(likelihood, kwargs)
    like = _floating(model, likelihood)
    x = x if isinstance(x, Tensor) else np.asarray(x)
    arguments = {name: _as_tensor(value, like) for name, value in kwargs.items()}
    num_points = x.shape[0] if len(x.shape) == 1 else x.shape[-2]
    for name, value in arguments.items():
        if value.dim() and value.size(-1) != num_points:
            raise ValueError(f"{name}= must have one value per point, {num_points}; got {tuple(value.shape)}.")
    is_deep = isinstance(model, DeepGP)
    whole: FunctionValues | None = None
    check_device(likelihood, like.device, "The likelihood is")
    with temporary_mode(model, False), temporary_mode(likelihood, False), seeded(seed, like.device):
        for rows in chunks(num_points, batch_size):
            inputs = _rows(x, rows, like)
            with settings.num_likelihood_samples(num_samples or 64 if is_deep else 1):
                f = function_values(_function_distribution(model, inputs))
            if is_gaussian(likelihood):
                sliced = {name: value[..., rows] if value.dim() else value for name, value in arguments.items()}
                f = add_noise(likelihood, f, inputs=inputs, **sliced)
            if whole is None:
                whole = _empty(f, num_points)
            _write(whole, f, rows)
    if whole is None:
        raise ValueError("There are no test points.")
    weights = None
    if is_deep:
        size = whole.mean.size(0)
        weights = model.quad_weights.exp() if isinstance(model, DSPP) else whole.mean.new_full((size,), 1 / size)
    return PredictiveDistribution(
        likelihood,
        whole,
        arguments={} if is_gaussian(likelihood) else arguments,
        weights=weights,
        batch_size=batch_size,
        num_samples=1024 if num_samples is None or is_deep else num_samples,
        seed=seed,
    )


def _function_distribution(model: Any, x: Tensor) -> MultivariateNormal:
    """q(f) of one chunk."""
    ours = (SolveGPVariationalStrategy, TighterVariationalStrategy)
    is_collapsed = isinstance(model, CollapsedGP) or isinstance(
        getattr(model, "covar_module", None), TighterInducingPointKernel
    )
    if is_collapsed or isinstance(getattr(model, "variational_strategy", None), ours):
        return predict(model, x, batch_size=max(1, x.size(-2)))
    if getattr(model, "outcome_transform", None) is not None:
        raise TypeError(
            "This model transforms its targets, and its likelihood is for the transformed ones; use its posterior."
        )
    if getattr(model, "input_transform", None) is not None:
        x = model.transform_inputs(x)  # BoTorch's, which a call leaves out in eval mode
    q = model(x)
    if not isinstance(q, MultivariateNormal):
        raise TypeError(f"The model must return a MultivariateNormal in eval mode; got {type(q).__name__}.")
    return q


def _empty(f: FunctionValues, num_points: int) -> FunctionValues:
    """Room for all points. Results kept chunk by chunk would lie between the large arrays and fragment the memory."""

    def room(value: Tensor, dim: int) -> Tensor:
        shape = list(value.shape)
        shape[dim] = num_points
        return value.new_empty(shape)

    covariance = None if f.covariance is None else room(f.covariance, -3)
    return FunctionValues(room(f.mean, f.point_dim), room(f.variance, f.point_dim), covariance, f.is_several)


def _write(whole: FunctionValues, f: FunctionValues, rows: slice) -> None:
    for target, source in zip(whole.rows(rows)[:3], f[:3], strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def _floating(*modules: Any) -> Tensor:
    """A tensor of the dtype and device that inputs should have."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor
    return torch.empty(0)


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    value = torch.as_tensor(np.asarray(value) if isinstance(value, np.memmap) else value, device=like.device)
    return value.to(like.dtype) if value.is_floating_point() else value


def _rows(x: Tensor | np.ndarray, rows: slice, like: Tensor) -> Tensor:
    """Some of the inputs, ``... x B x D``."""
    part = x[rows] if len(x.shape) == 1 else x[..., rows, :]
    if not isinstance(part, Tensor):
        part = torch.tensor(
            np.array(part), dtype=like.dtype, device=like.device
        )  # a copy: a memory map may be read-only
    return part.unsqueeze(-1) if part.dim() == 1 else part
