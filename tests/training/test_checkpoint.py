"""Checkpoints: whole, safe, and resumed to the same numbers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import NaturalVariationalDistribution

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
    interrupt_at,
    parameters,
    problem,
    same,
    state,
)
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit, run
from tighter_gp.training.problem import Problem


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
    history = fit(
        model,
        likelihood,
        x,
        y,
        objective=objective,
        steps=9,
        batch_size=None,
        lr=0.03,
        schedule="constant",
        natural_gradients=False,
    )
    torch.testing.assert_close(torch.tensor(history.loss), torch.tensor(expected), rtol=1e-12, atol=1e-12)


CASES = {
    "adam": (problem, {}),
    "per point": (lambda: problem(conditional=tighter_gp.PerPoint(N)), {}),
    "natural": (lambda: problem(distribution=NaturalVariationalDistribution), {"natural_gradients": 0.2}),
    "early stopping": (problem, {"validation": data(19), "patience": 50, "lr": 0.3}),
    "lbfgs": (collapsed, {"batch_size": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_numbers_of_an_uninterrupted_one(case, tmp_path):
    make, options = CASES[case]
    x, y = data()
    options = {"steps": 23, "batch_size": 16, "seed": 4, **options}
    model, likelihood = make()
    count = Count()
    whole = fit(model, likelihood, x, y, callbacks=[count], **options)
    expected = parameters(model, likelihood)

    path, resumed = tmp_path / "run.pt", Count()
    options |= {"checkpoint": path, "checkpoint_every": 6}
    model, likelihood = make()
    with pytest.raises(Interrupted):
        fit(model, likelihood, x, y, callbacks=[Count(), interrupt_at(15)], **options)
    model, likelihood = make()
    torch.rand(3)
    history = fit(model, likelihood, x, y, callbacks=[resumed], resume=True, **options)
    assert torch.equal(parameters(model, likelihood), expected)
    assert history.loss == whole.loss
    assert history.validation == whole.validation
    assert resumed.steps == count.steps


def test_random_draws_of_the_objective_are_part_of_the_state(tmp_path):
    x, y = data()
    labels = (y > 0).long() + (y > 0.7).long()

    class Softmax(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([3]))
            base = tighter_gp.TighterVariationalStrategy(self, x[:M].clone(), q, conditional="beta")
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=3))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), make_kernel("rbf", 1.0, torch.ones(D))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def make():
        return Softmax(), gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)

    options = {"steps": 11, "batch_size": 16}
    whole = fit(*make(), x, labels, **options)
    # A callback that draws random numbers of its own does not change the run.
    path = tmp_path / "run.pt"
    options |= {"checkpoint": path, "checkpoint_every": 4}
    with pytest.raises(Interrupted):
        fit(*make(), x, labels, callbacks=[lambda state: torch.rand(1) > 2, interrupt_at(7)], **options)
    assert fit(*make(), x, labels, resume=True, **options).loss == whole.loss


def test_a_finished_run_is_not_run_again_but_can_be_prolonged(tmp_path):
    x, y = data()
    path = tmp_path / "run.pt"
    model, likelihood = problem()
    fit(model, likelihood, x, y, steps=5, checkpoint=path)
    again, other = problem()
    count = Count()
    history = fit(again, other, x, y, steps=5, checkpoint=path, resume=True, callbacks=[count])
    assert count.steps == []
    assert history.steps == 5
    assert torch.equal(parameters(again, other), parameters(model, likelihood))
    fit(again, other, x, y, steps=8, checkpoint=path, resume=True, callbacks=[count])
    assert count.steps == [6, 7, 8]


@pytest.mark.parametrize("natural", [0.5, False])
def test_a_run_that_ended_with_its_best_parameters_is_prolonged_from_its_last_ones(tmp_path, natural):
    options = {
        "lr": 2.0 if natural else 0.8,
        "schedule": "constant",
        "natural_gradients": natural,
        "batch_size": 16,
        "resume": True,
    }
    options |= {"validation": data(19), "validate_every": 1, "patience": 99}

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
    _, again = run_to(9, "run.pt")  # finished before: nothing is trained
    assert torch.equal(again, expected)


def test_resume_without_a_file_starts_anew(tmp_path):
    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=3, checkpoint=tmp_path / "folder" / "run.pt", resume=True)
    assert history.steps == 3
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 1}, "seed was 0 and is 1"), ({"batch_size": 20}, "batch_size was 16 and is 20")],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    x, y = data()
    options = {"steps": 3, "batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), x, y, **options)
    with pytest.raises(ValueError, match=message):
        fit(*problem(), x, y, resume=True, **{**options, **change})
    model = make_gp(x[: M + 1].clone(), make_kernel("rbf", 1.0, torch.ones(D)))
    with pytest.raises(ValueError, match="other names or shapes"):
        fit(model, make_noise(0.2), x, y, resume=True, **options)


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"value": torch.ones(3)})

    def cut_off(state, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", cut_off)
    checkpoints.save(path, {"value": torch.zeros(3)})
    monkeypatch.undo()
    assert torch.equal(checkpoints.load(path, torch.device("cpu"))["value"], torch.ones(3))
    checkpoints.save(path, {"value": torch.zeros(3)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


class Malicious:
    def __reduce__(self):
        return (os.mkdir, (os.environ["TIGHTER_GP_TEST_TARGET"],))


@pytest.mark.parametrize("kind", ["garbage", "truncated", "code", "other"])
def test_a_file_that_is_no_checkpoint_is_refused_without_executing_it(tmp_path, monkeypatch, kind):
    path, target = tmp_path / "run.pt", tmp_path / "made"
    monkeypatch.setenv("TIGHTER_GP_TEST_TARGET", str(target))
    if kind == "garbage":
        path.write_bytes(b"garbage")
    elif kind == "truncated":
        checkpoints.save(path, {"value": torch.ones(300)})
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "code":
        path.write_bytes(pickle.dumps(Malicious(), protocol=2))
    else:
        torch.save({"format": 99}, path)
    with pytest.raises(ValueError, match=r"run\.pt is not a"):
        checkpoints.load(path, torch.device("cpu"))
    assert not target.exists()


KILLED = """
import sys, torch
torch.set_default_dtype(torch.float64)
from tests.training.problems import data, problem, parameters
from tighter_gp.training import fit, run
from tighter_gp.training.problem import Problem
x, y = data()
model, likelihood = problem()
slow = lambda state: __import__("time").sleep(0.01) if "slow" in sys.argv else None
history = fit(model, likelihood, x, y, steps=400, batch_size=16, checkpoint=sys.argv[1], checkpoint_every=3, resume=True,
              callbacks=[slow])
