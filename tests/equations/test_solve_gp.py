"""Two sets of inducing variables: golden values, dense formulas, the same q(f) as SVGP on both sets, batches and wrappers."""

from __future__ import annotations

import itertools
import math

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, MeanFieldVariationalDistribution

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_kernel, make_noise
from tests.tools.golden import VECTORS
from tests.tools.solve_gp import DISTRIBUTIONS, MU, Joint, joint_svgp, logarithm, make_solve_gp, random_parts, trace
from tighter_gp import SolveGPVariationalStrategy, TighterELBO
from tighter_gp.maths import solve_gp


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


# ---- Golden values ----------------------------------------------------------------------------------------------------


CASES = VECTORS["solvegp"]


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

    def with_beta(self):
        model = self.make(conditional="beta")
        model.variational_strategy.conditional.beta = self.beta
        return model

    def check(self, value, name, rtol=1e-9):
        torch.testing.assert_close(value.detach(), self.expected[name], rtol=rtol, atol=1e-12)


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def golden(request):
    return Golden(request.param)


def test_golden_bounds_at_q(golden):
    golden.check(tighter_gp.evaluate_bound(golden.with_beta(), golden.likelihood, golden.x, golden.y), "tsolvegp_at_q")
    base = tighter_gp.evaluate_bound(golden.make(), golden.likelihood, golden.x, golden.y, objective=VariationalELBO)
    golden.check(base, "solvegp_at_q")


def test_golden_kl_and_marginals(golden):
    model = golden.with_beta()
    total = golden.expected["kl_u"] + golden.expected["kl_v"]
    torch.testing.assert_close(model.variational_strategy.kl_divergence(), total, rtol=1e-9, atol=0.0)
    q = model.train()(golden.x)
    golden.check(q.lazy_covariance_matrix.residual, "d")
    golden.check(q.mean, "marginal_mean_train")
    golden.check(q.variance, "marginal_var_train_mnd")
    golden.check(golden.make().train()(golden.x).variance, "marginal_var_train_solvegp")


def test_golden_predictions(golden):
    model = golden.with_beta()
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


# ---- The same q(f) as SVGP on both sets of points ---------------------------------------------------------------------


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
    torch.testing.assert_close(strategy.kl_divergence(), expected_kl)
    if all(S.any() for S in covariances):
        joint_kl = torch.distributions.kl_divergence(strategy.variational_distribution, strategy.prior_distribution)
        torch.testing.assert_close(joint_kl, expected_kl)
    H, S = j.projection(), torch.block_diag(*covariances)
    q = model(j.p.x)
    torch.testing.assert_close(q.mean, H.T @ torch.cat([part.mean for part in parts]))
    torch.testing.assert_close(q.variance, (j.p.Kff - H.T @ H + H.T @ S @ H).diagonal())
    torch.testing.assert_close(model.eval()(j.p.x).covariance_matrix, j.p.Kff - H.T @ H + H.T @ S @ H)


# ---- Cost and caches --------------------------------------------------------------------------------------------------


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


def test_lmc_has_the_sum_of_the_kls_and_the_tighter_bound_is_higher():
    j = Joint(21)
    parts, q_u, q_v = two_of(21)
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v, batch_shape=torch.Size([2]))
    model.variational_strategy = gpytorch.variational.LMCVariationalStrategy(
        model.variational_strategy, num_tasks=3, num_latents=2, latent_dim=-1, jitter_val=0.0
    )
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


# ---- Bad input --------------------------------------------------------------------------------------------------------


def test_fixed_locations_are_buffers_and_one_dimensional_points_get_a_column():
    q = [CholeskyVariationalDistribution(4), CholeskyVariationalDistribution(3)]
    points = torch.linspace(0, 1, 4), torch.linspace(0.1, 0.9, 3)
    strategy = SolveGPVariationalStrategy(None, *points, *q, learn_inducing_locations=False)
    assert not any("points" in name for name, _ in strategy.named_parameters())
    assert sum("points" in name for name in strategy.state_dict()) == 2
    assert strategy.all_points().shape == (7, 1)


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
