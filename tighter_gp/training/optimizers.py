"""The optimizers behind :func:`tighter_gp.fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from gpytorch.variational import _NaturalVariationalDistribution
from torch import Tensor

# Factor on the learning rate as a function of the fraction of the run that is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 0.01**done,
    "linear": lambda done: 1.0 - done,
}

# Largest entry of a gradient for Adam, as a fraction of the largest whose square is finite.
_LARGEST_ENTRY = 1e-4


def make_schedule(schedule: str | Callable[[float], float] | None) -> Callable[[float], float]:
    """Resolve a name; a function passes through, None is constant."""
    if schedule is None:
        return SCHEDULES["constant"]
    if callable(schedule):
        factor = partial(_factor, schedule)
        for tenth in range(11):
            factor(tenth / 10)
        return factor
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"Unknown schedule {schedule!r}; choose {names}, or pass a function of the fraction done.")
    return SCHEDULES[schedule]


def _factor(schedule: Callable[[float], float], done: float) -> float:
    factor = float(schedule(done))
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"schedule= is a factor on the learning rate, at least 0 and finite; at {done:g} it is {factor}."
        )
    return factor


def _in_natural_form(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, _NaturalVariationalDistribution)]


def refuse_natural(model: torch.nn.Module, natural_gradients: bool | float | None) -> None:
    """Raise where L-BFGS is asked for natural gradients, or would take them for ordinary ones."""
    if natural_gradients:
        raise ValueError("natural_gradients go with Adam: pass optimizer='adam', or leave them out for 'lbfgs'.")
    for found in _in_natural_form(model):
        raise ValueError(
            f"q(u) is a {type(found).__name__}, whose gradients are natural ones and mean nothing to L-BFGS: use "
            "CholeskyVariationalDistribution, or optimizer='adam' with natural_gradients=True."
        )


def refuse_adam(model: torch.nn.Module) -> None:
    """Raise where Adam would take natural gradients for ordinary ones."""
    for found in _in_natural_form(model):
        raise ValueError(
            f"q(u) is a {type(found).__name__}, whose gradients are natural ones and mean nothing to Adam: leave "
            "natural_gradients at its default, or build the strategy with CholeskyVariationalDistribution."
        )


def can_fuse(parameters: Iterable[Tensor]) -> bool | None:
    """Whether Adam can take its step in one kernel, on CUDA; None leaves the choice to torch."""
    return True if all(parameter.is_cuda for parameter in parameters) else None


class Optimizers:
    """SparseAdam for tables with sparse gradients, Adam for the rest, with a learning rate per kind of parameter.

    :param parameters: The parameters to train, by name.
    :param sparse: Names of those whose gradients are sparse.
    :param kinds: Kind of each parameter, by name.
    :param rates: First learning rate of each kind.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], sparse: set[str], kinds: Mapping[str, str], rates: Mapping[str, float]
    ) -> None:
        self.parameters, self.sparse, self.rates = parameters, sparse, rates
        self.adams: list[torch.optim.Optimizer] = []
        for names, kind in ((parameters.keys() - sparse, torch.optim.Adam), (sparse, torch.optim.SparseAdam)):
            ordered = [name for name in parameters if name in names]
            groups: list[dict[str, Any]] = [
                {"params": [parameters[n] for n in ordered if kinds[n] == which], "lr": rates[which], "kind": which}
                for which in rates
            ]
            groups = [group for group in groups if group["params"]]
            if groups:
                options: dict[str, Any] = {}
                if kind is torch.optim.Adam:
                    options["fused"] = can_fuse(parameters[n] for n in ordered)
                self.adams.append(kind(groups, **options))

    def step(self, factor: Callable[[str], float], damping: float = 1.0) -> None:
        """One step of each.

        :param factor: Factor on the first learning rate of a kind of parameter.
        :param damping: Factor on all.
        """
        for optimizer in self.adams:
            for group in optimizer.param_groups:
                group["lr"] = damping * self.rates[group["kind"]] * factor(group["kind"])
            optimizer.step()

    def scale_down(self, largest: Mapping[str, float], share: float = 1.0) -> None:
        """Make gradients smaller whose squares Adam could not hold; it divides by their scale anyway.

        :param largest: Largest entry of each gradient, by name.
        :param share: Of a short batch, whose gradients count less.
        """
        for name, parameter in self.parameters.items():
            if share < 1 and parameter.grad is not None:
                parameter.grad.mul_(share)
            bound = _LARGEST_ENTRY * math.sqrt(torch.finfo(parameter.dtype).max)
            if largest.get(name, 0.0) > bound:
                assert parameter.grad is not None
                parameter.grad.mul_(bound / largest[name])

    def state_dict(self) -> dict[str, Any]:
        """State of all, and which parameters are sparse."""
        return {"sparse": sorted(self.sparse), "states": [optimizer.state_dict() for optimizer in self.adams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of optimizers that were built for the same parameters."""
        for optimizer, saved in zip(self.adams, state["states"], strict=True):
            optimizer.load_state_dict(saved)
