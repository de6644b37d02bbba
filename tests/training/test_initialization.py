"""A start from the data."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from linear_operator.operators import DiagLinearOperator

import tighter_gp
from tighter_gp.likelihoods import BernoulliLogitLikelihood

N, M = 300, 12


def data():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 2, generator=generator)
    y = 5 + torch.sin(3 * x[:, 0]) * torch.cos(x[:, 1]) + 0.05 * torch.randn(N, generator=generator)
    return x, y


class GP(gpytorch.models.ApproximateGP):
    def __init__(self, points, solve_gp=False, conditional="optimal", scale=1.0):
        q = [gpytorch.variational.CholeskyVariationalDistribution(M) for _ in range(1 + solve_gp)]
        kind = tighter_gp.SolveGPVariationalStrategy if solve_gp else tighter_gp.TighterVariationalStrategy
        super().__init__(kind(self, *[points.clone()] * (1 + solve_gp), *q, conditional=conditional))
        self.mean_module, self.scale = gpytorch.means.ConstantMean(), scale
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        x = self.scale * x
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("solve_gp", [False, True])
def test_the_bound_is_higher_and_frozen_parameters_stay(solve_gp, as_array):
    x, y = data()
    model, likelihood = GP(x[:M], solve_gp), gpytorch.likelihoods.GaussianLikelihood()
    model.covar_module.raw_outputscale.requires_grad_(False)
    model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
    tighter_gp.set_optimal_q(model, likelihood, x, y)
    before = tighter_gp.evaluate_bound(model, likelihood, x, y)
    outputscale, lengthscale = model.covar_module.outputscale.item(), model.covar_module.base_kernel.lengthscale.clone()
    inputs, targets = (x.numpy(), y.numpy().astype(np.float32)) if as_array else (x, y)
    tighter_gp.initialize(model, likelihood, inputs, targets, num_rows_used=200)
    assert tighter_gp.evaluate_bound(model, likelihood, x, y) > before + N
    assert abs(model.mean_module.constant.item() - 5) < 0.5
    assert likelihood.noise < 0.5
    assert model.covar_module.outputscale.item() == outputscale
    torch.testing.assert_close(model.covar_module.base_kernel.lengthscale, lengthscale)
    assert all(parameter.grad is None for parameter in [*model.parameters(), *likelihood.parameters()])
    points = model.variational_strategy.all_points()
    assert len(points.unique(dim=0)) == len(points)


class Doubled(gpytorch.likelihoods.GaussianLikelihood):
    def _shaped_noise_covar(self, *args, **kwargs):
        return 2 * super()._shaped_noise_covar(*args, **kwargs)


class Growing(gpytorch.likelihoods.GaussianLikelihood):
    def _shaped_noise_covar(self, shape, *args, **kwargs):
        return DiagLinearOperator(torch.linspace(0.1, 2.0, N)[: shape[-1]].expand(shape))


@pytest.mark.parametrize("kind", [gpytorch.likelihoods.GaussianLikelihood, Doubled, Growing])
@pytest.mark.parametrize("num_missing", [0, 20])
def test_q_is_the_optimal_one_for_the_noise_that_the_likelihood_has(kind, num_missing):
    x, y = data()
    y[5 : 5 + num_missing] = torch.nan
    model, likelihood = GP(x[:M]), kind()
    likelihood.noise = 0.1
    for parameter in [*model.hyperparameters(), *likelihood.parameters()]:
        parameter.requires_grad_(False)
    with gpytorch.settings.observation_nan_policy("fill"):
        tighter_gp.initialize(model, likelihood, x, y)
    noise = {Doubled: torch.full((N,), 0.2), Growing: torch.linspace(0.1, 2.0, N)}.get(kind, torch.full((N,), 0.1))
    seen, z = ~y.isnan(), model.variational_strategy.inducing_points
    lengthscale, scale = model.covar_module.base_kernel.lengthscale, model.covar_module.outputscale
    k = lambda a, b: scale * torch.exp(-0.5 * torch.cdist(a / lengthscale, b / lengthscale).square())
    root = torch.linalg.cholesky(k(z, z) + model.variational_strategy.jitter_val * torch.eye(M))
    projection = torch.linalg.solve_triangular(root, k(z, x[seen]), upper=False)
    covariance = torch.linalg.inv(torch.eye(M) + (projection / noise[seen]) @ projection.mT)
    mean = covariance @ projection @ (y[seen] / noise[seen])
    q = model.variational_strategy.variational_distribution
    torch.testing.assert_close(q.mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.covariance_matrix, covariance, rtol=1e-5, atol=1e-7)


def test_what_does_not_apply_is_left_as_it_is():
    x, y = data()
    model, likelihood = GP(x[:M], scale=2.0), gpytorch.likelihoods.GaussianLikelihood()
    state = {name: value.clone() for name, value in model.state_dict().items() if "covar" in name or "mean_mod" in name}
    tighter_gp.initialize(model, likelihood, x, y)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    classifier = GP(x[:M])
    tighter_gp.initialize(classifier, BernoulliLogitLikelihood(), x, (y > 5).double())
    assert not torch.equal(classifier.variational_strategy.inducing_points, x[:M])


def test_collapsed_models_start_from_the_data_too():
    x, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model = tighter_gp.CollapsedGP(x, y, x[:M], kernel, likelihood, gpytorch.means.ConstantMean())
    before = model.bound()
    tighter_gp.initialize(model, likelihood, x, y)
    assert model.bound() > before + N


def test_fit_asks_for_it():
    x, y = data()
    model, likelihood = GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood()
    history = tighter_gp.fit(model, likelihood, x, y, epochs=1, batch_size=100, initialize=True)
    other = GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood()
    assert history.loss[0] < tighter_gp.fit(*other, x, y, epochs=1, batch_size=100).loss[0]
    with pytest.raises(ValueError, match=r"initialize=True needs arrays: call tighter_gp"):
        tighter_gp.fit(model, likelihood, torch.utils.data.DataLoader([(x, y)]), initialize=True)


@pytest.mark.parametrize("name", ["variational_mean", "chol_variational_covar"])
def test_a_frozen_distribution_stays(name):
    x, y = data()
    model, likelihood = GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood()
    model(x)
    frozen = getattr(model.variational_strategy._variational_distribution, name).requires_grad_(False)
    before = frozen.clone()
    tighter_gp.initialize(model, likelihood, x, y)
    assert torch.equal(frozen, before)


def test_missing_targets_are_left_out_and_others_are_refused_before_anything_changes():
    x, y = data()
    missing = torch.arange(0, N, 7)
    holes, seen = y.index_fill(0, missing, torch.nan), torch.ones(N, dtype=torch.bool).index_fill_(0, missing, False)
    make = lambda: (GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood())
    model, likelihood = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for call in (tighter_gp.initialize, lambda *a: tighter_gp.fit(*a, steps=1, initialize=True)):
        with pytest.raises(ValueError, match=r"43 of 300 values of y are NaN or infinite"):
            call(model, likelihood, x, holes)
        assert all(map(torch.equal, model.parameters(), before))
    with gpytorch.settings.observation_nan_policy("mask"):
        tighter_gp.initialize(model, likelihood, x, holes)
        bound = tighter_gp.evaluate_bound(model, likelihood, x, holes)
        tighter_gp.set_optimal_q(model, likelihood, x, holes)
        best = tighter_gp.evaluate_bound(model, likelihood, x, holes)
    torch.testing.assert_close(bound, best, rtol=1e-6, atol=1e-3)
    assert model.mean_module.constant.item() == pytest.approx(y[seen].mean().item(), abs=1.0)


def test_a_learned_beta_starts_at_one_over_the_curvature():
    x, y = data()
    labels, likelihood = (y > 5).double(), BernoulliLogitLikelihood()
    model = GP(x[:M], conditional="beta")
    seen = []
    record = lambda step: seen.append(model.variational_strategy.conditional.beta.item())
    options = {"steps": 1, "lr": 1e-6, "callbacks": [record], "batch_size": None}
    tighter_gp.fit(model, likelihood, x, labels, **options)
    # The logistic curvature p (1 - p), in expectation over the prior's f of variance log 2.
    f = model.mean_module.constant.item() + np.sqrt(np.log(2)) * np.random.default_rng(0).standard_normal(200_000)
    p = 1 / (1 + np.exp(-f))
    assert seen[0] == pytest.approx(1 / (p * (1 - p)).mean(), rel=0.02)
    model.variational_strategy.conditional.beta = 3.0
    tighter_gp.fit(model, likelihood, x, labels, **options)
    assert seen[1] == pytest.approx(3.0, rel=1e-3)


def test_two_sets_of_different_sizes_are_both_placed():
    x, y = data()
    model = GP(x[:M], solve_gp=True)
    strategy = model.variational_strategy
    strategy.inducing_points = torch.nn.Parameter(x[:3].clone())
    strategy._variational_distribution = gpytorch.variational.CholeskyVariationalDistribution(3)
    tighter_gp.initialize(model, gpytorch.likelihoods.GaussianLikelihood(), x, y)
    expected = tighter_gp.inducing.kmeans(x, 3 + M, seed=0)
    assert torch.equal(strategy.inducing_points, expected[:3])
    assert torch.equal(strategy.orthogonal_points, expected[3:])


def test_more_points_than_rows_stay_where_they_are():
    x, y = data()
    model = GP(x[:M])
    tighter_gp.initialize(model, gpytorch.likelihoods.GaussianLikelihood(), x[: M - 2], y[: M - 2])
    assert torch.equal(model.variational_strategy.inducing_points, x[:M])


def test_hyperparameters_that_fail_on_the_way_stay_as_they_were(monkeypatch, caplog):
    x, y = data()
    model, likelihood = GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood()

    def fail(*args):
        raise FloatingPointError("not a number")

    monkeypatch.setattr("tighter_gp.training.initialization.iterate", fail)
    noise, outputscale = likelihood.noise.item(), model.covar_module.outputscale.item()
    tighter_gp.initialize(model, likelihood, x, y)
    assert "the hyperparameters stay as they were: not a number" in caplog.text
    assert (likelihood.noise.item(), model.covar_module.outputscale.item()) == (noise, outputscale)
    assert model.mean_module.constant.item() == pytest.approx(y.mean().item())


def test_a_beta_that_is_frozen_or_one_of_several_stays():
    x, y = data()
    labels = (y > 5).double()
    model = GP(x[:M], conditional="beta")
    model.variational_strategy.conditional.raw_beta.requires_grad_(False)
    before = model.variational_strategy.conditional.beta.item()
    tighter_gp.fit(model, BernoulliLogitLikelihood(), x, labels, steps=1, batch_size=None)
    assert model.variational_strategy.conditional.beta.item() == before


@pytest.mark.parametrize("batched_inputs", [False, True])
def test_a_batch_of_models_keeps_all_but_shared_points(batched_inputs):
    x, y = data()
    shape = torch.Size([2])
    q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=shape)
    model, likelihood = GP(x[:M]), gpytorch.likelihoods.GaussianLikelihood(batch_shape=shape)
    model.variational_strategy = tighter_gp.TighterVariationalStrategy(model, x[:M].clone(), q)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = x.expand(2, N, 2) if batched_inputs else x
    tighter_gp.initialize(model, likelihood, inputs, torch.stack([y, -y]))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == (set() if batched_inputs else {"variational_strategy.inducing_points"})
    with pytest.raises(ValueError, match=rf"each of the {N} rows of x; got \(2, 9\)"):
        tighter_gp.initialize(model, likelihood, x, torch.zeros(2, 9))


class Scaled(GP):
    def __call__(self, x, *args, **kwargs):
        return super().__call__((x - 10) / 5, *args, **kwargs)


class Behind(torch.nn.Module):
    """A GP behind a network, GPyTorch's pattern of deep kernel learning."""

    def __init__(self, gp):
        super().__init__()
        self.net, self.gp = torch.nn.Linear(2, 2), gp

    def forward(self, x):
        return self.gp(self.net(x))


