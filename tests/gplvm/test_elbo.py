"""The objective of the Bayesian GPLVM: golden values, a dense transcription, batches, samples, missing entries."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import VariationalStrategy

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_kernel, make_noise
from tests.tools.golden import VECTORS
from tighter_gp.gplvm import BayesianGPLVM, LatentVariableELBO, VariationalLatents
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tighter_gp.training import fit

GOLDEN = VECTORS["gplvm"]


def make_model(z, mean, variance, num_outputs, kernel=None, likelihood=None, q=None, **kwargs):
    """A GPLVM with given q(x), and given whitened q(u) if ``q = (mean, root)``."""
    latents = VariationalLatents(mean, stddev=variance.sqrt())
    kwargs.setdefault("jitter_val", 0.0)
    model = BayesianGPLVM(latents, z, num_outputs, likelihood, covar_module=kernel, **kwargs)
    strategy = model.variational_strategy
    if q is not None:
        strategy._variational_distribution.variational_mean.data.copy_(q[0])
        strategy._variational_distribution.chol_variational_covar.data.copy_(q[1])
        strategy.variational_params_initialized.fill_(1)
    return model


class Toy:
    """A small problem with every size different: N=11, M=4, P=3, Q=2."""

    def __init__(self, seed=0, num_data=11, per_output=False):
        generator = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=generator)
        self.mean, self.variance = randn(num_data, 2), 0.05 + 0.3 * torch.rand(num_data, 2, generator=generator)
        self.z, self.y = randn(4, 2), randn(num_data, 3)
        self.q = (randn(3, 4), 0.2 * randn(3, 4, 4).tril(-1) + torch.diag_embed(0.3 + randn(3, 4).abs()))
        self.lengthscales, self.outputscale = torch.tensor([0.8, 1.3]), 1.4
        self.noise = torch.tensor([0.1, 0.3, 0.7]) if per_output else torch.tensor(0.2)
        self.x = self.mean + self.variance.sqrt() * randn(5, num_data, 2)

    def model(self, **kwargs):
        if self.noise.dim():
            likelihood = GaussianLikelihood(batch_shape=torch.Size([3]))
            likelihood.noise = self.noise.unsqueeze(-1)
        else:
            likelihood = make_noise(self.noise)
        kernel = make_kernel("rbf", self.outputscale, self.lengthscales)
        kwargs = {"likelihood": likelihood, "kernel": kernel, "q": self.q, **kwargs}
        return make_model(self.z, self.mean, self.variance, 3, **kwargs)

    def elbo(self, model=None, **kwargs):
        model = self.model() if model is None else model
        return LatentVariableELBO(model.likelihood, model, len(self.y), **kwargs)


def dense_objective(y, x, mean, variance, z, mw, root, outputscale, lengthscales, noise, scale, observed=None):
    """N times the objective at one draw x, entry by entry from the unwhitened definition.

    ``scale(d, noise_p)`` gives m of each entry.
    """
    Kuu, Kuf = dense.rbf(z, z, outputscale, lengthscales), dense.rbf(z, x, outputscale, lengthscales)
    L, inverse = torch.linalg.cholesky(Kuu), torch.linalg.inv(Kuu)
    W = inverse @ Kuf
    d = outputscale - (Kuf * W).sum(0)
    total = 0.0
    for p in range(y.shape[1]):
        sigma = noise[p] if noise.dim() else noise
        mu, S = L @ mw[p], L @ root[p] @ root[p].T @ L.T
        total = total - dense.kl(mu, S, torch.zeros_like(mu), Kuu)
        m = scale(d, sigma)
        expected = -0.5 * (
            torch.log(2 * math.pi * sigma) + ((y[:, p] - W.T @ mu) ** 2 + (W.T @ S @ W).diagonal() + m * d) / sigma
        )
        entries = expected + 0.5 * (1 + torch.log(m) - m)
        total = total + (entries if observed is None else entries[observed[:, p]]).sum()
    return total - 0.5 * (variance + mean**2 - 1 - torch.log(variance)).sum()


OPTIMAL = lambda d, noise: noise / (noise + d)
ONE = lambda d, noise: torch.ones_like(d)


def close(value, expected, rel=1e-9):
    torch.testing.assert_close(value, torch.as_tensor(expected).expand_as(value), rtol=rel, atol=1e-12)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
@pytest.mark.parametrize("name", ["sampled_objective_V", "sampled_objective_T", "sampled_objective_T_beta"])
def test_sampled_objective_is_golden(case, name):
    tensor = lambda key: torch.tensor(case[key])
    kernel = make_kernel(case["kernel"]["type"], case["kernel"]["variance"], case["kernel"]["lengthscales"])
    y, q = tensor("Y"), (tensor("q_u_whitened_mean"), tensor("q_u_whitened_chol"))
    conditional = "beta" if name.endswith("beta") else "optimal"
    model = make_model(
        tensor("Z"), tensor("q_x_mean"), tensor("q_x_var"), y.size(1), kernel, make_noise(case["noise_variance"]), q,
        conditional=conditional,
    )  # fmt: skip
    if conditional == "beta":
        model.variational_strategy.conditional.beta = case["beta"]
    objective = VariationalELBO if name.endswith("V") else None
    elbo = LatentVariableELBO(model.likelihood, model, len(y), objective=objective)
    q_x = model.latents.q()
    x = q_x.mean + q_x.stddev * tensor("x_eps")
    close(x, torch.tensor(case["expected"]["x_sample"]))
    close(model.latents.kl_divergence().sum(), case["expected"]["kl_x"])
    close(elbo.at(x.unsqueeze(0), q_x, y).bound * len(y), case["expected"][name])


@pytest.mark.parametrize("per_output", [False, True], ids=["shared noise", "noise per output"])
@pytest.mark.parametrize("tighter", [False, True])
def test_value_and_gradients_are_the_dense_ones(per_output, tighter):
    toy = Toy(per_output=per_output)
    model = toy.model()
    elbo = toy.elbo(model, objective=None if tighter else VariationalELBO)
    eps = (toy.x[0] - toy.mean) / toy.variance.sqrt()
    q_x = model.latents.q()
    (elbo.at((q_x.mean + q_x.stddev * eps).unsqueeze(0), q_x, toy.y).bound * len(toy.y)).backward()

    inputs = [toy.mean, toy.variance.sqrt(), toy.z, *toy.q, toy.lengthscales, toy.noise]
    mean, stddev, z, mw, root, lengthscales, noise = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = dense_objective(
        toy.y, mean + stddev * eps, mean, stddev**2, z, mw, root, toy.outputscale, lengthscales, noise,
        OPTIMAL if tighter else ONE,
    )  # fmt: skip
    expected.backward()
    close(elbo.at(toy.x[:1], model.latents.q(), toy.y).bound * len(toy.y), expected.detach())
    strategy = model.variational_strategy
    chain = lambda parameter, raw: torch.autograd.grad(parameter, raw, torch.ones_like(parameter))[0]
    close(model.latents.mean.grad, mean.grad, 1e-7)
    close(model.latents.raw_stddev.grad, stddev.grad * chain(model.latents.stddev, model.latents.raw_stddev), 1e-7)
    close(strategy.inducing_points.grad, z.grad, 1e-7)
    close(strategy._variational_distribution.variational_mean.grad, mw.grad, 1e-7)
    close(strategy._variational_distribution.chol_variational_covar.grad.tril(), root.grad.tril(), 1e-7)
    raw = model.covar_module.base_kernel.raw_lengthscale
    close(raw.grad.squeeze(0), lengthscales.grad * chain(model.covar_module.base_kernel.lengthscale, raw)[0], 1e-7)
    raw = model.likelihood.raw_noise
    close(raw.grad.flatten(), noise.grad.flatten() * chain(model.likelihood.noise, raw).flatten(), 1e-7)


def test_mean_over_a_partition_is_the_full_objective():
    toy = Toy()
    elbo = toy.elbo()
    full = elbo.at(toy.x, elbo.model.latents.q(), toy.y).bound
    parts = torch.randperm(len(toy.y)).split(4)  # 4, 4 and 3 rows
    weighted = sum(
        len(rows) / len(toy.y) * elbo.at(toy.x[:, rows], elbo.model.latents.q(rows), toy.y[rows]).bound
        for rows in parts
    )
    close(weighted, full)


def test_evaluate_is_the_objective_of_all_rows_and_does_not_depend_on_chunks():
    toy = Toy()
    model = toy.model().eval()
    elbo = toy.elbo(model)
    model.latents.stddev = 1e-9  # so that every draw is the mean
    whole, chunked = (elbo.evaluate(toy.y, num_samples=2, batch_size=size) for size in (100, 4))
    assert not model.training
    model.train()
    close(chunked, whole, 1e-7)
    close(whole, elbo.at(toy.mean.unsqueeze(0), model.latents.q(), toy.y).bound.detach(), 1e-7)


@pytest.mark.parametrize("conditional", ["beta", "scalar", "per point"])
def test_learned_conditionals_sum_their_price_over_outputs(conditional):
    toy = Toy()
    if conditional == "per point":
        conditional = tighter_gp.PerPoint(len(toy.y), batch_shape=torch.Size([3]))
        conditional.m = 0.1 + 0.8 * torch.rand(3, len(toy.y))
    model = toy.model(conditional=conditional)
    index = torch.tensor([8, 1, 5, 3])
    terms = toy.elbo(model, combine_terms=False).at(toy.x[:, index], model.latents.q(index), toy.y[index], index=index)
    used = model.variational_strategy.conditional
    price = 0.0
    for x in toy.x[:, index]:
        residual = 1.4 - (
            dense.rbf(toy.z, x, 1.4, toy.lengthscales)
            * (
                torch.linalg.inv(dense.rbf(toy.z, toy.z, 1.4, toy.lengthscales))
                @ dense.rbf(toy.z, x, 1.4, toy.lengthscales)
            )
        ).sum(0)
        for p in range(3):
            if conditional == "beta":
                m = used.beta[p] / (used.beta[p] + residual)
            else:
                m = used.m[p] if conditional == "scalar" else used.m[p, index]
            price = price + 0.5 * (m - 1 - torch.log(m)).expand(4).mean() / len(toy.x)
    close(terms.conditional, price)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("tighter", [False, True])
@pytest.mark.parametrize("as_mask", [False, True], ids=["nan", "mask"])
def test_bound_with_missing_entries_is_the_bound_with_their_terms_dropped(per_output, tighter, as_mask):
    toy = Toy(per_output=per_output)
    observed = torch.rand(toy.y.shape) > 0.4
    observed[3] = False  # a row of which nothing is known
    elbo = toy.elbo(objective=None if tighter else VariationalELBO)
    q_x = elbo.model.latents.q()
    if as_mask:
        value = elbo.at(toy.x[:1], q_x, torch.where(observed, toy.y, 1e6), mask=observed).bound
    else:
        value = elbo.at(toy.x[:1], q_x, torch.where(observed, toy.y, torch.nan)).bound
    expected = dense_objective(
        toy.y, toy.x[0], toy.mean, toy.variance, toy.z, *toy.q, toy.outputscale, toy.lengthscales, toy.noise,
        OPTIMAL if tighter else ONE, observed,
    )  # fmt: skip
    close(value * len(toy.y), expected)


@pytest.mark.parametrize("objective", [None, VariationalELBO])
def test_non_gaussian_missing_entries_are_dropped(objective):
    toy = Toy()
    counts = torch.poisson(torch.full_like(toy.y, 2.0))
    observed = torch.rand(toy.y.shape) > 0.5
    kwargs = {"conditional": "scalar"} if objective is None else {"variational_strategy": VariationalStrategy}
    model = toy.model(likelihood=PoissonLikelihood(), **kwargs)
    elbo = toy.elbo(model, combine_terms=False, objective=objective)
    terms = elbo.at(toy.x, model.latents.q(), counts, mask=observed)
    q_f = model(toy.x.flatten(0, 1))
    targets = counts.mT.repeat(1, 5)
    mean, variance = q_f.mean, q_f.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
    entries = targets * mean - torch.exp(mean + variance / 2) - torch.lgamma(targets + 1)
    expected = entries[observed.mT.repeat(1, 5)].sum() / (5 * len(counts))
    close(terms.log_likelihood, expected)
    terms.bound.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.latents.parameters())


def curve(num_data=60, num_outputs=5, seed=0):
    """Noisy points of a closed curve in ``num_outputs`` dimensions, in unit variance."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(num_data, 1, generator=generator)
    phase = torch.linspace(0, 2.5, num_outputs)
    y = torch.sin(angle + phase) + 0.3 * torch.cos(2 * angle - phase)
    y = y + 0.05 * torch.randn(num_data, num_outputs, generator=generator)
    return (y - y.mean(0)) / y.std(0)


