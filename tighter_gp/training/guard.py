"""Skip a step that fails, undo the update that led there, take smaller ones, and at last give up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..checks import first_line
from .batches import Batch
from .problem import Problem
from .step import Info

_SMALLER, _LARGER = 0.25, 1.1


class Guard:
    """A step that may fail.

    :param step: A :class:`~tighter_gp.training.step.GradientStep` or a :class:`~tighter_gp.training.lbfgs.LBFGSStep`, whose
        ``init``, ``step``, ``state_dict`` and ``load_state_dict`` pass a state on.
    :param problem: What it trains.
    :param max_failures: Failures in a row before the error is raised.
    :ivar state: Of the step; None before the first.
    :ivar before: Parameters before the last update; None if there was none, or it was undone.
    :ivar damping: Factor on the size of a step, which failures lower and successes raise.
    :ivar failures: Failed steps in a row.
    :ivar error: The last failure.
    """

    def __init__(self, step: Any, problem: Problem, max_failures: int) -> None:
        self.inner, self.parameters, self.max_failures = step, list(problem.parameters.values()), max_failures
        self.state: Any = None
        self.before: list[Tensor] | None = None
        self.spare: list[Tensor] | None = None  # memory of an earlier copy
        self.damping, self.failures = 1.0, 0
        self.error: Exception | None = None

    def step(self, batch: Batch, number: int, total: int) -> Info:
        """Take a step, or return to where the last was taken from.

        :param number: Steps that were done before.
        :param total: Steps of the run.
        :raises RuntimeError: After too many failures in a row.
        """
        now = self.spare or [torch.empty_like(parameter) for parameter in self.parameters]
        _copy(now, self.parameters)
        undo = lambda: _copy(self.parameters, now)
        try:
            self.state, info = self.inner.step(self.state, batch, number, total, self.damping, undo)
        except BaseException:
            undo()
            raise
        if info.error is None:
            self.spare, self.before, self.error = self.before, now, None
            self.damping, self.failures = min(1.0, _LARGER * self.damping), 0
            return info
        undo()
        self.spare, self.failures, self.error = now, self.failures + 1, info.error
        if self.failures == 2:
            self.undo()
        if self.failures >= self.max_failures:
            self.give_up(number)
        return info

    def undo(self) -> None:
        """Take the last update back, if there is one; Adam starts anew, with a quarter of the step."""
        if self.before is not None:
            _copy(self.parameters, self.before)
            self.state, self.before, self.damping = self.inner.init(), None, _SMALLER * self.damping

    def give_up(self, number: int) -> NoReturn:
        """Raise with all that is known.

        :param number: The last step that failed.
        """
        assert self.error is not None
        raise RuntimeError(
            f"{self.failures} steps in a row failed, the last, step {number}, with: {first_line(self.error)} The "
            "parameters are the last for which a step succeeded. A smaller lr, scaled data or float64 may help."
        ) from self.error

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        inner = self.inner.state_dict(self.state)
        return {"inner": inner, "before": self.before, "damping": self.damping, "failures": self.failures}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what that returned."""
        self.state, self.damping, self.failures = (
            self.inner.load_state_dict(saved["inner"]),
            saved["damping"],
            saved["failures"],
        )
        if saved["before"] is not None:
            self.before = [value.to(p) for value, p in zip(saved["before"], self.parameters, strict=True)]


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(values))
