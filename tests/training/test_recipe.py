"""The step sizes of the default recipe."""

from __future__ import annotations

import gpytorch
import pytest
import torch

from tighter_gp.training import natural_steps
from tighter_gp.training.recipe import Recipe


def test_learning_rate_rises_stays_and_falls_to_zero():
    recipe = Recipe(ramp=4, decay=0.25)
    factors = [recipe.lr_factor(step, 80) for step in range(80)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(factors[3:61]) == {1.0}
    assert factors[61:] == sorted(factors[61:], reverse=True)
    assert 0 < factors[-1] < 0.06


def test_inducing_points_slow_down_from_the_start():
    recipe = Recipe()
    factors = [recipe.inducing_lr_factor(step, 80) for step in range(80)]
    assert factors[0] == recipe.lr_factor(0, 80)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[40] == pytest.approx(0.5)
    assert factors[-1] < 0.001


def test_the_natural_step_is_a_mean_over_batches_first():
    recipe = Recipe()
    sizes = [recipe.natural_size(step, 1000) for step in range(1000)]
    assert sizes[:5] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert sizes[5:500] == [pytest.approx(0.2)] * 495
    assert sizes[500:] == sorted(sizes[500:], reverse=True)
    assert sizes[-1] == pytest.approx(0.05, abs=1e-3)


def test_a_small_last_batch_moves_q_less():
    assert Recipe().natural_size(400, 1000, share=0.5) == pytest.approx(0.1)


def test_other_likelihoods_take_smaller_steps():
    assert Recipe.for_likelihood(gpytorch.likelihoods.GaussianLikelihood()).natural == 0.2
    assert Recipe.for_likelihood(gpytorch.likelihoods.BernoulliLikelihood()).natural == 0.05
    assert Recipe.for_likelihood(gpytorch.likelihoods.SoftmaxLikelihood(3, 3)).natural == 0.02


def test_full_batches_take_nearly_full_steps():
    recipe = Recipe()
    sizes = [recipe.natural_size(s, 10, full_batch=True) for s in (0, 1, 9)]
    assert sizes == [1.0, 0.9, 0.9]


def test_inducing_points_move_in_units_of_the_spread_of_inputs():
    points = torch.randn(50, 3)
    assert natural_steps._spread(7 * points) == pytest.approx(7 * natural_steps._spread(points))
    assert natural_steps._spread(torch.tensor([[0.0, 1.0], [0.0, 3.0]])) == pytest.approx(0.5**0.5)


def test_a_warm_start_has_no_first_step_of_size_one():
    recipe = Recipe()
    cold, warm = ([recipe.natural_size(step, 100, is_warm=w) for step in (0, 1, 9)] for w in (False, True))
    assert cold == [1.0, 0.5, 0.2]
    assert warm == [0.2, 0.2, 0.2]
    assert recipe.natural_size(0, 100, full_batch=True, is_warm=True) == recipe.natural_full
