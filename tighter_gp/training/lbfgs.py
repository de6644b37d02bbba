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
from .step import Call, Info

# Converged after this many iterations in a row that change the loss by less than this fraction.
_QUIET_ITERATIONS, _QUIET = 3, 1e-9

_FAILURES = (*NUMERICAL_ERRORS, FloatingPointError)


class Evaluation(NamedTuple):
    """The loss and its gradients at a point."""

    point: list[Tensor]
    loss: Tensor
    gradients: list[Tensor]

    def is_at(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it is that of these values."""
        return all(map(torch.equal, self.point, parameters))


class FullBatchLBFGS:
    """L-BFGS with a strong Wolfe line search, one iteration per call.

    A trial point where the loss fails counts as a very bad one. An iteration that raises leaves all as it found it.

    :param parameters: The parameters.
    :param evaluate: Computes the loss, which is differentiated.
    """

    def __init__(self, parameters: Sequence[Tensor], evaluate: Callable[[], Tensor]) -> None:
        self.parameters, self.evaluate = list(parameters), evaluate
        self.optimizer = torch.optim.LBFGS(
            self.parameters,
            max_iter=1,
            max_eval=26,
            history_size=20,
            line_search_fn="strong_wolfe",
            tolerance_change=0.0,
        )
        self.loss = math.inf
        self.known: list[Evaluation] = []
        self.error: Exception | None = None

    def step(self) -> bool:
        """One iteration; whether the parameters moved. ``loss`` is that after it, ``error`` the last failure in it."""
        self.error, before = None, [parameter.detach().clone() for parameter in self.parameters]
        state = copy.deepcopy(self.optimizer.state_dict()["state"])
        try:
            self.optimizer.step(self._closure)
            loss = float(self._closure())  # known, unless the line search returned to an earlier point
        except BaseException:
            self._put(before)
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
            raise
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        self.loss, self.known = loss, [known for known in self.known if known.is_at(self.parameters)]
        return not all(map(torch.equal, before, self.parameters))

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def _closure(self) -> Tensor:
        found = next((known for known in self.known if known.is_at(self.parameters)), None)
        try:
            found = found or self._evaluate()
        except _FAILURES as error:
            if not self.known:
                raise
            self.error = error
            worst = max(float(known.loss) for known in self.known)
            zeros = [torch.zeros_like(parameter) for parameter in self.parameters]
            found = Evaluation([], self.known[0].loss.new_tensor(worst + 1.0 + abs(worst)), zeros)
        for parameter, gradient in zip(self.parameters, found.gradients, strict=True):
            parameter.grad = gradient.clone()
        return found.loss

    def _evaluate(self) -> Evaluation:
        with torch.enable_grad():
            loss = self.evaluate()
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        if not all(bool(torch.isfinite(value).all()) for value in (loss, *gradients)):
            raise FloatingPointError("the loss or its gradient is not finite.")
        point = [parameter.detach().clone() for parameter in self.parameters]
        self.known.append(Evaluation(point, loss.detach(), list(gradients)))
        return self.known[-1]


class State(NamedTuple):
    """The optimizer, and iterations without much change."""

    lbfgs: FullBatchLBFGS
    quiet: int = 0


class LBFGSStep:
    """An iteration of L-BFGS.

    :param problem: What is trained.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def init(self) -> State:
        """No curvature is known."""
        return State(FullBatchLBFGS(list(self.problem.parameters.values()), lambda: torch.empty(0)))

    def step(self, state: State, batch: Batch, call: Call) -> tuple[State, Info]:
        """One iteration. After a failure the curvature that led there is forgotten."""

        def evaluate() -> Tensor:
            self.problem.seed_step(-2)  # a sampled objective must be the same at every trial point
            return self.problem.loss(batch._replace(weight=1.0))  # all data, in every process

        lbfgs = state.lbfgs
        lbfgs.evaluate, before = evaluate, lbfgs.loss
        try:
            moved = lbfgs.step()
        except _FAILURES as error:
            return self.init()._replace(quiet=state.quiet), Info(math.nan, error)
        if lbfgs.error is not None and not moved:
            return self.init()._replace(quiet=state.quiet), Info(lbfgs.loss, lbfgs.error)
        quiet = state.quiet + 1 if abs(before - lbfgs.loss) <= _QUIET * max(1, abs(lbfgs.loss)) else 0
        converged = "converged" if not moved or quiet >= _QUIET_ITERATIONS else ""
        return State(lbfgs, quiet), Info(lbfgs.loss, converged=converged)

    def state_dict(self, state: State) -> dict[str, Any]:
        """The state as a dict."""
        return {"lbfgs": state.lbfgs.optimizer.state_dict(), "loss": state.lbfgs.loss, "quiet": state.quiet}

    def load_state_dict(self, saved: dict[str, Any]) -> State:
        """The state from that."""
        state = self.init()._replace(quiet=saved["quiet"])
        state.lbfgs.optimizer.load_state_dict(saved["lbfgs"])
        state.lbfgs.loss = saved["loss"]
        return state
