"""SOLVE-GP: two sets of inducing variables. Sizes: N=17, M_u=5, M_v=3, D=2."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import math
import pickle
import unittest
from pathlib import Path
from unittest.mock import MagicMock, patch

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
)
from linear_operator.utils.errors import NotPSDError
from tighter_gp.moments import Whitened

import tighter_gp
from tests import dense
from tests.factories import GP, make_gp, make_kernel, make_noise
from tighter_gp import SolveGPVariationalStrategy, TighterELBO
from tighter_gp.maths import solve_gp
from tighter_gp.maths.fused import fused_moments

DISTRIBUTIONS = (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    DeltaVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)
MU, MV = 5, 3


def make_solve_gp(
    z,
    o,
    kernel=None,
    q_u=None,
    q_v=None,
    *,
    distributions=(CholeskyVariationalDistribution, CholeskyVariationalDistribution),
    jitter_val: float | None = 0.0,
    mean: float = 0.0,
    batch_shape: torch.Size = torch.Size(),
    **kwargs,
) -> GP:
    """With ``q_u = (mean, root)`` and ``q_v`` likewise, the whitened distributions are set to these."""
    first, second = (
        kind(points.size(-2), batch_shape=batch_shape) for kind, points in zip(distributions, (z, o), strict=True)
    )
    model = GP(
        lambda model: SolveGPVariationalStrategy(model, z, o, first, second, jitter_val=jitter_val, **kwargs),
        kernel,
        mean,
    )
    if q_u is not None:
        set_cholesky(first, q_u)
        set_cholesky(second, q_v)
        model.variational_strategy.variational_params_initialized.fill_(1)
    return model


def set_cholesky(distribution, q) -> None:
    distribution.variational_mean.data.copy_(q[0])
    distribution.chol_variational_covar.data.copy_(q[1])


def joint_svgp(z, o, kernel, q_u, q_v, jitter_val, mean=0.0) -> GP:
    """GPyTorch's own SVGP on both sets of points, with a block-diagonal whitened covariance."""
    q = torch.cat([q_u[0], q_v[0]]), torch.block_diag(q_u[1], q_v[1])
    return make_gp(torch.cat([z, o]), kernel, q, strategy=VariationalStrategy, jitter_val=jitter_val, mean=mean)


