"""Constraints that are stated but not enforced, as BoTorch's: kept while a model is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan
from gpytorch.utils.transforms import inv_sigmoid, inv_softplus
from torch import Tensor
from torch.nn import Module

# How far inside its bounds a parameter starts that lies on one of them, as a share of their distance, or of the only one.
_SHARE, _LEAST = 1e-3, 1e-6


@contextmanager
def enforced_constraints(*modules: Module) -> Iterator[None]:
    r"""Train the parameters of ``GreaterThan(1e-4, transform=None)`` and the like through GPyTorch's usual transform.

    Such a parameter is the value itself, left to an optimizer that knows its bounds. Adam and L-BFGS without bounds do not,
    and a step that suits :math:`\log(1 + e^a)` is far too long for a noise variance. Within the block each of them has a
    constraint of its own that is enforced. States of the modules, saved or loaded within it, are those of the values.
    """
    found = {
        id(parameter): (owner, name, parameter, constraint)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.requires_grad and (constraint := _stated(owner, name)) is not None
    }
    with ExitStack() as stack:
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


def _enforced(constraint: Any) -> Any:
    """The same bounds with a transform; others may share the constraint itself."""
    constraint = copy.deepcopy(constraint)
    is_one_sided = isinstance(constraint, (GreaterThan, LessThan))
    forms = (torch.nn.functional.softplus, inv_softplus) if is_one_sided else (torch.sigmoid, inv_sigmoid)
    constraint._transform, constraint._inv_transform = forms
    return constraint


def _set_constraint(owner: Any, name: str, constraint: Interval) -> None:
    setattr(owner, f"{name}_constraint", constraint)
    owner._constraints[f"{name}_constraint"] = constraint


@contextmanager
def _raw(owner: Module, name: str, parameter: Tensor, stated: Interval) -> Iterator[None]:
    """A parameter before its transform, in whose state the value stands."""
    constraint = _enforced(stated)
    with torch.no_grad():
        parameter.copy_(_inverse(constraint, parameter, _SHARE))
    _set_constraint(owner, name, constraint)
    hooks = [
        owner.register_state_dict_post_hook(partial(_save_value, name=name, constraint=constraint)),
        owner.register_load_state_dict_pre_hook(partial(_load_value, name=name, constraint=constraint)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _set_constraint(owner, name, stated)
        with torch.no_grad():
            parameter.copy_(constraint.transform(parameter))


def _inverse(constraint: Any, value: Tensor, share: float) -> Tensor:
    """What is transformed to a value, or inside the bounds to one near it if it does not lie between them.

    :param share: How near, in units of the bounds' distance; the next number for 0.
    """
    lower, upper = (bound.to(value) for bound in (constraint.lower_bound, constraint.upper_bound))
    width = upper - lower
    width = torch.where(torch.isfinite(width), width, torch.minimum(lower.abs(), upper.abs()).clamp_min(_LEAST))
    lowest = torch.maximum(lower + share * width, torch.nextafter(lower, upper))
    highest = torch.minimum(upper - share * width, torch.nextafter(upper, lower))
    return constraint.inverse_transform(
        torch.where(value <= lower, lowest, torch.where(value >= upper, highest, value))
    )


def _save_value(module: Module, state: Any, prefix: str, metadata: Any, *, name: str, constraint: Interval) -> None:
    state[prefix + name] = constraint.transform(state[prefix + name])


def _load_value(module: Module, state: Any, prefix: str, *unused: Any, name: str, constraint: Interval) -> None:
    if prefix + name in state:
        state[prefix + name] = _inverse(constraint, state[prefix + name].to(constraint.lower_bound), share=0.0)
