"""What the objective must know of a likelihood: its noise, whether it is log-concave, its expectation and curvature."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch import likelihoods, settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.likelihood import Likelihood, _Likelihood, _OneDimensionalLikelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from linear_operator.operators import BlockDiagLinearOperator, BlockInterleavedLinearOperator
from torch import Tensor

from ..maths.linalg import cholesky

_LOG_CONCAVE = (
    _GaussianLikelihoodBase,
    likelihoods.BernoulliLikelihood,
    likelihoods.LaplaceLikelihood,
    likelihoods.PoissonLikelihood,
    likelihoods.SoftmaxLikelihood,
)

# What ``forward`` is in a class that leaves the density to those derived from it.
_NO_DENSITY = (None, torch.nn.Module.forward, Likelihood.forward, _Likelihood.forward)


def has_gaussian_noise(likelihood: Any) -> bool:
    """Whether p(y | f) is Gaussian and independent between points; one with a ``forward`` of your own is not."""
    return isinstance(likelihood, _GaussianLikelihoodBase) and not has_own(likelihood, "forward")


def is_gaussian(likelihood: Any) -> bool:
    """Whether the noise is Gaussian and is trained as such, so that the best scales have a closed form.

    One of your own with another expectation, such as that of a power of the density, is not.
    """
    return has_gaussian_noise(likelihood) and not has_own(likelihood, "expected_log_prob")


def has_one_function(likelihood: Any) -> bool:
    """Whether every entry of y depends on one function, also where ``forward`` is your own."""
    is_multitask = isinstance(likelihood, _MultitaskGaussianLikelihoodBase)
    return isinstance(likelihood, (_OneDimensionalLikelihood, _GaussianLikelihoodBase)) and not is_multitask


def has_own(likelihood: Any, *names: str) -> bool:
    """Whether a class derived from one of GPyTorch's overrides one of these methods."""
    return any(not getattr(type(likelihood), name).__module__.startswith("gpytorch.") for name in names)


def has_closed_form(likelihood: Any, name: str) -> bool:
    """Whether a likelihood has a method for its expectations, and no class derived from its owner has changed the density since.

    GPyTorch's classes agree with their own formulas, and a rule whose owner has no density is one for any.
    """
    kinds = type(likelihood).__mro__
    owner = next((kind for kind in kinds if name in vars(kind)), None)
    if owner is None:
        return False
    if getattr(owner, "forward", None) in _NO_DENSITY:
        return True
    since = [kind for kind in kinds[: kinds.index(owner)] if not kind.__module__.startswith("gpytorch.")]
    return not any(vars(kind).keys() & {"forward", "expected_log_prob"} for kind in since)


def has_own_noise(likelihood: Any) -> bool:
    """Whether the noise of a Gaussian likelihood may be another than its ``noise``: by a method or a noise model of your own."""
    model = getattr(likelihood, "noise_covar", None)
    return has_own(likelihood, "_shaped_noise_covar") or (model is not None and has_own(model, "forward"))


def is_log_concave(likelihood: Any) -> bool:
    r"""Whether :math:`\log p(y \mid f)` is known to be concave in :math:`f`.

    A likelihood of your own says so with an attribute ``is_log_concave = True``; of one that changes the density of one of
    GPyTorch's nothing is known.
    """
    declared = getattr(likelihood, "is_log_concave", None)
    if declared is not None:
        return bool(declared)
    return isinstance(likelihood, _LOG_CONCAVE) and not has_own(likelihood, "forward", "expected_log_prob")