class Joint:
    """A problem of tests.dense with its inducing points cut in two, every matrix written out."""

    def __init__(self, seed: int = 0, hetero: bool = False, kernel: str = "rbf"):
        p = dense.problem(seed, m=MU + MV, hetero=hetero, kernel=kernel)
        self.p, self.z, self.o = p, p.z[:MU], p.z[MU:]
        u, v = slice(MU), slice(MU, None)
        inverse = torch.linalg.inv(p.Kuu[u, u])
        self.Kuu, self.Kuf, self.Kuv = p.Kuu[u, u], p.Kuf[u], p.Kuu[u, v]
        self.Cvv = p.Kuu[v, v] - self.Kuv.T @ inverse @ self.Kuv
        self.cvf = p.Kuf[v] - self.Kuv.T @ inverse @ self.Kuf
        self.only_u = p._replace(z=self.z, Kuu=self.Kuu, Kuf=self.Kuf)
        Q = self.Kuf.T @ inverse @ self.Kuf
        self.only_u = self.only_u._replace(Q=Q, D=p.Kff - Q)

    @property
    def kernel(self):
        return make_kernel(self.p.kernel, self.p.variance, self.p.lengthscales)

    def projection(self):
        """H = [A; B] by the definitions."""
        A = torch.linalg.inv(torch.linalg.cholesky(self.Kuu)) @ self.Kuf
        B = torch.linalg.inv(torch.linalg.cholesky(self.Cvv)) @ self.cvf
        return torch.cat([A, B])

    def uncollapsed(self, q_u, q_v, m):
        """The bound at any q and scales, from unwhitened q(u) = N(mu, Su) and q(v) = N(mv, Sv) over N(0, Kuu), N(0, Cvv)."""
        p = self.p
        Lu, Lv = torch.linalg.cholesky(self.Kuu), torch.linalg.cholesky(self.Cvv)
        mu, Su = Lu @ q_u[0], Lu @ q_u[1] @ q_u[1].T @ Lu.T
        mv, Sv = Lv @ q_v[0], Lv @ q_v[1] @ q_v[1].T @ Lv.T
        Wu, Wv = torch.linalg.inv(self.Kuu) @ self.Kuf, torch.linalg.inv(self.Cvv) @ self.cvf
        d = (p.Kff - self.Kuf.T @ Wu - self.cvf.T @ Wv).diagonal()
        mean = Wu.T @ mu + Wv.T @ mv
        m = 1 / (1 + d / p.noise) if m is None else m
        variance = (Wu.T @ Su @ Wu + Wv.T @ Sv @ Wv).diagonal() + m * d
        expected = -0.5 * (torch.log(2 * math.pi * p.noise) + ((p.y - mean) ** 2 + variance) / p.noise).sum()
        kl_u, kl_v = dense.kl(mu, Su, 0 * mu, self.Kuu), dense.kl(mv, Sv, 0 * mv, self.Cvv)
        return expected - kl_u - kl_v + 0.5 * (1 + torch.log(m) - m).sum()

    def collapsed(self, penalty):
        """The bound at the best q, with explicit inverses and determinants."""
        p, H = self.p, self.projection()
        P_u, P_v = (torch.eye(len(X)) + X / p.noise @ X.T for X in (H[:MU], H[MU:]))
        quadratic = p.y @ torch.linalg.inv(H.T @ H + torch.diag(p.noise)) @ p.y
        logdets = torch.linalg.slogdet(P_u).logabsdet + torch.linalg.slogdet(P_v).logabsdet
        d = p.Kff.diagonal() - H.square().sum(0)
        return -0.5 * (torch.log(2 * math.pi * p.noise).sum() + quadratic + logdets) - penalty(d / p.noise)


def trace(ratio):
    return 0.5 * ratio.sum()


def logarithm(ratio):
    return 0.5 * torch.log(1 + ratio).sum()


def random_parts(seed: int = 0):
    return dense.random_q(MU, seed), dense.random_q(MV, seed + 100)


# ---------------------------------------------------------------------------------------------------------------------
# Golden values
# ---------------------------------------------------------------------------------------------------------------------


CASES = json.loads(Path(__file__).with_name("vectors.json").read_text())["solvegp"]


class Golden:
    def __init__(self, case):
        tensor = lambda name: torch.tensor(case[name])
        self.x, self.y, self.x_test = tensor("X"), tensor("y"), tensor("X_test")
        self.expected = {name: torch.tensor(value) for name, value in case["expected"].items()}
        self.likelihood, self.beta = make_noise(case["noise_variance"]), case["beta"]
        kernel = case["kernel"]
        self.make = lambda **kwargs: make_solve_gp(
            tensor("Z"),
            tensor("V"),
            make_kernel(kernel["type"], kernel["variance"], torch.tensor(kernel["lengthscales"])),
            (tensor("q_u_whitened_mean"), tensor("q_u_whitened_chol")),
            (tensor("q_v_whitened_mean"), tensor("q_v_whitened_chol")),
            jitter_val=case["jitter"],
            **kwargs,
        )

    def check(self, value, name, rtol=1e-9):
        torch.testing.assert_close(value.detach(), self.expected[name], rtol=rtol, atol=1e-12)


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def golden(request):
    return Golden(request.param)


def test_golden_bounds_at_q(golden):
    model = golden.make(conditional="beta")
    model.variational_strategy.conditional.beta = golden.beta
    golden.check(tighter_gp.evaluate_bound(model, golden.likelihood, golden.x, golden.y), "tsolvegp_at_q")
    base = tighter_gp.evaluate_bound(golden.make(), golden.likelihood, golden.x, golden.y, objective=VariationalELBO)
    golden.check(base, "solvegp_at_q")


