"""A look at what a likelihood is given: targets that it can have produced, arguments that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpytorch import likelihoods, settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from .bernoulli_logit_likelihood import BernoulliLogitLikelihood
from .family import HADAMARD, family, of_gpytorch
from .poisson_likelihood import PoissonLikelihood

_BINARY = (likelihoods.BernoulliLikelihood, BernoulliLogitLikelihood)
_COUNTS = (PoissonLikelihood, *of_gpytorch("PoissonLikelihood"), *of_gpytorch("NegativeBinomialLikelihood"))


def check_targets(likelihood: Any, y: Tensor, name: str = "targets") -> None:
    """Raise if targets are NaN or infinite, or no labels, counts or fractions of this likelihood.

    NaN passes where it marks a missing target, and what it may be is asked of GPyTorch's likelihoods and ours alone.
    It reads all values: to be called where data enter, not in every step.

    :param y: Targets of any shape.
    :param name: What they are called, for the message.
    """
    if y.is_meta or not y.numel():
        return
    y = y.detach()
    missing = torch.isnan(y) if y.is_floating_point() else torch.zeros_like(y, dtype=torch.bool)
    wrong = torch.isinf(y) if allows_missing(likelihood) else torch.isinf(y) | missing
    if bool(wrong.any()):
        raise ValueError(
            f"{int(wrong.sum())} of {y.numel()} {name} are NaN or infinite; drop them, or mark NaN as missing with "
            "gpytorch.settings.observation_nan_policy('fill')."
        )
    wanted, possible = _possible(likelihood, y)
    wrong = y[~(possible | missing)]
    if wrong.numel():
        found = ", ".join(f"{value:g}" for value in wrong.unique()[:5].tolist())
        raise ValueError(f"{wanted}; {wrong.numel()} of {y.numel()} {name} are others: {found}.")


def _possible(likelihood: Any, y: Tensor) -> tuple[str, Tensor]:
    """What targets may be, in words, and which of them are that."""
    kind = type(likelihood).__name__
    if isinstance(likelihood, _BINARY):
        return f"{kind} takes labels 0 and 1, or -1 and 1", (y == 1) | (y == (-1 if bool((y == -1).any()) else 0))
    if isinstance(likelihood, _COUNTS):
        return f"{kind} takes counts, whole numbers from 0", (y >= 0) & (y == y.long())
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        count = likelihood.num_classes
        possible = (y >= 0) & (y < count) & (y == y.long())
        return f"Labels must lie in 0..{count - 1}, as there are {count} classes of {kind}", possible
    if isinstance(likelihood, likelihoods.BetaLikelihood):
        return f"{kind} takes values between 0 and 1, both excluded", (y > 0) & (y < 1)
    return "any number is a target", torch.ones_like(y, dtype=torch.bool)


def allows_missing(likelihood: Any) -> bool:
    """Whether NaN means a missing target, as GPyTorch has been told."""
    policy = settings.observation_nan_policy.value()
    return policy != "ignore" or isinstance(likelihood, likelihoods.GaussianLikelihoodWithMissingObs)


def check_shape(likelihood: Any, q: MultivariateNormal, y: Tensor) -> None:
    """Raise unless targets fit q(f): one per entry, or one label per point for a likelihood of several functions.

    :param q: q(f), batch shape ``...``, event shape ``N`` or ``N x T``.
    :param y: Targets, ``N``, ``N x T`` or one of these behind the batch shape.
    """
    is_softmax = isinstance(likelihood, likelihoods.SoftmaxLikelihood)
    if y.shape == q.mean.shape and not is_softmax:  # nearly always
        return
    known, allowed = family(likelihood), [q.event_shape[:1]] if is_softmax else [q.event_shape]
    if len(q.event_shape) > 1 and not (is_softmax or known.has_one_function or known.is_gaussian):
        allowed = [q.event_shape[:1], *allowed]
    if not any(_fits(y.shape, q.batch_shape, event_shape) for event_shape in allowed):
        wanted = " or ".join(str(tuple(q.batch_shape + event_shape)) for event_shape in allowed)
        hint = "For a single output squeeze a trailing dimension of one."
        if is_softmax and y.shape[-1:] == (likelihood.num_classes,):
            hint = f"Labels are 0 to {likelihood.num_classes - 1}, one per point: of one-hot rows pass y.argmax(-1)."
        raise ValueError(f"Targets must have shape {wanted} to fit q(f); got {tuple(y.shape)}. {hint}")


def _fits(shape: torch.Size, batch_shape: torch.Size, event_shape: torch.Size) -> bool:
    """Whether targets have this event shape, and a batch shape that expands to that of q(f)."""
    own = shape[: len(shape) - len(event_shape)]
    return (
        own + event_shape == shape
        and len(own) <= len(batch_shape)
        and all(size in (1, wanted) for size, wanted in zip(reversed(own), reversed(batch_shape), strict=False))
    )


def check_objective(value: Tensor, q: MultivariateNormal, y: Tensor) -> None:
    """Raise unless an objective has one value per model of a batch: GPyTorch's own broadcast targets of a wrong shape."""
    if value.numel() != 1 and value.shape != q.batch_shape:
        raise ValueError(
            f"The objective must have one value per model, shape {tuple(q.batch_shape)}; got {tuple(value.shape)} from targets "
            f"of shape {tuple(y.shape)} and q(f) of shape {tuple(q.mean.shape)}. For a single output squeeze a trailing "
            "dimension of one; several outputs with a likelihood of one need TighterELBO."
        )


def check_arguments(likelihood: Any, names: Iterable[str]) -> None:
    """Raise a TypeError for an argument that a likelihood of GPyTorch or ours would take without using it.

    Gaussian noise takes ``noise=``, :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood` ``tasks=``. A likelihood of
    your own is given whatever came.
    """
    if not type(likelihood).__module__.startswith(("gpytorch.", "tighter_gp.")):
        return
    known = "noise" if isinstance(likelihood, _GaussianLikelihoodBase) else None
    if isinstance(likelihood, HADAMARD):
        known = "tasks"
    for name in names:
        if name != known:
            takes = f"{known}= alone" if known else "none per point"
            raise TypeError(f"Got an unknown argument {name!r}: {type(likelihood).__name__} takes {takes}.")
