"""Looking at values before they are used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch import Module, settings
from gpytorch.likelihoods import Likelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

# What a step may fail with; anything else is a mistake in the call.
NUMERICAL_ERRORS = (NotPSDError, NanError, torch.linalg.LinAlgError)


def first_line(error: Exception) -> str:
    """What an error says, for a message that quotes it; its kind if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _Deferred(NamedTuple):
    """Flags that were not looked at, and whether that of the precision is one of them."""

    flags: list[Tensor]
    asks_precision: bool


_deferred: ContextVar[_Deferred | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred_checks(*, asks_precision: bool) -> Iterator[list[Tensor]]:
    """Within it nothing is looked at; the list collects flags that must all be True for the result to be of use.

    :param asks_precision: Whether a precision that does not suffice is a failure: for whoever can repeat the work.
    """
    flags: list[Tensor] = []
    token = _deferred.set(_Deferred(flags, asks_precision))
    try:
        yield flags
    finally:
        _deferred.reset(token)


def checks_are_deferred() -> bool:
    """Whether flags are collected, for later."""
    return _deferred.get() is not None


def asks_precision() -> bool:
    """Whether anybody can do something about a precision that does not suffice; a compiled graph cannot."""
    deferred = _deferred.get()
    return deferred is None or deferred.asks_precision


def passed(*flags: Tensor) -> bool:
    """Whether all flags are True: one value read back from the device, or none where checks are deferred."""
    deferred = _deferred.get()
    if deferred is not None:
        deferred.flags.extend(flags)
        return True
    return flags[0].is_meta or bool(flags[0] if len(flags) == 1 else torch.stack(flags).all())


def all_finite(tensor: Tensor) -> Tensor:
    """Whether no entry is NaN or infinite, as a flag on the device; in three operations where ``isfinite`` takes five."""
    return (tensor.detach() * 0).sum() == 0


def host_values(tensor: Tensor) -> np.ndarray | None:
    """The values of a batch, for a check of them; None where a look is not to be had.

    On a CPU it is free. An accelerator has to be waited for, which ``gpytorch.settings.debug(False)`` leaves out.
    """
    tensor = tensor.detach()
    if tensor.is_meta or _deferred.get() is not None or (tensor.device.type != "cpu" and not settings.debug.on()):
        return None
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def check_range(index: Tensor, num_data: int, owner: str) -> None:
    """Raise unless positions lie in ``0..num_data - 1``.

    :param owner: Whose rows they are, for the message.
    """
    values = host_values(index)
    if values is not None and values.size and (values.min() < 0 or values.max() >= num_data):
        raise IndexError(
            f"index must lie in 0..{num_data - 1} for {owner}; got values from {values.min()} to {values.max()}."
        )


def same_values(known: Tensor, current: Tensor) -> bool:
    """Whether a tensor is what it was, for caches that no version counter can guard."""
    if known.shape != current.shape or known.dtype != current.dtype or known.device != current.device:
        return False
    return known.is_meta or torch.equal(known, current)


# What every module has, and what is no setting of one.
INTERNAL = {*vars(Module()), "training", "_memoize_cache", "_known", "_warned"}


class ModuleState:
    """What the values of some modules depend on: which objects they are, their tensors by value, their plain attributes."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.parts = list(_state(*modules))
        self.tensors = [tensor.detach().clone() for _, _, tensors in self.parts for tensor in tensors]

    def is_current(self, *modules: torch.nn.Module) -> bool:
        """Whether the modules are what they were."""
        current = list(_state(*modules))
        tensors = [tensor for _, _, found in current for tensor in found]
        return (
            len(current) == len(self.parts)
            and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(self.parts, current, strict=True))
            and len(tensors) == len(self.tensors)
            and all(map(same_values, self.tensors, tensors))
        )


def _state(*modules: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, dict[str, Any], list[Tensor]]]:
    for module in modules:
        for child in module.modules():
            attributes = {name: value for name, value in vars(child).items() if name not in INTERNAL}
            plain = {n: plain_value(v) if not callable(v) else v for n, v in attributes.items()}
            tensors = [v for v in attributes.values() if isinstance(v, Tensor)]
            own = (*child._parameters.values(), *child._buffers.values())
            yield child, plain, [*tensors, *(tensor for tensor in own if tensor is not None)]


class _Itself:
    """An object that is compared by identity, and kept, so that no other has its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def plain_value(value: Any) -> Any:
    """An attribute as something to compare with later: a number, a string, a list, a dict, an array or a dataclass by value,
    also if it is changed in place, any other object by identity. None for tensors and modules, which are looked at apart.
    """
    if isinstance(value, (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType)):
        return value
    if isinstance(value, (Tensor, torch.nn.Module)):
        return None
    if not isinstance(value, (tuple, list, dict, set, np.ndarray)) and not is_dataclass(value):
        return _Itself(value)
    try:
        return pickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError):
        return _Itself(value)


def check_inputs(x: Tensor, num_dims: int) -> None:
    """Raise unless ``x`` can be inputs of a model on ``num_dims`` dimensions."""
    if not torch.is_tensor(x) or not x.is_floating_point():
        raise TypeError(f"Inputs must be a floating point tensor; got {getattr(x, 'dtype', type(x).__name__)}.")
    check_dims(x.shape, num_dims)


def check_dims(shape: torch.Size, num_dims: int) -> None:
    """Raise unless inputs of this shape have ``num_dims`` dimensions."""
    if len(shape) < 2 or shape[-1] != num_dims:
        hint = " Of a single row pass x[None]." if tuple(shape) in ((num_dims,), (num_dims, 1)) else ""
        raise ValueError(
            f"Inputs must have shape ... x N x {num_dims} like the inducing points; got {tuple(shape)}.{hint}"
        )


def check_modules(model: Any, likelihood: Any) -> None:
    """Raise unless these are a model and a likelihood, in this order."""
    if not isinstance(model, torch.nn.Module) or not isinstance(likelihood, Likelihood):
        got = f"{type(model).__name__} and {type(likelihood).__name__}"
        raise TypeError(f"The first argument is the model, the second its likelihood; got {got}.")


def check_device(value: Tensor | torch.nn.Module, device: torch.device, name: str) -> None:
    """Raise if a tensor, or the first parameter of a module, is on another device than the model.

    :param name: What it is, for the message: "The likelihood is", "Targets are".
    """
    tensor = value if isinstance(value, Tensor) else next(value.parameters(), None)
    if tensor is not None and tensor.device != device:
        raise ValueError(f"{name} on {tensor.device}, the model is on {device}: move one of them, .to('{device}').")


def raise_if_not_finite(x: Tensor) -> None:
    """Raise if there is a row that holds NaN or infinity."""
    if x.is_meta or bool(torch.isfinite(x).all()):
        return
    rows = int((~torch.isfinite(x)).any(-1).sum())
    raise ValueError(f"Inputs hold NaN or infinity in {rows} of {x.shape[:-1].numel()} rows; drop or impute them.")


def describe_hyperparameters(*modules: Any) -> str:
    """The values of all hyperparameters, or their range, for messages; inducing points and q(u) are left out."""
    described = []
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if "_distribution." in name or name.endswith("_points") or not parameter.numel():
                continue
            value = (parameter if constraint is None else constraint.transform(parameter)).detach()
            low, high = value.min().item(), value.max().item()
            described.append(f"{name.replace('raw_', '')}={low:.3g}" + (f"..{high:.3g}" if high != low else ""))
    return ", ".join(described) or "none"
