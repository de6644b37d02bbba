"""Predictions of y from a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from torch import Tensor

from ..checks import check_device
from ..data import Rows, check_kind, input_rows, num_rows, reference
from ..likelihoods.targets import check_arguments
from ..modes import chunks, temporary_mode
from .distribution import PredictiveDistribution
from .latent import predict
from .pointwise import FunctionValues, add_noise, function_values, joined, takes_noise


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
    like = reference(model, likelihood)
    check_arguments(likelihood, kwargs)
    check_device(likelihood, like.device, "The likelihood is")
    num_points = num_rows(x)
    for name, value in kwargs.items():
        shape = np.shape(value)
        if shape and shape[-1] != num_points:
            raise ValueError(f"{name}= must have one value per point, {num_points}; got {tuple(shape)}.")
        if shape:
            check_kind(name, value)
    is_deep = isinstance(model, DeepGP)
    hidden_samples = (num_samples or 64) if is_deep else None
    f = function_values(predict(model, x, batch_size=batch_size, num_samples=hidden_samples, seed=seed))
    given = {name: Rows(value, like, name=name) if np.ndim(value) else value for name, value in kwargs.items()}
    if takes_noise(likelihood):
        inputs = input_rows(x, like)

        def noisy() -> Iterator[tuple[slice, FunctionValues]]:
            for rows in chunks(num_points, batch_size):
                yield rows, add_noise(likelihood, f.rows(rows), inputs=inputs[rows], **_taken(given, rows))

        with temporary_mode(likelihood, False):
            f = joined(noisy(), num_points)
        given = {}
    weights = None
    if is_deep:
        weights = mixture_weights(model, f.mean)
    return PredictiveDistribution(
        likelihood,
        f,
        arguments=_taken(given, slice(None)),
        weights=weights,
        batch_size=batch_size,
        num_samples=1024 if num_samples is None or is_deep else num_samples,
        seed=seed,
    )


def mixture_weights(model: Any, samples: Tensor) -> Tensor:
    """Weights of the draws of a deep GP's hidden layers, or of the nodes of a DSPP: the first dimension of ``samples``."""
    return model.quad_weights.exp() if isinstance(model, DSPP) else samples.new_full((len(samples),), 1 / len(samples))


def _taken(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] if isinstance(value, Rows) else value for name, value in arguments.items()}
