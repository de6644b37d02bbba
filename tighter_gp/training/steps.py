"""One step of training: a batch comes in, parameters change, and an account of it goes out.

A step is an object without a memory of its own. ``init`` makes the state of a run, ``step`` takes it and gives it back,
and ``state_dict`` and ``load_state_dict`` carry it through a checkpoint. Another kind of step, such as one with natural
gradients, is another class with these five names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, deferred_checks, passed
from ..compiled import CompiledStep
from . import distributed
from .batches import Batch
from .lbfgs import FullBatchLBFGS
from .optimizers import Optimizers
from .problem import Problem

# L-BFGS has converged after this many iterations in a row that change the loss by less than this fraction.
_QUIET_ITERATIONS, _QUIET = 3, 1e-9

# After a step that had to be repeated this many are checked on their way.
_CHECKED_STEPS = 20


class Call(NamedTuple):
    """What a step is told besides its state and its batch.

    :param number: Steps that were done before.
    :param total: Steps of the run.
    :param damping: Factor on the size of the update.
    :param keep: To be called once per step, with gradients in place, right before parameters change, if the update can be
        undone. It takes the earlier values of those that changed before, by the ids of the parameters.
    """

    number: int
    total: int
    damping: float
    keep: Callable[[Mapping[int, Tensor]], None]

    @property
    def fraction(self) -> float:
        """Fraction of the run that is done."""
        return self.number / self.total


class Info(NamedTuple):
    """What came of a step.

    :param loss: Minus the objective; NaN if it could not be computed.
    :param error: Why the step was not taken; None if it was.
    :param converged: Why no further step is needed; empty if one is.
    """

    loss: float
    error: Exception | None = None
    converged: str = ""


class Step(Protocol):
    """One way to train."""

    name: str

    def init(self) -> Any:
        """The state before the first step, and after an update was undone."""
        ...

    def step(self, state: Any, batch: Batch, call: Call) -> tuple[Any, Info]:
        """Take a step. One that fails leaves the parameters as they were."""
        ...

    def state_dict(self, state: Any) -> dict[str, Any]:
        """The state as tensors, numbers, lists and dicts."""
        ...

    def load_state_dict(self, saved: dict[str, Any]) -> Any:
        """The state from that; what ``init`` gives where there is nothing of it."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# Losses with gradients
# ---------------------------------------------------------------------------------------------------------------------

Gradients = Callable[[Batch], tuple[Tensor | None, Exception | None]]


def eager_gradients(problem: Problem) -> Gradients:
    """Computes the weighted loss of a batch and leaves gradients in ``.grad``; or returns what went wrong."""

    def compute(batch: Batch) -> tuple[Tensor | None, Exception | None]:
        try:
            loss = problem.weighted_loss(batch)
            loss.backward()
        except NUMERICAL_ERRORS as error:
            return None, error
        return loss.detach(), None

    return compute


def is_full(batch: Batch, batch_size: int) -> bool:
    """Whether a batch has the size of most, for which a graph is made; the last of an epoch may have fewer points."""
    return batch.size >= batch_size - 1  # those of an epoch that is cut evenly differ by one


def compiled_gradients(problem: Problem, batch_size: int) -> Gradients:
    """The same by a compiled graph; a step that fails in it, and the short last batch of an epoch, are taken eagerly."""
    compiled, eager = CompiledStep(problem.objective), eager_gradients(problem)

    def compute(batch: Batch) -> tuple[Tensor | None, Exception | None]:
        assert batch.x is not None
        if not is_full(batch, batch_size):
            return eager(batch)
        loss = compiled(batch.x, batch.y, **problem.positions(batch), **batch.kwargs).sum()
        if not passed(torch.isfinite(loss)):
            problem.objective.zero_grad(set_to_none=True)
            return eager(batch)
        for parameter in problem.parameters.values():
            if batch.weight != 1 and parameter.grad is not None:
                parameter.grad.mul_(batch.weight)
        return loss * batch.weight, None

    return compute


class Joined(NamedTuple):
    """Loss and gradients of a batch, which are in ``.grad``.

    :param loss: The loss over all processes.
    :param largest: The largest entry of each gradient, by name.
    :param error: What went wrong; there are no gradients then.
    """

    loss: float
    largest: dict[str, float]
    error: Exception | None


