"""The objective of the tighter family."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    OrthogonallyDecoupledVariationalStrategy,
)
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import LinearOperator
from torch import Tensor

from .._checks import host_values
from ..bounds import gaussian_expected_log_prob, scale_penalty
from ..conditionals import Conditional, CurvatureConditional, OptimalConditional, ScalarConditional
from ..likelihoods.properties import (
    correlates_tasks,
    draw_samples,
    expected_log_prob,
    filled,
    gaussian_noise,
    is_gaussian,
    is_log_concave,
    is_sampled,
    observed,
    place_samples,
    sampled_curvature,
    task_covariance,
)
from ..operators import ResidualLinearOperator, iter_residuals, replace_residual
from ..strategies._tighter_strategy import ConditionalAddedLossTerm, _TighterStrategy


class ELBOTerms(NamedTuple):
    r"""The parts of the bound per datum: ``log_likelihood - kl_divergence + log_prior - added_loss - conditional``.

    :param log_likelihood: Mean expected log likelihood over the batch.
    :param kl_divergence: :math:`\beta \, \mathrm{KL}[q(u) \Vert p(u)] / N`.
    :param log_prior: Log density of the priors on hyperparameters, over :math:`N`.
    :param added_loss: Added loss terms of the model, unscaled as in GPyTorch.
    :param conditional: :math:`\beta \, \mathrm{KL}[q(f|u) \Vert p(f|u)]`, mean over the batch.

    Example:
        >>> mll = tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y), combine_terms=False)
        >>> terms = mll(model(train_x), train_y)
        >>> bool(terms.conditional >= 0), terms.bound.shape
        (True, torch.Size([]))
    """

    log_likelihood: Tensor
    kl_divergence: Tensor
    log_prior: Tensor
    added_loss: Tensor
    conditional: Tensor

    @property
    def bound(self) -> Tensor:
        """What :class:`~tighter_gp.TighterELBO` returns with ``combine_terms=True``."""
        return self.log_likelihood - self.kl_divergence + self.log_prior - self.added_loss - self.conditional


class TighterELBO(_ApproximateMarginalLogLikelihood):
    r"""
    The tighter evidence lower bound, per datum.

    .. math::

        \frac1N \Bigl\{ \sum_n \mathbb E_{\mathcal N(\mu_n,\, s_n + m_n d_n)} [\log p(y_n \mid f_n)]
        - \tfrac12 \sum_n (m_n - 1 - \log m_n) - \mathrm{KL}[q(u) \,\Vert\, p(u)] \Bigr\}

    A batch gives an unbiased estimate: its sums over points become means, and only the KL divergence is divided by
    ``num_data``. With Gaussian noise and ``conditional="optimal"`` the scales are :math:`m_n = \sigma_n^2/(\sigma_n^2 +
    d_n)`, so that the residual variance costs :math:`\tfrac12 \log(1 + d_n/\sigma_n^2)` where SVGP pays
    :math:`\tfrac12 d_n/\sigma_n^2`.

    The value is a lower bound on the log evidence (in expectation over batches) for Gaussian noise with every
    conditional, for log-concave likelihoods with every conditional, and for any likelihood with ``"scalar"``.

    In a deep GP (inside :class:`~gpytorch.mlls.DeepApproximateMLL`) the scales of the hidden layers must be
    ``"scalar"``, each paid once a function and datum; the conditionals without parameters leave a hidden layer as in
    SVGP, with :math:`m = 1`.

    :param likelihood: The likelihood.
    :param model: An :class:`~gpytorch.models.ApproximateGP` built on a strategy of this package, perhaps inside one of
        GPyTorch's multitask strategies, or a :class:`~gpytorch.models.deep_gps.DeepGP` of such layers.
    :param num_data: The total number of training points :math:`N`.
    :param beta: Factor on both KL divergences, that of q(u) and that of the conditional; below 1 the value is no bound.
    :param combine_terms: Whether to return the sum (default) or :class:`~tighter_gp.mlls.ELBOTerms`.

    Example:
        >>> mll = tighter_gp.TighterELBO(likelihood, model, num_data=train_y.numel())
        >>> loss = -mll(model(train_x), train_y)
        >>> standard = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=train_y.numel())
        >>> bool(loss <= -standard(model(train_x), train_y))
        True
    """

    def __init__(
        self, likelihood: Likelihood, model: Any, num_data: int, beta: float = 1.0, combine_terms: bool = True
    ) -> None:
        if num_data < 1:
            raise ValueError(f"num_data is the number of training points; got {num_data}.")
        if not beta > 0:
            raise ValueError(f"beta must be positive; got {beta}.")
        strategies = _tighter_strategies(model)
        super().__init__(likelihood, model, num_data, beta, combine_terms)
        if not is_gaussian(likelihood) and all(s.conditional.is_gaussian_only for s in strategies):
            raise _no_closed_form(strategies[-1].conditional, likelihood, "the strategy")
        if not is_log_concave(likelihood) and not all(s.conditional.is_strict for s in strategies):
            warnings.warn(
                f"{type(likelihood).__name__} is not known to be log-concave, so the objective is an approximation to the "
                "evidence, not a strict bound; conditional='scalar' is strict. A log-concave likelihood of your own "
                "says so with is_log_concave = True.",
                UserWarning,
                stacklevel=2,
            )

    def _log_likelihood_term(self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        return self._data_terms(variational_dist_f, target, **kwargs)[0]

    def forward(self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor | ELBOTerms:
        r"""
        :param variational_dist_f: q(f) as the model returns it in training mode.
        :param target: :math:`y`.
        :param kwargs: Passed to the likelihood; ``noise=`` for
            :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.
        :return: The bound per datum, shaped like the batch of models, or :class:`~tighter_gp.mlls.ELBOTerms`.
        """
        log_likelihood, conditional = self._data_terms(variational_dist_f, target, **kwargs)
        num_batch = variational_dist_f.event_shape[0]
        log_likelihood = log_likelihood / num_batch
        added_loss, log_prior = torch.zeros_like(log_likelihood), torch.zeros_like(log_likelihood)
        for term in self.model.added_loss_terms():
            if not isinstance(term, ConditionalAddedLossTerm):
                added_loss = added_loss + term.loss()
        for _, module, prior, closure, _ in self.named_priors():
            log_prior = log_prior + prior.log_prob(closure(module)).sum() / self.num_data
        terms = ELBOTerms(
            log_likelihood=log_likelihood,
            kl_divergence=self._kl_divergence(variational_dist_f) * (self.beta / self.num_data),
            log_prior=log_prior,
            added_loss=added_loss,
            conditional=self.beta * conditional / num_batch,
        )
        return terms.bound if self.combine_terms else terms

    def _data_terms(self, q: MultivariateNormal, target: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Expected log likelihood and KL of the conditional, each summed over the batch's points."""
        carrier = self._residual_of(q)
        self._check_target(q, target)
        mask, conditional = observed(self.likelihood, target, q.event_shape), carrier.strategy.conditional
        if mask is not None:
            target = filled(target, mask)
        gaussian = is_gaussian(self.likelihood)
        if gaussian:
            noise = gaussian_noise(self.likelihood, q.batch_shape, q.event_shape, **kwargs)
            _check_batch(noise, q)
        # The wrappers move the dimension they consume to the end of the carrier's batch.
        consumed = tuple(range(len(q.batch_shape), len(carrier.batch_shape)))
        copied = tuple(dim for dim in consumed if carrier.copied[dim])

        # kept: what the conditional leaves of the residual variance, m_n d_n
        if conditional.is_learned:
            kept, penalty = carrier.scale * carrier.residual, carrier.penalty
            if mask is not None or q.lazy_covariance_matrix is not carrier:
                # Nothing is paid where no observation sees the function.
                seen = torch.ones_like(q.mean) if mask is None else mask.to(q.mean.dtype)
                penalty = penalty * (_together(_pull_back(q, carrier, seen), copied) > 0)
        elif gaussian:
            # lambda_n of each latent function: d/dd_n of the expected misfit sum(variance / noise).
            precision = _together(_pull_back(q, carrier, _masked(noise.reciprocal(), mask)), copied) / self.beta
            kept, penalty = conditional.optimum(carrier.residual, precision, carrier.blocks)
        elif isinstance(conditional, CurvatureConditional):
            curvature = self._curvature(q, carrier, target, mask, **kwargs)
            scale = conditional.solve(carrier.residual, lambda m: _together(curvature(m), copied) / self.beta)
            kept, penalty = scale * carrier.residual, scale_penalty(scale)
        else:
            raise _no_closed_form(conditional, self.likelihood, "the last layer's strategy")

        variance = carrier.explained + kept
        if gaussian:
            if q.lazy_covariance_matrix is not carrier:
                variance = _event_variance(_with_variance(q, variance))
            log_prob = gaussian_expected_log_prob(target, q.mean, variance, noise)
        else:
            log_prob = expected_log_prob(self.likelihood, target, _with_variance(q, variance), **kwargs)
        log_prob = _masked(log_prob, mask)
        # Some likelihoods sum over tasks, some do not: sum over all that is not batch.
        log_likelihood = _sum_from(log_prob, len(q.batch_shape))
        # Copies of one function pay once.
        num_copies = math.prod(carrier.batch_shape[dim] for dim in copied)
        paid = _sum_from(penalty, len(q.batch_shape)) / num_copies
        return log_likelihood, paid + self._hidden_penalty(carrier, q.event_shape[0])

    def _curvature(
        self, q: MultivariateNormal, carrier: ResidualLinearOperator, target: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Callable[[Tensor], Tensor]:
        r""":math:`\lambda_n` of each latent function as a function of the scales :math:`m_n`, without a graph."""
        explained, residual = carrier.explained.detach(), carrier.residual.detach()

        def by_derivative(scale: Tensor) -> Tensor:
            # Price: the derivative of an expectation in the variance is half the expected second derivative.
            with torch.enable_grad():
                kept = (scale * residual).requires_grad_()
                narrowed = _with_variance(q, explained + kept)
                log_prob = _masked(expected_log_prob(self.likelihood, target, narrowed, **kwargs), mask)
                (slope,) = torch.autograd.grad(log_prob.sum(), kept)
            return -2 * slope

        if not is_sampled(self.likelihood):
            return by_derivative
        draws, num_tasks = draw_samples(q), q.event_shape[1] if len(q.event_shape) > 1 else None

        def by_samples(scale: Tensor) -> Tensor:
            samples = place_samples(_with_variance(q, explained + scale * residual), draws)
            matrix = sampled_curvature(self.likelihood, target, samples, num_tasks, **kwargs)
            if correlates_tasks(q):
                return _pull_back(q, carrier, matrix, task_covariance)
            diagonal = matrix if num_tasks is None else matrix.diagonal(dim1=-1, dim2=-2)
            return _pull_back(q, carrier, _masked(diagonal, mask))

        return by_samples

    def _kl_divergence(self, q: MultivariateNormal) -> Tensor:
        """KL divergence of q(u), summed over the latent functions that make up one model."""
        outer = self.model.variational_strategy
        if isinstance(outer, LMCVariationalStrategy):
            return outer.base_variational_strategy.kl_divergence().sum(outer.latent_dim)
        if not isinstance(outer, IndependentMultitaskVariationalStrategy):
            return outer.kl_divergence()
        # GPyTorch sums over the last dimension whatever task_dim is, and also where tasks are copies of one function.
        divergence, dim = outer.base_variational_strategy.kl_divergence(), outer.task_dim
        dim = dim if dim < 0 else dim - len(q.batch_shape) - 1
        return divergence.sum(dim) if -divergence.dim() <= dim < 0 else divergence

    def _residual_of(self, q: MultivariateNormal) -> ResidualLinearOperator:
        if isinstance(q, Tensor):
            raise TypeError(
                "TighterELBO needs q(f), got a tensor: call mll(model(x), y), and for a latent-variable model use "
                "tighter_gp.gplvm.LatentVariableELBO, as objective= of fit."
            )
        carriers = list(iter_residuals(q.lazy_covariance_matrix)) if isinstance(q, MultivariateNormal) else []
        if not carriers:
            raise TypeError(
                "TighterELBO needs q(f) as the model returns it in training mode; this one does not carry its residual "
                "variance. Call model.train() before model(x), and hand the output over unsliced."
            )
        if len(carriers) > 1:
            raise TypeError(f"TighterELBO needs q(f) from one strategy; this one mixes {len(carriers)}.")
        (carrier,) = carriers
        if isinstance(self.likelihood, SoftmaxLikelihood) and not isinstance(q, MultitaskMultivariateNormal):
            raise TypeError(
                "SoftmaxLikelihood needs one function a class for each point: wrap the strategy in "
                "gpytorch.variational.IndependentMultitaskVariationalStrategy."
            )
        if all(carrier.strategy is not module for module in self.model.modules()):
            raise ValueError("q(f) comes from another model than the one TighterELBO was built with.")
        return carrier

    def _hidden_penalty(self, carrier: ResidualLinearOperator, num_batch: int) -> Tensor | float:
        """Price of the scales in the other layers of a deep GP, which q(f) of the last one does not show."""
        total: Tensor | float = 0.0
        for strategy in self.model.modules():
            if not isinstance(strategy, _TighterStrategy) or strategy is carrier.strategy:
                continue
            conditional = strategy.conditional
            if not conditional.is_learned:
                continue
            if not isinstance(conditional, ScalarConditional):
                raise TypeError(
                    f"{type(conditional).__name__} in a hidden layer gives no bound: the layers above are not "
                    "log-concave. Use conditional='scalar' there, or 'optimal', which leaves hidden layers as in SVGP."
                )
            # One term a latent function and datum, also where the functions of a layer share one scale.
            shape = strategy._variational_distribution.batch_shape
            total = total + num_batch * scale_penalty(conditional.m).expand(shape).sum()
        return total

    def _check_target(self, q: MultivariateNormal, target: Tensor) -> None:
        if q.event_shape[0] > self.num_data:
            raise ValueError(
                f"The batch has {q.event_shape[0]} points but num_data={self.num_data}; num_data is the size of the whole "
                "training set."
            )
        if target.dtype == torch.bool:
            raise TypeError("Targets are bool, which have no arithmetic; convert them, such as y.float().")
        # A likelihood of several functions may have one label a point.
        is_one_dimensional = isinstance(self.likelihood, _OneDimensionalLikelihood) or is_gaussian(self.likelihood)
        allowed = {q.event_shape} if is_one_dimensional else {q.event_shape, q.event_shape[:1]}
        for event_shape in allowed:
            batch_shape = target.shape[: target.dim() - len(event_shape)]
            if target.shape[len(batch_shape) :] == event_shape and _fits(batch_shape, q.batch_shape):
                break
        else:
            wanted = " or ".join(str(tuple(q.batch_shape + event_shape)) for event_shape in sorted(allowed, key=len))
            raise ValueError(
                f"Targets must have shape {wanted} to fit q(f); got {tuple(target.shape)}. "
                "For a single output squeeze a trailing dimension of one."
            )
        values = host_values(target)
        if (
            values is not None
            and not np.isfinite(values).all()
            and observed(self.likelihood, target, q.event_shape) is None
        ):
            count = (~np.isfinite(values)).sum()
            raise ValueError(
                f"{count} of {target.numel()} targets are NaN or infinite; drop them, or mark NaN as missing with "
                "gpytorch.settings.observation_nan_policy('fill')."
            )


def _tighter_strategies(model: Any) -> list[_TighterStrategy]:
    """The strategies of a model, or a clear error if they are not of this package."""
    if not hasattr(model, "variational_strategy"):
        inner = getattr(model, "model", None)
        hint = " Pass its .model instead." if hasattr(inner, "variational_strategy") else ""
        raise TypeError(f"TighterELBO needs a model with a variational_strategy; got {type(model).__name__}.{hint}")
    strategy = model.variational_strategy
    # The decoupled strategy has a base too, but adds a term of its own to q(f).
    while hasattr(strategy, "base_variational_strategy") and not isinstance(
        strategy, OrthogonallyDecoupledVariationalStrategy
    ):
        strategy = strategy.base_variational_strategy
    candidates = model.modules() if not isinstance(strategy, _VariationalStrategy) else [strategy]  # a deep GP
    found = [module for module in candidates if isinstance(module, _TighterStrategy)]
    if not found:
        raise TypeError(
            f"TighterELBO needs a strategy of tighter_gp, such as TighterVariationalStrategy; got {type(strategy).__name__}. "
            "Change the strategy, or use gpytorch.mlls.VariationalELBO."
        )
    return found


def _no_closed_form(conditional: Conditional, likelihood: Any, where: str) -> TypeError:
    name = "conditional='optimal'" if type(conditional) is OptimalConditional else type(conditional).__name__
    return TypeError(
        f"{name} has a closed form for Gaussian noise only; got {type(likelihood).__name__}. "
        f"Build {where} with conditional='beta' or 'scalar', or 'curvature'."
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


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def _event_diagonal(q: MultivariateNormal, covar: LinearOperator) -> Tensor:
    """Variances in the shape of q's mean, exact: no rounding up of small ones, no reading back to the host."""
    diagonal = covar.diagonal(dim1=-1, dim2=-2)
    if not isinstance(q, MultitaskMultivariateNormal):
        return diagonal
    num_points, num_tasks = q.event_shape
    if q._interleaved:
        return diagonal.reshape(*diagonal.shape[:-1], num_points, num_tasks)
    return diagonal.reshape(*diagonal.shape[:-1], num_tasks, num_points).mT


def _with_variance(q: MultivariateNormal, variance: Tensor) -> MultivariateNormal:
    """q(f) with other variances of its latent functions and no correlation between points."""
    covar = replace_residual(q.lazy_covariance_matrix, variance)
    if isinstance(q, MultitaskMultivariateNormal):
        return MultitaskMultivariateNormal(q.mean, covar, interleaved=q._interleaved)
    return q.__class__(q.mean, covar)


def _event_variance(q: MultivariateNormal) -> Tensor:
    return _event_diagonal(q, q.lazy_covariance_matrix)


def _pull_back(
    q: MultivariateNormal,
    carrier: ResidualLinearOperator,
    weights: Tensor,
    covariance: Callable[[MultivariateNormal], Tensor] = _event_variance,
) -> Tensor:
    r"""Derivative of ``(weights * variance).sum()`` with respect to the residual of each latent function.

    The variances are linear in the residual whatever the wrapper: :math:`\lambda = 1/\sigma^2` for a single output,
    :math:`1/\sigma_p^2` for independent tasks, :math:`\sum_p W_{pk}^2/\sigma_p^2` for the k-th latent of an LMC.

    :param covariance: What the weights are for: the variances of q, or the covariances between its tasks.
    """
    if q.lazy_covariance_matrix is carrier:
        return weights
    with torch.enable_grad():
        probe = torch.zeros_like(carrier.residual, requires_grad=True)
        values = covariance(_with_variance(q, probe))
        (gradient,) = torch.autograd.grad((weights * values).sum(), probe, create_graph=True)
    return gradient


def _together(precision: Tensor, copied: tuple[int, ...]) -> Tensor:
    """Copies of one function are seen by the observations of all."""
    return precision.sum(copied, keepdim=True).expand_as(precision) if copied else precision


def _sum_from(values: Tensor, dim: int) -> Tensor:
    """Sum over all dimensions from this one on."""
    return values.flatten(dim).sum(dim) if values.dim() > dim else values
