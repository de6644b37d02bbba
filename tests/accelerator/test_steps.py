"""A training step of every feature, on the CPU and on both devices: equal numbers, and known synchronisations."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.device import DEVICES
from tests.accelerator.features import FEATURES
from tests.accelerator.table import WAITS, step_of, waits_of

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


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_waits_as_often_as_the_table_says(feature):
    """Update ``WAITS`` when a step waits less; ``python -m tests.accelerator`` prints the table for docs/gpus.md."""
    checked, unchecked = waits_of(feature, debug=True), waits_of(feature, debug=False)
    assert (len(checked), len(unchecked)) == WAITS[feature], [*checked, "--", *unchecked]
