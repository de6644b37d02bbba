"""For BoTorch: a model that ``fit_gpytorch_mll`` trains by the recipe, and function samples. Needs the extra ``botorch``.

Importing this module tells BoTorch's Matheron paths about the strategies of this package: it conditions a draw from the prior
on a draw of the inducing variables, here at all points of a strategy and in the precision of its factor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from botorch.models.approximate_gp import ApproximateGPyTorchModel
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.posteriors import Posterior
from botorch.sampling.pathwise.features import KernelEvaluationMap
from botorch.sampling.pathwise.paths import GeneralizedLinearPath
from botorch.sampling.pathwise.posterior_samplers import (
    DrawMatheronPaths,
    MatheronPath,
    delattr_ctx,
    get_output_transform,
)
from botorch.sampling.pathwise.prior_samplers import DrawKernelFeaturePaths
from botorch.sampling.pathwise.update_strategies import GaussianUpdate
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from .likelihoods.family import family
from .maths.linalg import solve_lower, solve_lower_transposed
from .models import MultiOutputRegression, Regression
from .predictions import PredictiveDistribution, predict_y
from .strategies import TighterStrategy
from .training import fit

__all__ = ["SingleTaskTighterGP"]


class _CustomFit:
    """What ``botorch.fit.fit_gpytorch_mll`` looks for on the model of an objective, from BoTorch 0.18 on."""

    train_inputs: list[Tensor]
    train_targets: Tensor

    def custom_fit(
        self, mll: Any, closure: Any = None, closure_kwargs: Any = None, optimizer_kwargs: Any = None, **kwargs: Any
    ) -> Any:
        """Train by the recipe; further arguments are those of :func:`tighter_gp.fit`."""
        length = {} if "steps" in kwargs else {"epochs": 100}
        options: dict[str, Any] = {"progress": False, **length, **kwargs}
        (x,), y = self.train_inputs, self.train_targets
        fit(self, mll.likelihood, x, y, objective=lambda *_: mll, **options)
        return mll.eval()


class _Regression(_CustomFit, Regression):
    """One output."""


class _MultiOutputRegression(_CustomFit, MultiOutputRegression):
    """Several outputs, a GP each."""


class SingleTaskTighterGP(ApproximateGPyTorchModel):
    """A sparse GP for BoTorch, with one or several outputs. Transforms learn from all data, at once.

    :param train_X: Inputs, ``N x D``.
    :param train_Y: Targets, ``N x T``.
    :param likelihood: Default Gaussian noise, for each output.
    :param inducing_points: How many, by k-means; or the points, ``M x D``, as the model sees inputs after the transform.
    :param outcome_transform: Of BoTorch, for the targets: by default ``Standardize``, as of BoTorch's ``SingleTaskGP``, where no
        likelihood is given; None for none.
    :param input_transform: Of BoTorch, for the inputs.
    :param kwargs: Of :class:`~tighter_gp.models.Regression`: ``covar_module``, ``mean_module``.

    Example:
        >>> import botorch, tighter_gp.botorch
        >>> X, Y = train_x.double(), train_y.double().unsqueeze(-1)
        >>> model = tighter_gp.botorch.SingleTaskTighterGP(X, Y, inducing_points=8)
        >>> mll = tighter_gp.TighterELBO(model.likelihood, model.model, num_data=len(X))
        >>> _ = botorch.fit.fit_gpytorch_mll(mll, epochs=3)
        >>> model.posterior(X[:3], observation_noise=True).mean.shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: Likelihood | None = None,
        inducing_points: int | Tensor = 256,
        outcome_transform: OutcomeTransform | str | None = "standardize",
        input_transform: InputTransform | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(outcome_transform, str):  # as SingleTaskGP does; of other likelihoods targets are what they are
            outcome_transform = Standardize(train_Y.size(-1)) if likelihood is None else None
        with torch.no_grad():
            x, y = self.transform_inputs(train_X, input_transform), train_Y
            if outcome_transform is not None:
                y, _ = outcome_transform.train()(train_Y, X=x)
        if isinstance(inducing_points, Tensor):
            kwargs["inducing_points"] = inducing_points
        else:
            kwargs |= {"x": x, "num_inducing": min(inducing_points, len(x.unique(dim=0)))}
        is_single = y.size(-1) == 1
        make: Any = _Regression if is_single else partial(_MultiOutputRegression, y.size(-1))
        model = make(likelihood=likelihood, **kwargs)
        super().__init__(model, model.likelihood, y.size(-1))
        model.train_inputs, model.train_targets = [x], y.squeeze(-1) if is_single else y
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if input_transform is not None:
            self.input_transform = input_transform
        self.to(train_X)
        self.eval()

    @property
    def batch_shape(self) -> torch.Size:
        """No batch of models."""
        return torch.Size()

    @property
    def train_inputs(self) -> list[Tensor]:
        """As the model sees them."""
        return self.model.train_inputs

    def posterior(  # type: ignore[override]
        self, X: Tensor, output_indices: Any = None, observation_noise: Any = False, posterior_transform: Any = None
    ) -> Any:
        """As of BoTorch's models; of y under any likelihood if ``observation_noise``."""
        if not observation_noise or family(self.likelihood).is_gaussian_noise:
            return super().posterior(X, output_indices, observation_noise, posterior_transform)
        x = self.eval().transform_inputs(X)
        return _Observations(predict_y(self.model, self.likelihood, x.reshape(-1, x.size(-1))), X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any) -> Any:
        """The model that has seen new observations of its one output too, ``B x D`` and ``B x 1``, exactly."""
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y)
        seen = self.eval().model.get_fantasy_model(self.transform_inputs(X), Y.squeeze(-1))
        model = ApproximateGPyTorchModel(seen, self.likelihood)
        for name in ("input_transform", "outcome_transform"):
            if hasattr(self, name):
                setattr(model, name, getattr(self, name))
        return model.eval()


