"""One training step: natural gradients for q(u), if it has any, and Adam for the rest, with one projection for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS
from . import distributed, optimizer
from .batches import Batch
from .body import Alone, Result, body
from .capture import Captured
from .natural import Natural, Part, parts_of
from .problem import Problem
from .recipe import Recipe

# After a step that had to be repeated, so many are taken with their checks at once.
_CHECKED_STEPS = 20


class Call(NamedTuple):
    """What a step is told besides its state and its batch.

    :param number: Steps that were done before.
    :param total: Steps of the run.
    :param damping: Factor on the size of the step.
    :param undo: Puts the parameters back to where the step began.
    """

    number: int
    total: int
    damping: float
    undo: Callable[[], None]


class Info(NamedTuple):
    """What came of a step.

    :param loss: Minus the objective; NaN if it could not be computed.
    :param error: Why the step was not taken; None if it was.
    :param converged: Why no further step is needed; empty if one is.
    """

    loss: float
    error: Exception | None = None
    converged: str = ""


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
        in_q = {id(parameter) for part in self.parts for parameter in part.parameters()}
        self.rest = {name: p for name, p in problem.parameters.items() if id(p) not in in_q}
        self.kinds, self.bounds = optimizer.kinds_of(problem), optimizer.stated_bounds(problem)
        sparse = optimizer.tables_of(problem)
        self.tables = [place for place, parameter in enumerate(self.rest.values()) if id(parameter) in sparse]
        self.captured = Captured(problem, self.parts, list(self.rest)) if compile else None
        self.num_checked, self.reseed = 0, lambda: None

    def init(self) -> State:
        """From the parameters as they are."""
        natural = [part.init() for part in self.parts]
        is_warm = any(part.knows_data(q) for part, q in zip(self.parts, natural, strict=True))
        return State(natural, optimizer.init(list(self.rest.values())), None, is_warm)

    def step(self, state: State, batch: Batch, call: Call) -> tuple[State, Info]:
        """Take a step, unless the loss or a gradient is not finite."""
        size = self.recipe.natural_size(call.number, call.total, self.full_batch, state.is_warm)
        attempts = [self._checked]
        if self.captured is not None and not distributed.is_active():
            attempts.insert(0, self._compiled)
        elif self.problem.device.type != "cpu" and not distributed.is_active() and not self.num_checked:
            attempts.insert(0, self._unseen)
        self.num_checked = max(0, self.num_checked - 1)
        loss, result, error = math.nan, None, None
        for number, attempt in enumerate(attempts):
            if number:
                call.undo()
                self.num_checked = _CHECKED_STEPS
            self.reseed = partial(self.problem.seed_step, call.number)
            self.reseed()
            error = None
            try:
                loss, result = attempt(state, batch, call.damping * batch.share * size)
            except NUMERICAL_ERRORS as caught:
                error = caught
            if error is None and result is not None:
                break
        if error is not None or result is None:
            return state, Info(math.nan, error)
        spread = _spread(self.problem, self.kinds, batch) if state.spread is None else state.spread
        rates = self._rates(call, batch.share, spread)
        gradients = [gradient * batch.share for gradient in result.gradients] if batch.share < 1 else result.gradients
        adam = optimizer.update(state.adam, gradients, list(self.rest.values()), rates, self.tables)
        with torch.no_grad():
            for parameter, lower, upper in self.bounds:
                parameter.clamp_(lower, upper)
        return State(result.natural, adam, spread, state.is_warm), Info(loss)

    def _rates(self, call: Call, share: float, spread: float) -> list[float]:
        """The learning rate of every parameter that Adam trains."""
        recipe = self.recipe
        lr, factor = recipe.lr or 0.01, call.damping * share * recipe.lr_factor(call.number, call.total)
        if not recipe.natural:
            return [lr * factor] * len(self.rest)
        inducing = call.damping * share * recipe.inducing_lr_factor(call.number, call.total)
        rates = {"inducing": lr * recipe.inducing_lr * spread * inducing, "other": recipe.other_lr * factor}
        return [rates.get(self.kinds[name], lr * factor) for name in self.rest]

    # -- attempts: each gives the loss over all processes and the result, or raises ------------------------------------

    def _checked(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        leaves, sums = list(self.rest.values()), Sums(self.problem, self.parts, state.natural)
        try:
            result = body(self.problem, self.parts, state.natural, batch, size, leaves, sums, reseed=self.reseed)
        except NUMERICAL_ERRORS:
            sums.fail(leaves)
            raise
        loss, *gradients = sums.last(result.loss, *result.gradients)
        return _read(result._replace(loss=loss, gradients=gradients))

    def _unseen(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        """With one look at the device: what a step would look at on its way is read with the loss."""
        leaves = list(self.rest.values())
        return _read(
            body(self.problem, self.parts, state.natural, batch, size, leaves, check=False, reseed=self.reseed)
        )

    def _compiled(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        assert self.captured is not None
        found = self.captured(state.natural, batch, size)
        if found is None:
            raise NanError("the step is not compiled")
        loss, ok, gradients, natural, values = found
        parameters = (parameter for part in self.parts for parameter in part.parameters())
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return _read(Result(loss, gradients, natural, [ok]))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, state: State) -> dict[str, Any]:
        """The state as tensors, numbers, lists and dicts."""
        return {
            "natural": [list(q) for q in state.natural],
            "adam": list(state.adam),
            "spread": state.spread,
            "is_warm": state.is_warm,
        }

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
    flags = [flag.reshape(()).double() for flag in result.ok]
    norms = [norm.double() for norm in norms]
    values = torch.stack([result.loss.reshape(()).double(), *norms, *flags]).tolist()
    passed = all(values[len(values) - len(flags) :]) if flags else True
    if not passed or not all(map(math.isfinite, values)):
        raise NanError(f"the loss is {values[0]}, or a gradient or the precision of q(u) is of no use.")
    return values[0], result


class Sums(Alone):
    """The two messages of a step between processes: the sums of the natural step, then the loss with its gradients.

    A process whose step failed says so in the place of the next one, so that none waits for it.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part], natural: Sequence[Natural]) -> None:
        like = next(iter(problem.parameters.values()))
        self.send, self.dtype = distributed.StepSums(like.detach().reshape(-1)[:1]), like.dtype
        self.num_natural = sum(q.precision.numel() + q.linear.numel() for q in natural)
        self.is_first = bool(parts)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The sums of some tensors; those of the natural step come first."""
        self.is_first = False
        return self.send(torch.float64, *tensors)

    def largest(self, value: Tensor) -> Tensor:
        """The largest value over the processes."""
        return self.send.largest(value)

    def last(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The loss and its gradients, summed."""
        return self.send(self.dtype, *tensors)

    def fail(self, leaves: Sequence[Tensor]) -> None:
        """Say that this process failed, unless that came from another."""
        if not self.send.has_failed:
            size = self.num_natural if self.is_first else 1 + sum(leaf.numel() for leaf in leaves)
            with suppress(NanError):
                self.send.fail(size, torch.float64 if self.is_first else self.dtype)


def _spread(problem: Problem, kinds: Mapping[str, str], batch: Batch) -> float:
    """Root mean square over dimensions of the standard deviation of a batch's inputs, over all processes.

    Inducing points would not do: k-means puts some on outliers.
    """
    if batch.x is None:
        return 1.0
    inputs = batch.x.detach().double()
    inputs = inputs.reshape(-1, inputs.size(-1)) if inputs.dim() > 1 else inputs.unsqueeze(-1)
    sums = distributed.StepSums(inputs.reshape(-1)[:1])
    count, first, second = sums(torch.float64, inputs.new_tensor([len(inputs)]), inputs.sum(0), inputs.square().sum(0))
    found = math.sqrt(max(0.0, float((second / count - (first / count).square()).mean())))
    if found:
        return found
    points = [p.detach().double() for name, p in problem.parameters.items() if kinds[name] == "inducing"]
    return math.sqrt(sum(float(p.var(-2).mean()) for p in points if p.size(-2) > 1)) or 1.0
