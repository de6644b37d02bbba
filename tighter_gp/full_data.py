"""Quantities of the whole training set, gathered in chunks without a graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from ._modes import chunks, temporary_mode
from .blocks import Blocks, block_chunks
from .latent import require_gaussian, tighter_strategy
from .likelihoods.properties import gaussian_noise, observed
from .mlls import TighterELBO
from .strategies._tighter_strategy import _TighterStrategy


@torch.no_grad()
def evaluate_bound(
    model: ApproximateGP | ExactGP,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    batch_size: int = 1024,
    *,
    objective: type[TighterELBO] | type[VariationalELBO] = TighterELBO,
    **kwargs: Any,
) -> Tensor:
    r"""The bound on the log evidence of a whole data set: a sum over the data, not divided by :math:`N`.

    Priors on hyperparameters are left out. The model is left in the mode it was in; its strategies are evaluated in
    training mode and everything else (dropout, batch normalisation) in eval mode.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package, or an
        :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`.
    :param likelihood: The likelihood.
    :param x: All training inputs, ``... x N x D``.
    :param y: All training targets, ``... x N`` (``... x N x T`` for several tasks).
    :param batch_size: Points a chunk; the result does not depend on it.
    :param objective: :class:`TighterELBO`, or :class:`~gpytorch.mlls.VariationalELBO` for the standard bound at the
        same parameters (``conditional="optimal"`` only).
    :param kwargs: Per-point arguments of the likelihood, such as ``noise=``; sliced with the data.
    :return: Shape of the batch of models.

    Example:
        >>> bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> bool(bound < 0)
        True
    """
    if isinstance(model, ExactGP):
        with temporary_mode(model, True), temporary_mode(likelihood, True):
            log_prob = likelihood(model(x), **kwargs).log_prob(y)
            return sum((term.loss() for term in model.added_loss_terms()), start=log_prob)

    num_data = x.size(-2)
    if num_data not in y.shape[-2:]:
        raise ValueError(f"There must be one target for each of the {num_data} rows of x; got {tuple(y.shape)}.")
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in kwargs:
        kwargs["noise"] = likelihood.noise_covar.noise
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not known to be log-concave", UserWarning)  # said when training began
        mll = objective(likelihood, model, num_data, combine_terms=False)
    strategies = [module for module in model.modules() if isinstance(module, _TighterStrategy)]
    conditionals = [strategy.conditional for strategy in strategies]
    needs_index = any(conditional.needs_index for conditional in conditionals)
    labels = next((conditional.labels for conditional in conditionals if isinstance(conditional, Blocks)), None)
    data_terms: Tensor | float = 0.0
    with temporary_mode(model, False), temporary_mode(likelihood, False):
        for strategy in strategies:
            strategy.training = True
        for rows in chunks(num_data, batch_size) if labels is None else block_chunks(labels, batch_size):
            batch = x[..., rows, :]
            call = {"index": torch.arange(num_data, device=x.device)[rows]} if needs_index else {}
            sliced = {name: value[..., rows] for name, value in kwargs.items()}
            terms = mll(model(batch, **call), _slice_targets(y, rows, num_data, model), **sliced)
            log_likelihood, kl_divergence, _, *rest = terms
            added_loss, conditional = (*rest, 0.0, 0.0)[:2]
            data_terms = data_terms + batch.size(-2) * (log_likelihood - conditional - added_loss)
    return data_terms - num_data * kl_divergence


def _slice_targets(y: Tensor, rows: slice | Tensor, num_data: int, model: Any) -> Tensor:
    several_tasks = hasattr(model.variational_strategy, "num_tasks") or y.size(-1) != num_data
    return y[..., rows, :] if several_tasks and y.dim() > 1 and y.size(-2) == num_data else y[..., rows]


@torch.no_grad()
def set_optimal_q(
    model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor, batch_size: int = 1024, **kwargs: Any
) -> None:
    r"""Put q(u) at its closed-form optimum for Gaussian noise and the current hyperparameters.

    The optimum is the same for SVGP and for the tighter family. A mean-field or delta q(u) gets the optimum of its
    form. Sums over the data are gathered in float64, in :math:`O(NM^2)`.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package.
    :param likelihood: A Gaussian likelihood.
    :param x: All training inputs, ``... x N x D``.
    :param y: All training targets, ``... x N``.
    :param batch_size: Points a chunk.
    :param kwargs: ``noise=`` for :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.

    Example:
        >>> start = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
        >>> bool(tighter_gp.evaluate_bound(model, likelihood, train_x, train_y) > start)
        True
    """
    require_gaussian(likelihood, "set_optimal_q")
    strategy = tighter_strategy(model)
    if y.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"Targets must have shape ... x {x.size(-2)}, one for each row of x; got {tuple(y.shape)}.")
    mask = observed(likelihood, y, y.shape[-1:])
    if mask is None and not bool(torch.isfinite(y).all()):
        count = int((~torch.isfinite(y)).sum())
        raise ValueError(f"{count} of {y.numel()} targets are NaN or infinite; drop them, or mark NaN as missing.")
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **kwargs).expand_as(y)
    precision = noise.double().reciprocal()
    if mask is not None:
        precision, y = precision * mask, torch.where(mask, y, torch.zeros_like(y))
    gram: Tensor | float = 0.0
    linear: Tensor | float = 0.0
    with temporary_mode(model, False):
        for rows in chunks(x.size(-2), batch_size):
            mean, projection, _ = strategy.projected(x[..., rows, :])
            weighted = projection.double() * precision[..., rows].unsqueeze(-2)
            gram = gram + weighted @ projection.double().mT
            linear = linear + (weighted @ (y[..., rows] - mean).double().unsqueeze(-1)).squeeze(-1)
    strategy.set_optimal(gram, linear)
