"""How many kernels an eager step launches in float32, forward and backward. Lower the numbers when it takes fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator import features

# These give views, allocate, or make a number on the host.
FREE = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "permute",
    "scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
SOFTMAX = {
    "likelihood": features.softmax_likelihood,
    "wrap": features.independent,
    "target": "class",
    "num_functions": 3,
}
STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "T-SVGP": ({}, 260),
    "T-SOLVE-GP": ({"strategy": "solve"}, 310),
    "softmax": (SOFTMAX, 400),
    "Bernoulli": (features.BERNOULLI, 425),
}


class Launches(TorchDispatchMode):
    """Counts operators that reach a device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.count += name not in FREE and not (name == "_to_copy" and result is args[0])
        return result


@pytest.mark.parametrize("name", STEPS)
def test_a_step_launches_no_more_kernels_than_this(name, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(features, "B", 48)
    monkeypatch.setattr(features, "N", 1000)
    options, most = STEPS[name]
    step = features.simple(num_inducing=32, **options)
    step.backward()  # the first step sets q(u)
    with Launches() as found:
        step.loss(*step.data).backward()
    assert 50 < found.count <= most
