"""GPyTorch's deep GPs, unmodified, with tighter strategies in their layers; doubly stochastic bounds at fixed draws."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.functions import log_normal_cdf
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import DeepApproximateMLL
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer

import tighter_gp
from tests.equations.test_wrappers import Latent, assert_same_value_and_gradients, gauss_hermite, gaussian, price
from tests.tools import dense
from tests.tools.factories import make_noise
from tighter_gp.conditionals import PerPoint

N, D, H, P = 9, 3, 2, 4
NUM_DATA = 21
SAMPLES = 5
TIGHTER = tighter_gp.TighterVariationalStrategy


class Layer(DeepGPLayer):
    """One layer with hyperparameters and q(u) of its own for each of its functions."""

    def __init__(self, num_inputs, num_outputs, conditional, num_inducing, seed, kind=TIGHTER):
        generator = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.rand(shape, generator=generator)
        batch = () if num_outputs is None else (num_outputs,)
        shape = torch.Size(batch)
        q = gpytorch.variational.CholeskyVariationalDistribution(num_inducing, batch_shape=shape)
        q.variational_mean.data = 2 * rand(*batch, num_inducing) - 1
        q.chol_variational_covar.data = torch.diag_embed(0.2 + 0.5 * rand(*batch, num_inducing))
        options = {"conditional": conditional} if kind is TIGHTER else {}
        strategy = kind(self, 2 * rand(num_inducing, num_inputs) - 1, q, jitter_val=1e-6, **options)
        strategy.variational_params_initialized.fill_(1)
        super().__init__(strategy, num_inputs, num_outputs)
        self.mean_module = gpytorch.means.ZeroMean()
        rbf = gpytorch.kernels.RBFKernel(ard_num_dims=num_inputs, batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf, batch_shape=shape)
        self.covar_module.outputscale, rbf.lengthscale = 0.5 + rand(*batch), 0.7 + rand(*batch, 1, num_inputs)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


def two_layers(hidden="scalar", last="optimal", num_outputs=None, kind=TIGHTER):
    first, second = Layer(D, H, hidden, 6, seed=1, kind=kind), Layer(H, num_outputs, last, 5, seed=2, kind=kind)
    if hidden == "scalar" and kind is TIGHTER:
        first.variational_strategy.conditional.m = torch.tensor([0.4, 0.7])
    return Deep(first, second)


def evaluate(model, likelihood, x, y):
    mll = DeepApproximateMLL(tighter_gp.TighterELBO(likelihood, model, NUM_DATA))
    torch.manual_seed(7)
    with gpytorch.settings.num_likelihood_samples(SAMPLES):
        return mll(model(x), y)


def hidden_samples(layer, x, scales):
    """Draws of a layer's outputs, S x N x H, with the seed of :func:`evaluate`, and the KL of its q(u)."""
    torch.manual_seed(7)
    draws = torch.randn(SAMPLES, len(x), H)
    functions = [Latent(layer, (h,), x) for h in range(H)]
    mean = torch.stack([f.mean for f in functions], -1)
    variance = torch.stack([f.s + m * f.d for f, m in zip(functions, scales, strict=True)], -1)
    return mean + torch.sqrt(variance) * draws, sum(f.kl for f in functions)


def dense_two_layers(model, noise, x, y, scales):
    """Scales m_h in the hidden layer, the closed form given the hidden draw in the last."""
    first, second = model.layers
    samples, kl = hidden_samples(first, x, scales)
    data = 0.0
    for hidden in samples:
        f = Latent(second, (), hidden)
        m = noise / (noise + f.d)
        data = data + (gaussian(y, f.mean, f.s + m * f.d, noise).sum() - price(m).sum()) / SAMPLES
    paid = sum(price(m) for m in scales)
    return data / len(x) - paid - (kl + f.kl) / NUM_DATA


def test_hidden_scalar_and_closed_form_last_layer_give_the_dense_bound():
    model, likelihood, x, y = two_layers(), make_noise(0.1), torch.randn(N, D), torch.randn(N)
    actual = evaluate(model, likelihood, x, y)
    scales = model.layers[0].variational_strategy.conditional.m
    assert_same_value_and_gradients(model, likelihood, actual, dense_two_layers(model, likelihood.noise, x, y, scales))


def test_optimal_in_a_hidden_layer_leaves_it_as_in_svgp():
    model, likelihood = two_layers(hidden="optimal"), make_noise(0.1)
    x, y = torch.randn(N, D), torch.randn(N)
    actual = evaluate(model, likelihood, x, y)
    expected = dense_two_layers(model, likelihood.noise, x, y, torch.ones(H))
    assert_same_value_and_gradients(model, likelihood, actual, expected)


