"""What a run of :func:`tighter_gp.fit` leaves behind, and what its callbacks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """What happened in a run of :func:`~tighter_gp.fit`.

    :param loss: Minus the objective per datum on the batch of each step; NaN for a skipped step. With natural gradients q(u) was
        moved to this batch first, so with small batches it is lower than minus the bound of all data, which
        :func:`~tighter_gp.evaluate_bound` gives.
    :param validation: Step and mean negative log predictive density per point of each validation, joint over the outputs of
        a point; NaN for one that failed.
    :param skipped: Step and reason of each step that was not taken.
    :param seconds: Time spent in steps; validation, callbacks and checkpoints are not counted.
    :param best_step: Step whose parameters were kept by early stopping.
    :param stopped: Why the run ended before its last step; empty if it did not.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3)
        >>> history.steps, history.skipped, history.stopped
        (3, [], '')
    """

    loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    best_step: int | None = None
    stopped: str = ""

    @property
    def steps(self) -> int:
        """Number of steps done, skipped ones included."""
        return len(self.loss)


@dataclass(frozen=True)
class Step:
    """What a callback of :func:`~tighter_gp.fit` is given after each step.

    :param step: Number of steps done.
    :param epoch: Number of epochs done.
    :param epoch_end: Whether this step ended an epoch.
    :param loss: Minus the objective; NaN if the step was skipped.
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
