"""The loop over steps, and what happens between them: validation, callbacks and checkpoints."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..checks import NUMERICAL_ERRORS, first_line
from ..draws import kept_states, own_random_state
from ..maths.linalg import full_precision
from ..modes import temporary_mode
from . import checkpoint as checkpoints
from . import distributed
from .batches import Batch
from .history import History, Progress, Step, say_if_only_the_mean_was_learnt
from .initialization import start_beta
from .problem import Problem, is_collapsed
from .recipe import Recipe
from .step import Guard
from .validation import HeldOut

log = logging.getLogger("tighter_gp")

# Validations of a run, at most; and least steps between checkpoints.
_MOST_VALIDATIONS, _FEWEST_STEPS = 50, 100

# What of a run is in a checkpoint as it is.
_SAVED = ("config", "planned", "best", "pending", "shortened")


@dataclass
class Run:
    """One run of :func:`~tighter_gp.fit`.

    :param problem: What is trained.
    :param source: The batches.
    :param guard: The step.
    :param recipe: How often it validates and writes checkpoints.
    :param progress: Says how far it is.
    :param planned: Number of steps.
    :param validation: Held-out points, if any.
    :param patience: Validations without a better one before the run is brought to its end.
    :param checkpoint: File for the state, if any.
    :param callbacks: Called after each step.
    :param config: What tells this run from another, as plain values.
    :ivar history: What happened.
    :ivar best: Score, step and values of the best validation.
    :ivar pending: Events of the last step that are done, if others are still to come: the validation, then the callbacks.
    :ivar shortened: Number of steps, if patience has left fewer than planned.
    """

    problem: Problem
    source: Any
    guard: Guard
    recipe: Recipe
    progress: Progress
    planned: int
    validation: HeldOut | None
    patience: int | None
    checkpoint: str | os.PathLike[str] | None
    callbacks: Sequence[Callable[[Step], bool | None]]
    config: dict[str, Any]
    history: History = field(default_factory=History)
    best: dict[str, Any] | None = None
    pending: int | None = None
    shortened: int | None = None

    def __post_init__(self) -> None:
        epoch = self.source.steps_per_epoch
        self.validate_every = self.recipe.validate_every or max(epoch, self.planned // _MOST_VALIDATIONS)
        self.checkpoint_every = self.recipe.checkpoint_every or max(epoch, _FEWEST_STEPS)

    @property
    def total(self) -> int:
        """Number of steps of the run."""
        return min(self.shortened or self.planned, self.planned)

    def train(self, resume: bool) -> History:
        """Run to the end, from the start or from a checkpoint."""
        problem = self.problem
        modes = temporary_mode(problem.model, True), temporary_mode(problem.likelihood, True)
        with modes[0], modes[1], kept_states(self.source.generators), closing(self.progress):
            if self.checkpoint is not None:
                checkpoints.check_path(self.checkpoint, problem.device)
            finished = resume and self._restore()
            if self.guard.state is None:
                self._begin()
                self.guard.state = self.guard.inner.init()
            distributed.share_state(problem.modules.values())
            last = None if finished else self._finish()
            if self.best is not None:
                problem.load_state(self.best["values"])
            if last is not None:
                say_if_only_the_mean_was_learnt(problem, last, self.history)
            self.progress.end(self.history, finished)
            return self.history

    def _finish(self) -> Batch | None:
        """All steps that are left; the last batch."""
        held_out = self.validation
        if held_out is not None:
            self._quietly(lambda: held_out.score(self.problem.model, slice(1)))  # shapes that do not fit
        try:
            last = self._loop()
        except KeyboardInterrupt:
            self._save(finished=False)
            raise
        self._save(finished=True)
        return last

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _loop(self) -> Batch | None:
        history, stop, batch = self.history, False, None
        if self.pending is not None:  # interrupted between a step and its events
            with own_random_state(self.problem.device):
                stop = self._after_step()
        done, batches = history.steps, iter(self.source.iterate(history.steps))
        while not stop and done < (total := self.total):
            with own_random_state(self.problem.device):
                batch = next(batches)
                loss = self._loss(batch) if self.progress.is_due(done + 1, total) else None
                converged = self._step(batch, done, total)
                done += 1
                self.progress.step(history, total, loss)
                stop = self._after_step() or converged
                if stop or done == self.total:
                    self._check_end(batch)
            if stop or done % self.checkpoint_every == 0:
                self._save(finished=stop)
        if self.guard.error is not None and self.guard.failures == done:
            self.guard.give_up(done - 1)
        if stop:
            history.stopped = history.stopped or "converged"
        elif done < self.planned:
            history.stopped = f"no better validation in {self.patience}"
        return batch

    def _step(self, batch: Batch, number: int, total: int) -> bool:
        """One step; whether none is needed after it."""
        history, before, started = self.history, self.guard.before, time.perf_counter()
        with full_precision(self.problem.device.type):
            info = self.guard.step(batch, number, total)
        self.pending = 0
        history.seconds += time.perf_counter() - started
        history.loss.append(info.loss if info.error is None else math.nan)
        if info.error is not None:
            was_undone = before is not None and self.guard.before is None
            self._skip(number, first_line(info.error) + (" The last update was undone." if was_undone else ""))
        return info.converged

    def _skip(self, number: int, reason: str) -> None:
        self.history.skipped.append((number, reason))
        log.warning("step %d was skipped: %s", number, reason)
        distributed.share_state(self.problem.modules.values())

    def _check_end(self, batch: Batch) -> None:
        """Undo the last update if the bound cannot be computed after it: no further step would notice."""
        loss = self._loss(batch)
        failed = loss is None or not math.isfinite(loss)
        if self.guard.before is not None and distributed.total(float(failed), self.problem.device):
            self.guard.undo()
            self._skip(self.history.steps - 1, "the bound is not finite after it. The last update was undone.")

    def _loss(self, batch: Batch) -> float | None:
        return self._quietly(lambda: float(self.problem.loss(batch._replace(weight=1.0))))

    def _quietly(self, function: Callable[[], float]) -> float | None:
        """A value that changes nothing; None where it fails numerically."""
        with own_random_state(self.problem.device), torch.no_grad():
            self.problem.seed_step(self.history.steps)
            try:
                return function()
            except NUMERICAL_ERRORS:
                return None

    @torch.no_grad()
    def _begin(self) -> None:
        """GPyTorch sets q(u) at the first call, with a little noise: do it here, once for all processes."""
        problem = self.problem
        with own_random_state(problem.device):
            problem.seed_step(-1)
            batch, failed = next(iter(self.source.iterate(0))), False
            try:
                problem.loss(batch)
            except NUMERICAL_ERRORS:  # the first step will fail too, and say so
                failed = True
            if distributed.total(float(failed), problem.device):
                return
            distributed.share_state(problem.modules.values())
            start_beta(problem, batch)

    # -- events -------------------------------------------------------------------------------------------------------

    def _after_step(self) -> bool:
        """Validation and callbacks, but for those that are done; whether the run should end."""
        problem, history, first = self.problem, self.history, self.pending or 0
        done, stop = history.steps, False
        if self.validation is not None or self.callbacks:
            problem.seed_step(-2 - done)  # a sampled score is the same after an interruption
        if first == 0 and self.validation is not None and (done % self.validate_every == 0 or done == self.total):
            stop = distributed.agreed(self._validate(self.validation), problem.device) and self._end_early()
        self.pending = max(1, first)
        for callback in self.callbacks[self.pending - 1 :]:
            epoch, rest = divmod(done, self.source.steps_per_epoch)
            seen = Step(done, epoch, rest == 0, history.loss[-1], problem.model, problem.likelihood, history)
            self.pending += 1
            answer = callback(seen)
            is_true = isinstance(answer, (bool, np.bool_, torch.BoolTensor)) and bool(answer)
            if distributed.agreed(is_true, problem.device):
                history.stopped, stop = history.stopped or "a callback asked for it", True
            for module in (problem.model, problem.likelihood):
                if not module.training:  # a callback that predicts
                    module.train()
        if self.callbacks:
            problem.check_parameters()
        self.pending = None
        return stop

    def _validate(self, held_out: HeldOut) -> bool:
        """Whether patience is over."""
        history = self.history
        try:
            value = held_out.score(self.problem.model)
        except NUMERICAL_ERRORS as error:
            log.warning("the validation after %d steps failed: %s", history.steps, error)
            value = math.nan
        history.validation.append((history.steps, value))
        if self.patience is None:
            return False
        if math.isfinite(value) and (self.best is None or value < self.best["score"]):
            self.best = {"score": value, "step": history.steps, "values": self.problem.copy_state()}
            history.best_step = history.steps
        since = max(history.best_step or 0, (self.shortened or 0) // 2)
        return sum(step > since for step, _ in history.validation) >= self.patience

    def _end_early(self) -> bool:
        """Patience is over: end the run, or let the learning rate fall first, over as many steps as were taken."""
        done, reason = self.history.steps, f"no better validation in {self.patience}"
        falls = self.recipe.schedule != "constant" and not is_collapsed(self.problem.model)
        if falls and 2 * done < self.total:
            self.shortened = 2 * done
            log.info("%s: the learning rate falls from here on, until step %d", reason, 2 * done)
            return False
        self.history.stopped = reason
        return True

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, finished: bool) -> None:
        if self.checkpoint is None:
            return
        content = {
            **{name: getattr(self, name) for name in _SAVED},
            "finished": finished,
            "values": self.problem.state(),
            "step": self.guard.state_dict(),
            "history": asdict(self.history),
            "callbacks": [c.state_dict() if hasattr(c, "state_dict") else None for c in self.callbacks],
        }
        checkpoints.save(self.checkpoint, content)

    def _restore(self) -> bool:
        """Take over the state in a checkpoint, if there is one; whether that run was finished."""
        assert self.checkpoint is not None
        saved = checkpoints.load(self.checkpoint, self.problem.device, self.config)
        if saved is None:
            return False
        self.problem.load_state(saved["values"])
        for callback, callback_state in zip(self.callbacks, saved["callbacks"], strict=False):
            if callback_state is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(callback_state)
        self.guard.load_state_dict(saved["step"])
        self.history = History(**saved["history"])
        self.best, self.pending, self.shortened = saved["best"], saved["pending"], saved["shortened"]
        # A run that was asked for more steps than before continues.
        finished = bool(saved["finished"]) and (self.planned <= saved["planned"] or bool(self.history.stopped))
        if finished and self.planned > saved["planned"]:
            log.warning(
                "nothing is trained: the run in %s had ended before its last step (%s). Another checkpoint= starts anew",
                self.checkpoint,
                self.history.stopped,
            )
        if not finished and distributed.rank() == 0:
            log.info("resumed after %d of %d steps from %s", self.history.steps, self.planned, self.checkpoint)
        return finished
