"""GPyTorch's multitask strategies, unmodified, around a tighter strategy; kernels that look at patches or features."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.functions import log_normal_cdf
from gpytorch.likelihoods import BernoulliLikelihood, MultitaskGaussianLikelihood, SoftmaxLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy
from linear_operator import to_linear_operator

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tighter_gp import TighterELBO

N, M, D, P, K, B = 11, 5, 2, 3, 2, 4
NUM_DATA = 23  # of which the N points are a batch


def close(actual, expected, rtol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-10)


def make_model(wrap, batch: tuple[int, ...], *, conditional="optimal", strategy=tighter_gp.TighterVariationalStrategy):
    """A batch of latent GPs with different hyperparameters and q(u), under a wrapper."""
    generator = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.rand(shape, generator=generator)
    kernel = gpytorch.kernels.ScaleKernel(
        gpytorch.kernels.RBFKernel(ard_num_dims=D, batch_shape=torch.Size(batch)), batch_shape=torch.Size(batch)
    )
    kernel.outputscale, kernel.base_kernel.lengthscale = 0.5 + rand(*batch), 0.6 + rand(*batch, 1, D)
    q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size(batch))
    q.variational_mean.data = rand(*batch, M) - 0.5
    q.chol_variational_covar.data = 0.3 * (rand(*batch, M, M) - 0.5).tril(-1) + torch.diag_embed(0.3 + rand(*batch, M))
    kwargs = {} if strategy is gpytorch.variational.VariationalStrategy else {"conditional": conditional}
    make = lambda model: wrap(strategy(model, 3 * rand(M, D), q, jitter_val=1e-6, **kwargs))
    model = GP(make, kernel)
    base = model.variational_strategy.base_variational_strategy
    base.variational_params_initialized.fill_(1)
    if isinstance(model.variational_strategy, LMCVariationalStrategy):
        model.variational_strategy.lmc_coefficients.data = rand(*batch, P) - 0.3
    return model


class Latent:
    """Dense moments of one latent function from the model's own parameters, with a graph to them."""

    def __init__(self, model, member: tuple[int, ...], x):
        strategy, kernel = model.variational_strategy, model.covar_module
        base = getattr(strategy, "base_variational_strategy", strategy)
        q, z = base._variational_distribution, base.inducing_points
        k = lambda a, b: dense.rbf(a, b, kernel.outputscale[member], kernel.base_kernel.lengthscale[member][0])
        Kuu, Kuf = k(z, z) + base.jitter_val * torch.eye(len(z)), k(z, x)
        L, inverse = torch.linalg.cholesky(Kuu), torch.linalg.inv(Kuu)
        root = L @ q.chol_variational_covar[member].tril()
        mean, cov = L @ q.variational_mean[member], root @ root.T
        self.mean = Kuf.T @ inverse @ mean
        self.s = (Kuf.T @ inverse @ cov @ inverse @ Kuf).diagonal() + base.jitter_val
        self.d = k(x, x).diagonal() - (Kuf.T @ inverse @ Kuf).diagonal()
        self.kl = dense.kl(mean, cov, torch.zeros(len(z)), Kuu)


def gaussian(y, mean, variance, noise):
    return -0.5 * (torch.log(2 * math.pi * noise) + ((y - mean) ** 2 + variance) / noise)


def price(m):
    return 0.5 * (m - 1 - torch.log(m))


def assert_same_value_and_gradients(model, likelihood, actual, expected):
    close(actual, expected)
    parameters = {**dict(model.named_parameters()), **dict(likelihood.named_parameters())}
    parameters = {name: p for name, p in parameters.items() if "mean_module" not in name}
    weights = torch.linspace(1, 2, actual.numel()).view_as(actual)
    gradients = [
        torch.autograd.grad((weights * value).sum(), list(parameters.values()), allow_unused=True)
        for value in (actual, expected)
    ]
    for name, left, right in zip(parameters, *gradients, strict=True):
        assert (left is None) == (right is None), name
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def independent(task_dim=-1, num_tasks=P):
    return lambda base: IndependentMultitaskVariationalStrategy(base, num_tasks=num_tasks, task_dim=task_dim)


