"""``predict`` for every kind of model that trains: against GPyTorch's own answers, dense ones, and itself in chunks."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)

import tighter_gp
from tests.equations.test_deep_gp import two_layers
from tests.tools.factories import GP, make_gp, make_noise
from tests.tools.solve_gp import make_solve_gp
from tests.tools.support import LargestOutput, assert_state, randomize_q, state

N, M, D, T = 13, 5, 2, 3
TIGHTER, SOLVE = tighter_gp.TighterVariationalStrategy, tighter_gp.SolveGPVariationalStrategy


def points(count=N, dim=D, seed=1):
    return torch.rand(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shake(model, seed=0):
    """Parameters away from where they started; q(u) is set up by a first call."""
    model.train()
    model(points(4))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def batch_kernel(size):
    shape = torch.Size([size])
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=shape), batch_shape=shape)


def multitask(wrapper, strategy=TIGHTER, num_latents=2):
    """A model of T tasks around one of our strategies, or one of GPyTorch's."""
    is_mixed = wrapper is LMCVariationalStrategy
    size = num_latents if is_mixed else T
    more = {"num_latents": num_latents} if is_mixed else {}
    q = CholeskyVariationalDistribution(M, batch_shape=torch.Size([size]))
    make = lambda model: wrapper(strategy(model, points(M, seed=3), q), num_tasks=T, **more)
    return GP(make, batch_kernel(size), 0.4)


class Extracted(GP):
    """A feature extractor before the strategy, so that inducing points are features."""

    def __call__(self, x, **kwargs):
        return super().__call__(torch.tanh(3 * x), **kwargs)


def gplvm(strategy=TIGHTER):
    Y = torch.randn(20, T, generator=torch.Generator().manual_seed(2))
    return tighter_gp.gplvm.BayesianGPLVM.from_data(Y, latent_dim=D, num_inducing=M, variational_strategy=strategy)


MODELS = {
    "one output": lambda: make_gp(points(M, seed=3), jitter_val=1e-6, mean=0.4),
    "one output of GPyTorch": lambda: make_gp(points(M, seed=3), strategy=VariationalStrategy, jitter_val=1e-6),
    "batch of models": lambda: make_gp(points(M, seed=3), batch_kernel(T), batch_shape=torch.Size([T])),
    "SOLVE-GP": lambda: make_solve_gp(points(M, seed=3), points(3, seed=4), jitter_val=None, mean=0.4),
    "independent tasks": lambda: multitask(IndependentMultitaskVariationalStrategy),
    "independent tasks of GPyTorch": lambda: multitask(IndependentMultitaskVariationalStrategy, VariationalStrategy),
    "mixed tasks": lambda: multitask(LMCVariationalStrategy),
    "mixed tasks of GPyTorch": lambda: multitask(LMCVariationalStrategy, VariationalStrategy),
    "GPLVM": gplvm,
    "GPLVM of GPyTorch": lambda: gplvm(VariationalStrategy),
    "feature extractor in __call__": lambda: Extracted(
        lambda model: TIGHTER(model, points(M, seed=3), CholeskyVariationalDistribution(M))
    ),
}


def per_point(q):
    """Mean and covariance of each point, from the whole covariance written out."""
    covariance = q.covariance_matrix
    if not isinstance(q, MultitaskMultivariateNormal):
        return q.mean, covariance.diagonal(dim1=-1, dim2=-2)
    n, t = q.event_shape
    blocks = covariance.unflatten(-1, (n, t)).unflatten(-3, (n, t)) if q._interleaved else None
    assert blocks is not None
    return q.mean, torch.stack([blocks[..., i, :, i, :] for i in range(n)], -3)


@pytest.mark.parametrize("kind", MODELS)
def test_predict_is_what_the_model_says_of_each_point(kind):
    model, x = shake(MODELS[kind]()), points()
    with torch.no_grad():
        expected = per_point(model(x))
    q = tighter_gp.predict(model, x, batch_size=4)
    for actual, wanted in zip(per_point(q), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["one output", "independent tasks", "mixed tasks"])
def test_points_are_independent_and_the_tasks_of_one_are_not(kind):
    q = tighter_gp.predict(shake(MODELS[kind]()), points())
    covariance = q.covariance_matrix
    size = T if len(q.event_shape) == 2 else 1
    within = torch.block_diag(*[torch.ones(size, size)] * N)
    assert (covariance * (1 - within)).abs().max() == 0
    between_tasks = (covariance * (within - torch.eye(N * size))).abs().max()
    assert (between_tasks > 1e-3) == (kind == "mixed tasks")


