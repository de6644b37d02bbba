r"""Log predictive density of each point, :math:`\log \int p(y_n \mid f_n)\, q(f_n)\, df_n`, for every likelihood.

Closed forms where there are any, quadrature for one function per point, and draws from a Sobol sequence for several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch import likelihoods, settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from torch import Tensor

from ..likelihoods.properties import correlates_tasks, gaussian_noise, is_gaussian, marginal_variance, task_covariance

# Draws for several functions per point: at least so many, and at most so many numbers at a time.
_NUM_DRAWS, _LARGEST = 2048, 2**22

# Panels of the quadrature: unit panels of q(f)'s standard deviation to this distance, and ever smaller ones about the
# peaks of the integrand; nodes per panel; levels and nodes of the search for a peak.
_REACH, _HALVINGS, _NODES, _LEVELS, _GRID = 12, 22, 10, 6, 97


def log_density(likelihood: Any, q: MultivariateNormal, y: Tensor, **kwargs: Any) -> Tensor:
    r"""Log density of targets under the predictive distribution, per point and joint over the tasks of a point.

    A missing target, NaN, counts nothing. With several tasks the others of its point do: the density is that of the
    observed ones.

    :param likelihood: Any likelihood of GPyTorch or of this package, or one of your own.
    :param q: The latent predictive distribution; only its marginals, and the correlations between tasks, count.
    :param y: Targets, ``... x N``, or ``... x N x T``; one label per point for
        :class:`~gpytorch.likelihoods.SoftmaxLikelihood`.
    :param kwargs: Per-point arguments of the likelihood: ``noise=``, variances to which
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood` adds what it learned.
    :return: ``... x N``.

    Example:
        >>> q = gpytorch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        >>> density = tighter_gp.training.log_density(gpytorch.likelihoods.BernoulliLikelihood(), q, torch.tensor([0, 1]))
        >>> density.exp()
        tensor([0.5000, 0.5000])
    """
    missing = torch.isnan(y)
    several = isinstance(q, MultitaskMultivariateNormal)
    if bool(missing.any()):
        y = torch.where(missing, _valid(y, missing), y)
    if _has_own_density(likelihood):
        density = likelihood.log_marginal(y, q, **kwargs)
    elif is_gaussian(likelihood):
        return _gaussian(likelihood, q, y, missing, **kwargs)
    elif isinstance(likelihood, _OneDimensionalLikelihood) and not correlates_tasks(q):
        density = _one_dimensional(likelihood, q.mean, marginal_variance(q), y, **kwargs)
    else:
        return _sampled(likelihood, q, y, missing, **kwargs)
    density = torch.where(missing, torch.zeros_like(density), density) if density.shape == missing.shape else density
    return density.sum(-1) if several and density.shape == q.mean.shape else density


def _valid(y: Tensor, missing: Tensor) -> Tensor:
    """An observed value, to stand where one is missing; zero if there is none."""
    return y[~missing][0] if not bool(missing.all()) else torch.zeros((), dtype=y.dtype, device=y.device)


def _has_own_density(likelihood: Any) -> bool:
    """Whether a user's class brings a formula."""
    owner = next((base for base in type(likelihood).__mro__ if "log_marginal" in vars(base)), type(likelihood))
    return not owner.__module__.startswith(("gpytorch.", "tighter_gp."))


# ---------------------------------------------------------------------------------------------------------------------
# Gaussian noise
# ---------------------------------------------------------------------------------------------------------------------


def _gaussian(likelihood: Any, q: MultivariateNormal, y: Tensor, missing: Tensor, **kwargs: Any) -> Tensor:
    if not isinstance(q, MultitaskMultivariateNormal):
        variance = marginal_variance(q) + gaussian_noise(likelihood, q.batch_shape, q.event_shape, **kwargs)
        density = -0.5 * (math.log(2 * math.pi) + variance.log() + (y - q.mean).square() / variance)
        return torch.where(missing, torch.zeros_like(density), density)
    # Joint over tasks: ... x N x T x T. A missing task becomes independent of the others, with nothing to say.
    latent = _between_tasks(q) if correlates_tasks(q) else torch.diag_embed(marginal_variance(q))
    covariance = (latent + _task_noise(likelihood, q, **kwargs)).double()
    covariance = covariance.expand(*q.mean.shape, q.mean.shape[-1])
    both = missing.unsqueeze(-1) | missing.unsqueeze(-2)
    identity = torch.eye(covariance.size(-1), dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(torch.where(both, identity, covariance))
    misfit = torch.where(missing, torch.zeros_like(y), y - q.mean).double()
    scaled = torch.linalg.solve_triangular(root, misfit.unsqueeze(-1), upper=False).squeeze(-1)
    terms = math.log(2 * math.pi) + scaled.square() + 2 * root.diagonal(dim1=-1, dim2=-2).log()
    return -0.5 * torch.where(missing, torch.zeros_like(terms), terms).sum(-1).to(q.mean.dtype)


def _between_tasks(q: MultitaskMultivariateNormal) -> Tensor:
    """Covariance between the tasks of each point, ``... x N x T x T``."""
    # Entries of a lazy matrix are found by sparse products, of which torch warns unless it is told what to check.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return task_covariance(q)


def _task_noise(likelihood: Any, q: MultitaskMultivariateNormal, **kwargs: Any) -> Tensor:
    """Covariance of the noise between tasks, broadcastable to ``... x N x T x T``."""
    num_tasks = q.event_shape[-1]
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
        # The same at every point, so that of one point will do.
        shape = torch.Size([*q.batch_shape, 1, num_tasks])
        noise = likelihood._shaped_noise_covar(shape, add_noise=getattr(likelihood, "has_global_noise", True))
        return noise.to_dense().reshape(*noise.shape[:-2], 1, num_tasks, num_tasks)
    return torch.diag_embed(gaussian_noise(likelihood, q.batch_shape, q.event_shape, **kwargs).expand(q.mean.shape))


# ---------------------------------------------------------------------------------------------------------------------
# One function per point
# ---------------------------------------------------------------------------------------------------------------------


def _one_dimensional(likelihood: Any, mean: Tensor, variance: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    if type(likelihood) is likelihoods.BernoulliLikelihood:
        sign = torch.where(y > 0, 1.0, -1.0).to(mean.dtype)
        return torch.special.log_ndtr(sign * mean / (1 + variance).sqrt())
    if type(likelihood) is likelihoods.LaplaceLikelihood:
        return _laplace(mean, variance, y, likelihood.noise.sqrt())
    binary = isinstance(likelihood, likelihoods.BernoulliLikelihood) or hasattr(likelihood.forward(mean), "probs")
    labels = y.clamp_min(0) if binary and bool((y == -1).any()) else y  # torch's Bernoulli knows no -1
    log_prob = lambda f: likelihood.forward(f, **kwargs).log_prob(labels.to(f.dtype)).double()
    return integrate(log_prob, mean, variance).to(mean.dtype)


def _laplace(mean: Tensor, variance: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """A Gaussian and a Laplace variable summed: a kinked likelihood that no rule of quadrature likes."""
    misfit, stddev = (y - mean).double(), variance.double().sqrt()
    scale = scale.double()
    common = variance.double() / (2 * scale.square()) - (2 * scale).log()
    sides = [
        torch.special.log_ndtr(sign * misfit / stddev - stddev / scale) - sign * misfit / scale for sign in (1.0, -1.0)
    ]
    return (common + torch.logaddexp(*sides)).to(mean.dtype)


def integrate(log_prob: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    r""":math:`\log \int e^{g(f)} \mathcal N(f; \mu, v)\, df` point by point.

    Gauss-Legendre rules on panels: of the width of a standard deviation about :math:`\mu`, and halved again and again
    towards the peaks of the integrand and of :math:`g`, which may be much narrower.

    :param log_prob: :math:`g`, of nodes ``K x ...``.
    """
    mean, stddev = mean.double(), variance.double().sqrt()
    normal = torch.distributions.Normal(mean, stddev, validate_args=False)
    integrand = lambda f: torch.nan_to_num(log_prob(f), nan=-math.inf, neginf=-math.inf) + normal.log_prob(f)
    unit = torch.arange(-_REACH, _REACH + 1, dtype=mean.dtype, device=mean.device)
    halved = 2.0 ** -torch.arange(0, _HALVINGS, dtype=mean.dtype, device=mean.device)
    halved = torch.cat([-halved, halved.new_zeros(1), halved])
    over = lambda values: values.view(-1, *(1 for _ in mean.shape))
    edges = [mean + stddev * over(unit)]
    for function in (integrand, log_prob):
        edges.append(_peak(function, mean, stddev) + stddev * over(halved))
    places = torch.cat(edges).sort(dim=0).values
    nodes, weights = (torch.from_numpy(part).to(mean) for part in np.polynomial.legendre.leggauss(_NODES))
    middle, half = (places[1:] + places[:-1]) / 2, (places[1:] - places[:-1]) / 2
    f = (middle.unsqueeze(1) + half.unsqueeze(1) * over(nodes)).flatten(0, 1)
    log_weights = (half.clamp_min(1e-300).log().unsqueeze(1) + over(weights.log())).flatten(0, 1)
    return torch.logsumexp(integrand(f) + log_weights, dim=0)


def _peak(function: Callable[[Tensor], Tensor], mean: Tensor, stddev: Tensor) -> Tensor:
    """Where a function is largest within reach of q(f): the best node of a grid, then of a finer one about it."""
    grid = torch.linspace(-1, 1, _GRID, dtype=mean.dtype, device=mean.device).view(-1, *(1 for _ in mean.shape))
    centre, reach = mean, _REACH * stddev
    for _ in range(_LEVELS):
        f = centre + reach * grid
        values = torch.nan_to_num(function(f), nan=-math.inf, neginf=-math.inf)
        centre = f.gather(0, values.argmax(0, keepdim=True)).squeeze(0)
        reach = reach * (4 / _GRID)
    return centre


# ---------------------------------------------------------------------------------------------------------------------
# Several functions per point
# ---------------------------------------------------------------------------------------------------------------------


def _sampled(likelihood: Any, q: MultivariateNormal, y: Tensor, missing: Tensor, **kwargs: Any) -> Tensor:
    """The mean of p(y | f) over draws of f that are joint over the tasks of a point; the same draws for all points."""
    num_draws = max(_NUM_DRAWS, settings.num_likelihood_samples.value())
    several = isinstance(q, MultitaskMultivariateNormal)
    num_functions = q.event_shape[-1] if several else 1
    mean = q.mean if several else q.mean.unsqueeze(-1)
    if correlates_tasks(q):
        root = torch.linalg.cholesky(_with_jitter(_between_tasks(q).double())).to(mean)
    else:
        variance = marginal_variance(q)
        root = torch.diag_embed(variance.sqrt() if several else variance.sqrt().unsqueeze(-1))
    size = max(1, _LARGEST // mean.numel())
    totals = []
    for draws in _normal_draws(num_draws, num_functions, mean).split(size):
        draws = draws.view(-1, *(1 for _ in mean.shape[:-1]), num_functions, 1)
        f = mean + (root @ draws).squeeze(-1)
        log_prob = _log_prob(likelihood, f if several else f.squeeze(-1), y, missing, **kwargs)
        totals.append(torch.logsumexp(log_prob.double(), dim=0))
    return (torch.logsumexp(torch.stack(totals), dim=0) - math.log(num_draws)).to(mean.dtype)


def _normal_draws(num_draws: int, num_functions: int, like: Tensor) -> Tensor:
    """Standard normal draws, ``S x T``, from a scrambled Sobol sequence; the same ones always."""
    with torch.device("cpu"):  # whatever the default device is
        engine = torch.quasirandom.SobolEngine(num_functions, scramble=True, seed=0)
        uniform = engine.draw(num_draws, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)).to(like)


def _log_prob(likelihood: Any, f: Tensor, y: Tensor, missing: Tensor, **kwargs: Any) -> Tensor:
    """:math:`\\log p(y \\mid f)`, ``S x ... x N``, zero where the label is missing."""
    softmax = likelihoods.SoftmaxLikelihood
    if isinstance(likelihood, softmax) and type(likelihood).forward is softmax.forward:
        # By hand: GPyTorch takes as many points as there are functions for the functions.
        weights = likelihood.mixing_weights
        logits = torch.log_softmax(f if weights is None else f @ weights.mT, dim=-1)
        log_prob = logits.gather(-1, y.long().unsqueeze(-1).expand(*logits.shape[:-1], 1)).squeeze(-1)
    else:
        log_prob = likelihood.forward(f, **kwargs).log_prob(y)
    is_known = ~missing
    if log_prob.shape[-missing.dim() :] == missing.shape:
        log_prob = torch.where(is_known, log_prob, torch.zeros_like(log_prob))
    return log_prob.sum(-1) if log_prob.shape == f.shape and missing.dim() > 1 else log_prob


def _with_jitter(covariance: Tensor) -> Tensor:
    scale = covariance.diagonal(dim1=-1, dim2=-2).mean(-1)[..., None, None]
    identity = torch.eye(covariance.size(-1), dtype=covariance.dtype, device=covariance.device)
    return covariance + 1e-9 * scale * identity
