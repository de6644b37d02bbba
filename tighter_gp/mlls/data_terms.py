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
from .wrapped import copied_dims, pull_back, with_variance

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
    batch = _Batch(carrier_of(q), likelihood, q, target, mask, beta, by_curvature, kwargs)
    log_prob, penalty = batch.gaussian() if family(likelihood).is_gaussian else batch.other()
    # Copies of one function pay once; some likelihoods sum over tasks, some do not: sum over all that is not batch.
    num_copies, num_batch = math.prod(batch.carrier.batch_shape[dim] for dim in batch.copied), len(q.batch_shape)
    return DataTerms(_sum_from(_masked(log_prob, mask), num_batch), _sum_from(penalty, num_batch) / num_copies)


class _Batch(NamedTuple):
    """What the terms of a batch are computed from."""

    carrier: Carrier
    likelihood: Any
    q: MultivariateNormal
    target: Tensor
    mask: Tensor | None
    beta: float
    by_curvature: bool
    kwargs: dict[str, Any]

    @property
    def conditional(self) -> Any:
        return self.carrier.origin.strategy.conditional

    @property
    def copied(self) -> tuple[int, ...]:
        return copied_dims(self.q, self.carrier)

    @property
    def is_plain(self) -> bool:
        """Whether no wrapper stands between the latent functions and q(f)."""
        return self.q.lazy_covariance_matrix is self.carrier

    def gaussian(self) -> tuple[Tensor, Tensor]:
        """Expected log density and price, point by point, in closed form."""
        q, residual, origin = self.q, self.carrier.residual, self.carrier.origin
        noise = gaussian_noise(
            self.likelihood, q.batch_shape, q.event_shape, **self.kwargs
        )  # sigma_n^2, broadcasts to y
        if self.conditional.is_learned:
            kept, penalty = self.learned()
        else:
            # lambda_n of each latent function: d/dd_n of the expected misfit sum(variance / noise).
            precision = self.sum_copies(pull_back(q, self.carrier, _masked(noise.reciprocal(), self.mask))) / self.beta
            within = lambda sets: origin.strategy.prior().residual_within(origin.projection, origin.x, sets)
            kept, penalty = self.conditional.optimum(residual, precision, within, origin.index)
        variance = self.carrier.explained + kept  # s_n + m_n d_n of the latent functions
        if not self.is_plain:
            variance = event_variance(with_variance(q, variance))
        return gaussian_expected_log_prob(self.target, q.mean, variance, noise), penalty

    def other(self) -> tuple[Tensor, Tensor]:
        """The same for any other likelihood, at the scales where the derivative in them vanishes."""
        if self.conditional.is_learned:
            kept, penalty = self.learned()
        elif not self.conditional.is_gaussian_only:
            scale = self.best_scale()
            kept, penalty = scale * self.carrier.residual, scale_penalty(scale)  # m_n d_n and -phi(m_n)
        else:
            raise no_closed_form(self.conditional, self.likelihood)
        is_sampled = self.by_curvature and family(self.likelihood).is_sampled
        expectation = sampled_log_prob if is_sampled else expected_log_prob
        narrowed = with_variance(self.q, self.carrier.explained + kept)
        return expectation(self.likelihood, self.target, narrowed, **self.kwargs), penalty

    def learned(self) -> tuple[Tensor, Tensor]:
        """What a learned conditional keeps of the residual, and its price, which is paid where observations see a function."""
        if not self.carrier.learned:  # in eval mode
            raise ValueError(f"{type(self.conditional).__name__} needs model(x, index=rows), also in eval mode.")
        scale, penalty = self.carrier.learned
        kept = scale * self.carrier.residual  # m_n d_n
        if self.mask is not None or not self.is_plain:
            weights = torch.ones_like(self.q.mean) if self.mask is None else self.seen().to(self.q.mean.dtype)
            penalty = penalty * (self.sum_copies(pull_back(self.q, self.carrier, weights)) > 0)
        return kept, penalty

    def best_scale(self) -> Tensor:
        """The best :math:`m_n` of each latent function, without a graph."""
        likelihood, carrier, conditional = self.likelihood, self.carrier, self.conditional
        if self.is_plain and self.mask is None and _has(likelihood, "best_scale"):
            return likelihood.best_scale(self.q.mean, carrier.explained, carrier.residual, self.beta)
        curvature, num_steps = self.curvature(), conditional.num_steps
        if family(likelihood).is_sampled:
            num_steps = min(num_steps, _SAMPLED_STEPS)
        return conditional.solve(carrier.residual, lambda m: self.sum_copies(curvature(m)) / self.beta, num_steps)

    def curvature(self) -> Callable[[Tensor], Tensor]:
        r""":math:`\lambda_n` of each latent function as a function of the scales :math:`m_n`, to be called without a graph."""
        likelihood, explained, residual = self.likelihood, self.carrier.explained, self.carrier.residual
        if self.is_plain and self.mask is None and _has(likelihood, "curvature_of_moments"):
            known = likelihood.curvature_of_moments(self.target, self.q.mean.detach())
            return lambda scale: known(torch.addcmul(explained, scale, residual))
        return self.sampled_curvature(draw_samples(self.q)) if family(likelihood).is_sampled else self.by_derivative

    def by_derivative(self, scale: Tensor) -> Tensor:
        """Price: the derivative of an expectation in the variance is half the expected second derivative."""
        kept = (scale * self.carrier.residual).requires_grad_()
        with torch.enable_grad():
            narrowed = with_variance(self.q, self.carrier.explained + kept)
            log_prob = expected_log_prob(self.likelihood, self.target, narrowed, **self.kwargs)
            (slope,) = torch.autograd.grad(_masked(log_prob, self.mask).sum(), kept)
        return -2 * slope  # lambda_n  [..., B]

    def sampled_curvature(self, draws: Tensor) -> Callable[[Tensor], Tensor]:
        """Mean second derivatives over samples from the same draws at every scale."""
        q, seen = self.q, None if self.mask is None else self.seen()
        is_matrix = correlates_tasks(q)
        if seen is not None and is_matrix:
            seen = seen.unsqueeze(-1) & seen.unsqueeze(-2)

        def curvature(scale: Tensor) -> Tensor:
            narrowed = with_variance(q, self.carrier.explained + scale * self.carrier.residual)
            samples = place_samples(narrowed, draws)
            found = _masked(mean_curvature(self.likelihood, self.target, narrowed, samples, **self.kwargs), seen)
            return pull_back(q, self.carrier, found, task_covariance if is_matrix else event_variance)

        return curvature

    def seen(self) -> Tensor:
        """Which functions are observed, in the shape of q's mean: with one label per point all of a point or none."""
        q, mask = self.q, self.mask
        assert mask is not None
        is_label = isinstance(self.likelihood, SoftmaxLikelihood) or mask.shape[-len(q.event_shape) :] != q.event_shape
        is_several = isinstance(q, MultitaskMultivariateNormal)
        return (mask.unsqueeze(-1) if is_label and is_several else mask).expand_as(q.mean)

    def sum_copies(self, precision: Tensor) -> Tensor:
        """Copies of one function are seen by the observations of all."""
        copied = self.copied
        return precision.sum(copied, keepdim=True).expand_as(precision) if copied else precision


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


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def _sum_from(values: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions from this one on."""
    return values.flatten(dim).sum(dim) if values.dim() > dim else values
