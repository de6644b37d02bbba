"""The terms of the bound that the data enter: expected log likelihood and price of the conditional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from ..carrier import Carrier, find_carriers, mixes_points
from ..conditionals import Conditional, OptimalConditional
from ..likelihoods.expectations import (
    correlates_tasks,
    draw_samples,
    event_variance,
    expected_log_prob,
    mean_curvature,
    place_samples,
    sampled_log_prob,
    task_covariance,
)
from ..likelihoods.family import family, filled, gaussian_noise, signed
from ..likelihoods.targets import check_arguments
from ..maths.bounds import gaussian_expected_log_prob, scale_penalty
from .wrapped import copied_dims, pull_back, sum_copies, with_variance

# Evaluations of a curvature that is estimated by sampling: they cost more and know less.
_SAMPLED_STEPS = 3


class DataTerms(NamedTuple):
    """Sums over the points of a batch, one value per model; not divided by anything.

    :param log_likelihood: Expected log likelihood.
    :param conditional: KL divergence of q(f|u) from p(f|u), at least zero.

    Example:
        >>> tighter_gp.mlls.DataTerms(torch.tensor(-3.0), torch.tensor(0.5)).conditional
        tensor(0.5000)
    """

    log_likelihood: Tensor
    conditional: Tensor


def data_terms(
    likelihood: Any,
    q: MultivariateNormal,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    beta: float = 1.0,
    by_curvature: bool = False,
    **kwargs: Any,
) -> DataTerms:
    r"""What the points of a batch add to the bound, at the scales that their conditional chooses.

    .. math:: \sum_n \mathbb E_{\mathcal N(\mu_n,\, s_n + m_n d_n)} [\log p(y_n \mid f_n)]
              \quad\text{and}\quad \tfrac12 \sum_n (m_n - 1 - \log m_n)

    :param likelihood: The likelihood.
    :param q: q(f) as a model on a strategy of this package returns it, in training or eval mode.
    :param target: :math:`y`, shaped like q's mean, or one label per point for a likelihood of several functions.
    :param mask: True where a target was observed, shaped like ``target``; default all. Missing targets add nothing.
    :param beta: Factor that the price will get.
    :param by_curvature: Whether the derivative of a sampled expectation in a variance is half its mean second derivative,
        which natural gradients need, and not that of its samples.
    :param kwargs: Passed to the likelihood.

    Example:
        >>> terms = tighter_gp.mlls.data_terms(likelihood, model(train_x), train_y)
        >>> bool(terms.conditional >= 0)
        True
    """
    return carried_terms(
        carrier_of(q), likelihood, q, target, mask=mask, beta=beta, by_curvature=by_curvature, **kwargs
    )


def carried_terms(
    carrier: Carrier,
    likelihood: Any,
    q: MultivariateNormal,
    target: Tensor,
    *,
    mask: Tensor | None,
    beta: float,
    by_curvature: bool = False,
    **kwargs: Any,
) -> DataTerms:
    """:func:`data_terms` of a q(f) whose carrier is known."""
    if kwargs:
        check_arguments(likelihood, kwargs)
    target = signed(target) if mask is None else filled(signed(target), mask)
    if family(likelihood).is_gaussian:
        log_prob, penalty = _gaussian_terms(likelihood, q, carrier, target, mask, beta, **kwargs)
    else:
        log_prob, penalty = _other_terms(likelihood, q, carrier, target, mask, beta, by_curvature, **kwargs)
    # Copies of one function pay once; some likelihoods sum over tasks, some do not: sum over all that is not batch.
    num_copies, num_batch = math.prod(carrier.batch_shape[dim] for dim in copied_dims(q, carrier)), len(q.batch_shape)
    return DataTerms(_sum_from(_masked(log_prob, mask), num_batch), _sum_from(penalty, num_batch) / num_copies)


def _gaussian_terms(
    likelihood: Any,
    q: MultivariateNormal,
    carrier: Carrier,
    target: Tensor,
    mask: Tensor | None,
    beta: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Expected log density and price, point by point, in closed form."""
    noise = gaussian_noise(likelihood, q.batch_shape, q.event_shape, **kwargs)
    conditional, origin = carrier.origin.strategy.conditional, carrier.origin
    if conditional.is_learned:
        kept, penalty = _learned(likelihood, q, carrier, mask)
    else:
        # lambda_n of each latent function: d/dd_n of the expected misfit sum(variance / noise).
        weights = _masked(noise.reciprocal(), mask)
        precision = sum_copies(pull_back(q, carrier, weights), copied_dims(q, carrier)) / beta
        within = lambda sets: origin.strategy.prior(origin.projection.matrix.dtype).residual_within(
            origin.projection, origin.x, sets
        )
        kept, penalty = conditional.optimum(carrier.residual, precision, within, origin.index)
    variance = carrier.explained + kept
    if q.lazy_covariance_matrix is not carrier:
        variance = event_variance(with_variance(q, variance))
    return gaussian_expected_log_prob(target, q.mean, variance, noise), penalty