def gaussian_noise(likelihood: Any, batch_shape: torch.Size, event_shape: torch.Size, **kwargs: Any) -> Tensor:
    r"""Noise variance :math:`\sigma_n^2` of each observation, broadcastable to ``batch_shape + event_shape``.

    :param likelihood: Any Gaussian likelihood of GPyTorch.
    :param kwargs: What the objective was called with; ``noise=`` gives the variances of the points of this batch, ``tasks=``
        the task of each of them for :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood`.
    """
    is_own = has_own_noise(likelihood)
    if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood) and not is_own:
        return _fixed_noise(likelihood, event_shape, **kwargs)
    if isinstance(likelihood, getattr(likelihoods, "HadamardGaussianLikelihood", ())) and not is_own:
        return _noise_of_tasks(likelihood, event_shape, **kwargs)
    if isinstance(likelihood, likelihoods.GaussianLikelihood) and "noise" not in kwargs and not is_own:
        noise = likelihood.noise
        return noise.reshape(*noise.shape[:-1], *(1 for _ in event_shape))
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase) and getattr(likelihood, "rank", 0) > 0:
        raise TypeError(
            f"{type(likelihood).__name__} with rank > 0 correlates the noise of the tasks. GPyTorch's expected log "
            "likelihood drops these correlations and is then no bound; build the likelihood with rank=0."
        )
    noise = likelihood._shaped_noise_covar(batch_shape + event_shape, **kwargs).diagonal(dim1=-1, dim2=-2)
    return noise.reshape(*noise.shape[:-1], *event_shape) if len(event_shape) > 1 else noise


def _fixed_noise(likelihood: Any, event_shape: torch.Size, noise: Tensor | None = None, **kwargs: Any) -> Tensor:
    fixed = likelihood.noise_covar.noise if noise is None else noise
    if fixed.size(-1) != event_shape[-1]:
        came = f"noise= of {fixed.size(-1)}" if noise is not None else f"{fixed.size(-1)} stored noise variances"
        raise ValueError(
            f"{type(likelihood).__name__} needs one noise variance per point: got {came} for a batch of {event_shape[-1]}. "
            "With mini-batches pass the batch's own, mll(model(x), y, noise=noise[rows])."
        )
    return fixed + likelihood.second_noise


def _noise_of_tasks(likelihood: Any, event_shape: torch.Size, tasks: Tensor | None = None, **kwargs: Any) -> Tensor:
    if tasks is None or tasks.shape != event_shape:
        came = "none" if tasks is None else f"shape {tuple(tasks.shape)}"
        raise ValueError(
            f"{type(likelihood).__name__} needs the task of each point, also if it is a column of the inputs: pass tasks=, "
            f"integers of shape {tuple(event_shape)}; got {came}."
        )
    return likelihood.noise[..., tasks.long()]


def observed(likelihood: Any, targets: Tensor, event_shape: torch.Size) -> Tensor | None:
    """Which targets count, or None if all must: NaN means missing where GPyTorch has been told so."""
    policy = settings.observation_nan_policy.value()
    if policy == "mask":
        return settings.observation_nan_policy._get_observed(targets, event_shape).expand_as(targets)
    if policy == "fill" or isinstance(likelihood, likelihoods.GaussianLikelihoodWithMissingObs):
        return ~torch.isnan(targets)
    return None


def signed(targets: Tensor) -> Tensor:
    """Bytes and truth values as integers, where 0 - 1 is not 255; others as they are."""
    return targets.long() if targets.dtype in (torch.uint8, torch.bool) else targets


def filled(targets: Tensor, mask: Tensor) -> Tensor:
    """Targets with something of the likelihood's support, the largest of them, where they are missing."""
    largest = torch.where(mask, targets, -torch.inf).amax()
    return torch.where(mask, targets, torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest)))


# ---------------------------------------------------------------------------------------------------------------------
# Expectations under q(f)
# ---------------------------------------------------------------------------------------------------------------------


def is_sampled(likelihood: Any) -> bool:
    """Whether the expected log likelihood is estimated by sampling, as GPyTorch does for :class:`SoftmaxLikelihood`."""
    if type(likelihood).expected_log_prob in (Likelihood.expected_log_prob, _Likelihood.expected_log_prob):
        return True
    return not (has_closed_form(likelihood, "expected_log_prob") or has_one_function(likelihood))


def correlates_tasks(q: MultivariateNormal) -> bool:
    """Whether the tasks of one point are correlated under q(f), as in an LMC."""
    independent = (BlockDiagLinearOperator, BlockInterleavedLinearOperator)
    return isinstance(q, MultitaskMultivariateNormal) and not isinstance(q.lazy_covariance_matrix, independent)


def task_covariance(q: MultivariateNormal) -> Tensor:
    """Covariance between the tasks of each point, ``... x N x T x T``."""
    num_points, num_tasks = q.event_shape
    points = torch.arange(num_points, device=q.mean.device).view(-1, 1, 1)
    tasks = torch.arange(num_tasks, device=q.mean.device)
    places = points * num_tasks + tasks if q._interleaved else points + tasks * num_points
    return q.lazy_covariance_matrix[..., places, places.mT]


