r"""One view on a trained sparse GP, uncollapsed or collapsed: the prior and q in whitened coordinates.

What is computed from a trained model (predictions, the optimal q, diagnostics) needs the projection
:math:`A = L^{-1}K_{ZX}`, the residual covariance :math:`D = K - A^\top A` and q(w), and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from ._checks import check_inputs, raise_if_not_finite
from .collapsed import CollapsedGP
from .kernels import TighterInducingPointKernel
from .kernels.precision import covariance_block, covariances, sufficient_precision
from .likelihoods.properties import gaussian_noise, is_gaussian
from .linalg import project, residual_variance
from .moments import Whitened, explained_variance, optimal_whitened, projected_mean
from .strategies._tighter_strategy import _TighterStrategy


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

    :param model: The model.
    :param precision: In which kernel and projection are evaluated; default one that suffices for the model's own formula.
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

    def __init__(self, model: ApproximateGP, precision: torch.dtype | None = None) -> None:
        self.strategy, self.precision = tighter_strategy(model), precision
        self.q = self.strategy.whitened()
        self.data_jitter = self.strategy.jitter_val

    def projected(self, x: Tensor) -> Projected:
        mean, projection, prior_variance = self.strategy.projected(x, self.precision)
        return Projected(mean, projection, residual_variance(prior_variance, projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        inputs = x1 if x1 is x2 else torch.cat([x1, x2], dim=-2)
        covar = self.strategy.model.forward(inputs).lazy_covariance_matrix
        rows = slice(None, x1.size(-2))
        columns = rows if x1 is x2 else slice(x1.size(-2), None)
        return covariance_block(covar, rows, columns, self.precision or x1.dtype)


class CollapsedLatentGP(LatentGP):
    """View on an :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`."""

    def __init__(self, model: ExactGP, precision: torch.dtype | None = None) -> None:
        kernel = getattr(model, "covar_module", None)
        if not isinstance(kernel, TighterInducingPointKernel):
            raise TypeError(
                "A collapsed model needs a TighterInducingPointKernel as its covar_module; "
                f"got {type(kernel).__name__}."
            )
        self.model, self.kernel, self.data_jitter = model, kernel, 0.0
        (self.train_x,), y = model.train_inputs, model.train_targets
        self.noise = gaussian_noise(model.likelihood, y.shape[:-1], y.shape[-1:])
        self._chol = kernel.inducing_cholesky()
        self._prior = kernel.prior(precision or sufficient_precision(self._chol, self.noise, y.dtype))
        train = self.projected(self.train_x)
        targets, noise = (values.to(train.projection.dtype) for values in (y - train.mean, self.noise.expand_as(y)))
        self.q = optimal_whitened(train.projection, targets, noise)

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The prior mean, and what the kernel sees: the inputs after any feature extractor and selection of dimensions."""
        with settings.lazily_evaluate_kernels(True):
            prior = self.model.forward(x)
        covar = prior.lazy_covariance_matrix
        if not isinstance(covar, LazyEvaluatedKernelTensor) or covar.kernel is not self.kernel:
            raise TypeError(
                "forward of a collapsed model must return the covariance of its covar_module as it is; "
                f"got {type(covar).__name__}."
            )
        return prior.mean, covar.x1

    def projected(self, x: Tensor) -> Projected:
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        mean, inputs = self._inputs(x)
        projection = project(self._chol, self._prior.covariance(self.kernel.inducing_points, inputs))
        return Projected(mean, projection, residual_variance(self._prior.variance(inputs), projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        first = self._inputs(x1)[1]
        return self._prior.covariance(first, first if x1 is x2 else self._inputs(x2)[1])


class ChunkedLatentGP(LatentGP):
    """View on a :class:`~tighter_gp.CollapsedGP`."""

    def __init__(self, model: CollapsedGP, precision: torch.dtype | None = None) -> None:
        self.model, self.data_jitter = model, 0.0
        self._chol, self.q = model._posterior(precision)
        self._prior = covariances(model.covar_module, self.q.mean.dtype)
        self.train_x, self.noise = model.train_x, model._noise

    def projected(self, x: Tensor) -> Projected:
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        projection = project(self._chol, self._prior.covariance(self.model.inducing_points, x))
        return Projected(self.model.mean_module(x), projection, residual_variance(self._prior.variance(x), projection))

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self._prior.covariance(x1, x2)


def tighter_strategy(model: Any) -> _TighterStrategy:
    """The strategy of a single-output model of this package, or a clear error."""
    strategy = getattr(model, "variational_strategy", None)
    if not isinstance(strategy, _TighterStrategy):
        raise TypeError(
            "Expected an ApproximateGP whose variational_strategy is one of tighter_gp's, not wrapped for several "
            f"tasks; got {type(model).__name__} with {type(strategy).__name__}."
        )
    return strategy


def latent_gp(model: Any, precision: torch.dtype | None = None) -> LatentGP:
    """The view that fits the model; call it in eval mode."""
    if isinstance(model, CollapsedGP):
        return ChunkedLatentGP(model, precision)
    return (CollapsedLatentGP if isinstance(model, ExactGP) else UncollapsedLatentGP)(model, precision)


def require_gaussian(likelihood: Any, what: str) -> None:
    """Raise unless the likelihood is Gaussian."""
    if not is_gaussian(likelihood):
        raise TypeError(f"{what} needs a Gaussian likelihood; got {type(likelihood).__name__}.")
