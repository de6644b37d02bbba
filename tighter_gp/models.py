"""Models ready made, each with its likelihood; a class of your own is as welcome."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood, SoftmaxLikelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, IndependentMultitaskVariationalStrategy
from torch import Tensor

from .data import check_array, from_array
from .inducing import kmeans, start_lengthscales
from .likelihoods import BernoulliLogitLikelihood, HeteroscedasticGaussianLikelihood, PoissonLikelihood
from .likelihoods.family import family
from .strategies import TighterVariationalStrategy

# Rows for k-means, of more data than that.
_MOST_ROWS = 32768

__all__ = [
    "BinaryClassification",
    "CountRegression",
    "HeteroscedasticRegression",
    "MultiClassification",
    "MultiOutputRegression",
    "Regression",
]


class Regression(ApproximateGP):
    """A sparse GP with one output: targets of shape ``N``.

    The kernel is a scaled Matérn-3/2 with one lengthscale per input, which start at the spread of the inducing points, but
    at no tiny value; the mean is a constant. Scale targets to unit variance.

    :param x: Training inputs, ``N x D`` or ``N``, a tensor or an array, for the inducing points: centres of
        k-means of at most 32,768 rows.
    :param num_inducing: How many; at most as many as there are inputs.
    :param inducing_points: The inducing points themselves, ``M x D``, in place of ``x``.
    :param covar_module: Another kernel; of a batch shape for one per output.
    :param mean_module: Another mean.
    :param likelihood: Another likelihood, :class:`~gpytorch.likelihoods.StudentTLikelihood` for outliers.
    :ivar likelihood: The likelihood, for :func:`~tighter_gp.fit` and :func:`~tighter_gp.predict_y`.

    Example:
        >>> model = tighter_gp.models.Regression(train_x, num_inducing=8)
        >>> history = tighter_gp.fit(model, model.likelihood, train_x, train_y, steps=3)
        >>> low, high = tighter_gp.predict_y(model, model.likelihood, test_x).interval(0.95)
    """

    _make_likelihood: Callable[..., Likelihood] = GaussianLikelihood

    def __init__(
        self,
        x: Any = None,
        num_inducing: int = 256,
        *,
        inducing_points: Tensor | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        likelihood: Likelihood | None = None,
        _num_functions: int | None = None,
    ) -> None:
        _check_part("covar_module", covar_module, Kernel)
        _check_part("mean_module", mean_module, Mean)
        _check_part("likelihood", likelihood, Likelihood)
        shape = torch.Size(() if _num_functions is None else (_num_functions,))
        likelihood = self._make_likelihood(*shape) if likelihood is None else likelihood
        rows = _rows(x, inducing_points)
        z = kmeans(rows, min(num_inducing, len(rows))) if inducing_points is None else rows.detach().clone()
        q = CholeskyVariationalDistribution(z.size(-2), batch_shape=shape)
        # The one place that says who chooses the scales, so that the bound is strict for every likelihood.
        conditional = "optimal" if family(likelihood).is_log_concave else "scalar"
        strategy: Any = TighterVariationalStrategy(self, z, q, conditional=conditional)
        if _num_functions is not None:
            strategy = IndependentMultitaskVariationalStrategy(strategy, num_tasks=_num_functions)
        super().__init__(strategy)
        self.mean_module = ConstantMean(batch_shape=shape) if mean_module is None else mean_module
        self.covar_module = _default_kernel(rows, z, shape) if covar_module is None else covar_module
        self.likelihood = likelihood
        self.to(z)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class BinaryClassification(Regression):
    """Two classes: labels 0 and 1 of shape ``N``, logistic link. Arguments as of :class:`Regression`.

    Example:
        >>> model = tighter_gp.models.BinaryClassification(train_x, num_inducing=8)
        >>> history = tighter_gp.fit(model, model.likelihood, train_x, (train_y > 0).long(), steps=3)
        >>> probs = tighter_gp.predict_y(model, model.likelihood, test_x).probs
    """

    _make_likelihood = BernoulliLogitLikelihood


class CountRegression(Regression):
    """Counts: targets 0, 1, 2, ... of shape ``N``, Poisson with the exponential link. Arguments as of :class:`Regression`.

    Example:
        >>> model = tighter_gp.models.CountRegression(train_x, num_inducing=8)
        >>> history = tighter_gp.fit(model, model.likelihood, train_x, train_y.exp().round(), steps=3)
        >>> most = tighter_gp.predict_y(model, model.likelihood, test_x).quantile(0.9)
    """

    _make_likelihood = PoissonLikelihood


class HeteroscedasticRegression(Regression):
    """Noise that depends on the input, by a GP of its own: targets of shape ``N``. Arguments as of :class:`Regression`.

    The second function is the logarithm of the noise variance. Scale targets to unit variance.

    Example:
        >>> model = tighter_gp.models.HeteroscedasticRegression(train_x, num_inducing=8)
        >>> history = tighter_gp.fit(model, model.likelihood, train_x, train_y, steps=3)
        >>> low, high = tighter_gp.predict_y(model, model.likelihood, test_x).interval(0.95)
    """

    _make_likelihood = staticmethod(lambda *_: HeteroscedasticGaussianLikelihood())

    def __init__(self, x: Any = None, num_inducing: int = 256, **kwargs: Any) -> None:
        super().__init__(x, num_inducing, **kwargs, _num_functions=2)
        if "mean_module" not in kwargs:
            self.mean_module.constant.data[..., 1] = -1.0  # of targets of unit variance most is not noise


class MultiOutputRegression(Regression):
    """Several outputs, a GP each: targets of shape ``N x T``. First ``T``, then arguments as of :class:`Regression`.

    Example:
        >>> model = tighter_gp.models.MultiOutputRegression(2, train_x, num_inducing=8)
        >>> tighter_gp.predict_y(model, model.likelihood, test_x).mean.shape == (len(test_x), 2)
        True
    """

    _make_likelihood = functools.partial(MultitaskGaussianLikelihood, has_global_noise=False)

    def __init__(self, num_outputs: int, x: Any = None, num_inducing: int = 256, **kwargs: Any) -> None:
        super().__init__(x, num_inducing, **kwargs, _num_functions=_count("num_outputs", num_outputs))


class MultiClassification(Regression):
    """Several classes: labels 0 to ``C - 1`` of shape ``N``, softmax. First ``C``, then arguments as of :class:`Regression`.

    Example:
        >>> model = tighter_gp.models.MultiClassification(3, train_x, num_inducing=8)
        >>> tighter_gp.predict_y(model, model.likelihood, test_x).probs.shape == (len(test_x), 3)
        True
    """

    _make_likelihood = functools.partial(SoftmaxLikelihood, None, mixing_weights=False)

    def __init__(self, num_classes: int, x: Any = None, num_inducing: int = 256, **kwargs: Any) -> None:
        super().__init__(x, num_inducing, **kwargs, _num_functions=_count("num_classes", num_classes))


def _check_part(name: str, part: Any, kind: type) -> None:
    if part is not None and not isinstance(part, kind):
        got = repr(part) if isinstance(part, (str, type)) else type(part).__name__
        raise TypeError(f"{name} must be a {kind.__name__} of GPyTorch; got {got}.")


def _count(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} comes first, an integer, and then x; got {type(value).__name__}.") from None


def _rows(x: Any, inducing_points: Tensor | None) -> Tensor:
    """Where the inducing points are placed among: some of the training inputs, or the inducing points themselves."""
    if (x is None) == (inducing_points is None):
        raise TypeError("Give either training inputs, to place inducing points among, or inducing_points=.")
    name, points = ("x", x) if inducing_points is None else ("inducing_points", inducing_points)
    if not isinstance(points, (list, tuple)):
        check_array(name, points)
    if len(points) > _MOST_ROWS and inducing_points is None:
        points = points[np.sort(np.random.default_rng(0).choice(len(points), _MOST_ROWS, replace=False))]
    points = from_array(points) if isinstance(points, np.ndarray) else torch.as_tensor(points)
    return points.reshape(len(points), -1).to(points if points.is_floating_point() else torch.get_default_dtype())


def _default_kernel(rows: Tensor, z: Tensor, batch_shape: torch.Size) -> Kernel:
    kernel = MaternKernel(1.5, ard_num_dims=z.size(-1), batch_shape=batch_shape).to(z)
    kernel.lengthscale = start_lengthscales(rows, z).expand(*batch_shape, 1, -1)
    return ScaleKernel(kernel, batch_shape=batch_shape)
