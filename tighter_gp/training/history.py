"""What a run of :func:`tighter_gp.fit` returns, and what its callbacks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
