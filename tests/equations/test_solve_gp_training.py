"""SOLVE-GP with every conditional, with other likelihoods, and in training."""

from __future__ import annotations

import copy
import functools

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    NaturalVariationalDistribution,
)

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_kernel, make_noise
from tests.tools.solve_gp import Joint, logarithm, make_solve_gp, random_parts
from tighter_gp import TighterELBO


def test_scales_of_every_conditional():
    j, (q_u, q_v) = Joint(23), random_parts(23)
    d = j.p.Kff.diagonal() - j.projection().square().sum(0)
    per_point = tighter_gp.PerPoint(17)
    per_point.m = torch.linspace(0.2, 0.8, 17)
    for conditional, scale, kwargs in (
        ("optimal", None, {}),
        ("beta", 0.4 / (0.4 + d), {}),
        ("scalar", torch.full((17,), 0.7), {}),
        (per_point, torch.linspace(0.2, 0.8, 17), {"index": torch.arange(17)}),
    ):
        model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, conditional=conditional).train()
        if conditional == "beta":
            model.variational_strategy.conditional.beta = 0.4
        if conditional == "scalar":
            model.variational_strategy.conditional.m = 0.7
        value = 17 * TighterELBO(make_noise(j.p.noise[0]), model, 17)(model(j.p.x, **kwargs), j.p.y)
        torch.testing.assert_close(value, j.uncollapsed(q_u, q_v, scale), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (gpytorch.likelihoods.BernoulliLikelihood(), lambda y: (y > 0).to(y)),
        (tighter_gp.likelihoods.PoissonLikelihood(), lambda y: y.abs().round()),
    ],
)
def test_other_likelihoods_train(likelihood, targets):
    j = Joint(24)
    model = make_solve_gp(j.z, j.o, j.kernel, conditional="beta").train()
    y = targets(j.p.y)
    mll = TighterELBO(likelihood, model, 17)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = -mll(model(j.p.x), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]


def test_natural_gradient_steps_reach_the_closed_form():
    j = Joint(25)
    kinds = (NaturalVariationalDistribution, NaturalVariationalDistribution)
    model = make_solve_gp(j.z, j.o, j.kernel, distributions=kinds).train()
    likelihood = make_noise(j.p.noise[0])
    mll = TighterELBO(likelihood, model, 17)
    optimizer = gpytorch.optim.NGD(list(model.variational_parameters()), num_data=17, lr=0.5)
    for _ in range(80):
        optimizer.zero_grad()
        (-mll(model(j.p.x), j.p.y)).backward()
        optimizer.step()
    value = tighter_gp.evaluate_bound(model, likelihood, j.p.x, j.p.y)
    torch.testing.assert_close(value, j.collapsed(logarithm), rtol=1e-8, atol=0.0)


def test_tighter_training_ends_at_a_higher_tighter_bound():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator)
    y = torch.sin(20 * x[:, 0]) + 0.1 * torch.randn(120, generator=generator)
    z, o = tighter_gp.inducing.split_inducing_points(tighter_gp.inducing.kmeans(x, 8))
    results = []
    for objective in (VariationalELBO, TighterELBO):
        model = make_solve_gp(z, o, make_kernel("rbf", 1.0, torch.tensor([0.1])), jitter_val=1e-6).train()
        likelihood = make_noise(0.1)
        tighter_gp.set_optimal_q(model, likelihood, x, y)
        mll = objective(likelihood, model, 120)
        optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], 0.02)
        for _ in range(80):
            optimizer.zero_grad()
            (-mll(model(x), y)).backward()
            optimizer.step()
        tighter_gp.set_optimal_q(model, likelihood, x, y)
        results.append(tighter_gp.evaluate_bound(model, likelihood, x, y))
    assert results[1] > results[0]


def test_float32_is_finite_at_tiny_noise_and_near_double():
    j = Joint(26)
    kernel = make_kernel("rbf", 1.0, torch.tensor([2.0, 2.0]))
    values = []
    for dtype in (torch.float64, torch.float32):
        model = make_solve_gp(j.z, j.o, copy.deepcopy(kernel), jitter_val=1e-4).to(dtype).train()
        likelihood = make_noise(1e-4).to(dtype)
        x, y = j.p.x.to(dtype), j.p.y.to(dtype)
        tighter_gp.set_optimal_q(model, likelihood, x, y)
        value = TighterELBO(likelihood, model, 17)(model(x), y)
        gradients = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        assert bool((model(x).lazy_covariance_matrix.residual >= 0).all())
        values.append(value.double())
    torch.testing.assert_close(values[1], values[0], rtol=2e-2, atol=0.0)


def test_prediction_terms_lie_between_zero_and_the_dropped_one():
    j = Joint(27)
    model, likelihood = make_solve_gp(j.z, j.o, j.kernel), make_noise(j.p.noise[0])
    tighter_gp.set_optimal_q(model, likelihood, j.p.x, j.p.y)
    x = j.p.x[:6] + 0.05
    predict = functools.partial(tighter_gp.predict, model, x, likelihood=likelihood, train_x=j.p.x)
    dropped = tighter_gp.predict(model, x).variance
    # d_* + s_* - r' V r by its definition: D given u and v, symmetric root
    k = dense.KERNELS[j.p.kernel]
    scale = lambda a, b: k(a, b, j.p.variance, j.p.lengthscales)
    points = torch.cat([j.z, j.o])
    inverse = torch.linalg.inv(scale(points, points))
    residual = lambda a, b: scale(a, b) - scale(a, points) @ inverse @ scale(points, b)
    D, cross, noise = residual(j.p.x, j.p.x), residual(j.p.x, x), j.p.noise[0]
    values, vectors = torch.linalg.eigh(D)
    root = vectors @ torch.diag(values.clamp_min(1e-300).rsqrt()) @ vectors.T
    V = root @ torch.diag(D.diagonal() / (noise + D.diagonal())) @ root
    expected = dropped - (cross.T @ V @ cross).diagonal()
    torch.testing.assert_close(predict("exact").variance, expected, rtol=1e-6, atol=1e-9)
    for term in ("exact", "optimal", "subset"):
        variance = predict(term).variance
        assert bool((variance > 0).all())
        assert bool((variance <= dropped + 1e-12).all())
