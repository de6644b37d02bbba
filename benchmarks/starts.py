"""A start for a collapsed model from an exact GP on some rows; test rows have no part in it.

Where few of many inputs matter, the bound is flat around long lengthscales, and the inducing points leave everything
unexplained around short ones. An exact GP on some hundred rows tells the inputs apart. Its marginal likelihood is maximised by
L-BFGS from several lengthscales, and the best is taken; of this start and the given one that with the higher bound after some
iterations on all rows.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from gpytorch.constraints import GreaterThan
from torch import Tensor

import tighter_gp

from .data import Split

ROWS, FACTORS = 500, (0.3, 1.0, 3.0)

_EXACT_ITERATIONS, _TRIAL_ITERATIONS = 60, 40

# Shorter lengthscales tell duplicates of discrete inputs apart, and nothing else; longer ones mean that an input is irrelevant.
_SHORTEST, _LONGEST = 0.1, 100.0

State = dict[str, Tensor]


def start_from_rows(model: Any, data: Split, seed: int) -> str:
    """Set a model to the better of its own start and that of an exact GP; returns which.

    :param model: A :class:`~benchmarks.prediction.SGPR` in the state of its start.
    """
    own = _copy(model.state_dict())
    states = {"median": own}
    found = _exact(model, data, seed)
    if found is not None:
        states["exact"] = found
    bounds = {name: _trained(model, state, data) for name, state in states.items()}
    best = max(bounds, key=lambda name: bounds[name])
    model.load_state_dict(states[best])
    return best


def _copy(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def _trained(model: Any, state: State, data: Split) -> float:
    """The bound after some iterations from a state; minus infinity where they fail."""
    model.load_state_dict(state)
    return _fitted(model, data, _TRIAL_ITERATIONS)


def _exact(model: Any, data: Split, seed: int) -> State | None:
    """The state of a model with the hyperparameters of the best exact GP on some rows; None if all failed."""
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seed))[:ROWS]
    rows = order.to(data.train_y.device)
    some = data._replace(train_x=data.train_x[rows], train_y=data.train_y[rows])
    lengthscale = model.covar_module.base_kernel.base_kernel.lengthscale.detach()
    best, chosen = float("-inf"), None
    for factor in FACTORS:
        # With an inducing point on every row the bound is the marginal likelihood.
        exact = type(model)(some, some.train_x, factor * lengthscale)
        kernel = exact.covar_module.base_kernel.base_kernel
        kernel.register_constraint("raw_lengthscale", GreaterThan(_SHORTEST))
        kernel.lengthscale = factor * lengthscale
        exact.covar_module.inducing_points.requires_grad_(False)
        bound = _fitted(exact, some, _EXACT_ITERATIONS)
        if bound > best:
            best, chosen = bound, exact
    if chosen is None:
        return None
    own = _copy(model.state_dict())
    source, target = chosen.covar_module.base_kernel, model.covar_module.base_kernel
    target.base_kernel.lengthscale = source.base_kernel.lengthscale.detach().clamp(_SHORTEST, _LONGEST)
    target.outputscale = source.outputscale.detach()
    model.likelihood.noise = chosen.likelihood.noise.detach()
    model.mean_module.load_state_dict(chosen.mean_module.state_dict())
    found = _copy(model.state_dict())
    model.load_state_dict(own)
    return found


def _fitted(model: Any, data: Split, iterations: int) -> float:
    """The bound per row after some iterations of L-BFGS; minus infinity where they fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tighter_gp.fit(model, model.likelihood, data.train_x, data.train_y, steps=iterations, progress=False)
            bound = float(tighter_gp.evaluate_bound(model, model.likelihood, data.train_x, data.train_y))
        except RuntimeError:
            return float("-inf")
    return bound / len(data.train_y)
