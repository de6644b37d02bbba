"""What was silently wrong once, each with the case that showed it."""

from __future__ import annotations

import copy
import threading
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import (
    GridInterpolationKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
)
from linear_operator.utils.warnings import NumericalWarning

import tighter_gp
from tests.tools.factories import GP, CollapsedGP, make_gp, make_noise
from tests.tools.support import Q_FORMS, LargestOutput, double_problem, randomize_q

P = double_problem()
N, M = len(P.x), len(P.z)


# -- one sub-kernel in two places, and threads --------------------------------------------------------------------------


def shared_kernel():
    k = RBFKernel(ard_num_dims=2)
    return ScaleKernel(k) + ScaleKernel(k * LinearKernel()), k


def test_a_sub_kernel_in_two_places_is_trained_in_float32():
    values = {}
    for dtype in (torch.float64, torch.float32):
        kernel, shared = shared_kernel()
        model = CollapsedGP(P.x.to(dtype), P.y.to(dtype), P.z.clone(), kernel, make_noise(0.1)).to(dtype)
        before = shared.raw_lengthscale
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            (-mll(model(P.x.to(dtype)), P.y.to(dtype))).backward()
            optimizer.step()
        assert shared.raw_lengthscale is before
        assert isinstance(before, torch.nn.Parameter)
        assert before.dtype == dtype
        tighter_gp.predict(model, P.x.to(dtype))
        assert shared.raw_lengthscale is before
        values[dtype] = before.detach().double()
    assert (values[torch.float64] != 0).all()
    torch.testing.assert_close(values[torch.float32], values[torch.float64], rtol=0, atol=2e-3)


def test_four_threads_predict_with_one_float32_model():
    kernel, _ = shared_kernel()
    model = CollapsedGP(P.x.float(), P.y.float(), P.z.clone(), kernel, make_noise(1e-4)).float()
    parameters = dict(model.named_parameters())
    expected, found = tighter_gp.predict(model, P.x.float()), []

    def work():
        found.extend(tighter_gp.predict(model, P.x.float()).mean for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for mean in found:
        torch.testing.assert_close(mean, expected.mean)
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameter and parameter.dtype == torch.float32 for name, parameter in parameters.items())


# -- stale answers ------------------------------------------------------------------------------------------------------


def swap_kernel(model):
    model.covar_module = ScaleKernel(RBFKernel())
    model.covar_module.base_kernel.lengthscale = 0.3


def swap_mean(model):
    model.mean_module = LinearMean(2)


def swap_constraint(model):
    model.covar_module.base_kernel.raw_lengthscale_constraint = GreaterThan(1.5)


def swap_smoothness(model):
    model.covar_module.base_kernel.nu = 0.5


def swap_noise_constraint(model):
    model.likelihood.noise_covar.raw_noise_constraint = GreaterThan(0.5)


def swap_inducing_points(model):
    model.inducing_points = torch.nn.Parameter(P.z + 0.5)


@pytest.mark.parametrize(
    "swap", [swap_kernel, swap_mean, swap_constraint, swap_smoothness, swap_noise_constraint, swap_inducing_points]
)
def test_collapsed_gp_follows_what_is_swapped(swap):
    torch.manual_seed(3)
    model = tighter_gp.CollapsedGP(P.x, P.y, P.z, ScaleKernel(MaternKernel(1.5)), make_noise(0.1), ConstantMean())
    before = model.predict(P.x + 0.1).mean
    tighter_gp.predict(model, P.x)
    swap(model)
    fresh = tighter_gp.CollapsedGP(
        P.x, P.y, model.inducing_points.detach(), model.covar_module, model.likelihood, model.mean_module
    )
    expected = fresh.predict(P.x + 0.1).mean
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(model.predict(P.x + 0.1).mean, expected)
    torch.testing.assert_close(tighter_gp.predict(model, P.x + 0.1).mean, expected)


class Listed(gpytorch.means.Mean):
    """A mean with settings that are no tensors."""

    def __init__(self):
        super().__init__()
        self.weights, self._powers = [1.0, 2.0], {"first": np.ones(2)}

    def forward(self, x):
        return (x * x.new_tensor(self.weights) * torch.as_tensor(self._powers["first"]).to(x)).sum(-1)


