r"""Slope and curvature of a likelihood, point by point: what natural gradients and the best :math:`m_n` both need.

With :math:`F_n = \mathbb E_{\mathcal N(\mu_n, v_n)}[\log p(y_n \mid f_n)]` the slope is
:math:`g_n = \partial F_n / \partial \mu_n = \mathbb E[\partial \log p / \partial f]` and the curvature is
:math:`\lambda_n = -2\, \partial F_n / \partial v_n = \mathbb E[-\partial^2 \log p / \partial f^2]` (Bonnet, Price).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..maths.bounds import gaussian_expected_log_prob
from .properties import (
    correlates_tasks,
    draw_samples,
    event_variance,
    expected_log_prob,
    gaussian_noise,
    is_gaussian,
    is_sampled,
    log_prob_of_samples,
    marginal_variance,
    place_samples,
    sampled_curvature,
    task_covariance,
)

# Nodes for one function per point: how far they reach, in standard deviations, and how many they are.
_REACH, _NUM_NODES = 7.0, 101

__all__ = ["Slopes", "expected_slopes", "sampled_log_prob"]


class Slopes(NamedTuple):
    r"""Expected log likelihood and its derivatives, without a graph.

    :param value: :math:`F_n` as the likelihood has it: ``... x N``, or ``... x N x T`` if it does not sum over tasks.
    :param slope: :math:`g_n`, in the shape of the mean of q(f).
    :param curvature: :math:`\lambda_n`, in the shape of the mean of q(f); ``... x N x T x T`` if the tasks of a point are
        correlated under q(f) and the likelihood is sampled. Not clamped.

    Example:
        >>> q = gpytorch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        >>> likelihood = tighter_gp.likelihoods.PoissonLikelihood()
        >>> slopes = tighter_gp.likelihoods.slopes.expected_slopes(likelihood, torch.tensor([0.0, 3.0]), q)
        >>> torch.allclose(slopes.slope, torch.tensor([0.0, 3.0]) - math.exp(0.5))
        True
    """

    value: Tensor
    slope: Tensor
    curvature: Tensor


@torch.no_grad()
def expected_slopes(
    likelihood: Any, targets: Tensor, q: MultivariateNormal, draws: Tensor | None = None, **kwargs: Any
) -> Slopes:
    r"""Slope and curvature of every point under q(f).

    In closed form for Gaussian noise; by one backward pass for other likelihoods with a deterministic expectation; and
    where the expectation is sampled, as means of the first and second derivatives over the samples, the latter by quadrature
    for one function per point. The derivative of a sampled expectation in the variance is not used: it is as often wrong in
    sign as not where the slope is steep.

    :param likelihood: The likelihood.
    :param targets: :math:`y`.
    :param q: q(f); only the distribution of each point on its own matters.
    :param draws: Standard normal draws for a sampled likelihood, default new ones.
    :param kwargs: Arguments of the likelihood, such as ``noise=``.

    Example:
        >>> q = gpytorch.distributions.MultivariateNormal(torch.tensor([0.0, 1.0]), torch.eye(2))
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 0.5
        >>> slopes = tighter_gp.likelihoods.slopes.expected_slopes(likelihood, torch.tensor([1.0, 1.0]), q)
        >>> [[round(v, 4) for v in part.tolist()] for part in (slopes.slope, slopes.curvature)]
        [[2.0, 0.0], [2.0, 2.0]]
    """
    if is_sampled(likelihood):
        draws = draw_samples(q) if draws is None else draws
        samples = place_samples(q, draws)
        value = log_prob_of_samples(likelihood, targets, samples, **kwargs).mean(0)
        return Slopes(value, *_sampled_slopes(likelihood, targets, q, samples, **kwargs))
    if is_gaussian(likelihood):
        noise = gaussian_noise(likelihood, q.batch_shape, q.event_shape, **kwargs).expand(q.mean.shape)
        value = gaussian_expected_log_prob(targets, q.mean, event_variance(q), noise)
        return Slopes(value, (targets - q.mean) / noise, noise.reciprocal())
    with torch.enable_grad():
        mean, variance = (tensor.detach().requires_grad_() for tensor in (q.mean, marginal_variance(q)))
        value = expected_log_prob(likelihood, targets, _independent(q, mean, variance), **kwargs)
        slope, by_variance = torch.autograd.grad(value.sum(), (mean, variance))
    return Slopes(value.detach(), slope, -2 * by_variance)


def sampled_log_prob(likelihood: Any, targets: Tensor, q: MultivariateNormal, **kwargs: Any) -> Tensor:
    r"""A sampled expected log likelihood whose derivatives are :math:`g_n` and :math:`-\lambda_n / 2`.

    Its value is that of :func:`~tighter_gp.likelihoods.properties.expected_log_prob`, with the same draws. So is the
    derivative in the mean; that in the variance is half the curvature of :func:`expected_slopes`, which has the same
    expectation, less noise, and for a log-concave likelihood never the wrong sign. Several functions per point need a
    density without kinks for that. Wrappers pull it back as they would any other. It cannot be differentiated twice.

    Example:
        >>> q = gpytorch.distributions.MultitaskMultivariateNormal(torch.zeros(2, 3), torch.eye(6))
        >>> likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
        >>> tighter_gp.likelihoods.slopes.sampled_log_prob(likelihood, torch.tensor([0, 2]), q).shape
        torch.Size([2])
    """
    samples = place_samples(q, draw_samples(q)).detach()
    value = log_prob_of_samples(likelihood, targets, samples, **kwargs).mean(0)  # the likelihood's own parameters
    slope, curvature = _sampled_slopes(likelihood, targets, q, samples, **kwargs)
    by_mean = slope * (q.mean - q.mean.detach())
    per_task = value.shape == q.mean.shape
    if curvature.dim() > q.mean.dim():
        covariance = task_covariance(q)
        by_variance = (curvature * (covariance - covariance.detach())).sum(-1)
    else:
        variance = marginal_variance(q)
        by_variance = curvature * (variance - variance.detach())
    change = by_mean - 0.5 * by_variance
    return value + (change if per_task else change.sum(-1))


def _sampled_slopes(
    likelihood: Any, targets: Tensor, q: MultivariateNormal, samples: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Means over samples of the first and of minus the second derivative, the latter as :class:`Slopes` has it."""
    with torch.enable_grad():
        leaf = samples.detach().requires_grad_()
        (slope,) = torch.autograd.grad(log_prob_of_samples(likelihood, targets, leaf, **kwargs).sum(), leaf)
    return slope.mean(0), mean_curvature(likelihood, targets, q, samples, **kwargs)


