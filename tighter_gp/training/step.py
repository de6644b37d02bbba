"""One training step: natural gradients for q(u), if it has any, and Adam for the rest; and what is done where it fails.

A step that fails is skipped. At the second failure in a row the update that led there is undone, and steps become smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, first_line
from . import distributed, optimizer
from .batches import Batch
from .body import Result, body
from .capture import Captured
from .distributed import StepSums
from .natural import Natural, parts_of
from .problem import Problem
from .recipe import Recipe

# After a step that had to be repeated, so many are taken with their checks at once.
_CHECKED_STEPS = 20

# Factors on the size of a step after a failure that undid an update, and after a success.
_SMALLER, _LARGER = 0.25, 1.1


class Info(NamedTuple):
    """What came of a step.

    :param loss: Minus the objective; NaN if it could not be computed.
    :param error: Why the step was not taken; None if it was.
    :param converged: Whether no further step is needed.
    """

    loss: float
    error: Exception | None = None
    converged: bool = False


class State(NamedTuple):
    """What a run remembers.

    :param natural: q(u) by its natural parameters.
    :param adam: Of the other parameters.
    :param spread: Standard deviation of the inputs, the unit of the inducing points' learning rate; None before a batch.
    :param is_warm: Whether the run began with a q(u) that knew of data.
    """

    natural: list[Natural]
    adam: optimizer.Adam
    spread: float | None
    is_warm: bool


class GradientStep:
    """Moves q(u) by natural gradients, the rest by Adam.

    :param problem: What is trained.
    :param recipe: Step sizes, resolved; ``natural=0`` for Adam alone.
    :param full_batch: Whether every batch has all data.
    :param compile: Whether steps are compiled.
    """

    def __init__(self, problem: Problem, recipe: Recipe, full_batch: bool, compile: bool = False) -> None:
        self.problem, self.recipe, self.full_batch = problem, recipe, full_batch
        self.parts = parts_of(problem.model) if recipe.natural else []
        in_q = {id(parameter) for part in self.parts for parameter in part.parameters}
        rest = {name: p for name, p in problem.parameters.items() if id(p) not in in_q}
        self.rest, kinds = list(rest.values()), optimizer.kinds_of(problem)
        self.kinds, self.bounds = [kinds[name] for name in rest], optimizer.stated_bounds(problem)
        sparse = optimizer.tables_of(problem)
        self.tables = [place for place, parameter in enumerate(self.rest) if id(parameter) in sparse]
        self.captured = Captured(problem, self.parts, list(rest)) if compile and not distributed.is_active() else None
        self.num_checked = 0

    def init(self) -> State:
        """From the parameters as they are."""
        natural = [part.init() for part in self.parts]
        is_warm = any(part.knows_data(q) for part, q in zip(self.parts, natural, strict=True))
        return State(natural, optimizer.init(self.rest), None, is_warm)

    def step(
        self, state: State, batch: Batch, number: int, total: int, damping: float, undo: Callable[[], None]
    ) -> tuple[State, Info]:
        """Take a step, unless the loss or a gradient is not finite.

        :param number: Steps that were done before.
        :param total: Steps of the run.
        :param damping: Factor on the size of the step.
        :param undo: Puts the parameters back to where the step began.
        """
        scale, failure = damping * batch.share, None
        rho = scale * self.recipe.natural_size(number, total, self.full_batch, state.is_warm)
        size = torch.full((1,), rho, dtype=torch.float64, device=self.problem.device)
        reseed = partial(self.problem.seed_step, number)
        for place, attempt in enumerate(self._attempts(reseed)):
            if place:
                undo()
                self.num_checked = _CHECKED_STEPS
            reseed()
            try:
                loss, result = _read(attempt(state.natural, batch, size))
                break
            except NUMERICAL_ERRORS as error:
                failure = error
        else:
            return state, Info(math.nan, failure)
        spread = _spread(batch) if state.spread is None else state.spread
        gradients = [gradient * batch.share for gradient in result.gradients] if batch.share < 1 else result.gradients
        rates = self.recipe.rates(number, total, spread)
        adam = optimizer.update(
            state.adam, gradients, self.rest, [scale * rates[kind] for kind in self.kinds], self.tables
        )
        with torch.no_grad():
            for parameter, lower, upper in self.bounds:
                parameter.clamp_(lower, upper)
        return State(list(result.natural), adam, spread, state.is_warm), Info(loss)

    # -- attempts: the last one looks at once if all goes well --------------------------------------------------------

    def _attempts(self, reseed: Callable[[], None]) -> list[Callable[..., Result]]:
        checked = partial(self._eager, reseed, True)
        first: list[Callable[..., Result]] = []
        if self.captured is not None:
            first = [self.captured]
        elif self.problem.device.type != "cpu" and not distributed.is_active() and not self.num_checked:
            first = [partial(self._eager, reseed, False)]
        self.num_checked = max(0, self.num_checked - 1)
        return [*first, checked]

    def _eager(
        self, reseed: Callable[[], None], check: bool, natural: Sequence[Natural], batch: Batch, size: Tensor
    ) -> Result:
        """Without ``check``, what a step would look at on its way is read with the loss: one look at the device."""
        like = next(iter(self.problem.parameters.values())).new_zeros(1)
        sums = StepSums([tensor for q in natural for tensor in q], [like, *self.rest])
        try:
            result = body(self.problem, self.parts, natural, batch, size, self.rest, sums, check, reseed)
        except NUMERICAL_ERRORS:
            sums.fail()
            raise
        loss, *gradients = sums(result.loss, *result.gradients)
        return result._replace(loss=loss, gradients=gradients)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, state: State) -> dict[str, Any]:
        """The state as tensors, numbers, lists and dicts."""
        return {**state._asdict(), "natural": [list(q) for q in state.natural], "adam": list(state.adam)}

    def load_state_dict(self, saved: dict[str, Any]) -> State:
        """The state from that."""
        device = self.problem.device
        natural = [Natural(*(tensor.to(device) for tensor in q)) for q in saved["natural"]]
        count, *moments = saved["adam"]
        adam = optimizer.Adam(count, *([tensor.to(device) for tensor in tensors] for tensors in moments))
        return State(natural, adam, saved["spread"], saved["is_warm"])


def _read(result: Result) -> tuple[float, Result]:
    """The loss as a number, if it and all gradients are finite and all flags True: one read from the device."""
    norms = torch._foreach_norm(list(result.gradients), math.inf) if result.gradients else []
    flags = [torch.where(flag, 0.0, math.nan) for flag in result.ok]
    values = torch.stack([value.reshape(()).double() for value in (result.loss, *norms, *flags)]).tolist()
    if not all(map(math.isfinite, values)):
        raise NanError(f"the loss is {values[0]}, or a gradient or the precision of q(u) is of no use.")
    return values[0], result


def _spread(batch: Batch) -> float:
    """Root mean square over dimensions of the standard deviation of a batch's inputs, over all processes.

    Inducing points would not do: k-means puts some on outliers.
    """
    if batch.x is None:
        return 1.0
    inputs = batch.x.detach().double().flatten(end_dim=-2)  # [N, D]
    sums = inputs.new_full((1, inputs.size(-1)), len(inputs)), inputs.sum(0, True), inputs.square().sum(0, True)
    count, first, second = distributed.summed(torch.cat(sums))
    return math.sqrt(max(0.0, float((second / count - (first / count).square()).mean()))) or 1.0


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
        self.state = self.inner.load_state_dict(saved["inner"])
        self.damping, self.failures = saved["damping"], saved["failures"]
        if saved["before"] is not None:
            self.before = [value.to(p) for value, p in zip(saved["before"], self.parameters, strict=True)]


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(values))