@pytest.mark.parametrize(
    "change", [lambda mean: mean.weights.append(mean.weights.pop(0)), lambda mean: mean._powers["first"].fill(3.0)]
)
def test_collapsed_gp_follows_lists_and_arrays_that_change_in_place(change):
    model = tighter_gp.CollapsedGP(P.x, P.y, P.z, ScaleKernel(RBFKernel()), make_noise(0.1), Listed())
    before = model.predict(P.x + 0.1).mean
    change(model.mean_module)
    expected = copy.deepcopy(model).predict(P.x + 0.1).mean
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(model.predict(P.x + 0.1).mean, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_kernel_with_a_cache_of_its_own_follows_its_parameters_in_eval_mode():
    base = ScaleKernel(RBFKernel())
    kernel = GridInterpolationKernel(base, grid_size=30, num_dims=1, grid_bounds=[(-4.0, 4.0)])
    model = randomize_q(make_gp(P.z[:, :1], kernel, jitter_val=1e-4)).eval()
    x = P.x[:, :1]
    with torch.no_grad():
        tighter_gp.predict(model, x)
        model(x)
        base.base_kernel.lengthscale = 0.3
        base.outputscale = 2.0
        copied = copy.deepcopy(model).train().eval()
        expected = copied(x)
        torch.testing.assert_close(model(x).mean, expected.mean)
        torch.testing.assert_close(tighter_gp.predict(model, x).variance, expected.variance)


@pytest.mark.parametrize("form", Q_FORMS)
def test_q_of_a_training_step_follows_what_is_written_through_data(form):
    model = make_gp(P.z, distribution=Q_FORMS[form], jitter_val=1e-4)
    strategy = model.train().variational_strategy
    model(P.x)
    for parameter in strategy.distributions[0].parameters():
        parameter.data.mul_(1.3)
    torch.testing.assert_close(strategy.kl_divergence(), copy.deepcopy(model).variational_strategy.kl_divergence())


# -- collapsed models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["titsias", "tighter", "spherical"])
def test_missing_targets_of_a_collapsed_model_count_for_nothing(bound):
    missing = torch.zeros(N, dtype=torch.bool)
    missing[[1, 4, 5]] = True
    y = torch.where(missing, torch.nan, P.y)
    make = lambda x, y: CollapsedGP(x, y, P.z.clone(), ScaleKernel(RBFKernel()), make_noise(0.1), bound=bound)
    whole, part = make(P.x, y), make(P.x[~missing], P.y[~missing])
    with gpytorch.settings.observation_nan_policy("mask"):
        actual = tighter_gp.evaluate_bound(whole, whole.likelihood, P.x, y)
        q = tighter_gp.predict(whole, P.x)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(whole.likelihood, whole)
        with pytest.raises(NotImplementedError, match="drop the rows whose target is missing"):
            mll(whole(P.x), y)
        nobody = make(P.x, torch.full_like(y, torch.nan))
        assert tighter_gp.evaluate_bound(nobody, nobody.likelihood, P.x, nobody.train_targets) == 0
    expected = tighter_gp.evaluate_bound(part, part.likelihood, P.x[~missing], P.y[~missing])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(q.mean, tighter_gp.predict(part, P.x).mean)
    for call in (
        lambda: tighter_gp.evaluate_bound(whole, whole.likelihood, P.x, y),
        lambda: tighter_gp.predict(whole, P.x),
    ):
        with pytest.raises(ValueError, match=r"3 of \d+ targets are NaN"):
            call()
    with pytest.raises(ValueError, match="y holds NaN or infinity"):
        tighter_gp.collapsed_bound(RBFKernel(), P.z, P.x, y, torch.tensor(0.1), bound=bound)


@pytest.mark.parametrize(
    "around", [ScaleKernel, lambda kernel: kernel + RBFKernel(), lambda kernel: kernel * RBFKernel()]
)
@pytest.mark.parametrize("used_before", [False, True])
def test_a_kernel_around_ours_is_refused(around, used_before):
    model = CollapsedGP(P.x, P.y, P.z.clone(), ScaleKernel(RBFKernel()), make_noise(0.1))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    if used_before:
        mll(model.train()(P.x), P.y)
    model.covar_module = around(model.covar_module)
    with pytest.raises(TypeError, match="TighterInducingPointKernel"):
        mll(model.train()(P.x), P.y)
    for call in (tighter_gp.evaluate_bound, tighter_gp.diagnose):
        with pytest.raises(TypeError, match="TighterInducingPointKernel"):
            call(model, model.likelihood, P.x, P.y)
    with pytest.raises(TypeError, match="TighterInducingPointKernel"):
        tighter_gp.predict(model, P.x)


def test_a_latent_prior_without_a_closed_form_is_refused():
    prior = torch.distributions.Independent(torch.distributions.StudentT(torch.full((2,), 5.0)), 1)
    latents = tighter_gp.gplvm.VariationalLatents(torch.randn(20, 2), prior, sparse=False)
    with pytest.raises((TypeError, ValueError), match="closed-form KL"):
        tighter_gp.gplvm.CollapsedBayesianGPLVM(latents, torch.randn(5, 2), torch.randn(20, 3))


# -- blocks and random features -----------------------------------------------------------------------------------------


class Dropped(GP):
    """Features with dropout before the kernel; they are kept."""

    def __init__(self, make_strategy):
        super().__init__(make_strategy, ScaleKernel(RBFKernel()))
        self.features, self.calls, self.fixed = None, 0, None

    def forward(self, x):
        if self.fixed is None:
            self.calls += 1
            self.features = torch.nn.functional.dropout(torch.cat([x, x.sin()], -1), 0.4, self.training)
        else:
            self.features = self.fixed
        return super().forward(self.features)


def test_blocks_see_the_features_of_the_step():
    labels = torch.arange(N) // 3
    strategy = lambda model: tighter_gp.TighterVariationalStrategy(
        model, P.z, CholeskyVariationalDistribution(M), conditional=tighter_gp.Blocks(labels)
    )
    model, likelihood, index = randomize_q(Dropped(strategy)), make_noise(0.1), torch.arange(N)
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    value = mll(model(P.x, index=index), P.y)
    assert model.calls == 1
    # Written out for these features.
    features = model.features.detach()
    z, x = features[:M], features[M:]
    k = lambda a, b: model.covar_module(a, b).to_dense().detach()
    strategy = model.variational_strategy
    root = torch.linalg.cholesky(k(z, z) + strategy.jitter_val * torch.eye(M))
    A = torch.linalg.solve_triangular(root, k(z, x), upper=False)
    q = strategy._variational_distribution
    S = q.chol_variational_covar.tril().detach()
    mean, explained = A.T @ q.variational_mean.detach(), (S.T @ A).square().sum(0) + strategy.jitter_val
    residual = k(x, x) - A.T @ A
    misfit = (P.y - mean).square() + explained
    expected = -0.5 * (misfit / 0.1).sum() - 0.5 * N * torch.log(torch.tensor(2 * torch.pi * 0.1))
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        expected = expected - 0.5 * torch.logdet(torch.eye(len(rows)) + residual[rows][:, rows] / 0.1)
    expected = expected - strategy.kl_divergence().detach()
    torch.testing.assert_close(N * value.detach(), expected, rtol=1e-7, atol=1e-7)


# -- float32 ------------------------------------------------------------------------------------------------------------


def wide_data(dtype, width=1000):
    generator = torch.Generator().manual_seed(4)
    x = (torch.rand(200, 1, generator=generator, dtype=torch.float64) * width).float().double()
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype), x[:40].clone().to(dtype)