def test_fit_trains_it_with_missing_entries():
    y = curve()
    y[torch.rand(y.shape) < 0.2] = torch.nan
    model = BayesianGPLVM.from_data(y, 2, 9)
    before = LatentVariableELBO(model.likelihood, model, len(y)).evaluate(y)
    fit(
        model, model.likelihood, None, y, objective=LatentVariableELBO, steps=120, batch_size=20, lr=0.05, num_samples=2
    )
    assert LatentVariableELBO(model.likelihood, model, len(y)).evaluate(y) > before + 1


OTHERS = {
    "student-t": lambda: gpytorch.likelihoods.StudentTLikelihood().initialize(noise=0.01),
    "laplace": lambda: gpytorch.likelihoods.LaplaceLikelihood().initialize(noise=0.01),
    "logit": BernoulliLogitLikelihood,
    "poisson": PoissonLikelihood,
}


@pytest.mark.filterwarnings("ignore:.*not known to be log-concave")
@pytest.mark.parametrize("kind", OTHERS)
def test_densities_and_reconstructions_of_a_gplvm_are_those_of_its_likelihood(kind):
    likelihood, x, y = OTHERS[kind](), torch.randn(7, 2), torch.randint(2, (7, 3)).double()
    model = BayesianGPLVM(VariationalLatents(torch.randn(7, 2)), torch.randn(4, 2), 3, likelihood).eval()
    expected = tighter_gp.PredictiveDistribution(likelihood, tighter_gp.predict(model, x))
    torch.testing.assert_close(model.log_density(y, x), expected.log_prob(y.mT).mT)
    mean, variance = model.reconstruct(x)
    torch.testing.assert_close(mean, expected.mean.mT)
    torch.testing.assert_close(variance, expected.variance.mT)
