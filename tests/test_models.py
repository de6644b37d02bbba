"""Models ready made: five tasks in a few lines each, and what a module must survive."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

import tighter_gp
from tighter_gp import models


def scaled(x):
    return torch.tensor((x - x.mean(0)) / np.maximum(x.std(0), 1e-6), dtype=torch.float32)


def test_digits_in_a_few_lines():
    data = load_digits()
    x, y = scaled(data.data), torch.tensor(data.target)
    train, test = slice(0, 1400), slice(1400, None)
    model = models.MultiClassification(10, x[train], num_inducing=64)
    tighter_gp.fit(model, model.likelihood, x[train], y[train], epochs=10, batch_size=256, lr=0.1)
    answer = tighter_gp.predict_y(model, model.likelihood, x[test])
    assert (answer.probs.argmax(-1) == y[test]).float().mean() > 0.85
    assert -answer.log_prob(y[test]).mean() < 0.6


def test_breast_cancer_in_a_few_lines():
    data = load_breast_cancer()
    x, y = scaled(data.data), torch.tensor(data.target)
    model = models.BinaryClassification(x[:450], num_inducing=32)
    tighter_gp.fit(model, model.likelihood, x[:450], y[:450], epochs=40, batch_size=128, lr=0.05)
    answer = tighter_gp.predict_y(model, model.likelihood, x[450:])
    assert ((answer.probs > 0.5) == y[450:]).float().mean() > 0.93
    assert -answer.log_prob(y[450:]).mean() < 0.25


def test_counts_in_a_few_lines():
    x = torch.rand(600, 1) * 6
    y = torch.poisson(torch.exp(1 + torch.sin(2 * x[:, 0])))
    model = models.CountRegression(x[:500], num_inducing=20)
    tighter_gp.fit(model, model.likelihood, x[:500], y[:500], epochs=60, batch_size=250, lr=0.05)
    answer = tighter_gp.predict_y(model, model.likelihood, x[500:])
    low, high = answer.interval(0.9)
    assert 0.83 < ((low <= y[500:]) & (y[500:] <= high)).float().mean() <= 1
    assert -answer.log_prob(y[500:]).mean() < 2.2


def test_outliers_in_a_few_lines():
    data = load_diabetes()
    x, y = scaled(data.data), scaled(data.target)
    model = models.Regression(x[:350], num_inducing=32, likelihood=gpytorch.likelihoods.StudentTLikelihood())
    tighter_gp.fit(model, model.likelihood, x[:350], y[:350], epochs=60, batch_size=175, lr=0.05)
    answer = tighter_gp.predict_y(model, model.likelihood, x[350:])
    low, high = answer.interval(0.9)
    assert 0.8 < ((low <= y[350:]) & (y[350:] <= high)).float().mean() < 0.99
    assert -answer.log_prob(y[350:]).mean() < 1.25


def test_two_outputs_in_a_few_lines():
    x = torch.linspace(0, 1, 300).unsqueeze(-1)
    y = torch.cat([torch.sin(8 * x), torch.cos(8 * x)], -1) + 0.1 * torch.randn(300, 2)
    is_test = torch.arange(300) % 5 == 0
    model = models.MultiOutputRegression(2, x[~is_test], num_inducing=15)
    tighter_gp.fit(model, model.likelihood, x[~is_test], y[~is_test], steps=300, batch_size=None, lr=0.05)
    answer = tighter_gp.predict_y(model, model.likelihood, x[is_test])
    assert (answer.mean - y[is_test]).square().mean().sqrt() < 0.15
    assert -answer.log_prob(y[is_test]).mean() < 2 * (-0.6)


def test_regression_in_three_lines():
    x = torch.linspace(0, 1, 200)
    y = torch.sin(8 * x) + 0.1 * torch.randn(200)
    model = models.Regression(x, num_inducing=12)
    tighter_gp.fit(model, model.likelihood, x.unsqueeze(-1), y, steps=200, batch_size=None, lr=0.05)
    assert -tighter_gp.predict_y(model, model.likelihood, x).log_prob(y).mean() < -0.6


# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------

MAKERS = {
    "regression": lambda x: models.Regression(x, num_inducing=5),
    "binary": lambda x: models.BinaryClassification(x, num_inducing=5),
    "counts": lambda x: models.CountRegression(x, num_inducing=5),
    "noise": lambda x: models.HeteroscedasticRegression(x, num_inducing=5),
    "outputs": lambda x: models.MultiOutputRegression(2, x, num_inducing=5),
    "classes": lambda x: models.MultiClassification(3, x, num_inducing=5),
}


@pytest.mark.parametrize("name", MAKERS)
def test_model_survives_being_saved_pickled_and_copied(name, tmp_path):
    x = torch.rand(20, 2)
    model = MAKERS[name](x)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    expected = tighter_gp.predict_y(model, model.likelihood, x).mean
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = MAKERS[name](torch.rand(20, 2))
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for other in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(tighter_gp.predict_y(other, other.likelihood, x).mean, expected)


@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_has_a_gradient(name):
    x = torch.rand(20, 2)
    model = MAKERS[name](x)
    y = {"outputs": torch.rand(20, 2)}.get(name, torch.arange(20) % 2)
    mll = tighter_gp.TighterELBO(model.likelihood, model, num_data=20)
    (-mll(model(x), y)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_parts_can_be_exchanged():
    z, kernel, mean = torch.rand(4, 2), gpytorch.kernels.RBFKernel(), gpytorch.means.ZeroMean()
    model = models.Regression(inducing_points=z, covar_module=kernel, mean_module=mean)
    assert model.covar_module is kernel
    assert model.mean_module is mean
    assert torch.equal(model.variational_strategy.inducing_points, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_that_of_the_inputs(dtype):
    model = models.MultiOutputRegression(2, torch.rand(9, 2, dtype=dtype), num_inducing=30)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert models.Regression(np.arange(12), num_inducing=3).variational_strategy.inducing_points.shape == (3, 1)


def test_inputs_or_inducing_points():
    with pytest.raises(TypeError, match="either training inputs"):
        models.Regression()
    with pytest.raises(TypeError, match="either training inputs"):
        models.Regression(torch.rand(3, 1), inducing_points=torch.rand(3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covar_module": "matern"}, "covar_module must be a Kernel of GPyTorch; got 'matern'"),
        (
            {"covar_module": gpytorch.kernels.RBFKernel},
            "covar_module must be a Kernel of GPyTorch; got <class .*RBFKernel",
        ),
        ({"mean_module": 0.0}, "mean_module must be a Mean of GPyTorch; got float"),
        ({"likelihood": torch.ones(3)}, "likelihood must be a Likelihood of GPyTorch; got Tensor"),
    ],
)
def test_parts_of_another_kind_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        models.Regression(torch.rand(9, 2), **options)


@pytest.mark.parametrize(
    ("make", "name"), [(models.MultiClassification, "num_classes"), (models.MultiOutputRegression, "num_outputs")]
)
def test_the_number_of_functions_comes_first(make, name):
    x = torch.rand(9, 2)
    with pytest.raises(TypeError, match=f"{name} comes first, an integer, and then x; got Tensor"):
        make(x, 3)
    for count in (np.int64(3), torch.tensor(3)):
        assert make(count, x, num_inducing=4).variational_strategy.num_tasks == 3


def test_inputs_of_another_kind_are_refused():
    class Frame:
        def to_numpy(self):
            return np.ones((9, 2))

    with pytest.raises(TypeError, match=r"x must be a tensor .* got Frame\. Pass x\.to_numpy\(\)"):
        models.Regression(Frame())
    with pytest.raises(TypeError, match=r"inducing_points must be .* got Frame\. Pass inducing_points\.to_numpy\(\)"):
        models.Regression(inducing_points=Frame())
    with pytest.raises(TypeError, match=r"x must hold real numbers; got torch.complex64"):
        models.Regression(torch.rand(9, 2).cfloat())
    assert models.Regression(inducing_points=[[0.0], [1.0]]).variational_strategy.inducing_points.shape == (2, 1)


def test_what_the_module_offers_are_models():
    assert {type(make(torch.rand(9, 2))).__name__ for make in MAKERS.values()} == set(models.__all__)