@pytest.mark.parametrize("kind", ["collapsed", "sparse"])
@pytest.mark.parametrize("outputscale", [1.0, 1000.0])
@pytest.mark.parametrize("make", [lambda: MaternKernel(0.5), lambda: MaternKernel(1.5), RBFKernel, RQKernel])
@pytest.mark.parametrize("width", [100, 300, 1000])
def test_float32_inputs_that_span_a_thousand_lengthscales(kind, outputscale, make, width):
    values, slopes = {}, {}
    for dtype in (torch.float64, torch.float32):
        x, y, z = wide_data(dtype, width)
        kernel = ScaleKernel(make()).to(dtype)
        kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 1.0
        likelihood = make_noise(0.1).to(dtype)
        if kind == "collapsed":
            value = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood, jitter_val=1e-4).bound() / len(x)
        else:
            model = randomize_q(make_gp(z, kernel, jitter_val=1e-4).to(dtype))
            value = tighter_gp.TighterELBO(likelihood, model, len(x))(model(x), y)
        value.backward()
        values[dtype] = value.item()
        slopes[dtype] = kernel.base_kernel.raw_lengthscale.grad.item()
    assert values[torch.float32] == pytest.approx(values[torch.float64], rel=1e-4)
    assert slopes[torch.float32] == pytest.approx(slopes[torch.float64], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matern_12_leaves_nothing_at_an_inducing_point_however_wide_the_inputs(dtype):
    x, y, _ = wide_data(dtype, 3000)
    model = tighter_gp.CollapsedGP(x, y, x, ScaleKernel(MaternKernel(0.5)).to(dtype), make_noise(1e-3).to(dtype))
    model.covar_module.outputscale = 1000.0
    model.likelihood.noise = 1e-3
    x = x.double()
    covariance = 1000 * torch.exp(-(x - x.mT).abs() / model.covar_module.base_kernel.lengthscale.double())
    noise = model.likelihood.noise.double() * torch.eye(len(x), dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), covariance + noise)
    assert model.bound().item() == pytest.approx(prior.log_prob(y.double()).item(), rel=1e-5)


