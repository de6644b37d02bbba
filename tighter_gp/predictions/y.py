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
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from torch import Tensor

from ..data import Rows, as_tensor, chunks, input_rows, num_rows
from ..draws import seeded
from ..likelihoods.family import family
from ..likelihoods.targets import check_arguments, check_targets
from ..maths.quadrature import smallest_integer, solve_increasing
from .densities import Classes, Density, Gaussian, OneFunction, VaryingNoise, kind_of, log_mean
from .f import f_at
from .points import Marginals, add_noise, marginals

_LARGEST = 2**22  # entries of one tensor on the way


@torch.no_grad()
def predict_y(
    model: Any,
    likelihood: Any,
    x: Tensor | np.ndarray,
    *,
    batch_size: int = 1024,
    num_samples: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> PredictiveDistribution:
    r"""What the model says about y at test points, each by itself: means, intervals, densities, classes, samples.

    Every likelihood of GPyTorch and of this package has its own formula or quadrature rule; softmax is integrated over draws
    of all its functions together. Tasks that are correlated stay so within a point.

    :param model: A trained model, as for :func:`~tighter_gp.predict`; it is left in the mode it was in. A deep GP is a mixture
        over draws of its hidden layers.
    :param likelihood: Its likelihood.
    :param x: Test inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is in
        memory at a time.
    :param batch_size: Points per chunk.
    :param num_samples: Draws where there is no rule: of the functions of a softmax, default 1024, or of the hidden layers
        of a deep GP, default 64.
    :param seed: Of these draws; the global random state is left as it was.
    :param kwargs: Arguments of the likelihood: ``noise=``, one variance per test point, for fixed noise; ``tasks=``, the
        task of each point, for :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood` without ``task_feature_index``;
        those that ``forward`` of a likelihood of your own names, one value per point.
    :return: A :class:`~tighter_gp.PredictiveDistribution`.

    Example:
        >>> y = tighter_gp.predict_y(model, likelihood, test_x)
        >>> nlpd = -y.log_prob(test_y).mean()
        >>> low, high = y.interval(0.95)
        >>> low.shape == test_y.shape
        True
    """
    for name, value in kwargs.items():
        if np.ndim(value) and np.shape(value)[-1] != num_rows(x):
            raise ValueError(f"{name}= must have one value per point, {num_rows(x)}; got {tuple(np.shape(value))}.")
    is_deep = isinstance(model, DeepGP)
    if isinstance(model, DSPP):
        raise TypeError(
            "The nodes of a DSPP have weights of their own, which predict_y does not know; use its likelihood."
        )
    own = getattr(model, "likelihood", likelihood)
    if hasattr(model, "f_at") and own is not likelihood:
        raise ValueError(f"A {type(model).__name__} has refined its noise: pass its own .likelihood.")
    f = f_at(model, x, batch_size=batch_size, num_samples=(num_samples or 64) if is_deep else None, seed=seed)
    return PredictiveDistribution(
        likelihood,
        f,
        inputs=input_rows(x, f.mean),
        is_mixture=is_deep,
        batch_size=batch_size,
        num_samples=1024 if num_samples is None or is_deep else num_samples,
        seed=seed,
        **kwargs,
    )


class PredictiveDistribution:
    r"""The distribution of y at each point by itself, as :func:`~tighter_gp.predict_y` returns it.

    What needs an integral is computed lazily, a chunk of points at a time, in float64 and without a graph. The likelihood is
    copied: what is trained later does not change the answer.

    :param likelihood: Any likelihood of GPyTorch or this package, or one of your own.
    :param q: q(f), ``... x N`` or ``... x N x T``, from whatever made it.
    :param inputs: The points, ``N x D``, for noise that depends on them.
    :param is_mixture: Whether y is a mixture over the first dimension of f, as for a deep GP.
    :param batch_size: Points per chunk.
    :param num_samples: Draws, where there is no rule.
    :param seed: Of the draws.
    :param arguments: Further arguments of the likelihood, as of :func:`~tighter_gp.predict_y`.

    Example:
        >>> y = tighter_gp.PredictiveDistribution(likelihood, tighter_gp.predict(model, test_x))
        >>> low, high = y.interval(0.95)
        >>> bool((low < y.mean).all() and (y.mean < high).all())
        True
        >>> nlpd = -y.log_prob(test_y).mean()
    """

    @torch.no_grad()
    def __init__(
        self,
        likelihood: Any,
        q: MultivariateNormal | Marginals,
        *,
        inputs: Any = None,
        is_mixture: bool = False,
        batch_size: int = 1024,
        num_samples: int = 1024,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        check_arguments(likelihood, arguments)
        f = q if isinstance(q, Marginals) else marginals(q).map(Tensor.detach)
        rows_of = lambda value: Rows(value, f.mean)[:] if isinstance(value, np.ndarray) else value
        given = {name: torch.as_tensor(rows_of(value), device=f.mean.device) for name, value in arguments.items()}
        is_gaussian = family(likelihood).is_gaussian_noise
        if is_gaussian:
            f, given = add_noise(likelihood, f, inputs, **given), {}
        else:
            likelihood = copy.deepcopy(likelihood).double().requires_grad_(False)
        self._likelihood, self._f, self._arguments = likelihood, f, given
        self._num_components = f.mean.size(0) if is_mixture else 0
        self._batch_size, self._seed = batch_size, seed
        # The components of a mixture are draws themselves.
        self._num_samples = max(16, num_samples // self._num_components) if is_mixture else num_samples
        self._kind = Gaussian if is_gaussian else kind_of(likelihood, *self._part(slice(0, 1)))
        self._is_exact = is_gaussian and not is_mixture  # y is Gaussian

    def __repr__(self) -> str:
        shape = tuple(self._f.mean.shape)
        return f"{type(self).__name__}({type(self._likelihood).__name__}, f of shape {shape})"

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _part(self, rows: slice) -> tuple[Marginals, dict[str, Tensor]]:
        """F and the arguments of the likelihood at some points."""
        given = {name: value[..., rows] if value.dim() else value for name, value in self._arguments.items()}
        return self._f.rows(rows).map(Tensor.double), given

    def _density(self, rows: slice) -> Density:
        part, given = self._part(rows)
        return self._kind(self._likelihood, part, given, self._num_samples, self._seed)

    @torch.no_grad()
    def _by_chunks(self, compute: Callable[[Density, slice], Tensor], point_dim: int) -> Tensor:
        """Results of all chunks, joined along the dimension that counts the points."""
        f, num_points = self._f.mean, self._f.num_points
        nodes = 256 if issubclass(self._kind, OneFunction) else self._num_samples
        size = max(1, min(self._batch_size, _LARGEST * num_points // (nodes * max(1, f.numel()))))
        parts = list(chunks(num_points, size)) or [slice(0, 0)]
        return torch.cat([compute(self._density(rows), rows).to(f.dtype) for rows in parts], point_dim)

    def _mixed(self, values: Tensor) -> Tensor:
        """The mean over the components of a mixture."""
        return values.mean(0) if self._num_components else values

    @functools.cached_property
    def _y_shape(self) -> torch.Size:
        """The shape of the targets."""
        shape = self._f.mean.shape[1:] if self._num_components else self._f.mean.shape
        if issubclass(self._kind, Classes | VaryingNoise):
            return shape[:-1]
        if self._kind is not Density:
            return shape
        one = self._density(slice(0, 1))  # its likelihood says what one y of several functions is
        return shape[:-1] + one.conditional(one.f.mean.unsqueeze(0)).mean.shape[one.f.mean.dim() :]

    @property
    def _y_dim(self) -> int:
        """The dimension of the targets that counts the points, from the end."""
        return self._f.point_dim if len(self._y_shape) + bool(self._num_components) == self._f.mean.dim() else -1

    # -- answers ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        if self._is_exact:
            return self._f.mean, self._f.variance

        def compute(density: Density, rows: slice) -> Tensor:
            mean, variance = density.moments()
            total = self._mixed(mean)
            if self._num_components:
                variance = self._mixed(variance + (mean - total).square())
            return torch.stack([total, variance])

        mean, variance = self._by_chunks(compute, -2 if issubclass(self._kind, Classes) else self._y_dim)
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
        if not self._is_exact or not self._f.is_several:
            raise TypeError("A covariance is for several tasks with Gaussian noise only; use variance.")
        return torch.diag_embed(self._f.variance) if self._f.covariance is None else self._f.covariance

    @property
    def probs(self) -> Tensor:
        """Probability of class 1, ``N``, for two classes; of each class, ``N x C``, for several."""
        if not self._kind.has_classes:
            raise TypeError(f"{type(self._likelihood).__name__} has no classes, and no probs; use mean and quantile.")
        return self.mean

    def quantile(self, p: float | Sequence[float] | Tensor) -> Tensor:
        """The value below which y lies with probability ``p``, like the mean; for counts the smallest integer that reaches it.

        :param p: Between 0 and 1, both excluded. Several are the first dimension of the answer.
        """
        levels = torch.as_tensor(p, dtype=torch.float64, device="cpu")
        if levels.dim():
            return torch.stack([self.quantile(level) for level in levels.tolist()])
        level = levels.item()
        if not 0 < level < 1:
            raise ValueError(f"A quantile needs a probability between 0 and 1, both excluded; got {level:g}.")
        if self._kind.has_classes:
            raise TypeError(f"{type(self._likelihood).__name__} predicts classes, which have no quantiles; use probs.")
        if self._is_exact:
            value = self._f.mean.double() + NormalDist().inv_cdf(level) * self._f.variance.double().sqrt()
            return value.to(self._f.mean.dtype)
        return self._by_chunks(lambda density, rows: self._solve(density, level), self._y_dim)

    def _solve(self, density: Density, p: float) -> Tensor:
        """Where the distribution function reaches ``p``."""
        function = density.distribution_function(p)
        if function is None:
            with seeded(self._seed, self._f.mean.device):
                draws = self._draw(density, self._num_samples)
            return draws.sort(0).values[math.ceil(p * len(draws)) - 1]

        def mixed(y: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = function(y)
            return self._mixed(value), self._mixed(slope)

        place, distance = map(self._mixed, density.around())
        if density.is_discrete:
            return smallest_integer(lambda y: mixed(y)[0], p, place)
        return solve_increasing(mixed, p, place, distance)

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
        observed = ~torch.isnan(y)
        check_targets(self._likelihood, y[observed])
        dim, has_tasks = self._y_dim, self._y_dim == -2

        def compute(density: Density, rows: slice) -> Tensor:
            part, seen = (value.narrow(dim, rows.start, rows.stop - rows.start) for value in (y, observed))
            value = density.log_prob(part.nan_to_num(0.0), seen)
            if self._num_components:
                value = log_mean(value, value.new_full((len(value),), 1 / len(value)))
            return torch.where(seen.any(-1) if has_tasks else seen, value, torch.nan)

        return self._by_chunks(compute, -1)

    def _targets(self, y: Any) -> Tensor:
        """Targets in float64, in the shape of y."""
        wide = torch.empty(0, dtype=torch.float64, device=self._f.mean.device)
        y = as_tensor(y, wide) if isinstance(y, np.ndarray) else torch.as_tensor(y, device=wide.device).double()
        wanted = self._y_shape
        if y.dim() > len(wanted) or y.shape[self._y_dim :] != wanted[self._y_dim :]:
            hint = " Squeeze its trailing dimension of one." if y.shape == (*wanted, 1) else ""
            raise ValueError(f"Targets must have shape {tuple(wanted)}; got {tuple(y.shape)}.{hint}")
        return y.expand(wanted)

    def sample(self, num_samples: int = 1) -> Tensor:
        """Draws of y, ``num_samples x N`` or ``num_samples x N x T``: the tasks of a point together, points independently.

        They come from torch's global random state. Labels of two classes are 0 and 1, also of a model trained on -1 and 1.

        :param num_samples: How many.
        """
        return self._by_chunks(lambda density, rows: self._draw(density, num_samples), self._y_dim)

    def _draw(self, density: Density, num_samples: int) -> Tensor:
        if self._num_components:
            num_points = density.f.num_points
            component = torch.randint(self._num_components, (num_samples, num_points), device=self._f.mean.device)
            points = torch.arange(num_points, device=component.device)
            density.f = density.f.map(lambda value: value[component, points])
        else:
            density.f = density.f.map(lambda value: value.expand(num_samples, *value.shape))
        return density.sample()


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
    if not owner.__module__.startswith(("gpytorch.", "tighter_gp.")):  # a formula of your own
        with torch.no_grad():
            return likelihood.log_marginal(y, q, **kwargs)
    return PredictiveDistribution(likelihood, q, **kwargs).log_prob(y)
