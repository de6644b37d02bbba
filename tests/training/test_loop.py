"""The loop: what one would write by hand, seeds, schedules, callbacks."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch

import tighter_gp
from tests.tools.support import Q_FORMS
from tests.training.problems import M, N, data, parameters, problem
from tighter_gp.draws import seed_generators
from tighter_gp.training import fit, natural_steps
from tighter_gp.training import steps as training_steps
from tighter_gp.training.batches import ArrayBatches
from tighter_gp.training.natural_compiled import CompiledNaturalStep
from tighter_gp.training.optimizers import SCHEDULES
from tighter_gp.training.problem import Problem


def test_mini_batch_training_raises_the_bound_and_restores_modes():
    x, y = data()
    model, likelihood = problem()
    model.eval()
    before = tighter_gp.evaluate_bound(model.train(), likelihood, x, y)
    model.eval()
    history = fit(model, likelihood, x, y, epochs=30, batch_size=16, lr=0.05)
    assert tighter_gp.evaluate_bound(model, likelihood, x, y) > before + 10
    assert history.steps == 30 * math.ceil(N / 16)
    assert not model.training
    assert likelihood.training
    assert history.seconds > 0


def test_the_same_seed_gives_the_same_curve_and_leaves_the_global_random_state_alone():
    x, y = data()
    curves = []
    for seed in (5, 5, 6):
        model, likelihood = problem()
        state = torch.get_rng_state()
        curves.append(fit(model, likelihood, x, y, epochs=3, batch_size=16, seed=seed).loss)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


@pytest.mark.parametrize(
    ("name", "values"),
    [("constant", (1, 1, 1)), ("cosine", (1, 0.5, 0)), ("linear", (1, 0.5, 0)), ("exponential", (1, 0.1, 0.01))],
)
def test_schedules(name, values):
    for done, value in zip((0.0, 0.5, 1.0), values, strict=True):
        assert SCHEDULES[name](done) == pytest.approx(value, abs=1e-12)


def test_a_schedule_scales_the_first_step_of_adam():
    x, y = data()
    moved = []
    for factor in (1.0, 0.25):
        model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
        before = parameters(likelihood)
        fit(model, likelihood, x, y, steps=1, lr=0.04, schedule=lambda done, factor=factor: factor)
        moved.append((parameters(likelihood) - before).abs())
    torch.testing.assert_close(moved[0], torch.full_like(moved[0], 0.04), rtol=1e-5, atol=0)
    torch.testing.assert_close(moved[1], 0.25 * moved[0], rtol=1e-5, atol=0)


def test_callbacks_see_every_step_and_can_end_the_run():
    x, y = data()
    model, likelihood = problem()
    seen = []

    def callback(state):
        seen.append((state.step, state.epoch, state.epoch_end))
        return state.step == 6

    history = fit(model, likelihood, x, y, epochs=9, batch_size=16, callbacks=[callback])
    assert seen == [(1, 0, False), (2, 0, False), (3, 0, False), (4, 1, True), (5, 1, False), (6, 1, False)]
    assert history.steps == 6
    assert "callback" in history.stopped


def test_compiled_steps_train_as_eager_ones_do(monkeypatch):
    """With torch's own interpreter in place of a compiler; a short last batch is part of every epoch."""
    captured = functools.partial(tighter_gp.CompiledStep, backend="eager")
    monkeypatch.setattr(training_steps, "CompiledStep", captured)
    x, y = data()
    options = {"epochs": 2, "batch_size": 40, "lr": 0.05, "natural_gradients": False}
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, compile=True, **options)
    eager_model, eager_likelihood = problem()
    eager = fit(eager_model, eager_likelihood, x, y, **options)
    assert len(x) % 40
    torch.testing.assert_close(torch.tensor(history.loss), torch.tensor(eager.loss), rtol=1e-8, atol=1e-8)
    for ours, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", Q_FORMS)
def test_compiled_natural_steps_train_as_eager_ones_do(monkeypatch, form):
    """One graph for a natural step of q(u) and the gradients of the rest, for each size of batch."""
    made = []

    def captured(*args):
        made.append(CompiledNaturalStep(*args, backend="eager"))
        return made[-1]

    monkeypatch.setattr(natural_steps, "CompiledNaturalStep", captured)
    x, y = data()
    options = {"epochs": 2, "batch_size": 40}
    runs = []
    for compile in (True, False):
        model, likelihood = problem(distribution=Q_FORMS[form])
        history = fit(model, likelihood, x, y, compile=compile, **options)
        assert not history.skipped
        runs.append((torch.tensor(history.loss), parameters(model, likelihood)))
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-8)
    if form != "delta":
        (step,) = made
        assert len(step._graphs) == 2  # 27 and 26 rows
        assert None not in step._graphs.values()


def test_a_compiled_natural_step_that_fails_is_taken_back_and_tried_again_eagerly(monkeypatch):
    class Failing(CompiledNaturalStep):
        def __init__(self, *args):
            super().__init__(*args, backend="eager")

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * math.nan

    monkeypatch.setattr(natural_steps, "CompiledNaturalStep", Failing)
    x, y = data()
    options = {"steps": 5, "batch_size": 16}
    assert fit(*problem(), x, y, compile=True, **options).loss == fit(*problem(), x, y, **options).loss


def test_compiling_a_collapsed_model_is_an_error():
    x, y = data()
    with pytest.raises(ValueError, match="compile=True is for Adam"):
        fit(*problem(), x, y, optimizer="lbfgs", compile=True)


def test_a_compiled_step_that_fails_is_tried_again_eagerly(monkeypatch):
    class Nothing:
        def __init__(self, mll):
            self.mll = mll

        def __call__(self, x, y):
            return torch.full((), math.nan)

    monkeypatch.setattr(training_steps, "CompiledStep", Nothing)
    x, y = data()
    options = {"steps": 5, "batch_size": 16, "natural_gradients": False}
    assert fit(*problem(), x, y, compile=True, **options).loss == fit(*problem(), x, y, **options).loss


def test_a_device_with_a_generator_of_its_own_is_seeded_too(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seen.append(seed))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(seen.append(device)))
    state = torch.get_rng_state()
    seed_generators(11, torch.device("cuda", 1))
    assert seen == [torch.device("cuda", 1), 11]
    assert torch.initial_seed() == 11
    torch.set_rng_state(state)


def test_the_loss_of_a_step_keeps_no_graph():
    x, y = data()
    model, likelihood = problem()
    trained = Problem(model, likelihood, tighter_gp.TighterELBO(likelihood, model, N), N, seed=0)
    loss, error = training_steps.eager_gradients(trained)(next(ArrayBatches(x, y, {}, 16, 0, x).iterate(0)))
    assert error is None
    assert not loss.requires_grad
