"""Checkpoints: whole, safe, and resumed to the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import MeanFieldVariationalDistribution, NaturalVariationalDistribution

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.training.problems import (
    Count,
    D,
    Interrupted,
    M,
    N,
    collapsed,
    data,
    parameters,
    problem,
    same,
    state,
    with_prior,
)
from tighter_gp import Recipe, fit
from tighter_gp.training.checkpoint import save


def softmax():
    x, _ = data()
    model = tighter_gp.models.MultiClassification(3, x, M)
    return model, model.likelihood


LABELS = (data()[1] > 0).long() + (data()[1] > 0.7).long()

CASES = {
    "natural": (problem, {}),
    "natural form": (lambda: problem(distribution=NaturalVariationalDistribution), {}),
    "mean field": (lambda: problem(distribution=MeanFieldVariationalDistribution), {}),
    "adam": (problem, {"natural": 0}),
    "per point": (lambda: problem(conditional=tighter_gp.PerPoint(N)), {}),
    "early stopping": (problem, {"validation": data(19), "patience": 50, "lr": 0.3}),
    "drawn": (softmax, {"y": LABELS}),
    "lbfgs": (collapsed, {}),
    "prior": (with_prior, {}),
}


@pytest.mark.parametrize("objective", [tighter_gp.TighterELBO, VariationalELBO])
def test_full_batch_fit_is_the_loop_one_would_write(objective):
    x, y = data()
    model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
    mll = objective(likelihood, model, num_data=N)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.03)
    expected = []
    for _ in range(9):
        adam.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        adam.step()
        expected.append(loss.item())
    model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
    recipe = Recipe(lr=0.03, natural=0, schedule="constant")
    history = fit(model, likelihood, x, y, objective=objective, steps=9, batch_size=None, recipe=recipe)
    torch.testing.assert_close(torch.tensor(history.loss), torch.tensor(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_numbers_of_an_uninterrupted_one(case, how, tmp_path):
    make, options = CASES[case]
    options = {"steps": 23, "batch_size": 16, "seed": 4, **options}
    (x, y), recipe = data(), Recipe(natural=options.pop("natural", None), checkpoint_every=6, validate_every=3)
    y = options.pop("y", y)
    model, likelihood = make()
    count = Count()
    whole = fit(model, likelihood, x, y, callbacks=[count], recipe=recipe, **options)
    expected = parameters(model, likelihood)

    def stop(step):
        if step.step == 15:
            raise how

    options |= {"checkpoint": tmp_path / "run.pt", "recipe": recipe}
    with pytest.raises(how):
        fit(*make(), x, y, callbacks=[Count(), stop], **options)
    model, likelihood = make()
    torch.rand(3)
    resumed = Count()
    history = fit(model, likelihood, x, y, callbacks=[resumed], resume=True, **options)
    assert torch.equal(parameters(model, likelihood), expected)
    assert history.loss == whole.loss
    assert history.validation == whole.validation
    assert resumed.steps == count.steps


@pytest.mark.parametrize("place", ["objective", "validation"])
def test_ctrl_c_anywhere_leaves_a_checkpoint_from_which_the_same_numbers_come(place, tmp_path, monkeypatch):
    armed = []

    class Interrupting(tighter_gp.TighterELBO):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            if armed and self.calls == 9 and place == "objective":
                raise KeyboardInterrupt
            return super().forward(*args, **kwargs)

    options = {"objective": Interrupting, "steps": 12, "batch_size": 16, "validation": data(9), "progress": False}
    options["recipe"] = Recipe(validate_every=4)
    model, likelihood = problem()
    whole, expected = fit(model, likelihood, *data(), **options), parameters(model, likelihood)
    armed.append(True)
    options["checkpoint"] = tmp_path / "run.pt"
    if place == "validation":
        original, calls = tighter_gp.training.validation.predict_y, []

        def stop(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        monkeypatch.setattr(tighter_gp.training.validation, "predict_y", stop)
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), **options)
    monkeypatch.undo()
    armed.clear()
    model, likelihood = problem()
    history = fit(model, likelihood, *data(), resume=True, **options)
    assert history.loss == whole.loss
    assert history.validation == whole.validation
    assert torch.equal(parameters(model, likelihood), expected)


KILLED = """
import sys, time, torch
torch.set_default_dtype(torch.float64)
from tests.training.problems import data, problem, parameters
from tighter_gp import Recipe, fit
model, likelihood = problem()
slow = lambda step: time.sleep(0.01) if "slow" in sys.argv else None
history = fit(model, likelihood, *data(), steps=400, batch_size=16, checkpoint=sys.argv[1], resume=True, callbacks=[slow],
              recipe=Recipe(checkpoint_every=3))
print(history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(tmp_path):
    path, root = tmp_path / "run.pt", Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(path)]
    process = subprocess.Popen([*command, "slow"], cwd=root)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.15)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = len(torch.load(path, weights_only=True)["history"]["loss"])
    assert 0 < done < 400
    resumed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    model, likelihood = problem()
    history = fit(model, likelihood, *data(), steps=400, batch_size=16, recipe=Recipe(checkpoint_every=3))
    assert resumed == [history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex()]


def test_a_run_that_a_callback_ended_stays_ended_and_says_so(tmp_path, caplog):
    x, y = data()
    model, likelihood = problem()
    options = {"checkpoint": tmp_path / "run.pt", "callbacks": [lambda step: step.step == 3]}
    fit(model, likelihood, x, y, steps=5, **options)
    assert fit(model, likelihood, x, y, steps=9, resume=True, **options).steps == 3
    assert "nothing is trained" in caplog.text
    assert "a callback asked for it" in caplog.text


