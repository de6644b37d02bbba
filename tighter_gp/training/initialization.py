"""A start from the data: inducing points, hyperparameters and q(u), for any model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean
from gpytorch.models.deep_gps import DeepGP
from torch import Tensor

from ..checks import describe_hyperparameters
from ..collapsed import CollapsedGP, TighterInducingPointKernel
from ..conditionals import BetaConditional
from ..data import Rows, first_parameter, input_rows, num_rows, row_dim
from ..draws import seeded
from ..inducing import kmeans, start_lengthscales
from ..likelihoods.expectations import expected_slopes
from ..likelihoods.family import family, gaussian_noise, observed
from ..likelihoods.targets import check_targets
from ..maths.linalg import full_precision
from ..modes import temporary_mode
from ..posterior import gathered, has_own_call
from ..strategies import TighterStrategy
from . import distributed
from .batches import Batch
from .lbfgs import FAILURES, State, iterate
from .problem import Problem, inner_gp, origins_of
from .validation import check_finite

log = logging.getLogger("tighter_gp")

# Rows for k-means, and for the optimal q(u).
_MOST_ROWS = 32768

# Lengthscales are tried at these multiples of the start, with so many iterations and inducing points. A multiple must be
# better by so many nats per row: on few rows the wide ones are, where inputs without a say are many.
_FACTORS, _TRIAL, _MOST_CENTRES, _MARGIN = (0.5, 2.0, 0.25), 4, 256, 0.02


def initialize(
    model: Any,
    likelihood: Likelihood,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    num_rows_used: int = 2000,
    iterations: int = 5,
    seed: int = 0,
) -> None:
    r"""Set a model to a start that comes from the data.

    =====================  ==========================================================================================
    inducing points        centres of k-means of at most 32,768 rows; for SOLVE-GP half of them orthogonal points
    lengthscales           the spread of the inducing points times :math:`\sqrt D`, but at no tiny value, or a multiple of that
                           or what they were, by the collapsed bound of some rows, if the noise is Gaussian; otherwise the
                           spread, where they are still GPyTorch's default
    scale, mean, noise     L-BFGS on the collapsed tighter bound of some rows, if the noise is Gaussian
    q(u)                   its optimum for these, from at most 32,768 rows, if the noise is Gaussian
    =====================  ==========================================================================================

    The log says at level ``INFO`` what was set. All but the inducing points needs a model whose ``forward`` returns its
    ``mean_module`` and ``covar_module`` at the inputs. Lengthscales are tried as wholes: those that are best for few rows and
    few inducing points are a bad place to start from, in experiments.

    What does not apply is left as it is: with several outputs, batches of models and other likelihoods scale, mean, noise and
    q(u); with feature extractors all but the inducing points, and with a ``__call__`` of the model's own, which may change the
    inputs, everything.
    A parameter that does not require a gradient is not changed. Rows whose target is missing, NaN where the likelihood or
    ``gpytorch.settings.observation_nan_policy`` allows it, count for the inducing points alone.

    :param model: A model that :func:`~tighter_gp.fit` takes.
    :param likelihood: Its likelihood.
    :param x: Training inputs, ``N x D``; tensor, array or memory map.
    :param y: Training targets, ``N``, ``N x T`` or ``... x N``.
    :param num_rows_used: Rows for the hyperparameters, drawn at random.
    :param iterations: Iterations of L-BFGS for them.
    :param seed: Seed of the draws.

    Example:
        >>> start = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
        >>> tighter_gp.initialize(model, likelihood, train_x, train_y)
        >>> bool(tighter_gp.evaluate_bound(model, likelihood, train_x, train_y) > start)
        True
    """
    like = first_parameter(model, likelihood)
    x, y = (value.detach() if isinstance(value, Tensor) else value for value in (x, y))
    with seeded(seed, like.device):
        _from_data(model, likelihood, x, y, like, num_rows_used, iterations, seed)


def _from_data(
    model: Any, likelihood: Any, x: Any, y: Any, like: Tensor, num_rows_used: int, iterations: int, seed: int
) -> None:
    dim = row_dim(y.shape, num_rows(x), is_batch=x.ndim > 2)
    if dim is None:
        raise ValueError(f"There must be one target for each of the {num_rows(x)} rows of x; got {tuple(y.shape)}.")
    inputs, targets = Rows(x, like, is_input=True), Rows(y, like, dim=dim, name="y")
    rows = _draw(len(inputs), _MOST_ROWS, seed)
    some, given = inputs[rows], targets[rows]
    check_finite("x", some)
    check_targets(likelihood, given, "values of y")
    model, some = inner_gp(model), _features(model, some)
    holders = [m for m in model.modules() if isinstance(m, (TighterStrategy, TighterInducingPointKernel, CollapsedGP))]
    for holder in holders:
        _place(holder, some, seed)
    if some.dim() != 2 or dim not in (0, -y.ndim) or not _is_kernel_and_mean(model, some[:3]):
        return
    starts = _lengthscale_starts(model.covar_module, some, seed)
    is_plain_noise = isinstance(likelihood, GaussianLikelihood) and family(likelihood).is_gaussian
    if len(holders) != 1 or not is_plain_noise or len(targets.shape) != 1:
        _set_lengthscales({kernel: start for kernel, start in starts.items() if not kernel.raw_lengthscale.any()})
        return
    seen = observed(likelihood, given, given.shape[-1:])
    seen = torch.ones_like(given, dtype=torch.bool) if seen is None else seen  # missing targets say nothing
    some, given = some[seen], given[seen].to(like.dtype)
    chosen = _draw(len(some), num_rows_used, seed).to(some.device)
    few_x, few_y = some[chosen], given[chosen]
    (holder,) = holders
    points = holder.all_points() if isinstance(holder, TighterStrategy) else holder.inducing_points
    # As many as the model has: the noise that more of them would leave is too small for it.
    train = partial(_train_hyperparameters, model, likelihood, few_x, few_y, seed, points.size(-2))
    if isinstance(model.mean_module, ConstantMean) and model.mean_module.raw_constant.requires_grad:
        with torch.no_grad():
            model.mean_module.raw_constant.copy_(few_y.mean())
    modules = torch.nn.ModuleList([model.covar_module, model.mean_module, likelihood])
    is_learnt = not starts or _choose_lengthscales(modules, few_y, starts, train)
    if is_learnt:
        train(iterations)
    log.info("initialize: set %s", describe_hyperparameters(*modules))
    is_free = all(p.requires_grad for q in getattr(holder, "distributions", ()) for p in q.parameters())
    if is_learnt and is_free and isinstance(holder, TighterStrategy):
        noise = gaussian_noise(likelihood, torch.Size(), targets.shape).expand(targets.shape)
        noise = noise[rows.to(noise.device)][seen] * (len(rows) / len(inputs))  # some rows stand for all
        with torch.no_grad(), temporary_mode(model, False), full_precision(like.device.type):
            _, sums = gathered(holder.prior(), input_rows(some, given), given, noise, likelihood)
            holder.set_optimal(sums.gram, sums.linear)


def _draw(count: int, most: int, seed: int) -> Tensor:
    """Positions of some rows, in their order."""
    order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return order[:most].sort().values


@torch.no_grad()
def _features(model: Any, x: Tensor) -> Tensor:
    """What the GP within a model sees of some inputs: those behind a network, for one."""
    if inner_gp(model) is model and not has_own_call(model):
        return x
    origins = origins_of(model(x))
    return origins[0].x if len(origins) == 1 else x


@torch.no_grad()
def _place(holder: Any, x: Tensor, seed: int) -> None:
    """Inducing points in the inputs' space, unless they are frozen, batched or in another one."""
    sets = [getattr(holder, name) for name in ("inducing_points", "orthogonal_points") if hasattr(holder, name)]
    sizes = [points.size(-2) for points in sets]
    if any(points.dim() != 2 for points in (x, *sets)) or sets[0].size(-1) != x.size(-1) or sum(sizes) > len(x):
        return
    if any(points.requires_grad for points in sets):
        for points, centres in zip(sets, kmeans(x, sum(sizes), seed=seed).split(sizes), strict=True):
            if points.requires_grad:
                points.copy_(centres)