@pytest.mark.parametrize(
    "make", [PeriodicKernel, lambda: PiecewisePolynomialKernel(q=0), lambda: RBFKernel() + LinearKernel()]
)
def test_float32_kernels_of_other_kinds_with_inputs_far_apart(make):
    values, slopes = {}, {}
    for dtype in (torch.float64, torch.float32):
        x, y, z = wide_data(dtype)
        kernel = ScaleKernel(make()).to(dtype)
        likelihood = make_noise(0.1).to(dtype)
        value = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood, jitter_val=1e-4).bound()
        value.backward()
        values[dtype] = value.item()
        slopes[dtype] = torch.cat([parameter.grad.double().flatten() for parameter in kernel.parameters()])
    assert values[torch.float32] == pytest.approx(values[torch.float64], rel=1e-4)
    torch.testing.assert_close(slopes[torch.float32], slopes[torch.float64], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("distribution", [NaturalVariationalDistribution, CholeskyVariationalDistribution])
def test_a_batch_of_distributions_starts_in_float32(distribution):
    batch = torch.Size([10])
    z = torch.rand(64, 2, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_gp(z, RBFKernel(), distribution=distribution, batch_shape=batch, jitter_val=1e-4).float()
        q = model(torch.rand(7, 2, dtype=torch.float32))
    assert q.mean.shape == (10, 7)
    assert torch.isfinite(q.mean).all()
    assert q.mean.abs().max() < 0.1  # the prior, but for a little noise
    torch.testing.assert_close(q.variance, torch.ones(10, 7, dtype=torch.float32), rtol=0, atol=1e-2)


# -- costs and warnings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar"])
def test_variance_of_half_of_the_points_takes_the_memory_of_the_covariance(conditional):
    count = 200
    model = randomize_q(make_gp(P.z, ScaleKernel(RBFKernel()), conditional=conditional, jitter_val=1e-4))
    x = torch.randn(count, 2)
    for training in (True, False):
        with LargestOutput() as sizes:
            half = model.train(training)(x, diag=False)[: count // 2].variance
        torch.testing.assert_close(half, model(x).variance[: count // 2])
        assert sizes.largest <= (count + M) ** 2


def one_step_of(kind):
    """A model whose inducing points are all one point, and a step of it."""
    z, kernel, likelihood = torch.zeros(M, 2), ScaleKernel(RBFKernel()), make_noise(0.1)
    if kind == "sparse":
        model = make_gp(z, kernel)
        return model, lambda: model(P.x)
    if kind == "collapsed":
        model = tighter_gp.CollapsedGP(P.x, P.y, z, kernel, likelihood)
        return model, lambda: (model.bound(), model.predict(P.x))
    model = CollapsedGP(P.x, P.y, z, kernel, likelihood)
    return model, lambda: (model(P.x), tighter_gp.predict(model, P.x))


@pytest.mark.parametrize("kind", ["sparse"])
def test_the_jitter_is_reported_once_per_model_as_linear_operator_does(kind):
    model, step = one_step_of(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step()
            for name, parameter in model.named_parameters():
                parameter.data += 0.1 * ("outputscale" in name)
        model.eval()
        step()
    found = [warning for warning in caught if "jitter" in str(warning.message).lower()]
    assert [warning.category for warning in found] == [NumericalWarning]


@pytest.mark.parametrize("form", [CholeskyVariationalDistribution, MeanFieldVariationalDistribution])
@pytest.mark.parametrize("kind", ["svgp", "solve_gp"])
def test_pseudo_points_are_there_or_not_and_a_training_step_is_traced(kind, form):
    q = [CholeskyVariationalDistribution(3), form(2)]
    make = lambda model: tighter_gp.SolveGPVariationalStrategy(model, P.z[:3], P.z[3:] + 0.1, *q)
    model = (
        GP(make, ScaleKernel(RBFKernel())) if kind == "solve_gp" else make_gp(P.z, distribution=form, jitter_val=1e-4)
    )
    model(P.x)
    strategy = model.variational_strategy
    for distribution in strategy.distributions:  # surer than the prior
        getattr(distribution, "chol_variational_covar", distribution.variational_mean).data.mul_(0.5)
    assert hasattr(strategy, "pseudo_points") == (form is CholeskyVariationalDistribution)
    if hasattr(strategy, "pseudo_points"):
        before = strategy.pseudo_points[1]
        strategy.distributions[0].variational_mean.data.add_(1.0)
        assert not torch.allclose(strategy.pseudo_points[1], before)  # none of other parameters
    else:
        with pytest.raises(NotImplementedError, match="need a CholeskyVariationalDistribution; got MeanField"):
            strategy.get_fantasy_model(P.x, P.y)

    class MeanAndVariance(torch.nn.Module):
        def __init__(self, gp):
            super().__init__()
            self.gp = gp

        def forward(self, x):
            output = self.gp(x)
            return output.mean, output.variance

    with gpytorch.settings.trace_mode(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(MeanAndVariance(model.train()), P.x, check_trace=False)
        for actual, expected in zip(traced(P.x), MeanAndVariance(model)(P.x), strict=True):
            torch.testing.assert_close(actual, expected)