print(history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(tmp_path):
    path = tmp_path / "run.pt"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(path)]
    process = subprocess.Popen([*command, "slow"], cwd=root)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.15)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = len(checkpoints.load(path, torch.device("cpu"))["history"]["loss"])
    assert 0 < done < 400
    resumed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()

    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=400, batch_size=16)
    assert resumed == [history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex()]


def test_an_empty_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    path.touch()
    with pytest.raises(ValueError, match=r"run\.pt is not a readable checkpoint \(EOFError: no data\)"):
        fit(*problem(), *data(), steps=2, checkpoint=path, resume=True)


def test_a_file_without_the_parts_of_a_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"config": {}, "model": {}})
    with pytest.raises(ValueError, match=r"not a checkpoint of fit: it has no finished, total, likelihood"):
        fit(*problem(), *data(), steps=2, checkpoint=path, resume=True)


@pytest.mark.parametrize(("first", "second"), [("adam", "lbfgs"), ("lbfgs", "adam")])
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, first, second):
    options = {"steps": 2, "batch_size": None, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), *data(), optimizer=first, **options)
    first, second = (name.replace("adam", "natural") for name in (first, second))
    with pytest.raises(ValueError, match=f"belongs to another run: optimizer was {first} and is {second}"):
        fit(*problem(), *data(), optimizer=second.replace("natural", "adam"), resume=True, **{**options, "steps": 4})


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_checkpoint_that_does_not_name_its_optimizer_is_resumed(tmp_path, optimizer):
    path = tmp_path / "run.pt"
    options = {"batch_size": None, "optimizer": optimizer}
    options |= {"schedule": "constant"} if optimizer == "adam" else {}
    whole = fit(*problem(), *data(), steps=5, **options)
    fit(*problem(), *data(), steps=3, checkpoint=path, **options)
    saved = torch.load(path, weights_only=True)
    del saved["config"]["optimizer"]
    saved["optimizer"].pop("rows", None)
    torch.save(saved, path)
    assert fit(*problem(), *data(), steps=5, checkpoint=path, resume=True, **options).loss == whole.loss


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["directory", "parent is a file", "read-only"])
def test_a_path_that_takes_no_checkpoint_is_refused_before_the_first_step(tmp_path, monkeypatch, kind, resume):
    path = tmp_path / "run.pt"
    if kind == "directory":
        path.mkdir()
    elif kind == "parent is a file":
        path.touch()
        path = path / "run.pt"
    else:  # whoever runs the tests may write anywhere

        def deny(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr("pathlib.Path.touch", deny)
    model, likelihood = problem()
    before, listing = state(model, likelihood), sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"No checkpoint can be written to .*; use another path"):
        fit(model, likelihood, *data(), steps=2, checkpoint=path, resume=resume)
    assert same(state(model, likelihood), before)
    assert sorted(tmp_path.rglob("*")) == listing