@torch.no_grad()
def _is_kernel_and_mean(model: Any, x: Tensor) -> bool:
    """Whether the prior of a model is its mean and its kernel at the inputs themselves."""
    if isinstance(model, CollapsedGP):
        return True
    if not hasattr(model, "covar_module") or not hasattr(model, "mean_module"):
        return False
    covar = model.forward(x).lazy_covariance_matrix
    is_own = isinstance(covar, LazyEvaluatedKernelTensor) and covar.kernel is model.covar_module
    return is_own and torch.equal(covar.x1, x)


def _lengthscale_starts(kernel: Any, x: Tensor, seed: int) -> dict[Any, Tensor]:
    """Where the rule of :func:`~tighter_gp.inducing.start_lengthscales` would have each kernel begin that has lengthscales."""
    found = {}
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale and part.raw_lengthscale.requires_grad:
            inputs = x if part.active_dims is None else x[:, part.active_dims]
            centres = kmeans(inputs, min(_MOST_CENTRES, len(torch.unique(inputs, dim=0))), seed=seed)
            start = start_lengthscales(inputs, centres)
            if part.lengthscale.size(-1) == 1:  # one for all inputs
                start = start.square().mean().sqrt()
            if part.lengthscale.size(-1) in (1, inputs.size(-1)):
                found[part] = start
    return found