def test_golden_kl_and_marginals(golden):
    model = golden.make(conditional="beta")
    model.variational_strategy.conditional.beta = golden.beta
    strategy = model.variational_strategy
    total = golden.expected["kl_u"] + golden.expected["kl_v"]
    torch.testing.assert_close(strategy.kl_divergence(), total, rtol=1e-9, atol=0.0)
    q = model.train()(golden.x)
    golden.check(q.lazy_covariance_matrix.residual, "d")
    golden.check(q.mean, "marginal_mean_train")
    golden.check(q.variance, "marginal_var_train_mnd")
    golden.check(golden.make().train()(golden.x).variance, "marginal_var_train_solvegp")


def test_golden_predictions(golden):
    model = golden.make(conditional="beta")
    model.variational_strategy.conditional.beta = golden.beta
    q = model.eval()(golden.x_test)
    golden.check(q.mean, "pred_mean")
    golden.check(q.variance, "pred_var_drop")
    dropped = tighter_gp.predict(model, golden.x_test)
    golden.check(dropped.mean, "pred_mean")
    golden.check(dropped.variance, "pred_var_drop")
    exact = tighter_gp.predict(model, golden.x_test, "exact", train_x=golden.x)
    golden.check(exact.variance, "pred_var_exact", rtol=1e-7)


def test_golden_collapsed(golden):
    model = golden.make()
    tighter_gp.set_optimal_q(model, golden.likelihood, golden.x, golden.y, batch_size=4)
    golden.check(tighter_gp.evaluate_bound(model, golden.likelihood, golden.x, golden.y), "tsolvegp_collapsed")
    base = tighter_gp.evaluate_bound(model, golden.likelihood, golden.x, golden.y, objective=VariationalELBO)
    golden.check(base, "solvegp_collapsed")
    golden.check(model.variational_strategy.whitened().mean, "collapsed_whitened_means_uv")