def lmc(latent_dim=-1):
    return lambda base: LMCVariationalStrategy(base, num_tasks=P, num_latents=K, latent_dim=latent_dim, jitter_val=1e-7)


def task_noise(**kwargs):
    likelihood = MultitaskGaussianLikelihood(num_tasks=P, **kwargs)
    likelihood.initialize(task_noises=torch.tensor([0.05, 0.2, 0.4]), noise=0.03)
    return likelihood, likelihood.task_noises + likelihood.noise


def inputs(*batch: int):
    return 3 * torch.rand(*batch, N, D), torch.randn(*batch, N, P)


# ---- Independent tasks, Gaussian noise --------------------------------------------------------------------------------


def dense_independent(model, x, y, noise, members):
    """Sum over tasks of the single-output bound, per datum of a set of NUM_DATA."""
    total = 0.0
    for p, member in enumerate(members):
        f = Latent(model, member, x)
        m = noise[p] / (noise[p] + f.d)
        data = gaussian(y[:, p], f.mean, f.s + m * f.d, noise[p]).sum() - price(m).sum()
        total = total + data / N - f.kl / NUM_DATA
    return total


def test_independent_tasks_are_the_sum_of_their_bounds():
    model, (x, y) = make_model(independent(), (P,)), inputs()
    likelihood, noise = task_noise()
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), y)
    expected = dense_independent(model, x, y, noise, [(p,) for p in range(P)])
    assert_same_value_and_gradients(model, likelihood, actual, expected)


@pytest.mark.parametrize(
    ("task_dim", "batch"), [(-1, (B, P)), (-2, (P, B)), (0, (P, B)), (1, (B, P)), (-2, (P, P)), (-1, (P, P))]
)
def test_every_task_dimension_leaves_a_batch_of_models(task_dim, batch):
    model, (x, y) = make_model(independent(task_dim), batch), inputs()
    likelihood, noise = task_noise()
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), y)
    first = task_dim % 2 == 0
    members = lambda b: [(p, b) if first else (b, p) for p in range(P)]
    num_models = batch[1] if first else batch[0]
    expected = torch.stack([dense_independent(model, x, y, noise, members(b)) for b in range(num_models)])
    assert_same_value_and_gradients(model, likelihood, actual, expected)


@pytest.mark.parametrize("batch", [(), (B,)])
def test_tasks_that_repeat_one_function_share_its_scale_and_pay_once(batch):
    task_dim = -1 - len(batch)
    model, (x, y) = make_model(independent(task_dim), batch), inputs()
    likelihood, noise = task_noise()
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), y)
    values = []
    for member in [(b,) for b in range(B)] if batch else [()]:
        f = Latent(model, member, x)
        m = 1 / (1 + f.d * (1 / noise).sum())
        data = sum(gaussian(y[:, p], f.mean, f.s + m * f.d, noise[p]).sum() for p in range(P)) - price(m).sum()
        values.append(data / N - f.kl / NUM_DATA)
    assert_same_value_and_gradients(model, likelihood, actual, torch.stack(values).view(batch))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("wrap", "batch"), [(independent(), (P,)), (lmc(), (K,))])
def test_gpytorchs_objective_has_the_gradients_of_its_own_strategy_under_every_wrapper(wrap, batch, training):
    (x, y), gradients = inputs(), []
    for strategy in (tighter_gp.TighterVariationalStrategy, gpytorch.variational.VariationalStrategy):
        model, (likelihood, _) = make_model(wrap, batch, strategy=strategy), task_noise()
        VariationalELBO(likelihood, model.train(training), NUM_DATA)(model(x), y).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-6, atol=1e-8, msg=name)


# ---- Linear model of coregionalisation, Gaussian noise ----------------------------------------------------------------


