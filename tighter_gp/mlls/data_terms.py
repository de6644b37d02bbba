"""The terms of the bound that the data enter: expected log likelihood and price of the conditional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from ..conditionals import Conditional
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
from .wrapped import carrier_of, copied_dims, pull_back, with_variance

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
    if kwargs:
        check_arguments(likelihood, kwargs)
    target = signed(target) if mask is None else filled(signed(target), mask)
    batch = _Batch(likelihood, q, target, mask, beta, by_curvature, kwargs)
    log_prob, penalty = batch.gaussian() if family(likelihood).is_gaussian else batch.other()
    if mask is not None:
        log_prob = log_prob.where(mask, 0)
    # Some likelihoods sum over tasks, some do not: sum over all that is not batch.
    num_batch = len(q.batch_shape)
    log_prob, penalty = _sum_from(log_prob, num_batch), _sum_from(penalty, num_batch)
    if batch.copied:  # copies of one function pay once
        penalty = penalty / math.prod(batch.carrier.batch_shape[dim] for dim in batch.copied)
    return DataTerms(log_prob, penalty)


class _Batch:
    """What the terms of a batch are computed from."""

    def __init__(
        self,
        likelihood: Any,
        q: MultivariateNormal,
        target: Tensor,
        mask: Tensor | None,
        beta: float,
        by_curvature: bool,
        kwargs: dict[str, Any],
    ) -> None:
        self.likelihood, self.q, self.target, self.mask = likelihood, q, target, mask
        self.beta, self.by_curvature, self.kwargs = beta, by_curvature, kwargs
        self.carrier = carrier_of(q)
        self.conditional: Any = self.carrier.origin.strategy.conditional
        self.explained, self.residual = self.carrier.explained, self.carrier.residual  # s_n and d_n  [..., B]
        self.is_plain = q.lazy_covariance_matrix is self.carrier  # no wrapper between the latent functions and q(f)
        self.copied = () if self.is_plain else copied_dims(q, self.carrier)

    def gaussian(self) -> tuple[Tensor, Tensor]:
        """Expected log density and price, point by point, in closed form."""
        q, origin = self.q, self.carrier.origin
        noise = gaussian_noise(self.likelihood, q.batch_shape, q.event_shape, **self.kwargs)  # broadcasts to y
        if self.conditional.is_learned:
            kept, penalty = self.learned()
        else:
            # lambda_n of each latent function: d/dd_n of the expected misfit sum(variance / noise).
            precision = noise.reciprocal() if self.mask is None else noise.reciprocal().where(self.mask, 0)
            within = lambda sets: origin.strategy.prior().residual_within(origin.projection, origin.x, sets)
            precision = self.pull_back(precision) / self.beta
            kept, penalty = self.conditional.optimum(self.residual, precision, within, origin.index)
        variance = self.explained + kept  # s_n + m_n d_n of the latent functions
        if not self.is_plain:
            variance = event_variance(with_variance(q, variance))
        return gaussian_expected_log_prob(self.target, q.mean, variance, noise), penalty

    def other(self) -> tuple[Tensor, Tensor]:
        """The same for any other likelihood, at the scales where the derivative in them vanishes."""
        if self.conditional.is_learned:
            kept, penalty = self.learned()
        elif not self.conditional.is_gaussian_only:
            scale = self.best_scale()
            kept, penalty = scale * self.residual, scale_penalty(scale)  # m_n d_n and -phi(m_n)
        else:
            raise no_closed_form(self.conditional, self.likelihood)
        is_sampled = self.by_curvature and family(self.likelihood).is_sampled
        expectation = sampled_log_prob if is_sampled else expected_log_prob
        return expectation(self.likelihood, self.target, self.narrowed(kept), **self.kwargs), penalty

    def narrowed(self, kept: Tensor) -> MultivariateNormal:
        """q(f) with the variances :math:`s_n + m_n d_n`, from what its conditional keeps of the residual."""
        return with_variance(self.q, self.explained + kept)

    def learned(self) -> tuple[Tensor, Tensor]:
        """What a learned conditional keeps of the residual, and its price, which is paid where observations see a function."""
        if not self.carrier.learned:  # in eval mode
            raise ValueError(f"{type(self.conditional).__name__} needs model(x, index=rows), also in eval mode.")
        scale, penalty = self.carrier.learned
        if self.mask is not None or not self.is_plain:
            weights = torch.ones_like(self.q.mean) if self.mask is None else self.seen().to(self.q.mean.dtype)
            penalty = penalty * (self.pull_back(weights) > 0)
        return scale * self.residual, penalty  # m_n d_n and -phi(m_n)

    def best_scale(self) -> Tensor:
        """The best :math:`m_n` of each latent function, without a graph."""
        likelihood, mean, num_steps = self.likelihood, self.q.mean, self.conditional.num_steps
        curvature: Callable[[Tensor], Tensor] = self.by_derivative
        # Closed forms of a likelihood of this package, for the density that it has.
        is_closed = self.is_plain and self.mask is None and family(likelihood).expectation == "moments"
        if is_closed and hasattr(likelihood, "best_scale"):
            return likelihood.best_scale(mean, self.explained, self.residual, self.beta)
        if is_closed and hasattr(likelihood, "curvature_of_moments"):
            known = likelihood.curvature_of_moments(self.target, mean.detach())
            curvature = lambda scale: known(torch.addcmul(self.explained, scale, self.residual))
        elif family(likelihood).is_sampled:
            curvature, num_steps = self.sampled_curvature(draw_samples(self.q)), min(num_steps, _SAMPLED_STEPS)
        return self.conditional.solve(self.residual, lambda m: curvature(m) / self.beta, num_steps)

    def by_derivative(self, scale: Tensor) -> Tensor:
        r""":math:`\lambda_n` by Price: half the expected second derivative is the derivative in the variance."""
        kept = (scale * self.residual).requires_grad_()
        with torch.enable_grad():
            log_prob = expected_log_prob(self.likelihood, self.target, self.narrowed(kept), **self.kwargs)
            log_prob = log_prob if self.mask is None else log_prob.where(self.mask, 0)
            (slope,) = torch.autograd.grad(log_prob.sum(), kept)
        return self.sum_copies(-2 * slope)  # lambda_n  [..., B]

    def sampled_curvature(self, draws: Tensor) -> Callable[[Tensor], Tensor]:
        """Mean second derivatives over samples from the same draws at every scale."""
        is_matrix = correlates_tasks(self.q)

        def curvature(scale: Tensor) -> Tensor:
            narrowed = self.narrowed(scale * self.residual)
            samples = place_samples(narrowed, draws)
            found = mean_curvature(self.likelihood, self.target, narrowed, samples, **self.kwargs)
            if self.mask is not None:
                seen = self.seen()
                found = found.where(seen.unsqueeze(-1) & seen.unsqueeze(-2) if is_matrix else seen, 0)
            return self.pull_back(found, task_covariance if is_matrix else event_variance)

        return curvature

    def seen(self) -> Tensor:
        """Which functions are observed, in the shape of q's mean: with one label per point all of a point or none."""
        q, mask = self.q, self.mask
        assert mask is not None
        is_label = isinstance(self.likelihood, SoftmaxLikelihood) or mask.shape[-len(q.event_shape) :] != q.event_shape
        is_several = isinstance(q, MultitaskMultivariateNormal)
        return (mask.unsqueeze(-1) if is_label and is_several else mask).expand_as(q.mean)

    def pull_back(self, weights: Tensor, covariance: Callable[[MultivariateNormal], Tensor] = event_variance) -> Tensor:
        """Weights of the variances of q(f) as weights of those of the latent functions; see :func:`pull_back`."""
        return weights if self.is_plain else self.sum_copies(pull_back(self.q, self.carrier, weights, covariance))

    def sum_copies(self, precision: Tensor) -> Tensor:
        """Copies of one function are seen by the observations of all."""
        return precision.sum(self.copied, keepdim=True).expand_as(precision) if self.copied else precision


def no_closed_form(conditional: Conditional, likelihood: Any) -> TypeError:
    """The error for a conditional that knows Gaussian noise alone."""
    return TypeError(
        f"{type(conditional).__name__} has a closed form for Gaussian noise only; got {type(likelihood).__name__}. "
        "Build the last layer's strategy with conditional='optimal', 'beta' or 'scalar'."
    )


def _sum_from(values: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions from this one on."""
    return values.flatten(dim).sum(dim) if values.dim() > dim else values
