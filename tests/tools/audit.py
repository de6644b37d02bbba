"""A random audit: models drawn from all that can be combined, against dense references in float64.

``python -m tests.tools.audit --count 2000 --seed 0`` draws kernels, means, likelihoods, conditionals, strategies, forms of
q(u), batches of models, precisions and mini-batches, and compares the objective, its gradients, predictions and the bound
of all data with formulas that share no code with the package. Deviations are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
import warnings

import numpy as np
import torch
from gpytorch import kernels, likelihoods, means, variational
from torch import Tensor

import tighter_gp
from tests.tools.factories import GP

N, B, M, ORTHOGONAL, D = 11, 6, 4, 3, 2

# ---------------------------------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------------------------------


def covariance(kernel, a: Tensor, b: Tensor) -> Tensor:
    """A kernel written out; differentiable in its parameters."""
    kind = type(kernel)
    if kind is kernels.ScaleKernel:
        return kernel.outputscale[..., None, None] * covariance(kernel.base_kernel, a, b)
    if kind in (kernels.AdditiveKernel, kernels.ProductKernel):
        first, second = (covariance(part, a, b) for part in kernel.kernels)
        return first + second if kind is kernels.AdditiveKernel else first * second
    if kernel.active_dims is not None:
        a, b = a[..., kernel.active_dims], b[..., kernel.active_dims]
    if kind is kernels.LinearKernel:
        return (a * kernel.variance) @ b.mT
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    if kind is kernels.PeriodicKernel:
        phase = torch.sin(math.pi * difference / kernel.period_length.unsqueeze(-2)).square()
        return torch.exp(-2 * (phase / kernel.lengthscale.unsqueeze(-2)).sum(-1))
    squared = (difference / kernel.lengthscale.unsqueeze(-2)).square().sum(-1)
    if kind is kernels.RBFKernel:
        return torch.exp(-squared / 2)
    if kind is kernels.RQKernel:
        alpha = kernel.alpha.unsqueeze(-1)
        return (1 + squared / (2 * alpha)) ** -alpha
    r = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)
    if kernel.nu == 0.5:
        return torch.exp(-r)
    if kernel.nu == 1.5:
        return (1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r)
    return (1 + math.sqrt(5) * r + 5 / 3 * r**2) * torch.exp(-math.sqrt(5) * r)


def prior_mean(mean, x: Tensor) -> Tensor:
    if type(mean) is means.ConstantMean:
        return mean.constant.unsqueeze(-1) + 0 * x[..., 0]
    if type(mean) is means.LinearMean:
        return (x @ mean.weights).squeeze(-1) + mean.bias
    return 0 * x[..., 0]


def q_moments(q) -> tuple[Tensor, Tensor | None]:
    """Mean and covariance of the whitened variables; None for a point mass."""
    if isinstance(q, variational.CholeskyVariationalDistribution):
        root = q.chol_variational_covar.tril()
        return q.variational_mean, root @ root.mT
    if isinstance(q, variational.MeanFieldVariationalDistribution):
        return q.variational_mean, torch.diag_embed(q._variational_stddev.square())
    if isinstance(q, variational.DeltaVariationalDistribution):
        return q.variational_mean, None
    covariance = torch.linalg.inv(-2 * q.natural_mat)
    return (covariance @ q.natural_vec.unsqueeze(-1)).squeeze(-1), covariance


def kl(mean: Tensor, cov: Tensor | None) -> Tensor:
    if cov is None:  # GPyTorch's convention for a point mass
        return 0.5 * (mean.square() + math.log(2 * math.pi)).sum(-1)
    trace = cov.diagonal(dim1=-1, dim2=-2).sum(-1)
    return 0.5 * (trace + mean.square().sum(-1) - mean.size(-1) - torch.linalg.slogdet(cov).logabsdet)


def moments(model, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, explained and residual variance, and the KL divergence, with explicit inverses."""
    strategy = model.variational_strategy
    k = lambda a, b: covariance(model.covar_module, a, b)
    z, jitter = strategy.inducing_points, strategy.jitter_val
    factor = torch.linalg.cholesky(k(z, z) + jitter * torch.eye(z.size(-2)))
    matrix = torch.linalg.inv(factor) @ k(z, x)
    parts = [(matrix, *q_moments(strategy.distributions[0]))]
    if len(strategy.distributions) > 1:
        o = strategy.orthogonal_points
        cross = torch.linalg.inv(factor) @ k(z, o)
        rest = k(o, o) - cross.mT @ cross + jitter * torch.eye(o.size(-2))
        second = torch.linalg.inv(torch.linalg.cholesky(rest)) @ (k(o, x) - cross.mT @ matrix)
        parts.append((second, *q_moments(strategy.distributions[1])))
    mean, s = prior_mean(model.mean_module, x), jitter
    d = k(x, x).diagonal(dim1=-1, dim2=-2)
    for a, m, cov in parts:
        mean = mean + (m.unsqueeze(-2) @ a).squeeze(-2)
        d = d - a.square().sum(-2)
        s = s + (0 * d if cov is None else (a * (cov @ a)).sum(-2))
    return mean, s, d.clamp_min(0), sum(kl(m, cov) for _, m, cov in parts)


