"""Compiled steps of ``fit``: the numbers of eager ones, and when they are taken."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

import tighter_gp
from tests.training.problems import N, data, parameters, problem, with_prior
from tighter_gp import Recipe, fit
from tighter_gp.models import BinaryClassification, MultiOutputRegression, Regression

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler"),
]


def float32(make, y):
    def made():
        x = data()[0].float()
        model = make(x)
        return model, model.likelihood, x, y(data()[1].float())

    return made


CASES = {
    "gaussian": (float32(lambda x: Regression(x, 8), lambda y: y), {}),
    "logistic": (float32(lambda x: BinaryClassification(x, 8), lambda y: (y > 0).long()), {}),
    "tasks": (float32(lambda x: MultiOutputRegression(2, x, 8), lambda y: torch.stack([y, -y], -1)), {}),
    "adam": (lambda: (*problem(), *data()), {"natural": 0}),
    "prior": (lambda: (*with_prior(), *data()), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_run_has_the_numbers_of_an_eager_one(case, caplog):
    make, sizes = CASES[case]
    found = []
    for compile in (False, True):
        model, likelihood, x, y = make()
        recipe = Recipe(compile=compile, **sizes)
        with caplog.at_level("INFO", "tighter_gp"):
            history = fit(model, likelihood, x, y, steps=10, batch_size=16, recipe=recipe)
        found.append(torch.cat([torch.tensor(history.loss), parameters(model, likelihood)]).double())
        assert not history.skipped
    assert "not compiled" not in caplog.text
    tolerance = 1e-8 if make().count(None) or case in ("adam", "prior") else 2e-3
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_a_compiled_run_resumes_to_the_same_bits(tmp_path):
    recipe = Recipe(compile=True, checkpoint_every=3)
    options = {"steps": 8, "batch_size": 16, "recipe": recipe}
    whole = fit(*problem(), *data(), **options).loss
    stop = lambda step: step.step == 5 and (_ for _ in ()).throw(KeyboardInterrupt)
    options["checkpoint"] = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), callbacks=[stop], **options)
    assert fit(*problem(), *data(), resume=True, **options).loss == whole


def test_what_cannot_be_captured_is_eager_and_the_log_says_why(caplog):
    class Looking(tighter_gp.TighterELBO):
        def forward(self, *args, **kwargs):
            value = super().forward(*args, **kwargs)
            return value if math.isfinite(value.item()) else value * 0

    with caplog.at_level("INFO", "tighter_gp"):
        history = fit(*problem(), *data(), objective=Looking, steps=3, recipe=Recipe(compile=True, natural=0))
    assert not history.skipped
    assert "steps are not compiled" in caplog.text


def test_long_runs_are_compiled_by_default(monkeypatch, caplog):
    from tighter_gp.training import capture

    monkeypatch.setattr(capture, "_compiled", lambda graph, inputs: graph)  # captured, and run as it is
    with caplog.at_level("INFO", "tighter_gp"):
        stop = lambda step: step.step == 3
        fit(*problem(), *data(), steps=200_000, batch_size=16, callbacks=[stop])
        assert "steps are compiled" in caplog.text
        caplog.clear()
        fit(*problem(), *data(), steps=10, batch_size=N)
        assert "steps are compiled" not in caplog.text
