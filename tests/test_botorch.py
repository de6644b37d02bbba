"""BoTorch's model on this package's recipe: its hook, transforms, outputs, other likelihoods, new observations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("botorch", reason="needs BoTorch, in the test extra")

from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling.pathwise import draw_matheron_paths

import tighter_gp
from tighter_gp.botorch import SingleTaskTighterGP


def data(num_rows=150, num_outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(num_rows, 2, generator=generator)
    y = torch.stack([torch.sin(x[:, 0]) + 0.1 * x[:, 1], torch.cos(x[:, 1])], -1)[:, :num_outputs]
    return x, 50 + 20 * (y + 0.1 * torch.randn(num_rows, num_outputs, generator=generator))


def fitted(x, y, likelihood=None, **kwargs):
    transforms = {
        "input_transform": Normalize(2),
        **({} if likelihood else {"outcome_transform": Standardize(y.size(-1))}),
    }
    model = SingleTaskTighterGP(x, y, likelihood, inducing_points=30, **transforms, **kwargs)
    mll = tighter_gp.TighterELBO(model.likelihood, model.model, num_data=len(x))
    assert fit_gpytorch_mll(mll, epochs=40) is mll
    assert not mll.training
    return model


@pytest.fixture(scope="module")
def model():
    torch.set_default_dtype(torch.float64)
    return fitted(*data())


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_it_is_trained_by_the_recipe_and_answers_in_the_units_of_y(num_outputs):
    model, (x, y) = fitted(*data(num_outputs=num_outputs)), data(seed=1, num_outputs=num_outputs)
    assert model.num_outputs == num_outputs
    posterior = model.posterior(x.view(50, 3, 2), observation_noise=True)
    mean, stddev = posterior.mean.view_as(y), posterior.variance.sqrt().view_as(y)
    assert (mean - y).square().mean().sqrt() < 4  # the noise has 2
    assert -torch.distributions.Normal(mean, stddev).log_prob(y).mean() < 2.8
    assert posterior.rsample(torch.Size([5])).shape == (5, 50, 3, num_outputs)


def test_transforms_learn_from_all_data(model):
    x, y = data()
    torch.testing.assert_close(model.outcome_transform.means.flatten(), y.mean(0))
    torch.testing.assert_close(model.input_transform.bounds, torch.stack([x.min(0).values, x.max(0).values]))
    torch.testing.assert_close(model.model.train_targets, (y.squeeze(-1) - y.mean()) / y.std())


def test_acquisition_and_thompson_sampling(model):
    bounds = torch.tensor([[0.0, 0.0], [10.0, 10.0]])
    acquisition = LogExpectedImprovement(model, best_f=data()[1].max())
    candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=8)
    assert candidate.shape == (1, 2)
    torch.manual_seed(0)
    x = data(5, seed=2)[0]
    draws = draw_matheron_paths(model, torch.Size([500]))(x)
    posterior = model.posterior(x)
    assert (
        (draws.mean(0) - posterior.mean.squeeze(-1)).abs() < 0.5 * posterior.variance.sqrt().squeeze(-1) + 0.5
    ).all()


def test_new_observations_change_the_posterior_where_they_are(model):
    x, y = data(1, seed=3)
    seen = model.condition_on_observations(x, y + 10)
    before, after = model.posterior(x), seen.posterior(x)
    assert (after.mean > before.mean).all()
    assert (after.variance < before.variance).all()


def test_observations_under_another_likelihood():
    x, y = data()
    counts = (y / 20).round().clamp_min(0)
    model = fitted(x, counts, tighter_gp.likelihoods.PoissonLikelihood())
    posterior = model.posterior(x.view(50, 3, 2), observation_noise=True)
    expected = tighter_gp.predict_y(model.model, model.likelihood, model.transform_inputs(x))
    torch.testing.assert_close(posterior.mean.flatten(), expected.mean)
    assert (posterior.variance > model.posterior(x.view(50, 3, 2)).variance).all()
    draws = posterior.rsample(torch.Size([7]))
    assert draws.shape == (7, 50, 3, 1)
    assert (draws == draws.round()).all()


def test_a_model_with_transforms_is_refused_where_they_would_be_left_out(model):
    x, y = data()
    with pytest.raises(TypeError, match="fit_gpytorch_mll"):
        tighter_gp.fit(model, model.likelihood, x, y[:, 0], steps=1)
    with pytest.raises(TypeError, match=r"pass its inner one, model\.model"):
        tighter_gp.evaluate_bound(model, model.likelihood, x, y[:, 0])
