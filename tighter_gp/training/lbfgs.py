"""L-BFGS on all data of a collapsed model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import NUMERICAL_ERRORS
from .batches import Batch
from .problem import Problem
from .step import Info

# Converged after this many iterations in a row that change the loss by less than this fraction.
_QUIET_ITERATIONS, _QUIET = 3, 1e-9

FAILURES = (*NUMERICAL_ERRORS, FloatingPointError)


class Evaluation(NamedTuple):
    """The loss and its gradients at a point."""

    point: list[Tensor]
    loss: Tensor
    gradients: Sequence[Tensor]

    def is_at(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it is that of these values."""
        return all(map(torch.equal, self.point, parameters))


class State(NamedTuple):
    """What is known after some iterations.

    :param curvature: State of torch's optimizer, if it has one.
    :param known: The evaluation at the parameters as they are, if there was one.
    :param loss: That after the last iteration.
    :param quiet: Iterations in a row without much change.
    """

    curvature: dict[str, Any] | None = None
    known: Sequence[Evaluation] = ()
    loss: float = math.inf
    quiet: int = 0


def iterate(
    parameters: Sequence[Tensor], evaluate: Callable[[], Tensor], state: State
) -> tuple[State, bool, Exception | None]:
    """One iteration of L-BFGS with a strong Wolfe line search.

    A trial point where the loss fails counts as a very bad one.

    :param parameters: They are moved in place, also where this raises.
    :param evaluate: Computes the loss, which is differentiated.
    :return: The next state, whether the parameters moved, and the last failure on the way.
    """
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=1, max_eval=26, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0.0
    )
    if state.curvature is not None:
        optimizer.load_state_dict(copy.deepcopy(state.curvature))
    known, failure = list(state.known), None
    before = [parameter.detach().clone() for parameter in parameters]

    def closure() -> Tensor:
        nonlocal failure
        found = next((evaluation for evaluation in known if evaluation.is_at(parameters)), None)
        try:
            found = found or _evaluate(parameters, evaluate)
            known.append(found)
        except FAILURES as error:
            if not known:
                raise
            failure = error
            worst = max(float(evaluation.loss) for evaluation in known)
            zeros = [torch.zeros_like(parameter) for parameter in parameters]
            found = Evaluation([], known[0].loss.new_tensor(worst + 1.0 + abs(worst)), zeros)
        for parameter, gradient in zip(parameters, found.gradients, strict=True):
            parameter.grad = gradient.clone()
        return found.loss

    try:
        optimizer.step(closure)
        loss = float(closure())  # known, unless the line search returned to an earlier point
    finally:
        for parameter in parameters:
            parameter.grad = None
    here = [evaluation for evaluation in known if evaluation.is_at(parameters)][:1]
    quiet = state.quiet + 1 if abs(state.loss - loss) <= _QUIET * max(1, abs(loss)) else 0
    moved = not all(map(torch.equal, before, parameters))
    return State(optimizer.state_dict(), here, loss, quiet), moved, failure


def _evaluate(parameters: Sequence[Tensor], evaluate: Callable[[], Tensor]) -> Evaluation:
    with torch.enable_grad():
        loss = evaluate()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    if not all(bool(torch.isfinite(value).all()) for value in (loss, *gradients)):
        raise FloatingPointError("the loss or its gradient is not finite.")
    return Evaluation([parameter.detach().clone() for parameter in parameters], loss.detach(), gradients)


class LBFGSStep:
    """An iteration of L-BFGS.

    :param problem: What is trained.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def init(self) -> State:
        """Nothing is known."""
        return State()

    def step(self, state: State, batch: Batch, *call: Any) -> tuple[State, Info]:
        """One iteration. After a failure the curvature that led there is forgotten."""

        def evaluate() -> Tensor:
            self.problem.seed_step(-2)  # a sampled objective must be the same at every trial point
            return self.problem.loss(batch)  # all data, in every process

        try:
            found, moved, error = iterate(list(self.problem.parameters.values()), evaluate, state)
        except FAILURES as failure:
            return State(quiet=state.quiet), Info(math.nan, failure)
        if error is not None and not moved:
            return State(quiet=state.quiet), Info(found.loss, error)
        return found, Info(found.loss, converged=not moved or found.quiet >= _QUIET_ITERATIONS)

    def state_dict(self, state: State) -> dict[str, Any]:
        """The state as a dict."""
        return {**state._asdict(), "known": []}

    def load_state_dict(self, saved: dict[str, Any]) -> State:
        """The state from that."""
        return State(**saved)
