"""Exported modules against predict and predict_y, by torch.export, TorchScript and onnxruntime."""

from __future__ import annotations

import copy
import io
import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels, likelihoods, means

import tighter_gp
from tests.equations.test_wrappers import independent, make_model
from tests.tools import dense
from tests.tools.factories import GP, CollapsedGP, make_gp, make_noise
from tests.tools.solve_gp import make_solve_gp
from tests.tools.support import Q_FORMS, randomize_q
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood

D = 3


def make_kernels():
    scale = kernels.ScaleKernel
    found = {
        "rbf": scale(kernels.RBFKernel(ard_num_dims=D)),
        "matern12": scale(kernels.MaternKernel(0.5)),
        "matern32": scale(kernels.MaternKernel(1.5, ard_num_dims=D)),
        "matern52": scale(kernels.MaternKernel(2.5)),
        "rq": scale(kernels.RQKernel()),
        "linear": scale(kernels.LinearKernel()) + scale(kernels.RBFKernel()),
        "linear-ard": kernels.LinearKernel(ard_num_dims=D) + kernels.RBFKernel(),
        "product": kernels.RBFKernel(active_dims=(0,)) * kernels.MaternKernel(2.5, active_dims=(2, 1)),
        "selected": scale(kernels.RBFKernel(active_dims=(2,))) + scale(kernels.RQKernel(active_dims=(0, 1))),
        "nested": scale(scale(kernels.RBFKernel()) * kernels.LinearKernel() + kernels.MaternKernel(1.5)),
    }
    for kernel in found.values():
        for parameter in kernel.parameters():
            parameter.data += 0.3 * torch.rand_like(parameter)
    return found


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def assert_exports(module, x, expected, tolerance=1e-6):
    """Every way out gives the same four tensors for another number of rows than it was made with."""
    for found, wanted in zip(module(x), expected, strict=True):
        close(found, wanted, tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises against TorchScript
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(module, x[:3]), file)
        file.seek(0)
        traced = torch.jit.load(file)
    for found, wanted in zip(traced(x), expected, strict=True):
        close(found, wanted, tolerance)
    program = torch.export.export(module, (x[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for found, wanted in zip(program.module()(x), expected, strict=True):
        close(found, wanted, tolerance)


def expected_of(model, likelihood, x):
    q, y = tighter_gp.predict(model, x), tighter_gp.predict_y(model, likelihood, x)
    return [value.detach() for value in (q.mean, q.variance, y.mean, y.variance)]


def check(model, likelihood):
    x = torch.randn(11, D)
    assert_exports(tighter_gp.export_predictor(model, likelihood), x, expected_of(model, likelihood, x))


def svgp(kernel=None, mean=None, **kwargs):
    kwargs = {"jitter_val": 1e-6, **kwargs}
    model = randomize_q(make_gp(torch.randn(7, D), kernel, mean=0.4, **kwargs))
    if mean is not None:
        model.mean_module = mean
    return model


@pytest.mark.parametrize("name", make_kernels())
def test_kernels(name):
    check(svgp(make_kernels()[name]), make_noise(0.3))


@pytest.mark.parametrize("mean", [means.ZeroMean, means.ConstantMean, lambda: means.LinearMean(D)])
def test_means(mean):
    check(svgp(mean=mean()), make_noise(0.3))


LIKELIHOODS = {
    "gaussian": lambda: make_noise(0.3),
    "student-t": likelihoods.StudentTLikelihood,
    "laplace": lambda: likelihoods.LaplaceLikelihood().initialize(noise=0.3),
    "probit": likelihoods.BernoulliLikelihood,
    "logit": BernoulliLogitLikelihood,
    "poisson-exp": PoissonLikelihood,
    "poisson-softplus": likelihoods.PoissonLikelihood,
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name):
    check(svgp(), LIKELIHOODS[name]())


@pytest.mark.parametrize("nu", [2.0, 1.5, 0.8])
def test_student_t_noise_without_moments(nu):
    likelihood = likelihoods.StudentTLikelihood(deg_free_constraint=gpytorch.constraints.Positive())
    likelihood.deg_free = nu
    model, x = svgp(), torch.randn(4, D)
    module, y = tighter_gp.export_predictor(model, likelihood), tighter_gp.predict_y(model, likelihood, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ways = [module, torch.jit.trace(module, x), torch.export.export(module, (x,)).module()]
    for way in ways:
        f_mean, f_variance, mean, variance = way(x)
        assert f_variance.isfinite().all()
        assert variance.isposinf().all()
        torch.testing.assert_close(mean, f_mean if nu > 1 else torch.full((4,), torch.nan), equal_nan=True)
        torch.testing.assert_close(mean, y.mean, equal_nan=True)
        torch.testing.assert_close(variance, y.variance)


@pytest.mark.parametrize("form", Q_FORMS)
def test_every_form_of_q(form):
    check(svgp(distribution=Q_FORMS[form]), make_noise(0.3))


def test_solve_gp():
    q_u, q_v = dense.random_q(5), dense.random_q(4)
    check(make_solve_gp(torch.randn(5, D), torch.randn(4, D), None, q_u, q_v, jitter_val=1e-6), make_noise(0.3))


@pytest.mark.parametrize("noise", [0.2, torch.linspace(0.1, 0.5, 40)], ids=["one", "per-point"])
def test_collapsed_models(noise):
    train_x, train_y, z, x = torch.randn(40, D), torch.randn(40), torch.randn(6, D), torch.randn(11, D)
    kernel, likelihood = kernels.ScaleKernel(kernels.RBFKernel()), make_noise(noise)
    whole = tighter_gp.CollapsedGP(train_x, train_y, z, kernel, likelihood, means.ConstantMean(), jitter_val=1e-6)
    exact = CollapsedGP(train_x, train_y, z, kernel, likelihood, mean=0.3, jitter_val=1e-6)
    for model in (whole, exact):
        response = make_noise(0.2)
        q = tighter_gp.predict(model, x)
        module = tighter_gp.export_predictor(model, response)
        assert_exports(module, x, [q.mean, q.variance, q.mean, q.variance + 0.2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "likelihood", [make_noise, BernoulliLogitLikelihood, likelihoods.BernoulliLikelihood, likelihoods.PoissonLikelihood]
)
def test_onnxruntime(likelihood, dtype, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    likelihood = likelihood(0.3) if likelihood is make_noise else likelihood()
    model, x = svgp(make_kernels()["selected"]), torch.randn(11, D)
    expected = [value.to(dtype) for value in expected_of(model, likelihood, x)]
    module = tighter_gp.export_predictor(model, likelihood, dtype=dtype)
    path, x = str(tmp_path / "model.onnx"), x.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        rows = {0: torch.export.Dim("rows")}
        torch.onnx.export(module, (x[:3],), path, dynamo=True, dynamic_shapes=(rows,), verbose=False)
    found = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    for value, wanted in zip(found, expected, strict=True):
        close(value, wanted, 1e-6 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("name", ["rbf", "linear", "selected"])
def test_onnx_by_the_older_exporter(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, likelihood, x = svgp(make_kernels()[name]), make_noise(0.3), torch.randn(11, D)
    module, path = tighter_gp.export_predictor(model, likelihood, dtype=torch.float64), str(tmp_path / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises against it
        torch.onnx.export(module, (x[:3],), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
    for found, wanted in zip(onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()}), module(x), strict=True):
        close(found, wanted)


def test_module_is_a_snapshot_and_can_be_copied():
    model, likelihood, x = svgp(), make_noise(0.3), torch.randn(11, D)
    module = tighter_gp.export_predictor(model, likelihood)
    before = [value.clone() for value in module(x)]
    for parameter in [*model.parameters(), *likelihood.parameters()]:
        parameter.data += 0.2
    for other in (module, copy.deepcopy(module)):
        assert all(torch.equal(a, b) for a, b in zip(other(x), before, strict=True))
    assert not any(value.requires_grad for value in before)
    assert not list(module.parameters())
    again = tighter_gp.export_predictor(model, likelihood)
    again.load_state_dict(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again(x), before, strict=True))


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.parametrize("num_inducing", [12, 15])
def test_where_float32_does_not_do_the_module_is_wide_inside(num_inducing):
    torch.set_default_dtype(torch.float32)
    x = torch.rand(300, 1) * 6
    y, likelihood = torch.sin(2 * x[:, 0]) + 0.05 * torch.randn(300), make_noise(0.0025)
    z = torch.linspace(0, 6, num_inducing).unsqueeze(-1)
    kernel = kernels.ScaleKernel(kernels.RBFKernel())
    kernel.base_kernel.lengthscale = 1.5
    model = tighter_gp.CollapsedGP(x, y, z, kernel, likelihood)
    module, f = tighter_gp.export_predictor(model, likelihood), tighter_gp.predict(model, x)
    found = module(x)
    assert {value.dtype for value in found} == {torch.float32}
    assert module.points.dtype == torch.float64
    torch.testing.assert_close(found[1], f.variance, rtol=0.05, atol=0)
    torch.testing.assert_close(found[0], f.mean, rtol=0, atol=0.05 * float(f.stddev.min()))
    assert_exports(module, x[:11], [value[:11] for value in found])


class Quadratic(means.Mean):
    def forward(self, x):
        return x.square().sum(-1)


class Squared(kernels.RBFKernel):
    """Not a common kernel, though it looks like one."""


REFUSED = {
    "kernel": (lambda: svgp(kernels.PeriodicKernel()), make_noise(0.3), "does not know PeriodicKernel"),
    "derived kernel": (lambda: svgp(kernels.ScaleKernel(Squared())), make_noise(0.3), "does not know Squared"),
    "noise": (svgp, make_noise(torch.full((5,), 0.2)), "does not know FixedNoiseGaussianLikelihood"),
    "classes": (svgp, likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False), "does not know Softmax"),
    "mean": (lambda: svgp(mean=Quadratic()), make_noise(0.3), "a zero, constant or linear mean"),
    "tasks": (lambda: make_model(independent(), (3,)), make_noise(0.3), "not wrapped for several tasks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name):
    make, likelihood, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        tighter_gp.export_predictor(make(), likelihood)


def test_forward_that_does_more_is_refused():
    model = svgp()
    model.forward = lambda x: GP.forward(model, x.tanh())
    with pytest.raises(TypeError, match="exported module and predict differ"):
        tighter_gp.export_predictor(model, make_noise(0.3))
