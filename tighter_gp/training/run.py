"""The loop over steps, and what happens between them: validation, callbacks and checkpoints."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from gpytorch.models.deep_gps import DeepGP

from ..checks import NUMERICAL_ERRORS, first_line
from ..draws import kept_states, own_random_state
from ..maths.linalg import full_precision
from ..modes import temporary_mode
from . import checkpoint as checkpoints
from . import distributed
from .advice import say_if_only_the_mean_was_learnt
from .batches import Batch
from .guard import Guard, GuardState
from .history import History, Progress, Step
from .initialization import start_beta
from .problem import Problem
from .validation import HeldOut

log = logging.getLogger("tighter_gp")


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    :param total: Number of steps.
    :param validation: Held-out points, if any.
    :param validate_every: Steps between validations.
    :param patience: Validations without a better one before the run is brought to its end.
    :param falls: Whether the learning rate falls over the run, as it is to do before patience ends it.
    :param checkpoint: File for the state, if any.
    :param checkpoint_every: Steps between checkpoints.
    :param resume: Whether to continue from it.
    :param callbacks: Called after each step.
    :param config: What tells this run from another, as plain values.
    """

    total: int
    validation: HeldOut | None
    validate_every: int
    patience: int | None
    falls: bool
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    resume: bool
    callbacks: Sequence[Callable[[Step], bool | None]]
    config: dict[str, Any]


@dataclass
class RunState:
    """All that changes in a run, besides the parameters.

    :param guard: State of the guarded step.
    :param history: What happened.
    :param best: Score, step and values of the best validation.
    :param pending: Events of the last step that are done, if others are still to come: the validation, then the callbacks.
    :param shortened: Number of steps, if patience has left fewer than planned.
    """

    guard: GuardState
    history: History = field(default_factory=History)
    best: dict[str, Any] | None = None
    pending: int | None = None
    shortened: int | None = None


