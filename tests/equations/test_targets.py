"""Targets that a likelihood cannot have produced, and arguments that it would not use, are refused wherever they come from."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import likelihoods

import tighter_gp
from tests.tools.factories import make_gp, make_noise
from tighter_gp.likelihoods.family import of_gpytorch
from tighter_gp.likelihoods.targets import check_targets

N = 24
LOGIT, POISSON = tighter_gp.likelihoods.BernoulliLogitLikelihood, tighter_gp.likelihoods.PoissonLikelihood
SOFTMAX = lambda: likelihoods.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
BINARY, COUNTS = "takes labels 0 and 1, or -1 and 1", "takes counts, whole numbers from 0"
NAN = math.nan


def data():
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(3 * x).sum(-1)


def model(**kwargs):
    return make_gp(data()[0][:5], **kwargs)


LABELLED = likelihoods.BernoulliLikelihood, LOGIT
COUNTED = POISSON, *of_gpytorch("PoissonLikelihood"), *of_gpytorch("NegativeBinomialLikelihood")
# likelihoods, targets that they take, targets that they do not, what is said of these
RANGES = [
    (LABELLED, ([0, 1, 1], [-1.0, 1.0, NAN], [True]), ([1, 2], [0, 0.5], [-1, 0]), BINARY),
    (COUNTED, ([0, 3], [0.0, 3.0, NAN]), ([1.5, -2.0], [-1, 4]), COUNTS),
    ((SOFTMAX,), ([0, 1, 2], [0.0, 2.0, NAN]), ([1, 2, 3], [-1, 0], [0.5, 1]), r"Labels must lie in 0\.\.2"),
    ((likelihoods.BetaLikelihood,), ([0.1, 0.9, NAN],), ([0.1, 1.0], [0.0]), "between 0 and 1, both excluded"),
    ((likelihoods.GaussianLikelihood,), ([0, 1], [-3.0, NAN]), ([math.inf],), "NaN or infinite"),
]


@pytest.mark.parametrize(("kinds", "good", "bad", "message"), RANGES)
def test_targets_are_in_the_range_of_their_likelihood(kinds, good, bad, message):
    for kind in kinds:
        with gpytorch.settings.observation_nan_policy("fill"):
            for values in good:
                check_targets(kind(), torch.tensor(values))
            for values in bad:
                with pytest.raises(ValueError, match=message):
                    check_targets(kind(), torch.tensor(values))
        with pytest.raises(ValueError, match=r"1 of 2 targets are NaN or infinite; .*observation_nan_policy\('fill'\)"):
            check_targets(kind(), torch.tensor([NAN, 0.5]))


@pytest.mark.parametrize("natural", [True, False])
def test_labels_that_are_true_or_false_train_as_zero_and_one(natural):
    x, y = data()
    options = {"steps": 2, "batch_size": N, "recipe": tighter_gp.Recipe(natural=None if natural else 0)}
    fit = lambda labels: tighter_gp.fit(model(conditional="beta"), LOGIT(), x, labels, **options)
    expected = fit((y > 1).double()).loss
    for labels in (y > 1, (y > 1).numpy()):
        assert fit(labels).loss == pytest.approx(expected, rel=1e-12)


# ---- Arguments --------------------------------------------------------------------------------------------------------


class Stimuli(likelihoods.likelihood._OneDimensionalLikelihood):
    """A likelihood with a needed argument, as aepsych has them."""

    is_log_concave = True

    def forward(self, function_samples, Xi, **kwargs):
        return torch.distributions.Bernoulli(logits=function_samples * Xi)


def test_a_needed_argument_is_passed_on():
    x, y = data()
    labels, strength = (y > 1).double(), torch.linspace(0.5, 2, N)
    gp, likelihood = model(), Stimuli()
    stock = gpytorch.mlls.VariationalELBO(likelihood, gp, N)
    tighter, standard = (
        kind(gp(x), labels, Xi=strength) for kind in (tighter_gp.TighterELBO(likelihood, gp, N), stock)
    )
    assert tighter >= standard
    assert tighter_gp.evaluate_bound(gp, likelihood, x, labels, Xi=strength).item() == pytest.approx(N * tighter.item())
    tighter_gp.fit(gp, likelihood, x, labels, steps=3, batch_size=10, Xi=strength)
    prediction = tighter_gp.predict_y(gp, likelihood, x, Xi=strength, batch_size=7)
    f = tighter_gp.predict(gp, x)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    samples = f.mean.unsqueeze(-1) + f.stddev.unsqueeze(-1) * torch.as_tensor(nodes)
    expected = torch.sigmoid(samples * strength.unsqueeze(-1)) @ torch.as_tensor(weights / weights.sum())
    torch.testing.assert_close(prediction.probs, expected, rtol=1e-7, atol=1e-9)
    with pytest.raises(TypeError, match="Xi"):
        tighter_gp.TighterELBO(likelihood, gp, N)(gp(x), labels)


def test_an_objective_of_ones_own_has_arguments_of_its_own():
    class Weighted(tighter_gp.TighterELBO):
        def forward(self, q, target, weight=None, **kwargs):
            return super().forward(q, target, **kwargs)

    history = tighter_gp.fit(model(), make_noise(0.1), *data(), objective=Weighted, steps=1, weight=torch.ones(N))
    assert history.steps == 1
