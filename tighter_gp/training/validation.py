"""The score of a model on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    DirichletClassificationLikelihood,
    FixedNoiseGaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from gpytorch.models import ExactGP
from gpytorch.models.deep_gps import DeepGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..checks import NUMERICAL_ERRORS
from ..collapsed import CollapsedGP
from ..data import Rows, check_kind, fingerprint, first_parameter, input_rows, num_rows, row_dim
from ..likelihoods.properties import has_one_function, is_gaussian, observed
from ..likelihoods.targets import check_arguments, check_targets
from ..modes import chunks, temporary_mode
from ..predictions import log_density, predict
from ..strategies import TighterStrategy


class HeldOut:
    """Held-out points, looked at once and taken in chunks.

    :param x: Inputs, ``... x N x D`` or ``N``; tensors or arrays.
    :param y: Targets.
    :param kwargs: Per-point arguments of the likelihood.
    :param likelihood: The likelihood.
    :param like: Tensor whose dtype and device arrays take.
    """

    def __init__(self, x: Any, y: Any, kwargs: dict[str, Any], likelihood: Likelihood, like: Tensor) -> None:
        num_points = num_rows(x)
        dim = row_dim(y.shape, num_points, is_batch=x.ndim > 2) if num_points else None
        if dim is None:
            raise ValueError(
                f"There must be a held-out target for each of the {num_points} rows of x; got {tuple(y.shape)}."
            )
        check_arguments(likelihood, kwargs)
        for name, value in kwargs.items():
            check_kind(name, value)
            if isinstance(value, (Tensor, np.ndarray)) and value.shape[-1:] != (num_points,):
                raise ValueError(
                    f"{name}= must have one value per held-out point, ... x {num_points}; got {tuple(value.shape)}."
                )
        is_fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
        if is_fixed and not isinstance(likelihood, DirichletClassificationLikelihood) and "noise" not in kwargs:
            raise ValueError(
                f"{type(likelihood).__name__} knows the noise of the training points only: pass that of the held-out points, "
                'validation=(x, y, {"noise": noise}).'
            )
        self.x = input_rows(x, like, "the held-out x")
        self.y = Rows(y, like, dim=dim, name="the held-out y")
        self.kwargs = {
            name: Rows(value, like, name=f"the held-out {name}") if isinstance(value, (Tensor, np.ndarray)) else value
            for name, value in kwargs.items()
        }
        self.likelihood = likelihood

    def __len__(self) -> int:
        return len(self.x)

    def fingerprint(self) -> bytes:
        """A hash of all values."""
        return fingerprint(self.x, self.y, *self.kwargs.values())

    def take(self, rows: slice) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Some of the points."""
        kwargs = {name: value[rows] if isinstance(value, Rows) else value for name, value in self.kwargs.items()}
        return self.x[rows], self.y[rows], kwargs

    def check(self) -> None:
        """Look at all values, a chunk at a time."""
        for rows in chunks(len(self), 2**16):
            x, y, _ = self.take(rows)
            check_finite("the validation inputs", x)
            check_targets(self.likelihood, y, "values of the validation targets")


@torch.no_grad()
def mean_nlpd(model: Any, likelihood: Likelihood, x: Any, y: Any, batch_size: int = 1024, **kwargs: Any) -> float:
    r"""Mean negative log predictive density per held-out point, joint over the tasks of a point; lower is better.

    That is ``-predict_y(model, likelihood, x).log_prob(y).nanmean()``. A missing target, NaN where the likelihood or
    ``gpytorch.settings.observation_nan_policy`` allows it, counts nothing, nor does a point of which nothing is observed;
    the policy makes no difference to the score.

    :param model: A trained model; it is left in the mode it was in.
    :param likelihood: Its likelihood.
    :param x: Inputs, ``... x N x D`` or ``N``; a tensor or a numpy array.
    :param y: Targets, ``N``, ``N x T`` or ``... x N``.
    :param batch_size: Points per chunk.
    :param kwargs: Per-point arguments of the likelihood, ``... x N``, such as ``noise=``.

    Example:
        >>> score = tighter_gp.training.mean_nlpd(model, likelihood, test_x, test_y)
        >>> math.isfinite(score)
        True
    """
    held_out = HeldOut(x, y, kwargs, likelihood, first_parameter(model, likelihood))
    held_out.check()
    return score(model, likelihood, held_out, batch_size)


