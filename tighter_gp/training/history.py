"""What a run of :func:`tighter_gp.fit` returns, what its callbacks are given, and what it says while it runs."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
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
from .problem import Problem, inner_gp

log = logging.getLogger("tighter_gp")

# How far from 1 the standard deviations of targets and of inputs may be.
_TARGETS_MAY_BE, _INPUTS_MAY_BE = 10.0, 100.0

# Standard deviation of predictions over that of targets below which nothing but their mean was learnt, and from how many steps
# and rows on this is said. Where training failed on data sets of all kinds it was .014 at most, elsewhere at least .15.
_CONSTANT, _DOZENS, _FEW = 0.03, 50, 20

_SCALED = (GaussianLikelihood, MultitaskGaussianLikelihood, HeteroscedasticGaussianLikelihood)


@dataclass
class History:
    """What happened in a run of :func:`~tighter_gp.fit`.

    :param loss: Minus the objective per datum on the batch of each step; NaN for a skipped step. With natural gradients
        and a Gaussian likelihood of a single output it is taken after q(u) has moved to that batch, and so with small
        batches it is lower than minus the bound of all data, which :func:`~tighter_gp.evaluate_bound` gives. Otherwise
        it is taken before the step.
    :param validation: Step and mean negative log predictive density per point of each validation; NaN for one that failed.
    :param skipped: Step and reason of each step that was not taken.
    :param seconds: Time spent in steps, without validation, callbacks and checkpoints.
    :param best_step: Step whose parameters were kept by early stopping.
    :param stopped: Why the run ended before its last step; empty if it did not.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3)
        >>> history.steps, history.skipped, history.stopped
        (3, [], '')
    """

    loss: list[float] = field(default_factory=list, repr=False)
    validation: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    best_step: int | None = None
    stopped: str = ""

    @property
    def steps(self) -> int:
        """Number of steps done, skipped ones included."""
        return len(self.loss)

    def to_frame(self) -> Any:
        """Loss and validation of every step as a table of pandas, NaN between validations.

        Example:
            >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3)
            >>> history.to_frame().shape
            (3, 2)
        """
        import pandas

        frame = pandas.DataFrame({"loss": self.loss}, index=pandas.RangeIndex(1, self.steps + 1, name="step"))
        frame["validation"] = pandas.Series(dict(self.validation), dtype=float)
        return frame

    def plot(self, axes: Any = None) -> Any:
        """Draw loss and validation over the steps with matplotlib.

        :param axes: Where to draw; default the current axes.
        :return: The axes.
        """
        import matplotlib.pyplot as plt

        axes = plt.gca() if axes is None else axes
        axes.plot(range(1, self.steps + 1), self.loss, label="loss")
        if self.validation:
            axes.plot(*zip(*self.validation, strict=True), marker=".", label="validation")
        axes.set_xlabel("step")
        axes.legend()
        return axes


@dataclass(frozen=True)
class Step:
    """What a callback of :func:`~tighter_gp.fit` is given after each step.

    :param step: Number of steps done.
    :param epoch: Number of epochs done.
    :param epoch_end: Whether this step ended an epoch.
    :param loss: As in :class:`History`.
    :param model: The model, in training mode.
    :param likelihood: The likelihood.
    :param history: The history so far.

    Example:
        >>> seen = []
        >>> def remember(step):
        ...     seen.append(step.step)
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3, callbacks=[remember])
        >>> seen
        [1, 2, 3]
    """

    step: int
    epoch: int
    epoch_end: bool
    loss: float
    model: Any
    likelihood: Any
    history: History


class Progress:
    """A progress bar where tqdm and a terminal are, otherwise lines in the log, in the first process only.

    :param show: Whether to show a bar; None for a choice by what is there, False for neither a bar nor lines.
    """

    def __init__(self, show: bool | None) -> None:
        self.is_first = distributed.rank() == 0
        self.bar = _bar(show) if self.is_first else None
        self.has_lines = self.is_first and self.bar is None and show is not False and log.isEnabledFor(logging.INFO)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()

    def is_due(self, done: int, total: int) -> bool:
        """Whether another tenth of the run is done after ``done`` steps."""
        shows = self.bar is not None or self.has_lines
        return shows and done < total and done * 10 // total > (done - 1) * 10 // total

    def step(self, history: History, total: int, loss: float | None) -> None:
        """After a step.

        :param total: Steps of the run.
        :param loss: Minus the bound per datum on a batch before it was used, where a line is due.
        """
        text = "" if loss is None else f"loss {loss:.4f} per datum on a new batch{_scores(history)}"
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(history.steps - self.bar.n)
            if text:
                self.bar.set_postfix_str(text, refresh=False)
        elif text:
            log.info("step %d of %d, %.1f s: %s", history.steps, total, history.seconds, text)

    def end(self, history: History, was_finished: bool) -> None:
        """The last line."""
        if not self.is_first:
            return
        if was_finished:
            log.info("resumed: already finished after %d steps, nothing trained%s", history.steps, _scores(history))
            return
        skipped = f", {len(history.skipped)} steps skipped" if history.skipped else ""
        stopped = f", stopped: {history.stopped}" if history.stopped else ""
        last = next((loss for loss in reversed(history.loss) if math.isfinite(loss)), math.nan)
        text = f"loss {last:.4f} per datum of the last batch{_scores(history)}{skipped}{stopped}"
        log.info("%d steps in %.1f s: %s", history.steps, history.seconds, text)


def _scores(history: History) -> str:
    """Validation in words."""
    text = f", validation {history.validation[-1][1]:.4f}" if history.validation else ""
    return text if history.best_step is None else f"{text}, best after step {history.best_step}"


def _bar(show: bool | None) -> Any:
    if show is False or (show is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        if show:
            raise
        return None
    return tqdm(unit="step", leave=False, dynamic_ncols=True)


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
