"""Steps that fail: skipped, undone, given up."""

from __future__ import annotations

import math

import pytest
import torch
from linear_operator.utils.errors import NanError, NotPSDError

from tests.training.problems import (
    Interrupted,
    data,
    failing_objective,
    gplvm,
    interrupt_at,
    parameters,
    per_point,
    problem,
    same,
    state,
)
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit
from tighter_gp.training import steps as training_steps
from tighter_gp.training.guard import Guard
from tighter_gp.training.problem import Problem


@pytest.mark.parametrize("how", ["raise", "nan", "gradient"])
def test_a_failed_step_changes_nothing_and_training_goes_on(how, caplog):
    x, y = data()
    model, likelihood = problem()
    seen = []
    record = lambda state: seen.append(parameters(state.model, state.likelihood))
    history = fit(
        model, likelihood, x, y, objective=failing_objective({3}, how), steps=8, batch_size=16, callbacks=[record]
    )
    assert torch.equal(seen[3], seen[2])
    assert not torch.equal(seen[4], seen[3])
    assert [step for step, _ in history.skipped] == [3]
    assert math.isnan(history.loss[3])
    assert all(math.isfinite(loss) for i, loss in enumerate(history.loss) if i != 3)
    assert bool(torch.isfinite(seen[-1]).all())
    assert "step 3 was skipped" in caplog.text


def test_too_many_failures_in_a_row_raise_and_leave_the_last_good_parameters():
    x, y = data()
    model, likelihood = problem()
    seen = []
    record = lambda state: seen.append(parameters(state.model, state.likelihood))
    objective = failing_objective({1, *range(3, 99)}, "raise")
    with pytest.raises(RuntimeError, match=r"4 steps in a row failed, the last, step 6, with: K_ZZ is not positive"):
        fit(model, likelihood, x, y, objective=objective, steps=50, batch_size=16, callbacks=[record], max_failures=4)
    # Step 2 succeeded, but what it led to did not: its update is undone.
    assert torch.equal(parameters(model, likelihood), seen[1])
    assert not torch.equal(seen[2], seen[1])


@pytest.fixture
def faults(monkeypatch):
    """Makes the losses of chosen calls fail; the first call sets q(u), the second is step 0."""

    def at(*calls):
        original, count = Problem.loss, iter(range(10**6))

        def loss(self, batch):
            if next(count) in calls:
                raise NotPSDError("injected")
            return original(self, batch)

        monkeypatch.setattr(Problem, "loss", loss)

    return at


@pytest.mark.parametrize("make", [per_point, gplvm])
def test_undoing_an_update_restores_the_rows_of_tables_with_sparse_gradients(make, faults):
    faults(4, 5)
    model, likelihood, x, y, options = make()
    states = []
    record = lambda step: states.append(state(model, likelihood))
    options = {"natural_gradients": False, **options}  # one evaluation of the loss per step
    history = fit(model, likelihood, x, y, steps=7, batch_size=16, lr=0.1, callbacks=[record], **options)
    assert history.skipped[1] == (4, "injected The last update was undone.")
    changed = [name for name, value in states[1].items() if not torch.equal(value, states[2][name])]
    assert any("raw_m" in name or "latents" in name for name in changed)
    assert same(states[4], states[1])
    assert not same(states[5], states[4])


def test_a_last_update_is_undone_in_the_rows_of_a_table_too(faults):
    faults(4)  # the look at the bound after three steps
    model, likelihood, x, y, _ = per_point()
    states = []
    fit(
        model,
        likelihood,
        x,
        y,
        steps=3,
        batch_size=16,
        lr=0.1,
        callbacks=[lambda step: states.append(state(model, likelihood))],
    )
    assert same(state(model, likelihood), states[1])


