"""conditional="optimal": the best scale of every point for any likelihood, without a parameter."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood, StudentTLikelihood
from linear_operator.operators import DiagLinearOperator
from scipy.optimize import brentq

import tighter_gp
from tests.equations.test_wrappers import Latent, independent, lmc, make_model, price
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel
from tighter_gp.conditionals import OptimalConditional
from tighter_gp.likelihoods import PoissonLikelihood
from tighter_gp.likelihoods.expectations import expected_log_prob
from tighter_gp.likelihoods.family import of_gpytorch

N, M = 17, 3


def model_of(p, q, **kwargs):
    return make_gp(p.z, make_kernel(p.kernel, p.variance, p.lengthscales), q, **kwargs)


def moments(p, q):
    """Dense mean, explained and residual variance and KL of q(u)."""
    L, W = torch.linalg.cholesky(p.Kuu), torch.linalg.inv(p.Kuu) @ p.Kuf
    mean, root = L @ q[0], L @ q[1]
    kl = dense.kl(mean, root @ root.T, torch.zeros(len(mean)), p.Kuu)
    return W.T @ mean, (W.T @ root @ root.T @ W).diagonal(), p.d, kl


def poisson_problem(seed=0):
    p = dense.problem(seed, n=N, m=M)
    counts = torch.poisson(torch.exp(p.y.clamp(max=3)), generator=torch.Generator().manual_seed(0))
    return p._replace(y=counts), dense.random_q(M, seed)


def poisson_scales(mean, s, d, beta=1.0):
    """M = 1 / (1 + E[exp f] d / beta), one root per point."""
    scales = []
    for mu, explained, residual in zip(mean.tolist(), s.tolist(), d.tolist(), strict=True):
        excess = lambda m, mu=mu, v=explained, r=residual: m * (1 + r / beta * math.exp(mu + (v + m * r) / 2)) - 1
        scales.append(brentq(excess, 1e-12, 1.0, xtol=1e-14))
    return torch.tensor(scales)


@pytest.mark.parametrize("beta", [1.0, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_poisson_scales_solve_their_equation(seed, beta):
    p, q = poisson_problem(seed)
    mean, s, d, kl = moments(p, q)
    m = poisson_scales(mean, s, d, beta)
    expected = (p.y * mean - torch.exp(mean + (s + m * d) / 2) - torch.lgamma(p.y + 1) - beta * price(m)).sum()
    expected = expected - beta * kl
    for num_steps, rtol in {10: 1e-9, 3: 1e-6}.items():
        model = model_of(p, q, conditional=OptimalConditional(num_steps))
        mll = tighter_gp.TighterELBO(PoissonLikelihood(), model, N, beta, combine_terms=False)
        terms = mll(model(p.x), p.y)
        torch.testing.assert_close(N * terms.bound, expected, rtol=rtol, atol=0)
        torch.testing.assert_close(N * terms.conditional, beta * price(m).sum(), rtol=1e3 * rtol, atol=1e-9)


@pytest.mark.parametrize("name", ["Bernoulli", "Beta", "Laplace", "NegativeBinomial", "Poisson", "StudentT"])
def test_the_default_number_of_steps_leaves_a_small_residual_of_the_equation(name):
    torch.manual_seed(0)
    (kind,) = of_gpytorch(f"{name}Likelihood") or pytest.skip("this version of GPyTorch has no such likelihood")
    likelihood = kind()
    mean, explained, residual = 2 * torch.randn(2000), torch.rand(2000), 2 * torch.rand(2000)
    with torch.no_grad():
        y = likelihood(mean).sample().clamp(*((0.001, 0.999) if name == "Beta" else (None, 1e6)))

    def curvature(m):
        with torch.enable_grad():
            variance = (explained + m * residual).requires_grad_()
            q = gpytorch.distributions.MultivariateNormal(mean, DiagLinearOperator(variance))
            return -2 * torch.autograd.grad(expected_log_prob(likelihood, y, q).sum(), variance)[0]

    m = OptimalConditional().solve(residual, curvature)
    assert (m - 1 / (1 + curvature(m).clamp_min(0) * residual)).abs().max() <= 1e-3


def test_gradient_is_that_of_the_objective_with_the_scales_held_fixed():
    p, q = poisson_problem(2)
    model, fixed = model_of(p, q, conditional="optimal"), model_of(p, q, conditional=tighter_gp.PerPoint(N))
    mean, s, d, _ = moments(p, q)
    fixed.variational_strategy.conditional.m = poisson_scales(mean, s, d)
    values = [
        tighter_gp.TighterELBO(PoissonLikelihood(), each, N)(each(p.x, index=torch.arange(N)), p.y)
        for each in (model, fixed)
    ]
    names = [name for name, _ in model.named_parameters() if "mean_module" not in name]
    gradients = [
        torch.autograd.grad(value, [dict(each.named_parameters())[name] for name in names])
        for value, each in zip(values, (model, fixed), strict=True)
    ]
    for name, left, right in zip(names, *gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_negative_curvature_leaves_the_scale_at_one():
    """A Student-t likelihood is convex far from its observation: more variance is better there."""
    p, q = dense.problem(1, n=N, m=M), dense.random_q(M)
    likelihood = StudentTLikelihood()
    likelihood.initialize(noise=0.05, deg_free=3.0)
    model = model_of(p, q, conditional="optimal")
    with pytest.warns(UserWarning, match="not known to be log-concave"):
        mll = tighter_gp.TighterELBO(likelihood, model, N, combine_terms=False)
    far, near = mll(model(p.x), p.y + 30), mll(model(p.x), model(p.x).mean.detach())
    assert far.conditional.item() == 0
    assert near.conditional.item() > 0.1


def test_missing_labels_keep_the_prior():
    p, q = poisson_problem(1)
    model, likelihood = model_of(p, q, conditional="optimal"), PoissonLikelihood()
    rows = torch.arange(N) % 4 != 1
    y = torch.where(rows, p.y, torch.nan)
    with gpytorch.settings.observation_nan_policy("fill"):
        actual = N * tighter_gp.TighterELBO(likelihood, model, N)(model(p.x), y)
    mean, s, d, kl = (t if t.dim() == 0 else t[rows] for t in moments(p, q))
    m, y = poisson_scales(mean, s, d), p.y[rows]
    expected = (y * mean - torch.exp(mean + (s + m * d) / 2) - torch.lgamma(y + 1) - price(m)).sum() - kl
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


# ---- Sampled likelihoods ----------------------------------------------------------------------------------------------

CLASSES = 3


def softmax_scales(latents, draws, W):
    """The fixed point with the Hessian of the log softmax at given draws, by plain damped iteration."""
    mean, s, d = (torch.stack([getattr(f, name) for f in latents], -1).detach() for name in ("mean", "s", "d"))
    m = torch.ones_like(d)
    for _ in range(300):
        covariance = W.T @ torch.diag_embed(s + m * d) @ W + 1e-7 * torch.eye(CLASSES)
        root = torch.linalg.cholesky(covariance) if W is not EYE else torch.diag_embed(torch.sqrt(s + m * d))
        probabilities = torch.softmax(mean @ W + (root @ draws.unsqueeze(-1)).squeeze(-1), -1)
        hessian = torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)
        curvature = (W @ hessian.mean(0) @ W.T).diagonal(dim1=-1, dim2=-2)
        m = 0.5 * m + 0.5 / (1 + curvature * d)
    return m


EYE = torch.eye(CLASSES, dtype=torch.float64)


@pytest.mark.parametrize("wrapper", ["independent", "lmc"])
def test_softmax_scales_solve_their_equation_at_the_draws_of_the_call(wrapper):
    wrap, num_latents = (independent(), 3) if wrapper == "independent" else (lmc(), 2)
    model, x = make_model(wrap, (num_latents,), conditional="optimal"), 3 * torch.rand(7, 2)
    W = EYE if wrapper == "independent" else model.variational_strategy.lmc_coefficients.detach()
    likelihood = SoftmaxLikelihood(num_classes=CLASSES, mixing_weights=False)
    mll = tighter_gp.TighterELBO(likelihood, model, 7, combine_terms=False)
    torch.manual_seed(3)
    actual = mll(model(x), torch.arange(7) % 3).conditional
    torch.manual_seed(3)
    draws = torch.randn(10, 7, CLASSES)
    m = softmax_scales([Latent(model, (k,), x) for k in range(num_latents)], draws, W)
    torch.testing.assert_close(actual, price(m).sum() / 7, rtol=1e-6, atol=0)