def dense_lmc(model, x, y, noise, members, jitter=1e-7):
    W = model.variational_strategy.lmc_coefficients
    mean, variance, total = 0.0, jitter, 0.0
    for member in members:
        f = Latent(model, member, x)
        m = 1 / (1 + f.d * (W[member] ** 2 / noise).sum())
        mean = mean + f.mean.unsqueeze(-1) * W[member]
        variance = variance + (f.s + m * f.d).unsqueeze(-1) * W[member] ** 2
        total = total - price(m).sum() / N - f.kl / NUM_DATA
    return total + gaussian(y, mean, variance, noise).sum() / N


@pytest.mark.parametrize(("latent_dim", "batch"), [(-1, (K,)), (-1, (B, K)), (-2, (K, B))])
def test_lmc_scales_weigh_the_tasks_that_see_a_latent(latent_dim, batch):
    model, (x, y) = make_model(lmc(latent_dim), batch), inputs()
    likelihood, noise = task_noise()
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), y)
    if len(batch) == 1:
        expected = dense_lmc(model, x, y, noise, [(k,) for k in range(K)])
    else:
        members = lambda b: [(b, k) if latent_dim == -1 else (k, b) for k in range(K)]
        expected = torch.stack([dense_lmc(model, x, y, noise, members(b)) for b in range(B)])
    assert_same_value_and_gradients(model, likelihood, actual, expected)


# ---- One task per point -----------------------------------------------------------------------------------------------

TASKS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 2, 0, 1, 2])


@pytest.mark.parametrize("batch", [(P,), (B, P)])
def test_task_indices_give_each_task_the_bound_of_its_own_points(batch):
    model, (x, y) = make_model(independent(), batch), inputs()
    y, likelihood = y[:, 0], make_noise(0.2)
    noise = likelihood.noise
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x, task_indices=TASKS), y)
    values = []
    for b in range(B) if len(batch) == 2 else [None]:
        total = 0.0
        for p in range(P):
            rows = p == TASKS
            f = Latent(model, (p,) if b is None else (b, p), x[rows])
            m = noise / (noise + f.d)
            data = gaussian(y[rows], f.mean, f.s + m * f.d, noise).sum() - price(m).sum()
            total = total + data / N - f.kl / NUM_DATA
        values.append(total)
    assert_same_value_and_gradients(model, likelihood, actual, torch.stack(values).view(batch[:-1]))


def test_task_indices_in_an_lmc_scale_each_latent_by_the_task_of_the_point():
    model, (x, y) = make_model(lmc(), (K,)), inputs()
    y, likelihood = y[:, 0], make_noise(0.2)
    noise, W = likelihood.noise, model.variational_strategy.lmc_coefficients
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x, task_indices=TASKS), y)
    mean, variance, expected = 0.0, 1e-7, 0.0
    for k in range(K):
        f, w = Latent(model, (k,), x), W[k, TASKS]
        m = 1 / (1 + w**2 * f.d / noise)
        mean, variance = mean + w * f.mean, variance + w**2 * (f.s + m * f.d)
        expected = expected - price(m).sum() / N - f.kl / NUM_DATA
    expected = expected + gaussian(y, mean, variance, noise).sum() / N
    assert_same_value_and_gradients(model, likelihood, actual, expected)


# ---- Classification ---------------------------------------------------------------------------------------------------


def learned(name, conditional, member, d):
    if name == "beta":
        return conditional.beta[member] / (conditional.beta[member] + d)
    return conditional.m[member].expand_as(d)


def set_learned(model, name, batch):
    conditional = model.variational_strategy.base_variational_strategy.conditional
    values = torch.linspace(0.3, 0.8, math.prod(batch)).view(batch)
    conditional.initialize(**({"beta": values} if name == "beta" else {"m": values}))
    return conditional