class Run:
    """One run of :func:`~tighter_gp.fit`.

    :param problem: What is trained.
    :param source: The batches.
    :param guard: The step.
    :param plan: What is to be done.
    :param progress: Says how far it is.
    """

    def __init__(self, problem: Problem, source: Any, guard: Guard, plan: Plan, progress: Progress) -> None:
        self.problem, self.source, self.guard, self.plan, self.progress = problem, source, guard, plan, progress
        self.state = RunState(GuardState(None))

    @property
    def history(self) -> History:
        """What happened so far."""
        return self.state.history

    @property
    def total(self) -> int:
        """Number of steps of the run."""
        return min(self.state.shortened or self.plan.total, self.plan.total)

    def train(self) -> History:
        """Run to the end, from the start or from a checkpoint."""
        problem, plan = self.problem, self.plan
        modes = temporary_mode(problem.model, True), temporary_mode(problem.likelihood, True)
        with modes[0], modes[1], kept_states(self.source.generators), self.progress:
            if plan.checkpoint is not None:
                checkpoints.check_path(plan.checkpoint, problem.device)
            finished = plan.resume and self._restore()
            if self.state.guard.inner is None:
                self._begin()
                self.state.guard = self.guard.init()
            distributed.share_state(problem.modules.values())
            if not finished:
                last = self._finish()
            if self.state.best is not None:
                problem.load_state(self.state.best["values"])
            if not finished:
                say_if_only_the_mean_was_learnt(problem, last, self.history)
            self.progress.end(self.history, finished)
            return self.history

    def _finish(self) -> Batch | None:
        """All steps that are left; the last batch."""
        held_out = self.plan.validation
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
        history, stop, converged, batch = self.history, False, False, None
        if self.state.pending is not None:  # interrupted between a step and its events
            with own_random_state(self.problem.device):
                stop = self._after_step()
        batches = iter(self.source.iterate(history.steps))
        while not stop and history.steps < self.total:
            with own_random_state(self.problem.device):
                batch = next(batches)
                is_due = self.progress.is_due(history.steps + 1, self.total)
                loss = self._loss(batch) if is_due else None
                converged = self._step(batch)
                self.progress.step(history, self.total, loss)
                stop = self._after_step() or converged
                if stop or history.steps == self.total:
                    self._check_end(batch)
            if stop or history.steps % self.plan.checkpoint_every == 0:
                self._save(finished=stop)
        if self.state.guard.error is not None and self.state.guard.failures == history.steps:
            self.guard.give_up(self.state.guard, history.steps - 1)
        if stop:
            history.stopped = history.stopped or "converged"
        elif history.steps < self.plan.total:
            history.stopped = self._without_better()
        return batch

    def _step(self, batch: Batch) -> bool:
        """One step; why none is needed after it, if so."""
        history, number, started = self.history, self.history.steps, time.perf_counter()
        with full_precision(self.problem.device.type):
            guard, info = self.guard.step(self.state.guard, batch, number, self.total)
        history.seconds += time.perf_counter() - started
        if info.error is not None:
            was_undone = self.state.guard.before is not None and guard.before is None
            undone = " The last update was undone." if was_undone else ""
            self._skip(number, first_line(info.error) + undone)
        self.state.guard, self.state.pending = guard, 0
        history.loss.append(info.loss if info.error is None else math.nan)
        return info.converged

    def _skip(self, number: int, reason: str) -> None:
        self.history.skipped.append((number, reason))
        log.warning("step %d was skipped: %s", number, reason)
        distributed.share_state(self.problem.modules.values())

    def _check_end(self, batch: Batch) -> None:
        """Undo the last update if the bound cannot be computed after it: no further step would notice."""
        loss = self._loss(batch)
        failed = loss is None or not math.isfinite(loss)
        if self.state.guard.before is not None and distributed.total(float(failed), self.problem.device):
            self.state.guard = self.guard.undo(self.state.guard)
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

    def _begin(self) -> None:
        """GPyTorch sets q(u) at the first call, with a little noise: do it here, once for all processes."""
        problem = self.problem
        with torch.no_grad(), own_random_state(problem.device):
            problem.seed_step(-1)
            batch = next(iter(self.source.iterate(0)))
            failed = 0.0
            try:
                problem.loss(batch)
            except NUMERICAL_ERRORS:  # the first step will fail too, and say so
                failed = 1.0
            if distributed.total(failed, problem.device):
                return
            distributed.share_state(problem.modules.values())
            if (
                batch.x is not None
                and hasattr(problem.gp, "variational_strategy")
                and not isinstance(problem.gp, DeepGP)
            ):
                average = lambda value: distributed.summed(value * batch.weight)
                start_beta(problem.gp, problem.likelihood, problem.q(batch), batch.y, average=average, **batch.kwargs)

    # -- events -------------------------------------------------------------------------------------------------------

    def _after_step(self) -> bool:
        """Validation and callbacks; whether the run should end."""
        problem, plan, state, history = self.problem, self.plan, self.state, self.history
        done, stop, first = history.steps, False, state.pending or 0
        problem.seed_step(-2 - done)  # a sampled score is the same after an interruption
        if not first and plan.validation is not None and (done % plan.validate_every == 0 or done == self.total):
            stop = distributed.agreed(self._validate(plan.validation), problem.device) and self._end_early()
        state.pending = max(1, first)
        epoch, rest = divmod(done, self.source.steps_per_epoch)
        seen = Step(done, epoch, rest == 0, history.loss[-1], problem.model, problem.likelihood, history)
        for number, callback in enumerate(plan.callbacks[max(0, first - 1) :], max(1, first)):
            state.pending = number + 1
            answer = callback(seen)
            is_true = answer is True or (isinstance(answer, (np.bool_, torch.BoolTensor)) and bool(answer))
            if distributed.agreed(is_true, problem.device):
                history.stopped, stop = history.stopped or "a callback asked for it", True
            for module in (problem.model, problem.likelihood):
                if not module.training:  # a callback that predicts
                    module.train()
        if plan.callbacks:
            problem.check_parameters()
        state.pending = None
        return stop

    def _validate(self, held_out: HeldOut) -> bool:
        """Whether patience is over."""
        history, state = self.history, self.state
        try:
            value = held_out.score(self.problem.model)
        except NUMERICAL_ERRORS as error:
            log.warning("the validation after %d steps failed: %s", history.steps, error)
            value = math.nan
        history.validation.append((history.steps, value))
        if self.plan.patience is None:
            return False
        if math.isfinite(value) and (state.best is None or value < state.best["score"]):
            state.best = {"score": value, "step": history.steps, "values": self.problem.copy_state()}
            history.best_step = history.steps
        since = max(0 if state.best is None else state.best["step"], (state.shortened or 0) // 2)
        return sum(step > since for step, _ in history.validation) >= self.plan.patience

    def _end_early(self) -> bool:
        """Patience is over: end the run, or let the learning rate fall first, over as many steps as were taken."""
        done = self.history.steps
        if self.plan.falls and 2 * done < self.total:
            self.state.shortened = 2 * done
            log.info("%s: the learning rate falls from here on, until step %d", self._without_better(), 2 * done)
            return False
        self.history.stopped = self._without_better()
        return True

    def _without_better(self) -> str:
        return f"no better validation in {self.plan.patience}"

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, finished: bool) -> None:
        plan, state = self.plan, self.state
        if plan.checkpoint is None:
            return
        own = {"best": state.best, "pending": state.pending, "shortened": state.shortened}
        content = {
            "config": plan.config,
            "finished": finished,
            "total": plan.total,
            "values": self.problem.state(),
            "step": self.guard.state_dict(state.guard),
            "history": asdict(state.history),
            **own,
            "callbacks": [c.state_dict() if hasattr(c, "state_dict") else None for c in plan.callbacks],
        }
        checkpoints.save(plan.checkpoint, content)

    def _restore(self) -> bool:
        """Take over the state in a checkpoint, if there is one; whether that run was finished."""
        plan = self.plan
        assert plan.checkpoint is not None
        saved = checkpoints.load(plan.checkpoint, self.problem.device, plan.config)
        if saved is None:
            return False
        self.problem.load_state(saved["values"])
        past = saved["history"]
        for name in ("validation", "skipped"):
            past[name] = [tuple(entry) for entry in past[name]]
        for callback, callback_state in zip(plan.callbacks, saved["callbacks"], strict=False):
            if callback_state is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(callback_state)
        guard = self.guard.load_state_dict(saved["step"])
        self.state = RunState(guard, History(**past), saved["best"], saved["pending"], saved["shortened"])
        # A run that was asked for more steps than before continues.
        finished = bool(saved["finished"]) and (plan.total <= saved["total"] or bool(self.history.stopped))
        if not finished and distributed.rank() == 0:
            log.info("resumed after %d of %d steps from %s", self.history.steps, plan.total, plan.checkpoint)
        return finished
