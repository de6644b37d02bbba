"""Fantasies: q(f) conditioned on new observations, by the rule for Gaussians."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.utils.warnings import NumericalWarning

from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.solve_gp import Joint, make_solve_gp, random_parts

NOISE = 0.07
NEW_X = torch.tensor([[0.3, 2.5], [1.1, 0.4], [2.7, 1.9]])
NEW_Y = torch.tensor([1.5, -0.5, 0.8])
TEST = torch.tensor([[0.2, 0.1], [1.4, 1.6], [2.9, 2.2], [0.4, 2.4]])


def svgp():
    p = dense.problem(seed=2)
    mean, covariance = dense.optimal_q(p)
    q = mean, torch.linalg.cholesky(covariance)
    model = make_gp(p.z, make_kernel("rbf", p.variance, p.lengthscales), q, jitter_val=0.0)
    return p, torch.linalg.cholesky(p.Kuu), p.z, mean, covariance, model


def solve_gp():
    j, (q_u, q_v) = Joint(31), random_parts(31)
    q_u, q_v = ((mean, 0.2 * root) for mean, root in (q_u, q_v))
    lower = torch.linalg.cholesky(j.p.Kuu)  # Z before O: its blocks are those of SOLVE-GP
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v)
    covariance = torch.block_diag(q_u[1] @ q_u[1].mT, q_v[1] @ q_v[1].mT)
    return j.p, lower, j.p.z, torch.cat([q_u[0], q_v[0]]), covariance, model


def conditioned(p, lower, z, mean, covariance, new_x=NEW_X, new_y=NEW_Y):
    """Mean and covariance at the test points, given the new observations."""
    k = dense.KERNELS[p.kernel]
    x = torch.cat([new_x, TEST])
    A = torch.linalg.inv(lower) @ k(z, x, p.variance, p.lengthscales)
    f_mean = A.T @ mean
    f_covar = k(x, x, p.variance, p.lengthscales) - A.T @ A + A.T @ covariance @ A
    old, new = slice(len(new_x)), slice(len(new_x), None)
    gain = f_covar[new, old] @ torch.linalg.inv(f_covar[old, old] + NOISE * torch.eye(len(new_x)))
    return f_mean[new] + gain @ (new_y - f_mean[old]), f_covar[new, new] - gain @ f_covar[old, new]


@pytest.fixture(params=[svgp, solve_gp])
def case(request):
    *known, model = request.param()
    model.likelihood = make_noise(NOISE)
    return known, model.eval()


def check(fantasy, expected):
    found = fantasy(TEST)
    torch.testing.assert_close(found.mean, expected[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.covariance_matrix, expected[1], rtol=1e-6, atol=1e-7)


def test_a_fantasy_is_q_conditioned_on_the_new_observations(case):
    known, model = case
    expected = conditioned(*known)
    fantasy = model.get_fantasy_model(NEW_X, NEW_Y)
    check(fantasy, expected)
    with gpytorch.settings.fast_pred_var():
        check(model.get_fantasy_model(NEW_X, NEW_Y), expected)
    check(copy.deepcopy(fantasy), expected)
    check(fantasy.train().eval(), expected)


def test_observations_may_come_one_after_the_other(case):
    known, model = case
    fantasy = model.get_fantasy_model(NEW_X[:1], NEW_Y[:1]).get_fantasy_model(NEW_X[1:], NEW_Y[1:])
    check(fantasy, conditioned(*known))
    check(fantasy.train().eval(), conditioned(*known))


@pytest.mark.parametrize("own_inputs", [False, True])
def test_a_batch_of_fantasies(case, own_inputs):
    known, model = case
    targets = torch.stack([NEW_Y, NEW_Y + 1])
    inputs = torch.stack([NEW_X, NEW_X.flip(-1)]) if own_inputs else NEW_X
    found = model.get_fantasy_model(inputs, targets)(TEST.expand(2, *TEST.shape))
    for row in range(2):
        mean, covar = conditioned(*known, inputs[row] if own_inputs else inputs, targets[row])
        torch.testing.assert_close(found.mean[row], mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.covariance_matrix[row], covar, rtol=1e-6, atol=1e-7)


def test_gradients_in_the_new_inputs(case):
    known, model = case
    gradients = []
    for predict in (
        lambda x: model.get_fantasy_model(x, NEW_Y)(TEST),
        lambda x: MultivariateNormal(*conditioned(*known, x)),
    ):
        x = NEW_X.clone().requires_grad_()
        found = predict(x)
        gradients += torch.autograd.grad((found.mean * TEST[:, 0]).sum() + found.variance.sum(), x)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_without_observations_it_is_q():
    *_, model = svgp()
    model.likelihood, q = make_noise(NOISE), model.eval()(TEST)
    check(model.variational_strategy.amortized_exact_gp(), (q.mean, q.covariance_matrix))


def test_a_q_wider_than_the_prior_is_said_and_keeps_its_mean():
    p, *_, model = svgp()
    model.likelihood = make_noise(NOISE)
    model.variational_strategy._variational_distribution.chol_variational_covar.data.copy_(2 * torch.eye(len(p.z)))
    with pytest.warns(NumericalWarning, match="wider than the prior"):
        gp = model.variational_strategy.amortized_exact_gp()
    torch.testing.assert_close(gp(TEST).mean, model.eval()(TEST).mean, rtol=1e-4, atol=1e-5)
