"""The drop-in kernel: "titsias" is GPyTorch's SGPR, the others are the dense bounds, copies belong to themselves."""

from __future__ import annotations

import threading

import gpytorch
import pytest
import torch
from gpytorch.kernels import InducingPointKernel, LinearKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from packaging.version import Version

import tighter_gp
from tests.tools import adversarial, dense
from tests.tools.factories import CollapsedGP, make_kernel, make_noise
from tests.tools.support import double_problem
from tighter_gp import TighterInducingPointKernel
from tighter_gp.blocks import partition

P = double_problem()
N, M = len(P.x), len(P.z)
X_TEST = P.x[:7] + 0.13
BOUNDS = pytest.mark.parametrize("bound", ["titsias", "spherical", "tighter"])
NOISES = {"homoscedastic": 0.07, "fixed": torch.linspace(0.02, 0.5, N, dtype=torch.float64)}


def collapsed(bound="tighter", noise=0.07, x=P.x, z=P.z, **kwargs):
    likelihood = noise if isinstance(noise, gpytorch.likelihoods.Likelihood) else make_noise(noise)
    kernel = make_kernel("rbf", P.variance, P.lengthscales)
    return CollapsedGP(x, P.y, z.clone(), kernel, likelihood, 0.3, bound=bound, **kwargs)


def stock(noise=0.07):
    """GPyTorch's own SGPR."""
    model = collapsed("titsias", noise)
    own = model.covar_module
    model.covar_module = InducingPointKernel(own.base_kernel, P.z.clone(), model.likelihood)
    return model


def objective(model, x=P.x):
    return ExactMarginalLogLikelihood(model.likelihood, model)(model(x), P.y)


def gradients(model):
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(objective(model), list(parameters.values())), strict=True))


def prediction(model, x=X_TEST):
    with torch.no_grad():
        q = model.eval()(x)
        return q.mean, q.variance


def dense_bound(model, bound):
    """N times the objective, from the values of the model's parameters; differentiable."""
    kernel, likelihood = model.covar_module.base_kernel, model.likelihood
    values, z = (kernel.outputscale, kernel.base_kernel.lengthscale), model.covar_module.inducing_points
    kuu = dense.rbf(z, z, *values) + model.covar_module.jitter_val * torch.eye(M)
    kuf = dense.rbf(z, P.x, *values)
    explained = kuf.T @ torch.linalg.inv(kuu) @ kuf
    d, noise = (dense.rbf(P.x, P.x, *values) - explained).diagonal(), likelihood.noise.expand(N)
    penalty = {
        "titsias": 0.5 * (d / noise).sum(),
        "spherical": 0.5 * N * torch.log(1 + (d / noise).mean()),
        "tighter": 0.5 * torch.log(1 + d / noise).sum(),
    }[bound]
    return dense.log_normal(P.y - model.mean_module.constant, explained + torch.diag(noise)) - penalty


# -- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_titsias_is_gpytorchs_sgpr(noise):
    ours, theirs = collapsed("titsias", noise), stock(noise)
    torch.testing.assert_close(objective(ours), objective(theirs), rtol=1e-12, atol=0.0)
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("x", [X_TEST, X_TEST + torch.tensor([[[0.0]], [[0.3]]])], ids=["set", "batch"])
def test_predictions_in_eval_mode_are_gpytorchs(noise, correction, x):
    with gpytorch.settings.sgpr_diagonal_correction(correction), torch.no_grad():
        ours, theirs = (model.eval()(x) for model in (collapsed("tighter", noise), stock(noise)))
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-11)
        if Version(gpytorch.__version__) >= Version("1.15.2"):  # earlier ones have other covariances
            torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, rtol=1e-10, atol=1e-11)


@BOUNDS
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("jitter_val", [0.0, 1e-3])
def test_values_and_gradients_are_those_of_the_dense_bound(bound, noise, jitter_val):
    model = collapsed(bound, noise, jitter_val=jitter_val)
    expected = dense_bound(model, bound) / N
    torch.testing.assert_close(objective(model), expected, rtol=1e-10, atol=0.0)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    for (name, gradient), target in zip(gradients(model).items(), wanted, strict=True):
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(gradient, target, rtol=1e-7, atol=1e-9, msg=lambda text, at=name: f"{at}: {text}")