# ---------------------------------------------------------------------------------------------------------------------
# The equations, densely
# ---------------------------------------------------------------------------------------------------------------------


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
# The same q(f) as SVGP on both sets of points
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter_val", [0.0, 1e-3])
def test_values_and_gradients_are_those_of_svgp_on_the_union(jitter_val):
    j, (q_u, q_v) = Joint(6), random_parts(6)
    ours = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, jitter_val=jitter_val, mean=0.3)
    theirs = joint_svgp(j.z, j.o, j.kernel, q_u, q_v, jitter_val, mean=0.3)
    likelihood = make_noise(j.p.noise[0])
    values, gradients = [], []
    for model in (ours, theirs):
        loss = -VariationalELBO(likelihood, model.train(), 23)(model(j.p.x), j.p.y)
        values.append(loss)
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*values, rtol=1e-10, atol=0.0)
    mine, other = gradients
    prefix = "variational_strategy."
    q, v = prefix + "_variational_distribution.", prefix + "_orthogonal_distribution."
    stacked = {
        prefix + "inducing_points": torch.cat([mine[prefix + "inducing_points"], mine[prefix + "orthogonal_points"]]),
        q + "variational_mean": torch.cat([mine[q + "variational_mean"], mine[v + "variational_mean"]]),
    }
    root = other[q + "chol_variational_covar"]
    torch.testing.assert_close(mine[q + "chol_variational_covar"], root[:MU, :MU].tril(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(mine[v + "chol_variational_covar"], root[MU:, MU:].tril(), rtol=1e-8, atol=1e-10)
    for name, gradient in other.items():
        if not name.endswith("chol_variational_covar"):
            torch.testing.assert_close(stacked.get(name, mine[name]), gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("jitter_val", [0.0, 1e-3])
def test_predictions_are_those_of_svgp_on_the_union(jitter_val):
    j, (q_u, q_v) = Joint(7), random_parts(7)
    ours = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, jitter_val=jitter_val, mean=-0.4).eval()
    theirs = joint_svgp(j.z, j.o, j.kernel, q_u, q_v, jitter_val, mean=-0.4).eval()
    mine, other = ours(j.p.x), theirs(j.p.x)
    torch.testing.assert_close(mine.mean, other.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.covariance_matrix, other.covariance_matrix, rtol=1e-10, atol=1e-10)
    full = ours.train().variational_strategy(j.p.x, diag=False)
    torch.testing.assert_close(full.covariance_matrix, other.covariance_matrix, rtol=1e-10, atol=1e-10)


def test_gradient_through_predictions_reuses_the_cached_factors():
    j, (q_u, q_v) = Joint(8), random_parts(8)
    ours = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v).eval()
    theirs = joint_svgp(j.z, j.o, j.kernel, q_u, q_v, 0.0).eval()
    gradients = []
    for model in (ours, theirs):
        x = j.p.x.clone().requires_grad_()
        q = model(x)
        gradients.append(torch.autograd.grad((q.mean + q.variance).sum(), [x, model.covar_module.raw_outputscale]))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind_u", DISTRIBUTIONS)
@pytest.mark.parametrize("kind_v", DISTRIBUTIONS)
def test_every_pair_of_distributions_gives_its_own_kl_and_marginals(kind_u, kind_v):
    j = Joint(9)
    model = make_solve_gp(j.z, j.o, j.kernel, distributions=(kind_u, kind_v)).train()
    model(j.p.x)  # initialises
    generator = torch.Generator().manual_seed(0)
    for parameter in model.variational_parameters():
        change = 0.05 * torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(change.tril() if change.dim() > 1 else change)
    strategy = model.variational_strategy
    strategy.mark_initialized()
    parts = [strategy._variational_distribution(), strategy._orthogonal_distribution()]
    covariances = [
        torch.zeros(len(q.mean), len(q.mean)) if isinstance(q, gpytorch.distributions.Delta) else q.covariance_matrix
        for q in parts
    ]
    expected_kl = 0.0
    for q, S in zip(parts, covariances, strict=True):
        if S.any():
            expected_kl = expected_kl + dense.kl(q.mean, S, 0 * q.mean, torch.eye(len(S)))
        else:  # GPyTorch's convention for a point mass: minus the log density of the prior
            expected_kl = expected_kl + 0.5 * (q.mean @ q.mean + len(q.mean) * math.log(2 * math.pi))
    joint_kl = torch.distributions.kl_divergence(strategy.variational_distribution, strategy.prior_distribution)
    torch.testing.assert_close(strategy.kl_divergence(), expected_kl)
    torch.testing.assert_close(joint_kl, expected_kl)
    H, S = j.projection(), torch.block_diag(*covariances)
    q = model(j.p.x)
    torch.testing.assert_close(q.mean, H.T @ torch.cat([part.mean for part in parts]))
    torch.testing.assert_close(q.variance, (j.p.Kff - H.T @ H + H.T @ S @ H).diagonal())
    torch.testing.assert_close(model.eval()(j.p.x).covariance_matrix, j.p.Kff - H.T @ H + H.T @ S @ H)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_no_orthogonal_points_is_svgp(kind):
    p = dense.problem(10)
    ours = make_solve_gp(p.z, p.z[:0], make_kernel("rbf", 1.1, p.lengthscales), distributions=(kind, kind), mean=0.2)
    theirs = make_gp(p.z, make_kernel("rbf", 1.1, p.lengthscales), distribution=kind, mean=0.2)
    results = []
    for model in (ours, theirs):
        torch.manual_seed(1)  # of the first call's noise on the mean
        likelihood = make_noise(p.noise[0])
        value = TighterELBO(likelihood, model.train(), 19)(model(p.x), p.y)
        value.backward()
        gradients = [model.variational_strategy.inducing_points.grad, model.covar_module.raw_outputscale.grad]
        q = model.eval()(p.x[:6])
        results.append((value, gradients, q.mean, q.covariance_matrix))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


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


# ---------------------------------------------------------------------------------------------------------------------
# Cost and caches
# ---------------------------------------------------------------------------------------------------------------------


def factorised_sizes(run):
    """Sizes of all matrices factorised while ``run()`` runs."""
    factorize = MagicMock(wraps=torch.linalg.cholesky_ex)
    plain = MagicMock(wraps=torch.linalg.cholesky)
    with patch("torch.linalg.cholesky_ex", new=factorize), patch("torch.linalg.cholesky", new=plain):
        run()
    return [call.args[0].size(-1) for call in factorize.call_args_list + plain.call_args_list]


def test_a_training_step_factorises_the_two_blocks_and_nothing_larger():
    j = Joint(12)
    model = make_solve_gp(j.z, j.o, j.kernel).train()
    mll = TighterELBO(make_noise(0.1), model, 17)
    step = lambda: mll(model(j.p.x), j.p.y).backward()
    step()
    assert sorted(factorised_sizes(step)) == [MV, MU]


def test_predictions_factorise_once_and_follow_every_parameter():
    j, (q_u, q_v) = Joint(13), random_parts(13)
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v).eval()

    def predict():
        with torch.no_grad():
            return model(j.p.x[:4])

    assert sorted(factorised_sizes(predict)) == [MV, MU]
    for each in (predict, lambda: tighter_gp.predict(model, j.p.x[:4])):
        assert factorised_sizes(each) == []
    assert factorised_sizes(predict) == []
    first = predict()
    before = first.variance.clone()
    for change in (
        lambda: model.variational_strategy.orthogonal_points.data.add_(0.1),
        lambda: model.variational_strategy._orthogonal_distribution.chol_variational_covar.data.mul_(1.1),
        lambda: model.variational_strategy._variational_distribution.chol_variational_covar.data.mul_(1.1),
    ):
        change()
        after = predict().variance
        assert not torch.allclose(after, before)
        before = after
    fresh = make_solve_gp(j.z, j.o, j.kernel)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(j.p.x[:4]).variance, before)


