"""How many kernels an eager step launches in float32. Lower the numbers when it takes fewer."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.launches import STEPS, launches_of, report

# M = 32, B = 48, forward and backward, without views and without the optimizer.
LAUNCHES = {"T-SVGP": 260, "T-SOLVE-GP": 310, "softmax, optimal": 400, "Bernoulli, optimal": 425}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_launches_no_more_kernels_than_this(name):
    torch.set_default_dtype(torch.float32)
    assert len(launches_of(name).found) <= LAUNCHES[name], report(name)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_launches_of_a_backward_pass_are_put_down_to_a_line_of_the_package():
    found = launches_of("T-SVGP")
    backward = [launch for launch in found.found if launch.is_backward]
    known = [launch for launch in backward if ".py:" in launch.place]
    assert len(known) > 0.9 * len(backward)
    assert found.by_operator().total() == found.by_place().total() == len(found.found)