def mean_curvature(likelihood: Any, targets: Tensor, q: MultivariateNormal, samples: Tensor, **kwargs: Any) -> Tensor:
    """The curvature of :class:`Slopes` of a sampled likelihood, in closed form for a softmax.

    :param samples: Of q(f), for several functions per point.
    """
    if len(q.event_shape) == 1:
        return _curvature_by_quadrature(likelihood, targets, q, **kwargs)
    if isinstance(likelihood, SoftmaxLikelihood) and type(likelihood).forward is SoftmaxLikelihood.forward:
        return _softmax_curvature(likelihood, samples, correlates_tasks(q))
    matrix = sampled_curvature(likelihood, targets, samples, **kwargs)
    return matrix if correlates_tasks(q) else matrix.diagonal(dim1=-1, dim2=-2)


def _curvature_by_quadrature(likelihood: Any, targets: Tensor, q: MultivariateNormal, **kwargs: Any) -> Tensor:
    r""":math:`-\mathbb E[(f_n - \mu_n)\, \partial \log p / \partial f_n] / v_n` (Stein).

    It sees the kinks of a density, where the second derivative is zero on both sides, and is not negative for a concave one.
    """
    stddev = marginal_variance(q).detach().sqrt()
    nodes = torch.linspace(-_REACH, _REACH, _NUM_NODES, dtype=q.mean.dtype, device=q.mean.device)
    nodes = nodes.reshape(-1, *(1 for _ in q.mean.shape))
    weights = torch.softmax(-0.5 * nodes.square(), 0)  # of the trapezoidal rule, which is exact to rounding here
    with torch.enable_grad():
        f = (q.mean.detach() + stddev * nodes).requires_grad_()
        (slope,) = torch.autograd.grad(log_prob_of_samples(likelihood, targets, f, **kwargs).sum(), f)
    return -(weights * nodes * slope).sum(0) / stddev


@torch.no_grad()
def _softmax_curvature(likelihood: SoftmaxLikelihood, samples: Tensor, full: bool) -> Tensor:
    r""":math:`W^\top (\mathrm{diag}(p) - p p^\top) W`, mean over samples, or its diagonal."""
    weights = likelihood.mixing_weights
    probs = torch.softmax(samples if weights is None else samples @ weights.mT, dim=-1)
    if weights is None and not full:
        return (probs * (1 - probs)).mean(0)
    if weights is None:
        second = torch.einsum("s...i,s...j->...ij", probs, probs) / len(probs)
        return torch.diag_embed(probs.mean(0)) - second
    first = probs @ weights  # W' p
    if not full:
        return (probs @ weights.square() - first.square()).mean(0)
    second = torch.einsum("s...i,s...j->...ij", first, first) / len(probs)
    return (weights.mT * probs.mean(0).unsqueeze(-2)) @ weights - second


def _independent(q: MultivariateNormal, mean: Tensor, variance: Tensor) -> MultivariateNormal:
    """q(f) with these moments and no correlation at all."""
    if not isinstance(q, MultitaskMultivariateNormal):
        return MultivariateNormal(mean, DiagLinearOperator(variance))
    return MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)), interleaved=True)
