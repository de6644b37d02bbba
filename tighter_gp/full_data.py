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
from torch import Tensor

from .blocks import block_chunks
from .checks import check_dims
from .collapsed import CollapsedGP
from .collapsed.prices import earlier_neighbours, price, rows_within
from .conditionals import Blocks
from .data import Rows, as_tensor, check_kind, input_rows, reference
from .kernels import TighterInducingPointKernel
from .likelihoods.family import gaussian_noise, observed
from .likelihoods.targets import check_arguments, check_objective, check_targets
from .maths.collapsed import collapsed_log_prob
from .maths.linalg import full_precision
from .mlls import TighterELBO
from .modes import chunks, temporary_mode
from .neighbours import NeighbourGP
from .posterior import copied, exact_gp_prior, gathered, require_gaussian, tighter_copy, tighter_strategy
from .prior import Prior
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
        raise TypeError(
            "Predictions with neighbours have no bound on the evidence; the model that they were made from has."
        )
    if x is None:
        return _latent_bound(model, likelihood, y, batch_size, objective, **kwargs)
    dtype = reference(model, likelihood).dtype
    model, likelihood = in_float64(model, likelihood)
    like = reference(model, likelihood)
    rows_of_x = input_rows(x, like)
    num_data, kwargs = len(rows_of_x), per_point(kwargs, likelihood, len(rows_of_x), like)
    if isinstance(model, (ExactGP, CollapsedGP)):
        y, noise = as_tensor(y, like), {name: value[:] for name, value in kwargs.items()}
        _check_targets(y, num_data)
        if isinstance(model, CollapsedGP) or any(isinstance(m, TighterInducingPointKernel) for m in model.modules()):
            return _collapsed_bound(model, likelihood, rows_of_x, y, batch_size, **noise).to(dtype)
        # GPyTorch's own SGPR, and an exact GP, whose bound is the evidence.
        with temporary_mode(model, True), temporary_mode(likelihood, True):
            log_prob = likelihood(model(rows_of_x[:]), **noise).log_prob(y)
            return sum((term.loss() for term in model.added_loss_terms()), start=log_prob).to(dtype)
    strategies = [module for module in model.modules() if isinstance(module, TighterStrategy)]
    objective = objective or (TighterELBO if strategies else VariationalELBO)
    if num_data not in y.shape[-2:]:
        raise ValueError(f"There must be one target for each of the {num_data} rows of x; got {tuple(y.shape)}.")
    rows_of_y = Rows(y, like, dim=_point_dim(y.shape, num_data, model), name="y")
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in kwargs:
        kwargs["noise"] = Rows(likelihood.noise_covar.noise, like, name="noise")
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
            batch, targets = rows_of_x[rows], rows_of_y[rows]
            check_targets(likelihood, targets)
            call = {"index": torch.arange(num_data, device=like.device)[rows]} if needs_index else {}
            q = model(batch, **call)
            terms = mll(q, targets, **{name: value[rows] for name, value in kwargs.items()})
            log_likelihood, kl_divergence, _, *rest = terms
            check_objective(log_likelihood, q, targets)
            added_loss, conditional = (*rest, 0.0, 0.0)[:2]
            data_terms = data_terms + batch.size(-2) * (log_likelihood - conditional - added_loss)
    return (data_terms - num_data * kl_divergence).to(dtype)


def in_float64(model: Any, likelihood: Any) -> tuple[Any, Any]:
    """Copies of a model and its likelihood in float64, for values that are reported; the jitter stays that of their own."""
    if reference(model, likelihood).dtype == torch.float64:
        return model, likelihood
    model, likelihood = copied(model, likelihood)
    for part in model.modules():
        if isinstance(part, TighterStrategy):
            part.jitter_val = part.jitter_val
    return model.double(), likelihood.double()


def _check_targets(y: Tensor, num_data: int) -> None:
    """Raise unless there is one target per point."""
    if y.shape[-1:] != (num_data,):
        raise ValueError(f"Targets must have shape ... x {num_data}, one for each row of x; got {tuple(y.shape)}.")


def _point_dim(shape: tuple[int, ...], num_data: int, model: Any) -> int:
    """The dimension of targets that counts the points, from the end."""
    several_tasks = hasattr(getattr(model, "variational_strategy", None), "num_tasks") or shape[-1] != num_data
    return -2 if several_tasks and len(shape) > 1 and shape[-2] == num_data else -1


