"""The rule of ``compile="auto"``: shapes and steps alone, the same in every process and after an interruption."""

from __future__ import annotations

import functools
import shutil
from types import SimpleNamespace

import gpytorch
import pytest
import torch

import tighter_gp
from tests.training.problems import M, data, problem, state
from tighter_gp import compiled
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


def test_only_a_cpu_with_a_compiler_is_thought_of(monkeypatch):
    monkeypatch.setattr(compiling, "seconds_saved", lambda entries, steps: 20.0)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name if name == "my-c++" else None)
    assert not compiling.compile_pays(small(), 7, batch_size=10)
    monkeypatch.setenv("CXX", "my-c++")
    assert compiling.compile_pays(small(), 7, batch_size=10)
    assert not compiling.compile_pays(small("meta"), 7, batch_size=10)


def test_where_auto_cannot_compile_the_log_says_why_and_nobody_is_warned(monkeypatch, caplog):
    def refuse(*args):
        raise NotImplementedError("no graph today")

    monkeypatch.setattr(compiling, "_WORTH", 0.0)
    monkeypatch.setattr(compiled, "compile_recorded", refuse)
    x, y = data()
    with caplog.at_level("INFO", "tighter_gp"):
        automatic = fit(*problem(), x, y, steps=3, batch_size=40).loss
    assert any("not compiled: no graph today" in message for message in caplog.messages)
    assert automatic == fit(*problem(), x, y, steps=3, batch_size=40, compile=False).loss
    with pytest.warns(RuntimeWarning, match="not compiled"):
        fit(*problem(), x, y, steps=3, batch_size=40, compile=True)


@pytest.mark.parametrize("natural_gradients", [True, False])
def test_a_run_has_one_graph_per_size_of_batch(monkeypatch, natural_gradients):
    made = []
    monkeypatch.setattr(compiled, "compile_recorded", lambda graph, *args: made.append(graph) or graph)
    fit(*problem(), *data(), steps=8, batch_size=20, compile=True, natural_gradients=natural_gradients)
    assert len(made) == 2  # 18 and 17 rows


def test_what_a_strategy_remembers_of_earlier_calls_makes_no_other_graph(monkeypatch):
    made = []
    monkeypatch.setattr(compiled, "compile_recorded", lambda graph, *args: made.append(graph) or graph)
    model, likelihood = problem()
    x, y = data()
    step = tighter_gp.CompiledStep(tighter_gp.TighterELBO(likelihood, model, len(y)))
    for _ in range(3):
        step(x, y)
        model(x)
    assert len(made) == 1


def test_adams_steps_are_compiled_for_those_who_ask_alone(monkeypatch):
    monkeypatch.setattr(compiling, "_WORTH", 0.0)
    monkeypatch.setattr(compiled, "compile_recorded", lambda *args: pytest.fail("compiled"))
    fit(*problem(), *data(), steps=2, natural_gradients=False)


@pytest.mark.skipif(not any(map(shutil.which, compiling._COMPILERS)), reason="needs a C++ compiler")
def test_compiled_runs_of_one_seed_are_the_same_to_the_bit_also_when_resumed(tmp_path):
    x, y = data()
    options = {"steps": 8, "batch_size": 20, "compile": True}
    runs = []
    for _ in range(2):
        pair = problem()
        runs.append((fit(*pair, x, y, **options).loss, state(*pair)))

    def interrupt(step):
        if step.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), x, y, checkpoint=tmp_path / "run.pt", callbacks=[interrupt], **options)
    pair = problem()
    runs.append((fit(*pair, x, y, checkpoint=tmp_path / "run.pt", resume=True, **options).loss, state(*pair)))
    for losses, values in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(values[name], runs[0][1][name]) for name in values)


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
