r"""How :func:`tighter_gp.fit` steps: natural gradients on q(u), Adam on the rest, with sizes chosen by experiment.

q(u) moves first. Its first step has size 1, the optimum of the first batch, unless q(u) knows of data already. The size then
falls as :math:`1/t`, which makes q(u) a mean over batches, stays constant while the other parameters move, and falls again
at the end.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..likelihoods.family import family

__all__ = ["Recipe"]

_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 0.01**done,
    "linear": lambda done: 1.0 - done,
}


@dataclass(frozen=True)
class Recipe:
    r"""Step sizes of :func:`~tighter_gp.fit`, and what it does where a step fails.

    :param lr: Learning rate of Adam: default 0.2 for the hyperparameters, beside natural gradients, and 0.01 without.
    :param inducing_lr: The same for inducing points, as a fraction of ``lr`` and in units of the inputs' standard deviation.
    :param other_lr: The same for parameters that are not part of a GP, such as a network's weights.
    :param natural: Size of the natural step, at most 1: default 0.2 for Gaussian noise, 0.05 for other likelihoods, 0.02 for
        those that are sampled. 0: Adam for all parameters.
    :param natural_full: The same where every batch has all data; default 0.9 for Gaussian noise, else 0.5.
    :param natural_end: Size of the natural step at the end, as a fraction of that.
    :param decay: Fraction of the run, at its end, over which the learning rate falls linearly to zero.
    :param ramp: Steps over which the learning rate rises at the start.
    :param schedule: In place of ``decay`` and ``ramp``: ``"constant"``, ``"cosine"``, ``"linear"`` to zero, ``"exponential"``
        to a hundredth, or a function of the fraction of the run that is done. It returns a factor on the learning rates.
    :param compile: Whether steps are compiled: True, False, or by default on a CPU for runs that are long enough.
    :param max_failures: Failed steps in a row after which the error is raised.
    :param validate_every: Steps between validations; default an epoch, or a fiftieth of the run where that is longer.
    :param checkpoint_every: Steps between checkpoints; default an epoch, and at least 100.

    Example:
        >>> recipe = tighter_gp.Recipe()
        >>> [round(recipe.lr_factor(step, total=100), 3) for step in (0, 4, 49, 75, 99)]
        [0.2, 1.0, 1.0, 0.5, 0.02]
        >>> [round(recipe.natural_size(step, total=100), 3) for step in (0, 1, 4, 49, 75, 99)]
        [1.0, 0.5, 0.2, 0.2, 0.125, 0.053]
    """

    lr: float | None = None
    inducing_lr: float = 0.25
    other_lr: float = 0.01
    natural: float | None = None
    natural_full: float | None = None
    natural_end: float = 0.25
    decay: float = 0.5
    ramp: int = 5
    schedule: str | Callable[[float], float] | None = None
    compile: bool | str = "auto"
    max_failures: int = 10
    validate_every: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "natural", "natural_full", "inducing_lr", "other_lr"):
            value = getattr(self, name)
            if value is None:
                continue
            number = float(value) if isinstance(value, numbers.Real) else math.nan  # also one of numpy's
            if not (0 < number < math.inf or (name == "natural" and number == 0)):
                raise ValueError(f"{name} must be positive and finite; got {value!r}.")
            if name.startswith("natural") and number > 1:
                raise ValueError(f"{name} is the size of a step, at most 1; got {value!r}.")
            object.__setattr__(self, name, number)
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; got {self.compile!r}.")
        if isinstance(self.schedule, str) and self.schedule not in _SCHEDULES:
            raise ValueError(f"Unknown schedule {self.schedule!r}; choose one of {', '.join(_SCHEDULES)}.")
        for tenth in range(11):
            self._falling(tenth, 10)

    def resolved(self, likelihood: Any, is_natural: bool) -> Recipe:
        """The same with every size, for a likelihood."""
        is_gaussian, is_sampled = family(likelihood).is_gaussian, family(likelihood).is_sampled
        if not is_natural:  # one rate for all parameters
            schedule = self.schedule or "cosine"
            return replace(self, lr=self.lr or 0.01, other_lr=self.lr or 0.01, natural=0.0, schedule=schedule)
        natural = self.natural or (0.2 if is_gaussian else 0.02 if is_sampled else 0.05)
        full = self.natural_full or self.natural or (0.9 if is_gaussian else 0.5)
        other_lr = self.lr or self.other_lr
        return replace(self, lr=self.lr or 0.2, other_lr=other_lr, natural=natural, natural_full=full)

    def described(self) -> str:
        """What tells one from another, with some values in place of a function; not how often a run looks up."""
        values = {name: getattr(self, name) for name in ("lr", "natural", "schedule", "decay", "ramp", "other_lr")}
        if callable(self.schedule):
            values["schedule"] = ", ".join(f"{self.schedule(done / 4):.4g}" for done in range(5))
        return ", ".join(f"{name}={value}" for name, value in values.items())

    def lr_factor(self, step: int, total: int) -> float:
        """Factor on Adam's learning rates at a step, counted from 0."""
        rising = 1.0 if self.schedule is not None else min(1.0, (step + 1) / self.ramp)
        return self._falling(step, total) * rising

    def rates(self, step: int, total: int, spread: float) -> dict[str, float]:
        """Learning rates by kind of parameter; with Adam alone one for all.

        :param spread: Standard deviation of the inputs.
        """
        lr, factor = self.lr or 0.01, self.lr_factor(step, total)
        inducing = factor
        if self.natural:
            cosine = math.inf if self.schedule is not None else 0.5 * (1 + math.cos(math.pi * step / total))
            inducing = self.inducing_lr * spread * min(factor, cosine)  # falls over the whole run
        return {"hyper": lr * factor, "other": self.other_lr * factor, "inducing": lr * inducing}

    def natural_size(self, step: int, total: int, full_batch: bool = False, is_warm: bool = False) -> float:
        """Size of the natural step.

        :param full_batch: Whether every batch has all data.
        :param is_warm: Whether q(u) knew of data at the start, which a first step of size 1 would throw away.
        """
        first = 0.0 if is_warm or self.schedule is not None else 1 / (step + 1)
        if full_batch:
            return max(self.natural_full or 0.9, first)
        factor = self._falling(step, total)
        size = (self.natural or 0.2) * (factor + self.natural_end * (1 - factor))
        return max(min(size, 1.0), first)

    def _falling(self, step: int, total: int) -> float:
        """Factor on step sizes that falls over the run."""
        done = step / total
        if self.schedule is None:
            return min(1.0, (1 - done) / self.decay)
        schedule = _SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        factor = float(schedule(done))
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"schedule must return a factor that is finite and at least 0; at {done:g} it is {factor}."
            )
        return factor
