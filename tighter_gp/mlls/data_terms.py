"""The terms of the bound that the data enter: expected log likelihood and price of the conditional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from ..carrier import Carrier, iter_carriers, mixes_points
from ..checks import check_device
from ..conditionals import Conditional, OptimalConditional
from ..data import signed
from ..likelihoods.properties import (
    correlates_tasks,
    draw_samples,
    event_variance,
    expected_log_prob,
    filled,
    gaussian_noise,
    has_closed_form,
    is_gaussian,
    is_sampled,
    place_samples,
    task_covariance,
)
from ..likelihoods.slopes import mean_curvature, sampled_log_prob
from ..likelihoods.targets import check_arguments
from ..maths.bounds import gaussian_expected_log_prob, scale_penalty
from ..maths.fused import fused_gaussian_terms
from ..recording import is_recording
from .wrapped import copied_dims, pull_back, together, with_variance


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
    :param kwargs: Passed to the likelihood.

    Example:
        >>> terms = tighter_gp.mlls.data_terms(likelihood, model(train_x), train_y)
        >>> bool(terms.conditional >= 0)
        True
    """
    return carried_terms(carrier_of(likelihood, q), likelihood, q, target, mask=mask, beta=beta, **kwargs)


def carried_terms(
    carrier: Carrier,
    likelihood: Any,
    q: MultivariateNormal,
    target: Tensor,
    *,
    mask: Tensor | None,
    beta: float,
    **kwargs: Any,
) -> DataTerms:
    """:func:`data_terms` of a q(f) whose carrier is known."""
    if kwargs:
        check_arguments(likelihood, kwargs)
    check_device(target, q.mean.device, "Targets are")
    check_device(likelihood, q.mean.device, "The likelihood is")
    conditional, copied = carrier.strategy.conditional, copied_dims(q, carrier)
    target = signed(target)
    if mask is not None:
        target = filled(target, mask)
    gaussian = is_gaussian(likelihood)
    if gaussian:
        noise = gaussian_noise(likelihood, q.batch_shape, q.event_shape, **kwargs)
        check_device(noise, q.mean.device, "Noise variances are")
        _check_batch(noise, q)
        if type(conditional) is OptimalConditional and mask is None and q.lazy_covariance_matrix is carrier:
            if target.dtype != q.mean.dtype:
                target = target.to(q.mean.dtype)
            return DataTerms(*fused_gaussian_terms(target, q.mean, carrier.explained, carrier.residual, noise, beta))

    # kept: what the conditional leaves of the residual variance, m_n d_n
    seen = None if mask is None else _of_functions(mask, likelihood, q)
    if conditional.is_learned:
        scale, penalty = carrier.chosen or _chosen(carrier)
        kept = scale * carrier.residual
        if mask is not None or q.lazy_covariance_matrix is not carrier:
            # Nothing is paid where no observation sees the function.
            weights = torch.ones_like(q.mean) if seen is None else seen.to(q.mean.dtype)
            penalty = penalty * (together(pull_back(q, carrier, weights), copied) > 0)
    elif gaussian:
        # lambda_n of each latent function: d/dd_n of the expected misfit sum(variance / noise).
        precision = together(pull_back(q, carrier, _masked(noise.reciprocal(), mask)), copied) / beta
        kept, penalty = conditional.optimum(carrier.residual, precision, carrier.blocks)
    elif isinstance(conditional, OptimalConditional) and not conditional.is_gaussian_only:
        curvature = _curvature(likelihood, q, carrier, target, mask, seen, **kwargs)
        # Samples cost more and know less.
        num_steps = min(conditional.num_steps, 3) if is_sampled(likelihood) else conditional.num_steps
        scale = conditional.solve(carrier.residual, lambda m: _divided(together(curvature(m), copied), beta), num_steps)
        kept, penalty = scale * carrier.residual, scale_penalty(scale)
    else:
        raise no_closed_form(conditional, likelihood)

    variance = carrier.explained + kept
    if gaussian:
        if q.lazy_covariance_matrix is not carrier:
            variance = event_variance(with_variance(q, variance))
        log_prob = gaussian_expected_log_prob(target, q.mean, variance, noise)
    else:
        expectation = sampled_log_prob if is_recording() and is_sampled(likelihood) else expected_log_prob
        log_prob = expectation(likelihood, target, with_variance(q, variance), **kwargs)
    # Copies of one function pay once.
    num_copies = math.prod(carrier.batch_shape[dim] for dim in copied)
    # Some likelihoods sum over tasks, some do not: sum over all that is not batch.
    return DataTerms(
        _sum_from(_masked(log_prob, mask), len(q.batch_shape)), _sum_from(penalty, len(q.batch_shape)) / num_copies
    )