def expected_log_prob(likelihood: Any, targets: Tensor, q: MultivariateNormal, **kwargs: Any) -> Tensor:
    r""":math:`\mathbb E_{q(f_n)}[\log p(y_n \mid f_n)]` point by point, as the likelihood has it.

    Where a class has changed the density since its closed form, it is GPyTorch's quadrature over ``forward``, or sampled for
    several functions at once. Where GPyTorch samples, it draws the tasks of a point independently and reads a batch of as
    many points as :class:`~gpytorch.likelihoods.SoftmaxLikelihood` has features transposed. Here correlated tasks are drawn
    together, and no batch is transposed; otherwise the draws are GPyTorch's. A Laplace likelihood has a closed form.
    """
    if has_closed_form(likelihood, "expected_log_prob_of_moments"):
        is_multitask = isinstance(q, MultitaskMultivariateNormal)
        variance = marginal_variance(q) if is_multitask else event_variance(q)
        return likelihood.expected_log_prob_of_moments(targets, q.mean, variance)
    if _is_laplace(likelihood):
        return _laplace_expectation(likelihood, targets, q)
    if is_sampled(likelihood):
        return log_prob_of_samples(likelihood, targets, place_samples(q, draw_samples(q)), **kwargs).mean(0)
    if has_closed_form(likelihood, "expected_log_prob"):
        return likelihood.expected_log_prob(targets, q, **kwargs)
    is_base = isinstance(likelihood, _OneDimensionalLikelihood)
    quadrature = likelihood.quadrature if is_base else GaussHermiteQuadrature1D().to(q.mean)
    return quadrature(lambda f: likelihood.forward(f, **kwargs).log_prob(targets), q)


def _is_laplace(likelihood: Any) -> bool:
    kind, laplace = type(likelihood), likelihoods.LaplaceLikelihood
    return kind.forward is laplace.forward and kind.expected_log_prob is laplace.expected_log_prob


def _laplace_expectation(likelihood: Any, targets: Tensor, q: MultivariateNormal) -> Tensor:
    """In closed form: a rule of few nodes is coarse where the density has a kink, and has no curvature to speak of."""
    scale, variance = likelihood.noise.sqrt(), marginal_variance(q)
    difference = targets - q.mean
    ratio = difference / (2 * variance).sqrt()
    distance = (2 * variance / math.pi).sqrt() * torch.exp(-ratio.square()) + difference * torch.erf(ratio)
    return -torch.log(2 * scale) - distance / scale


def draw_samples(q: MultivariateNormal) -> Tensor:
    """Standard normal draws for every entry of f, ``S x ... x N`` or ``S x ... x N x T``."""
    return torch.randn(settings.num_likelihood_samples.value(), *q.mean.shape, dtype=q.mean.dtype, device=q.mean.device)


def place_samples(q: MultivariateNormal, draws: Tensor) -> Tensor:
    """Samples of q(f) from standard normal draws: exact for each point, without correlations between points."""
    if not correlates_tasks(q):
        return q.mean + marginal_variance(q).sqrt() * draws
    root = cholesky(task_covariance(q), name="covariance between tasks")
    return q.mean + (root @ draws.unsqueeze(-1)).squeeze(-1)


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


def log_prob_of_samples(likelihood: Any, targets: Tensor, samples: Tensor, **kwargs: Any) -> Tensor:
    """:math:`\\log p(y \\mid f)` of samples of f."""
    softmax = likelihoods.SoftmaxLikelihood
    if not isinstance(likelihood, softmax) or type(likelihood).forward is not softmax.forward:
        return likelihood.forward(samples, **kwargs).log_prob(targets)
    # GPyTorch takes as many points as there are features for the features, and torch's Categorical reads values back.
    if samples.size(-1) != likelihood.num_features:
        raise ValueError(
            f"SoftmaxLikelihood has {likelihood.num_features} features for {samples.size(-1)} latent functions; "
            "their numbers must agree."
        )
    weights = likelihood.mixing_weights
    logits = torch.log_softmax(samples if weights is None else samples @ weights.mT, dim=-1)
    labels = targets.long().unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return logits.gather(-1, labels).squeeze(-1)


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
