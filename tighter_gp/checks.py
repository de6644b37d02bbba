"""Looking at values before they are used, and words for messages."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from gpytorch.likelihoods import Likelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

# What a step may fail with; anything else is a mistake in the call.
NUMERICAL_ERRORS = (NotPSDError, NanError, torch.linalg.LinAlgError)


def first_line(error: Exception) -> str:
    """What an error says, for a message that quotes it; its kind if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def check_range(index: Tensor, num_data: int, owner: str) -> None:
    """Raise unless positions lie in ``0..num_data - 1``.

    An accelerator has to be waited for, which ``gpytorch.settings.debug(False)`` leaves out.

    :param owner: Whose rows they are, for the message.
    """
    if not index.numel() or (index.device.type != "cpu" and not settings.debug.on()):
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= num_data:
        raise IndexError(f"index must lie in 0..{num_data - 1} for {owner}; got values from {low} to {high}.")


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


def describe_hyperparameters(*modules: Any) -> str:
    """The values of all hyperparameters, or their range, for messages; inducing points are left out."""
    described = []
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if name.endswith("_points"):
                continue
            value = (parameter if constraint is None else constraint.transform(parameter)).detach()
            low, high = value.min().item(), value.max().item()
            described.append(f"{name.replace('raw_', '')}={low:.3g}" + (f"..{high:.3g}" if high != low else ""))
    return ", ".join(described) or "none"
