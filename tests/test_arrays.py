"""numpy arrays, memory maps and inputs of one dimension, wherever data go in; arguments that nobody uses."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import tighter_gp
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import LargestOutput, double_problem, randomize_q

P = double_problem()
N, M, D = *P.x.shape[:1], *P.z.shape
NOISE = torch.linspace(0.05, 0.2, N, dtype=torch.float64)


def kernel():
    return make_kernel("rbf", P.variance, P.lengthscales)


def sparse():
    return randomize_q(make_gp(P.z, kernel(), mean=0.3))


def exact():
    return CollapsedGP(P.x, P.y, P.z, kernel(), make_noise(0.1), 0.3)


def collapsed():
    return tighter_gp.CollapsedGP(P.x, P.y, P.z, kernel(), make_noise(0.1))


@pytest.fixture(params=["array", "big-endian", "read-only", "reversed", "memory map"])
def convert(request, tmp_path):
    """From a tensor to an array of the same numbers."""
    count = iter(range(100))

    def make(tensor):
        values = tensor.numpy()
        if request.param == "big-endian":
            return values.astype(">f8")
        if request.param == "reversed":
            return values[::-1].copy()[::-1]
        if request.param == "read-only":
            values = values.copy()
            values.flags.writeable = False
        if request.param == "memory map":
            path = tmp_path / f"{next(count)}.npy"
            np.save(path, values)
            return np.load(path, mmap_mode="r")
        return values

    return make


# -- the whole data set -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sparse, exact, collapsed])
def test_bound_of_arrays(make, convert):
    model, likelihood = make(), make_noise(0.1)
    likelihood = getattr(model, "likelihood", likelihood)
    expected = tighter_gp.evaluate_bound(model, likelihood, P.x, P.y)
    actual = tighter_gp.evaluate_bound(model, likelihood, convert(P.x), convert(P.y), 4)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)


def test_noise_of_arrays(convert):
    model, likelihood = sparse(), gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(N))
    expected = tighter_gp.evaluate_bound(model, likelihood, P.x, P.y, noise=NOISE)
    arrays = convert(P.x), convert(P.y)
    actual = tighter_gp.evaluate_bound(model, likelihood, *arrays, 4, noise=convert(NOISE))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    other = sparse()
    tighter_gp.set_optimal_q(model, likelihood, P.x, P.y, noise=NOISE)
    tighter_gp.set_optimal_q(other, likelihood, *arrays, noise=convert(NOISE))
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    first, second = (
        tighter_gp.diagnose(model, likelihood, x, y, noise=noise)
        for x, y, noise in ((P.x, P.y, NOISE), (*arrays, convert(NOISE)))
    )
    assert first.tighter == pytest.approx(second.tighter, rel=1e-12)
    assert first.current == pytest.approx(second.current, rel=1e-12)
    q, expected = (
        tighter_gp.predict(model, x, "exact", likelihood=likelihood, train_x=x, noise=noise)
        for x, noise in ((convert(P.x), convert(NOISE)), (P.x, NOISE))
    )
    torch.testing.assert_close(q.variance, expected.variance)


@pytest.mark.parametrize("make", [sparse, exact, collapsed])
def test_diagnosis_of_arrays(make, convert):
    model = make()
    likelihood = getattr(model, "likelihood", make_noise(0.1))
    expected = tighter_gp.diagnose(model, likelihood, P.x, P.y, blocks=3)
    actual = tighter_gp.diagnose(model, likelihood, convert(P.x), convert(P.y), blocks=3, batch_size=4)
    for name in ("titsias", "tighter", "block", "full", "evidence", "upper"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=1e-9), name


def test_collapsed_gp_of_arrays(convert):
    model = tighter_gp.CollapsedGP(convert(P.x), convert(P.y), convert(P.z), kernel(), make_noise(0.1))
    torch.testing.assert_close(model.bound(), collapsed().bound())
    torch.testing.assert_close(model.predict(convert(P.x)).variance, collapsed().predict(P.x).variance)
    value = tighter_gp.collapsed_bound(kernel(), convert(P.z), convert(P.x), convert(P.y), convert(NOISE))
    torch.testing.assert_close(value, tighter_gp.collapsed_bound(kernel(), P.z, P.x, P.y, NOISE))
    expected = tighter_gp.collapsed_bound(kernel(), P.z, P.x, P.y, torch.tensor(0.3))
    for noise in (0.3, np.float64(0.3), np.array(0.3)):
        torch.testing.assert_close(tighter_gp.collapsed_bound(kernel(), P.z, P.x, P.y, noise), expected)


def test_scores_take_arrays_and_single_rows_of_them(convert):
    model, likelihood = sparse(), make_noise(0.1)
    expected = tighter_gp.predict_y(model, likelihood, P.x).log_prob(P.y)
    x, y = convert(P.x), convert(P.y)
    torch.testing.assert_close(tighter_gp.predict_y(model, likelihood, x).log_prob(y), expected)
    torch.testing.assert_close(tighter_gp.predict_y(model, likelihood, x[:1]).log_prob(y[:1]), expected[:1])


def test_arrays_take_the_precision_of_the_model():
    model, likelihood = sparse().float(), make_noise(0.1).float()
    expected = tighter_gp.evaluate_bound(model, likelihood, P.x.float(), P.y.float())
    actual = tighter_gp.evaluate_bound(model, likelihood, P.x.numpy(), P.y.numpy())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


def test_labels_of_arrays():
    likelihood, model = gpytorch.likelihoods.BernoulliLikelihood(), sparse()
    y = (P.y > 0).long()
    expected = tighter_gp.evaluate_bound(model, likelihood, P.x, y.double())
    for labels in (y, y.bool(), y.numpy(), y.numpy().astype(np.uint8), y.numpy().astype(bool), y.double().numpy()):
        torch.testing.assert_close(tighter_gp.evaluate_bound(model, likelihood, P.x.numpy(), labels), expected)


@pytest.mark.parametrize("as_array", [True, False])
def test_inputs_of_one_dimension(as_array):
    flat = (lambda x: x[:, 0].numpy()) if as_array else (lambda x: x[:, 0])
    x, z = P.x[:, :1], P.z[:, :1]
    one = lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model, likelihood = randomize_q(make_gp(z, one(), jitter_val=1e-6)), make_noise(0.1)
    for call in (tighter_gp.evaluate_bound, lambda *args: tighter_gp.diagnose(*args).tighter):
        torch.testing.assert_close(call(model, likelihood, flat(x), P.y), call(model, likelihood, x, P.y))
    tighter_gp.set_optimal_q(model, likelihood, flat(x), P.y)
    gps = [
        tighter_gp.CollapsedGP(inputs, P.y, points, one(), make_noise(0.1), jitter_val=1e-6)
        for inputs, points in ((x, z), (flat(x), flat(z)))
    ]
    torch.testing.assert_close(gps[0].bound(), gps[1].bound())
    torch.testing.assert_close(gps[0].predict(x).mean, gps[1].predict(flat(x)).mean)


def test_a_memory_map_is_read_in_chunks(tmp_path):
    count, dim, chunk = 70000, 8, 100
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (count, dim))
    x[:] = np.random.default_rng(0).normal(size=x.shape)
    y = torch.randn(count)
    model, likelihood = randomize_q(make_gp(torch.randn(M, dim), jitter_val=1e-6)), make_noise(0.1)
    for call in (
        lambda: tighter_gp.evaluate_bound(model, likelihood, x, y, 10 * chunk),
        lambda: tighter_gp.set_optimal_q(model, likelihood, x, y, 10 * chunk),
        lambda: tighter_gp.inducing.kmeans(x, M, chunk_size=chunk, max_iter=2),
        lambda: tighter_gp.inducing.random_subset(x, M),
        lambda: tighter_gp.inducing.median_lengthscale(x, max_points=50),
    ):
        with LargestOutput() as sizes:
            call()
        assert sizes.largest <= 2**16 * dim + M * dim < count * dim  # looked at in chunks of 2**16


def test_bound_of_a_latent_variable_model():
    Y = torch.randn(30, 4)
    model = tighter_gp.gplvm.BayesianGPLVM.from_data(Y, latent_dim=2, num_inducing=M)
    elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, 30)
    values = []
    for call in (
        lambda: 30 * elbo.evaluate(Y, num_samples=4),
        lambda: tighter_gp.evaluate_bound(model, model.likelihood, None, Y, num_samples=4),
        lambda: tighter_gp.evaluate_bound(model, model.likelihood, None, Y.numpy(), num_samples=4),
        lambda: tighter_gp.evaluate_bound(
            model, model.likelihood, None, Y, objective=tighter_gp.gplvm.LatentVariableELBO, num_samples=4
        ),
    ):
        torch.manual_seed(3)
        values.append(call())
    for value in values[1:]:
        torch.testing.assert_close(value, values[0])
    torch.manual_seed(3)
    standard = tighter_gp.evaluate_bound(model, model.likelihood, None, Y, objective=VariationalELBO, num_samples=4)
    assert standard < values[0]
    with pytest.raises(TypeError, match="x=None is for a latent-variable model"):
        tighter_gp.evaluate_bound(sparse(), make_noise(0.1), None, P.y)


# -- inducing points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", tighter_gp.inducing.METHODS)
def test_inducing_points_of_arrays(method, convert):
    call = lambda x: tighter_gp.inducing.allocate(x, M, method, kernel=kernel(), chunk_size=5)
    assert torch.equal(call(convert(P.x)), call(P.x))


@pytest.mark.parametrize("method", tighter_gp.inducing.METHODS)
def test_inducing_points_of_one_dimension(method):
    one = gpytorch.kernels.RBFKernel()
    call = lambda x: tighter_gp.inducing.allocate(x, M, method, kernel=one)
    assert torch.equal(call(P.x[:, 0]), call(P.x[:, :1]))
    assert torch.equal(call(P.x[:, 0].numpy()), call(P.x[:, :1]))


def test_what_goes_with_the_points_takes_arrays(convert):
    inducing = tighter_gp.inducing
    assert torch.equal(inducing.median_lengthscale(convert(P.x)), inducing.median_lengthscale(P.x))
    assert torch.equal(inducing.nearest(convert(P.x), P.z), inducing.nearest(P.x, P.z))


def test_integers_of_an_array_are_inputs_too():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3), dtype=np.uint8)
    points = tighter_gp.inducing.kmeans(pixels, 5)
    assert points.dtype == torch.get_default_dtype()
    assert torch.equal(points, tighter_gp.inducing.kmeans(torch.tensor(pixels, dtype=points.dtype), 5))


# -- arguments and labels -----------------------------------------------------------------------------------------------


def test_noise_must_be_one_value_per_point():
    for call in (tighter_gp.evaluate_bound, tighter_gp.set_optimal_q):
        with pytest.raises(ValueError, match=rf"noise= must have one value per point, ... x {N}; got \(3,\)"):
            call(sparse(), make_noise(NOISE), P.x, P.y, noise=NOISE[:3])
        with pytest.raises(TypeError, match="noise= must be a tensor or an array"):
            call(sparse(), make_noise(NOISE), P.x, P.y, noise=0.1)
