r"""One view on a trained sparse GP, uncollapsed or collapsed: the prior and q in whitened coordinates.

What is computed from a trained model (predictions, the optimal q, diagnostics) needs the projection
:math:`A = L^{-1}K_{ZX}`, the residual covariance :math:`D = K - A^\top A` and q(w), and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from .collapsed import CollapsedGP
from .kernels import TighterInducingPointKernel
from .likelihoods.properties import gaussian_noise, is_gaussian
from .linalg import cholesky, project, residual_variance
from .moments import Whitened, explained_variance, optimal_whitened, projected_mean
from .strategies._tighter_strategy import _TighterStrategy, check_inputs, raise_if_not_finite


class Projected(NamedTuple):
    """The prior at some points seen through the inducing variables.

    :param mean: Prior mean, ``... x B``.
    :param projection: :math:`A`, ``... x M x B``.
    :param residual: :math:`d_n`, ``... x B``.
    """

    mean: Tensor
    projection: Tensor
    residual: Tensor


class LatentGP:
    """The prior and the whitened q of a model.

    :ivar Whitened q: q(w).
    :ivar float data_jitter: What the model's own predictive variance has on top of the formula's.
    """

    q: Whitened
    data_jitter: float

    def projected(self, x: Tensor) -> Projected:
        raise NotImplementedError

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Prior covariance between two sets of points."""
        raise NotImplementedError

    def moments(self, points: Projected) -> tuple[Tensor, Tensor]:
        """Mean and variance of q(f) with SVGP's conditional."""
        q = self.q.to(points.projection.dtype)
        mean = points.mean + projected_mean(points.projection, q)
        return mean, explained_variance(points.projection, q) + points.residual + self.data_jitter

    def residual_covariance(self, x1: Tensor, x2: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """:math:`D` between two sets of points, given their projections."""
        return self.covariance(x1, x2) - first.mT @ second


class UncollapsedLatentGP(LatentGP):
    """View on an :class:`~gpytorch.models.ApproximateGP` with a strategy of this package."""

    def __init__(self, model: ApproximateGP) -> None:
        self.strategy = tighter_strategy(model)
        self.q = self.strategy.whitened()
        self.data_jitter = self.strategy.jitter_val

    def projected(self, x: Tensor) -> Projected:
        mean, projection, prior_variance = self.strategy.projected(x)
        return Projected(mean, projection, residual_variance(prior_variance, projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        covar = self.strategy.model.forward(torch.cat([x1, x2], dim=-2)).lazy_covariance_matrix
        return covar[..., : x1.size(-2), x1.size(-2) :].to_dense()


class CollapsedLatentGP(LatentGP):
    """View on an :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`."""

    def __init__(self, model: ExactGP) -> None:
        kernel = getattr(model, "covar_module", None)
        if not isinstance(kernel, TighterInducingPointKernel):
            raise TypeError(
                "A collapsed model needs a TighterInducingPointKernel as its covar_module; "
                f"got {type(kernel).__name__}."
            )
        self.model, self.kernel, self.data_jitter = model, kernel, 0.0
        # Not the kernel's own, which eval mode caches with the graph, or lack of one, of its first caller.
        matrix = kernel.base_kernel(kernel.inducing_points).add_jitter(kernel.jitter_val).to_dense()
        self._chol = cholesky(matrix, name="K_ZZ")
        (self.train_x,), y = model.train_inputs, model.train_targets
        train = self.projected(self.train_x)
        self.noise = gaussian_noise(model.likelihood, y.shape[:-1], y.shape[-1:])
        self.q = optimal_whitened(train.projection, y - train.mean, self.noise.expand_as(y))

    def _active(self, x: Tensor) -> Tensor:
        return x if self.kernel.active_dims is None else x.index_select(-1, self.kernel.active_dims)

    def projected(self, x: Tensor) -> Projected:
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        base, active = self.kernel.base_kernel, self._active(x)
        projection = project(self._chol, base(self.kernel.inducing_points, active).to_dense())
        return Projected(self.model.forward(x).mean, projection, residual_variance(base(active, diag=True), projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.kernel.base_kernel(self._active(x1), self._active(x2)).to_dense()


class ChunkedLatentGP(LatentGP):
    """View on a :class:`~tighter_gp.CollapsedGP`."""

    def __init__(self, model: CollapsedGP) -> None:
        self.model, self.data_jitter = model, 0.0
        self._chol, self.q = model._posterior()
        self.train_x, self.noise = model.train_x, model._noise

    def projected(self, x: Tensor) -> Projected:
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        kernel = self.model.covar_module
        projection = project(self._chol, kernel(self.model.inducing_points, x).to_dense())
        return Projected(self.model.mean_module(x), projection, residual_variance(kernel(x, diag=True), projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.model.covar_module(x1, x2).to_dense()


def tighter_strategy(model: Any) -> _TighterStrategy:
    """The strategy of a single-output model of this package, or a clear error."""
    strategy = getattr(model, "variational_strategy", None)
    if not isinstance(strategy, _TighterStrategy):
        raise TypeError(
            "Expected an ApproximateGP whose variational_strategy is one of tighter_gp's, not wrapped for several "
            f"tasks; got {type(model).__name__} with {type(strategy).__name__}."
        )
    return strategy


def latent_gp(model: Any) -> LatentGP:
    """The view that fits the model; call it in eval mode."""
    if isinstance(model, CollapsedGP):
        return ChunkedLatentGP(model)
    return CollapsedLatentGP(model) if isinstance(model, ExactGP) else UncollapsedLatentGP(model)


def require_gaussian(likelihood: Any, what: str) -> None:
    """Raise unless the likelihood is Gaussian."""
    if not is_gaussian(likelihood):
        raise TypeError(f"{what} needs a Gaussian likelihood; got {type(likelihood).__name__}.")
