"""Quantities of the whole training set, gathered in chunks without a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.variational import VariationalStrategy
from gpytorch.variational._variational_strategy import _VariationalStrategy
from torch import Tensor

from .blocks import block_chunks
from .collapsed import CollapsedGP, TighterInducingPointKernel
from .collapsed.core import chunked_bound
from .collapsed.prices import earlier_neighbours
from .conditionals import Blocks
from .data import Rows, as_tensor, check_kind, input_rows, reference
from .likelihoods.targets import check_arguments, check_objective, check_targets
from .maths.linalg import full_precision
from .mlls import TighterELBO
from .modes import chunks, temporary_mode
from .neighbours import NeighbourGP
from .posterior import (
    copied,
    exact_gp_prior,
    gathered,
    noise_of,
    require_gaussian,
    tighter_copy,
    tighter_strategy,
    with_target,
)
from .strategies import TighterStrategy, gp_of


@torch.no_grad()
def evaluate_bound(
    model: ApproximateGP | ExactGP,
    likelihood: Likelihood,
    x: Tensor | np.ndarray | None,
    y: Tensor | np.ndarray,
    batch_size: int = 1024,
    *,
    objective: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    r"""The bound on the log evidence of a whole data set: a sum over the data, not divided by :math:`N`.

    Priors on hyperparameters are left out. The model is left in the mode it was in; its strategies are evaluated in
    training mode and everything else (dropout, batch normalisation) in eval mode.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package, or an
        :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`.
    :param likelihood: The likelihood.
    :param x: All training inputs, ``... x N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only
        a chunk is in memory at a time. None for a latent-variable model, whose inputs are its own; its bound is an
        estimate, with draws from torch's global random state.
    :param y: All training targets, ``... x N`` (``... x N x T`` for several tasks); a tensor or an array.
    :param batch_size: Points per chunk; the result does not depend on it.
    :param objective: Default :class:`TighterELBO`, and for a model on a strategy of GPyTorch's own
        :class:`~gpytorch.mlls.VariationalELBO`, which gives the standard bound of any model with ``conditional="optimal"``.
    :param kwargs: Per-point arguments of the likelihood, such as ``noise=``; sliced with the data. For a latent-variable
        model also ``num_samples=`` and ``mask=``.
    :return: Shape of the batch of models; of a deep GP one value per sample.
    :raises TypeError: For an argument that nobody uses.

    Example:
        >>> bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> bool(bound < 0)
        True
    """
    if isinstance(model, NeighbourGP):
        raise TypeError("Predictions with neighbours have no bound on the evidence; the model they were made from has.")
    if getattr(model, "input_transform", None) is not None or getattr(model, "outcome_transform", None) is not None:
        raise TypeError(
            "This model of BoTorch transforms its data: pass its inner one, model.model, and transformed data."
        )
    if x is None:
        return _latent_bound(model, likelihood, y, batch_size, objective, **kwargs)
    dtype = reference(model, likelihood).dtype
    model, likelihood = in_float64(model, likelihood)
    rows_of_x = input_rows(x, reference(model, likelihood))
    given = per_point(kwargs, likelihood, rows_of_x)
    if not isinstance(model, (ExactGP, CollapsedGP)):
        return _uncollapsed_bound(model, likelihood, rows_of_x, y, batch_size, objective, given).to(dtype)
    y, noise = targets_and_noise(likelihood, rows_of_x, y, given)
    is_ours = any(isinstance(part, (TighterInducingPointKernel, CollapsedGP)) for part in model.modules())
    if is_ours:
        return _collapsed_bound(model, likelihood, rows_of_x, y, noise, batch_size).to(dtype)
    with temporary_mode(model, True), temporary_mode(likelihood, True):  # an exact GP, or GPyTorch's own SGPR
        q = likelihood(model(rows_of_x[:]), **{name: value[:] for name, value in given.items()})
        return sum((term.loss() for term in model.added_loss_terms()), start=q.log_prob(y)).to(dtype)


def _uncollapsed_bound(
    model: Any, likelihood: Any, x: Rows, y: Any, batch_size: int, objective: Any, kwargs: dict[str, Rows]
) -> Tensor:
    """Data terms chunk by chunk, less one KL divergence."""
    num_data = len(x)
    if num_data not in y.shape[-2:]:
        raise ValueError(f"There must be one target for each of the {num_data} rows of x; got {tuple(y.shape)}.")
    y = Rows(y, x.like, dim=_point_dim(y.shape, num_data, model), name="y")
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in kwargs:
        kwargs = {**kwargs, "noise": Rows(likelihood.noise_covar.noise, x.like, name="noise")}
    strategies = [module for module in model.modules() if isinstance(module, TighterStrategy)]
    objective = objective or (TighterELBO if strategies else VariationalELBO)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not known to be log-concave", UserWarning)  # said when training began
        mll = objective(likelihood, gp_of(model), num_data, combine_terms=False)
    conditionals = [strategy.conditional for strategy in strategies]
    needs_index = any(conditional.needs_index for conditional in conditionals)
    labels = next((conditional.labels for conditional in conditionals if isinstance(conditional, Blocks)), None)
    data_terms: Tensor | float = 0.0
    with temporary_mode(model, False), temporary_mode(likelihood, False):
        for strategy in strategies:
            strategy.training = True
        for rows in chunks(num_data, batch_size) if labels is None else block_chunks(labels, batch_size):
            batch, targets = x[rows], y[rows]
            check_targets(likelihood, targets)
            call = {"index": torch.arange(num_data, device=x.like.device)[rows]} if needs_index else {}
            q = model(batch, **call)
            terms = mll(q, targets, **{name: value[rows] for name, value in kwargs.items()})
            log_likelihood, kl_divergence, _, *rest = terms
            check_objective(log_likelihood, q, targets)
            added_loss, conditional = (*rest, 0.0, 0.0)[:2]  # both per datum, as the expectation
            data_terms = data_terms + batch.size(-2) * (log_likelihood - conditional - added_loss)
    return data_terms - num_data * kl_divergence


def _collapsed_bound(
    model: ExactGP | CollapsedGP, likelihood: Likelihood, x: Rows, y: Tensor, noise: Tensor, batch_size: int
) -> Tensor:
    """The bound of a collapsed model at any data, missing targets left out."""
    seen = with_target(likelihood, y)  # [..., N]
    if y.dim() > 1 and not bool(seen.all()):
        raise NotImplementedError("Missing targets of a batch of collapsed models: evaluate one model at a time.")
    rows = seen.reshape(-1, len(x))[0].nonzero().squeeze(-1)  # positions of rows with a target
    at = lambda part: x[rows[part]]
    y, noise, sets = y[..., rows], noise[..., rows], None
    with temporary_mode(model, False), full_precision(y.device.type):
        if isinstance(model, CollapsedGP):
            prior, bound = model.prior(torch.float64), model.bound_name
            if bound == "neighbours":
                sets = earlier_neighbours(prior, at(slice(None)), noise, model.num_neighbours, model.seed)
        else:
            prior, bound = exact_gp_prior(model, torch.float64), model.covar_module.bound
            sets = model.covar_module.sets_of(len(x), rows)
        return chunked_bound(prior, at, y, noise, bound, batch_size, sets=sets)


def _latent_bound(model: Any, likelihood: Any, y: Any, batch_size: int, objective: Any, **kwargs: Any) -> Tensor:
    """The bound of a model that has its inputs itself."""
    if not hasattr(model, "objective"):
        raise TypeError(f"{type(model).__name__} needs inputs; x=None is for a latent-variable model.")
    check_arguments(likelihood, kwargs.keys() - {"mask", "num_samples"})
    if objective is None or issubclass(objective, (TighterELBO, VariationalELBO)):
        chosen = None if objective is TighterELBO else objective
        mll = model.objective(len(y), likelihood=likelihood, objective=chosen)
    else:
        mll = objective(likelihood, model, len(y))
    return len(y) * mll.evaluate(y, batch_size=batch_size, **kwargs)


def in_float64(model: Any, likelihood: Any) -> tuple[Any, Any]:
    """Copies of a model and its likelihood in float64, for values that are reported; the jitter stays that of their own."""
    if reference(model, likelihood).dtype == torch.float64:
        return model, likelihood
    model, likelihood = copied(model, likelihood)
    for part in model.modules():
        if isinstance(part, _VariationalStrategy) and hasattr(part, "_jitter_val"):
            part.jitter_val = part.jitter_val
    return model.double(), likelihood.double()


def targets_and_noise(likelihood: Any, x: Rows, y: Any, given: dict[str, Rows]) -> tuple[Tensor, Tensor]:
    """All targets and their noise variances, ``... x N``, or a clear error."""
    require_gaussian(likelihood, "A collapsed bound")
    y = as_tensor(y, x.like)
    if y.shape[-1:] != (len(x),):
        raise ValueError(f"Targets must have shape ... x {len(x)}, one for each row of x; got {tuple(y.shape)}.")
    return y, noise_of(likelihood, y, **{name: value[:] for name, value in given.items()})


def _point_dim(shape: tuple[int, ...], num_data: int, model: Any) -> int:
    """The dimension of targets that counts the points, from the end."""
    several_tasks = hasattr(getattr(model, "variational_strategy", None), "num_tasks") or shape[-1] != num_data
    return -2 if several_tasks and len(shape) > 1 and shape[-2] == num_data else -1


def per_point(kwargs: dict[str, Any], likelihood: Any, x: Rows) -> dict[str, Rows]:
    """Per-point arguments of a likelihood, or a clear error."""
    check_arguments(likelihood, kwargs)
    for name, value in kwargs.items():
        check_kind(name, value)
        if tuple(value.shape[-1:]) != (len(x),):
            raise ValueError(f"{name}= must have one value per point, ... x {len(x)}; got {tuple(value.shape)}.")
    return {name: Rows(value, x.like, name=name) for name, value in kwargs.items()}


@torch.no_grad()
def set_optimal_q(
    model: ApproximateGP,
    likelihood: Likelihood,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    batch_size: int = 1024,
    **kwargs: Any,
) -> None:
    r"""Put q(u) at its closed-form optimum for Gaussian noise and the current hyperparameters.

    The optimum is the same for SVGP and for the tighter family. A mean-field or delta q(u) gets the optimum of its
    form. Sums over the data are gathered in float64, in :math:`O(NM^2)`.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package, or on GPyTorch's own
        :class:`~gpytorch.variational.VariationalStrategy`.
    :param likelihood: A Gaussian likelihood.
    :param x: All training inputs, ``... x N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only
        a chunk is in memory at a time.
    :param y: All training targets, ``... x N``; a tensor or an array.
    :param batch_size: Points per chunk.
    :param kwargs: ``noise=`` for :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.

    Example:
        >>> start = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
        >>> bool(tighter_gp.evaluate_bound(model, likelihood, train_x, train_y) > start)
        True
    """
    require_gaussian(likelihood, "set_optimal_q")
    standard: Any = getattr(model, "variational_strategy", None)
    if type(standard) is VariationalStrategy:  # GPyTorch's own
        ours = tighter_copy(model)
        set_optimal_q(ours, likelihood, x, y, batch_size, **kwargs)
        q = ours.variational_strategy._variational_distribution
        standard._variational_distribution.load_state_dict(q.state_dict())
        standard.variational_params_initialized.fill_(1)
        return
    strategy, like = tighter_strategy(model), reference(model, likelihood)
    rows_of_x = input_rows(x, like)
    y, noise = targets_and_noise(likelihood, rows_of_x, y, per_point(kwargs, likelihood, rows_of_x))
    with temporary_mode(model, False), full_precision(like.device.type):
        _, sums = gathered(strategy.prior(), rows_of_x, y, noise, likelihood, batch_size)
    strategy.set_optimal(sums.gram, sums.linear)
