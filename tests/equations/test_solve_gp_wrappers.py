"""SOLVE-GP in batches, inside GPyTorch's multitask strategies and inside BoTorch."""

from __future__ import annotations

import copy
import functools

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
)

import tighter_gp
from tests.tools.factories import make_noise
from tests.tools.solve_gp import MV, Joint, make_solve_gp, random_parts
from tighter_gp import SolveGPVariationalStrategy, TighterELBO


def two_of(seed: int):
    """Two q(u) and two q(v), stacked."""
    parts = [random_parts(seed), random_parts(seed + 1)]
    stack = lambda which, item: torch.stack([part[which][item] for part in parts])
    return parts, (stack(0, 0), stack(0, 1)), (stack(1, 0), stack(1, 1))


def test_a_batch_of_gps_with_shared_points_equals_separate_models():
    j = Joint(16)
    parts, q_u, q_v = two_of(16)
    likelihood = make_noise(j.p.noise[0])
    batch = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, batch_shape=torch.Size([2]))
    together = tighter_gp.evaluate_bound(batch, likelihood, j.p.x, j.p.y)
    apart = torch.stack(
        [
            tighter_gp.evaluate_bound(make_solve_gp(j.z, j.o, j.kernel, *part), likelihood, j.p.x, j.p.y)
            for part in parts
        ]
    )
    torch.testing.assert_close(together, apart)
    assert batch.eval()(j.p.x).batch_shape == torch.Size([2])


def test_a_batch_of_points_equals_separate_models():
    first, second = Joint(17), Joint(18)
    parts, q_u, q_v = two_of(17)
    z, o = torch.stack([first.z, second.z]), torch.stack([first.o, second.o])
    likelihood, x = make_noise(0.1), first.p.x
    batch = make_solve_gp(z, o, first.kernel, q_u, q_v, batch_shape=torch.Size([2]))
    together = tighter_gp.evaluate_bound(batch, likelihood, x, first.p.y)
    apart = [
        tighter_gp.evaluate_bound(make_solve_gp(j.z, j.o, first.kernel, *part), likelihood, x, first.p.y)
        for j, part in zip((first, second), parts, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(apart))


def test_set_optimal_q_of_a_batch():
    j = Joint(19)
    batch = make_solve_gp(j.z, j.o, j.kernel, batch_shape=torch.Size([2]))
    targets = torch.stack([j.p.y, 2 * j.p.y])
    tighter_gp.set_optimal_q(batch, make_noise(j.p.noise[0]), j.p.x, targets)
    single = make_solve_gp(j.z, j.o, j.kernel)
    tighter_gp.set_optimal_q(single, make_noise(j.p.noise[0]), j.p.x, 2 * j.p.y)
    torch.testing.assert_close(batch.variational_strategy.whitened()[0][1], single.variational_strategy.whitened()[0])


def multitask_gp(j, q_u, q_v, wrap):
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, batch_shape=torch.Size([2]))
    model.variational_strategy = wrap(model.variational_strategy)
    return model


def test_independent_multitask_sums_both_kls_and_both_bounds():
    j = Joint(20)
    parts, q_u, q_v = two_of(20)
    wrap = functools.partial(gpytorch.variational.IndependentMultitaskVariationalStrategy, num_tasks=2)
    model = multitask_gp(j, q_u, q_v, wrap)
    singles = [make_solve_gp(j.z, j.o, j.kernel, *part) for part in parts]
    kls = [single.variational_strategy.kl_divergence() for single in singles]
    torch.testing.assert_close(model.variational_strategy.kl_divergence(), sum(kls))
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, has_global_noise=False)
    likelihood.task_noises = torch.tensor([0.1, 0.3])
    targets = torch.stack([j.p.y, j.p.y.flip(0)], -1)
    value = TighterELBO(likelihood, model.train(), 17)(model(j.p.x), targets) * 17
    expected = sum(
        j_uncollapsed(j, part, targets[:, task], noise)
        for task, (part, noise) in enumerate(zip(parts, (0.1, 0.3), strict=True))
    )
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=0.0)


def j_uncollapsed(j, part, targets, noise):
    single = copy.copy(j)
    single.p = j.p._replace(y=targets, noise=torch.full((17,), noise))
    return single.uncollapsed(*part, None)


def test_lmc_has_the_sum_of_the_kls_and_the_tighter_bound_is_higher():
    j = Joint(21)
    parts, q_u, q_v = two_of(21)
    wrap = functools.partial(
        gpytorch.variational.LMCVariationalStrategy, num_tasks=3, num_latents=2, latent_dim=-1, jitter_val=0.0
    )
    model = multitask_gp(j, q_u, q_v, wrap)
    kls = [make_solve_gp(j.z, j.o, j.kernel, *part).variational_strategy.kl_divergence() for part in parts]
    torch.testing.assert_close(model.variational_strategy.kl_divergence(), sum(kls))
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3, has_global_noise=False)
    likelihood.task_noises = torch.tensor([0.1, 0.2, 0.3])
    targets = torch.stack([j.p.y, j.p.y.flip(0), -j.p.y], -1)
    q = model.train()(j.p.x)
    tight = TighterELBO(likelihood, model, 17)(q, targets)
    base = VariationalELBO(likelihood, model, 17)(q, targets)
    # With w_k = sum_p W_pk^2 / noise_p the gain is 1/2 sum (w d - log(1 + w d))
    weight = (model.variational_strategy.lmc_coefficients**2 / torch.tensor([0.1, 0.2, 0.3])).sum(-1, keepdim=True)
    ratio = weight * (j.p.Kff.diagonal() - j.projection().square().sum(0))
    torch.testing.assert_close(17 * (tight - base), 0.5 * (ratio - torch.log(1 + ratio)).sum(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_inside_botorch(num_outputs):
    models = pytest.importorskip("botorch.models")
    j = Joint(22)
    x = j.p.x / 3  # the unit cube
    batch_shape = torch.Size([2]) if num_outputs == 2 else torch.Size()
    strategy = functools.partial(
        SolveGPVariationalStrategy,
        orthogonal_points=j.o / 3,
        orthogonal_distribution=CholeskyVariationalDistribution(MV, batch_shape=batch_shape),
    )
    targets = torch.stack([j.p.y, j.p.y.flip(0)], -1)[:, :num_outputs]
    targets = (targets - targets.mean(0)) / targets.std(0)
    model = models.SingleTaskVariationalGP(
        x, targets, num_outputs=num_outputs, variational_strategy=strategy, inducing_points=j.z / 3
    )
    mll = TighterELBO(model.likelihood, model.model, 17)
    optimizer = torch.optim.Adam(mll.parameters(), 0.05)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        value = mll(model.model.train()(x), model.model.train_targets)
        (-value).sum().backward()
        optimizer.step()
        values.append(value.sum().item())
    assert values[-1] > values[0]
    inner = model.model.variational_strategy
    base = getattr(inner, "base_variational_strategy", inner)
    torch.testing.assert_close(inner.kl_divergence(), base.kl_divergence().sum())
    assert model.posterior(x[:4]).mean.shape == (4, num_outputs)
