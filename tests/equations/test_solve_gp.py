"""The mathematics of two sets of inducing variables against dense formulas, and one operation with its own backward pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
)
from tighter_gp.maths.moments import Whitened

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_noise
from tests.tools.solve_gp import DISTRIBUTIONS, MU, MV, Joint, logarithm, make_solve_gp, random_parts, trace
from tighter_gp import TighterELBO
from tighter_gp.maths import solve_gp
from tighter_gp.maths.fused import fused_moments


@pytest.mark.parametrize("hetero", [False, True])
def test_bounds_are_the_unwhitened_definition(hetero):
    j, (q_u, q_v) = Joint(1, hetero), random_parts(1)
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v)
    likelihood = make_noise(j.p.noise if hetero else j.p.noise[0])
    tight = tighter_gp.evaluate_bound(model, likelihood, j.p.x, j.p.y, batch_size=6)
    base = tighter_gp.evaluate_bound(model, likelihood, j.p.x, j.p.y, batch_size=6, objective=VariationalELBO)
    torch.testing.assert_close(tight, j.uncollapsed(q_u, q_v, None), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(base, j.uncollapsed(q_u, q_v, torch.ones(17)), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("hetero", [False, True])
def test_closed_form_is_the_dense_one(hetero):
    j = Joint(2, hetero)
    H = j.projection()
    d = j.p.Kff.diagonal() - H.square().sum(0)
    base = solve_gp.solve_gp_bound(H, j.p.y, j.p.noise, d, MU)
    tight = solve_gp.tighter_solve_gp_bound(H, j.p.y, j.p.noise, d, MU)
    torch.testing.assert_close(base, j.collapsed(trace), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(tight, j.collapsed(logarithm), rtol=1e-10, atol=0.0)


def test_closed_form_is_the_bound_at_the_optimal_q():
    j = Joint(3, hetero=True)
    H = j.projection()
    q_u, q_v = solve_gp.optimal_solve_gp_whitened(H, j.p.y, j.p.noise, MU)
    value = j.uncollapsed((q_u.mean, q_u.root), (q_v.mean, q_v.root), None)
    torch.testing.assert_close(value, j.collapsed(logarithm), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("kind_v", DISTRIBUTIONS)
@pytest.mark.parametrize("kind_u", [CholeskyVariationalDistribution, MeanFieldVariationalDistribution])
def test_set_optimal_q_is_stationary_for_every_form(kind_u, kind_v):
    j = Joint(4)
    model = make_solve_gp(j.z, j.o, j.kernel, distributions=(kind_u, kind_v))
    likelihood = make_noise(j.p.noise[0])
    tighter_gp.set_optimal_q(model, likelihood, j.p.x, j.p.y)
    loss = -TighterELBO(likelihood, model.train(), 17)(model(j.p.x), j.p.y)
    gradients = torch.autograd.grad(loss, list(model.variational_parameters()))
    assert max(gradient.abs().max() for gradient in gradients) < 1e-8


def test_orthogonal_cholesky_is_the_cholesky_factor():
    p = dense.problem(5, m=MU + MV)
    torch.testing.assert_close(solve_gp.orthogonal_cholesky(p.Kuu, MU), torch.linalg.cholesky(p.Kuu))


@pytest.mark.parametrize("seed", range(40))
def test_order_of_the_bounds(seed):
    j = Joint(seed, hetero=seed % 2 == 1, kernel=("rbf", "matern32")[seed % 3 == 0])
    H = j.projection()
    d = (j.p.Kff.diagonal() - H.square().sum(0)).clamp_min(0.0)
    chain = [
        dense.f1(j.only_u),
        solve_gp.solve_gp_bound(H, j.p.y, j.p.noise, d, MU),
        solve_gp.tighter_solve_gp_bound(H, j.p.y, j.p.noise, d, MU),
        dense.f4(j.p),
        dense.evidence(j.p),
    ]
    for lower, upper in itertools.pairwise(chain):
        assert lower <= upper + 1e-8 * upper.abs()
    assert chain[1] < chain[2]


# ---------------------------------------------------------------------------------------------------------------------
# One operation with its own backward pass
# ---------------------------------------------------------------------------------------------------------------------


def moment_inputs(kind_u: str, kind_v: str, batch=()):
    j = Joint(11)

    def part(size, kind, seed):
        mean, root = dense.random_q(size, seed)
        mean, root = mean.expand(*batch, size).clone(), root.expand(*batch, size, size).clone()
        if batch:
            mean, root = mean + torch.arange(batch[0]).unsqueeze(-1), root + 0.1 * torch.arange(batch[0])[:, None, None]
        if kind == "root":
            return Whitened(mean.requires_grad_(), root=root.requires_grad_())
        if kind == "stddev":
            return Whitened(mean.requires_grad_(), stddev=root.diagonal(dim1=-1, dim2=-2).clone().requires_grad_())
        return Whitened(mean.requires_grad_())

    tensors = [j.p.Kuu.clone(), j.p.Kuf.clone(), j.p.Kff.diagonal().clone()]
    return [tensor.requires_grad_() for tensor in tensors], part(MU, kind_u, 1), part(MV, kind_v, 2)


@pytest.mark.parametrize("batch", [(), (4,)])
@pytest.mark.parametrize("kind_u", ["root", "stddev", "point"])
@pytest.mark.parametrize("kind_v", ["root", "stddev", "point"])
def test_fused_moments_equal_the_plain_ones_with_gradients(kind_u, kind_v, batch):
    (covar, cross, variance), q_u, q_v = moment_inputs(kind_u, kind_v, batch)
    inputs = [covar, cross, variance, *(t for q in (q_u, q_v) for t in q if t is not None)]
    plain = solve_gp.solve_gp_moments(solve_gp.orthogonal_cholesky(covar, MU), cross, variance, q_u, q_v)
    chol = torch.linalg.cholesky(covar.detach())
    fused = fused_moments(covar, chol, cross, variance, q_u, q_v)
    weights = [torch.randn(fused.mean.shape) for _ in range(3)]
    gradients = []
    for result in (plain, fused):
        total = sum((w * value).sum() for w, value in zip(weights, result, strict=True))
        gradients.append(torch.autograd.grad(total, inputs))
    torch.testing.assert_close(fused, plain)
    symmetric = lambda gradient: 0.5 * (gradient + gradient.mT)
    torch.testing.assert_close(symmetric(gradients[1][0]), symmetric(gradients[0][0]), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gradients[1][1:], gradients[0][1:], rtol=1e-8, atol=1e-10)


def test_a_clamped_residual_passes_no_gradient():
    (covar, cross, _), q_u, q_v = moment_inputs("root", "root")
    variance = torch.zeros(17, requires_grad=True)
    fused = fused_moments(covar, torch.linalg.cholesky(covar.detach()), cross, variance, q_u, q_v)
    assert not fused.residual.any()
    gradient, other = torch.autograd.grad(fused.residual.sum(), [variance, cross])
    assert not gradient.any()
    assert not other.any()
