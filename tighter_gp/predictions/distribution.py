"""What a model says about y at each point: moments, quantiles, densities, classes, samples."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from ..data import as_tensor
from ..draws import seeded
from ..likelihoods.targets import check_arguments
from ..maths.quadrature import smallest_integer, solve_increasing
from ..modes import chunks
from .given_f import support
from .marginals import (
    BinaryMarginal,
    ClassesMarginal,
    GaussianMarginal,
    Marginal,
    SeveralFunctionsMarginal,
    make_marginal,
)
from .pointwise import FunctionValues, add_noise, function_values, takes_noise

_LARGEST = 2**22  # entries of one tensor on the way
_NODES = 256  # of a rule, at most


class PredictiveDistribution:
    r"""The distribution of y at each point by itself, as :func:`~tighter_gp.predict_y` returns it.

    What needs an integral is computed when it is asked for, a chunk of points at a time, in float64 and without a graph.
    The likelihood is copied: what is trained later does not change the answer.

    :param likelihood: The likelihood.
    :param f: f at the points; for a Gaussian likelihood y, its noise included.
    :param arguments: Further arguments of the likelihood, tensors with one value per point in the last dimension.
    :param weights: Weights of a mixture over the first dimension of f, as of a deep GP; None for no mixture.
    :param batch_size: Points per chunk.
    :param num_samples: Draws, where there is no rule.
    :param seed: Of the draws.

    Example:
        >>> y = tighter_gp.predict_y(model, likelihood, test_x)
        >>> low, high = y.interval(0.95)
        >>> bool((low < y.mean).all() and (y.mean < high).all())
        True
        >>> nlpd = -y.log_prob(test_y).mean()
    """

    def __init__(
        self,
        likelihood: Any,
        f: FunctionValues,
        *,
        arguments: dict[str, Any] | None = None,
        weights: Tensor | None = None,
        batch_size: int = 1024,
        num_samples: int = 1024,
        seed: int = 0,
    ) -> None:
        if isinstance(likelihood, (likelihoods.SoftmaxLikelihood, likelihoods.DirichletClassificationLikelihood)):
            f = _functions_last(f)
        self._f, self._arguments, self._weights = f, arguments or {}, weights
        self._batch_size, self._num_samples, self._seed = batch_size, num_samples, seed
        # Gaussian noise is in f already.
        is_final = takes_noise(likelihood)
        self._likelihood = likelihood if is_final else copy.deepcopy(likelihood).double().requires_grad_(False)
        first = slice(0, min(1, f.mean.size(f.point_dim)))
        self._kind = type(self._marginal(first, f.rows(first).map(Tensor.double)))

    def __repr__(self) -> str:
        shape = tuple(self._f.mean.shape)
        return f"{type(self).__name__}({type(self._likelihood).__name__}, f of shape {shape})"

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _marginal(self, rows: slice, f: FunctionValues) -> Marginal:
        sliced = {name: _per_point(value, rows) for name, value in self._arguments.items()}
        return make_marginal(self._likelihood, f, sliced, self._num_draws, self._seed)

    @property
    def _num_draws(self) -> int:
        """Draws per component of a mixture: its components are draws themselves."""
        return self._num_samples if self._weights is None else max(16, self._num_samples // len(self._weights))

    @torch.no_grad()
    def _by_chunks(self, compute: Callable[[Marginal, FunctionValues, slice], Tensor], point_dim: int) -> Tensor:
        """Results of all chunks, joined along the dimension that counts the points."""
        f, num_points = self._f, self._f.mean.size(self._f.point_dim)
        nodes = self._num_draws if issubclass(self._kind, SeveralFunctionsMarginal) else _NODES
        size = max(1, min(self._batch_size, _LARGEST * num_points // (nodes * max(1, f.mean.numel()))))
        results: Tensor | None = None
        for rows in chunks(num_points, size):
            part = f.rows(rows).map(Tensor.double)
            result = compute(self._marginal(rows, part), part, rows).to(f.mean.dtype)
            if results is None:
                shape = list(result.shape)
                shape[point_dim] = num_points
                results = result.new_empty(shape)
            results.narrow(point_dim, rows.start, rows.stop - rows.start).copy_(result)
        return f.mean.new_empty(0) if results is None else results

    def _mixed(self, values: Tensor) -> Tensor:
        """The mean over the components of a mixture."""
        if self._weights is None:
            return values
        return torch.tensordot(self._weights.to(values), values, dims=1)

    @property
    def _is_binary(self) -> bool:
        return issubclass(self._kind, BinaryMarginal)

    @property
    def _point_dim(self) -> int:
        """The dimension of y's moments that counts the points, from the end."""
        single = not self._f.is_several or (
            self._kind is SeveralFunctionsMarginal and not self._event_shape  # one y of several functions
        )
        return -1 if single else -2

    @functools.cached_property
    def _event_shape(self) -> torch.Size:
        """The shape of one y of a likelihood of several functions."""
        mean = self._f.rows(slice(0, 1)).map(Tensor.double).mean
        marginal = self._marginal(slice(0, 1), self._f.rows(slice(0, 1)))
        return marginal.conditional(mean.unsqueeze(0)).mean.shape[len(mean.shape) :]

    # -- answers ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        if self._kind is GaussianMarginal and self._weights is None:
            return self._f.mean, self._f.variance

        def compute(marginal: Marginal, f: FunctionValues, rows: slice) -> Tensor:
            mean, variance = marginal.moments(f)
            total = self._mixed(mean)
            if self._weights is not None and not issubclass(self._kind, (BinaryMarginal, ClassesMarginal)):
                variance = self._mixed(variance + (mean - total).square())
            elif self._weights is not None:
                variance = total * (1 - total)
            return torch.stack([total, variance])

        mean, variance = self._by_chunks(compute, self._point_dim)
        return mean, variance

    @property
    def mean(self) -> Tensor:
        """Mean of y, ``N`` or ``N x T``; for classes the probabilities, :attr:`probs`."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Variance of y, like the mean; for classes that of each indicator."""
        return self._moments[1]

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of y, like the mean."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Covariance of the tasks of each point, ``N x T x T``, for Gaussian noise."""
        if self._kind is not GaussianMarginal or not self._f.is_several or self._weights is not None:
            raise TypeError(
                "A covariance between tasks is known for several tasks with Gaussian noise only; use variance."
            )
        return torch.diag_embed(self._f.variance) if self._f.covariance is None else self._f.covariance

    @property
    def probs(self) -> Tensor:
        """Probability of class 1, ``N``, for two classes; of each class, ``N x C``, for several."""
        if not issubclass(self._kind, (BinaryMarginal, ClassesMarginal)):
            raise TypeError(
                f"{type(self._likelihood).__name__} has no classes, and so no probs; use mean and quantile."
            )
        return self.mean

    def quantile(self, p: float | Sequence[float] | Tensor) -> Tensor:
        """The value below which y lies with probability ``p``, like the mean; for counts the smallest integer that reaches it.

        :param p: Between 0 and 1, both excluded. Several are the first dimension of the answer.
        """
        levels = torch.as_tensor(p, dtype=torch.float64, device="cpu")
        if levels.dim():
            return torch.stack([self.quantile(level) for level in levels.tolist()])
        return self._quantile(levels.item())

    def _quantile(self, p: float) -> Tensor:
        if not 0 < p < 1:
            raise ValueError(f"A quantile needs a probability between 0 and 1, both excluded; got {p:g}.")
        if self._kind is GaussianMarginal and self._weights is None:
            z = NormalDist().inv_cdf(p)
            return (self._f.mean.double() + z * self._f.variance.double().sqrt()).to(self._f.mean.dtype)

        def compute(marginal: Marginal, f: FunctionValues, rows: slice) -> Tensor:
            function = marginal.distribution_function(f, p)
            if function is None:
                with seeded(self._seed, f.mean.device):
                    draws = self._draw(marginal, f, self._num_samples)
                return draws.sort(0).values[math.ceil(p * len(draws)) - 1]

            def mixed(y: Tensor) -> tuple[Tensor, Tensor]:
                value, slope = function(y)
                return self._mixed(value), self._mixed(slope)

            place, distance = marginal.around(f)
            start = self._mixed(place)
            if marginal.is_discrete:
                return smallest_integer(lambda y: mixed(y)[0], p, start)
            return solve_increasing(mixed, p, start, self._mixed(distance))

        return self._by_chunks(compute, self._point_dim)

    def interval(self, coverage: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds y with some probability, each entry by itself.

        :param coverage: The probability.
        """
        if not 0 < coverage < 1:
            hint = f" For {coverage:g} per cent pass {coverage / 100:g}." if 1 < coverage < 100 else ""
            raise ValueError(f"coverage must lie between 0 and 1, both excluded; got {coverage}.{hint}")
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def log_prob(self, y: Any) -> Tensor:
        r"""Log density, or log probability, of y at each point, joint over its tasks; shape ``N``.

        ``-dist.log_prob(y).mean()`` is the mean negative log predictive density.

        :param y: Targets, ``N`` or ``N x T``; NaN is missing. A point with tasks missing is scored on the others, one that
            is missing altogether gives NaN.
        """
        y = self._targets(y)
        dim = self._target_dim
        observed = ~torch.isnan(y)
        if not bool(observed.any()):
            return self._f.mean.new_full(y.shape[:-1] if dim == -2 else y.shape, torch.nan)
        filled = torch.where(observed, y, y[observed][0])
        has_labels = issubclass(self._kind, (BinaryMarginal, ClassesMarginal))
        if has_labels:
            self._check_labels(filled)

        def compute(marginal: Marginal, f: FunctionValues, rows: slice) -> Tensor:
            part, seen = (value.narrow(dim, rows.start, rows.stop - rows.start) for value in (filled, observed))
            if not (has_labels or self._kind is GaussianMarginal):
                part = self._in_support(marginal, f, part, seen)
            value = marginal.log_prob(f, part, seen)
            if self._weights is not None:
                log_weights = self._weights.to(value).log().reshape(-1, *(1 for _ in value.shape[1:]))
                value = torch.logsumexp(value + log_weights, dim=0)
            return torch.where(seen.any(-1) if dim == -2 else seen, value, torch.nan)

        return self._by_chunks(compute, -1)

    def sample(self, num_samples: int = 1) -> Tensor:
        """Draws of y, ``num_samples x N`` or ``num_samples x N x T``: the tasks of a point together, points independently.

        They come from torch's global random state.

        :param num_samples: How many.
        """

        def compute(marginal: Marginal, f: FunctionValues, rows: slice) -> Tensor:
            return self._draw(marginal, f, num_samples)

        return self._by_chunks(compute, self._target_dim)

    def _draw(self, marginal: Marginal, f: FunctionValues, num_samples: int) -> Tensor:
        if self._weights is None:
            return marginal.sample(f.map(lambda value: value.expand(num_samples, *value.shape)))
        num_points = f.mean.size(f.point_dim)
        component = torch.multinomial(self._weights.double(), num_samples * num_points, replacement=True)
        component = component.reshape(num_samples, num_points)
        points = torch.arange(num_points, device=f.mean.device)
        return marginal.sample(f.map(lambda value: value[component, points]))

    # -- targets ------------------------------------------------------------------------------------------------------

    @property
    def _y_shape(self) -> torch.Size:
        """The shape of the targets."""
        shape = self._f.mean.shape if self._weights is None else self._f.mean.shape[1:]
        if self._kind is ClassesMarginal:
            return shape[:-1]
        return shape[:-1] + self._event_shape if self._kind is SeveralFunctionsMarginal else shape

    @property
    def _target_dim(self) -> int:
        """The dimension of the targets that counts the points, from the end."""
        return self._point_dim if self._kind is not ClassesMarginal else -1

    def _targets(self, y: Any) -> Tensor:
        device = self._f.mean.device
        wide = torch.empty(0, dtype=torch.float64, device=device)
        y = as_tensor(y, wide) if isinstance(y, np.ndarray) else torch.as_tensor(y, device=device).double()
        wanted = self._y_shape
        if not any(y.shape == wanted[skipped:] for skipped in range(max(1, len(wanted) + self._target_dim + 1))):
            hint = " Squeeze its trailing dimension of one." if y.shape == (*wanted, 1) else ""
            raise ValueError(f"Targets must have shape {tuple(wanted)}; got {tuple(y.shape)}.{hint}")
        return y.expand(wanted)

    def _check_labels(self, y: Tensor) -> None:
        """Raise for labels that the likelihood cannot have meant, with the values found."""
        name = type(self._likelihood).__name__
        if self._is_binary:
            if not (bool(((y == 0) | (y == 1)).all()) or bool((y.abs() == 1).all())):
                raise ValueError(f"Labels of {name} are 0 and 1, or -1 and 1; {_range(y)}.")
            return
        num_classes = getattr(self._likelihood, "num_classes", self._f.mean.size(-1))
        if not bool(((y >= 0) & (y < num_classes) & (y == y.round())).all()):
            raise ValueError(f"Labels of {name} are integers from 0 to {num_classes - 1}; {_range(y)}.")

    def _in_support(self, marginal: Marginal, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """Targets, the missing ones filled with values that p(y|f) can have; raises for an observed one that it cannot have."""
        conditional = marginal.conditional(f.mean.unsqueeze(0))
        possible = support(conditional)
        outside = observed & ~possible.check(y)
        if bool(outside.any()):
            name, found = type(self._likelihood).__name__, _range(y[outside.reshape(-1, *y.shape).any(0)])
            is_one = all(torch.as_tensor(limit).numel() == 1 for limit in vars(possible).values())
            where = possible if is_one else "the support of p(y|f) at their point"
            raise ValueError(f"Targets of {name} must lie in {where}; {found}.")
        if bool(observed.all()):
            return y
        with seeded(self._seed, y.device):
            return torch.where(observed, y, conditional.sample().reshape(-1, *y.shape)[0])


def _range(values: Tensor) -> str:
    return f"got values from {values.min().item():g} to {values.max().item():g}"


def _functions_last(f: FunctionValues) -> FunctionValues:
    """A batch of one GP per class, ``C x N``, as one with several functions, ``N x C``."""
    if f.is_several or f.mean.dim() < 2:
        return f
    return FunctionValues(f.mean.mT, f.variance.mT, None, True)


def _per_point(value: Any, rows: slice) -> Any:
    return value[..., rows] if isinstance(value, Tensor) and value.dim() else value


def distribution_of_y(
    likelihood: Any,
    q: MultivariateNormal,
    *,
    inputs: Tensor | None = None,
    weights: Tensor | None = None,
    batch_size: int = 1024,
    num_samples: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> PredictiveDistribution:
    """The distribution of y from q(f), whatever made it.

    :param likelihood: Any likelihood of GPyTorch or this package, or one of your own.
    :param q: q(f), ``... x N`` or ``... x N x T``.
    :param inputs: The points, ``N x D``, for noise that depends on them.
    :param weights: Weights of a mixture over the first dimension of q(f), as of a deep GP; None for no mixture.
    :param batch_size: Points per chunk.
    :param num_samples: Draws where there is no rule, as for softmax; default 1024.
    :param seed: Of the draws.
    :param kwargs: Arguments of the likelihood: ``noise=``, one variance per point, for fixed noise; ``tasks=``, the task of
        each point, for :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood`; those that ``forward`` of a likelihood of
        your own names, one value per point.

    Example:
        >>> q = tighter_gp.predict(model, test_x)
        >>> tighter_gp.predict_y(likelihood, q).mean.shape == test_y.shape
        True
    """
    check_arguments(likelihood, kwargs)
    with torch.no_grad():
        f = function_values(q)
        if takes_noise(likelihood):
            f, kwargs = add_noise(likelihood, f, inputs=inputs, **kwargs), {}
    return PredictiveDistribution(
        likelihood,
        f.map(Tensor.detach),
        arguments={name: torch.as_tensor(value, device=f.mean.device) for name, value in kwargs.items()},
        weights=weights,
        batch_size=batch_size,
        num_samples=num_samples or 1024,
        seed=seed,
    )


def log_density(likelihood: Any, q: MultivariateNormal, y: Any, **kwargs: Any) -> Tensor:
    r"""Log predictive density per point, :math:`\log \int p(y_n \mid f_n)\, q(f_n)\, df_n`, joint over the tasks of a point.

    :param likelihood: Any likelihood of GPyTorch or this package, or one of your own.
    :param q: q(f), ``... x N`` or ``... x N x T``.
    :param y: Targets, ``N`` or ``N x T``; NaN is missing, and gives NaN for a point without any.
    :param kwargs: As of :func:`~tighter_gp.predict_y`.
    :return: ``... x N``, without a graph.

    Example:
        >>> q = tighter_gp.predict(model, test_x)
        >>> tighter_gp.log_density(likelihood, q, test_y).shape == test_y.shape
        True
    """
    owner = next(base for base in type(likelihood).__mro__ if "log_marginal" in vars(base))
    if not owner.__module__.startswith(("gpytorch.", "tighter_gp.")):  # a formula of the user's own
        with torch.no_grad():
            return likelihood.log_marginal(y, q, **kwargs)
    return distribution_of_y(likelihood, q, **kwargs).log_prob(y)