@pytest.mark.parametrize("place", ["save", "replace"])
def test_a_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch, place):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"value": torch.ones(3)})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(torch if place == "save" else os, place, fail)
    checkpoints.save(path, {"value": torch.zeros(3)})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]
    assert torch.equal(checkpoints.load(path, torch.device("cpu"))["value"], torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# Another run's checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def sized(kernel=None, mean=None, likelihood=None, **options):
    """A problem whose parameters have the same names and shapes, whatever its parts are."""
    x, _ = data()
    base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=D) if kernel is None else kernel
    model = make_gp(x[:M].clone(), gpytorch.kernels.ScaleKernel(base), **options)
    if mean is not None:
        model.mean_module = mean
    return model, gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood


class Shifted(gpytorch.means.ConstantMean):
    def forward(self, x):
        return 1.0 + super().forward(x)


OTHER_MODELS = {
    "kernel": (
        {"kernel": lambda: gpytorch.kernels.RBFKernel(ard_num_dims=D)},
        r"model\.covar_module\.base_kernel was MaternKernel\(.*nu=2\.5.*\) and is RBFKernel",
    ),
    "nu": ({"kernel": lambda: gpytorch.kernels.MaternKernel(0.5, ard_num_dims=D)}, r"nu=2\.5.* and is .*nu=0\.5"),
    "mean": ({"mean": Shifted}, r"model\.mean_module was ConstantMean\(.* and is Shifted\("),
    "constraint": (
        {
            "kernel": lambda: gpytorch.kernels.MaternKernel(
                2.5, ard_num_dims=D, lengthscale_constraint=gpytorch.constraints.GreaterThan(0.25)
            )
        },
        r"raw_lengthscale_constraint was Positive.* and is GreaterThan\(.*0\.25",
    ),
    "noise floor": (
        {
            "likelihood": lambda: gpytorch.likelihoods.GaussianLikelihood(
                noise_constraint=gpytorch.constraints.GreaterThan(0.01)
            )
        },
        r"likelihood\.noise_covar\.raw_noise_constraint was .* and is .*0\.01",
    ),
    "likelihood": ({"likelihood": lambda: OtherNoise()}, "likelihood was GaussianLikelihood.* and is OtherNoise"),
}


