"""What a model says about y at each point: moments, quantiles, densities, classes, samples."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from ..data import Rows, num_rows
from ..likelihoods.family import family
from ..likelihoods.targets import check_arguments, check_targets
from ..modes import chunks
from .densities import Density, Gaussian, OneFunction, entries, kind_of
from .f import f_at
from .points import Marginals, add_noise, marginals

_LARGEST = 2**22  # entries of one tensor on the way
_CLASSES = (Bernoulli, Categorical)


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
    if isinstance(model, DSPP):
        raise TypeError("The nodes of a DSPP have weights of their own, unknown to predict_y; use its likelihood.")
    if hasattr(model, "f_at") and getattr(model, "likelihood", likelihood) is not likelihood:
        raise ValueError(f"A {type(model).__name__} has refined its noise: pass its own .likelihood.")
    num_layer_samples = None
    if isinstance(model, DeepGP):
        num_layer_samples, num_samples = num_samples or 64, None
    f = f_at(model, x, batch_size, num_layer_samples, seed)
    return PredictiveDistribution(
        likelihood,
        f,
        inputs=x,
        is_mixture=num_layer_samples is not None,
        batch_size=batch_size,
        num_samples=num_samples or 1024,
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
        given = {name: _tensor(value, f.mean) for name, value in arguments.items()}
        self._is_mixture, self._batch_size, self._seed = is_mixture, batch_size, seed
        # The components of a mixture are draws themselves.
        self._num_samples = max(16, num_samples // len(f.mean)) if is_mixture else num_samples
        num_dims = f.mean.dim() - f.is_several  # up to that of the points
        if family(likelihood).is_gaussian_noise:
            self._likelihood, self._f, self._arguments = likelihood, add_noise(likelihood, f, inputs, **given), {}
            self._kind: type[Density] = Gaussian
            self._base, tasks = Normal, f.mean.shape[num_dims:]
        else:
            self._likelihood, self._f, self._arguments = copy.deepcopy(likelihood).double(), f, given
            self._kind = kind_of(likelihood, f)
            first = self._density(slice(0, 1))  # its likelihood says what one y is
            conditional = first.conditional(first.f.mean.unsqueeze(0))
            shape = conditional.batch_shape + conditional.event_shape  # 1 x ... x N, or 1 x ... x N x T
            self._base, tasks = type(entries(conditional)), shape[1 + num_dims :]
        self._y_shape = f.mean.shape[int(is_mixture) : num_dims] + tasks  # [..., N] or [..., N, T]
        self._y_dim = -1 - len(tasks)  # the dimension of the targets that counts the points
        self._is_exact = self._kind is Gaussian and not is_mixture  # y is Gaussian

    def __repr__(self) -> str:
        shape = tuple(self._f.mean.shape)
        return f"{type(self).__name__}({type(self._likelihood).__name__}, f of shape {shape})"

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _density(self, rows: slice) -> Density:
        given = {name: value[..., rows] if value.dim() else value for name, value in self._arguments.items()}
        f = self._f.rows(rows).map(Tensor.double)  # integrals are in float64
        return self._kind(self._likelihood, f, given, self._is_mixture, self._num_samples, self._seed)

    @torch.no_grad()
    def _by_chunks(self, compute: Callable[[Density, slice], Tensor], point_dim: int) -> Tensor:
        """Results of all chunks, joined along the dimension that counts the points."""
        f, num_points = self._f.mean, self._f.num_points
        nodes = 256 if issubclass(self._kind, OneFunction) else self._num_samples
        size = max(1, min(self._batch_size, _LARGEST * num_points // (nodes * max(1, f.numel()))))
        parts = list(chunks(num_points, size)) or [slice(0, 0)]
        return torch.cat([compute(self._density(rows), rows).to(f.dtype) for rows in parts], point_dim)

    # -- answers ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        if self._is_exact:
            return self._f.mean, self._f.variance
        dim = self._y_dim - issubclass(self._base, Categorical)  # the classes are the last
        mean, variance = self._by_chunks(lambda density, rows: torch.stack(density.moments()), dim)
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
        if not issubclass(self._base, _CLASSES):
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
        if issubclass(self._base, _CLASSES):
            raise TypeError(f"{type(self._likelihood).__name__} predicts classes, which have no quantiles; use probs.")
        if self._is_exact:
            value = self._f.mean.double() + NormalDist().inv_cdf(level) * self._f.variance.double().sqrt()
            return value.to(self._f.mean.dtype)
        return self._by_chunks(lambda density, rows: density.quantile(level), self._y_dim)

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
        observed, has_tasks = ~torch.isnan(y), self._y_dim == -2
        check_targets(self._likelihood, y[observed])
        y = (y > 0).to(y) if issubclass(self._base, Bernoulli) else y.nan_to_num(0.0)  # labels may be -1 and 1

        def compute(density: Density, rows: slice) -> Tensor:
            place = (..., rows, slice(None)) if has_tasks else (..., rows)
            seen = observed[place]
            return torch.where(seen.any(-1) if has_tasks else seen, density.log_prob(y[place], seen), torch.nan)

        return self._by_chunks(compute, -1)

    def _targets(self, y: Any) -> Tensor:
        """Targets in float64, in the shape of y."""
        y, wanted = _tensor(y, self._f.mean.new_empty(0, dtype=torch.float64)).double(), self._y_shape
        if y.dim() > len(wanted) or y.shape[self._y_dim :] != wanted[self._y_dim :]:
            hint = " Squeeze its trailing dimension of one." if y.shape == (*wanted, 1) else ""
            raise ValueError(f"Targets must have shape {tuple(wanted)}; got {tuple(y.shape)}.{hint}")
        return y.expand(wanted)

    def sample(self, num_samples: int = 1) -> Tensor:
        """Draws of y, ``num_samples x N`` or ``num_samples x N x T``: the tasks of a point together, points independently.

        They come from torch's global random state. Labels of two classes are 0 and 1, also of a model trained on -1 and 1.

        :param num_samples: How many.
        """
        return self._by_chunks(lambda density, rows: density.sample(num_samples), self._y_dim)


def _tensor(values: Any, like: Tensor) -> Tensor:
    """Numbers as a tensor on the device of another; floats of an array in its dtype."""
    values = Rows(values, like, name="y")[:] if isinstance(values, np.ndarray) else values
    return torch.as_tensor(values, device=like.device)


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
