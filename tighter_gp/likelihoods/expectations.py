r"""Expectations of a likelihood under q(f), point by point, with their slope and curvature.

With :math:`F_n = \mathbb E_{\mathcal N(\mu_n, v_n)}[\log p(y_n \mid f_n)]` the slope is
:math:`g_n = \partial F_n / \partial \mu_n = \mathbb E[\partial \log p / \partial f]` and the curvature is
:math:`\lambda_n = -2\, \partial F_n / \partial v_n = \mathbb E[-\partial^2 \log p / \partial f^2]` (Bonnet, Price).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from linear_operator.operators import BlockDiagLinearOperator, BlockInterleavedLinearOperator, DiagLinearOperator
from torch import Tensor

from ..maths.bounds import gaussian_expected_log_prob
from ..maths.linalg import cholesky
from ..maths.quadrature import leading
from .family import family, gaussian_noise

# Nodes for one function per point: how far they reach, in standard deviations, and how many they are.
_REACH, _NUM_NODES = 7.0, 101


def expected_log_prob(likelihood: Any, targets: Tensor, q: MultivariateNormal, **kwargs: Any) -> Tensor:
    r""":math:`\mathbb E_{q(f_n)}[\log p(y_n \mid f_n)]` point by point, as the likelihood has it.

    Where a class has changed the density since its closed form, it is GPyTorch's quadrature over ``forward``, or sampled for
    several functions at once. Where GPyTorch samples, it draws the tasks of a point independently and reads a batch of as
    many points as :class:`~gpytorch.likelihoods.SoftmaxLikelihood` has features transposed. Here correlated tasks are drawn
    together, and no batch is transposed; otherwise the draws are GPyTorch's. A Laplace likelihood has a closed form.
    """
    expectation = family(likelihood).expectation
    if expectation == "moments":
        is_multitask = isinstance(q, MultitaskMultivariateNormal)
        variance = marginal_variance(q) if is_multitask else event_variance(q)
        return likelihood.expected_log_prob_of_moments(targets, q.mean, variance)
    if expectation == "laplace":
        return _laplace_expectation(likelihood, targets, q)
    if expectation == "samples":
        return log_prob_of_samples(likelihood, targets, place_samples(q, draw_samples(q)), **kwargs).mean(0)
    if expectation in ("gaussian", "own"):
        return likelihood.expected_log_prob(targets, q, **kwargs)
    quadrature = getattr(likelihood, "quadrature", None) or GaussHermiteQuadrature1D().to(q.mean)
    return quadrature(lambda f: likelihood.forward(f, **kwargs).log_prob(targets), q)


def _laplace_expectation(likelihood: Any, targets: Tensor, q: MultivariateNormal) -> Tensor:
    """In closed form: a rule of few nodes is coarse where the density has a kink, and has no curvature to speak of."""
    scale, variance = likelihood.noise.sqrt(), marginal_variance(q)
    difference = targets - q.mean
    ratio = difference / (2 * variance).sqrt()  # (y - mu) / sqrt(2 v)
    distance = (2 * variance / math.pi).sqrt() * torch.exp(-ratio.square()) + difference * torch.erf(ratio)
    return -torch.log(2 * scale) - distance / scale


# ---- moments and samples of q(f)--------------------------------------------------------------------------------------


def event_variance(q: MultivariateNormal) -> Tensor:
    """Variances in the shape of q's mean, exact: no rounding up of small ones, no reading back to the host."""
    variance = q.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
    if not isinstance(q, MultitaskMultivariateNormal):
        return variance
    num_points, num_tasks = q.event_shape
    if q._interleaved:
        return variance.unflatten(-1, (num_points, num_tasks))
    return variance.unflatten(-1, (num_tasks, num_points)).mT


def marginal_variance(q: MultivariateNormal) -> Tensor:
    """``q.variance``, whose clamp GPyTorch decides on by a value read back from the device."""
    variance = event_variance(q)
    return variance.clamp_min(settings.min_variance.value(variance.dtype))


