"""The estimators for scikit-learn: its own checks, and what a table in its own units gets."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn, in the sklearn extra")

import pandas as pd
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import load_digits, make_classification
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import parametrize_with_checks

from tighter_gp.estimators import TighterGPClassifier, TighterGPRegressor


@pytest.mark.slow
@parametrize_with_checks([TighterGPRegressor(num_inducing=30), TighterGPClassifier(num_inducing=30)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def table(num_rows=400, seed=0):
    """Columns in very different units."""
    rng = np.random.default_rng(seed)
    year, share = rng.uniform(1990, 2020, num_rows), rng.uniform(0, 1e-3, num_rows)
    mean = 5000 + 800 * np.sin((year - 2000) / 4) + 3e5 * share
    return np.c_[year, share, rng.normal(size=num_rows)], mean + 30 * rng.standard_normal(num_rows)


@pytest.fixture(scope="module")
def fitted():
    torch.set_default_dtype(torch.float32)
    return TighterGPRegressor(num_inducing=64).fit(*table())


def test_table_in_its_own_units(fitted):
    X, y = table(seed=1)
    assert fitted.score(X, y) > 0.99
    low, high = fitted.predict_interval(X, coverage=0.9)
    assert 0.84 < ((low < y) & (y < high)).mean() < 0.96
    mean, std = fitted.predict(X, return_std=True)
    assert 25 < std.mean() < 45
    draws = fitted.sample_y(X, 200, random_state=1)
    np.testing.assert_allclose(draws.mean(1), mean, atol=15)
    assert fitted.relevance_.argmax() == 0
    assert fitted.relevance_.argmin() == 2


def test_a_constant_column_has_no_relevance():
    X = np.random.default_rng(0).uniform(size=(80, 3))
    X[:, 2] = 7
    found = TighterGPRegressor(num_inducing=8, steps=20, neighbours=0).fit(X, np.sin(6 * X[:, 0])).relevance_
    assert found[2] == 0
    assert found.sum() == pytest.approx(1)


def test_pickle_and_seed(fitted):
    X, _ = table(seed=1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))
    state = torch.get_rng_state()
    again = TighterGPRegressor(num_inducing=64).fit(*table())
    np.testing.assert_allclose(again.predict(X), fitted.predict(X), rtol=1e-9)
    assert torch.equal(torch.get_rng_state(), state)


def test_frame_with_a_category_in_a_grid_search():
    X, y = table(200)
    frame = pd.DataFrame(X, columns=["year", "share", "other"]).assign(place=np.where(X[:, 2] > 0, "north", "south"))
    y = y + 500 * (frame["place"] == "north")
    columns = ColumnTransformer([("place", OneHotEncoder(sparse_output=False), ["place"])], remainder="passthrough")
    pipeline = make_pipeline(columns, TighterGPRegressor(num_inducing=32, neighbours=0))
    search = GridSearchCV(pipeline, {"tightergpregressor__num_inducing": [4, 32]}, cv=2).fit(frame, y)
    assert search.best_score_ > 0.95
    assert TighterGPRegressor(steps=1).fit(frame[["year", "share"]], y).feature_names_in_.tolist() == ["year", "share"]


def test_target_transformed_and_rows_of_a_memory_map(tmp_path):
    X, y = table(200)
    np.save(tmp_path / "X.npy", X.astype(np.float32))
    X = np.load(tmp_path / "X.npy", mmap_mode="r")
    regressor = TransformedTargetRegressor(TighterGPRegressor(num_inducing=32), func=np.log, inverse_func=np.exp)
    assert regressor.fit(X, y).score(X, y) > 0.98


@pytest.mark.parametrize("num_classes", [2, 3])
def test_string_labels(num_classes):
    X, labels = make_classification(
        300, 5, n_informative=4, n_redundant=0, n_classes=num_classes, class_sep=2, random_state=0
    )
    names = np.array(["ash", "oak", "elm"])[labels]
    classifier = TighterGPClassifier(num_inducing=32).fit(X[:200], names[:200])
    assert classifier.classes_.tolist() == sorted(set(names))
    assert classifier.score(X[200:], names[200:]) > 0.8
    probs = classifier.predict_proba(X[200:])
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_allclose(classifier.predict_proba(X[250:]), probs[50:], atol=1e-9)  # a point by itself


def test_pixels_get_one_scale():
    X, y = load_digits(return_X_y=True)
    X, test_X, y, test_y = train_test_split(X, y, train_size=600, random_state=0)
    classifier = TighterGPClassifier(num_inducing=64, steps=60).fit(X, y)
    assert classifier.score(test_X, test_y) > 0.92
    assert len(set(classifier.relevance_) - {0.0}) == 1  # of pixels that are not always black


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="y has one class"):
        TighterGPClassifier().fit(np.ones((3, 1)), ["a", "a", "a"])
