"""Kernel launches per eager training step: which operators, and which line asked for them.

An operator that reaches a backend and does more than look at its arguments counts as one launch. A GPU may take a few
more for some (a factorisation, a sort), and none where it fuses. The optimizer is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator import features
from tests.accelerator.device import PACKAGE, where

M, B = 32, 48

# These give views, allocate, or make a number on the host.
FREE = {
    "_local_scalar_dense", "_reshape_alias", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "expand_as", "lift_fresh", "new_empty", "new_empty_strided", "narrow", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsafe_split", "unsqueeze",
    "view", "view_as", "_unsafe_view", "movedim", "swapaxes", "real", "imag", "unsafe_chunk", "_to_dense", "_indices",
    "_values", "scalar_tensor", "_sparse_coo_tensor_with_dims_and_tensors", "_nnz", "is_same_size",
}  # fmt: skip


class Launch(NamedTuple):
    """One launch: the operator, the line of the package (else of its caller) and whether it is in the backward pass."""

    operator: str
    place: str
    is_backward: bool


class Launches(TorchDispatchMode):
    """Collects the launches of what runs within it; a backward pass is put down to the line of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in FREE and not (name == "_to_copy" and result is args[0]):
            node = torch._C._current_autograd_node()
            place = _place(*where(skip=()))
            if node is not None:
                place = _forward_place(node) or place
            self.found.append(Launch(name, place, node is not None))
        return result

    def __enter__(self) -> Launches:
        self.anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self.anomaly.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.anomaly.__exit__(*error)

    def by_operator(self) -> Counter[str]:
        return Counter(launch.operator for launch in self.found)

    def by_place(self) -> Counter[str]:
        return Counter(launch.place for launch in self.found)


def _place(file: str, line: int, function: str) -> str:
    return f"{file}:{line} {function}" if line else file


def _forward_place(node: Any) -> str | None:
    """The innermost line of the package in the traceback that anomaly detection keeps."""
    for entry in reversed(node.metadata.get("traceback_", [])):
        for text in reversed(entry.splitlines()):
            text = text.strip()
            if text.startswith(f'File "{PACKAGE}'):
                file, line, function = text.split(", ")
                short = Path(file.removeprefix('File "').rstrip('"')).relative_to(PACKAGE)
                return f"{short}:{line.removeprefix('line ')} {function.removeprefix('in ')}"
    return None


STEPS: dict[str, Callable[[], features.Step]] = {
    "T-SVGP": lambda: _large(),
    "T-SOLVE-GP": lambda: _large(strategy="solve"),
    "softmax, optimal": lambda: _large(
        features.softmax_likelihood, "class", wrap=features.independent, num_functions=3
    ),
    "Bernoulli, optimal": lambda: _large(**features.BERNOULLI),
}


def _large(*args: Any, **kwargs: Any) -> features.Step:
    before = features.B, features.N
    features.B, features.N = B, 1000
    try:
        return features.simple(*args, num_inducing=M, **kwargs)
    finally:
        features.B, features.N = before


def launches_of(name: str) -> Launches:
    """The launches of the second step of a model, forward and backward."""
    torch.manual_seed(0)
    step = STEPS[name]()
    step.backward()
    for parameter in step.module.parameters():
        parameter.grad = None
    with Launches() as found:
        step.loss(*step.data).backward()
    return found


def report(name: str, most: int = 12) -> str:
    """For people: counts by operator and by line."""
    found = launches_of(name)
    backward = sum(launch.is_backward for launch in found.found)
    lines = [f"{name}: {len(found.found)} launches, {backward} of them in the backward pass"]
    lines += ["  " + ", ".join(f"{operator} {count}" for operator, count in found.by_operator().most_common(most))]
    lines += [f"  {count:4d}  {place}" for place, count in found.by_place().most_common(most)]
    return "\n".join(lines)
