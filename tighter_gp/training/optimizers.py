"""The optimizers behind :func:`tighter_gp.fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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

# Largest entry of a gradient for Adam, as a fraction of the largest whose square is finite.
_LARGEST_ENTRY = 1e-4


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


def _in_natural_form(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, _NaturalVariationalDistribution)]


def refuse_natural(model: torch.nn.Module, natural_gradients: bool | float) -> None:
    """Raise where L-BFGS is asked for natural gradients, or would take them for ordinary ones."""
    if natural_gradients:
        raise ValueError("natural_gradients go with Adam: pass optimizer='adam', or leave them out for 'lbfgs'.")
    for found in _in_natural_form(model):
        raise ValueError(
            f"q(u) is a {type(found).__name__}, whose gradients are natural ones and mean nothing to L-BFGS: use "
            "CholeskyVariationalDistribution, or optimizer='adam' with natural_gradients=True."
        )


def natural_parameters(model: torch.nn.Module, natural_gradients: bool | float) -> set[int]:
    """The ids of the parameters that take natural gradients, or a clear error if the form of q(u) does not fit."""
    found = _in_natural_form(model)
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


def can_fuse(parameters: Iterable[Tensor]) -> bool | None:
    """Whether Adam can take its step in one kernel, on CUDA; None leaves the choice to torch."""
    return True if all(parameter.is_cuda for parameter in parameters) else None


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
        self.scalable = {name: p for name, p in parameters.items() if id(p) not in natural}
        tables = [p for name, p in parameters.items() if name in sparse]
        in_q = [p for name, p in parameters.items() if id(p) in natural and name not in sparse]
        rest = [p for name, p in parameters.items() if id(p) not in natural and name not in sparse]
        self.adams: list[torch.optim.Optimizer] = []
        if rest:
            self.adams.append(torch.optim.Adam(rest, lr=lr, fused=can_fuse(rest)))
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

    def scale_down(self, largest: Mapping[str, float]) -> None:
        """Make gradients smaller whose squares Adam could not hold; it divides by their scale anyway.

        :param largest: Largest entry of each gradient, by name.
        """
        for name, parameter in self.scalable.items():
            bound = _LARGEST_ENTRY * math.sqrt(torch.finfo(parameter.dtype).max)
            if largest.get(name, 0.0) > bound:
                assert parameter.grad is not None
                parameter.grad.mul_(bound / largest[name])

    def state_dict(self) -> dict[str, Any]:
        """State of all, and which parameters are sparse."""
        return {"sparse": sorted(self.sparse), "states": [optimizer.state_dict() for optimizer in self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of optimizers that were built for the same parameters."""
        for optimizer, saved in zip(self.all, state["states"], strict=True):
            optimizer.load_state_dict(saved)
