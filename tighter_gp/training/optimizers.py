"""The optimizers behind :func:`tighter_gp.fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpytorch.optim import NGD
from gpytorch.variational import _NaturalVariationalDistribution
from torch import Tensor

# Factor on the learning rate as a function of the fraction of the run that is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 0.01**done,
    "linear": lambda done: 1.0 - done,
}

_NATURAL_STEP = 0.1


def make_schedule(schedule: str | Callable[[float], float] | None) -> Callable[[float], float]:
    """Resolve a name; a function passes through, None is constant."""
    if schedule is None:
        return SCHEDULES["constant"]
    if callable(schedule):
        return schedule
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"Unknown schedule {schedule!r}; choose {names}, or pass a function of the fraction done.")
    return SCHEDULES[schedule]


def natural_parameters(model: torch.nn.Module, natural_gradients: bool | float) -> set[int]:
    """The ids of the parameters that take natural gradients, or a clear error if the form of q(u) does not fit."""
    found = [module for module in model.modules() if isinstance(module, _NaturalVariationalDistribution)]
    if natural_gradients and not found:
        raise ValueError(
            "natural_gradients needs q(u) in natural form: build the strategy with NaturalVariationalDistribution or "
            "TrilNaturalVariationalDistribution."
        )
    if found and not natural_gradients:
        raise ValueError(
            f"q(u) is a {type(found[0]).__name__}, whose gradients are natural ones and mean nothing to Adam: pass "
            "natural_gradients=True, or a step size."
        )
    return {id(parameter) for module in found for parameter in module.parameters()}


class Optimizers:
    """Natural gradients for q(u) if asked for, SparseAdam for tables with sparse gradients, Adam for the rest.

    :param parameters: All parameters to train, by name.
    :param sparse: Names of those whose gradients are sparse.
    :param natural: Ids of those that take natural gradients.
    :param lr: Learning rate of Adam.
    :param natural_gradients: Step size of the natural gradients; True for 0.1.
    :param num_data: Number of training points.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sparse: set[str],
        natural: set[int],
        lr: float,
        natural_gradients: bool | float,
        num_data: int,
    ) -> None:
        self.lr, self.sparse = lr, sparse
        tables = [p for name, p in parameters.items() if name in sparse]
        in_q = [p for name, p in parameters.items() if id(p) in natural and name not in sparse]
        rest = [p for name, p in parameters.items() if id(p) not in natural and name not in sparse]
        self.adams: list[torch.optim.Optimizer] = []
        if rest:
            self.adams.append(torch.optim.Adam(rest, lr=lr))
        if tables:
            self.adams.append(torch.optim.SparseAdam(tables, lr=lr))
        self.all = list(self.adams)
        self.natural_step = _NATURAL_STEP if natural_gradients is True else float(natural_gradients)
        if in_q:
            self.all.append(NGD(in_q, num_data=num_data, lr=self.natural_step))

    def step(self, factor: float, damping: float = 1.0) -> None:
        """One step of each, with Adam's learning rates at ``factor`` times their start, and all times ``damping``."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = damping * (self.lr * factor if optimizer in self.adams else self.natural_step)
        for optimizer in self.all:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """State of all, and which parameters are sparse."""
        return {"sparse": sorted(self.sparse), "states": [optimizer.state_dict() for optimizer in self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of optimizers that were built for the same parameters."""
        for optimizer, saved in zip(self.all, state["states"], strict=True):
            optimizer.load_state_dict(saved)


class FullBatchLBFGS:
    """L-BFGS with a strong Wolfe line search on a deterministic objective, one iteration a call.

    A trial point where the objective fails is taken as a very bad one, so the line search comes back from it.

    :param parameters: The parameters.
    :param evaluate: Computes the loss and its gradients; may raise one of ``failures``.
    :param failures: Exceptions that mean a numerical failure.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        evaluate: Callable[[], Tensor],
        failures: tuple[type[Exception], ...],
    ) -> None:
        self.parameters, self.evaluate = parameters, evaluate
        self.failures: tuple[type[Exception], ...] = (*failures, FloatingPointError)
        self.optimizer = torch.optim.LBFGS(
            parameters, max_iter=1, max_eval=26, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0.0
        )
        self.known: list[tuple[Tensor, Tensor, Tensor]] = []
        self.error: Exception | None = None
        self.loss = math.inf

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.optimizer.load_state_dict(state)

    def step(self) -> tuple[float, bool]:
        """One iteration.

        :return: The loss at the new parameters, and whether they moved. ``self.error`` is the last failure, if any.
        """
        self.error, before = None, self._point()
        self.optimizer.step(self._closure)
        after = self._point()
        loss = self._recall(after)
        if loss is None:
            loss = self._closure()
        self.loss = float(loss)
        self.known = [entry for entry in self.known if torch.equal(entry[0], after)]
        return self.loss, not torch.equal(before, after)

    def _point(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def _recall(self, point: Tensor) -> Tensor | None:
        for known, loss, gradient in self.known:
            if torch.equal(known, point):
                for parameter, part in zip(
                    self.parameters, gradient.split([p.numel() for p in self.parameters]), strict=True
                ):
                    parameter.grad = part.reshape(parameter.shape).clone()
                return loss
        return None

    def _closure(self) -> Tensor:
        point = self._point()
        loss = self._recall(point)
        if loss is not None:
            return loss
        for parameter in self.parameters:
            parameter.grad = None
        try:
            loss = self.evaluate().detach()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            gradient = torch.cat([grad.reshape(-1) for grad in grads])
            if not bool(torch.isfinite(loss) & torch.isfinite(gradient).all()):
                raise FloatingPointError("the loss or its gradient is not finite")
        except self.failures as error:
            if not self.known:
                raise
            self.error = error
            worst = max(float(entry[1]) for entry in self.known)
            loss, gradient = self.known[0][1].new_tensor(worst + 1.0 + abs(worst)), torch.zeros_like(point)
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            return loss
        self.known.append((point, loss, gradient))
        return loss
