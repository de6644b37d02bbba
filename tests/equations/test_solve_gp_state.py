"""SOLVE-GP: copies, fantasies and input that is refused."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
)
from linear_operator.utils.errors import NotPSDError

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_noise
from tests.tools.solve_gp import DISTRIBUTIONS, MU, MV, Joint, make_solve_gp, random_parts
from tighter_gp import SolveGPVariationalStrategy, TighterELBO

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


def test_a_kept_q_of_f_stays_what_it_was():
    j, (q_u, q_v) = Joint(33), random_parts(33)
    model = make_solve_gp(j.z, j.o, j.kernel, q_u, q_v).eval()
    kept, expected = model(j.p.x), model(j.p.x).covariance_matrix
    for distribution in model.variational_strategy.distributions:
        distribution.chol_variational_covar.data.mul_(0.5)
    assert (model(j.p.x).covariance_matrix - expected).abs().max() > 1e-2
    torch.testing.assert_close(kept.covariance_matrix, expected)


@pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (0, 2), (0, 3)])
def test_fantasies_without_a_cholesky_distribution_are_refused(kinds):
    j = Joint(32)
    model = make_solve_gp(j.z, j.o, j.kernel, distributions=[DISTRIBUTIONS[kind] for kind in kinds])
    model.likelihood = make_noise(0.1)
    with pytest.raises(NotImplementedError, match=r"need a CholeskyVariationalDistribution; got"):
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
