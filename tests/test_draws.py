"""Random numbers from a generator wherever it is."""

from __future__ import annotations

import torch

from tighter_gp.draws import permutation, seeded, standard_normal

CPU = torch.device("cpu")


def test_draws_follow_a_seed_and_leave_the_global_generator_as_it_was():
    state = torch.get_rng_state()
    with seeded(3, CPU):
        first = torch.randn(4)
    assert torch.equal(torch.get_rng_state(), state)
    with seeded(3, CPU):
        assert torch.equal(torch.randn(4), first)


def test_numbers_come_from_the_generator_that_is_given():
    like = torch.zeros((), dtype=torch.float64)
    draw = lambda seed: standard_normal((2, 3), like, torch.Generator().manual_seed(seed))
    assert draw(0).dtype == torch.float64
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    torch.manual_seed(5)
    expected = torch.randn(3, dtype=torch.float64)
    torch.manual_seed(5)
    assert torch.equal(standard_normal((3,), like, None), expected)


def test_a_permutation_has_every_number_once():
    order = permutation(50, "cpu", torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(50))
    assert torch.equal(order, permutation(50, CPU, torch.Generator().manual_seed(0)))
