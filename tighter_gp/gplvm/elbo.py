"""The objective of the Bayesian GPLVM."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal

from ..data import Rows, chunks, reference
from ..draws import temporary_mode
from ..likelihoods.expectations import expected_log_prob
from ..likelihoods.family import filled
from ..mlls import TighterELBO
from ..mlls.priors import log_prior
from ..strategies import TighterStrategy
from .data import as_observed


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
        super().__init__(likelihood, model, num_data, beta, combine_terms)
        is_ours = isinstance(model.variational_strategy, TighterStrategy)
        self.is_tighter = issubclass(objective or (TighterELBO if is_ours else VariationalELBO), TighterELBO)
        kind = TighterELBO if self.is_tighter else _StandardELBO
        # Not as a submodule: model and likelihood are this one's already.
        self.__dict__["elbo"] = kind(likelihood, model, num_data, beta, combine_terms=False)

    def _log_likelihood_term(self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        return self.elbo._log_likelihood_term(approximate_dist_f, target, **kwargs)

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
        :param num_samples: Draws of x per row.
        :param kwargs: Passed to the likelihood.
        :return: The bound per datum, or :class:`LatentELBOTerms`.
        """
        if self.num_data != self.model.latents.num_data:
            raise ValueError(
                f"num_data={self.num_data}, but the model has latents for {self.model.latents.num_data} rows: train and "
                "evaluate it on all rows that it was made for. Latents of other rows are found by infer_latents."
            )
        q_x = self.model.latents.q(index)
        terms = self.at(q_x.rsample(torch.Size([num_samples])), q_x, target, mask=mask, index=index, **kwargs)
        return terms.bound if self.combine_terms else terms

    def at(
        self,
        x: Tensor,
        q_x: Normal,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
        q_f: MultivariateNormal | None = None,
        **kwargs: Any,
    ) -> LatentELBOTerms:
        r"""The parts of the objective at given draws of the latents.

        :param x: Draws, ``S x B x Q``.
        :param q_x: What they were drawn from, batch shape ``B x Q``.
        :param q_f: What :meth:`q_f` returned for them, if it is known.
        """
        target, observed = as_observed(target, mask, self.model.num_outputs)
        num_samples, num_rows, _ = x.shape
        if target.size(0) != num_rows:
            raise ValueError(f"target has {target.size(0)} rows for {num_rows} latents; pass target=Y[index].")
        q_f = self.q_f(x, index) if q_f is None else q_f
        self.elbo.num_data = self.num_data * num_samples
        with settings.observation_nan_policy("ignore" if observed is None else "fill"):
            terms = self.elbo(q_f, target.mT.repeat(1, num_samples).to(x.dtype), **kwargs)  # one value per output
        log_likelihood, kl_divergence, _, *rest = terms
        added_loss, conditional = (*rest, 0.0, 0.0)[:2]
        zero = torch.zeros_like(log_likelihood)
        return LatentELBOTerms(
            log_likelihood=log_likelihood.sum(-1),
            kl_divergence=(zero + kl_divergence).sum(-1) * num_samples,
            latent_kl=self.beta * self.model.latents.prior.kl_divergence(q_x, x).mean(),
            log_prior=zero.sum(-1) + log_prior(self) / self.num_data,
            added_loss=(zero + added_loss).mean(-1),
            conditional=(zero + conditional).sum(-1),
        )

    def q_f(self, x: Tensor, index: Tensor | None, **options: Any) -> MultivariateNormal:
        """q(f) at draws of the latents, ``S x B x Q``: the samples of a row are further points of one GP.

        :param index: The rows of the data, ``B``; None for all.
        :param options: Passed to the strategy.
        """
        num_samples, num_rows, _ = x.shape
        if getattr(getattr(self.model.variational_strategy, "conditional", None), "needs_index", False):
            rows = torch.arange(num_rows, device=x.device) if index is None else index
            options["index"] = rows.repeat(num_samples)
        return self.model(x.flatten(0, 1), **options)

    @torch.no_grad()
    def evaluate(
        self,
        target: Tensor | np.ndarray,
        *,
        mask: Tensor | np.ndarray | None = None,
        num_samples: int = 16,
        batch_size: int = 1024,
        **kwargs: Any,
    ) -> Tensor:
        r"""The bound per datum of the whole training set, in chunks of rows and without a graph.

        Priors on hyperparameters are left out. The strategy is evaluated in training mode and everything else (dropout
        in an encoder) in eval mode; all are left in the mode they were in.

        :param target: All rows, ``N x P``, a tensor or an array, perhaps memory-mapped; NaN marks a missing entry.
        :param mask: True where observed, ``N x P``.
        :param num_samples: Draws of x per row; the value's standard error falls with their square root.
        :param batch_size: Rows per chunk.
        """
        if len(target) != self.num_data:
            raise ValueError(f"evaluate needs all {self.num_data} rows of the data; got {len(target)}.")
        like = reference(self.model)
        rows_of_y = Rows(target, like, dim=0, name="target")
        rows_of_mask = None if mask is None else Rows(mask, like, dim=0, name="mask")
        total = like.new_zeros(())
        with temporary_mode(self.model, False), temporary_mode(self.model.variational_strategy, True):
            for rows in chunks(self.num_data, batch_size):
                index = torch.arange(rows.start, rows.stop, device=like.device)
                q_x = self.model.latents.q(index)
                x = q_x.sample(torch.Size([num_samples]))
                seen = None if rows_of_mask is None else rows_of_mask[rows]
                terms = self.at(x, q_x, rows_of_y[rows], mask=seen, index=index, **kwargs)
                total = total + (terms.bound - terms.log_prior) * (index.numel() / self.num_data)
        return total


class _StandardELBO(VariationalELBO):
    """The standard bound, in which missing targets of any likelihood are left out."""

    def _log_likelihood_term(self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any) -> Tensor:
        observed = ~torch.isnan(target)
        log_prob = expected_log_prob(self.likelihood, filled(target, observed), variational_dist_f, **kwargs)
        return torch.where(observed, log_prob, 0.0).sum(-1)
