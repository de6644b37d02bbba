"""``fit`` on the device: the CPU's numbers, resume included, in one process and in two."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import gpytorch
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.accelerator import runs
from tests.accelerator.device import DEVICES, waits
from tests.accelerator.features import FEATURES, D, M, N
from tests.accelerator.runs import OPTIONS, feature_run, problem, state
from tests.accelerator.table import WAITS_OF_FIT, waits_of_fit

pytestmark = pytest.mark.accelerator

ROOT = Path(__file__).parents[2]
KINDS = {
    "optimal": dict,
    "solve": lambda: {"strategy": "solve"},
    "per point": lambda: {"conditional": tighter_gp.PerPoint(N)},
    "mean field": lambda: {"distribution": gpytorch.variational.MeanFieldVariationalDistribution},
}


def fitted(device, *, default_device=None, source=None, options=OPTIONS, **kwargs):
    model, likelihood, x, y = problem(device, **kwargs)
    arguments = (x, y)
    if source == "loader":
        generator = torch.Generator(default_device or "cpu").manual_seed(
            0
        )  # torch's sampler draws on the default device
        rows = TensorDataset(x.cpu(), y.cpu())
        arguments = (DataLoader(rows, batch_size=7, shuffle=True, generator=generator), None)
        options = {name: value for name, value in options.items() if name != "batch_size"}
    elif source == "numpy":
        arguments = (x.cpu().numpy(), y.cpu().numpy())
    torch.set_default_device(default_device)
    try:
        history = tighter_gp.fit(model, likelihood, *arguments, **options)
    finally:
        torch.set_default_device(None)
    assert all(parameter.device == torch.device(device) for parameter in model.parameters())
    return torch.tensor(history.loss), state(model, likelihood)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_gives_the_numbers_of_the_cpu(kind):
    expected = fitted("cpu", **KINDS[kind]())
    for device in DEVICES:
        torch.testing.assert_close(fitted(device, **KINDS[kind]()), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("source", ["loader", "numpy"])
def test_data_of_the_host_train_a_model_on_the_device(source):
    expected = fitted("cpu", source=source)
    torch.testing.assert_close(fitted("dev:1", source=source), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("source", [None, "numpy", "loader"])
@pytest.mark.parametrize("device", ["cpu", "dev:0"])
def test_the_default_device_changes_no_run(source, device):
    actual = fitted(device, source=source, default_device="dev:1")
    torch.testing.assert_close(actual, fitted("cpu", source=source), rtol=1e-9, atol=1e-11)


def test_random_steps_follow_the_seed_on_every_device():
    def losses(device):
        torch.manual_seed(0)
        step = FEATURES["softmax, optimal"]()
        generator = torch.Generator("cpu").manual_seed(1)
        x, y = torch.randn(N, D, generator=generator), torch.randint(3, (N,), generator=generator)
        model, likelihood = step.module.model.to(device), step.module.likelihood.to(device)
        torch.manual_seed(len(device))  # of no consequence
        return tighter_gp.fit(model, likelihood, x.to(device), y.to(device), **OPTIONS).loss

    expected = losses("cpu")
    for device in DEVICES:
        assert losses(device) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_resume_gives_the_run_that_was_not_interrupted(device, tmp_path):
    kwargs = KINDS["per point"]
    expected = fitted("cpu", **kwargs())
    path = tmp_path / "checkpoint"
    stop = lambda step: step.step == 3 and (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fitted(device, options={**OPTIONS, "checkpoint": path, "callbacks": [stop]}, **kwargs())
    saved = torch.load(path, weights_only=True)
    for other in (device, "cpu"):  # also where the first half did not run
        torch.save(saved, path)
        actual = fitted(other, options={**OPTIONS, "checkpoint": path, "resume": True}, **kwargs())
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("feature", WAITS_OF_FIT)
def test_a_step_of_a_run_waits_as_often_as_the_table_says(feature):
    with_natural, alone = WAITS_OF_FIT[feature]
    assert len(waits_of_fit(feature, natural=True)) == with_natural, waits_of_fit(feature, natural=True)
    if alone is not None:
        assert len(waits_of_fit(feature, natural=False)) == alone, waits_of_fit(feature, natural=False)


@pytest.mark.parametrize("feature", WAITS_OF_FIT)
def test_a_run_of_every_feature_gives_the_losses_of_the_cpu(feature):
    """On the device checks are flags, read at the end of a step."""
    expected = feature_run(feature, "cpu").loss
    assert feature_run(feature, "dev:0").loss == pytest.approx(expected, rel=1e-9)


def test_a_step_whose_flags_fail_is_repeated_with_its_checks():
    """A variance whose rounding errors exceed the jitter asks for float64: a step is repeated, the following are checked."""

    def losses(device):
        model, likelihood, x, y = problem(device)
        model, likelihood, x, y = model.float(), likelihood.float(), x.float(), y.float()
        model.covar_module.outputscale = 1e3
        seen = []
        with waits() as found:
            mark = lambda step: seen.append(len(found))
            history = tighter_gp.fit(model, likelihood, x, y, callbacks=[mark], **OPTIONS)
        assert not history.skipped
        return history.loss, [b - a for a, b in itertools.pairwise(seen)]

    (expected, none), (actual, counts) = losses("cpu"), losses("dev:1")
    assert actual == pytest.approx(expected, rel=1e-6)
    assert set(none) == {0}
    assert min(counts) > 1


@pytest.mark.parametrize("natural", [True, False])
def test_resume_waits_no_oftener_than_a_run_without(natural, tmp_path):
    def per_step(**kwargs):
        seen = []
        model, likelihood, x, y = problem("dev:1")
        with waits() as found:
            mark = lambda step: seen.append(len(found))
            recipe = tighter_gp.Recipe(natural=None if natural else 0)
            tighter_gp.fit(model, likelihood, x, y, callbacks=[mark], recipe=recipe, **{**OPTIONS, **kwargs})
        return [b - a for a, b in itertools.pairwise(seen[1:])]

    path = tmp_path / "checkpoint"
    plain = per_step(steps=8)
    per_step(steps=8, checkpoint=path)
    saved = torch.load(path, weights_only=True)
    saved["history"]["loss"], saved["finished"] = saved["history"]["loss"][:3], False
    torch.save(saved, path)
    resumed = per_step(steps=8, checkpoint=path, resume=True)
    # An epoch begins with the upload of its order.
    usual = WAITS_OF_FIT["T-SVGP"][0 if natural else 1]
    assert sorted(plain)[len(plain) // 2] == usual, plain
    assert max(plain) <= usual + 1, plain
    assert max(resumed) <= usual + 1, resumed


def test_a_validation_set_left_behind_is_named():
    model, likelihood, x, y = problem("dev:1")
    with pytest.raises(ValueError, match="the held-out x is on cpu, the model is on dev:1"):
        tighter_gp.fit(model, likelihood, x, y, validation=(x[:9].cpu(), y[:9].cpu()), **OPTIONS)
    likelihood.cpu()
    with pytest.raises(ValueError, match="likelihood"):
        tighter_gp.fit(model, likelihood, x, y, **OPTIONS)


def test_a_collapsed_model_is_trained_by_lbfgs():
    def run(device):
        _, likelihood, x, y = problem(device)
        covar = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(device)
        model = tighter_gp.CollapsedGP(x, y, x[:M], covar, likelihood)
        return torch.tensor(tighter_gp.fit(model, likelihood, x, y, steps=3, progress=False).loss)

    torch.testing.assert_close(run("dev:1"), run("cpu"), rtol=1e-8, atol=1e-10)


def test_two_processes_with_a_device_each_equal_one(tmp_path):
    """Messages go through a group that takes tensors of the device only; the second half follows a resume."""
    command = [sys.executable, "-m", runs.__name__]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    expected = fitted("cpu", conditional=tighter_gp.PerPoint(N))
    for rank in range(2):
        actual = torch.load(tmp_path / f"result-{rank}", weights_only=True)
        torch.testing.assert_close(tuple(actual), expected, rtol=1e-9, atol=1e-11)
