"""Function samples through BoTorch: its Matheron paths, on the strategies of this package.

BoTorch conditions a draw from the prior on a draw of the inducing variables. It knows one set of inducing points, and solves
in the precision of the inputs. Where BoTorch is loaded, its dispatchers are told how to do it here: at all points of a
strategy, in the precision of its factor. Nothing of BoTorch is imported by this package before that.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from ..maths.linalg import solve_lower, solve_lower_transposed
from ..maths.moments import Whitened

_known: set[int] = set()


def register_paths(strategy_class: type) -> None:
    """Tell BoTorch about strategies of a class and those derived from it, if it is loaded and was not told yet.

    :param strategy_class: The class; its objects have ``all_points``, ``whitened`` and ``_cholesky_factor``.
    """
    botorch = sys.modules.get("botorch")
    if botorch is None or id(botorch) in _known or getattr(botorch.__spec__, "_initializing", False):
        return
    _known.add(id(botorch))
    samplers = importlib.import_module("botorch.sampling.pathwise.posterior_samplers")
    updates = importlib.import_module("botorch.sampling.pathwise.update_strategies")
    updates.GaussianUpdate.add((ApproximateGP, strategy_class), _update)
    priors = importlib.import_module("botorch.sampling.pathwise.prior_samplers").DrawKernelFeaturePaths
    priors.add((ApproximateGP, strategy_class), _with_inputs(priors.dispatch(ApproximateGP, VariationalStrategy)))
    wrapper = importlib.import_module("botorch.models.approximate_gp").ApproximateGPyTorchModel
    for model_class in (ApproximateGP, wrapper):
        draw = samplers.DrawMatheronPaths.dispatch(model_class)
        samplers.DrawMatheronPaths.add((model_class,), _at_all_points(draw, strategy_class, samplers))


def _with_inputs(draw: Any) -> Any:
    """BoTorch's own function, which asks how many inputs a plain GP has."""

    def draw_kernel_feature_paths(model: Any, strategy: Any, **kwargs: Any) -> Any:
        return draw(model, strategy, **{"num_inputs": strategy.inducing_points.size(-1), **kwargs})

    return draw_kernel_feature_paths


def _at_all_points(draw: Any, strategy_class: Any, samplers: Any) -> Any:
    """BoTorch's own function, but for strategies of a class: there the prior is drawn at all points."""

    def draw_matheron_paths(model: Any, *, sample_shape: Any, prior_sampler: Any, update_strategy: Any) -> Any:
        strategy: Any = getattr(getattr(model, "model", model), "variational_strategy", None)
        if not isinstance(strategy, strategy_class):
            return draw(model, sample_shape=sample_shape, prior_sampler=prior_sampler, update_strategy=update_strategy)
        with samplers.delattr_ctx(model, "outcome_transform"):
            prior_paths = prior_sampler(model=model, sample_shape=sample_shape)
            sample_values = prior_paths.forward(strategy.all_points())  # in transformed space already
            update_paths = update_strategy(model=model, sample_values=sample_values)
        return samplers.MatheronPath(
            prior_paths=prior_paths,
            update_paths=update_paths,
            output_transform=samplers.get_output_transform(model),
        )

    return draw_matheron_paths


def _update(
    model: Any,
    strategy: Any,
    *,
    sample_values: Tensor,
    target_values: Tensor | None = None,
    noise_covariance: Any = None,
    input_transform: Any = None,
    **ignored: Any,
) -> Any:
    r"""The path :math:`k(\cdot, Z) K_{ZZ}^{-1} (u - f(Z))` that takes a draw of the prior to one of q(f).

    :param model: The model, with its ``covar_module``.
    :param strategy: Its strategy.
    :param sample_values: :math:`f(Z)` of draws from the prior, ``... x M``.
    :param target_values: :math:`u`, ``... x M``; default a draw from q(u) for each.
    :param noise_covariance: Must be None.
    :param input_transform: What the path does to its inputs.
    """
    if noise_covariance is not None and type(noise_covariance).__name__ != "ZeroLinearOperator":
        raise NotImplementedError("Paths of a sparse GP take no noise_covariance.")
    points = strategy.all_points()
    prior = strategy(points, prior=True)
    factor = strategy._cholesky_factor(prior.lazy_covariance_matrix).to_dense()
    if target_values is None:
        draws = _draw(strategy.whitened().to(factor.dtype), sample_values.shape)
        target_values = prior.mean + (factor @ draws.unsqueeze(-1)).squeeze(-1)
    # The factor is that of K_ZZ with its jitter, and so must be the covariance of f(Z).
    sample_values = sample_values + strategy.jitter_val**0.5 * torch.randn_like(sample_values)
    errors = (target_values - sample_values).to(factor.dtype).unsqueeze(-1)
    weight = solve_lower_transposed(factor, solve_lower(factor, errors)).squeeze(-1)
    features = importlib.import_module("botorch.sampling.pathwise.features")
    paths = importlib.import_module("botorch.sampling.pathwise.paths")
    kernel_map = features.KernelEvaluationMap(kernel=model.covar_module, points=points, input_transform=input_transform)
    return paths.GeneralizedLinearPath(feature_map=kernel_map, weight=weight.to(sample_values.dtype))


def _draw(q: Whitened, shape: torch.Size) -> Tensor:
    """Draws from a whitened q(w), ``... x M``; of a point mass copies."""
    noise = torch.randn(shape, dtype=q.mean.dtype, device=q.mean.device)
    if q.root is not None:
        return q.mean + (q.root @ noise.unsqueeze(-1)).squeeze(-1)
    return q.mean + (torch.zeros_like(noise) if q.stddev is None else q.stddev * noise)
