"""Targets that a likelihood cannot have produced: labels and counts out of range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from .likelihoods import BernoulliLogitLikelihood, PoissonLikelihood

__all__ = ["check_labels", "check_value", "shape_hint"]

_COUNTS = (PoissonLikelihood, likelihoods.PoissonLikelihood, getattr(likelihoods, "NegativeBinomialLikelihood", ()))
_BINARY = (likelihoods.BernoulliLikelihood, BernoulliLogitLikelihood)


def check_labels(likelihood: Any, y: Tensor | np.ndarray, name: str = "y") -> None:
    """Raise if targets are no labels, counts or fractions of this likelihood. NaN passes: it is somebody else's to judge.

    Bernoulli likelihoods take 0 and 1, or -1 and 1; a softmax 0 to ``C - 1``; Poisson and negative binomial likelihoods
    whole numbers from 0; a beta likelihood what lies between 0 and 1.

    :param likelihood: The likelihood. Of one that is not known nothing is asked.
    :param y: The targets, of any shape; of an array no value is read back from a device.
    :param name: What they are called, for the message.
    :raises ValueError: With the values found.

    Example:
        >>> likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        >>> tighter_gp.labels.check_labels(likelihood, torch.tensor([0, 1, 1]))
        >>> tighter_gp.labels.check_labels(likelihood, torch.tensor([1, 2, 1]))
        Traceback (most recent call last):
            ...
        ValueError: BernoulliLikelihood takes labels 0 and 1, or -1 and 1; y holds 1, 2.
    """
    xp: Any = torch if isinstance(y, Tensor) else np
    if isinstance(y, Tensor):
        if y.is_meta:
            return
        y = y.detach()
    known = (_BINARY, _COUNTS, likelihoods.SoftmaxLikelihood, likelihoods.BetaLikelihood)
    if not math.prod(y.shape) or not isinstance(likelihood, known):
        return
    is_missing = xp.isnan(y)
    kind = type(likelihood).__name__
    if isinstance(likelihood, _BINARY):
        is_bad = ~((y == 0) | (y == 1) | (y == -1)) & ~is_missing
        has_both = bool((y == 0).any() & (y == -1).any())
        if has_both or bool(is_bad.any()):
            raise ValueError(f"{kind} takes labels 0 and 1, or -1 and 1; {name} holds {_some(y)}.")
    elif isinstance(likelihood, _COUNTS):
        is_bad = ((y < 0) | (y != xp.floor(y))) & ~is_missing
        _refuse(is_bad, y, f"{kind} takes counts, whole numbers from 0", name)
    elif isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        num_classes = likelihood.num_classes
        is_bad = (y < 0) | (y >= num_classes)
        is_bad = is_bad | ((y != xp.floor(y)) & ~is_missing)
        message = f"Labels must lie in 0..{num_classes - 1}, as there are {num_classes} classes of {kind}"
        _refuse(is_bad, y, message, name)
    elif isinstance(likelihood, likelihoods.BetaLikelihood):
        is_bad = ((y <= 0) | (y >= 1)) & ~is_missing
        _refuse(is_bad, y, f"{kind} takes values between 0 and 1, both excluded", name)


def check_value(value: Tensor, q: MultivariateNormal, y: Tensor, likelihood: Any) -> None:
    """Raise unless an objective has one value per model of a batch: others may have broadcast the targets.

    :param value: Of the objective.
    :param q: q(f).
    :param y: The targets.

    Example:
        >>> q = gpytorch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
        >>> tighter_gp.labels.check_value(torch.tensor(-1.0), q, torch.zeros(3), gpytorch.likelihoods.GaussianLikelihood())
    """
    if value.numel() != 1 and value.shape != q.batch_shape:
        wanted = f"shape {tuple(q.batch_shape)}, one value per model of the batch" if q.batch_shape else "one value"
        raise ValueError(
            f"The objective must have {wanted}; got shape {tuple(value.shape)} from targets of shape {tuple(y.shape)} and q(f) "
            f"of shape {tuple(q.mean.shape)}. {shape_hint(likelihood, tuple(y.shape))} Several outputs with a likelihood of one "
            "need TighterELBO."
        )


def shape_hint(likelihood: Any, shape: tuple[int, ...]) -> str:
    """What to do with targets of a wrong shape.

    Example:
        >>> tighter_gp.labels.shape_hint(gpytorch.likelihoods.GaussianLikelihood(), (5, 1))
        'For a single output squeeze a trailing dimension of one.'
    """
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood) and shape[-1:] == (likelihood.num_classes,):
        return f"Labels are 0 to {likelihood.num_classes - 1}, one per point: of one-hot rows pass y.argmax(-1)."
    return "For a single output squeeze a trailing dimension of one."


def _refuse(is_bad: Any, y: Any, wanted: str, name: str) -> None:
    if bool(is_bad.any()):
        raise ValueError(
            f"{wanted}; {int(is_bad.sum())} of {math.prod(y.shape)} values of {name} are others: {_some(y[is_bad])}."
        )


def _some(values: Tensor | np.ndarray) -> str:
    """The first of the distinct values."""
    values = torch.as_tensor(values)
    distinct = torch.unique(values[~torch.isnan(values)]).tolist()
    shown = ", ".join(f"{value:g}" for value in distinct[:5])
    return f"{shown}, ... ({len(distinct)} different ones)" if len(distinct) > 5 else shown
