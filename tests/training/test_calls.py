"""Calls of ``fit`` that make no sense, and what stays after them."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.training.problems import N, collapsed, data, problem, same, state
from tighter_gp import Recipe, fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2, "steps": 3}, "epochs or steps"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive and finite; got inf"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"resume": True}, "needs a checkpoint"),
        ({"patience": 3}, "validation="),
        ({"num_data": 5}, "is for a DataLoader"),
        ({"noise": torch.ones(N - 1)}, r"noise= must have one value per training point"),
        ({"noise": -torch.ones(N)}, r"noise= must hold variances; 53 of 53 values are negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit(*problem(), *data(), **{"epochs": 1, **options} if "steps" not in options else options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1.5}, "'float' object cannot be interpreted as an integer"),
        ({"tasks": torch.zeros(N)}, "unknown argument 'tasks'"),
        ({"schedule": "linear"}, "schedule= is gone: see tighter_gp.Recipe"),
    ],
)
def test_arguments_of_another_kind_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        fit(*problem(), *data(), **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"natural": 1.5}, "at most 1"),
        ({"natural": -0.1}, "natural must be positive"),
        ({"schedule": "sometimes"}, "Unknown schedule 'sometimes'"),
        ({"compile": "yes"}, "compile must be True, False or 'auto'"),
        ({"lr": "0.1"}, "lr must be positive"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**sizes)


def test_data_that_do_not_fit_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match="53 points, and y of shape"):
        fit(*problem(), x, y[:-1])
    with pytest.raises(ValueError, match="no rows"):
        fit(*problem(), x[:0], y[:0])
    with pytest.raises(TypeError, match="y must be a tensor"):
        fit(*problem(), x)
    with pytest.raises(TypeError, match="DataLoader; got list"):
        fit(*problem(), [1, 2], y)
    with pytest.raises(ValueError, match="x is on meta, the model is on cpu"):
        fit(*problem(), x.to("meta"), y)
    with pytest.raises(ValueError, match="brings its own targets"):
        fit(*problem(), DataLoader(TensorDataset(x, y)), y)


def test_a_model_that_cannot_be_trained_is_refused():
    model, likelihood = problem()
    for parameter in (*model.parameters(), *likelihood.parameters()):
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        fit(model, likelihood, *data(), steps=1)
    model, likelihood = (module.half() for module in problem())
    with pytest.raises(TypeError, match=r"float32 or float64; got torch\.float16"):
        fit(model, likelihood, *data(), steps=1)


def test_natural_forms_need_natural_gradients():
    model, likelihood = problem(distribution=gpytorch.variational.NaturalVariationalDistribution)
    with pytest.raises(ValueError, match="mean nothing to Adam"):
        fit(model, likelihood, *data(), steps=1, recipe=Recipe(natural=0))
    model, likelihood = problem(distribution=gpytorch.variational.DeltaVariationalDistribution)
    with pytest.raises(ValueError, match="cannot be used here: natural gradients need a Gaussian q"):
        fit(model, likelihood, *data(), steps=1, recipe=Recipe(natural=0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("make", [problem, collapsed])
def test_values_that_are_not_finite_are_refused(bad, which, kind, make):
    arrays = list(data())
    arrays[which][7] = bad
    if kind == "array":
        arrays = [values.numpy() for values in arrays]
    model, likelihood = make()
    before = state(model, likelihood)
    refused = kind == "tensor" or make is collapsed or which == 1
    with pytest.raises(ValueError if refused else Exception, match=r"NaN|not what the model was built with"):
        fit(model, likelihood, *arrays, steps=20)
    if kind == "tensor":
        assert same(state(model, likelihood), before)


@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_targets_whose_scale_does_not_suit_the_steps_are_noticed(scale, caplog):
    x, y = data()
    fit(*problem(), x, y * scale, steps=1)
    assert "targets have a standard deviation" in caplog.text
    caplog.clear()
    fit(*problem(), x, y, steps=1)
    assert not caplog.records


def test_another_likelihood_than_the_models_own_is_noticed(caplog):
    x, y = data()
    model = tighter_gp.models.Regression(x, 5)
    fit(model, gpytorch.likelihoods.GaussianLikelihood().double(), x, y, steps=1)
    assert "model.likelihood is another likelihood" in caplog.text


def test_the_modes_of_the_modules_are_kept():
    model, likelihood = problem()
    model.eval()
    likelihood.train()
    fit(model, likelihood, *data(), steps=2, callbacks=[lambda step: step.model.eval() and None])
    assert not model.training
    assert likelihood.training


def test_a_callback_that_freezes_a_parameter_is_told_so():
    def freeze(step):
        step.likelihood.raw_noise.requires_grad_(False)

    with pytest.raises(RuntimeError, match=r"froze, unfroze or replaced likelihood\.noise_covar\.raw_noise"):
        fit(*problem(), *data(), steps=2, callbacks=[freeze])


def test_a_history_can_be_drawn_and_tabulated():
    pandas, plt = pytest.importorskip("pandas"), pytest.importorskip("matplotlib.pyplot")
    history = fit(*problem(), *data(), steps=4, validation=data(9), recipe=Recipe(validate_every=2))
    frame = history.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["loss"].tolist() == history.loss
    assert frame["validation"].dropna().to_dict() == dict(history.validation)
    axes = history.plot(plt.figure().gca())
    assert [len(line.get_xdata()) for line in axes.lines] == [4, 2]
    plt.close("all")
