"""What a run says."""

from __future__ import annotations

import sys

import pytest

from tests.training.problems import data, failing_objective, problem
from tighter_gp.training import fit


def test_progress_needs_no_tqdm_and_a_bar_no_terminal(monkeypatch, capsys):
    x, y = data()
    model, likelihood = problem()
    fit(model, likelihood, x, y, steps=2)
    assert capsys.readouterr().err == ""
    fit(model, likelihood, x, y, steps=2, progress=True)
    assert "step" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    fit(model, likelihood, x, y, steps=2)
    with pytest.raises(ImportError, match="pip install tqdm"):
        fit(model, likelihood, x, y, steps=2, progress=True)


def test_without_a_terminal_the_log_has_a_line_per_tenth_and_one_at_the_end(caplog):
    caplog.set_level("INFO", logger="tighter_gp")
    history = fit(*problem(), *data(), steps=50, batch_size=16, validation=data(19), validate_every=50)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" of ")[0] for line in lines[:-1]] == [f"step {n}" for n in range(5, 50, 5)]
    assert lines[-1].startswith("50 steps in ")
    assert f"loss {history.loss[-1]:.4f} per datum of the last batch" in lines[-1]
    assert f"validation {history.validation[-1][1]:.4f}" in lines[-1]


def test_the_last_line_says_what_was_skipped_and_why_the_run_stopped(caplog):
    caplog.set_level("INFO", logger="tighter_gp")
    objective = failing_objective({2}, "raise")
    fit(*problem(), *data(), steps=9, objective=objective, callbacks=[lambda step: step.step == 5])
    assert caplog.records[-1].getMessage().endswith("1 steps skipped, stopped: a callback asked for it")


def test_progress_false_leaves_the_last_line_only(caplog):
    caplog.set_level("INFO", logger="tighter_gp")
    fit(*problem(), *data(), steps=20, progress=False)
    assert len(caplog.records) == 1


def test_a_short_run_has_no_more_lines_than_steps(caplog):
    caplog.set_level("INFO", logger="tighter_gp")
    fit(*problem(), *data(), steps=3)
    assert [record.getMessage().partition(",")[0] for record in caplog.records[:-1]] == ["step 1 of 3", "step 2 of 3"]


def test_a_bar_shows_up_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(*problem(), *data(), steps=2)
    assert "step" in capsys.readouterr().err
