"""The score of a model on held-out data."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from ..checks import NUMERICAL_ERRORS
from ..likelihoods.properties import is_gaussian, observed
from ..modes import chunks, temporary_mode
from ..predictions import predict
from ..strategies import TighterStrategy
from .batches import from_numpy

HeldOut = tuple[Tensor, Tensor, dict[str, Any]]


@torch.no_grad()
def mean_nlpd(model: Any, likelihood: Likelihood, x: Tensor, y: Tensor, batch_size: int = 1024, **kwargs: Any) -> float:
    r"""Mean negative log predictive density of held-out points, :math:`-\frac1N \sum_n \log p(y_n \mid x_n)`; lower is
    better.

    :param model: A trained model; it is left in the mode it was in.
    :param likelihood: Its likelihood. One without a closed form is sampled
        :class:`~gpytorch.settings.num_likelihood_samples` times.
    :param x: Inputs, ``... x N x D``.
    :param y: Targets, ``N``, ``N x T`` or ``... x N``.
    :param batch_size: Points a chunk.
    :param kwargs: Per-point arguments of the likelihood, ``... x N``, such as ``noise=``.

    Example:
        >>> score = tighter_gp.training.mean_nlpd(model, likelihood, test_x, test_y)
        >>> math.isfinite(score)
        True
    """
    _row_dim(x, y)
    _check_kwargs(x, kwargs)
    total, count = 0.0, 0
    # In training mode a sampled likelihood draws from the marginals of q(f), which is all a density a point needs.
    with temporary_mode(model, False), temporary_mode(likelihood, True):
        if isinstance(model, ExactGP) or isinstance(getattr(model, "variational_strategy", None), TighterStrategy):
            q = predict(model, x, batch_size=batch_size)
            _check_shape(likelihood, y, q)
            return -float(likelihood.log_marginal(y, q, **kwargs).double().mean())
        for rows in chunks(_num_points(x), batch_size):
            inputs, targets, sliced = _take(x, y, kwargs, rows)
            q = model(inputs)
            _check_shape(likelihood, targets, q)
            density = likelihood.log_marginal(targets, q, **sliced)
            total, count = total - float(density.double().sum()), count + density.numel()
    return total / count


def held_out(likelihood: Likelihood, validation: Any, like: Tensor) -> HeldOut:
    """Inputs, targets and arguments of the likelihood, or a clear error.

    :param validation: ``(x, y)`` or ``(x, y, kwargs)``.
    :param like: Tensor whose dtype and device numpy arrays take.
    """
    if not isinstance(validation, (tuple, list)) or len(validation) not in (2, 3):
        raise TypeError(f"validation must be (x, y) or (x, y, kwargs); got {type(validation).__name__}.")
    x, y, kwargs = (*validation, {})[:3]
    x, y = (from_numpy(part, like, is_input=part is x) if isinstance(part, np.ndarray) else part for part in (x, y))
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and isinstance(kwargs, dict)):
        names = ", ".join(type(part).__name__ for part in validation)
        raise TypeError(f"validation must be tensors or arrays x and y, and a dict of further arguments; got {names}.")
    _row_dim(x, y)
    _check_kwargs(x, kwargs)
    check_finite("the validation inputs", x)
    check_finite("the validation targets", y, likelihood)
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in kwargs:
        raise ValueError(
            f"{type(likelihood).__name__} knows the noise of the training points only: pass that of the held-out points, "
            'validation=(x, y, {"noise": noise}).'
        )
    return x, y, kwargs


def try_out(model: Any, likelihood: Likelihood, validation: HeldOut) -> None:
    """Score one point: what does not fit the model is found before the training, not after."""
    with suppress(*NUMERICAL_ERRORS):
        x, y, kwargs = _take(*validation, slice(1))
        mean_nlpd(model, likelihood, x, y, **kwargs)


def check_finite(name: str, values: Tensor, likelihood: Likelihood | None = None) -> None:
    """Raise if a value is infinite or NaN.

    :param name: What the values are, for the message.
    :param likelihood: For targets: NaN passes where it means a missing observation.
    """
    if not values.is_floating_point() or not values.numel():
        return
    # A norm needs no second array of the size of the data.
    if math.isfinite(torch.linalg.vector_norm(values.detach(), math.inf)):
        return
    is_missing = likelihood is not None and observed(likelihood, values.new_zeros(1), torch.Size([1])) is not None
    count = int((torch.isinf(values) if is_missing else ~torch.isfinite(values)).sum())
    if count:
        hint = (
            ""
            if likelihood is None
            else ", or mark NaN as missing with gpytorch.settings.observation_nan_policy('fill')"
        )
        raise ValueError(f"{count} of {values.numel()} values of {name} are NaN or infinite; drop their rows{hint}.")


def _num_points(x: Tensor) -> int:
    return x.size(0) if x.dim() == 1 else x.size(-2)


def _row_dim(x: Tensor, y: Tensor) -> int:
    """The dimension of the targets that counts the points."""
    num_points = _num_points(x)
    for dim in (0, -1, -2) if x.dim() <= 2 else (-1, -2):
        if num_points > 0 and y.shape[dim:][:1] == (num_points,):
            return dim
    raise ValueError(f"There must be a held-out target for each of the {num_points} rows of x; got {tuple(y.shape)}.")


def _check_kwargs(x: Tensor, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.shape[-1:] != (_num_points(x),):
            raise ValueError(
                f"{name}= must have one value a held-out point, ... x {_num_points(x)}; got {tuple(value.shape)}."
            )


def _check_shape(likelihood: Likelihood, y: Tensor, q: MultivariateNormal) -> None:
    """Raise if targets would broadcast; one label may stand for several functions."""
    one_output = is_gaussian(likelihood) or isinstance(likelihood, _OneDimensionalLikelihood)
    wanted = [q.mean.shape] if one_output or len(q.event_shape) == 1 else [q.mean.shape, q.mean.shape[:-1]]
    batch_dim = len(q.batch_shape)
    if not any(y.shape in [shape[skipped:] for skipped in range(batch_dim + 1)] for shape in wanted):
        raise ValueError(
            f"Held-out targets must have shape {' or '.join(str(tuple(shape)) for shape in wanted)} to fit q(f) with "
            f"N = {q.event_shape[0]}; got {tuple(y.shape)}. For a single output squeeze a trailing dimension of one."
        )


def _take(x: Tensor, y: Tensor, kwargs: dict[str, Any], rows: slice) -> HeldOut:
    """Some of the points."""
    inputs = x[rows] if x.dim() == 1 else x[..., rows, :]
    dim = _row_dim(x, y)
    targets = y[rows] if dim == 0 else y[..., rows] if dim == -1 else y[..., rows, :]
    sliced = {name: value[..., rows] if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    return inputs, targets, sliced
