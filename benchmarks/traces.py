"""Numbers noted a few times in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tighter_gp.training import Step


class Trace:
    """Callback of :func:`~tighter_gp.fit` that notes numbers now and then; its state is part of a checkpoint.

    :param measure: What to note.
    :param is_due: Whether to note it after a step.
    """

    def __init__(self, measure: Callable[[Step], dict[str, Any]], is_due: Callable[[Step], bool]) -> None:
        self.measure, self.is_due = measure, is_due
        self.points: list[dict[str, Any]] = []

    def __call__(self, state: Step) -> None:
        """Called after every step."""
        if self.is_due(state):
            self.points.append(self.measure(state))

    def state_dict(self) -> dict[str, Any]:
        """What was noted."""
        return {"points": self.points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.points = state["points"]


def at_epochs(epochs: int, times: int) -> Callable[[Step], bool]:
    """Due at the end of epochs, this many times in all."""
    every = max(1, epochs // times) if times > 0 else 0
    return lambda state: every > 0 and state.epoch_end and state.epoch % every == 0


def place(state: Step) -> dict[str, Any]:
    """Where training stands."""
    return {"epoch": state.epoch, "step": state.step, "seconds": round(state.history.seconds, 3)}