class OtherNoise(gpytorch.likelihoods.GaussianLikelihood):
    pass


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_and_the_difference_named(tmp_path, case, steps):
    options = {"batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*sized(), *data(), steps=3, **options)
    parts, message = OTHER_MODELS[case]
    model, likelihood = sized(**{name: make() for name, make in parts.items()})
    with pytest.raises(ValueError, match=message):
        fit(model, likelihood, *data(), steps=steps, resume=True, **options)
    # The same again is not.
    assert fit(*sized(), *data(), steps=steps, resume=True, **options).steps == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.2}, r"lr was None and is 0\.2"),
        ({"schedule": "linear"}, "schedule was recipe and is linear"),
        ({"schedule": lambda done: 1 - 0.5 * done}, "schedule was recipe and is a function with values 1, 0.875, 0.75"),
        ({"objective": gpytorch.mlls.VariationalELBO}, "objective was TighterELBO.* and is VariationalELBO"),
        (
            {"objective": lambda *args: tighter_gp.TighterELBO(*args, beta=0.5)},
            r"objective was TighterELBO\(beta=1\.0.* and is TighterELBO\(beta=0\.5",
        ),
        ({"noise": torch.ones(N)}, r"arguments was \[\] and is \['noise'\]"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, change, message):
    options = {"steps": 3, "batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), *data(), **options)
    with pytest.raises(ValueError, match=message):
        fit(*problem(), *data(), resume=True, **{**options, **change})


@pytest.mark.parametrize("change", [lambda x, y: (x, y + 1), lambda x, y: (2 * x, y)])
@pytest.mark.parametrize("steps", [3, 5])
def test_a_checkpoint_of_other_data_is_refused(tmp_path, change, steps):
    options = {"batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), *data(), steps=3, **options)
    with pytest.raises(ValueError, match="another run: the data have other values"):
        fit(*problem(), *change(*data()), steps=steps, resume=True, **options)


def test_a_checkpoint_with_the_scores_of_other_data_is_refused(tmp_path):
    x, y = data()
    options = {"batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), x, y, steps=3, validation=(x[:9], y[:9]), **options)
    with pytest.raises(ValueError, match="another run: the held-out data have other values"):
        fit(*problem(), x, y, steps=5, resume=True, validation=(x[:9], y[1:10]), **options)
    model, likelihood = problem()
    assert fit(model, likelihood, x, y, steps=4, resume=True, validation=(x[:9], y[:9]), **options).steps == 4
    assert fit(model, likelihood, x, y, steps=5, resume=True, **options).steps == 5


def test_a_resumed_run_says_so(tmp_path, caplog):
    caplog.set_level("INFO", logger="tighter_gp")
    options = {"batch_size": 16, "checkpoint": tmp_path / "run.pt", "resume": True}
    fit(*problem(), *data(), steps=3, **options)
    assert "resumed" not in caplog.text
    fit(*problem(), *data(), steps=5, **options)
    assert "resumed after 3 of 5 steps" in caplog.text
    caplog.clear()
    fit(*problem(), *data(), steps=5, **options)
    assert "resumed: already finished after 5 steps" in caplog.text


class Scaled(tighter_gp.TighterELBO):
    """An objective with a parameter and a buffer of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shift = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *args, **kwargs):
        self.seen += 1
        return super().forward(*args, **kwargs) - self.shift.square()


def test_parameters_of_the_objective_are_saved_and_restored(tmp_path):
    made = []

    def objective(*args):
        made.append(Scaled(*args))
        return made[-1]

    options = {"steps": 9, "batch_size": 16, "lr": 0.05, "objective": objective}
    whole = fit(*problem(), *data(), **options)
    options |= {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 3}
    with pytest.raises(Interrupted):
        fit(*problem(), *data(), callbacks=[interrupt_at(5)], **options)
    resumed = fit(*problem(), *data(), resume=True, **options)
    assert resumed.loss == whole.loss
    assert made[2].shift.item() == made[0].shift.item() != 0.5
    assert made[2].seen.item() == made[0].seen.item()


def test_early_stopping_restores_the_objective_too():
    made, kept = [], {}

    def objective(*args):
        made.append(Scaled(*args))
        return made[-1]

    history = fit(
        *problem(),
        *data(),
        objective=objective,
        steps=30,
        lr=0.5,
        schedule="constant",
        validation=data(19),
        validate_every=1,
        patience=3,
        callbacks=[lambda step: kept.update({step.step: made[-1].shift.item()})],
    )
    assert history.best_step < history.steps
    assert made[-1].shift.item() == kept[history.best_step] != kept[history.steps]


def test_a_checkpoint_is_read_to_the_cpu_so_that_counters_of_steps_stay_there(tmp_path):
    path = tmp_path / "run.pt"
    fit(*problem(), *data(), steps=2, checkpoint=path)
    saved = checkpoints.load(path, torch.device("meta"))
    states = saved["optimizer"]["optimizers"]["states"][0]["state"]
    assert all(value.device.type == "cpu" for state in states.values() for value in state.values())


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------------------------------------------------


def once(calls, number):
    """Raises what Ctrl-C raises, the first time that so many calls were made."""
    calls.append(0)
    if len(calls) == number:
        raise KeyboardInterrupt


@pytest.fixture
def ctrl_c():
    """Python's own handler of Ctrl-C: a process in the background may have been started without one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
@pytest.mark.parametrize("place", ["loss", "validation", "callback", "update"])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_writes_a_checkpoint_from_which_the_same_numbers_come(tmp_path, monkeypatch, optimizer, place):
    options = {"steps": 9, "optimizer": optimizer, "validation": data(19), "validate_every": 2}
    options |= {"batch_size": 16, "lr": 0.05} if optimizer == "adam" else {}
    whole = fit(*problem(), *data(), **options)
    calls, callbacks = [], []
    if place == "loss":
        loss = Problem.loss
        monkeypatch.setattr(Problem, "loss", lambda self, batch: once(calls, 9) or loss(self, batch))
    elif place == "validation":
        score = run.score
        monkeypatch.setattr(run, "score", lambda *args: once(calls, 3) or score(*args))
    elif place == "callback":
        callbacks = [lambda step: once(calls, 6)]
    else:
        step = torch.optim.Adam.step if optimizer == "adam" else torch.optim.LBFGS.step

        def interrupted(self, *args):
            if len(calls) == 4:  # Ctrl-C in the middle of an update
                signal.raise_signal(signal.SIGINT)
            calls.append(0)
            return step(self, *args)

        monkeypatch.setattr(torch.optim.Adam if optimizer == "adam" else torch.optim.LBFGS, "step", interrupted)
    options |= {"checkpoint": tmp_path / "run.pt"}
    model, likelihood = problem()
    with pytest.raises(KeyboardInterrupt):
        fit(model, likelihood, *data(), callbacks=callbacks, **options)
    monkeypatch.undo()
    saved = checkpoints.load(tmp_path / "run.pt", torch.device("cpu"))
    assert 0 < len(saved["history"]["loss"]) < 9
    assert not saved["finished"]
    resumed = fit(*problem(), *data(), resume=True, **options)
    assert resumed.loss == whole.loss
    assert resumed.validation == whole.validation


class Drawing(tighter_gp.TighterELBO):
    """Uses random numbers, as a sampled likelihood does."""

    def forward(self, *args, **kwargs):
        torch.rand(3)
        return super().forward(*args, **kwargs)


def test_a_sampled_score_is_the_same_after_ctrl_c(tmp_path, monkeypatch):
    options = {"steps": 5, "validation": data(19), "validate_every": 1, "objective": Drawing}
    interrupts = []

    def sampled(*args):
        value = torch.rand(()).item()
        if interrupts:
            raise interrupts.pop()
        return value

    monkeypatch.setattr(run, "score", sampled)
    whole = fit(*problem(), *data(), **options)
    interrupts.append(KeyboardInterrupt)
    options |= {"checkpoint": tmp_path / "run.pt"}
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), **options)
    assert fit(*problem(), *data(), resume=True, **options).validation == whole.validation


def test_ctrl_c_without_a_path_is_only_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), steps=3, callbacks=[stop])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_is_not_held_back_and_writes_nothing(tmp_path, monkeypatch):
    loss, calls = Problem.loss, []

    def interrupted(self, batch):
        calls.append(0)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return loss(self, batch)

    monkeypatch.setattr(Problem, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), steps=9, batch_size=16, checkpoint=tmp_path / "run.pt")
    assert len(calls) == 3
    assert not (tmp_path / "run.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_schedule_is_known_by_its_values(tmp_path):
    options = {"batch_size": 16, "checkpoint": tmp_path / "run.pt", "resume": True}
    for steps, slope in ((3, 0.5), (4, 1 / 2)):
        fit(*problem(), *data(), steps=steps, schedule=lambda done, slope=slope: 1 - slope * done, **options)
    with pytest.raises(ValueError, match=r"schedule was a function with values 1, 0\.875"):
        fit(*problem(), *data(), steps=5, schedule=lambda done: 1 - 0.3 * done, **options)