def per_point(kwargs: dict[str, Any], likelihood: Any, num_data: int, like: Tensor) -> dict[str, Rows]:
    """Per-point arguments of a likelihood, or a clear error."""
    check_arguments(likelihood, kwargs)
    for name, value in kwargs.items():
        check_kind(name, value)
        if tuple(value.shape[-1:]) != (num_data,):
            raise ValueError(f"{name}= must have one value per point, ... x {num_data}; got {tuple(value.shape)}.")
    return {name: Rows(value, like, name=name) for name, value in kwargs.items()}


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
    if type(getattr(model, "variational_strategy", None)) is VariationalStrategy:  # GPyTorch's own
        ours, standard = tighter_copy(model), model.variational_strategy
        set_optimal_q(ours, likelihood, x, y, batch_size, **kwargs)
        standard._variational_distribution.load_state_dict(
            ours.variational_strategy._variational_distribution.state_dict()
        )
        standard.variational_params_initialized.fill_(1)
        return
    strategy = tighter_strategy(model)
    like = reference(model, likelihood)
    rows_of_x, y = input_rows(x, like), as_tensor(y, like)
    check_dims(rows_of_x.shape, strategy.inducing_points.size(-1))
    _check_targets(y, len(rows_of_x))
    given = per_point(kwargs, likelihood, len(rows_of_x), like)
    variances = {name: value[:] for name, value in given.items()}
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **variances).expand_as(y)
    with temporary_mode(model, False), full_precision(like.device.type):
        _, sums = gathered(strategy.prior(), rows_of_x, y, noise, likelihood, batch_size)
    strategy.set_optimal(sums.gram, sums.linear)


def _collapsed_bound(
    model: ExactGP | CollapsedGP, likelihood: Likelihood, x: Rows, y: Tensor, batch_size: int, **kwargs: Any
) -> Tensor:
    """The bound of a collapsed model at any data, missing targets left out."""
    require_gaussian(likelihood, "A collapsed bound")
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **kwargs).expand_as(y)
    neighbours: tuple[int, ...] = ()
    with temporary_mode(model, False), full_precision(y.device.type):
        if isinstance(model, CollapsedGP):
            name, blocks, prior = model.bound_name, None, model.prior(torch.float64)
            neighbours = model.num_neighbours, model.seed
        else:
            prior = exact_gp_prior(model, torch.float64)
            name, blocks = model.covar_module.bound, model.covar_module.blocks
        prior, sums = gathered(prior, x, y, noise, likelihood, batch_size)
        mask = observed(likelihood, y, y.shape[-1:])
        seen = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.expand_as(y)
        noise = noise.double()
        core, misfit = sums.collapse(), torch.zeros_like(noise[..., 0])
        for rows in chunks(len(x), batch_size):
            points = prior(x[rows])
            left = y[..., rows] - points.mean - (points.matrix.mT @ core.weights.unsqueeze(-1)).squeeze(-1)
            misfit = misfit + torch.where(seen[..., rows], left.square() / noise[..., rows], 0.0).sum(-1)
        log_noise = torch.where(seen, noise.log(), 0.0).sum(-1)
        cost = _price(prior, name, blocks, x, sums.residual, noise, seen, *neighbours)
    quadratic = misfit + core.weights.square().sum(-1)
    # A batch of models may miss different targets.
    constant = collapsed_log_prob(quadratic, core.log_det, log_noise, seen.sum(-1).to(noise.dtype))
    return (constant - cost).to(y.dtype)


def _price(
    prior: Prior,
    name: str,
    blocks: Blocks | None,
    x: Rows,
    residual: Tensor,
    noise: Tensor,
    seen: Tensor,
    *neighbours: int,
) -> Tensor:
    """The price of the residual at the targets that there are."""
    if seen.dim() > 1 and not bool(seen.all()):
        raise NotImplementedError("Missing targets of a batch of collapsed models: evaluate one model at a time.")
    if bool(seen.all()):
        rows = torch.arange(len(x), device=seen.device)
    else:
        rows = seen.nonzero().squeeze(-1)
        blocks = None if blocks is None else Blocks(blocks.labels[rows])

    inputs = x[rows]
    if name == "neighbours":
        sets = earlier_neighbours(prior, inputs, noise[rows], *neighbours)
        return price(name, residual[rows], noise[rows], rows_within(prior, inputs), sets=sets)

    def within(sets: Tensor) -> Tensor:
        return prior.residual_within(prior(inputs), inputs, sets)

    return price(name, residual[..., rows], noise[..., rows], within, blocks)
