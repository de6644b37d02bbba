"""What a run is made of, as plain values: for telling one run from another when a checkpoint is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.priors.prior import Prior

# How many differences a message names.
_NAMED = 6


def describe(modules: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Classes and settings of all modules, by path: kinds of kernels, means, likelihoods and objectives, numbers such as
    ``kernel.nu``, dimensions, bounds of constraints and parameters of priors. Values that are trained are not in it.

    :param modules: Modules by name; what is below two of them is described under the first.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for path, child in module.named_modules(prefix=prefix):
            if id(child) not in seen:
                seen.add(id(child))
                settings = ", ".join(f"{name}={value}" for name, value in sorted(_settings(child)))
                found[path] = f"{type(child).__name__}({settings})"
    return found


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        is_plain = isinstance(value, (bool, int, float, str)) or value is None
        is_plain = is_plain or (isinstance(value, tuple) and all(isinstance(part, (int, float, str)) for part in value))
        if is_plain and name != "training" and (not name.startswith("_") or name == "_jitter_val"):
            yield name, repr(value)
    for name, buffer in module.named_buffers(recurse=False):
        if isinstance(module, (Interval, Prior)) or name == "active_dims":
            yield name.removeprefix("_buffered_"), str(buffer.tolist()[:8] if buffer.dim() else buffer.item())


def describe_schedule(schedule: str | Callable[[float], float] | None) -> str:
    """Its name, or some values of a function."""
    if callable(schedule):
        return "a function with values " + ", ".join(f"{float(schedule(done / 4)):.4g}" for done in range(5))
    return str(schedule or "constant")


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same in two descriptions of a run, in words. What only one of them mentions is left out, but for
    modules.

    :param then: As a checkpoint has it.
    :param now: As it is.
    """
    found = []
    for name, value in now.items():
        if name in ("parameters", "modules") or name not in then or then[name] == value:
            continue
        is_hash = name in ("data", "held-out data")
        found.append(f"the {name} have other values" if is_hash else f"{name} was {then[name]} and is {value}")
    if then.get("parameters") != now.get("parameters"):
        found.append("the model's parameters have other names or shapes")
    if "modules" in then:
        paths = {**then["modules"], **now["modules"]}
        changed = [path for path in paths if then["modules"].get(path) != now["modules"].get(path)]
        found += [
            f"{path} was {then['modules'].get(path, 'not there')} and is {now['modules'].get(path, 'not there')}"
            for path in changed[:_NAMED]
        ]
        found += [f"and {len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
    return found
