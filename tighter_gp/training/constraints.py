"""Constraints that are stated but not enforced, as BoTorch's: kept while a model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan
from gpytorch.utils.transforms import inv_sigmoid, inv_softplus
from torch import Tensor
from torch.nn import Module

# How far inside its bounds a parameter starts that lies on one of them, as a share of the bound or at the least.
_SHARE, _LEAST = 1e-3, 1e-9


@contextmanager
def enforced_constraints(*modules: Module) -> Iterator[None]:
    r"""Train the parameters of ``GreaterThan(1e-4, transform=None)`` and the like through GPyTorch's usual transform.

    Such a parameter is the value itself, left to an optimizer that knows its bounds. Adam and L-BFGS without bounds do not,
    and a step that suits :math:`\log(1 + e^a)` is far too long for a noise variance. Within the block the constraint
    is enforced. States of the modules, saved or loaded within it, are those of the values all the same.
    """
    found = {
        id(parameter): (owner, name, parameter, constraint)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.requires_grad and (constraint := _stated(owner, name)) is not None
    }
    with ExitStack() as stack:
        for constraint in {id(entry[-1]): entry[-1] for entry in found.values()}.values():
            stack.enter_context(_transformed(constraint))
        for owner, name, parameter, constraint in found.values():
            stack.enter_context(_raw(owner, name, parameter, constraint))
        yield


def _stated(owner: Any, name: str) -> Interval | None:
    """The constraint of a parameter that nothing enforces."""
    constraint = owner.constraint_for_parameter_name(name) if hasattr(owner, "constraint_for_parameter_name") else None
    if constraint is None or constraint.enforced:
        return None
    is_bounded = isinstance(constraint, (GreaterThan, LessThan)) or type(constraint) is Interval
    return constraint if is_bounded else None


@contextmanager
def _transformed(constraint: Any) -> Iterator[None]:
    is_one_sided = isinstance(constraint, (GreaterThan, LessThan))
    forms = (torch.nn.functional.softplus, inv_softplus) if is_one_sided else (torch.sigmoid, inv_sigmoid)
    constraint._transform, constraint._inv_transform = forms
    try:
        yield
    finally:
        constraint._transform = constraint._inv_transform = None


@contextmanager
def _raw(owner: Module, name: str, parameter: Tensor, constraint: Interval) -> Iterator[None]:
    """A parameter before its transform, in whose state the value stands."""
    with torch.no_grad():
        parameter.copy_(_inverse(constraint, parameter))
    hooks = [
        owner.register_state_dict_post_hook(partial(_save_value, name=name, constraint=constraint)),
        owner.register_load_state_dict_pre_hook(partial(_load_value, name=name, constraint=constraint)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            parameter.copy_(constraint.transform(parameter))


def _inverse(constraint: Any, value: Tensor) -> Tensor:
    """What is transformed to a value, or to the nearest one inside the bounds."""
    lower, upper = (bound.to(value) for bound in (constraint.lower_bound, constraint.upper_bound))
    inside = [_SHARE * bound.abs().nan_to_num(posinf=0.0).clamp_min(_LEAST / _SHARE) for bound in (lower, upper)]
    return constraint.inverse_transform(torch.minimum(torch.maximum(value, lower + inside[0]), upper - inside[1]))


def _save_value(module: Module, state: Any, prefix: str, metadata: Any, *, name: str, constraint: Interval) -> None:
    state[prefix + name] = constraint.transform(state[prefix + name])


def _load_value(module: Module, state: Any, prefix: str, *unused: Any, name: str, constraint: Interval) -> None:
    if prefix + name in state:
        value = state[prefix + name]
        state[prefix + name] = _inverse(constraint, value.to(constraint.lower_bound))
