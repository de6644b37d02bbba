"""Adam as a function of its state, with a learning rate per kind of parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.variational import LMCVariationalStrategy
from torch import Tensor

from ..conditionals import Conditional
from .problem import Problem

_DECAY, _SQUARES, _EPS = 0.9, 0.999, 1e-8

# Largest entry of a gradient; its square is finite in float32.
_LARGEST_ENTRY = 1e15


class Adam(NamedTuple):
    """What Adam remembers: the number of steps, and means of gradients and of their squares."""

    steps: int
    mean: list[Tensor]
    square: list[Tensor]


def init(parameters: Sequence[Tensor]) -> Adam:
    """Before the first step."""
    return Adam(0, *([torch.zeros_like(p, memory_format=torch.preserve_format) for p in parameters] for _ in range(2)))


@torch.no_grad()
def update(
    state: Adam,
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    rates: Sequence[float],
    tables: Sequence[int] = (),
) -> Adam:
    """Move parameters in place, each by its own learning rate; returns the next state.

    :param tables: Places of parameters with a row per point, of which only the rows of the batch move.
    """
    if not parameters:
        return state
    gradients = torch._foreach_clamp_max(torch._foreach_clamp_min(list(gradients), -_LARGEST_ENTRY), _LARGEST_ENTRY)
    count = state.steps + 1
    mean = list(torch._foreach_mul(state.mean, _DECAY))
    torch._foreach_add_(mean, gradients, alpha=1 - _DECAY)
    square = list(torch._foreach_mul(state.square, _SQUARES))
    torch._foreach_addcmul_(square, gradients, gradients, 1 - _SQUARES)
    width = torch._foreach_sqrt(square)
    torch._foreach_div_(width, math.sqrt(1 - _SQUARES**count))
    torch._foreach_add_(width, _EPS)
    change = list(torch._foreach_div(mean, width))
    for place in tables:
        seen = (gradients[place] != 0).any(-1, keepdim=True)
        change[place] = change[place] * seen
        mean[place] = mean[place].where(seen, state.mean[place])
        square[place] = square[place].where(seen, state.square[place])
    torch._foreach_mul_(change, [-rate / (1 - _DECAY**count) for rate in rates])
    torch._foreach_add_(list(parameters), change)
    return Adam(count, mean, square)


def kinds_of(problem: Problem) -> dict[str, str]:
    """Whether a parameter is of an inducing point, a hyperparameter of a GP, or something else."""
    hyper: set[int] = set()
    for module in torch.nn.ModuleDict(problem.modules).modules():
        if isinstance(module, Kernel | Mean | Likelihood | Conditional):
            hyper |= {id(p) for p in _hyperparameters(module)}
        if isinstance(module, LMCVariationalStrategy):
            hyper.add(id(module.lmc_coefficients))
    points = ("inducing_points", "orthogonal_points")
    return {
        name: "inducing" if name.endswith(points) else "hyper" if id(parameter) in hyper else "other"
        for name, parameter in problem.parameters.items()
    }


def _hyperparameters(module: torch.nn.Module) -> Iterator[Tensor]:
    """The parameters of a part of a GP, without those of networks inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, gpytorch.Module):
            yield from _hyperparameters(child)


def tables_of(problem: Problem) -> set[int]:
    """Ids of the parameters whose gradients are sparse: those of latent variables and embeddings."""
    sparse = (m for m in torch.nn.ModuleDict(problem.modules).modules() if getattr(m, "sparse", False) is True)
    return {id(parameter) for module in sparse for parameter in module.parameters(recurse=False)}


def stated_bounds(problem: Problem) -> list[tuple[Tensor, Any, Any]]:
    """Parameters with constraints that no transform enforces, as BoTorch's, and their bounds."""
    found = {}
    for owner in torch.nn.ModuleDict(problem.modules).modules():
        for name, parameter in owner.named_parameters(recurse=False):
            constraint = getattr(owner, "constraint_for_parameter_name", lambda name: None)(name)
            if isinstance(constraint, Interval) and not constraint.enforced and parameter.requires_grad:
                found[id(parameter)] = parameter, constraint.lower_bound, constraint.upper_bound
    return list(found.values())