def test_the_closed_form_factorises_blocks_only():
    j = Joint(14)
    model = make_solve_gp(j.z, j.o, j.kernel)
    sizes = factorised_sizes(lambda: tighter_gp.set_optimal_q(model, make_noise(0.1), j.p.x, j.p.y))
    assert max(sizes) == MU
    H = j.projection()
    assert max(factorised_sizes(lambda: solve_gp.solve_gp_log_prob(H, j.p.y, j.p.noise, MU))) == MU


def test_second_backward_pass_and_two_forward_passes():
    j = Joint(15)
    model = make_solve_gp(j.z, j.o, j.kernel).train()
    mll = TighterELBO(make_noise(0.1), model, 17)
    first = model(j.p.x)
    model(j.p.x[:3])
    value = mll(first, j.p.y)
    torch.testing.assert_close(value, mll(model(j.p.x), j.p.y))
    value.backward(retain_graph=True)
    value.backward()


# ---------------------------------------------------------------------------------------------------------------------
# GPyTorch's conformance suite
# ---------------------------------------------------------------------------------------------------------------------


def split_strategy(model, points, distribution, learn_inducing_locations=True):
    """Nine of the sixteen points for u, seven for v."""
    first, second = (type(distribution)(size, batch_shape=distribution.batch_shape) for size in (9, 7))
    return SolveGPVariationalStrategy(
        model, points[..., :9, :], points[..., 9:, :], first, second, learn_inducing_locations
    )