class Attempts:
    """Gradients of a batch, with one look at the device where that will do.

    On an accelerator a step is first taken unseen: what it would look at on its way becomes a flag, and all flags are read
    together with the loss. Where one fails, the step is repeated with its checks, which take a wider precision or a smaller
    step, or say what is wrong. The numbers are the same either way, to rounding. Several processes, who must agree, always check.

    :param problem: What is trained.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.num_checked = problem, 0

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Gradients,
        batch: Batch,
        number: int,
        undo: Callable[[], None] = lambda: None,
    ) -> Joined:
        """Compute them.

        :param parameters: What they are wanted for.
        :param gradients: Leaves them in ``.grad``.
        :param batch: The batch.
        :param number: Of the step, whose random numbers are drawn again.
        :param undo: Takes back what else an attempt has changed.
        """
        if self.problem.device.type == "cpu" or distributed.is_active() or self.num_checked:
            self.num_checked = max(0, self.num_checked - 1)
            return _joined_gradients(parameters, gradients, batch)
        with suppress(ValueError), deferred_checks(asks_precision=True) as flags:
            found = _joined_gradients(parameters, gradients, batch, flags)
            if found.error is None:
                return found
        undo()
        self.num_checked = _CHECKED_STEPS
        self.problem.seed_step(number)
        return _joined_gradients(parameters, gradients, batch)


def _joined_gradients(
    parameters: Mapping[str, Tensor], gradients: Gradients, batch: Batch, flags: list[Tensor] | None = None
) -> Joined:
    """The loss and gradients of a batch over all processes, in ``.grad``, which is empty if anything is not finite.

    :param flags: Of checks that were deferred, which the computation adds to; None if none was.
    """
    values = list(parameters.values())
    for parameter in values:
        parameter.grad = None
    loss, error = gradients(batch)
    joined, num_failed = distributed.sum_gradients(values, loss)
    for parameter in values:
        if parameter.grad is not None and parameter.grad.is_sparse:  # once, for all that ask for its rows
            known = None if flags is None or batch.rows is None else joined_rows(parameter.grad, batch.rows, flags)
            parameter.grad = parameter.grad.coalesce() if known is None else known
    value, largest, ok = (math.nan, {}, False) if joined is None else read_together(joined, parameters, flags or ())
    if ok and all(map(math.isfinite, (value, *largest.values()))):
        return Joined(value, largest, None)
    for parameter in values:
        parameter.grad = None
    if num_failed:
        error = error or NanError(f"{num_failed} of {distributed.world_size()} processes failed")
    return Joined(value, {}, error or NanError(f"the loss is {value} or its gradient is not finite."))


def joined_rows(grad: Tensor, rows: Tensor, flags: list[Tensor]) -> Tensor | None:
    """A sparse gradient whose rows are those of the batch, each once, which nobody has to wait for; None for another."""
    if grad.sparse_dim() != 1 or grad._nnz() % len(rows):
        return None
    ordered = rows.sort().values
    found = grad._indices()[0]
    place = torch.searchsorted(ordered, found).clamp_max(len(rows) - 1)
    values = grad._values()
    counts = torch.zeros_like(ordered).index_add_(0, place, torch.ones_like(place))
    flags.append((ordered[place] == found).all() & (counts > 0).all() & (ordered.diff() > 0).all())
    sums = torch.zeros(len(rows), *values.shape[1:], dtype=values.dtype, device=values.device).index_add_(
        0, place, values
    )
    return torch.sparse_coo_tensor(ordered.unsqueeze(0), sums, grad.shape, check_invariants=False, is_coalesced=True)


def read_together(
    loss: Tensor, parameters: Mapping[str, Tensor], flags: Sequence[Tensor]
) -> tuple[float, dict[str, float], bool]:
    """The loss, the largest entry of every gradient, and whether all flags are True: one read from the device."""
    largest = {
        name: torch.linalg.vector_norm(grad.values() if grad.is_sparse else grad, math.inf).double()
        for name, grad in ((name, parameter.grad) for name, parameter in parameters.items())
        if grad is not None and grad.numel()
    }
    read = torch.stack([loss.double(), *(flag.double() for flag in flags), *largest.values()]).tolist()
    value, ok, norms = read[0], all(read[1 : 1 + len(flags)]), read[1 + len(flags) :]
    return value, dict(zip(largest, norms, strict=True)), ok


# ---------------------------------------------------------------------------------------------------------------------
# Adam
# ---------------------------------------------------------------------------------------------------------------------


class AdamStep:
    """A step of Adam, and of SparseAdam for tables.

    :param problem: What is trained.
    :param schedule: Factor on the learning rate as a function of the fraction of the run that is done.
    :param make_optimizers: Makes them from the names of the parameters with sparse gradients.
    :param compile: Size of the batches for which steps are compiled; None if they are not.
    """

    name = "adam"

    def __init__(
        self,
        problem: Problem,
        schedule: Callable[[float], float],
        make_optimizers: Callable[[set[str]], Optimizers],
        compile: int | None = None,
    ) -> None:
        self.problem, self.schedule, self.make_optimizers = problem, schedule, make_optimizers
        self.gradients = eager_gradients(problem) if compile is None else compiled_gradients(problem, compile)
        self.attempts = Attempts(problem)

    def init(self) -> Optimizers | None:
        """None: which gradients are sparse is known after the first of them."""
        return None

    def step(self, state: Optimizers | None, batch: Batch, call: Call) -> tuple[Optimizers | None, Info]:
        """Take a step, unless the loss or a gradient is not finite."""
        parameters = self.problem.parameters
        loss, largest, error = self.attempts(parameters, self.gradients, batch, call.number)
        if error is not None:
            return state, Info(math.nan, error)
        if state is None:
            state = self.make_optimizers({n for n, p in parameters.items() if p.grad is not None and p.grad.is_sparse})
        call.keep({})
        state.scale_down(largest, batch.share)
        factor = batch.share * self.schedule(call.fraction)
        state.step(lambda kind: factor, call.damping)
        return state, Info(loss)

    def state_dict(self, state: Optimizers | None) -> dict[str, Any]:
        """States of the optimizers."""
        return {"optimizers": None if state is None else state.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> Optimizers | None:
        """The optimizers with the states they had."""
        states = saved.get("optimizers")
        if states is None:
            return None
        optimizers = self.make_optimizers(set(states["sparse"]))
        optimizers.load_state_dict(states)
        return optimizers


# ---------------------------------------------------------------------------------------------------------------------
# L-BFGS
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LBFGSState:
    """The optimizer, once there is a batch; what a checkpoint had of it; and iterations without much change."""

    lbfgs: FullBatchLBFGS | None = None
    saved: dict[str, Any] | None = None
    quiet: int = 0


class LBFGSStep:
    """An iteration of L-BFGS on all data.

    :param problem: What is trained.
    """

    name = "lbfgs"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def init(self) -> LBFGSState:
        """No curvature is known."""
        return LBFGSState()

    def step(self, state: LBFGSState, batch: Batch, call: Call) -> tuple[LBFGSState, Info]:
        """One iteration. After a failure the curvature that led there is forgotten."""
        lbfgs = state.lbfgs or self._start(batch, state.saved)
        before = lbfgs.loss
        try:
            loss, moved = lbfgs.step()
        except (*NUMERICAL_ERRORS, FloatingPointError) as error:
            return LBFGSState(quiet=state.quiet), Info(math.nan, error)
        if lbfgs.error is not None and not moved:
            return LBFGSState(quiet=state.quiet), Info(loss, lbfgs.error)
        quiet = state.quiet + 1 if abs(before - loss) <= _QUIET * max(1, abs(loss)) else 0
        converged = "converged" if not moved or quiet >= _QUIET_ITERATIONS else ""
        return LBFGSState(lbfgs, quiet=quiet), Info(loss, converged=converged)

    def _start(self, batch: Batch, saved: dict[str, Any] | None) -> FullBatchLBFGS:
        problem = self.problem

        def evaluate() -> Tensor:
            problem.seed_step(-2)  # a sampled objective must be the same at every trial point
            loss = problem.loss(batch)
            loss.backward()
            return loss

        lbfgs = FullBatchLBFGS(list(problem.parameters.values()), evaluate, NUMERICAL_ERRORS)
        if saved is not None:
            lbfgs.load_state_dict(saved["lbfgs"])
            lbfgs.loss = saved["loss"]
        return lbfgs

    def state_dict(self, state: LBFGSState) -> dict[str, Any]:
        """State of the optimizer, if it has begun."""
        if state.lbfgs is None:
            return {}
        return {"lbfgs": state.lbfgs.state_dict(), "loss": state.lbfgs.loss, "quiet": state.quiet}

    def load_state_dict(self, saved: dict[str, Any]) -> LBFGSState:
        """The state, to be used when the first batch is there."""
        return LBFGSState(saved=saved, quiet=saved["quiet"]) if "lbfgs" in saved else LBFGSState()
