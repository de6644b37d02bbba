"""Skip a step that fails, undo the update that led there, take smaller ones, and at last give up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..checks import first_line
from .batches import Batch
from .step import Call, Info

_SMALLER, _LARGER = 0.25, 1.1


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers.

    :param inner: State of the step.
    :param before: Parameters before the last update; None if there was none, or it was undone.
    :param damping: Factor on the size of a step, which failures lower and successes raise.
    :param failures: Failed steps in a row.
    :param error: The last failure.
    """

    inner: Any
    before: list[Tensor] | None = None
    damping: float = 1.0
    failures: int = 0
    error: Exception | None = None


class Guard:
    """A step that may fail.

    :param step: A :class:`~tighter_gp.training.step.GradientStep` or a :class:`~tighter_gp.training.lbfgs.LBFGSStep`, whose
        ``init``, ``step``, ``state_dict`` and ``load_state_dict`` pass a state on.
    :param parameters: What it changes.
    :param max_failures: Failures in a row before the error is raised.
    """

    def __init__(self, step: Any, parameters: Sequence[Tensor], max_failures: int) -> None:
        self.inner, self.parameters, self.max_failures = step, list(parameters), max_failures
        self.spare: list[Tensor] | None = None  # memory of an earlier copy

    def init(self) -> GuardState:
        """The state before the first step."""
        return GuardState(self.inner.init())

    def step(self, state: GuardState, batch: Batch, number: int, total: int) -> tuple[GuardState, Info]:
        """Take a step, or return to where the last was taken from.

        :param number: Steps that were done before.
        :param total: Steps of the run.
        :raises RuntimeError: After too many failures in a row.
        """
        now, self.spare = self.spare or [torch.empty_like(parameter) for parameter in self.parameters], None
        _copy(now, self.parameters)
        undo = lambda: _copy(self.parameters, now)
        try:
            inner, info = self.inner.step(state.inner, batch, Call(number, total, state.damping, undo))
        except BaseException:
            undo()
            raise
        if info.error is None:
            self.spare = state.before
            return GuardState(inner, now, min(1.0, _LARGER * state.damping)), info
        undo()
        self.spare = now
        state = replace(state, inner=inner, failures=state.failures + 1, error=info.error)
        if state.failures == 2:
            state = self.undo(state)
        if state.failures >= self.max_failures:
            self.give_up(state, number)
        return state, info

    def undo(self, state: GuardState) -> GuardState:
        """Take the last update back, if there is one; Adam starts anew, with a quarter of the step."""
        if state.before is None:
            return state
        _copy(self.parameters, state.before)
        return replace(state, inner=self.inner.init(), before=None, damping=_SMALLER * state.damping)

    def give_up(self, state: GuardState, number: int) -> NoReturn:
        """Raise with all that is known.

        :param number: The last step that failed.
        """
        assert state.error is not None
        raise RuntimeError(
            f"{state.failures} steps in a row failed, the last, step {number}, with: {first_line(state.error)} The "
            "parameters are the last for which a step succeeded. A smaller lr, scaled data or float64 may help."
        ) from state.error

    def state_dict(self, state: GuardState) -> dict[str, Any]:
        """For a checkpoint."""
        inner = self.inner.state_dict(state.inner)
        return {"inner": inner, "before": state.before, "damping": state.damping, "failures": state.failures}

    def load_state_dict(self, saved: dict[str, Any]) -> GuardState:
        """The state from that."""
        before = saved["before"] and [v.to(p) for v, p in zip(saved["before"], self.parameters, strict=True)]
        return GuardState(self.inner.load_state_dict(saved["inner"]), before, saved["damping"], saved["failures"])


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(values))