class Conformance(VariationalTestCase):
    """GPyTorch's tests; both Cholesky factors once a training pass and once in eval mode."""

    distribution_cls = CholeskyVariationalDistribution
    mll_cls = TighterELBO
    batch_shape = torch.Size([])
    factors_of_q = 0

    @property
    def strategy_cls(self):
        return split_strategy

    def setUp(self):
        torch.set_default_dtype(torch.float32)
        super().setUp()

    def _counts(self, mocks, cholesky):
        cg, cholesky_mock, ciq = mocks
        assert not cg.called
        assert not ciq.called
        sizes = [call.args[0].size(-1) for call in cholesky_mock.call_args_list]
        assert max(sizes) < 16
        assert len(sizes) == cholesky + self.factors_of_q

    def test_training_iteration(self, *args, **kwargs):
        mocks = super().test_training_iteration(*args, **kwargs)
        if self.factors_of_q == 0:
            self._counts(mocks, 4)

    def test_eval_iteration(self, *args, **kwargs):
        mocks = super().test_eval_iteration(*args, **kwargs)
        self._counts(mocks, 2)

    def test_fantasy_call(self, *args, **kwargs):
        if self.distribution_cls is CholeskyVariationalDistribution:
            super().test_fantasy_call(*args, **kwargs)
            return
        with pytest.raises(NotImplementedError):
            super().test_fantasy_call(*args, **kwargs)


class TestConformance(Conformance, unittest.TestCase):
    pass


class TestConformanceBase(Conformance, unittest.TestCase):
    mll_cls = VariationalELBO


class TestConformanceMeanField(Conformance, unittest.TestCase):
    distribution_cls = MeanFieldVariationalDistribution


class TestConformanceDelta(Conformance, unittest.TestCase):
    distribution_cls = DeltaVariationalDistribution


class TestConformanceTrilNatural(Conformance, unittest.TestCase):
    distribution_cls = TrilNaturalVariationalDistribution


class TestConformanceNatural(Conformance, unittest.TestCase):
    distribution_cls = NaturalVariationalDistribution
    factors_of_q = 4  # two for each natural distribution


class TestConformanceMultitask(Conformance, unittest.TestCase):
    """Inside a batch of two outputs."""

    batch_shape = torch.Size([2])

    @property
    def event_shape(self):
        return torch.Size([32, 2])

    @property
    def likelihood_cls(self):
        return functools.partial(gpytorch.likelihoods.MultitaskGaussianLikelihood, num_tasks=2)

    @property
    def strategy_cls(self):
        def make(*args, **kwargs):
            return gpytorch.variational.IndependentMultitaskVariationalStrategy(
                split_strategy(*args, **kwargs), num_tasks=2
            )

        return make

    def test_training_iteration(self, *args, **kwargs):
        kwargs["expected_batch_shape"] = kwargs.get("expected_batch_shape", self.batch_shape)[:-1]
        VariationalTestCase.test_training_iteration(self, *args, **kwargs)

    def test_eval_iteration(self, *args, **kwargs):
        kwargs["expected_batch_shape"] = kwargs.get("expected_batch_shape", self.batch_shape)[:-1]
        VariationalTestCase.test_eval_iteration(self, *args, **kwargs)

    def test_fantasy_call(self, *args, **kwargs):
        with pytest.raises(NotImplementedError):
            VariationalTestCase.test_fantasy_call(self, *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Batches and wrappers
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Conditionals, likelihoods, training
# ---------------------------------------------------------------------------------------------------------------------


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
    dropped = predict("drop").variance
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


# ---------------------------------------------------------------------------------------------------------------------
# Copies and fantasies
# ---------------------------------------------------------------------------------------------------------------------


def test_state_dict_round_trip():
    j, (q_u, q_v) = Joint(28), random_parts(28)
    model, other = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v), make_solve_gp(j.o.new_zeros(MU, 2), 0 * j.o, j.kernel)
    names = {name.rpartition("variational_strategy.")[2] for name in model.state_dict()}
    assert {"inducing_points", "orthogonal_points", "_orthogonal_distribution.variational_mean"} <= names
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(other.eval()(j.p.x).covariance_matrix, model.eval()(j.p.x).covariance_matrix)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_predict_the_same_and_are_separate(duplicate):
    j, (q_u, q_v) = Joint(29), random_parts(29)
    strategy = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v)
    strategy.train()(j.p.x)
    strategy.variational_strategy.kl_divergence()
    with torch.no_grad():
        before = strategy.eval()(j.p.x).mean
    twin = duplicate(strategy)
    with torch.no_grad():
        torch.testing.assert_close(twin(j.p.x).mean, before)
        twin.variational_strategy.orthogonal_points.data.add_(1.0)
        assert not torch.allclose(twin(j.p.x).mean, before)
        torch.testing.assert_close(strategy(j.p.x).mean, before)


