"""Starts of collapsed models from an exact GP on some rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import starts
from benchmarks.data import Split
from benchmarks.prediction import SGPR


@pytest.fixture
def data():
    """One of four inputs matters."""
    torch.manual_seed(0)
    x = torch.rand(150, 4) * 3.4
    y = torch.sin(2 * x[:, 0]) + 0.05 * torch.randn(150)
    return Split("made", x, (y - y.mean()) / y.std(), x[:10], y[:10])


def test_an_exact_gp_on_some_rows_finds_the_input_that_matters(data, monkeypatch):
    monkeypatch.setattr(starts, "ROWS", 80)
    model = SGPR(data, data.train_x[:20], torch.tensor(3.5))
    before = model.covar_module.base_kernel.base_kernel.lengthscale.clone()
    state = starts._exact(model, data, 0)
    assert torch.equal(model.covar_module.base_kernel.base_kernel.lengthscale, before)
    model.load_state_dict(state)
    lengthscale = model.covar_module.base_kernel.base_kernel.lengthscale.flatten()
    assert lengthscale.argmin() == 0
    assert lengthscale[0] < 0.5 * lengthscale[1:].min()
    assert torch.equal(model.covar_module.inducing_points, data.train_x[:20])


@pytest.mark.parametrize("better", ["exact", "median"])
def test_of_two_starts_that_with_the_higher_bound_is_taken(data, monkeypatch, better):
    model = SGPR(data, data.train_x[:20], torch.tensor(3.5))
    other = {name: value + 0.1 for name, value in model.state_dict().items()}
    own = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(starts, "_exact", lambda *args: other)
    bounds = iter([-1.0, 0.0 if better == "exact" else -2.0])  # of its own start, then of the other
    monkeypatch.setattr(starts, "_trained", lambda *args: next(bounds))
    assert starts.start_from_rows(model, data, seed=0) == better
    expected = other if better == "exact" else own
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_where_no_exact_gp_can_be_trained_the_own_start_stays(data, monkeypatch):
    monkeypatch.setattr(starts, "_exact", lambda *args: None)
    model = SGPR(data, data.train_x[:20], torch.tensor(3.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert starts.start_from_rows(model, data, seed=0) == "median"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_training_that_fails_is_no_start(data, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("not positive definite")

    monkeypatch.setattr(starts.tighter_gp, "fit", fail)
    model = SGPR(data, data.train_x[:20], torch.tensor(3.5))
    assert starts._exact(model, data, 0) is None