@torch.no_grad()
def score(model: Any, likelihood: Likelihood, held_out: HeldOut, batch_size: int = 1024) -> float:
    """:func:`mean_nlpd` of points that were looked at before."""
    total, count = 0.0, 0
    with temporary_mode(model, False), temporary_mode(likelihood, False):
        for rows, q in _predictions(model, held_out, batch_size):
            _, y, kwargs = held_out.take(rows)
            _check_shape(held_out, y, q)
            density = log_density(likelihood, q, y, **kwargs).double()
            if isinstance(model, DeepGP):
                density = torch.logsumexp(density, dim=0) - math.log(len(density))
            seen = ~torch.isnan(y)
            if _has_tasks(y, q):
                if density.shape[-2:] == y.shape[-2:]:  # a log_marginal of the user's own, for each task
                    density = density.where(seen, 0.0).sum(-1)
                seen = seen.any(-1)
            seen = seen.expand(density.shape)  # a batch of models may share its targets
            total -= float(density[seen].sum())
            count += int(seen.sum())
    return total / count if count else math.nan


def _predictions(model: Any, held_out: HeldOut, batch_size: int) -> Iterator[tuple[slice, MultivariateNormal]]:
    """The latent predictive distribution of each chunk of points."""
    if not _has_diagonal(model):
        for rows in chunks(len(held_out), batch_size):
            yield rows, model(held_out.x[rows])
        return
    # At once: what does not depend on the points, perhaps a pass over the training data, is computed once.
    q = predict(model, held_out.x[:], batch_size=batch_size)
    mean, variance = q.mean, q.variance
    for rows in chunks(len(held_out), batch_size):
        yield rows, MultivariateNormal(mean[..., rows], DiagLinearOperator(variance[..., rows]))


def _has_diagonal(model: Any) -> bool:
    """Whether what ``predict`` says of each point alone is all that the score needs."""
    is_ours = isinstance(getattr(model, "variational_strategy", None), TighterStrategy)
    return is_ours or isinstance(model, (ExactGP, CollapsedGP))


def _has_tasks(y: Tensor, q: MultivariateNormal) -> bool:
    """Whether the last dimension of the targets counts tasks."""
    return len(q.event_shape) > 1 and y.shape[-len(q.event_shape) :] == q.event_shape


def held_out_data(likelihood: Likelihood, validation: Any, like: Tensor) -> HeldOut:
    """The points of ``validation=``, or a clear error.

    :param validation: ``(x, y)`` or ``(x, y, kwargs)``.
    :param like: Tensor whose dtype and device numpy arrays take.
    """
    if not isinstance(validation, (tuple, list)) or len(validation) not in (2, 3):
        raise TypeError(f"validation must be (x, y) or (x, y, kwargs); got {type(validation).__name__}.")
    x, y, kwargs = (*validation, {})[:3]
    kinds = (Tensor, np.ndarray)
    if not (isinstance(x, kinds) and isinstance(y, kinds) and isinstance(kwargs, dict)):
        names = ", ".join(type(part).__name__ for part in validation)
        raise TypeError(f"validation must be tensors or arrays x and y, and a dict of further arguments; got {names}.")
    found = HeldOut(x, y, kwargs, likelihood, like)
    found.check()
    return found


def try_out(model: Any, likelihood: Likelihood, held_out: HeldOut) -> None:
    """Score one point: what does not fit the model is found before the training, not after."""
    with suppress(*NUMERICAL_ERRORS), torch.no_grad(), temporary_mode(model, False), temporary_mode(likelihood, False):
        x, y, kwargs = held_out.take(slice(1))
        q = predict(model, x) if _has_diagonal(model) else model(x)
        _check_shape(held_out, y, q)
        log_density(likelihood, q, y, **kwargs)


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


def _check_shape(held_out: HeldOut, y: Tensor, q: MultivariateNormal) -> None:
    """Raise if a chunk of targets would broadcast; one label may stand for several functions."""
    likelihood = held_out.likelihood
    has_one = has_one_function(likelihood) or is_gaussian(likelihood)
    wanted = [q.mean.shape] if has_one or len(q.event_shape) == 1 else [q.mean.shape, q.mean.shape[:-1]]
    if isinstance(likelihood, SoftmaxLikelihood):
        wanted = wanted[-1:]
    batch_dim = len(q.batch_shape)
    if not any(y.shape in [shape[skipped:] for skipped in range(batch_dim + 1)] for shape in wanted):
        whole = [(*shape[:batch_dim], len(held_out), *shape[batch_dim + 1 :]) for shape in wanted]
        raise ValueError(
            f"Held-out targets must have shape {' or '.join(map(str, whole))} to fit q(f) with N = {len(held_out)}; got "
            f"{tuple(held_out.y.shape)}. For a single output squeeze a trailing "
            "dimension of one; of one-hot rows pass y.argmax(-1)."
        )