def test_fixed_locations_are_buffers():
    j = Joint(30)
    model = make_solve_gp(j.z, j.o, j.kernel, learn_inducing_locations=False)
    assert not any("points" in name for name, _ in model.named_parameters())
    assert sum("points" in name for name in model.state_dict()) == 2


def test_one_dimensional_points_get_a_column():
    strategy = SolveGPVariationalStrategy(
        None,
        torch.linspace(0, 1, 4),
        torch.linspace(0.1, 0.9, 3),
        CholeskyVariationalDistribution(4),
        CholeskyVariationalDistribution(3),
    )
    assert strategy.inducing_points.shape == (4, 1)
    assert strategy.orthogonal_points.shape == (3, 1)


def test_fantasies_are_those_of_svgp_on_the_union():
    j = Joint(31)
    ours = make_solve_gp(j.z, j.o, j.kernel, jitter_val=1e-6)
    tighter_gp.set_optimal_q(ours, make_noise(0.1), j.p.x, j.p.y)
    q_u, q_v = ours.variational_strategy.whitened_parts()
    theirs = joint_svgp(j.z, j.o, j.kernel, (q_u.mean, q_u.root), (q_v.mean, q_v.root), 1e-6)
    new_x, new_y = j.p.x[:4] + 0.1, j.p.y[:4]
    predictions = []
    for model in (ours, theirs):
        model.likelihood = make_noise(0.1)
        torch.manual_seed(0)
        fantasy = model.eval().get_fantasy_model(new_x, new_y)
        assert not any(inputs.requires_grad for inputs in fantasy.train_inputs)
        predictions.append(fantasy(j.p.x).mean)
    torch.testing.assert_close(*predictions)


@pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (0, 2), (0, 3)])
def test_fantasies_without_a_cholesky_distribution_are_refused(kinds):
    j = Joint(32)
    model = make_solve_gp(j.z, j.o, j.kernel, distributions=[DISTRIBUTIONS[kind] for kind in kinds])
    model.likelihood = make_noise(0.1)
    with pytest.raises(NotImplementedError, match=r"CholeskyVariationalDistribution for both q\(u\) and q\(v\); got"):
        model.get_fantasy_model(j.p.x[:4], j.p.y[:4])


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda o: o[:, :1], ValueError, r"differ in their number only.*got \(5, 2\) and \(3, 1\)"),
        (lambda o: o.expand(4, 3, 2), ValueError, r"differ in their number only.*got \(5, 2\) and \(4, 3, 2\)"),
        (lambda o: o.float(), TypeError, r"dtype of the inducing points, torch.float64; got torch.float32"),
        (lambda o: o.to("meta"), TypeError, r"device of the inducing points, cpu; got meta"),
    ],
)
def test_orthogonal_points_that_do_not_fit(change, error, match):
    j = Joint()
    with pytest.raises(error, match=match):
        make_solve_gp(j.z, change(j.o), j.kernel)