@pytest.mark.parametrize("kind", ["independent tasks", "mixed tasks"])
def test_y_from_the_answer_is_y_from_the_model(kind):
    model, likelihood, x = shake(MODELS[kind]()), gpytorch.likelihoods.MultitaskGaussianLikelihood(T), points()
    y = torch.randn(N, T)
    found = tighter_gp.log_density(likelihood, tighter_gp.predict(model, x), y)
    torch.testing.assert_close(found, tighter_gp.predict_y(model, likelihood, x).log_prob(y))
    torch.testing.assert_close(found, tighter_gp.log_density(likelihood, model(x), y))


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_left_behind(kind):
    model = shake(MODELS[kind]()).train()
    before, random_state = state(model), torch.get_rng_state()
    q = tighter_gp.predict(model, points())
    assert_state(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert not q.mean.requires_grad
    assert not q.variance.requires_grad


@pytest.mark.parametrize("output_dims", [None, T])
@pytest.mark.parametrize("strategy", [TIGHTER, VariationalStrategy])
def test_deep_gp_is_the_model_at_the_same_draws(output_dims, strategy):
    model, x = two_layers(num_outputs=output_dims, kind=strategy).eval(), points(dim=3)
    q = tighter_gp.predict(model, x, num_samples=7, seed=3)
    with torch.random.fork_rng([]), torch.no_grad(), gpytorch.settings.num_likelihood_samples(7):
        torch.manual_seed(3)
        expected = model(x)
    assert q.mean.shape == (7, N) + (() if output_dims is None else (T,))
    torch.testing.assert_close(q.mean, expected.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.variance, expected.variance, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["one output", "independent tasks", "mixed tasks", "one output of GPyTorch"])
def test_memory_is_that_of_the_answer_and_one_chunk(kind):
    model, count, chunk = shake(MODELS[kind]()), 20000, 50
    with LargestOutput() as sizes:
        tighter_gp.predict(model, points(count), batch_size=chunk)
    answer = count * {"mixed tasks": T * T, "independent tasks": T}.get(kind, D)
    assert sizes.largest <= max(answer, (chunk * T) ** 2, (chunk + M) ** 2 * T)


@pytest.mark.parametrize("kind", MODELS)
def test_no_points_have_an_empty_answer(kind):
    model = shake(MODELS[kind]())
    some, none = tighter_gp.predict(model, points()), tighter_gp.predict(model, points(0))
    dim = -len(some.event_shape)
    assert none.mean.shape == some.mean.narrow(dim, 0, 0).shape
    assert none.variance.shape == none.mean.shape


class Own(torch.nn.Module):
    """A model that gives q(f) itself."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def f_at(self, x):
        return self.scale * x.sum(-1), x.square().sum(-1)


class Network(torch.nn.Module):
    """A network before a GP."""

    def __init__(self):
        super().__init__()
        self.net, self.gp = torch.nn.Linear(D, D), shake(MODELS["one output"]())

    def forward(self, x):
        return self.gp(self.net(x))


@pytest.mark.parametrize("batch_size", [4, 100])
def test_any_module_that_gives_f_predicts(batch_size):
    x, model, network = points(), Own(), Network().train()
    q, y = tighter_gp.predict(model, x, batch_size=batch_size), tighter_gp.predict_y(model, make_noise(0.3), x)
    torch.testing.assert_close((q.mean, q.variance), (2 * x.sum(-1), x.square().sum(-1)))
    torch.testing.assert_close(y.variance, q.variance + 0.3)
    q, expected = tighter_gp.predict(network, x, batch_size=batch_size), network.eval()(x)
    torch.testing.assert_close((q.mean, q.variance), (expected.mean.detach(), expected.variance.detach()))
    with pytest.raises(TypeError, match="must return a MultivariateNormal in eval mode; got Tensor"):
        tighter_gp.predict(torch.nn.Linear(D, 1), x)


@pytest.mark.parametrize("dtype", ["f8", "f4", ">f8"])
def test_arrays_are_taken_and_read_in_chunks(dtype, tmp_path):
    model, values = shake(MODELS["one output"]()), points(30_000).numpy().astype(dtype)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with LargestOutput() as sizes:
        q = tighter_gp.predict(model, mapped, batch_size=100)
    assert sizes.largest <= 30_000  # one number per point: the inputs are twice that
    x = torch.tensor(values.astype("f8"))
    torch.testing.assert_close(q.variance, tighter_gp.predict(model, x).variance)
    one = randomize_q(make_gp(points(M, 1, seed=3)))
    assert torch.equal(tighter_gp.predict(one, values[:, 0]).mean, tighter_gp.predict(one, x[:, :1]).mean)


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.filterwarnings("ignore")  # BoTorch's advice on data
def test_model_of_botorch_is_unwrapped_and_its_inputs_transformed(num_outputs):
    make = pytest.importorskip("botorch.models", reason="needs BoTorch, in the test extra").SingleTaskVariationalGP
    from botorch.models.transforms import Normalize, Standardize

    x = 10 * points(20, seed=6)
    y = torch.stack([torch.sin(x[:, 0]), torch.cos(x[:, 1])], -1)[:, :num_outputs]
    model = make(x, y, inducing_points=M, variational_strategy=TIGHTER, input_transform=Normalize(D)).eval()
    model.posterior(x)  # the first call sets q(u)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    new = 10 * points()
    q, expected = tighter_gp.predict(model, new), model.posterior(new)
    shape = (N,) if num_outputs == 1 else (N, num_outputs)
    torch.testing.assert_close(q.mean, expected.mean.detach().reshape(shape), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(q.variance, expected.variance.detach().reshape(shape), rtol=1e-7, atol=1e-8)
    noisy = model.posterior(new, observation_noise=True).variance.detach().reshape(shape)
    torch.testing.assert_close(tighter_gp.predict_y(model, model.likelihood, new).variance, noisy, rtol=1e-7, atol=1e-8)
    model = make(x, y[:, :1], inducing_points=M, outcome_transform=Standardize(1))
    with pytest.raises(TypeError, match="use its posterior"):
        tighter_gp.predict(model, x)