def test_a_finished_run_is_not_run_again_but_can_be_prolonged(tmp_path):
    path = tmp_path / "folder" / "run.pt"
    model, likelihood = problem()
    assert fit(model, likelihood, *data(), steps=5, checkpoint=path, resume=True).steps == 5
    again, count = problem(), Count()
    assert fit(*again, *data(), steps=5, checkpoint=path, resume=True, callbacks=[count]).steps == 5
    assert count.steps == []
    assert torch.equal(parameters(*again), parameters(model, likelihood))
    fit(*again, *data(), steps=8, checkpoint=path, resume=True, callbacks=[count])
    assert count.steps == [6, 7, 8]
    assert [entry.name for entry in path.parent.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("natural", [0.5, 0])
def test_a_run_that_ended_with_its_best_parameters_is_prolonged_from_its_last_ones(tmp_path, natural):
    recipe = Recipe(lr=2.0 if natural else 0.8, schedule="constant", natural=natural, validate_every=1)
    options = {"recipe": recipe, "batch_size": 16, "resume": True, "validation": data(19), "patience": 99}

    def run_to(steps, name):
        fresh = problem()
        return fit(*fresh, *data(), steps=steps, checkpoint=tmp_path / name, **options), parameters(*fresh)

    short, _ = run_to(5, "run.pt")
    assert short.best_step < short.steps  # the best parameters are not the last
    prolonged, ended = run_to(9, "run.pt")
    whole, expected = run_to(9, "whole.pt")
    assert prolonged.loss == whole.loss
    assert prolonged.validation == whole.validation
    assert torch.equal(ended, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"batch_size": 20}, "batch_size was 16 and is 20"),
        ({"lr": 0.1}, "recipe was .*lr=None.* and is .*lr=0.1"),
        ({"recipe": Recipe(schedule=lambda done: 1 - done)}, "schedule=1, 1, .* and is .*schedule=1, 0.75"),
        ({"validation": (data(9)[0] + 1, data(9)[1])}, "held-out data was"),
        ({"x": data()[0] + 1}, "data was"),
        ({"kernel": "matern52"}, "model.covar_module.base_kernel was RBFKernel .* and is MaternKernel"),
        ({"points": M + 1}, r"chol_variational_covar was \(6, 6\) and is \(7, 7\)"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    change = dict(change)
    x, y = data()
    options = {"steps": 3, "batch_size": 16, "checkpoint": tmp_path / "run.pt", "validation": data(9)}
    options["recipe"] = Recipe(schedule=lambda done: 1.0) if "recipe" in change else None
    fit(*problem(), x, y, **options)
    kernel, points, x = change.pop("kernel", "rbf"), change.pop("points", M), change.pop("x", x)
    model = make_gp(data()[0][:points].clone(), make_kernel(kernel, 1.0, torch.ones(D)))
    with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
        fit(model, make_noise(0.2), x, y, resume=True, **{**options, **change})


@pytest.mark.parametrize("kind", ["garbage", "truncated", "empty", "other format", "parts"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, kind):
    path = tmp_path / "run.pt"
    fit(*problem(), *data(), steps=2, checkpoint=path)
    whole = path.read_bytes()
    contents = {"garbage": b"garbage", "truncated": whole[:-200], "empty": b""}
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "parts":
        save(path, {"config": {}, "model": {}})
    else:
        torch.save({"format": 99}, path)
    with pytest.raises(ValueError, match=r"run\.pt is not a"):
        fit(*problem(), *data(), steps=2, checkpoint=path, resume=True)


@pytest.mark.parametrize("kind", ["directory", "parent is a file"])
def test_a_path_that_takes_no_checkpoint_is_refused_before_the_first_step(tmp_path, kind):
    path = tmp_path / "run.pt"
    if kind == "directory":
        path.mkdir()
    else:
        path.touch()
        path = path / "run.pt"
    model, likelihood = problem()
    before = state(model, likelihood)
    with pytest.raises(ValueError, match=r"No checkpoint can be written to .*; use another path"):
        fit(model, likelihood, *data(), steps=2, checkpoint=path)
    assert same(state(model, likelihood), before)


@pytest.mark.parametrize("place", ["save", "sync", "replace", "state"])
def test_a_failed_write_is_said_and_leaves_the_old_file(tmp_path, monkeypatch, place, caplog):
    path = tmp_path / "run.pt"
    fit(*problem(), *data(), steps=2, checkpoint=path)
    kept = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class Unreadable(Count):
        def state_dict(self):
            return {"steps": Interrupted}

    if place != "state":
        names = {"save": (torch, "save"), "sync": (os, "fsync"), "replace": (os, "replace")}
        monkeypatch.setattr(*names[place], fail)
    callbacks = [Unreadable()] if place == "state" else []
    history = fit(*problem(), *data(), steps=4, checkpoint=path, resume=True, callbacks=callbacks)
    assert history.steps == 4
    assert path.read_bytes() == kept
    assert "no checkpoint was written" in caplog.text
    assert os.listdir(tmp_path) == ["run.pt"]


def test_parameters_of_the_objective_are_saved_and_restored(tmp_path):
    class Weighted(tighter_gp.TighterELBO):
        def __init__(self, *args):
            super().__init__(*args)
            self.weight = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) - (self.weight - 2).square()

    options = {"objective": Weighted, "batch_size": 16, "recipe": Recipe(natural=0, schedule="constant")}
    whole = fit(*problem(), *data(), steps=6, **options).loss
    path = tmp_path / "run.pt"
    fit(*problem(), *data(), steps=3, checkpoint=path, **options)
    assert fit(*problem(), *data(), steps=6, checkpoint=path, resume=True, **options).loss == whole