@pytest.mark.parametrize("make", [lambda x: Scaled(x), lambda x: Behind(GP(x))])
def test_inducing_points_are_placed_where_the_gp_sees_its_inputs(make):
    x, y = data()
    x = 5 * x + 10
    model, likelihood = make(x[:M]), gpytorch.likelihoods.GaussianLikelihood()
    gp = getattr(model, "gp", model)
    tighter_gp.initialize(model, likelihood, x, y)
    seen = (x - 10) / 5 if gp is model else model.net(x).detach()
    distances = torch.cdist(gp.variational_strategy.inducing_points.detach(), seen).amin(-1)
    assert distances.max() < seen.std()
    assert likelihood.noise.item() != pytest.approx(0.6931, rel=1e-3)


@pytest.mark.parametrize("natural", [None, 0])
def test_a_network_before_a_gp_is_trained(natural):
    x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    y = torch.sin(4 * x[:, 0] * x[:, 1])
    torch.manual_seed(0)
    model, likelihood = Behind(GP(torch.randn(M, 2))), gpytorch.likelihoods.GaussianLikelihood()
    model, likelihood, x, y = model.float(), likelihood.float(), x.float(), y.float()
    before = model.net.weight.detach().clone()
    recipe = tighter_gp.Recipe(natural=natural)
    history = tighter_gp.fit(model, likelihood, x, y, steps=300, batch_size=100, recipe=recipe, initialize=True)
    assert not history.skipped
    assert not torch.equal(model.net.weight, before)
    assert history.loss[-1] < history.loss[0] - 0.2
