"""SOLVE-GP: golden values, the same q(f) as SVGP on both sets of points, what a step costs, what is cached."""

from __future__ import annotations

import math
from unittest.mock import MagicMock, patch

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tests.tools.golden import VECTORS
from tests.tools.solve_gp import DISTRIBUTIONS, MU, MV, Joint, joint_svgp, make_solve_gp, random_parts
from tighter_gp import TighterELBO
from tighter_gp.maths import solve_gp

# ---------------------------------------------------------------------------------------------------------------------
# Golden values
# ---------------------------------------------------------------------------------------------------------------------


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


def test_the_joint_of_two_mean_field_distributions_has_their_variances():
    parts = [gpytorch.variational.MeanFieldVariationalDistribution(size) for size in (3, 2)]
    for part, value in zip(parts, (0.5, 3.0), strict=True):
        part._variational_stddev.data.fill_(value)
    points = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    make = lambda model: tighter_gp.SolveGPVariationalStrategy(model, points[:3], points[3:], *parts)
    joint = GP(make, gpytorch.kernels.RBFKernel()).variational_strategy.variational_distribution
    torch.testing.assert_close(joint.variance, torch.tensor([0.25, 0.25, 0.25, 9.0, 9.0]))