@BOUNDS
def test_the_diagonal_is_that_of_the_matrix(bound):
    kernel = collapsed(bound).covar_module
    torch.testing.assert_close(kernel(P.x, diag=True), kernel(P.x).to_dense().diagonal())


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
def test_a_prediction_at_the_training_inputs_is_that_of_each_of_them():
    """GPyTorch takes them for the same points only if all of them come, and in their order."""
    whole, some = prediction(collapsed(), P.x), prediction(collapsed(), P.x[:5])
    for one, other in zip(whole, some, strict=True):
        torch.testing.assert_close(one[:5], other, rtol=1e-10, atol=1e-11)


def test_several_outputs_are_predicted_as_gpytorch_does():
    class Model(gpytorch.models.ExactGP):
        def __init__(self, kind, *args, **kwargs):
            likelihood = MultitaskGaussianLikelihood(num_tasks=2)
            super().__init__(P.x, torch.stack([P.y, P.y.sin()], -1), likelihood)
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
            base = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2)
            base.task_covar_module.initialize(covar_factor=0.4, var=torch.tensor([0.7, 0.9]))
            self.covar_module = kind(base, P.z.clone(), likelihood, **kwargs)

        def forward(self, x):
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    ours, theirs = Model(TighterInducingPointKernel, bound="titsias"), Model(InducingPointKernel)
    for actual, expected in zip(prediction(ours), prediction(theirs), strict=True):
        assert actual.shape == (7, 2)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


# -- float32 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [7, 0])
@pytest.mark.parametrize(
    "make",
    [
        lambda: gpytorch.kernels.MaternKernel(0.5),
        lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
        lambda: gpytorch.kernels.RBFKernel() + gpytorch.kernels.LinearKernel(),
        lambda: gpytorch.kernels.RQKernel() * gpytorch.kernels.PeriodicKernel(),
    ],
)
def test_gpytorchs_predictions_in_float32_are_those_of_float64(make, number):
    """GPyTorch asks for the covariance with no points on the way."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x, y, z = (value.to(dtype) for value in (P.x, P.y, P.z))
        model = CollapsedGP(x, y, z, make().to(dtype), make_noise(0.3).to(dtype), jitter_val=1e-3).to(dtype)
        found.append(prediction(model, X_TEST[:number].to(dtype)))
    for narrow, wide in zip(*found, strict=True):
        assert narrow.shape == (number,)
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*was not positive definite")
@pytest.mark.parametrize("bound", ["tighter", "block", "full"])
@pytest.mark.parametrize("setting", [setting for setting in adversarial.SETTINGS if setting.lr == 1.0], ids=str)
def test_badly_conditioned_problems_have_a_bound_and_a_gradient_in_float32(setting, bound):
    p = adversarial.build(setting)
    z = p.model.variational_strategy.inducing_points.detach()
    blocks = {"blocks": partition(p.x, 6)} if bound == "block" else {}
    model = CollapsedGP(p.x, p.y, z, p.model.covar_module, p.likelihood, bound=bound, **blocks).float()
    with gpytorch.settings.fast_computations():  # which BoTorch turns off
        value = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
    value.backward()
    assert value.dtype == torch.float32
    assert bool(torch.isfinite(value))
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


# -- bad input ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"3 of \d+ targets are NaN"):
        tighter_gp.evaluate_bound(whole, whole.likelihood, P.x, y)
    with pytest.raises(ValueError, match=r"3 of \d+ targets are NaN"):
        tighter_gp.predict(whole, P.x)
    with pytest.raises(ValueError, match="y holds NaN or infinity"):
        tighter_gp.collapsed_bound(RBFKernel(), P.z, P.x, y, torch.tensor(0.1), bound=bound)


def test_inducing_points_of_a_kernel_do_not_share_memory_with_the_inputs():
    x = P.x.clone()
    model = CollapsedGP(x, P.y, x[:M], make_kernel("rbf", 1.0, torch.ones(x.size(-1))), make_noise(0.3))
    model.covar_module.inducing_points.data.add_(1.0)
    assert torch.equal(x, P.x)
