"""Natural gradients on q(u) with Adam on the rest."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.variational import NaturalVariationalDistribution, TrilNaturalVariationalDistribution

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tighter_gp.conditionals import PerPoint

NATURAL = pytest.mark.parametrize("distribution", [NaturalVariationalDistribution, TrilNaturalVariationalDistribution])


def model_of(p, **kwargs):
    return make_gp(p.z, make_kernel(p.kernel, p.variance, p.lengthscales), jitter_val=1e-8, **kwargs)


@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar"])
def test_one_full_step_reaches_the_collapsed_bound(conditional):
    p = dense.problem(seed=1)
    model = model_of(p, distribution=NaturalVariationalDistribution, conditional=conditional)
    likelihood, n = make_noise(p.noise[0]), len(p.y)
    mll = tighter_gp.TighterELBO(likelihood, model, n)
    optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=n, lr=1.0)
    (-mll(model(p.x), p.y)).backward()
    optimizer.step()
    noise, d = p.noise, p.d
    if conditional == "optimal":
        m = noise / (noise + d)
    elif conditional == "beta":
        m = 1 / (1 + d)
    else:
        m = torch.full_like(d, 0.9)
    torch.testing.assert_close(n * mll(model(p.x), p.y), dense.f3(p, m), rtol=1e-6, atol=0)


@NATURAL
def test_natural_gradients_with_adam_train_to_the_collapsed_optimum(distribution):
    """The usual loop: two optimisers, one for q(u), one for the hyperparameters."""
    p = dense.problem(seed=3)
    model, likelihood = model_of(p, distribution=distribution), make_noise(0.5)
    n = len(p.y)
    mll = tighter_gp.TighterELBO(likelihood, model, n)
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=n, lr=0.5)
    adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.04)
    model.train()
    history = []
    for _ in range(70):
        natural.zero_grad()
        adam.zero_grad()
        loss = -mll(model(p.x), p.y)
        loss.backward()
        natural.step()
        adam.step()
        history.append(-n * loss.item())
    # q(u) follows the hyperparameters: the bound is the collapsed one at where they are now.
    trained = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y)
    tighter_gp.set_optimal_q(model, likelihood, p.x, p.y)
    best = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y)
    assert history[0] < history[30] < trained
    assert 0 <= best - trained < 0.05


@NATURAL
@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar", PerPoint(17)])
def test_scales_are_hyperparameters_and_never_variational(distribution, conditional):
    model = model_of(dense.problem(), distribution=distribution, conditional=conditional)
    scales = {id(q) for q in model.variational_strategy.conditional.parameters()}
    variational = {id(q) for q in model.variational_parameters()}
    assert len(variational) == 2
    assert not scales & variational
    assert scales <= {id(q) for q in model.hyperparameters()}


def test_mini_batches_with_natural_gradients_raise_the_bound_with_a_learned_beta():
    p = dense.problem(seed=4, n=40)
    model = model_of(p, distribution=NaturalVariationalDistribution, conditional="beta")
    likelihood, y = tighter_gp.likelihoods.BernoulliLogitLikelihood(), (p.y > 0).double()
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1)
    adam = torch.optim.Adam(model.hyperparameters(), lr=0.02)
    before = tighter_gp.evaluate_bound(model, likelihood, p.x, y)
    beta = model.variational_strategy.conditional.beta.item()
    for step in range(50):
        rows = torch.arange(len(y)).roll(step)[::4]
        natural.zero_grad()
        adam.zero_grad()
        (-mll(model(p.x[rows]), y[rows])).backward()
        natural.step()
        adam.step()
    assert tighter_gp.evaluate_bound(model, likelihood, p.x, y) > before + 1
    assert model.variational_strategy.conditional.beta.item() != beta
