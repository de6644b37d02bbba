"""Random states that are found again."""

from __future__ import annotations

import torch

from tighter_gp.draws import seeded

CPU = torch.device("cpu")


def test_draws_follow_a_seed_and_leave_the_global_generator_as_it_was():
    state = torch.get_rng_state()
    with seeded(3, CPU):
        first = torch.randn(4)
    assert torch.equal(torch.get_rng_state(), state)
    with seeded(3, CPU):
        assert torch.equal(torch.randn(4), first)
