"""Calls that make no sense."""

from __future__ import annotations

import math
import re

import gpytorch
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import tighter_gp
from tests.tools.factories import make_noise
from tests.training.problems import N, collapsed, data, problem, same, state
from tighter_gp.training import fit


def test_a_mistake_in_the_call_is_raised_at_once():
    x, y = data()
    y[3] = math.nan
    model, likelihood = problem()
    with pytest.raises(ValueError, match="NaN"):
        fit(model, likelihood, x, y, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2, "steps": 3}, "epochs or steps"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive and finite; got inf"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 1; got -1"),
        ({"validate_every": 0}, "validate_every must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"schedule": "sometimes"}, "Unknown schedule 'sometimes'"),
        ({"optimizer": "sgd"}, "Unknown optimizer 'sgd'"),
        ({"resume": True}, "needs a checkpoint"),
        ({"patience": 3}, "validation="),
        ({"noise": torch.ones(N - 1)}, r"noise= must have one value per training point"),
        ({"noise": -torch.ones(N)}, r"noise= must hold variances; 53 of 53 values are negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    x, y = data()
    with pytest.raises(ValueError, match=message):
        fit(*problem(), x, y, **{"epochs": 1, **options} if "steps" not in options else options)


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
    with pytest.raises(ValueError, match="float32 and the model"):
        fit(*problem(), x.float(), y)
    with pytest.raises(ValueError, match="x is on meta, the model is on cpu"):
        fit(*problem(), x.to("meta"), y)
    with pytest.raises(ValueError, match="brings its own targets"):
        fit(*problem(), DataLoader(TensorDataset(x, y)), y)


def test_a_model_without_a_parameter_to_train_is_refused():
    model, likelihood = problem()
    for parameter in (*model.parameters(), *likelihood.parameters()):
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        fit(model, likelihood, *data(), steps=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    model, likelihood = (module.to(dtype) for module in problem())
    x, y = (values.to(dtype) for values in data())
    for arrays in ((x, y), (DataLoader(TensorDataset(x, y), batch_size=16),)):
        with pytest.raises(TypeError, match=f"float32 or float64; got {dtype}"):
            fit(model, likelihood, *arrays, steps=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("make", [problem, collapsed])
def test_values_that_are_not_finite_are_refused_before_q_is_set(bad, which, make):
    arrays = data()
    arrays[which][7] = bad
    model, likelihood = make()
    before = state(model, likelihood)
    hint = ["", ", or mark NaN as missing with gpytorch.settings.observation_nan_policy('fill')"][which]
    count, size = int((~torch.isfinite(arrays[which])).sum()), arrays[which].numel()
    message = f"{count} of {size} values of {'xy'[which]} are NaN or infinite; drop their rows{hint}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(model, likelihood, *arrays, steps=20)
    assert same(state(model, likelihood), before)


def test_data_that_a_model_of_botorch_keeps_in_other_units_are_noticed(caplog):
    class Kept(tighter_gp.models.Regression):
        """As BoTorch's, which keeps transformed data for its own way of training."""

    x, y = torch.rand(30, 2), torch.randn(30)
    model = Kept(x, num_inducing=5)
    model.train_inputs, model.train_targets = [x], y

    def said(x, y):
        caplog.clear()
        fit(model, model.likelihood, x, y, steps=1)
        return [name for name in "xy" if f"{name} differs from the data that Kept keeps" in caplog.text]

    assert said(x, y) == []
    assert said(2 * x[:20], 2 * y[:20]) == []  # other rows
    assert said(2 * x, y) == ["x"]
    assert said(x, 2 * y) == ["y"]
    assert "pass model.train_inputs[0] and model.train_targets" in caplog.text


def test_noise_that_stays_untrained_is_said(caplog):
    x, y, noise = torch.rand(30, 2), torch.randn(30), torch.full((30,), 0.1)
    first, second = (tighter_gp.models.Regression(x, num_inducing=5) for _ in range(2))
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    known = tighter_gp.models.Regression(x, num_inducing=5, likelihood=fixed)
    fit(first, first.likelihood, x, y, steps=1)
    fit(known, fixed, x, y, steps=1, noise=noise)
    assert "stays as it is" not in caplog.text
    fit(first, second.likelihood, x, y, steps=1)
    assert "model.likelihood is another likelihood, and stays as it is" in caplog.text
    fit(first, first.likelihood, x, y, steps=1, noise=noise)
    assert "noise= takes the place of the likelihood's own noise, which stays as it is" in caplog.text


@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_targets_whose_scale_does_not_suit_the_steps_are_noticed(scale, caplog):
    x, y = torch.rand(300, 2), torch.randn(300)
    y[7] = math.nan  # does not hide the others
    y = (y - y.nanmean()) / (y - y.nanmean()).square().nanmean().sqrt()
    model = tighter_gp.models.Regression(x, num_inducing=5)
    outputs = tighter_gp.models.MultiOutputRegression(2, x, num_inducing=5)
    counts = tighter_gp.models.CountRegression(x, num_inducing=5)

    def said(model, x, y):
        caplog.clear()
        with gpytorch.settings.observation_nan_policy("mask"):
            fit(model, model.likelihood, x, y, steps=1)
        return f"standard deviation of {scale:g}, and the steps of training suit one near 1" in caplog.text

    assert said(model, x, scale * y)
    assert said(model, x.numpy(), scale * y.numpy())
    assert said(outputs, x, torch.stack([scale * y, y], -1))
    assert not said(model, x, y)
    assert not said(model, x, 9 * y + 1e3)
    assert not said(counts, x, torch.arange(300.0))
    assert "standard deviation" not in caplog.text


def test_nothing_is_said_of_the_targets_of_a_call_that_is_refused(caplog):
    x, y = data()
    with pytest.raises(TypeError, match="needs a model with a variational_strategy"):
        fit(torch.nn.Linear(2, 1), make_noise(0.2), x, 100 * y, steps=1)
    assert caplog.text == ""


class Frame:
    """As pandas has it."""

    def to_numpy(self):
        return data()[0].numpy()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (data(), {}, "first argument is the model, the second its likelihood; got GP and Tensor"),
        ((make_noise(0.2), Frame(), data()[1]), {}, r"a numpy array or a DataLoader; got Frame\. Pass x\.to_numpy\(\)"),
        ((make_noise(0.2), data()[0], Frame()), {}, r"y must be .* array; got Frame\. Pass y\.to_numpy\(\)"),
        ((make_noise(0.2), data()[0], data()[1].cfloat()), {}, "y must hold real numbers; got torch.complex64"),
        ((make_noise(0.2), data()[0].cfloat(), data()[1]), {}, "x must hold real numbers; got torch.complex64"),
        (
            (make_noise(0.2), *data()),
            {"callbacks": print},
            r"callbacks= is a list of functions; got builtin.* callbacks=\[",
        ),
        ((make_noise(0.2), *data()), {"callbacks": [3]}, "callbacks= is a list of functions"),
        (
            (make_noise(0.2), *data()),
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            r"optimizer= is a name, 'adam' or 'lbfgs'; got SGD\. See lr= and schedule=\.$",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        fit(problem()[0], *arguments, steps=1, **options)


@pytest.mark.parametrize("which", [0, 1])
def test_complex_batches_of_a_loader_are_refused(which):
    arrays = list(data())
    arrays[which] = arrays[which].cfloat()
    with pytest.raises(TypeError, match=f"{'xy'[which]} must hold real numbers"):
        fit(*problem(), DataLoader(TensorDataset(*arrays), batch_size=16), steps=1)