def test_distributions_that_do_not_fit():
    j = Joint()
    q = CholeskyVariationalDistribution
    make = functools.partial(SolveGPVariationalStrategy, None, j.z, j.o)
    with pytest.raises(ValueError, match="orthogonal_distribution is over 5 variables for 3 points"):
        make(q(5), q(5))
    with pytest.raises(ValueError, match="variational_distribution is over 4 variables for 5 points"):
        make(q(4), q(3))
    with pytest.raises(ValueError, match=r"one batch shape; got \(\) and \(2,\)"):
        make(q(5), q(3, batch_shape=torch.Size([2])))
    same = q(5)
    with pytest.raises(ValueError, match="same object twice"):
        SolveGPVariationalStrategy(None, j.z, j.z + 1, same, same)


@pytest.mark.parametrize("jitter_val", [None, 1e-4])
def test_a_point_in_both_sets_works_with_jitter(jitter_val):
    j = Joint(33)
    o = torch.cat([j.z[1:2], j.o[1:]])
    model, likelihood = make_solve_gp(j.z, o, j.kernel, jitter_val=jitter_val), make_noise(j.p.noise[0])
    tighter_gp.set_optimal_q(model, likelihood, j.p.x, j.p.y)
    without = make_solve_gp(j.z, j.o[1:], j.kernel, jitter_val=jitter_val)
    tighter_gp.set_optimal_q(without, likelihood, j.p.x, j.p.y)
    # The duplicate explains next to nothing: the bound is what it is without it, up to the jitter's share.
    values = [tighter_gp.evaluate_bound(m, likelihood, j.p.x, j.p.y) for m in (model, without)]
    torch.testing.assert_close(*values, rtol=1e-2, atol=0.0)
    assert values[0] < dense.evidence(j.p)
    loss = -TighterELBO(likelihood, model.train(), 17)(model(j.p.x), j.p.y)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_a_covariance_that_cannot_be_factorised_names_the_pair():
    j = Joint(34)

    class Broken(gpytorch.kernels.RBFKernel):
        """More than perfectly correlated with itself at distance zero."""

        def forward(self, x1, x2, diag=False, **params):
            covar = super().forward(x1, x2, diag=diag, **params)
            if diag:
                return covar
            near = torch.cdist(x1, x2) < 1e-9
            off_diagonal = ~torch.eye(*near.shape, dtype=torch.bool) if near.size(0) == near.size(1) else True
            return torch.where(near & off_diagonal, 1.5 * covar, covar)

    model = make_solve_gp(j.z, torch.cat([j.o[:2], j.z[3:4]]), Broken())
    with pytest.raises(NotPSDError, match=r"C_OO.*inducing point 3 and orthogonal point 2") as info:
        model.train()(j.p.x)
    assert "jitter_val was 0" in str(info.value)
    with pytest.raises(NotPSDError, match="inducing point 3 and orthogonal point 2"):
        model.eval()(j.p.x)


def test_a_point_without_variance_is_not_taken_for_one_of_the_pair():
    j = Joint(36)
    covariance = torch.diag(torch.linspace(1.0, 9.0, MU + MV))
    covariance[0, 0] = 0.0
    # The less correlated pair has the larger covariance.
    covariance[MU + 2, MU + 1] = covariance[MU + 1, MU + 2] = 7.0
    covariance[MU + 1, 2] = covariance[2, MU + 1] = 0.9 * (covariance[2, 2] * covariance[MU + 1, MU + 1]).sqrt()
    text = make_solve_gp(j.z, j.o, j.kernel).variational_strategy._describe_closest(covariance)
    assert text == "Most alike are inducing point 2 and orthogonal point 1, with prior correlation 0.9."


def test_inputs_of_another_dimension_and_nan_are_refused():
    j = Joint(35)
    model = make_solve_gp(j.z, j.o, j.kernel)
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(ValueError, match=r"N x 2 like the inducing points; got \(17, 1\)"):
            model(j.p.x[:, :1])
        with pytest.raises(ValueError, match="NaN or infinity in 1 of 17 rows"):
            model(j.p.x.index_fill(0, torch.tensor([4]), math.nan))
