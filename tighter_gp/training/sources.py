"""From the arguments of :func:`tighter_gp.fit` to batches and an objective, or a clear error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import (
    DirichletClassificationLikelihood,
    FixedNoiseGaussianLikelihood,
)
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from ..checks import check_device
from ..collapsed import CollapsedGP
from ..data import Rows, check_array, first_parameter
from ..gplvm import BayesianGPLVM, LatentVariableELBO
from ..kernels import TighterInducingPointKernel
from ..likelihoods.targets import check_targets
from ..mlls import TighterELBO
from ..mlls.priors import counts_twice, log_prior
from ..posterior import exact_gp_prior
from .batches import ArrayBatches, BatchSource
from .loaders import LoaderBatches
from .validation import check_finite

log = logging.getLogger("tighter_gp")


def is_collapsed(model: Any) -> bool:
    """Whether a model has its data and trains on all of them at once."""
    return isinstance(model, (ExactGP, CollapsedGP))


def reference(model: Any, likelihood: Any) -> Tensor:
    """A parameter whose dtype and device the data must have."""
    like = first_parameter(model, likelihood)
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"fit needs a model in float32 or float64; got {like.dtype}. Convert it, such as model.float()."
        )
    for parameter in likelihood.parameters():
        check_device(parameter, like.device, "The likelihood is")
    return like


def make_objective(model: Any, likelihood: Any, objective: Callable[..., Any], num_data: int) -> Any:
    """What is maximised; None for a model that has a bound of its own."""
    if isinstance(model, CollapsedGP):
        if objective is not TighterELBO:
            raise ValueError(
                "A CollapsedGP is trained on its own bound, which it was built with; leave objective= out."
            )
        return None
    if isinstance(model, ExactGP) and objective is TighterELBO:
        return _ExactMLL(likelihood, model)
    if isinstance(model, BayesianGPLVM) and objective is TighterELBO:
        objective = LatentVariableELBO
    made = objective(likelihood, model, num_data)
    if isinstance(made, MarginalLogLikelihood) and type(made).__module__.startswith("gpytorch.") and counts_twice(made):
        log.warning(
            "%s counts a prior twice: a module is reached in two ways, such as a likelihood that is also model.likelihood; "
            "tighter_gp.TighterELBO counts each once",
            type(made).__name__,
        )
    return made


class _ExactMLL(ExactMarginalLogLikelihood):
    """With each prior counted once: the kernel has the likelihood too."""

    def _add_other_terms(self, res: Tensor, params: Any) -> Tensor:
        for term in self.model.added_loss_terms():
            res = res.add(term.loss(*params))
        return res + log_prior(self.model, res.shape)


def make_source(
    model: Any,
    likelihood: Any,
    x: Any,
    y: Any,
    *,
    batch_size: int | None,
    seed: int,
    is_split: bool,
    num_data: int | None,
) -> BatchSource:
    """The batches of a run."""
    like = first_parameter(model, likelihood)
    x, y = (value.detach() if isinstance(value, Tensor) else value for value in (x, y))
    fixed = likelihood.noise_covar.noise if isinstance(likelihood, FixedNoiseGaussianLikelihood) else None
    check_y = lambda values: _check_targets(likelihood, torch.as_tensor(values), may_miss=x is None)
    if x is not None and not isinstance(x, (Tensor, np.ndarray)):
        if not hasattr(x, "dataset"):
            check_array("x", x, "a tensor, a numpy array or a DataLoader")
        if y is not None or batch_size is None:
            raise ValueError(
                "A DataLoader brings its own targets and batches: leave y out, pass no per-point arguments, and use "
                "arrays for full-batch training."
            )
        indexed = [module for module in model.modules() if getattr(module, "needs_index", False)]
        limits = [(module.num_data, f"{type(module).__name__}(num_data={module.num_data})") for module in indexed]
        return LoaderBatches(x, seed, like, fixed, num_data, check_y, limits)
    if is_collapsed(model):
        x, y = _own_data(model, likelihood, x, y, like)
    if num_data is not None:
        raise ValueError("num_data= is for a DataLoader; arrays know how many rows they have.")
    check_array("y", y)
    if isinstance(likelihood, DirichletClassificationLikelihood) and y.ndim == 1:
        raise ValueError(
            "DirichletClassificationLikelihood is trained on its own targets, one row per class, not on labels: pass "
            "y=likelihood.transformed_targets."
        )
    kwargs = {} if fixed is None else {"noise": fixed}
    source = ArrayBatches(x, y, kwargs, batch_size, seed, like, is_split, check_y)
    # A latent-variable model takes NaN for a missing entry, and looks at its data itself; arrays are looked at in batches.
    if isinstance(x, Tensor):
        check_finite("x", x)
    if isinstance(y, Tensor):
        check_y(y)
    _compare_with_kept(model, x, y)
    return source


def _check_targets(likelihood: Any, y: Tensor, may_miss: bool) -> None:
    """:func:`check_targets`, which leaves NaN to a latent-variable model."""
    check_targets(likelihood, y[~torch.isnan(y)] if may_miss else y, "values of y")


def _compare_with_kept(model: Any, x: Any, y: Any) -> None:
    """Say if a model of BoTorch keeps as many rows of other values, as after a transform that these have not seen."""
    inputs = getattr(model, "train_inputs", None)
    if is_collapsed(model) or not inputs:
        return
    for name, given, kept in (("x", x, inputs[0]), ("y", y, getattr(model, "train_targets", None))):
        if not isinstance(given, Tensor) or not isinstance(kept, Tensor) or given.shape != kept.shape:
            continue
        if given.device == kept.device and not _equal(given, kept):
            log.warning(
                "%s differs from the data that %s keeps, which its transforms have seen; where they should be the same, pass "
                "model.train_inputs[0] and model.train_targets",
                name,
                type(model).__name__,
            )


def _own_data(model: Any, likelihood: Any, x: Any, y: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The data of a collapsed model; what was passed must be the same."""
    if model.likelihood is not likelihood:
        raise ValueError("The likelihood is not the one that the model was built with; pass model.likelihood.")
    if isinstance(model, CollapsedGP):
        own = {"x": model.train_x, "y": model.train_y}
    else:
        if isinstance(getattr(model, "covar_module", None), TighterInducingPointKernel):
            exact_gp_prior(model)  # a kernel that does not belong to the model is refused
        if model.train_inputs is None or model.train_targets is None:
            raise ValueError("The model has no training data; call model.set_train_data(x, y, strict=False).")
        own = {"x": model.train_inputs[0], "y": model.train_targets}
    for name, given in {"x": x, "y": y}.items():
        if given is None:
            continue
        values = Rows(given, like, is_input=name == "x", name=name)
        check_finite(name, values[:], likelihood if name == "y" else None)
        found = "other values"
        if values.shape != own[name].shape:
            found = f"{tuple(values.shape)} against {tuple(own[name].shape)}"
        elif _equal(values[:], own[name]):
            continue
        raise ValueError(
            f"{name} is not what the model was built with ({found}), and {type(model).__name__} trains on its own data: leave "
            f"{name} out, or build the model on these."
        )
    return own["x"], own["y"]


def _equal(given: Tensor, own: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(given.to(own.dtype)), torch.nan_to_num(own))
