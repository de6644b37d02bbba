"""Training that survives: 64 badly conditioned float32 problems, and faults put into chosen steps."""

from __future__ import annotations

import math
import os

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools import adversarial
from tests.tools.adversarial import SETTINGS
from tests.training.problems import data, failing_objective, parameters, problem, same, state
from tighter_gp import Recipe, fit

STEPS = 200 if os.environ.get("TIGHTER_GP_SOAK") else 12

pytestmark = [
    # Said when a jitter had to be added: these problems are made for it.
    pytest.mark.filterwarnings("ignore:.*was not positive definite"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("batch_size", [None, 20], ids=["all", "batches"])
def test_fit_ends_with_finite_parameters(setting, batch_size):
    tried = adversarial.build(setting)
    before = parameters(tried.model, tried.likelihood)
    recipe = Recipe(lr=setting.lr, schedule="constant")
    history = fit(*tried, steps=STEPS, batch_size=batch_size, recipe=recipe, progress=False)
    assert history.steps == STEPS
    assert adversarial.all_finite(tried)
    assert sum(map(math.isfinite, history.loss)) > 0.8 * STEPS
    assert not torch.equal(parameters(tried.model, tried.likelihood), before)


class Watch:
    """A callback that keeps all values after every step."""

    def __init__(self):
        self.states = []

    def __call__(self, step):
        self.states.append(state(step.model, step.likelihood))


def train(bad_steps, how="raise", natural=None, **options):
    """A run with faults in some steps, counted from 0, with the values after each."""
    model, likelihood = problem()
    watch = Watch()
    recipe = Recipe(natural=natural, lr=0.05, schedule="constant", **options.pop("recipe", {}))
    objective = failing_objective(bad_steps, how)
    options = {"steps": 8, "batch_size": 16, "progress": False, **options}
    history = fit(model, likelihood, *data(), objective=objective, recipe=recipe, callbacks=[watch], **options)
    return history, watch.states


@pytest.mark.parametrize("how", ["raise", "nan", "gradient"])
@pytest.mark.parametrize("natural", [None, 0])
def test_a_failed_step_changes_nothing_and_training_goes_on(how, natural, caplog):
    history, states = train({4}, how, natural)
    assert [step for step, _ in history.skipped] == [4]
    assert math.isnan(history.loss[4])
    assert same(states[4], states[3])
    assert not same(states[5], states[4])
    assert "step 4 was skipped" in caplog.text


@pytest.mark.parametrize("natural", [None, 0])
def test_a_second_failure_in_a_row_undoes_the_last_update(natural):
    history, states = train({4, 5}, natural=natural)
    assert same(states[4], states[3])
    assert same(states[5], states[2])
    assert not same(states[6], states[5])
    assert history.skipped[1][1].endswith("The last update was undone.")
    change = lambda after, before: (
        (parameters_of(states[after]) - parameters_of(states[before])).nan_to_num().abs().max()
    )
    assert change(6, 5) < 0.3 * 0.05 < change(3, 2)  # a quarter of the learning rate


def parameters_of(values):
    return torch.cat([value.flatten().double() for name, value in values.items() if "raw_" in name])


def test_too_many_failures_in_a_row_raise_and_leave_the_last_good_parameters():
    model, likelihood = problem()
    watch = Watch()
    objective = failing_objective(range(5, 99), "raise")
    options = {"steps": 30, "batch_size": 16, "objective": objective, "progress": False}
    with pytest.raises(
        RuntimeError, match="4 steps in a row failed, the last, step 8, with: K_ZZ is not positive definite"
    ):
        fit(model, likelihood, *data(), recipe=Recipe(max_failures=4), callbacks=[watch], **options)
    assert same(state(model, likelihood), watch.states[3])


def test_a_run_in_which_no_step_succeeds_raises_at_its_end():
    with pytest.raises(RuntimeError, match="3 steps in a row failed"):
        train(range(99), steps=3)


def test_a_last_update_after_which_nothing_can_be_computed_is_undone():
    history, states = train({8})
    assert history.skipped[0][1].endswith("The last update was undone.")
    assert [step for step, _ in history.skipped] == [7]
    assert len(states) == 8


def test_a_failure_is_part_of_a_checkpoint(tmp_path):
    """A resumed run undoes and damps as one that was not interrupted."""
    whole, states = train({4, 5}, steps=10)
    seen = []

    def stop(step):
        seen.append(step.step)
        if step.step == 5:
            raise KeyboardInterrupt

    model, likelihood = problem()
    recipe = Recipe(lr=0.05, schedule="constant")
    options = {"batch_size": 16, "recipe": recipe, "checkpoint": tmp_path / "run.pt", "steps": 10, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        fit(model, likelihood, *data(), objective=failing_objective({4, 5}, "raise"), callbacks=[stop], **options)
    model, likelihood = problem()
    objective = failing_objective({-1}, "raise")  # no first call: what was step 5 is call 0
    resumed = fit(model, likelihood, *data(), objective=objective, resume=True, **options)
    assert len(resumed.skipped) == len(whole.skipped)
    assert same(state(model, likelihood), states[-1])


def test_gradients_too_large_for_adam_do_no_harm():
    class Steep(tighter_gp.TighterELBO):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + 1e30 * self.model.mean_module.constant

    x, y = (values.float() for values in data())
    model = tighter_gp.models.Regression(x, 6)
    fit(model, model.likelihood, x, y, objective=Steep, steps=5, recipe=Recipe(natural=0))
    assert torch.isfinite(parameters(model)).all()


def test_constraints_that_nothing_enforces_are_kept():
    x, y = data()
    constraint = gpytorch.constraints.GreaterThan(1e-3, transform=None, initial_value=0.01)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint)
    model = tighter_gp.models.Regression(x, 6, likelihood=likelihood)
    fit(model, likelihood, x, y, steps=40, batch_size=16)
    assert likelihood.noise.item() >= 1e-3