NODES, WEIGHTS = (torch.as_tensor(v, dtype=torch.float64) for v in np.polynomial.hermite.hermgauss(20))


def expectation(likelihood, y: Tensor, mean: Tensor, variance: Tensor, noise: Tensor | None) -> Tensor:
    if noise is not None:
        return -0.5 * (torch.log(2 * math.pi * noise) + ((y - mean).square() + variance) / noise)
    if isinstance(likelihood, tighter_gp.likelihoods.PoissonLikelihood):
        return y * mean - torch.exp(mean + variance / 2) - torch.lgamma(y + 1)
    f = mean + (2 * variance).sqrt() * NODES.reshape(-1, *(1 for _ in mean.shape))
    log_prob = torch.special.log_ndtr((2 * y - 1) * f)
    return (WEIGHTS.reshape(-1, *(1 for _ in mean.shape)) * log_prob).sum(0) / math.sqrt(math.pi)


def best_scale(likelihood, y: Tensor, mean: Tensor, s: Tensor, d: Tensor, noise: Tensor | None) -> Tensor:
    """By the closed form, or by bisection of the slope in log m."""
    if noise is not None:
        return noise / (noise + d)
    low, high = torch.full_like(d, -30.0), torch.full_like(d, 5.0)
    for _ in range(80):
        middle = ((low + high) / 2).detach().requires_grad_()
        m = middle.exp()
        value = expectation(likelihood, y, mean.detach(), s.detach() + m * d.detach(), None)
        (slope,) = torch.autograd.grad((value - 0.5 * (m - 1 - m.log())).sum(), middle)
        low, high = torch.where(slope > 0, middle, low).detach(), torch.where(slope > 0, high, middle).detach()
    return ((low + high) / 2).exp()