def _other_terms(
    likelihood: Any,
    q: MultivariateNormal,
    carrier: Carrier,
    target: Tensor,
    mask: Tensor | None,
    beta: float,
    by_curvature: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The same for any other likelihood, at the scales where the derivative in them vanishes."""
    conditional, residual = carrier.origin.strategy.conditional, carrier.residual
    if conditional.is_learned:
        kept, penalty = _learned(likelihood, q, carrier, mask)
    elif not conditional.is_gaussian_only:
        scale = _best_scale(conditional, likelihood, q, carrier, target, mask, beta, **kwargs)
        kept, penalty = scale * residual, scale_penalty(scale)
    else:
        raise no_closed_form(conditional, likelihood)
    expectation = sampled_log_prob if by_curvature and family(likelihood).is_sampled else expected_log_prob
    return expectation(likelihood, target, with_variance(q, carrier.explained + kept), **kwargs), penalty


def _learned(likelihood: Any, q: MultivariateNormal, carrier: Carrier, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a learned conditional keeps of the residual, and its price; nothing is paid where no observation sees a function."""
    conditional, residual, index = carrier.origin.strategy.conditional, carrier.residual, carrier.origin.index
    kept = conditional.scale(residual, index=index) * residual
    penalty = conditional.penalty(residual, index=index).expand_as(residual)
    if mask is not None or q.lazy_covariance_matrix is not carrier:
        weights = torch.ones_like(q.mean) if mask is None else _of_functions(mask, likelihood, q).to(q.mean.dtype)
        penalty = penalty * (sum_copies(pull_back(q, carrier, weights), copied_dims(q, carrier)) > 0)
    return kept, penalty


def _best_scale(
    conditional: OptimalConditional,
    likelihood: Any,
    q: MultivariateNormal,
    carrier: Carrier,
    target: Tensor,
    mask: Tensor | None,
    beta: float,
    **kwargs: Any,
) -> Tensor:
    """The best :math:`m_n` of each latent function, without a graph."""
    is_plain = mask is None and q.lazy_covariance_matrix is carrier
    if is_plain and _has(likelihood, "best_scale"):
        return likelihood.best_scale(q.mean, carrier.explained, carrier.residual, beta)
    curvature, copied = _curvature(likelihood, q, carrier, target, mask, is_plain, **kwargs), copied_dims(q, carrier)
    num_steps = min(conditional.num_steps, _SAMPLED_STEPS) if family(likelihood).is_sampled else conditional.num_steps
    return conditional.solve(carrier.residual, lambda m: sum_copies(curvature(m), copied) / beta, num_steps)


def _curvature(
    likelihood: Any,
    q: MultivariateNormal,
    carrier: Carrier,
    target: Tensor,
    mask: Tensor | None,
    is_plain: bool,
    **kwargs: Any,
) -> Callable[[Tensor], Tensor]:
    r""":math:`\lambda_n` of each latent function as a function of the scales :math:`m_n`, to be called without a graph."""
    explained, residual = carrier.explained, carrier.residual
    if is_plain and _has(likelihood, "curvature_of_moments"):
        known = likelihood.curvature_of_moments(target, q.mean.detach())
        return lambda scale: known(torch.addcmul(explained, scale, residual))

    def by_derivative(scale: Tensor) -> Tensor:
        # Price: the derivative of an expectation in the variance is half the expected second derivative.
        kept = (scale * residual).requires_grad_()
        with torch.enable_grad():
            narrowed = with_variance(q, explained + kept)
            log_prob = _masked(expected_log_prob(likelihood, target, narrowed, **kwargs), mask)
            (slope,) = torch.autograd.grad(log_prob.sum(), kept)
        return -2 * slope

    if not family(likelihood).is_sampled:
        return by_derivative
    draws, seen = draw_samples(q), None if mask is None else _of_functions(mask, likelihood, q)

    def by_samples(scale: Tensor) -> Tensor:
        narrowed = with_variance(q, explained + scale * residual)
        curvature = mean_curvature(likelihood, target, narrowed, place_samples(narrowed, draws), **kwargs)
        if correlates_tasks(q):
            both = None if seen is None else seen.unsqueeze(-1) & seen.unsqueeze(-2)
            return pull_back(q, carrier, _masked(curvature, both), task_covariance)
        return pull_back(q, carrier, _masked(curvature, seen))

    return by_samples


def _has(likelihood: Any, name: str) -> bool:
    """Whether a likelihood of this package has a closed form of that name, for the density that it has."""
    return family(likelihood).expectation == "moments" and hasattr(likelihood, name)


def carrier_of(q: Any) -> Carrier:
    """The one carrier in q(f), or a clear error."""
    if isinstance(q, Tensor):
        raise TypeError(
            "TighterELBO needs q(f), got a tensor: call mll(model(x), y), and for a latent-variable model use "
            "tighter_gp.gplvm.LatentVariableELBO, as objective= of fit."
        )
    carriers = find_carriers(q.lazy_covariance_matrix) if isinstance(q, MultivariateNormal) else []
    if len(carriers) != 1:
        raise TypeError(
            f"TighterELBO needs q(f) of one strategy as the model returns it, unsliced; this one carries {len(carriers)}."
        )
    if mixes_points(q.lazy_covariance_matrix):
        raise TypeError(
            "This q(f) mixes points, as sums over an area do: their variances depend on covariances between points, which a "
            "tighter q(f|u) would change too. Use gpytorch.mlls.VariationalELBO for the standard bound, with conditional="
            "'optimal'."
        )
    return carriers[0]


def no_closed_form(conditional: Conditional, likelihood: Any) -> TypeError:
    """The error for a conditional that knows Gaussian noise alone."""
    return TypeError(
        f"{type(conditional).__name__} has a closed form for Gaussian noise only; got {type(likelihood).__name__}. "
        "Build the last layer's strategy with conditional='optimal', 'beta' or 'scalar'."
    )


def _of_functions(mask: Tensor, likelihood: Any, q: MultivariateNormal) -> Tensor:
    """Which functions are observed, in the shape of q's mean: with one label per point all of a point or none."""
    is_label = isinstance(likelihood, SoftmaxLikelihood) or mask.shape[-len(q.event_shape) :] != q.event_shape
    is_several = isinstance(q, MultitaskMultivariateNormal)
    return (mask.unsqueeze(-1) if is_label and is_several else mask).expand_as(q.mean)


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def _sum_from(values: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions from this one on."""
    return values.flatten(dim).sum(dim) if values.dim() > dim else values
