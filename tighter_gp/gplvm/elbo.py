"""The objective of the Bayesian GPLVM."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal

from .._modes import chunks, temporary_mode
from ..conditionals import PerPoint
from ..likelihoods.properties import filled
from ..mlls import TighterELBO
from ..strategies._tighter_strategy import _TighterStrategy
from .data import as_observed, check_count


class LatentELBOTerms(NamedTuple):
    r"""The parts of the bound per datum, each summed over the outputs.

    The bound is ``log_likelihood - kl_divergence - latent_kl + log_prior - added_loss - conditional``.

    :param log_likelihood: Mean expected log likelihood over samples and rows of the batch.
    :param kl_divergence: :math:`\beta \sum_p \mathrm{KL}[q(u_p) \Vert p(u_p)] / N`.
    :param latent_kl: :math:`\beta \, \mathrm{KL}[q(x_n) \Vert p(x_n)]`, mean over the rows of the batch.
    :param log_prior: Log density of the priors on hyperparameters, over :math:`N`.
    :param added_loss: Added loss terms of the model, unscaled as in GPyTorch.
    :param conditional: :math:`\beta \sum_p \mathrm{KL}[q(f_p|u_p) \Vert p(f_p|u_p)]`, mean over samples and rows.

    Example:
        >>> elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=len(Y), combine_terms=False)
        >>> terms = elbo(rows, Y[rows])
        >>> bool(terms.latent_kl >= 0), terms.bound.shape
        (True, torch.Size([]))
    """

    log_likelihood: Tensor
    kl_divergence: Tensor
    latent_kl: Tensor
    log_prior: Tensor
    added_loss: Tensor
    conditional: Tensor

    @property
    def bound(self) -> Tensor:
        """What :class:`LatentVariableELBO` returns with ``combine_terms=True``."""
        gain = self.log_likelihood + self.log_prior
        return gain - self.kl_divergence - self.latent_kl - self.added_loss - self.conditional


class LatentVariableELBO(_ApproximateMarginalLogLikelihood):
    r"""
    The evidence lower bound of a :class:`BayesianGPLVM`, in nats per datum (per row, summed over its outputs).

    .. math::

        \frac1N \Bigl\{ \mathbb E_{q(x)} \sum_{n,p} \Bigl( \mathbb E_{\mathcal N(\mu_{np},\, s_{np} + m_{np} d_n)}
        [\log p(y_{np} \mid f_{np})] - \tfrac12 (m_{np} - 1 - \log m_{np}) \Bigr)
        - \sum_p \mathrm{KL}[q(u_p) \Vert p(u_p)] - \sum_n \mathrm{KL}[q(x_n) \Vert p(x_n)] \Bigr\}

    where :math:`s_{np}` and :math:`d_n` depend on :math:`x_n`. Unbiased in the rows of a batch and in the samples of x:
    sums over rows and samples become means, and only the KL divergence of q(u) is divided by ``num_data``. Missing
    entries, NaN or masked, are left out of the sum over :math:`n, p` with their conditional term.

    With :class:`~tighter_gp.TighterVariationalStrategy` it is the tighter bound (TV-BGPLVM). With GPyTorch's own
    strategy, or with ``objective=VariationalELBO``, :math:`m = 1` (V-BGPLVM).

    :param likelihood: The likelihood, as a rule ``model.likelihood``.
    :param model: A :class:`BayesianGPLVM`.
    :param num_data: The total number of rows :math:`N`.
    :param beta: Factor on all KL divergences; below 1 the value is no bound.
    :param combine_terms: Whether to return the sum (default) or :class:`LatentELBOTerms`.
    :param objective: :class:`~tighter_gp.TighterELBO` or :class:`~gpytorch.mlls.VariationalELBO`; default by the strategy.

    Example:
        >>> elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=len(Y))
        >>> loss = -elbo(rows, Y[rows], num_samples=3)
        >>> loss.shape, loss.requires_grad
        (torch.Size([]), True)
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: Any,
        num_data: int,
        beta: float = 1.0,
        combine_terms: bool = True,
        *,
        objective: type[TighterELBO] | type[VariationalELBO] | None = None,
    ) -> None:
        if not hasattr(model, "latents"):
            raise TypeError(f"LatentVariableELBO needs a BayesianGPLVM; got {type(model).__name__}.")
        if num_data < 1:
            raise ValueError(f"num_data is the number of rows of the training data; got {num_data}.")
        super().__init__(likelihood, model, num_data, beta, combine_terms)
        if objective is None:
            tighter = isinstance(model.variational_strategy, _TighterStrategy)
            objective = TighterELBO if tighter else VariationalELBO
        masks = issubclass(objective, TighterELBO)
        self._data_elbo = objective(
            likelihood if masks else _ObservedLikelihood(likelihood), model, num_data, beta, combine_terms=False
        )

    def _log_likelihood_term(self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        return self._data_elbo._log_likelihood_term(approximate_dist_f, target, **kwargs)

    def forward(
        self,
        index: Tensor | None,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        num_samples: int = 1,
        **kwargs: Any,
    ) -> Tensor | LatentELBOTerms:
        r"""
        :param index: The rows of the data in this batch, ``B``; None for all.
        :param target: Those rows, ``B x P``; NaN marks a missing entry.
        :param mask: True where observed, ``B x P``.
        :param num_samples: Draws of x a row.
        :param kwargs: Passed to the likelihood.
        :return: The bound per datum, or :class:`LatentELBOTerms`.
        """
        check_count("num_samples", num_samples)
        q_x = self.model.latents.q(index)
        return self.at(q_x.rsample(torch.Size([num_samples])), q_x, target, mask=mask, index=index, **kwargs)

    def at(
        self,
        x: Tensor,
        q_x: Normal,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | LatentELBOTerms:
        r"""The objective at given draws of the latents; what calling this object does after drawing them.

        :param x: Draws, ``S x B x Q``.
        :param q_x: What they were drawn from, batch shape ``B x Q``.
        """
        terms = self._terms(x, q_x, target, mask, index, **kwargs)
        return terms.bound if self.combine_terms else terms

    def _terms(
        self, x: Tensor, q_x: Normal, target: Tensor, mask: Tensor | None, index: Tensor | None, **kwargs: Any
    ) -> LatentELBOTerms:
        target, observed = as_observed(target, mask, self.model.num_outputs)
        num_samples, num_rows, latent_dim = x.shape
        if target.size(0) != num_rows:
            raise ValueError(f"target has {target.size(0)} rows for {num_rows} latents; pass target=Y[index].")
        if num_rows > self.num_data:
            raise ValueError(f"The batch has {num_rows} rows but num_data={self.num_data}, the size of all the data.")
        # The samples of a row are further points of one GP: K_ZZ is factorised once for all of them.
        call = {}
        if isinstance(getattr(self.model.variational_strategy, "conditional", None), PerPoint):
            rows = torch.arange(num_rows, device=x.device) if index is None else index
            call["index"] = rows.repeat(num_samples)
        q_f = self.model(x.reshape(num_samples * num_rows, latent_dim), **call)
        # The inner objective counts N x S points, so its terms that are divided by them come back S times.
        self._data_elbo.num_data = num_samples * self.num_data
        with settings.observation_nan_policy("ignore" if observed is None else "fill"):
            terms = self._data_elbo(q_f, target.mT.repeat(1, num_samples).to(x.dtype), **kwargs)
        log_likelihood, kl_divergence, log_prior, *rest = terms
        added_loss, conditional = (*rest, torch.zeros_like(log_likelihood), torch.zeros_like(log_likelihood))[:2]
        return LatentELBOTerms(
            log_likelihood=log_likelihood.sum(-1),
            kl_divergence=num_samples * kl_divergence.sum(-1),
            latent_kl=self.beta * self.model.latents.prior.kl_divergence(q_x, x).mean(),
            log_prior=num_samples * log_prior.mean(-1),  # GPyTorch repeats it for each output
            added_loss=added_loss.mean(-1),
            conditional=conditional.sum(-1),
        )

    @torch.no_grad()
    def evaluate(
        self,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        num_samples: int = 16,
        batch_size: int = 1024,
        **kwargs: Any,
    ) -> Tensor:
        r"""The bound per datum of the whole training set, in chunks of rows and without a graph.

        Priors on hyperparameters are left out. The strategy is evaluated in training mode and everything else (dropout
        in an encoder) in eval mode; all are left in the mode they were in.

        :param target: All rows, ``N x P``; NaN marks a missing entry.
        :param mask: True where observed, ``N x P``.
        :param num_samples: Draws of x a row; the value's standard error falls with their square root.
        :param batch_size: Rows a chunk.
        """
        if target.size(0) != self.num_data:
            raise ValueError(f"evaluate needs all {self.num_data} rows of the data; got {target.size(0)}.")
        check_count("num_samples", num_samples)
        target, _ = as_observed(target, mask, self.model.num_outputs)
        total = torch.zeros((), dtype=target.dtype, device=target.device)
        with temporary_mode(self.model, False), temporary_mode(self.model.variational_strategy, True):
            for rows in chunks(self.num_data, batch_size):
                index = torch.arange(rows.start, rows.stop, device=target.device)
                q_x = self.model.latents.q(index)
                x = q_x.sample(torch.Size([num_samples]))
                terms = self._terms(x, q_x, target[rows], None, index, **kwargs)
                total = total + (terms.bound - terms.log_prior) * (index.numel() / self.num_data)
        return total


class _ObservedLikelihood(Likelihood):
    """For GPyTorch's objective: a likelihood whose expectation is zero, with zero gradients, at missing targets."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.likelihood.forward(function_samples, *args, **kwargs)

    def expected_log_prob(self, observations: Tensor, function_dist: MultivariateNormal, **kwargs: Any) -> Tensor:
        return where_observed(self.likelihood.expected_log_prob, observations, function_dist, **kwargs)


def where_observed(function: Any, observations: Tensor, function_dist: MultivariateNormal, **kwargs: Any) -> Tensor:
    """A likelihood's value at the observed targets and zero elsewhere; only valid targets are put in."""
    observed = ~torch.isnan(observations)
    value = function(filled(observations, observed), function_dist, **kwargs)
    return torch.where(observed, value, torch.zeros_like(value))
