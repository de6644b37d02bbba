"""Synchronisations per training step: the numbers that a test holds, and the table that documents them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpytorch
import torch

import tighter_gp
from tests.accelerator.device import Wait, load, waits
from tests.accelerator.features import FEATURES, Step
from tests.accelerator.runs import feature_run

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"

# Per step, with gpytorch.settings.debug on (GPyTorch's default) and off.
WAITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(FEATURES, (1, 1)),
    "T-SVGP, periodic kernel": (2, 2),
    "Blocks": (4, 4),
    "LMC": (2, 2),
    "LMC, Bernoulli": (2, 2),
    "collapsed GPLVM": (2, 2),
    "deep GP": (5, 5),
    "delta q(u)": (3, 3),
    "natural q(u)": (3, 3),
    "collapsed kernel": (4, 3),
    "CollapsedGP": (5, 5),
}

# In float32 these need a second look, in float64.
WAITS_IN_FLOAT32 = {"T-SVGP, sum of kernels": (2, 2), "T-SVGP, product of kernels": (2, 2)}

# In fit, the loss included, with debug on and off, with natural gradients where they can be and with Adam alone. An LMC
# uploads its jitter in every pass, a deep GP looks at the moments between its layers, a kernel that is not lowered compares
# its inputs: all three are GPyTorch's. Factors of a deep GP and of q(u) in natural form are looked at as they come.
WAITS_OF_FIT: dict[str, tuple[int, int | None]] = {
    "T-SVGP": (1, 1),
    "T-SVGP, periodic kernel": (2, 2),
    "PerPoint": (1, 1),
    "Blocks": (4, 4),
    "SOLVE-GP": (1, 1),
    "Bernoulli, optimal": (1, 1),
    "Poisson, scalar": (1, 1),
    "softmax, optimal": (1, 1),
    "multitask": (1, 1),
    "LMC": (3, 2),
    "GPLVM": (1, 1),
    "deep GP": (6, 6),
    "mean-field q(u)": (1, 1),
    "natural q(u)": (3, None),
}


def step_of(feature: str, device: str) -> Step:
    """A step that was taken once, which initialises q(u): the same on every device."""
    torch.manual_seed(0)
    step = FEATURES[feature]()
    step.backward()
    return step.to(device)


@contextmanager
def validated() -> Iterator[None]:
    """Distributions look at their arguments, as they do by default: torch.compile turns that off for good."""
    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)


def waits_of(feature: str, *, debug: bool, device: str = "dev:1") -> list[Wait]:
    """What the host waits for in a step that is not the first."""
    with validated(), gpytorch.settings.debug(debug):
        step = step_of(feature, device)
        step.backward()
        with waits() as found:
            step.backward()
    return found


def waits_of_fit(feature: str, natural: bool) -> list[Wait]:
    """The same for a step within an epoch of fit."""
    marks: list[int] = []
    with validated(), waits() as found:
        mark = lambda step: marks.append(len(found))
        recipe = tighter_gp.Recipe(lr=0.05, natural=None if natural else 0)
        feature_run(feature, "dev:1", recipe=recipe, callbacks=[mark], steps=4)
    return found[marks[2] : marks[3]]


def synchronisations() -> str:
    """How often the host waits in a step, features with the same numbers together."""
    rows: dict[tuple[object, ...], list[str]] = {}
    for feature, (checked, unchecked) in WAITS.items():
        rows.setdefault((checked, unchecked, *WAITS_OF_FIT.get(feature, ("", ""))), []).append(feature)
    lines = ["| features | own loop | without debug | `fit` | `fit`, Adam alone |", "|---|---|---|---|---|"]
    for counts, features in sorted(rows.items(), key=lambda row: str(row[0])):
        cells = " | ".join("" if count is None else str(count) for count in counts)
        lines.append(f"| {', '.join(features)} | {cells} |")
    return "\n".join(lines)


def table() -> str:
    """The generated part of the page."""
    load()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return synchronisations()
    finally:
        torch.set_default_dtype(before)


def with_table(page: str) -> str:
    """The page with its table made anew, after a comment and up to the next empty line."""
    mark = "<!-- generated: synchronisations -->\n"
    head, tail = page.split(mark)
    return f"{head}{mark}{table()}\n\n{tail.split(chr(10) * 2, 1)[1]}"