def correlates_tasks(q: MultivariateNormal) -> bool:
    """Whether the tasks of one point are correlated under q(f), as in an LMC."""
    if not isinstance(q, MultitaskMultivariateNormal):
        return False
    by_task = BlockInterleavedLinearOperator if q._interleaved else BlockDiagLinearOperator  # a block per task
    return not isinstance(q.lazy_covariance_matrix, (by_task, DiagLinearOperator))


def task_covariance(q: MultivariateNormal) -> Tensor:
    """Covariance between the tasks of each point, ``... x N x T x T``."""
    num_points, num_tasks = q.event_shape
    points = torch.arange(num_points, device=q.mean.device).view(-1, 1, 1)
    tasks = torch.arange(num_tasks, device=q.mean.device)
    places = points * num_tasks + tasks if q._interleaved else points + tasks * num_points  # [N, 1, T]
    return q.lazy_covariance_matrix[..., places, places.mT]


def draw_samples(q: MultivariateNormal) -> Tensor:
    """Standard normal draws for every entry of f, ``S x ... x N`` or ``S x ... x N x T``."""
    return torch.randn(settings.num_likelihood_samples.value(), *q.mean.shape, dtype=q.mean.dtype, device=q.mean.device)


def place_samples(q: MultivariateNormal, draws: Tensor) -> Tensor:
    """Samples of q(f) from standard normal draws: exact for each point, without correlations between points."""
    if not correlates_tasks(q):
        return q.mean + marginal_variance(q).sqrt() * draws
    root = cholesky(task_covariance(q), name="covariance between tasks")  # [..., N, T, T]
    return q.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)


def log_prob_of_samples(likelihood: Any, targets: Tensor, samples: Tensor, **kwargs: Any) -> Tensor:
    """:math:`\\log p(y \\mid f)` of samples of f."""
    if not isinstance(likelihood, SoftmaxLikelihood) or type(likelihood).forward is not SoftmaxLikelihood.forward:
        return likelihood.forward(samples, **kwargs).log_prob(targets)
    # GPyTorch takes as many points as there are features for the features, and torch's Categorical reads values back.
    if samples.size(-1) != likelihood.num_features:
        raise ValueError(
            f"SoftmaxLikelihood has {likelihood.num_features} features for {samples.size(-1)} latent functions; "
            "their numbers must agree."
        )
    weights = likelihood.mixing_weights
    logits = torch.log_softmax(samples if weights is None else samples @ weights.mT, dim=-1)  # [S, ..., N, C]
    labels = targets.long().unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return logits.gather(-1, labels).squeeze(-1)


# ---- slopes and curvatures--------------------------------------------------------------------------------------------