def test_all_hidden_layers_pay():
    middle = Layer(H, 3, "scalar", 4, seed=3)
    model = Deep(Layer(D, H, "scalar", 6, seed=1), middle, Layer(3, None, "optimal", 5, seed=2))
    likelihood, x, y = make_noise(0.1), torch.randn(N, D), torch.randn(N)
    mll = tighter_gp.TighterELBO(likelihood, model, NUM_DATA, combine_terms=False)
    model.layers[0].variational_strategy.conditional.m = torch.tensor([0.3, 0.6])
    middle.variational_strategy.conditional.m = torch.tensor([0.2, 0.5, 0.9])
    output = model(x)
    last = output.lazy_covariance_matrix.residual / likelihood.noise
    own = price(1 / (1 + last)).mean(-1)
    hidden = price(torch.tensor([0.3, 0.6, 0.2, 0.5, 0.9])).sum()
    torch.testing.assert_close(mll(output, y).conditional, own + hidden, rtol=1e-10, atol=0)


def test_beta_in_the_last_layer_with_a_bernoulli_likelihood():
    model, likelihood = two_layers(last="beta"), BernoulliLikelihood()
    x, y = torch.randn(N, D), (torch.randn(N) > 0).double()
    first, second = model.layers
    second.variational_strategy.conditional.beta = 0.5
    beta, scales = second.variational_strategy.conditional.beta, first.variational_strategy.conditional.m
    actual = evaluate(model, likelihood, x, y)
    samples, kl = hidden_samples(first, x, scales)
    data = 0.0
    for hidden in samples:
        f = Latent(second, (), hidden)
        m = beta / (beta + f.d)
        expectation = gauss_hermite(lambda g: log_normal_cdf((2 * y - 1) * g), f.mean, f.s + m * f.d)
        data = data + (expectation.sum() - price(m).sum()) / SAMPLES
    expected = data / N - price(scales).sum() - (kl + f.kl) / NUM_DATA
    assert_same_value_and_gradients(model, likelihood, actual, expected)


def test_beta_in_a_hidden_layer_raises():
    model, x, y = two_layers(hidden="beta"), torch.randn(N, D), torch.randn(N)
    with pytest.raises(TypeError, match="BetaConditional in a hidden layer gives no bound"):
        evaluate(model, make_noise(0.1), x, y)


def test_a_scale_per_point_in_a_hidden_layer_raises():
    model, x, y = two_layers(hidden=PerPoint(N)), torch.randn(N, D), torch.randn(N)
    mll = DeepApproximateMLL(tighter_gp.TighterELBO(make_noise(0.1), model, NUM_DATA))
    with pytest.raises(TypeError, match="PerPoint in a hidden layer gives no bound"):
        mll(model(x, index=torch.arange(N)), y)


def test_trained_bound_is_above_the_standard_one_and_below_the_evidence():
    """Two points, one hidden function: the evidence is an integral over two hidden values."""
    x, y, noise = torch.tensor([[-0.5], [0.6]]), torch.tensor([1.2, -0.7]), 0.05
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(30))
    kernel = lambda a, b: dense.rbf(a, b, 1.0, torch.ones(1))
    grid = math.sqrt(2) * torch.cartesian_prod(nodes, nodes) @ torch.linalg.cholesky(kernel(x, x)).T
    log_weights = torch.log(torch.cartesian_prod(weights, weights).prod(-1) / math.pi)
    covariance = kernel(grid.unsqueeze(-1), grid.unsqueeze(-1)) + noise * torch.eye(2)
    densities = torch.distributions.MultivariateNormal(torch.zeros(2), covariance).log_prob(y)
    evidence = torch.logsumexp(log_weights + densities, 0)

    def trained(hidden, objective):
        layers = [Layer(1, 1, hidden, 1, seed=4), Layer(1, None, "optimal", 1, seed=5)]
        for layer in layers:
            layer.covar_module.outputscale, layer.covar_module.base_kernel.lengthscale = 1.0, 1.0
            layer.covar_module.requires_grad_(False)
        model, likelihood = Deep(*layers), make_noise(noise).requires_grad_(False)
        mll = DeepApproximateMLL(objective(likelihood, model, len(y)))
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
        torch.manual_seed(0)
        for _ in range(60):
            optimizer.zero_grad()
            with gpytorch.settings.num_likelihood_samples(16):
                (-mll(model(x), y)).backward()
            optimizer.step()
        torch.manual_seed(1)
        with gpytorch.settings.num_likelihood_samples(20_000), torch.no_grad():
            return len(y) * mll(model(x), y)

    standard = trained("optimal", gpytorch.mlls.VariationalELBO)
    tighter = trained("scalar", tighter_gp.TighterELBO)
    assert standard + 0.1 < tighter < evidence