def reference(model, likelihood, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
    """The bound per datum of a model of N points on a batch."""
    mean, s, d, divergence = moments(model, x)
    conditional = model.variational_strategy.conditional
    name = type(conditional).__name__
    if name == "ScalarConditional":
        m = conditional.m.unsqueeze(-1) * torch.ones_like(d)
    elif name == "BetaConditional":
        beta = conditional.beta.unsqueeze(-1)
        m = beta / (beta + d)
    else:
        m = best_scale(likelihood, y, mean, s, d, noise)
    points = expectation(likelihood, y, mean, s + m * d, noise) - 0.5 * (m - 1 - m.log())
    return points.mean(-1) - divergence / N


# ---------------------------------------------------------------------------------------------------------------------
# Draws
# ---------------------------------------------------------------------------------------------------------------------


def draw_kernel(rng: random.Random, batch: torch.Size, depth: int = 0):
    kinds = ["rbf", "matern12", "matern32", "matern52", "rq", "linear", "periodic", "active", "sum", "product"]
    kind = rng.choice(kinds[:8] if depth else kinds)
    options = {"batch_shape": batch}
    if kind in ("sum", "product"):
        first, second = draw_kernel(rng, batch, 1), draw_kernel(rng, batch, 1)
        return first + second if kind == "sum" else first * second
    if rng.random() < 0.5 and kind not in ("linear", "active"):
        options["ard_num_dims"] = D
    if kind.startswith("matern"):
        kernel = kernels.MaternKernel({"12": 0.5, "32": 1.5, "52": 2.5}[kind[6:]], **options)
    elif kind == "active":
        kernel = kernels.RBFKernel(active_dims=[1], **options)
    else:
        classes = {"rbf": kernels.RBFKernel, "rq": kernels.RQKernel, "linear": kernels.LinearKernel}
        kernel = classes.get(kind, kernels.PeriodicKernel)(**options)
    return kernels.ScaleKernel(kernel, batch_shape=batch) if rng.random() < 0.7 or kind == "linear" else kernel


FORMS = {
    "cholesky": variational.CholeskyVariationalDistribution,
    "mean-field": variational.MeanFieldVariationalDistribution,
    "point mass": variational.DeltaVariationalDistribution,
    "natural": variational.NaturalVariationalDistribution,
}


def shake(model, likelihood) -> None:
    """Parameters somewhere else than where they start."""
    for name, p in [*model.named_parameters(), *likelihood.named_parameters()]:
        noise = torch.randn_like(p)
        if "natural_mat" in name:
            p.data.copy_(-0.5 * (torch.eye(p.size(-1)) + 0.2 * noise @ noise.mT))
        elif "chol_" in name:
            p.data.copy_(0.2 * noise.tril(-1) + torch.diag_embed(0.4 + noise.diagonal(dim1=-1, dim2=-2).abs()))
        elif "stddev" in name:
            p.data.copy_(0.3 + noise.abs())
        elif "points" not in name:
            p.data.add_(0.3 * noise)


def draw(seed: int):
    """A description, a model, a likelihood, data and their noise, if it is Gaussian."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.choice([torch.Size(), torch.Size(), torch.Size([2])])
    kernel = draw_kernel(rng, batch)
    mean = rng.choice([means.ZeroMean, means.ConstantMean, lambda **kw: means.LinearMean(D, **kw)])(batch_shape=batch)
    conditional = rng.choice(["optimal", "optimal", "scalar", "beta"])
    strategy, form, other = rng.choice(["svgp", "solve-gp"]), rng.choice(list(FORMS)), rng.choice(list(FORMS))
    options = {"conditional": conditional, "jitter_val": 1e-4}
    q = lambda name, size: FORMS[name](size, batch_shape=batch)
    z, o = 2 * torch.rand(*batch, M, D), 2 * torch.rand(*batch, ORTHOGONAL, D)
    if strategy == "svgp":
        make = lambda model: tighter_gp.TighterVariationalStrategy(model, z, q(form, M), **options)
    else:
        make = lambda model: tighter_gp.SolveGPVariationalStrategy(
            model, z, o, q(form, M), q(other, ORTHOGONAL), **options
        )
    model = GP(make, kernel)
    model.mean_module = mean
    name = rng.choice(["gaussian", "gaussian", "fixed", "probit", "poisson"])
    x, f = 2 * torch.rand(N, D), torch.randn(*batch, N)
    if name == "gaussian":
        likelihood, y = likelihoods.GaussianLikelihood(batch_shape=batch), f
    elif name == "fixed":
        likelihood, y = likelihoods.FixedNoiseGaussianLikelihood(0.1 + torch.rand(N)), f
    elif name == "probit":
        likelihood, y = likelihoods.BernoulliLikelihood(), (f > 0).double()
    else:
        likelihood, y = tighter_gp.likelihoods.PoissonLikelihood(), f.exp().round()
    model.variational_strategy.mark_initialized()
    model.variational_strategy.updated_strategy.fill_(True)
    shake(model, likelihood)
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    rows = torch.randperm(N)[:B] if rng.random() < 0.5 else torch.arange(N)
    parts = type(kernel).__name__, type(mean).__name__, name, conditional, strategy, form, other, tuple(batch), dtype
    text = " ".join(map(str, (*parts, f"{len(rows)} rows")))
    return text, model, likelihood, x, y, dtype, rows


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    scale = max(1.0, expected.abs().max().item())
    return bool(torch.isfinite(found).all()) and (found - expected).abs().max().item() <= tolerance * scale


def audit(seed: int) -> tuple[str, list[str]]:
    """What was drawn, and what deviates."""
    text, model, likelihood, x, y, dtype, rows = draw(seed)
    # The same parameters, rounded to the precision, for both.
    model, likelihood, x, y = model.to(dtype), likelihood.to(dtype), x.to(dtype), y.to(dtype)
    twin, twin_likelihood = copy.deepcopy(model).double(), copy.deepcopy(likelihood).double()
    wide_x, wide_y = x.double(), y.double()
    is_fixed = isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood)
    is_gaussian = is_fixed or isinstance(likelihood, likelihoods.GaussianLikelihood)
    noise = (twin_likelihood.noise.expand(N) if is_fixed else twin_likelihood.noise) if is_gaussian else None
    part = noise[rows] if is_fixed and noise is not None else noise
    tolerance = 3e-7 if dtype == torch.float64 else 5e-3
    loose = 10 * tolerance if is_gaussian else 1e-3  # the best scales of other likelihoods are found in a few steps
    deviations = []

    def check(name: str, found: Tensor, expected: Tensor, limit: float) -> None:
        if not close(found, expected, limit):
            error = (found.detach().double() - expected.detach()).abs().max().item()
            deviations.append(f"{name}: off by {error:.2e}")

    given = {"noise": likelihood.noise[rows]} if is_fixed else {}
    mll = tighter_gp.TighterELBO(likelihood, model.train(), N)
    value = mll(model(x[rows]), y[..., rows], **given)
    expected = reference(twin, twin_likelihood, wide_x[rows], wide_y[..., rows], part)
    check("value", value, expected, loose)
    value.sum().backward()
    expected.sum().backward()
    ours = [*model.named_parameters(), *likelihood.named_parameters()]
    theirs = [*twin.parameters(), *twin_likelihood.parameters()]
    largest = max(1.0, *(p.grad.abs().max().item() for p in theirs if p.grad is not None))
    for (name, p), other in zip(ours, theirs, strict=True):
        if "natural_" in name:  # GPyTorch's are those in the expectation parameters
            continue
        found, wanted = (torch.zeros_like(v) if v.grad is None else v.grad for v in (p, other))
        check(f"gradient of {name}", found / largest, wanted / largest, 10 * loose)
    with torch.no_grad():
        mean, s, d, _ = moments(twin, wide_x)
        q = tighter_gp.predict(model, x)
        check("predictive mean", q.mean, mean, 10 * tolerance)
        check("predictive variance", q.variance, s + d, 10 * tolerance + 2e-4)
    whole = tighter_gp.evaluate_bound(model, likelihood, x, y, batch_size=4)
    check("evaluate_bound", whole / N, reference(twin, twin_likelihood, wide_x, wide_y, noise), loose)
    return text, deviations


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many models")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    begin, failed, done = time.monotonic(), 0, 0
    for seed in range(args.seed, args.seed + args.count):
        if time.monotonic() - begin > args.seconds:
            break
        text, deviations = audit(seed)
        done, failed = done + 1, failed + bool(deviations)
        if deviations:
            print(f"{seed}: {text}\n    " + "\n    ".join(deviations), flush=True)
    print(f"{done} models, {failed} deviate, {time.monotonic() - begin:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
