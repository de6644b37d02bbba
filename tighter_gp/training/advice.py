"""What a run says in the log: that data are not scaled, or that a model learnt nothing."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from gpytorch.kernels import Kernel
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

# How far from 1 the standard deviations of targets and inputs may be, the latter also in lengthscales.
_SPREAD, _FAR = 10.0, 100.0

# Standard deviation of predictions over that of targets below which nothing but their mean was learnt, and from how many steps
# and rows on this is said. Where training failed on data sets of all kinds it was .014 at most, elsewhere at least .15.
_CONSTANT, _DOZENS, _FEW = 0.03, 50, 20


def say_how_targets_spread(likelihood: Any, source: Any) -> None:
    """Say if the targets are far from unit variance, by a sample of them."""
    is_scaled = isinstance(
        likelihood, (GaussianLikelihood, MultitaskGaussianLikelihood, HeteroscedasticGaussianLikelihood)
    )
    if not is_scaled or not isinstance(source, ArrayBatches):
        return
    spread = _deviation(source.y.sample(), source.y.dim).flatten()  # [...] or [T]
    spread = spread[spread > 0]  # neither constant nor missing
    if ((spread < 1 / _SPREAD) | (spread > _SPREAD)).any():
        log.warning(
            "targets have a standard deviation of %.3g, and the steps of training suit one near 1: the noise may not be learnt; "
            "scale them by the training rows, (y - y.mean()) / y.std()",
            spread[spread.log().abs().argmax()].item(),
        )


@torch.no_grad()
def say_how_inputs_spread(model: Any, source: Any) -> None:
    """Say if the inputs are far from unit variance, or from the lengthscales, by a sample of them."""
    kernel = getattr(model, "covar_module", None)
    if not isinstance(source, ArrayBatches) or source.x is None or len(source.x.shape) != 2:
        return
    if not isinstance(kernel, Kernel) or has_own_call(model) or inner_gp(model) is not model:
        return
    spread = source.x.sample().std(0, correction=0)  # [D]
    for part in kernel.modules():
        if not isinstance(part, Kernel) or not part.has_lengthscale:
            continue
        seen = spread if part.active_dims is None else spread[part.active_dims.cpu()]
        if part.lengthscale.size(-1) not in (1, len(seen)):  # a network in between
            return
        largest, relative = seen.max().item(), (seen / part.lengthscale.cpu().double()).max().item()
        if 0 < largest < math.inf and (max(relative, largest) > _FAR or max(relative, largest) < 1 / _FAR):
            log.warning(
                "inputs have a standard deviation of up to %.3g, or %.3g lengthscales, and the steps of training suit one "
                "near 1: the model may learn nothing; scale them by the training rows, (x - x.mean(0)) / x.std(0)",
                largest,
                relative,
            )
            return


@torch.no_grad()
def say_if_only_the_mean_was_learnt(problem: Problem, batch: Batch | None, history: History) -> None:
    """Say if q(f) hardly varies over the rows of the last batch, beside targets that do."""
    strategy = getattr(problem.gp, "variational_strategy", None)
    strategy = getattr(strategy, "base_variational_strategy", strategy)
    if not isinstance(strategy, TighterStrategy) or distributed.rank() != 0 or len(history.loss) < _DOZENS:
        return
    if batch is None or batch.x is None or batch.x.size(-2) < _FEW:
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
            history.steps,
            spread.max().item(),
        )


def _deviation(y: Tensor, rows: int) -> Tensor:
    """Standard deviation of the targets that are not missing."""
    seen = torch.where(torch.isfinite(y), y, torch.nan)
    return (seen - seen.nanmean(rows, keepdim=True)).square().nanmean(rows).sqrt()