def gauss_hermite(log_prob, mean, variance, order=20):
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(order))
    f = mean + torch.sqrt(2 * variance) * nodes.view(-1, *(1 for _ in mean.shape))
    return (weights.view(-1, *(1 for _ in mean.shape)) * log_prob(f)).sum(0) / math.sqrt(math.pi)


@pytest.mark.parametrize("name", ["beta", "scalar"])
@pytest.mark.parametrize("batch", [(P,), (B, P)])
def test_bernoulli_tasks_are_the_sum_of_their_bounds(name, batch):
    model, (x, y) = make_model(independent(), batch, conditional=name), inputs()
    conditional, y, likelihood = set_learned(model, name, batch), (y > 0).double(), BernoulliLikelihood()
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), y)
    values = []
    for b in range(B) if len(batch) == 2 else [None]:
        total = 0.0
        for p in range(P):
            member = (p,) if b is None else (b, p)
            f = Latent(model, member, x)
            m = learned(name, conditional, member, f.d)
            log_prob = lambda g, p=p: log_normal_cdf((2 * y[:, p] - 1) * g)
            data = gauss_hermite(log_prob, f.mean, f.s + m * f.d).sum() - price(m).sum()
            total = total + data / N - f.kl / NUM_DATA
        values.append(total)
    assert_same_value_and_gradients(model, likelihood, actual, torch.stack(values).view(batch[:-1]))


def softmax_value(model, likelihood, name, x, labels, members, draws, coefficients=None, jitter=0.0):
    """Mean over given standard normal draws, S x N x P, of the log softmax, less the other terms."""
    conditional = model.variational_strategy.base_variational_strategy.conditional
    latents = [Latent(model, member, x) for member in members]
    scales = [learned(name, conditional, member, f.d) for member, f in zip(members, latents, strict=True)]
    mean = torch.stack([f.mean for f in latents], -1)
    variance = torch.stack([f.s + m * f.d for f, m in zip(latents, scales, strict=True)], -1)
    if coefficients is None:
        f = mean + torch.sqrt(variance) * draws
    else:
        covariance = coefficients.T @ torch.diag_embed(variance) @ coefficients + jitter * torch.eye(P)
        f = mean @ coefficients + (torch.linalg.cholesky(covariance) @ draws.unsqueeze(-1)).squeeze(-1)
    logits = f if likelihood.mixing_weights is None else f @ likelihood.mixing_weights.T
    chosen = torch.log_softmax(logits, -1).gather(-1, labels.expand(len(f), -1).unsqueeze(-1)).squeeze(-1)
    data = chosen.mean(0).sum() - sum(price(m).sum() for m in scales)
    return data / len(x) - sum(f.kl for f in latents) / NUM_DATA


# A batch of as many points as there are features is read transposed by GPyTorch itself.
@pytest.mark.parametrize("num_points", [N, P])
@pytest.mark.parametrize("name", ["beta", "scalar"])
@pytest.mark.parametrize("mixing_weights", [True, False])
def test_softmax_bound_is_the_dense_one_at_the_same_draws(name, mixing_weights, num_points):
    model, x = make_model(independent(), (P,), conditional=name), 3 * torch.rand(num_points, D)
    set_learned(model, name, (P,))
    likelihood = SoftmaxLikelihood(
        num_features=P, num_classes=4 if mixing_weights else P, mixing_weights=mixing_weights
    )
    labels = torch.arange(num_points) % 3
    torch.manual_seed(5)
    actual = tighter_gp.TighterELBO(likelihood, model, NUM_DATA)(model(x), labels)
    torch.manual_seed(5)
    draws = torch.randn(10, num_points, P)
    expected = softmax_value(model, likelihood, name, x, labels, [(p,) for p in range(P)], draws)
    assert_same_value_and_gradients(model, likelihood, actual, expected)


# ---- Kernels of patches and of learned features -----------------------------------------------------------------------


