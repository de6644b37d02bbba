"""What a run says in the log: that data are not scaled, or that a model learnt nothing."""

from __future__ import annotations

import logging
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from torch import Tensor

from ..checks import NUMERICAL_ERRORS
from ..likelihoods import HeteroscedasticGaussianLikelihood
from ..posterior import has_own_call
from ..strategies import TighterStrategy
from . import distributed
from .batches import ArrayBatches, Batch
from .body import REAL_TARGETS
from .history import History
from .problem import Problem, inner_gp

log = logging.getLogger("tighter_gp")

# How far from 1 the standard deviations of targets and of inputs may be.
_TARGETS_MAY_BE, _INPUTS_MAY_BE = 10.0, 100.0

# Standard deviation of predictions over that of targets below which nothing but their mean was learnt, and from how many steps
# and rows on this is said. Where training failed on data sets of all kinds it was .014 at most, elsewhere at least .15.
_CONSTANT, _DOZENS, _FEW = 0.03, 50, 20

_SCALED = (GaussianLikelihood, MultitaskGaussianLikelihood, HeteroscedasticGaussianLikelihood)


def say_how_data_are_scaled(model: Any, likelihood: Any, source: Any) -> None:
    """Say if targets or inputs are far from unit variance, by a sample of them."""
    if not isinstance(source, ArrayBatches):
        return
    if isinstance(likelihood, _SCALED):
        spread = _deviation(source.y.sample(), source.y.dim).flatten()  # [...] or [T]
        _warn_of(
            "targets", spread, _TARGETS_MAY_BE, "the noise may not be learnt; scale them by", "(y - y.mean()) / y.std()"
        )
    is_plain = inner_gp(model) is model and not has_own_call(model)
    if is_plain and source.x is not None and len(source.x.shape) == 2:
        largest = _deviation(source.x.sample(), 0).amax(0, keepdim=True)
        remedy = "the model may learn nothing; scale them by"
        _warn_of("inputs", largest, _INPUTS_MAY_BE, remedy, "(x - x.mean(0)) / x.std(0)")


def _warn_of(what: str, spread: Tensor, limit: float, remedy: str, formula: str) -> None:
    spread = spread[spread > 0]  # neither constant nor missing
    if bool(((spread < 1 / limit) | (spread > limit)).any()):
        farthest = spread[spread.log().abs().argmax()].item()
        log.warning(
            "%s have a standard deviation of %.3g, and the steps of training suit one near 1: %s the training rows, %s",
            *(what, farthest, remedy, formula),
        )


@torch.no_grad()
def say_if_only_the_mean_was_learnt(problem: Problem, batch: Batch, history: History) -> None:
    """Say if q(f) hardly varies over the rows of the last batch, beside targets that do."""
    strategy = getattr(problem.gp, "variational_strategy", None)
    strategy = getattr(strategy, "base_variational_strategy", strategy)
    is_long = len(history.loss) >= _DOZENS and batch.x is not None and batch.x.size(-2) >= _FEW
    if not isinstance(strategy, TighterStrategy) or distributed.rank() != 0 or not is_long:
        return
    try:
        q = problem.q(batch)
    except NUMERICAL_ERRORS:
        return
    rows = -len(q.event_shape)
    spread = q.mean.std(rows)  # ... or ... x T
    if isinstance(problem.likelihood, REAL_TARGETS):
        spread = spread / _deviation(batch.y, rows)
    if bool((spread < _CONSTANT).all()):
        log.warning(
            "after %d steps predictions vary by %.2g of the targets' standard deviation: the model has learnt their mean alone. "
            "Scale the inputs to unit variance, start from the data with fit(..., initialize=True), or train for longer",
            *(history.steps, spread.max().item()),
        )


def _deviation(values: Tensor, rows: int) -> Tensor:
    """Standard deviation of the values that are not missing."""
    seen = torch.where(torch.isfinite(values), values, torch.nan)
    return (seen - seen.nanmean(rows, keepdim=True)).square().nanmean(rows).sqrt()