class Slopes(NamedTuple):
    r"""Expected log likelihood and its derivatives, without a graph.

    :param value: :math:`F_n` as the likelihood has it: ``... x N``, or ``... x N x T`` if it does not sum over tasks.
    :param slope: :math:`g_n`, in the shape of the mean of q(f).
    :param curvature: :math:`\lambda_n`, in the shape of the mean of q(f); ``... x N x T x T`` if the tasks of a point are
        correlated under q(f) and the likelihood is sampled. Not clamped.

    Example:
        >>> q = gpytorch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        >>> likelihood = tighter_gp.likelihoods.PoissonLikelihood()
        >>> slopes = tighter_gp.likelihoods.expectations.expected_slopes(likelihood, torch.tensor([0.0, 3.0]), q)
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
        >>> slopes = tighter_gp.likelihoods.expectations.expected_slopes(likelihood, torch.tensor([1.0, 1.0]), q)
        >>> [[round(v, 4) for v in part.tolist()] for part in (slopes.slope, slopes.curvature)]
        [[2.0, 0.0], [2.0, 2.0]]
    """
    if family(likelihood).is_sampled:
        draws = draw_samples(q) if draws is None else draws
        samples = place_samples(q, draws)
        value = log_prob_of_samples(likelihood, targets, samples, **kwargs).mean(0)
        return Slopes(value, *_sampled_slopes(likelihood, targets, q, samples, **kwargs))
    if family(likelihood).is_gaussian:
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

    Its value is that of :func:`~tighter_gp.likelihoods.expectations.expected_log_prob`, with the same draws. So is the
    derivative in the mean; that in the variance is half the curvature of :func:`expected_slopes`, which has the same
    expectation, less noise, and for a log-concave likelihood never the wrong sign. Several functions per point need a
    density without kinks for that. Wrappers pull it back as they would any other. It cannot be differentiated twice.

    Example:
        >>> q = gpytorch.distributions.MultitaskMultivariateNormal(torch.zeros(2, 3), torch.eye(6))
        >>> likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
        >>> tighter_gp.likelihoods.expectations.sampled_log_prob(likelihood, torch.tensor([0, 2]), q).shape
        torch.Size([2])
    """
    samples = place_samples(q, draw_samples(q)).detach()  # [S, ..., N, T]
    value = log_prob_of_samples(likelihood, targets, samples, **kwargs).mean(0)  # the likelihood's own parameters
    slope, curvature = _sampled_slopes(likelihood, targets, q, samples, **kwargs)
    by_mean = slope * (q.mean - q.mean.detach())
    per_task = value.shape == q.mean.shape
    is_matrix = curvature.dim() > q.mean.dim()
    spread = task_covariance(q) if is_matrix else marginal_variance(q)
    by_variance = curvature * (spread - spread.detach())
    by_variance = by_variance.sum(-1) if is_matrix else by_variance
    change = by_mean - 0.5 * by_variance  # zero, with the derivatives wanted
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
    nodes = leading(nodes, q.mean)  # [K, 1, ...]
    weights = torch.softmax(-0.5 * nodes.square(), 0)  # of the trapezoidal rule, which is exact to rounding here
    with torch.enable_grad():
        f = (q.mean.detach() + stddev * nodes).requires_grad_()
        (slope,) = torch.autograd.grad(log_prob_of_samples(likelihood, targets, f, **kwargs).sum(), f)
    return -(weights * nodes * slope).sum(0) / stddev


@torch.no_grad()
def _softmax_curvature(likelihood: SoftmaxLikelihood, samples: Tensor, full: bool) -> Tensor:
    r""":math:`W^\top (\mathrm{diag}(p) - p p^\top) W`, mean over samples, or its diagonal."""
    weights = likelihood.mixing_weights
    probs = torch.softmax(samples if weights is None else samples @ weights.mT, dim=-1)  # [S, ..., N, C]
    first = probs if weights is None else probs @ weights  # W' p  [S, ..., N, T]
    if full:
        mean, second = probs.mean(0), torch.einsum("s...i,s...j->...ij", first, first) / len(probs)
        return (torch.diag_embed(mean) if weights is None else (weights.mT * mean.unsqueeze(-2)) @ weights) - second
    variance = probs * (1 - probs) if weights is None else probs @ weights.square() - first.square()
    return variance.mean(0)


def sampled_curvature(likelihood: Any, targets: Tensor, samples: Tensor, **kwargs: Any) -> Tensor:
    r""":math:`-\partial^2 \log p(y_n \mid f_n) / \partial f_n \partial f_n^\top`, mean over samples of :math:`f`.

    :param samples: ``S x ... x N x T``.
    :return: ``... x N x T x T``.
    """
    with torch.enable_grad():
        samples = samples.detach().requires_grad_()
        log_prob = log_prob_of_samples(likelihood, targets, samples, **kwargs)
        (slope,) = torch.autograd.grad(log_prob.sum(), samples, create_graph=True)
        # Points are independent, so one derivative of a sum gives a row of every point's matrix.
        rows = [torch.autograd.grad(part.sum(), samples, retain_graph=True)[0].mean(0) for part in slope.unbind(-1)]
    return -torch.stack(rows, dim=-2)


def _independent(q: MultivariateNormal, mean: Tensor, variance: Tensor) -> MultivariateNormal:
    """q(f) with these moments and no correlation at all."""
    if not isinstance(q, MultitaskMultivariateNormal):
        return MultivariateNormal(mean, DiagLinearOperator(variance))
    return MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)), interleaved=True)