def test_rows_to_restore_are_part_of_a_checkpoint(tmp_path, monkeypatch):
    """Interrupted between the two failures of which the second undoes the update before the first."""
    results, path = [], tmp_path / "run.pt"
    loss, seed_step, current = Problem.loss, Problem.seed_step, [0]

    def remember(self, step):
        current[0] = step
        seed_step(self, step)

    def fail(self, batch):
        if current[0] in {3, 4}:
            raise NotPSDError("injected")
        return loss(self, batch)

    monkeypatch.setattr(Problem, "seed_step", remember)
    monkeypatch.setattr(Problem, "loss", fail)
    for stop in (False, True):
        options = {"steps": 8, "batch_size": 16, "lr": 0.1}
        if stop:
            options |= {"checkpoint": path, "checkpoint_every": 1}
            with pytest.raises(Interrupted):
                fit(*per_point()[:4], callbacks=[interrupt_at(5)], **options)
            assert len(checkpoints.load(path, torch.device("cpu"))["history"]["loss"]) == 4
        model, likelihood, x, y, _ = per_point()
        history = fit(model, likelihood, x, y, resume=stop, **options)
        results.append((parameters(model, likelihood), history.skipped))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_an_interrupted_run_of_lbfgs_leaves_an_accepted_point(monkeypatch):
    original, seen = Problem.loss, []

    def loss(self, batch):
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.append(original(self, batch))
        return seen[-1]

    monkeypatch.setattr(Problem, "loss", loss)
    model, likelihood = problem()
    accepted = []
    record = lambda step: accepted.append(parameters(model, likelihood))
    with pytest.raises(KeyboardInterrupt):
        fit(model, likelihood, *data(), steps=50, optimizer="lbfgs", callbacks=[record])
    assert torch.equal(parameters(model, likelihood), accepted[-1])


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_run_in_which_no_step_succeeds_raises_at_its_end(optimizer, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(RuntimeError, match=r"3 steps in a row failed, the last, step 2, with: K_ZZ is not") as caught:
        fit(
            *problem(),
            *data(),
            objective=failing_objective(set(range(99)), "raise"),
            steps=3,
            optimizer=optimizer,
            checkpoint=path,
        )
    assert isinstance(caught.value.__cause__, NotPSDError)
    assert not path.exists()


def test_a_run_whose_last_steps_fail_ends_as_usual():
    history = fit(*problem(), *data(), objective=failing_objective({1, 2}, "raise"), steps=3, batch_size=16)
    assert [math.isnan(loss) for loss in history.loss] == [False, True, True]


class Recorded:
    """A step of one number, as anybody might write it: the guard knows no more of it."""

    name = "recorded"

    def __init__(self, parameter, fails):
        self.parameter, self.fails = parameter, fails

    def init(self):
        return 0

    def step(self, state, batch, call):
        if state in self.fails:
            return state + 1, training_steps.Info(math.nan, NanError("no"))
        call.keep({})
        with torch.no_grad():
            self.parameter += call.damping
        return state + 1, training_steps.Info(self.parameter.item())

    def state_dict(self, state):
        return {"count": state}

    def load_state_dict(self, saved):
        return saved["count"]


def test_a_guard_skips_undoes_and_damps_any_step():
    parameter = torch.nn.Parameter(torch.zeros(()))
    guard = Guard(Recorded(parameter, {2, 3}), {"parameter": parameter}, 5, lambda error: "none")
    state, values = guard.init(), []
    for number in range(6):
        state, info = guard.step(state, None, number, number / 6)
        values.append((parameter.item(), info.skipped, state.failures))
    assert values[:4] == [(1.0, "", 0), (2.0, "", 0), (2.0, "no", 1), (1.0, "no The last update was undone.", 2)]
    # After the undoing the step starts anew, a quarter as large.
    assert [value for value, _, _ in values[4:]] == pytest.approx([1.25, 1.525])
    restored = guard.load_state_dict(guard.state_dict(state), state.failures)
    assert (restored.inner, restored.damping, restored.before) == (state.inner, state.damping, state.before)


def test_a_guard_gives_up_with_the_last_error():
    parameter = torch.nn.Parameter(torch.zeros(()))
    guard = Guard(Recorded(parameter, set(range(9))), {"parameter": parameter}, 2, lambda error: f"of {error}")
    state, _ = guard.step(guard.init(), None, 0, 0.0)
    with pytest.raises(
        RuntimeError, match=r"2 steps in a row failed, the last, step 1, with: no Hyperparameters: of no"
    ):
        guard.step(state, None, 1, 0.5)


def test_a_checkpoint_without_what_later_ones_hold_starts_undamped():
    guard = Guard(Recorded(None, set()), {}, 3, str)
    for saved in ({"count": 0}, {"count": 0, "rows": {}}):
        restored = guard.load_state_dict(saved, failures=2)
        assert (restored.damping, restored.failures, restored.before, restored.rows) == (1.0, 2, {}, {})
