"""HadamardGaussianLikelihood: one task per point, each with a noise of its own."""

from __future__ import annotations

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel

NOISE = torch.tensor([0.05, 0.4])
HAS_TASKS = hasattr(gpytorch.likelihoods, "HadamardGaussianLikelihood")
pytestmark = pytest.mark.skipif(not HAS_TASKS, reason="this version of GPyTorch has no HadamardGaussianLikelihood")


def problem():
    p = dense.problem(seed=4)
    tasks = (torch.arange(len(p.x)) % 3 == 0).long()
    q = torch.zeros(len(p.z)), torch.eye(len(p.z))
    model = make_gp(p.z, make_kernel("rbf", p.variance, p.lengthscales), q, jitter_val=0.0)
    likelihood = gpytorch.likelihoods.HadamardGaussianLikelihood(num_tasks=2)
    likelihood.noise = NOISE
    return p._replace(noise=NOISE[tasks]), tasks, model, likelihood


def test_the_bound_has_the_noise_of_each_task():
    p, tasks, model, likelihood = problem()
    tighter_gp.set_optimal_q(model, likelihood, p.x, p.y, tasks=tasks)
    bound = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y, tasks=tasks)
    covariance = p.Q + torch.diag(p.noise)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(p.x)), covariance).log_prob(p.y)
    price = 0.5 * torch.log1p(p.d / p.noise).sum()
    torch.testing.assert_close(bound, evidence - price)


def test_training_learns_the_noise_of_each_task():
    p, tasks, model, likelihood = problem()
    before = likelihood.noise.clone()
    start = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y, tasks=tasks)
    held_out = p.x[:5], p.y[:5], {"tasks": tasks[:5]}
    history = tighter_gp.fit(
        model, likelihood, p.x, p.y, steps=30, batch_size=8, tasks=tasks.numpy(), validation=held_out
    )
    assert len(history.validation) > 0
    assert tighter_gp.evaluate_bound(model, likelihood, p.x, p.y, tasks=tasks) > start
    assert ((likelihood.noise - before).abs() > 1e-3).all()
