"""Synchronisations per training step: the numbers that a test holds, and the table that documents them."""

from __future__ import annotations

import gpytorch
import torch

from tests.accelerator.device import Wait, load, waits
from tests.accelerator.features import FEATURES, Step

# Per step, with gpytorch.settings.debug on (GPyTorch's default) and off.
WAITS: dict[str, tuple[int, int]] = {
    "T-SVGP": (2, 1),
    "T-SVGP, beta": (2, 1),
    "T-SVGP, scalar": (2, 1),
    "PerPoint": (6, 1),
    "Blocks": (12, 10),
    "SOLVE-GP": (2, 1),
    "Bernoulli, beta": (2, 1),
    "Bernoulli, optimal": (2, 1),
    "SOLVE-GP, Bernoulli": (2, 1),
    "Poisson, scalar": (2, 1),
    "softmax, beta": (3, 1),
    "softmax, optimal": (3, 1),
    "multitask": (2, 1),
    "LMC": (3, 2),
    "LMC, Bernoulli": (10, 9),
    "GPLVM": (3, 1),
    "GPLVM, beta": (3, 1),
    "deep GP": (6, 5),
    "mean-field q(u)": (2, 1),
    "delta q(u)": (4, 3),
    "natural q(u)": (4, 3),
    "tril-natural q(u)": (2, 1),
    "collapsed kernel": (4, 3),
    "CollapsedGP": (3, 3),
}

# Of a plain model in fit, the loss included, with debug on.
PER_STEP_OF_FIT = 3


def step_of(feature: str, device: str) -> Step:
    """A step that was taken once, which initialises q(u): the same on every device."""
    torch.manual_seed(0)
    step = FEATURES[feature]()
    step.backward()
    return step.to(device)


def waits_of(feature: str, *, debug: bool, device: str = "dev:1") -> list[Wait]:
    """What the host waits for in a step that is not the first."""
    with gpytorch.settings.debug(debug):
        step = step_of(feature, device)
        step.backward()
        with waits() as found:
            step.backward()
    return found


def markdown() -> str:
    """One row per feature; places with debug on, by file and function."""
    load()
    torch.set_default_dtype(torch.float64)
    lines = [
        "| feature | per step | without debug | where (operator, times) |",
        "|---|---|---|---|",
    ]
    for feature in FEATURES:
        checked, unchecked = waits_of(feature, debug=True), waits_of(feature, debug=False)
        places: dict[str, int] = {}
        for wait in checked:
            name = f"`{wait.place}` ({wait.what})"
            places[name] = places.get(name, 0) + 1
        where = ", ".join(name[:-1] + (f", {count})" if count > 1 else ")") for name, count in places.items())
        lines.append(f"| {feature} | {len(checked)} | {len(unchecked)} | {where} |")
    return "\n".join(lines)