class _Observations(Posterior):
    """The distribution of y at each point by itself, for inputs ``... x Q x D``.

    :param y: At these points in one row.
    """

    def __init__(self, y: PredictiveDistribution, x: Tensor) -> None:
        self.y, self.x = y, x

    def _shaped(self, values: Tensor, *sample_shape: int) -> Tensor:
        return values.to(self.x).reshape(*sample_shape, *self.x.shape[:-1], -1)

    @property
    def mean(self) -> Tensor:
        """``... x Q x T``."""
        return self._shaped(self.y.mean)

    @property
    def variance(self) -> Tensor:
        """``... x Q x T``."""
        return self._shaped(self.y.variance)

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Draws, without a gradient."""
        shape = torch.Size([1]) if sample_shape is None else sample_shape
        return self._shaped(self.y.sample(shape.numel()), *shape)

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:
        return torch.Size([*sample_shape, *self.mean.shape])

    @property
    def device(self) -> torch.device:
        """Of the inputs."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs."""
        return self.x.dtype


# -- function samples -----------------------------------------------------------------------------------------------------


def _draw_features(model: Any, strategy: Any, **kwargs: Any) -> Any:
    """BoTorch's own function, which asks how many inputs a plain GP has."""
    draw = DrawKernelFeaturePaths.dispatch(ApproximateGP, VariationalStrategy)
    return draw(model, strategy, **{"num_inputs": strategy.inducing_points.size(-1), **kwargs})


def _at_all_points(draw: Any) -> Any:
    """BoTorch's own function, but for strategies of this package: there the prior is drawn at all points."""

    def draw_matheron_paths(model: Any, *, sample_shape: Any, prior_sampler: Any, update_strategy: Any) -> Any:
        strategy: Any = getattr(getattr(model, "model", model), "variational_strategy", None)
        if not isinstance(strategy, TighterStrategy):
            return draw(model, sample_shape=sample_shape, prior_sampler=prior_sampler, update_strategy=update_strategy)
        with delattr_ctx(model, "outcome_transform"):
            prior_paths = prior_sampler(model=model, sample_shape=sample_shape)
            values = prior_paths.forward(strategy.all_points())  # in transformed space already
            update_paths = update_strategy(model=model, sample_values=values)
        transform = get_output_transform(model)
        return MatheronPath(prior_paths=prior_paths, update_paths=update_paths, output_transform=transform)

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

    :param sample_values: :math:`f(Z)` of draws from the prior, ``... x M``.
    :param target_values: :math:`u`, ``... x M``; default a draw from q(u) for each.
    :param noise_covariance: Must be None.
    :param input_transform: What the path does to its inputs.
    """
    if noise_covariance is not None and type(noise_covariance).__name__ != "ZeroLinearOperator":
        raise NotImplementedError("Paths of a sparse GP take no noise_covariance.")
    points = strategy.all_points()
    prior = strategy(points, prior=True)
    factor = strategy._cholesky_factor(prior.lazy_covariance_matrix).to_dense()  # L  [M, M]
    if target_values is None:
        q = strategy.whitened().to(factor.dtype)
        noise = torch.randn(sample_values.shape, dtype=factor.dtype, device=factor.device)
        spread = 0 if q.stddev is None else q.stddev * noise
        draws = q.mean + (spread if q.root is None else (q.root @ noise.unsqueeze(-1)).squeeze(-1))  # w  [..., M]
        target_values = prior.mean + (factor @ draws.unsqueeze(-1)).squeeze(-1)
    # The factor is that of K_ZZ with its jitter, and so must be the covariance of f(Z).
    sample_values = sample_values + strategy.jitter_val**0.5 * torch.randn_like(sample_values)
    errors = (target_values - sample_values).to(factor.dtype).unsqueeze(-1)
    weight = solve_lower_transposed(factor, solve_lower(factor, errors)).squeeze(-1)
    kernel_map = KernelEvaluationMap(kernel=model.covar_module, points=points, input_transform=input_transform)
    return GeneralizedLinearPath(feature_map=kernel_map, weight=weight.to(sample_values.dtype))


GaussianUpdate.add((ApproximateGP, TighterStrategy), _update)
DrawKernelFeaturePaths.add((ApproximateGP, TighterStrategy), _draw_features)
for _kind in (ApproximateGP, ApproximateGPyTorchModel):
    DrawMatheronPaths.add((_kind,), _at_all_points(DrawMatheronPaths.dispatch(_kind)))