def _chosen(carrier: Carrier) -> tuple[Tensor, Tensor]:
    """Scales of a learned conditional and their price, for a q(f) of eval mode."""
    conditional, residual = carrier.strategy.conditional, carrier.residual
    scale, penalty = (
        choose(residual, index=carrier.index).expand_as(residual) for choose in (conditional.scale, conditional.penalty)
    )
    return scale, penalty


def _of_functions(mask: Tensor, likelihood: Any, q: MultivariateNormal) -> Tensor:
    """Which functions are observed, in the shape of q's mean: with one label per point all of a point or none."""
    is_label = isinstance(likelihood, SoftmaxLikelihood) or mask.shape[-len(q.event_shape) :] != q.event_shape
    return (mask.unsqueeze(-1) if is_label and len(q.event_shape) > 1 else mask).expand_as(q.mean)


def _curvature(
    likelihood: Any,
    q: MultivariateNormal,
    carrier: Carrier,
    target: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    **kwargs: Any,
) -> Callable[[Tensor], Tensor]:
    r""":math:`\lambda_n` of each latent function as a function of the scales :math:`m_n`, to be called without a graph.

    :param mask: Which targets are observed.
    :param seen: The same of functions.
    """
    explained, residual = carrier.explained, carrier.residual
    if has_closed_form(likelihood, "curvature_of_moments") and mask is None and q.lazy_covariance_matrix is carrier:
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

    if not is_sampled(likelihood):
        return by_derivative
    draws = draw_samples(q)

    def by_samples(scale: Tensor) -> Tensor:
        narrowed = with_variance(q, explained + scale * residual)
        curvature = mean_curvature(likelihood, target, narrowed, place_samples(narrowed, draws), **kwargs)
        if correlates_tasks(q):
            both = None if seen is None else seen.unsqueeze(-1) & seen.unsqueeze(-2)
            return pull_back(q, carrier, _masked(curvature, both), task_covariance)
        return pull_back(q, carrier, _masked(curvature, seen))

    return by_samples


# ---------------------------------------------------------------------------------------------------------------------
# What came
# ---------------------------------------------------------------------------------------------------------------------


def carrier_of(likelihood: Any, q: Any) -> Carrier:
    """The one carrier in q(f), or a clear error."""
    if isinstance(q, Tensor):
        raise TypeError(
            "TighterELBO needs q(f), got a tensor: call mll(model(x), y), and for a latent-variable model use "
            "tighter_gp.gplvm.LatentVariableELBO, as objective= of fit."
        )
    carriers = list(iter_carriers(q.lazy_covariance_matrix)) if isinstance(q, MultivariateNormal) else []
    if not carriers:
        raise TypeError(
            "TighterELBO needs q(f) as the model returns it; this one does not carry its residual variance. Hand the "
            "output of model(x) over as it is, unsliced."
        )
    if len(carriers) > 1:
        raise TypeError(f"TighterELBO needs q(f) from one strategy; this one mixes {len(carriers)}.")
    if mixes_points(q.lazy_covariance_matrix):
        raise TypeError(
            "This q(f) mixes points, as sums over an area do: their variances depend on covariances between points, which a "
            "tighter q(f|u) would change too. Use gpytorch.mlls.VariationalELBO for the standard bound, with conditional="
            "'optimal'."
        )
    if isinstance(likelihood, SoftmaxLikelihood) and not isinstance(q, MultitaskMultivariateNormal):
        raise TypeError(
            "SoftmaxLikelihood needs one function per class for each point: wrap the strategy in "
            "gpytorch.variational.IndependentMultitaskVariationalStrategy."
        )
    return carriers[0]


def no_closed_form(conditional: Conditional, likelihood: Any) -> TypeError:
    """The error for a conditional that knows Gaussian noise alone."""
    return TypeError(
        f"{type(conditional).__name__} has a closed form for Gaussian noise only; got {type(likelihood).__name__}. "
        "Build the last layer's strategy with conditional='optimal', 'beta' or 'scalar'."
    )


def _fits(batch_shape: torch.Size, target_shape: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(batch_shape, target_shape) == target_shape
    except RuntimeError:
        return False


def _check_batch(noise: Tensor, q: MultivariateNormal) -> None:
    batch_shape = noise.shape[: max(0, noise.dim() - len(q.event_shape))]
    if not _fits(batch_shape, q.batch_shape):
        raise ValueError(
            f"The likelihood's noise has batch shape {tuple(batch_shape)}, which does not fit q(f) of batch shape "
            f"{tuple(q.batch_shape)}; give the model and its variational distribution that batch shape too."
        )


def _divided(values: Tensor, divisor: float) -> Tensor:
    return values if divisor == 1 else values / divisor


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def _sum_from(values: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions from this one on."""
    return values.flatten(dim).sum(dim) if values.dim() > dim else values
