"""What a run says."""

from __future__ import annotations

import sys

import pytest

from tests.training.problems import data, problem
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
