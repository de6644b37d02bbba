"""Targets that a likelihood cannot have produced."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpytorch import likelihoods
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.training.problems import N, data, problem
from tighter_gp.labels import check_labels

LOGIT, POISSON = tighter_gp.likelihoods.BernoulliLogitLikelihood, tighter_gp.likelihoods.PoissonLikelihood
SOFTMAX = lambda: likelihoods.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)


@pytest.mark.parametrize("kind", [likelihoods.BernoulliLikelihood, LOGIT])
def test_binary_labels(kind):
    for good in ([0, 1, 1], [-1, 1], [1, 1], [0.0, math.nan, 1.0], [True, False]):
        check_labels(kind(), torch.tensor(good))
    for bad, found in {(1, 2): "1, 2", (0.0, 0.5): "0, 0.5", (-1, 0, 1): "-1, 0, 1"}.items():
        with pytest.raises(ValueError, match=f"labels 0 and 1, or -1 and 1; y holds {found}"):
            check_labels(kind(), torch.tensor(bad))


@pytest.mark.parametrize("kind", [likelihoods.PoissonLikelihood, POISSON, likelihoods.NegativeBinomialLikelihood])
def test_counts(kind):
    check_labels(kind(), torch.tensor([0.0, 3.0, math.nan]))
    check_labels(kind(), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"whole numbers from 0; 2 of 3 values of y are others: -2, 1.5"):
        check_labels(kind(), torch.tensor([1.5, -2.0, 4.0]))
    with pytest.raises(ValueError, match="others: -1"):
        check_labels(kind(), torch.tensor([-1, 4]))


def test_classes():
    check_labels(SOFTMAX(), torch.tensor([0, 1, 2]))
    check_labels(SOFTMAX(), torch.tensor([0.0, 2.0, math.nan]))
    for bad in ([1, 2, 3], [-1, 0], [0.5, 1.0]):
        with pytest.raises(ValueError, match=r"Labels must lie in 0\.\.2, as there are 3 classes"):
            check_labels(SOFTMAX(), torch.tensor(bad))


def test_fractions():
    check_labels(likelihoods.BetaLikelihood(), torch.tensor([0.1, 0.9]))
    with pytest.raises(ValueError, match="between 0 and 1, both excluded; 1 of 2"):
        check_labels(likelihoods.BetaLikelihood(), torch.tensor([0.1, 1.0]))


def test_many_values_are_not_all_shown():
    with pytest.raises(ValueError, match=r"0, 1, 2, 3, 4, \.\.\. \(50 different ones\)"):
        check_labels(LOGIT(), torch.arange(50))


@pytest.mark.parametrize("how", ["tensor", "array", "loader", "validation"])
def test_fit_refuses_wrong_labels_wherever_they_come_from(how):
    x, y = data()
    good = (y > 0).long()
    wrong = good + 1
    model, _ = problem(conditional="beta")
    options = {}
    if how == "tensor":
        arrays = (x, wrong)
    elif how == "array":
        arrays = (x.numpy(), wrong.numpy().astype(np.uint8))
    elif how == "loader":
        arrays = (DataLoader(TensorDataset(x, wrong), batch_size=16),)
    else:
        arrays, options = (x, good), {"validation": (x, wrong)}
    with pytest.raises(ValueError, match="labels 0 and 1, or -1 and 1"):
        tighter_gp.fit(model, LOGIT(), *arrays, steps=1, **options)
    assert len(y) == N


@pytest.mark.parametrize("options", [{}, {"natural_gradients": False}])
def test_labels_that_are_true_or_false_train_as_zero_and_one(options):
    x, y = data()
    loader = lambda labels: DataLoader(TensorDataset(x, labels), batch_size=N)

    def loss(*arguments):
        model, _ = problem(conditional="beta")
        return tighter_gp.fit(model, LOGIT(), *arguments, steps=2, batch_size=N, **options).loss

    expected = loss(x, (y > 0).double())
    for labels in (y > 0, (y > 0).numpy()):
        assert loss(x, labels) == pytest.approx(expected, rel=1e-12)
    # With a loader q(u) starts with another little noise.
    assert loss(loader(y > 0)) == pytest.approx(loss(loader((y > 0).double())), rel=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, rows: tighter_gp.fit(model, model.likelihood, x, rows, steps=1),
        lambda model, x, rows: tighter_gp.fit(model, model.likelihood, x.numpy(), rows.numpy(), steps=1),
        lambda model, x, rows: tighter_gp.fit(
            model, model.likelihood, DataLoader(TensorDataset(x, rows), batch_size=N), steps=1
        ),
        lambda model, x, rows: tighter_gp.evaluate_bound(model, model.likelihood, x, rows),
    ],
    ids=["tensor", "array", "loader", "bound"],
)
def test_one_hot_rows_are_no_labels(call):
    x, _ = data()
    model = tighter_gp.models.MultiClassification(3, x, num_inducing=5)
    with pytest.raises(
        ValueError, match=r"shape \(53,\) .* got \(53, 3\)\. Labels are 0 to 2, .* pass y\.argmax\(-1\)"
    ):
        call(model, x, torch.eye(3)[torch.arange(N) % 3])
