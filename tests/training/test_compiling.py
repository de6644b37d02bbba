"""The rule of ``compile="auto"``: shapes and steps alone, the same in every process and after an interruption."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import gpytorch
import pytest
import torch

from tests.training.problems import M, data, problem
from tighter_gp.training import compiling, fit, natural_steps
from tighter_gp.training.natural_compiled import CompiledNaturalStep


def test_auto_follows_a_rule_of_shapes_and_steps_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(natural_steps, "CompiledNaturalStep", functools.partial(CompiledNaturalStep, backend="eager"))
    x, y = data()
    saved = compiling.seconds_saved(M * (M + 40), steps=3)
    curves = []
    with caplog.at_level("INFO", "tighter_gp"):
        for worth in (saved, saved + 0.001):
            monkeypatch.setattr(compiling, "_WORTH", worth)
            caplog.clear()
            curves.append(fit(*problem(), x, y, steps=3, batch_size=40, compile="auto").loss)
            said = [message for message in caplog.messages if message.startswith("steps are compiled")]
            assert len(said) == int(worth == saved)
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)
    assert curves[1] == fit(*problem(), x, y, steps=3, batch_size=40).loss
    with pytest.raises(ValueError, match="compile must be True, False or 'auto'; got 'yes'"):
        fit(*problem(), x, y, steps=3, compile="yes")


def small(device="cpu"):
    """Three functions of 20 inducing points."""
    q = gpytorch.variational.CholeskyVariationalDistribution(20, batch_shape=torch.Size([3]))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    return SimpleNamespace(model=q, likelihood=likelihood, needs_index=False, device=torch.device(device))


def test_every_entry_of_every_function_counts(monkeypatch):
    asked = []
    monkeypatch.setattr(compiling, "seconds_saved", lambda entries, steps: asked.append((entries, steps)) or 0.0)
    assert not compiling.compile_pays(small(), 7, batch_size=10)
    assert asked == [(3 * 20 * (20 + 10), 7)]


def test_another_device_asks_for_three_times_as_much(monkeypatch):
    monkeypatch.setattr(compiling, "seconds_saved", lambda entries, steps: 20.0)
    assert compiling.compile_pays(small("cpu"), 7, batch_size=10)
    assert not compiling.compile_pays(small("meta"), 7, batch_size=10)


def test_a_resumed_run_decides_as_the_one_that_was_not_interrupted(monkeypatch, tmp_path):
    """The rule knows the whole run: what is left of it, two steps, would not be worth it."""
    made = []

    def captured(*args):
        made.append(args)
        return CompiledNaturalStep(*args, backend="eager")

    monkeypatch.setattr(natural_steps, "CompiledNaturalStep", captured)
    monkeypatch.setattr(compiling, "_WORTH", compiling.seconds_saved(M * (M + 40), steps=6))
    x, y = data()
    options = {"steps": 6, "batch_size": 40, "compile": "auto"}
    whole = fit(*problem(), x, y, **options)

    def interrupt(step):
        if step.step == 4:
            raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), x, y, checkpoint=path, callbacks=[interrupt], **options)
    resumed = fit(*problem(), x, y, checkpoint=path, resume=True, **options)
    assert len(made) == 3
    assert resumed.loss == whole.loss