@torch.no_grad()
def _set_lengthscales(values: dict[Any, Tensor], factor: float = 1.0) -> None:
    for kernel, value in values.items():
        kernel.lengthscale = (factor * value).expand_as(kernel.lengthscale)


def _choose_lengthscales(
    modules: torch.nn.ModuleList, y: Tensor, starts: dict[Any, Tensor], train: Callable[..., float]
) -> bool:
    """Set the lengthscales to those of a few for which the collapsed bound of some rows is best, scale and noise trained.

    :return: Whether any of them says more of these rows than their mean does. If not, half of the rule is a place from which
        all rows can be learnt, in experiments, where scale and noise of these rows are not.
    """
    now = {name: value.clone() for name, value in modules.state_dict().items()}
    own = {kernel: kernel.lengthscale.detach().clone() for kernel in starts}
    best, chosen = math.inf, starts
    for values in (starts, own, *({k: f * v for k, v in starts.items()} for f in _FACTORS)):
        modules.load_state_dict(now)
        _set_lengthscales(values)
        loss = train(_TRIAL, _MOST_CENTRES)
        if loss < best - _MARGIN:
            best, chosen = loss, values
    modules.load_state_dict(now)
    is_learnt = best < 0.5 * math.log(2 * math.pi * math.e * float(y.var())) - _MARGIN
    _set_lengthscales(chosen, 1.0 if is_learnt else 0.5)
    return is_learnt


def _train_hyperparameters(
    model: Any, likelihood: Any, x: Tensor, y: Tensor, seed: int, num_inducing: int, iterations: int, most: int = 10**9
) -> float:
    """L-BFGS on the collapsed bound of some rows; kernel, mean and likelihood are the model's own. Lengthscales stay.

    :param most: Inducing points, at most.
    :return: Minus the bound per row; infinite where it could not be computed.
    """
    kernel = model.covar_module
    kernel = kernel.base_kernel if isinstance(kernel, TighterInducingPointKernel) else kernel
    points = kmeans(x, min(num_inducing, most, len(torch.unique(x, dim=0))), seed=seed)
    gp = CollapsedGP(x, y, points, kernel, likelihood, model.mean_module, jitter_val=1e-6)
    gp.inducing_points.requires_grad_(False)
    parameters = [p for name, p in gp.named_parameters() if p.requires_grad and "lengthscale" not in name]
    before, state, moved = [parameter.detach().clone() for parameter in parameters], State(), bool(parameters)
    try:
        for _ in range(iterations):
            if moved:
                state, moved, _ = iterate(parameters, lambda: -gp.bound() / len(y), state)
    except FAILURES as error:
        log.warning("the hyperparameters stay as they were: %s", error)
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)
        return math.inf
    return state.loss


@torch.no_grad()
def start_beta(problem: Problem, batch: Batch) -> None:
    r"""Where a learned :math:`\beta` has not been set, let it start at one over the curvature of the likelihood.

    The best :math:`m_n` is :math:`1/(1 + \lambda_n d_n)`, so the best :math:`\beta` is about :math:`1/\lambda`.
    """
    modules = problem.gp.modules()
    found = [m for m in modules if isinstance(m, BetaConditional) and torch.equal(m.raw_beta, m.first_raw_beta)]
    is_deep = batch.x is None or isinstance(problem.gp, DeepGP)
    if is_deep or len(found) != 1 or not found[0].raw_beta.requires_grad:
        return
    (conditional,), q = found, problem.q(batch)
    curvature = expected_slopes(problem.likelihood, batch.y, q, **batch.kwargs).curvature
    if curvature.dim() > q.mean.dim():
        curvature = curvature.diagonal(dim1=-1, dim2=-2)
    mean = curvature.clamp_min(0.0).mean(-2 if len(q.event_shape) > 1 else -1)
    mean = mean if mean.shape == conditional.beta.shape else mean.mean().expand(conditional.beta.shape)
    mean = distributed.summed(mean * batch.weight)
    if bool((mean > 0).all()):
        conditional.beta = mean.reciprocal()
