"""Collapsed models: L-BFGS on their own data."""

from __future__ import annotations

import math

import pytest
import torch

import tighter_gp
from tests.tools.factories import make_kernel, make_noise
from tests.training.problems import M, collapsed, data, parameters
from tighter_gp import fit


def plain():
    x, y = data()
    likelihood = make_noise(0.5)
    kernel = make_kernel("rbf", 1.0, torch.ones(2))
    return tighter_gp.CollapsedGP(x, y, x[:M].clone(), kernel, likelihood), likelihood


def test_lbfgs_maximises_the_bound():
    model, likelihood = plain()
    history = fit(model, likelihood, steps=300)
    assert history.stopped == "converged"
    assert history.loss == sorted(history.loss, reverse=True)
    gradients = torch.autograd.grad(model.bound() / len(model.train_y), list(model.parameters()))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-3
    assert history.loss[-1] == pytest.approx(-model.bound().item() / len(model.train_y), rel=1e-9)


@pytest.mark.parametrize("make", [collapsed, plain])
def test_data_may_be_left_out_or_must_be_the_models_own(make):
    x, y = data()
    expected = fit(*make(), steps=2).loss
    assert fit(*make(), x, y, steps=2).loss == expected
    for other in ((x + 1, y), (x, 2 * y), (x[:9], y[:9])):
        with pytest.raises(ValueError, match="is not what the model was built with"):
            fit(*make(), *other, steps=2)
    with pytest.raises(ValueError, match=r"pass model\.likelihood"):
        fit(make()[0], make_noise(0.1), steps=2)
    with pytest.raises(TypeError, match="unknown argument 'noise'"):
        fit(*make(), steps=2, noise=y)


def test_a_failure_is_survived(monkeypatch):
    model, likelihood = plain()
    original, calls = type(model).bound, []

    def bound(self):
        calls.append(1)
        return original(self) * (math.nan if len(calls) in (4, 5, 6) else 1)

    monkeypatch.setattr(type(model), "bound", bound)
    history = fit(model, likelihood, steps=8)
    assert history.steps == 8
    assert torch.isfinite(parameters(model, likelihood)).all()
    assert history.loss[-1] < history.loss[0]
