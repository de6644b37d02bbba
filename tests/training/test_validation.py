"""Held-out data: the score, and patience."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch

import tighter_gp
from tests.training.problems import Count, N, collapsed, data, parameters, problem
from tighter_gp import Recipe, fit
from tighter_gp.training import mean_nlpd, validation

HELD_OUT = data(19)


def trained(make=problem):
    model, likelihood = make()
    fit(model, likelihood, *data(), steps=5)
    return model, likelihood


@pytest.mark.parametrize("make", [problem, collapsed])
def test_the_score_is_the_mean_negative_log_density(make):
    model, likelihood = trained(make)
    x, y = HELD_OUT
    q = tighter_gp.predict(model, x)
    expected = -torch.distributions.Normal(q.mean, (q.variance + likelihood.noise).sqrt()).log_prob(y).mean()
    assert mean_nlpd(model, likelihood, x, y) == pytest.approx(expected.item(), rel=1e-8)
    assert mean_nlpd(model, likelihood, x.numpy(), y.numpy()) == pytest.approx(expected.item(), rel=1e-8)
    history = fit(*make(), *data(), steps=3, validation=HELD_OUT)
    assert [step for step, _ in history.validation] == [1, 2, 3]


def test_missing_targets_count_nothing():
    model, likelihood = trained()
    x, y = HELD_OUT
    y = y.clone()
    y[::3] = math.nan
    seen = ~y.isnan()
    with gpytorch.settings.observation_nan_policy("mask"):
        score = mean_nlpd(model, likelihood, x, y)
    assert score == pytest.approx(mean_nlpd(model, likelihood, x[seen], y[seen]))


def test_noise_per_point_goes_with_the_points():
    x, y = HELD_OUT
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((N,), 0.1))
    noise = torch.linspace(0.1, 1.0, 19)
    with pytest.raises(ValueError, match=r'validation=\(x, y, {"noise": noise}\)'):
        fit(problem()[0], likelihood, *data(), steps=1, validation=HELD_OUT)
    model = problem()[0]
    history = fit(model, likelihood, *data(), steps=1, validation=(x, y, {"noise": noise.numpy()}))
    q = tighter_gp.predict(model, x)
    expected = -torch.distributions.Normal(q.mean, (q.variance + noise).sqrt()).log_prob(y).mean()
    assert history.validation[0][1] == pytest.approx(expected.item(), rel=1e-8)


def with_scores(monkeypatch, scores):
    """Validations that give these scores, after a first that tries the shapes."""
    left = iter([0.0, *scores])
    monkeypatch.setattr(validation.HeldOut, "score", lambda self, *args: next(left))


def test_patience_ends_a_run_with_the_parameters_of_its_best_validation(monkeypatch):
    kept = []
    keep = lambda step: kept.append(parameters(step.model, step.likelihood))
    with_scores(monkeypatch, [3.0, 1.0, math.nan, 2.0, 2.0, 2.0, 2.0])
    model, likelihood = problem()
    recipe = Recipe(schedule="constant", validate_every=1)
    options = {"validation": HELD_OUT, "patience": 3, "callbacks": [keep], "recipe": recipe}
    history = fit(model, likelihood, *data(), steps=7, batch_size=16, **options)
    assert history.stopped == "no better validation in 3"
    assert (history.steps, history.best_step) == (5, 2)
    assert torch.equal(parameters(model, likelihood), kept[1])


def test_the_learning_rate_falls_before_patience_ends_a_run(monkeypatch, caplog):
    with_scores(monkeypatch, [1.0, *[2.0] * 50])
    model, likelihood = problem()
    recipe = Recipe(validate_every=1)
    with caplog.at_level("INFO", "tighter_gp"):
        history = fit(model, likelihood, *data(), steps=40, validation=HELD_OUT, patience=4, recipe=recipe)
    assert history.steps == 9  # five steps, then four more without a better one while it falls
    assert "the learning rate falls from here on, until step 10" in caplog.text


def test_a_shortened_run_resumes_shortened(monkeypatch, tmp_path):
    options = {"steps": 40, "validation": HELD_OUT, "patience": 4, "recipe": Recipe(validate_every=1)}
    with_scores(monkeypatch, [1.0, *[2.0] * 50])
    whole = fit(*problem(), *data(), **options)
    with_scores(monkeypatch, [1.0, *[2.0] * 50])
    options["checkpoint"] = tmp_path / "run.pt"
    stop = lambda step: step.step == 7 and (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), callbacks=[stop], **options)
    with_scores(monkeypatch, [2.0] * 50)
    count = Count()
    resumed = fit(*problem(), *data(), resume=True, callbacks=[count], **options)
    assert resumed.loss == whole.loss
    assert resumed.stopped == whole.stopped


@pytest.mark.parametrize(
    ("held_out", "error", "message"),
    [
        (HELD_OUT[0], TypeError, r"must be \(x, y\)"),
        ([HELD_OUT[0].tolist(), HELD_OUT[1]], TypeError, "must be a tensor or a numpy array"),
        ((HELD_OUT[0], HELD_OUT[1][:-1]), ValueError, "a held-out target per row of x, 19"),
        ((HELD_OUT[0], HELD_OUT[1] * math.nan), ValueError, "validation targets are NaN"),
        ((HELD_OUT[0] * math.inf, HELD_OUT[1]), ValueError, "validation inputs are NaN"),
        ((HELD_OUT[0], HELD_OUT[1][:, None]), ValueError, "trailing dimension"),
        ((HELD_OUT[0][:, :1], HELD_OUT[1]), ValueError, "Inputs must have shape"),
        ((*HELD_OUT, {"noise": np.full(19, -1.0)}), ValueError, "must hold variances"),
    ],
)
def test_held_out_data_that_do_not_fit_are_refused_before_the_first_step(held_out, error, message):
    model, likelihood = problem()
    count = Count()
    with pytest.raises(error, match=message):
        fit(model, likelihood, *data(), steps=3, validation=held_out, callbacks=[count])
    assert count.steps == []


@pytest.mark.parametrize("classes", [2, 3])
def test_labels_are_scored_by_their_probabilities(classes):
    x, y = data()
    labels = (y > 0).long() + (classes - 2) * (y > 0.7).long()
    make = tighter_gp.models.BinaryClassification if classes == 2 else tighter_gp.models.MultiClassification
    model = make(x, 6) if classes == 2 else make(3, x, 6)
    history = fit(model, model.likelihood, x, labels, steps=60, validation=(x, labels))
    assert history.validation[-1][1] < history.validation[0][1]
    probs = tighter_gp.predict_y(model, model.likelihood, x).probs
    own = probs[torch.arange(N), labels] if classes == 3 else probs.where(labels > 0, 1 - probs)
    assert history.validation[-1][1] == pytest.approx(-own.log().mean().item(), rel=0.05)
