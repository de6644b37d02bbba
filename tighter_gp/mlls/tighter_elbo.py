"""The objective of the tighter family."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import OrthogonallyDecoupledVariationalStrategy
from gpytorch.variational._variational_strategy import _VariationalStrategy
from torch import Tensor

from ..conditionals import ScalarConditional
from ..conditionals.base import ConditionalAddedLossTerm
from ..likelihoods.family import family, observed
from ..likelihoods.targets import check_shape, check_targets
from ..maths.bounds import scale_penalty
from ..strategies import TighterStrategy
from .data_terms import DataTerms, data_terms, no_closed_form
from .priors import log_prior
from .wrapped import carrier_of, wrapped_divergence


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
    log_prior: Tensor | float
    added_loss: Tensor | float
    conditional: Tensor

    @property
    def bound(self) -> Tensor:
        """What :class:`~tighter_gp.TighterELBO` returns with ``combine_terms=True``."""
        bound = self.log_likelihood - self.kl_divergence - self.conditional
        if isinstance(self.log_prior, Tensor):
            bound = bound + self.log_prior
        return bound - self.added_loss if isinstance(self.added_loss, Tensor) else bound


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
    ``"scalar"``, each paid once per function and datum; the conditionals without parameters leave a hidden layer as in
    SVGP, with :math:`m = 1`.

    :param likelihood: The likelihood.
    :param model: An :class:`~gpytorch.models.ApproximateGP` built on a strategy of this package, perhaps inside one of
        GPyTorch's multitask strategies, or a :class:`~gpytorch.models.deep_gps.DeepGP` of such layers. Of a module that holds a
        network and a GP, its GP.
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
        strategies, known = _tighter_strategies(model), family(likelihood)
        super().__init__(likelihood, model, num_data, beta, combine_terms)
        self._has_seen_targets = False
        if not known.is_gaussian and all(s.conditional.is_gaussian_only for s in strategies):
            raise no_closed_form(strategies[-1].conditional, likelihood)
        if not known.is_log_concave and not all(s.conditional.is_strict for s in strategies):
            warnings.warn(
                f"{type(likelihood).__name__} is not known to be log-concave, so the objective is an approximation to the "
                "evidence, not a strict bound; conditional='scalar' is strict. A log-concave likelihood of your own "
                "says so with is_log_concave = True.",
                UserWarning,
                stacklevel=2,
            )

    def _log_likelihood_term(self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        return self.data_terms(variational_dist_f, target, **kwargs).log_likelihood

    def forward(self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor | ELBOTerms:
        r"""
        :param variational_dist_f: q(f) as the model returns it. In eval mode the value is that of training, for a
            validation loss.
        :param target: :math:`y`.
        :param kwargs: Passed to the likelihood; ``noise=`` for
            :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.
        :return: The bound per datum, shaped like the batch of models, or :class:`~tighter_gp.mlls.ELBOTerms`.
        """
        log_likelihood, conditional = self.data_terms(variational_dist_f, target, **kwargs)
        num_batch = variational_dist_f.event_shape[0]
        log_likelihood = log_likelihood / num_batch  # a mean over the batch, as an estimate of that over the data
        added_loss: Tensor | float = 0.0
        for term in self.model.added_loss_terms():
            if not isinstance(term, ConditionalAddedLossTerm):
                added_loss = added_loss + term.loss()
        # The samples of a deep GP are no batch of models.
        batch_shape = torch.Size() if isinstance(self.model, DeepGP) else log_likelihood.shape
        divergence = wrapped_divergence(self.model.variational_strategy, variational_dist_f)
        terms = ELBOTerms(
            log_likelihood=log_likelihood,
            kl_divergence=divergence * (self.beta / self.num_data),
            log_prior=log_prior(self, batch_shape) / self.num_data,
            added_loss=added_loss,
            conditional=conditional * (self.beta / num_batch),
        )
        if self.combine_terms:
            return terms.bound
        zero = torch.zeros_like(log_likelihood)
        return terms._replace(log_prior=zero + terms.log_prior, added_loss=zero + added_loss)

    def data_terms(
        self, q: MultivariateNormal, target: Tensor, *, by_curvature: bool = False, **kwargs: Any
    ) -> DataTerms:
        """Expected log likelihood and KL of the conditionals of all layers, each summed over the batch's points.

        :param by_curvature: See :func:`~tighter_gp.mlls.data_terms`.
        """
        last = carrier_of(q).origin.strategy
        num_batch = q.event_shape[0]
        strategies = [module for module in self.model.modules() if isinstance(module, TighterStrategy)]
        if last not in strategies:
            raise ValueError("q(f) comes from another model than the one TighterELBO was built with.")
        if num_batch > self.num_data:
            raise ValueError(
                f"The batch has {num_batch} points but num_data={self.num_data}; num_data is the size of the whole "
                "training set."
            )
        check_shape(self.likelihood, q, target)
        if not self._has_seen_targets:  # a first look, as fit has it of all data
            self._has_seen_targets = True
            if target.device.type == "cpu":
                check_targets(self.likelihood, target)
        mask = observed(self.likelihood, target, q.event_shape)
        options: dict[str, Any] = {"mask": mask, "beta": self.beta, "by_curvature": by_curvature}
        terms = data_terms(self.likelihood, q, target, **options, **kwargs)
        hidden = [s for s in strategies if s is not last and s.conditional.is_learned]
        return terms._replace(conditional=sum(map(_hidden_penalty, hidden)) * num_batch + terms.conditional)


def _hidden_penalty(strategy: TighterStrategy) -> Tensor:
    """Price per datum of the scale in another layer of a deep GP, which q(f) of the last one does not show."""
    conditional = strategy.conditional
    if not isinstance(conditional, ScalarConditional):
        raise TypeError(
            f"{type(conditional).__name__} in a hidden layer gives no bound: the layers above are not "
            "log-concave. Use conditional='scalar' there, or 'optimal', which leaves hidden layers as in SVGP."
        )
    # One term per latent function and datum, also where the functions of a layer share one scale.
    return scale_penalty(conditional.m).expand(strategy._variational_distribution.batch_shape).sum()


def _tighter_strategies(model: Any) -> list[TighterStrategy]:
    """The strategies of a model, or a clear error if they are not of this package."""
    strategy = model.variational_strategy
    # The decoupled strategy has a base too, but adds a term of its own to q(f).
    while hasattr(strategy, "base_variational_strategy") and not isinstance(
        strategy, OrthogonallyDecoupledVariationalStrategy
    ):
        strategy = strategy.base_variational_strategy
    candidates = [strategy] if isinstance(strategy, _VariationalStrategy) else model.modules()  # else a deep GP
    found = [module for module in candidates if isinstance(module, TighterStrategy)]
    if not found:
        raise TypeError(
            f"TighterELBO needs a strategy of tighter_gp, such as TighterVariationalStrategy; got {type(strategy).__name__}. "
            "Change the strategy, or take the standard bound: gpytorch.mlls.VariationalELBO, which fit and evaluate_bound use "
            "with objective=gpytorch.mlls.VariationalELBO."
        )
    return found
