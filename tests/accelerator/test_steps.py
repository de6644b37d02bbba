"""A training step of every feature, on the CPU and on both devices: equal numbers, and known synchronisations."""

from __future__ import annotations

import re

import gpytorch
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tighter_gp
from tests.accelerator.device import DEVICES
from tests.accelerator.features import FEATURES
from tests.accelerator.table import PAGE, WAITS, WAITS_IN_FLOAT32, step_of, waits_of, with_table

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_gives_the_numbers_of_the_cpu(feature):
    expected = step_of(feature, "cpu")
    value, gradients = expected.backward(), expected.gradients()
    for device in DEVICES:
        step = step_of(feature, device)
        actual = step.backward()
        assert actual.device == torch.device(device)
        torch.testing.assert_close(actual.cpu(), value, rtol=1e-12, atol=1e-12)
        parameters = [p for p in step.module.parameters() if p.grad is not None]
        assert all(p.grad.device == p.device == torch.device(device) for p in parameters)
        torch.testing.assert_close(step.gradients(), gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_waits_as_often_as_the_table_says(feature, dtype):
    """Update ``WAITS`` when a step waits less; ``python -m tests.accelerator`` prints the table for docs/gpus.md."""
    torch.set_default_dtype(dtype)
    checked, unchecked = waits_of(feature, debug=True), waits_of(feature, debug=False)
    expected = (WAITS_IN_FLOAT32 if dtype == torch.float32 else {}).get(feature, WAITS[feature])
    assert (len(checked), len(unchecked)) == expected, [*checked, "--", *unchecked]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_tables_of_the_page_are_up_to_date():
    """``python -m tests.accelerator --write`` makes them anew."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


class Wide(TorchDispatchMode):
    """The operators that give float64."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves):
            self.found.append(str(function))
        return result


NEED_FLOAT64 = ("Blocks", "collapsed kernel", "collapsed GPLVM", "CollapsedGP")


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NEED_FLOAT64])
def test_with_the_float32_factor_a_step_makes_no_float64(feature):
    """What a device without float64 asks for, Apple's MPS."""
    torch.set_default_dtype(torch.float32)
    with tighter_gp.settings.float32_factor(), gpytorch.settings.variational_cholesky_jitter(float_value=1e-4):
        torch.manual_seed(0)
        step = FEATURES[feature]()
        step.backward()
        with Wide() as wide:
            step.backward()
    assert wide.found == []


@pytest.mark.parametrize(
    "code", re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M)
)
def test_the_code_of_the_page_runs(code):
    step = step_of("T-SVGP", "cpu")
    model, likelihood = step.module.model, step.module.likelihood
    names = {"model": model, "likelihood": likelihood, "train_x": step.data[0], "train_y": step.data[1]}
    exec(code, {"tighter_gp": tighter_gp, **names})
