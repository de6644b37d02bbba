"""Quantities of the whole training set, gathered in chunks without a graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from .checks import check_device, check_inputs
from .collapsed import CollapsedGP
from .conditionals import Blocks
from .conditionals.blocks import block_chunks
from .kernels import TighterInducingPointKernel
from .likelihoods.properties import gaussian_noise, observed
from .maths.bounds import PENALTIES, block_penalty, full_penalty
from .maths.collapsed import collapsed_log_prob
from .maths.linalg import full_precision
from .mlls import TighterELBO
from .modes import chunks, temporary_mode
from .posterior import exact_gp_projector, gathered, require_gaussian, tighter_strategy
from .prior import Projector
from .strategies import TighterStrategy


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
    :param batch_size: Points per chunk; the result does not depend on it.
    :param objective: :class:`TighterELBO`, or :class:`~gpytorch.mlls.VariationalELBO` for the standard bound at the
        same parameters (``conditional="optimal"`` only).
    :param kwargs: Per-point arguments of the likelihood, such as ``noise=``; sliced with the data.
    :return: Shape of the batch of models.

    Example:
        >>> bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> bool(bound < 0)
        True
    """
    if isinstance(model, ExactGP) and not any(isinstance(m, TighterInducingPointKernel) for m in model.modules()):
        # GPyTorch's own SGPR, and an exact GP, whose bound is the evidence.
        with temporary_mode(model, True), temporary_mode(likelihood, True):
            log_prob = likelihood(model(x), **kwargs).log_prob(y)
            return sum((term.loss() for term in model.added_loss_terms()), start=log_prob)
    if isinstance(model, (ExactGP, CollapsedGP)):
        return _collapsed_bound(model, likelihood, x, y, batch_size, **kwargs)
    num_data = x.size(-2)
    if num_data not in y.shape[-2:]:
        raise ValueError(f"There must be one target for each of the {num_data} rows of x; got {tuple(y.shape)}.")
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in kwargs:
        kwargs["noise"] = likelihood.noise_covar.noise
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not known to be log-concave", UserWarning)  # said when training began
        mll = objective(likelihood, model, num_data, combine_terms=False)
    strategies = [module for module in model.modules() if isinstance(module, TighterStrategy)]
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
    :param batch_size: Points per chunk.
    :param kwargs: ``noise=`` for :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.

    Example:
        >>> start = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
        >>> bool(tighter_gp.evaluate_bound(model, likelihood, train_x, train_y) > start)
        True
    """
    require_gaussian(likelihood, "set_optimal_q")
    strategy = tighter_strategy(model)
    check_inputs(x, strategy.inducing_points.size(-1))
    if y.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"Targets must have shape ... x {x.size(-2)}, one for each row of x; got {tuple(y.shape)}.")
    _check_devices(strategy.inducing_points, x, y, likelihood)
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **kwargs).expand_as(y)
    with temporary_mode(model, False), full_precision(x.device.type):
        sums = gathered(strategy.projector(), x, y, noise, likelihood, batch_size)
    strategy.set_optimal(sums.gram, sums.linear)


def _check_devices(like: Tensor, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
    check_device(x, like.device, "Inputs are")
    check_device(y, like.device, "Targets are")
    check_device(likelihood, like.device, "The likelihood is")


def _collapsed_bound(
    model: ExactGP | CollapsedGP, likelihood: Likelihood, x: Tensor, y: Tensor, batch_size: int, **kwargs: Any
) -> Tensor:
    """The bound of a collapsed model at any data, missing targets left out."""
    require_gaussian(likelihood, "A collapsed bound")
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    _check_devices(next(model.parameters()), x, y, likelihood)
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **kwargs).expand_as(y)
    with temporary_mode(model, False), full_precision(x.device.type):
        if isinstance(model, CollapsedGP):
            name, labels, projector = model.bound_name, None, model.projector(torch.float64)
        else:
            name, labels = model.covar_module.bound, getattr(model.covar_module.blocks, "labels", None)
            projector = exact_gp_projector(model, torch.float64)
        sums = gathered(projector, x, y, noise, likelihood, batch_size)
        mask = observed(likelihood, y, y.shape[-1:])
        seen = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.expand_as(y)
        noise = noise.double()
        core, misfit = sums.collapse(), torch.zeros_like(noise[..., 0])
        for rows in chunks(x.size(-2), batch_size):
            points = projector(x[..., rows, :])
            left = y[..., rows] - points.mean - (points.matrix.mT @ core.weights.unsqueeze(-1)).squeeze(-1)
            misfit = misfit + torch.where(seen[..., rows], left.square() / noise[..., rows], 0.0).sum(-1)
        log_noise = torch.where(seen, noise.log(), 0.0).sum(-1)
        price = _price(projector, name, labels, x, sums.residual, noise, seen)
    quadratic = misfit + core.weights.square().sum(-1)
    # A batch of models may miss different targets.
    constant = collapsed_log_prob(quadratic, core.log_det, log_noise, seen.sum(-1).to(noise.dtype))
    return (constant - price).to(y.dtype)


def _price(
    projector: Projector, name: str, labels: Tensor | None, x: Tensor, residual: Tensor, noise: Tensor, seen: Tensor
) -> Tensor:
    if name in PENALTIES and bool(seen.all()):
        return PENALTIES[name](residual, noise)
    if seen.dim() > 1 and not bool(seen.all()):
        raise NotImplementedError("Missing targets of a batch of collapsed models: evaluate one model at a time.")
    rows = seen.nonzero().squeeze(-1) if seen.dim() == 1 else torch.arange(x.size(-2), device=x.device)
    x, residual, noise = x[..., rows, :], residual[..., rows], noise[..., rows]
    if name in PENALTIES:
        return PENALTIES[name](residual, noise)
    matrix = projector(x).matrix
    covariance = projector.residual_covariance(x, x, matrix, matrix)
    if name == "full":
        return full_penalty(covariance, noise)
    assert labels is not None
    blocks = Blocks(labels[rows]).residual_blocks(
        residual, lambda sets: covariance[..., sets.unsqueeze(-1), sets.unsqueeze(-2)]
    )
    return block_penalty(blocks.covariance, noise[..., blocks.rows.clamp_min(0)])