def test_deep_kernel_gives_the_dense_bound_and_trains_its_network():
    """A kernel on the outputs of a network; inducing points live in the space of the inputs."""
    x, z, y = torch.rand(N, 3), torch.rand(M, 3), torch.randn(N)
    network = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    kernel, noise = make_kernel("rbf", 0.7, torch.tensor([0.3, 0.5])), torch.full((N,), 0.1)
    q, likelihood = dense.random_q(M), make_noise(0.1)
    model = make_gp(z, kernel, q)
    model.forward = lambda x: GP.forward(model, network(x))

    k = lambda a, b: dense.rbf(network(a), network(b), 0.7, torch.tensor([0.3, 0.5]))
    Kuu, Kuf, Kff = k(z, z), k(z, x), k(x, x)
    Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
    problem = dense.Problem(x, y, z, noise, Kuu, Kuf, Kff, Q, Kff - Q, 0.7, torch.ones(2), "rbf")
    expected = dense.uncollapsed(problem, q[0], q[1] @ q[1].T, noise / (noise + problem.d))
    actual = N * tighter_gp.TighterELBO(likelihood, model, N)(model(x), y)
    close(actual, expected, rtol=1e-8)
    weights = list(network.parameters())
    gradients, wanted = (torch.autograd.grad(value, weights) for value in (actual, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-8)


class Areal(GP):
    """Observes sums of f over neighbouring points."""

    def __call__(self, x, prior=False, **kwargs):
        q = super().__call__(x, prior=prior, **kwargs)
        if prior:
            return q
        sums = torch.ones(1, x.size(-2))
        operator = to_linear_operator(sums)
        return q.__class__(q.mean @ sums.mT, operator @ q.lazy_covariance_matrix @ operator.mT)


def test_sums_over_points_have_no_tighter_bound():
    make = lambda model: tighter_gp.TighterVariationalStrategy(
        model, torch.tensor([[100.0]]), gpytorch.variational.CholeskyVariationalDistribution(1, mean_init_std=0.0)
    )
    model, likelihood, y = Areal(make), make_noise(4.0), torch.zeros(1)
    x = torch.linspace(0, 0.1, 4).unsqueeze(-1)
    standard = VariationalELBO(likelihood, model, 1)(model(x), y)
    covariance = model.covar_module(x).to_dense().sum().reshape(1, 1) + 4
    evidence = torch.distributions.MultivariateNormal(torch.zeros(1), covariance).log_prob(y)
    assert standard < evidence
    with pytest.raises(TypeError, match=r"mixes points.*VariationalELBO"):
        TighterELBO(likelihood, model, 1)(model(x), y)


@pytest.mark.parametrize("num_points", [3, 4])  # as many as classes, and not
def test_a_point_without_a_label_pays_for_none_of_its_functions(num_points):
    model = make_model(independent(), (P,), conditional="scalar")
    scales = torch.tensor([0.9, 0.001, 0.8])
    model.variational_strategy.base_variational_strategy.conditional.m = scales
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    mll = TighterELBO(likelihood, model, num_points, combine_terms=False)
    labels = torch.arange(float(num_points)) % 3
    labels[1] = math.nan
    with gpytorch.settings.observation_nan_policy("fill"):
        paid = num_points * mll(model(torch.rand(num_points, D)), labels).conditional
    expected = (num_points - 1) * price(scales).sum()
    torch.testing.assert_close(paid, expected)


def test_learned_scales_follow_their_task_to_another_dimension():
    model = make_model(independent(-2, num_tasks=2), (2, 2), conditional="scalar")
    strategy = model.variational_strategy.base_variational_strategy
    strategy.conditional.m = torch.tensor([[0.9, 0.1], [0.9, 0.1]])  # task, model
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, batch_shape=torch.Size([2]))
    mll = TighterELBO(likelihood, model, 5, combine_terms=False)
    paid = mll(model(torch.rand(5, D)), torch.randn(2, 5, 2)).conditional
    torch.testing.assert_close(paid, 2 * price(torch.tensor([0.9, 0.1])))
