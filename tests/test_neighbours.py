"""NeighbourGP against dense algebra in float64 that shares no code with it, and what it promises beside."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from botorch.models.approximate_gp import ApproximateGPyTorchModel

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.solve_gp import make_solve_gp

N, M, D = 40, 7, 2


class Case:
    """A model with neighbours, and its prior in dense matrices at ``num_test`` points and the training rows."""

    def __init__(self, kind: str, k: int, steps: int = 0, num_test: int = 6, **kwargs) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.z = 3 * torch.rand(N, D, generator=generator), 3 * torch.rand(M, D, generator=generator)
        self.y = torch.sin(5 * self.x.sum(-1)) + 0.3 * torch.randn(N, generator=generator) + 1.5
        self.test = 3 * torch.rand(num_test, D, generator=generator)
        self.noise = 0.05 + 0.1 * torch.rand(N, generator=generator) if kind == "fixed" else torch.full((N,), 0.08)
        kernel = make_kernel("matern32", 1.3, torch.tensor([0.4, 0.7]))
        likelihood = make_noise(self.noise if kind == "fixed" else self.noise[0])
        self.mean = 0.0 if kind == "collapsed" else 1.5
        if kind == "collapsed":
            self.model = tighter_gp.CollapsedGP(self.x, self.y, self.z, kernel, likelihood)
        elif kind == "solve":
            self.model = make_solve_gp(self.z[:4], self.z[4:], kernel, mean=self.mean)
        else:
            self.model = make_gp(self.z, kernel, mean=self.mean)
        if kind != "collapsed":
            tighter_gp.set_optimal_q(self.model, likelihood, self.x, self.y)
        self.likelihood = likelihood
        self.near = self.make(k, steps, **kwargs)
        self.covariance = lambda a, b: dense.matern32(a, b, 1.3, torch.tensor([0.4, 0.7]))
        both = torch.cat([self.test, self.x])
        Kzx = self.covariance(self.z, both)
        self.A = torch.linalg.inv(torch.linalg.cholesky(self.covariance(self.z, self.z))) @ Kzx  # [M, T + N]
        self.K = self.covariance(both, both)
        self.D = self.K - self.A.T @ self.A

    def make(self, k: int, steps: int = 0, rows=slice(None), **kwargs) -> tighter_gp.NeighbourGP:
        model, likelihood = self.model, self.likelihood
        if isinstance(likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood):
            likelihood = make_noise(self.noise[rows])
        return tighter_gp.NeighbourGP(model, likelihood, self.x[rows], self.y[rows], k, steps, **kwargs)

    def best_q(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of q(w) in proportion to p(w) N(y; mean + A'w, noise), a matrix."""
        A, precision = self.A[:, len(self.test) :], torch.linalg.inv(noise)
        return A @ precision @ A.T, A @ precision @ (self.y - self.mean)

    def predict(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula at each test point, by inverses."""
        T, means, variances = len(self.test), [], []
        gram, linear = self.best_q(torch.diag(self.D.diagonal()[T:] + self.noise))
        S = torch.linalg.inv(torch.eye(M) + gram)
        for n in range(T):
            scaled = (self.test[n] - self.x) / torch.tensor([0.4, 0.7])
            c = scaled.square().sum(-1).argsort()[:k]
            v = torch.linalg.inv(self.D[T + c][:, T + c] + torch.diag(self.noise[c])) @ self.D[T + c, n]
            b = self.A[:, n] - self.A[:, T + c] @ v
            means.append(self.mean + b @ S @ linear + v @ (self.y[c] - self.mean))
            variances.append(self.D[n, n] - v @ self.D[T + c, n] + b @ S @ b)
        return torch.stack(means), torch.stack(variances)


KINDS = ("homoscedastic", "fixed", "solve", "collapsed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 6])
def test_prediction_is_the_formula(kind, k):
    case = Case(kind, k)
    mean, variance = case.near.f_at(case.test)
    expected = case.predict(k)
    torch.testing.assert_close(mean, expected[0])
    torch.testing.assert_close(variance, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_with_the_q_of_the_full_residual_are_the_exact_gp(kind):
    case, T = Case(kind, 10 * N), 6
    noise = torch.diag(case.noise)
    case.near.gram, case.near.linear = case.best_q(case.D[T:, T:] + noise)
    weights = case.K[:T, T:] @ torch.linalg.inv(case.K[T:, T:] + noise)
    mean, variance = case.near.f_at(case.test)
    torch.testing.assert_close(mean, case.mean + weights @ (case.y - case.mean))
    torch.testing.assert_close(variance, (case.K[:T, :T] - weights @ case.K[T:, :T]).diagonal())


@pytest.mark.parametrize("kind", KINDS)
def test_no_neighbours_are_the_usual_prediction(kind):
    case = Case(kind, 0)
    usual, near = tighter_gp.predict(case.model, case.test), tighter_gp.predict(case.near, case.test)
    torch.testing.assert_close(near.mean, usual.mean)
    torch.testing.assert_close(near.variance, usual.variance)


@pytest.mark.parametrize("distribution", ["MeanField", "Delta", "Natural"])
def test_no_neighbours_keep_the_models_own_q(distribution):
    case = Case("homoscedastic", 3)
    kind = getattr(gpytorch.variational, f"{distribution}VariationalDistribution")
    model = make_gp(case.z, make_kernel("rbf", 1.0, torch.ones(D)), distribution=kind, jitter_val=1e-6)
    model(case.test)
    for parameter in model.variational_strategy._variational_distribution.parameters():
        parameter.data.mul_(1.1)
    near = tighter_gp.NeighbourGP(model, case.likelihood, case.x, case.y, 0)
    usual, found = tighter_gp.predict(model, case.test), tighter_gp.predict(near, case.test)
    torch.testing.assert_close(found.mean, usual.mean)
    torch.testing.assert_close(found.variance, usual.variance, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("kind", ["homoscedastic", "fixed", "solve"])
@pytest.mark.parametrize("k", [0, 4])
def test_a_row_left_out_is_a_refit_without_it(kind, k):
    case = Case(kind, max(k, 1))
    case.near.num_neighbours = k
    own = torch.tensor([0, 17, N - 1])
    mean, variance = case.near.f_at(case.x[own], own)
    for place, n in enumerate(own):
        others = torch.arange(N) != n
        refit = case.make(max(k, 1), rows=others)
        refit.num_neighbours = k
        expected = refit.f_at(case.x[n : n + 1])
        torch.testing.assert_close(mean[place], expected[0][0])
        torch.testing.assert_close(variance[place], expected[1][0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_refining_objective(kind):
    near, rows = Case(kind, 5).near, torch.arange(0, N, 3)
    names = ["model.covar_module.raw_outputscale", "model.covar_module.base_kernel.raw_lengthscale"]
    values = [near.get_parameter(name).detach().clone().requires_grad_() for name in names]
    noise = near.noise.clone().requires_grad_()
    density = lambda noise, *values: near._at_rows(rows, {**dict(zip(names, values, strict=True)), "noise": noise})[0]
    assert torch.autograd.gradcheck(density, (noise, *values), atol=1e-6)


def test_predictions_are_differentiable_in_the_inputs():
    case = Case("homoscedastic", 4, num_test=2)
    assert torch.autograd.gradcheck(case.near.f_at, (case.test.requires_grad_(),))


def test_the_order_of_rows_and_points_does_not_matter():
    case = Case("fixed", 5)
    order, points = torch.randperm(N), torch.randperm(6)
    other = case.make(5, rows=order)
    for found, expected in zip(other.f_at(case.test[points]), case.near.f_at(case.test), strict=True):
        torch.testing.assert_close(found, expected[points])


def test_chunks_and_batch_shapes_do_not_matter():
    case = Case("homoscedastic", 5)
    small = case.make(5, chunk_size=7)
    for found, expected in zip(small(case.test.view(3, 2, D)).mean.flatten(), case.near(case.test).mean, strict=True):
        torch.testing.assert_close(found, expected)


def test_duplicated_rows_and_ties():
    case = Case("homoscedastic", 9)
    x, y = case.x[:12].repeat(3, 1), case.y[:12].repeat(3)
    near = tighter_gp.NeighbourGP(case.model, case.likelihood, x, y, 8)
    f = near(case.test)
    assert torch.isfinite(f.mean).all()
    assert (f.variance > 0).all()
    own = torch.arange(36)
    assert not (near.nearest(x, own) == own.unsqueeze(-1)).any()  # it is itself that is left out, not its copy
    same = near.nearest(x, own)[:, :2] % 12
    assert (same == own.unsqueeze(-1) % 12).all()


def test_a_point_far_from_all_rows_is_predicted_as_usual():
    case = Case("homoscedastic", 5)
    far = torch.tensor([[1e17, 0.0], [0.5, 0.5]])
    f, usual = tighter_gp.predict(case.near, far), tighter_gp.predict(case.model, far)
    torch.testing.assert_close(f.mean[0], usual.mean[0])
    torch.testing.assert_close(f.variance[0], usual.variance[0])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_fewer_rows_than_neighbours(rows):
    case = Case("homoscedastic", 3)
    near = case.make(30, 5, rows=slice(0, rows))
    f = tighter_gp.predict_y(near, near.likelihood, case.test)
    assert torch.isfinite(f.log_prob(case.test[:, 0])).all()


@pytest.mark.parametrize("kind", ["homoscedastic", "fixed", "solve"])
def test_added_rows_are_as_if_they_had_been_there(kind):
    case = Case(kind, 5)
    near = case.make(5, rows=slice(0, 25))
    near.add(case.x[25:], case.y[25:].numpy(), *([case.noise[25:]] if kind == "fixed" else []))
    for found, expected in zip(near.f_at(case.test), case.near.f_at(case.test), strict=True):
        torch.testing.assert_close(found, expected)


def test_state_dict_and_pickle_have_the_rows():
    case = Case("homoscedastic", 5, 10)
    other = case.make(3, rows=slice(0, 9))
    other.load_state_dict(case.near.state_dict())
    for near in (other, pickle.loads(pickle.dumps(case.near)), copy.deepcopy(case.near)):
        for found, expected in zip(near.f_at(case.test), case.near.f_at(case.test), strict=True):
            torch.testing.assert_close(found, expected)
    assert near.likelihood.noise == case.near.likelihood.noise


def test_rows_stay_out_of_state_dict_and_pickle():
    case = Case("homoscedastic", 5, save_rows=False)
    assert not {"x", "y"} & case.near.state_dict().keys()
    near = pickle.loads(pickle.dumps(case.near))
    assert near.x is None
    near.x, near.y = case.x, case.y
    torch.testing.assert_close(near(case.test).mean, case.near(case.test).mean)


def test_rows_are_not_copied_and_may_be_a_memory_map(tmp_path):
    case = Case("homoscedastic", 5)
    assert case.near.x.data_ptr() == case.x.data_ptr()
    np.save(tmp_path / "x.npy", case.x.numpy())
    np.save(tmp_path / "y.npy", case.y.numpy())
    x, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    near = tighter_gp.NeighbourGP(case.model, case.likelihood, x, y, 5, 0)
    assert near.x.data_ptr() == x.ctypes.data
    torch.testing.assert_close(near(case.test).mean, case.near(case.test).mean)


@pytest.mark.parametrize("kind", ["homoscedastic", "fixed"])
def test_refining_leaves_the_model_and_scales_the_noise(kind):
    case = Case(kind, 8)
    before = copy.deepcopy((case.model.state_dict(), case.likelihood.state_dict()))
    noise = case.likelihood.noise.clone()
    near = case.make(8, 20)
    for found, expected in zip((case.model.state_dict(), case.likelihood.state_dict()), before, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert near.noise_factor != 1
    torch.testing.assert_close(near.likelihood.noise, noise * near.noise_factor)


def sparse_gp(x, y, lengthscale: float, noise: float):
    """A sparse GP as training leaves it, whose noise pays for the residual too."""
    model = tighter_gp.models.Regression(x, num_inducing=16)
    model.covar_module.base_kernel.lengthscale, model.likelihood.noise = lengthscale, noise
    tighter_gp.set_optimal_q(model, model.likelihood, x, y)
    return model


def nlpd(model, x, y) -> float:
    return -tighter_gp.predict_y(model, model.likelihood, x).log_prob(y).mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refining_helps_where_the_residual_says_something(dtype):
    x = 4 * torch.rand(900, 2, dtype=dtype)
    y = torch.sin(4 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.05 * torch.randn(900, dtype=dtype)
    model = sparse_gp(x[:700], y[:700], 0.6, 0.1)
    plain, refined = (tighter_gp.NeighbourGP(model, model.likelihood, x[:700], y[:700], 10, steps) for steps in (0, 40))
    test = x[700:], y[700:]
    with pytest.raises(TypeError, match="no bound on the evidence"):
        tighter_gp.evaluate_bound(refined, refined.likelihood, x[:700], y[:700])
    assert not any(value.requires_grad for value in [*refined.parameters(), *refined.buffers()])
    assert nlpd(refined, *test) < nlpd(plain, *test) - 0.3 < nlpd(model, *test) - 0.6
    low, high = tighter_gp.predict_y(refined, refined.likelihood, test[0]).interval(0.95)
    assert 0.88 < ((low < test[1]) & (test[1] < high)).double().mean() < 0.99


def test_refining_ends_at_the_models_own_prediction_where_the_residual_says_nothing():
    x = torch.rand(600, 3)
    y = x.sum(-1) + torch.randn(600)
    model = sparse_gp(x[:500], y[:500], 3.0, 1.0)
    near = tighter_gp.NeighbourGP(model, model.likelihood, x[:500], y[:500], 5, 40)
    found, usual = (tighter_gp.predict_y(m, m.likelihood, x[500:]) for m in (near, model))
    assert near.num_neighbours == 0
    torch.testing.assert_close(found.mean, usual.mean)
    torch.testing.assert_close(found.variance, usual.variance)


KERNELS = {
    "ard": lambda: make_kernel("rbf", 2.0, torch.tensor([0.3, 2.0])),
    "active_dims": lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5, active_dims=[1])),
    "linear": lambda: gpytorch.kernels.LinearKernel(),
    "sum": lambda: gpytorch.kernels.RBFKernel() + gpytorch.kernels.PolynomialKernel(2),
}


@pytest.mark.parametrize("name", KERNELS)
def test_neighbours_are_the_rows_most_correlated_a_priori(name):
    case, kernel = Case("homoscedastic", 4), KERNELS[name]()
    model = make_gp(case.z, kernel, jitter_val=1e-4)
    near = tighter_gp.NeighbourGP(model, case.likelihood, case.x, case.y, 4, 3)
    near.num_neighbours = 4
    kernel = near.model.covar_module
    covariance, variance = kernel(case.test, case.x).to_dense(), kernel(case.x, diag=True)
    expected = (covariance.square() / variance).topk(4).values
    found = (covariance.square() / variance).gather(-1, near.nearest(case.test))
    torch.testing.assert_close(found.sort(descending=True).values, expected, rtol=1e-9, atol=1e-9)


def test_a_network_in_forward_and_a_mean_that_depends_on_the_input():
    class Deep(type(Case("homoscedastic", 1).model)):
        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(self.net(x)))

    case = Case("homoscedastic", 4)
    model = case.model
    model.__class__ = Deep
    model.net, model.mean_module = torch.nn.Linear(D, D), gpytorch.means.LinearMean(D)
    tighter_gp.set_optimal_q(model, case.likelihood, case.x, case.y)
    near = tighter_gp.NeighbourGP(model, case.likelihood, case.x, case.y, 4, 3)
    covariance = near.model.covar_module(near.model.net(case.test), near.model.net(case.x)).to_dense()
    assert covariance.topk(4).indices.sort().values.equal(near.nearest(case.test).sort().values)
    plain = tighter_gp.NeighbourGP(model, case.likelihood, case.x, case.y, 4, 0)
    shift = case.x @ model.mean_module.weights.detach() + model.mean_module.bias.detach()
    model.mean_module = gpytorch.means.ZeroMean()
    centred = tighter_gp.NeighbourGP(model, case.likelihood, case.x, case.y - shift.squeeze(-1), 4, 0)
    added = plain.model.mean_module(case.test)
    torch.testing.assert_close(plain(case.test).mean, centred(case.test).mean + added)


def test_many_rows_are_searched_by_cells():
    x = torch.rand(100_001, 2)
    model = make_gp(torch.rand(64, 2), make_kernel("rbf", 1.0, torch.tensor([0.1, 0.2])), jitter_val=1e-6)
    near = tighter_gp.NeighbourGP(model, make_noise(0.1), x, torch.sin(9 * x[:, 0]), 10, 0)
    exact = torch.cdist(x[:50] / torch.tensor([0.1, 0.2]), x / torch.tensor([0.1, 0.2])).topk(10, largest=False)
    assert near.nearest(x[:50], num_cells=64).sort().values.equal(exact.indices.sort().values)
    assert near.nearest(x[:50], num_cells=1).shape == (50, 10)
    found = near.nearest(x[:50])
    assert (found.unsqueeze(-1) == exact.indices.unsqueeze(-2)).any(-1).double().mean() > 0.98
    own = torch.arange(5)
    assert not (near.nearest(x[:5], own) == own.unsqueeze(-1)).any()


def test_botorch_predicts_with_it():
    case = Case("homoscedastic", 5)
    model = ApproximateGPyTorchModel(model=case.near, likelihood=case.near.likelihood, num_outputs=1)
    posterior = model.posterior(case.test.view(3, 2, D))
    torch.testing.assert_close(posterior.mean.flatten(), case.near(case.test).mean)
    torch.testing.assert_close(posterior.variance.flatten(), case.near(case.test).variance)


def test_new_rows_that_do_not_fit_are_refused():
    torch.manual_seed(0)
    x = torch.rand(60, 2)
    y = torch.sin(6 * x[:, 0])
    model = tighter_gp.models.Regression(x, num_inducing=5)
    near = tighter_gp.NeighbourGP(model, model.likelihood, x, y, num_neighbours=5, steps=0)
    with pytest.raises(ValueError, match="Expected x of shape N x D"):
        tighter_gp.NeighbourGP(model, model.likelihood, x, y[:-1])
    for new_x, new_y in ((x[:9], y[:8]), (torch.rand(4, 3), y[:6]), (x[:2], torch.tensor([0.0, torch.nan]))):
        with pytest.raises(ValueError, match=r"Expected x of shape B x 2|NaN or infinit"):
            near.add(new_x, new_y)
    with pytest.raises(ValueError, match=r"its own \.likelihood"):
        tighter_gp.predict_y(near, model.likelihood, x)


def test_new_rows_under_fixed_noise_need_theirs_and_a_refusal_changes_nothing():
    case = Case("fixed", 5)
    near, before = case.near, case.near.f_at(case.x)
    for noise in (None, case.noise[:1]):
        with pytest.raises(ValueError, match="a variance for each of the 2 new rows"):
            near.add(case.x[:2], case.y[:2], noise)
    torch.testing.assert_close(near.f_at(case.x), before, rtol=0.0, atol=0.0)


def test_labels_are_looked_at():
    torch.manual_seed(0)
    x = torch.rand(60, 2)
    label = (x[:, 0] > 0.5).long()
    model = tighter_gp.models.BinaryClassification(x, num_inducing=5)
    with pytest.raises(ValueError, match="labels 0 and 1"):
        tighter_gp.NeighbourGP(model, model.likelihood, x, label + 1)
    near = tighter_gp.NeighbourGP(model, model.likelihood, x, label, num_neighbours=5)
    with pytest.raises(ValueError, match="labels 0 and 1"):
        near.add(x[:2], torch.tensor([7, 7]))


def test_a_state_of_other_rows_is_refused():
    case = Case("homoscedastic", 5)
    make = lambda rows: tighter_gp.NeighbourGP(
        case.model, case.likelihood, case.x[rows], case.y[rows], 5, 0, save_rows=False
    )
    with pytest.raises(ValueError, match="make it with the same rows"):
        make(slice(20)).load_state_dict(make(slice(None)).state_dict())


def test_other_likelihoods_by_pseudo_targets():
    """Their formula by hand, densities that gain where few inducing points leave much, and likelihoods that are refused."""
    torch.manual_seed(0)
    x = torch.rand(700, 1) * 10
    y = torch.poisson((1 + torch.sin(3 * x[:, 0]) + torch.sin(7 * x[:, 0])).exp())
    model = tighter_gp.models.CountRegression(x[:500], num_inducing=10)
    tighter_gp.fit(model, model.likelihood, x[:500], y[:500], steps=150, progress=False)
    near = tighter_gp.NeighbourGP(model, model.likelihood, x[:500], y[:500])
    q = tighter_gp.predict(model, x[:500])
    rate = (q.mean + q.variance / 2).exp()  # E[exp f], the curvature; the slope is y less that
    torch.testing.assert_close(near.noise, 1 / rate, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(near.y, q.mean + (y[:500] - rate) / rate, rtol=1e-3, atol=1e-3)
    usual = tighter_gp.predict_y(model, model.likelihood, x[500:]).log_prob(y[500:]).mean()
    better = tighter_gp.predict_y(near, near.likelihood, x[500:]).log_prob(y[500:]).mean()
    assert better > usual + 0.05
    near.add(x[500:600], y[500:600])
    assert len(near.y) == len(near.noise) == 600
    with pytest.raises(TypeError, match="Gaussian or log-concave"):
        tighter_gp.NeighbourGP(model, gpytorch.likelihoods.StudentTLikelihood(), x, y)
