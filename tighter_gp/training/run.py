"""A run: the loop over steps, and what happens between them.

After each step come validation, callbacks and, now and then, a checkpoint. All that changes is in the state, which the
loop hands from step to step.
"""

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

from ..checks import NUMERICAL_ERRORS
from ..maths.linalg import full_precision
from ..modes import temporary_mode
from . import checkpoint as checkpoints
from . import distributed
from .advice import say_if_only_the_mean_was_learnt
from .batches import Batch, BatchSource
from .guard import Guard, GuardState
from .history import History, Step
from .interrupts import SecondInterrupt, held_back
from .problem import Problem
from .progress import Progress
from .randomness import kept_states
from .validation import HeldOut, score, try_out

log = logging.getLogger("tighter_gp")


@dataclass(frozen=True)
class Plan:
    """What is to be done, besides the steps themselves.

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

    def total(self, plan: Plan) -> int:
        """Number of steps of the run."""
        return plan.total if self.shortened is None else min(self.shortened, plan.total)


def train(problem: Problem, source: BatchSource, guard: Guard, plan: Plan, progress: Progress) -> History:
    """Run to the end, from the start or from a checkpoint."""
    with (
        temporary_mode(problem.model, True),
        temporary_mode(problem.likelihood, True),
        kept_states(source.generators),
        progress,
    ):
        if plan.checkpoint is not None:
            checkpoints.check_path(plan.checkpoint, problem.device)
        restored = _restore(problem, guard, plan) if plan.resume else None
        state, finished = restored or (RunState(guard.init()), False)
        if state.history.steps == 0:
            _initialise(problem, source, guard.inner.name == "natural")
        distributed.share_state(problem.modules.values())
        progress.start(state.history)
        if not finished:
            _try_validation(problem, plan)
            try:
                last = _loop(problem, source, guard, plan, state, progress)
            except KeyboardInterrupt as error:
                if not isinstance(error, SecondInterrupt):
                    _save(problem, guard, plan, state, finished=False)
                raise
        if not finished:
            _save(problem, guard, plan, state, finished=True)  # as the last step left it, for a run with more steps
        if state.best is not None:
            problem.load_state(state.best)
        if not finished:
            say_if_only_the_mean_was_learnt(problem, last, state.history)
        progress.end(state.history, finished)
        return state.history


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def _loop(
    problem: Problem, source: BatchSource, guard: Guard, plan: Plan, state: RunState, progress: Progress
) -> Batch | None:
    """All steps; the last batch."""
    history, stop = state.history, False
    if state.pending is not None:  # interrupted between a step and its events
        with problem.own_random_state():
            stop = _after_step(problem, source, plan, state)
    batches = iter(source.iterate(history.steps))
    converged, batch = "", None
    while not stop and history.steps < state.total(plan):
        with problem.own_random_state():
            batch = next(batches)
            with held_back():
                converged = _step(problem, guard, plan, state, batch)
            progress.step(history, state.total(plan))
            stop = _after_step(problem, source, plan, state) or bool(converged)
            if stop or history.steps == state.total(plan):
                _settle(problem, guard, state, batch)
        if stop or history.steps % plan.checkpoint_every == 0:
            _save(problem, guard, plan, state, finished=stop)
    if state.guard.error is not None and state.guard.failures == history.steps:
        guard.give_up(state.guard, history.steps - 1)
    if stop:
        history.stopped = history.stopped or converged
    elif history.steps < plan.total:
        history.stopped = _without_better(plan)
    return batch


def _step(problem: Problem, guard: Guard, plan: Plan, state: RunState, batch: Batch) -> str:
    """One step; why none is needed after it, if so."""
    history = state.history
    number = history.steps
    problem.seed_step(number)
    started = time.perf_counter()
    with full_precision(problem.device.type):
        state.guard, info = guard.step(state.guard, batch, number, state.total(plan))
    history.seconds += time.perf_counter() - started
    if info.skipped:
        history.skipped.append((number, info.skipped))
        log.warning("step %d was skipped: %s", number, info.skipped)
        distributed.share_state(problem.modules.values())
    history.loss.append(info.loss)
    state.pending = 0
    return info.converged


def _settle(problem: Problem, guard: Guard, state: RunState, batch: Batch) -> None:
    """Look at the bound after the last step."""
    history = state.history
    problem.seed_step(history.steps)
    state.guard, reason = guard.settle(state.guard, lambda: problem.loss(batch))
    if reason:
        history.skipped.append((history.steps - 1, reason))
        log.warning("after the last step: %s", reason)


def _initialise(problem: Problem, source: BatchSource, is_natural: bool) -> None:
    """GPyTorch sets q(u) at the first call, with a little noise: do it here, once for all processes."""
    with torch.no_grad(), problem.own_random_state():
        problem.seed_step(-1)
        batch = next(iter(source.iterate(0)))
        failed = 0.0
        try:
            problem.loss(batch)
        except NUMERICAL_ERRORS as error:
            log.debug("the first call failed: %s", error)  # the first step will fail too, and say so
            failed = 1.0
        if not distributed.total(failed, problem.device):
            distributed.share_state(problem.modules.values())  # the first one's q(u), before anything is made of it
            problem.begin(batch, is_natural)


# ---------------------------------------------------------------------------------------------------------------------
# Events
# ---------------------------------------------------------------------------------------------------------------------


def _after_step(problem: Problem, source: BatchSource, plan: Plan, state: RunState) -> bool:
    """Validation and callbacks; whether the run should end."""
    history, stop = state.history, False
    done = history.steps
    problem.seed_step(-2 - done)  # a sampled score is the same after an interruption
    first = state.pending or 0
    if not first and plan.validation is not None and (done % plan.validate_every == 0 or done == state.total(plan)):
        is_over = distributed.agreed(_validate(problem, plan, state), problem.device)
        if is_over and plan.falls and 2 * done < state.total(plan):
            state.shortened = 2 * done  # as from the middle of a run of so many steps
            log.info("%s: the learning rate falls from here on, until step %d", _without_better(plan), 2 * done)
        elif is_over:
            history.stopped, stop = _without_better(plan), True
    state.pending = max(1, first)
    epoch, rest = divmod(done, source.steps_per_epoch)
    seen = Step(done, epoch, rest == 0, history.loss[-1], problem.model, problem.likelihood, history)
    for number, callback in enumerate(plan.callbacks[max(0, first - 1) :], max(1, first)):
        state.pending = number + 1
        if distributed.agreed(_asks_to_stop(callback(seen)), problem.device):
            history.stopped, stop = history.stopped or "a callback asked for it", True
        for module in (problem.model, problem.likelihood):
            if not module.training:  # a callback that predicts
                module.train()
    if plan.callbacks:
        problem.check_parameters()
    state.pending = None
    return stop


def _asks_to_stop(answer: Any) -> bool:
    """Whether a callback said True: a number of bytes written, for one, is no such wish."""
    return answer is True or (isinstance(answer, np.bool_) and bool(answer))


def _without_better(plan: Plan) -> str:
    return f"no better validation in {plan.patience}"


def _validate(problem: Problem, plan: Plan, state: RunState) -> bool:
    """Whether patience is over."""
    history, value = state.history, _score(problem, plan, state)
    history.validation.append((history.steps, value))
    if plan.patience is None:
        return False
    if math.isfinite(value) and (state.best is None or value < state.best["score"]):
        state.best = {"score": value, "step": history.steps, **problem.copy_state()}
        history.best_step = history.steps
    since = max(0 if state.best is None else state.best["step"], (state.shortened or 0) // 2)
    return sum(step > since for step, _ in history.validation) >= plan.patience


def _score(problem: Problem, plan: Plan, state: RunState) -> float:
    assert plan.validation is not None
    try:
        return score(problem.model, problem.likelihood, plan.validation)
    except NUMERICAL_ERRORS as error:
        log.warning("the validation after %d steps failed: %s", state.history.steps, error)
        return math.nan


def _try_validation(problem: Problem, plan: Plan) -> None:
    if plan.validation is not None:
        with problem.own_random_state():
            problem.seed_step(-1)
            try_out(problem.model, problem.likelihood, plan.validation)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def _save(problem: Problem, guard: Guard, plan: Plan, state: RunState, finished: bool) -> None:
    if plan.checkpoint is None:
        return
    checkpoints.save(
        plan.checkpoint,
        {
            "config": plan.config,
            "finished": finished,
            "total": plan.total,
            **problem.state(),
            "optimizer": guard.state_dict(state.guard),
            "history": asdict(state.history),
            "failures": state.guard.failures,
            "best": state.best,
            "pending": state.pending,
            "shortened": state.shortened,
            "callbacks": [c.state_dict() if hasattr(c, "state_dict") else None for c in plan.callbacks],
        },
    )


def _restore(problem: Problem, guard: Guard, plan: Plan) -> tuple[RunState, bool] | None:
    """The state in a checkpoint, if there is one, and whether the run was finished."""
    assert plan.checkpoint is not None
    saved = checkpoints.load(plan.checkpoint, problem.device)
    if saved is None:
        return None
    checkpoints.check_state(plan.checkpoint, saved, plan.config)
    problem.load_state(saved)
    past = saved["history"]
    past["validation"] = [tuple(entry) for entry in past["validation"]]
    past["skipped"] = [tuple(entry) for entry in past["skipped"]]
    history = History(**past)
    for callback, callback_state in zip(plan.callbacks, saved["callbacks"], strict=False):
        if callback_state is not None and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(callback_state)
    state = RunState(
        guard.load_state_dict(saved["optimizer"], saved["failures"]),
        history,
        saved["best"],
        saved["pending"],
        saved.get("shortened"),
    )
    # A run that was asked for more steps than before continues.
    finished = bool(saved["finished"]) and (plan.total <= saved["total"] or bool(history.stopped))
    if not finished and distributed.rank() == 0:
        log.info("resumed after %d of %d steps from %s", history.steps, plan.total, plan.checkpoint)
    return state, finished
