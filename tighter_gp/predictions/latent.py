r"""q(f) at new inputs, for every kind of model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP, ApproximateGP, ExactGP
from torch import Tensor

from ..checks import check_dims, raise_if_not_finite
from ..collapsed import CollapsedGP
from ..data import Rows, input_rows, reference
from ..draws import seeded
from ..kernels import TighterInducingPointKernel
from ..maths.linalg import full_precision
from ..modes import chunks, temporary_mode
from ..posterior import has_own_call, posterior_of
from ..strategies import TighterStrategy
from .last_term import LAST_TERMS, LastTerm, training_points
from .pointwise import FunctionValues, as_distribution, function_values, joined


@torch.no_grad()
def predict(
    model: Any,
    x: Tensor | np.ndarray,
    last_term: str = "drop",
    *,
    likelihood: Likelihood | None = None,
    train_x: Tensor | np.ndarray | None = None,
    noise: Tensor | np.ndarray | None = None,
    subset: int | Tensor = 16,
    batch_size: int = 1024,
    num_samples: int | None = None,
    seed: int = 0,
) -> MultivariateNormal:
    r"""q(f) at test points, each by itself: a chunk of points at a time, without a graph.

    For everything that trains: one output or several, softmax, deep GPs, SOLVE-GP, collapsed models, a GPLVM at latents,
    BoTorch's models. Memory is that of the answer and of one chunk.

    ==============  =====================================================  ================================
    ``last_term``   :math:`V`                                              cost beyond ``"drop"``
    ==============  =====================================================  ================================
    ``"drop"``      0: SVGP's formula
    ``"exact"``     :math:`D^{-1/2}(I-M)D^{-1/2}`                          :math:`O(N^3)` once
    ``"optimal"``   :math:`(D + \Sigma)^{-1}`, Gaussian noise              :math:`O(N^3)` once
    ``"subset"``    the exact one of a few training points                 :math:`O(NM)` per test point
    ``"diagonal"``  :math:`\mathrm{diag}((1 - m_n)/d_n)`, clamped          :math:`O(NM)` per test point
    ==============  =====================================================  ================================

    For an uncollapsed model ``"drop"`` is what ``model(x)`` predicts. For a collapsed one it is SGPR's own formula, where
    GPyTorch's eval mode corrects the diagonal of the training covariance, as FITC does, and so predicts otherwise.
    ``"diagonal"`` counts correlated training points again and again, can turn negative and is then clamped with a
    warning; prefer ``"subset"``. All but ``"drop"`` are computed in float64.

    :param model: A trained model; it is left in the mode it was in. Strategies and collapsed models of this package take
        the short way, any other model is called in eval mode. Of a model of BoTorch the input transform is applied; one
        with an outcome transform is refused, since its f is that of other targets than yours: use its ``posterior``.
    :param x: Test inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is in
        memory at a time.
    :param last_term: See the table; all but ``"drop"`` for one output, on a strategy or a collapsed model of this package.
    :param likelihood: For a last term: the likelihood, for the scales :math:`m_n` of ``conditional="optimal"``. With
        ``"drop"`` it is an error, as are the next two; a collapsed model has all three.
    :param train_x: For a last term: the training inputs.
    :param noise: For a last term: noise variances of the training points for
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`, if not stored there.
    :param subset: For ``"subset"``: how many training points for each test point, those most correlated with it given
        the inducing variables; or the positions of the training points to use for all.
    :param batch_size: Test points per chunk.
    :param num_samples: Draws of the hidden layers of a deep GP; default
        :class:`gpytorch.settings.num_likelihood_samples`.
    :param seed: Of these draws; the global random state is left as it was.
    :return: A :class:`~gpytorch.distributions.MultivariateNormal` with diagonal covariance, or a
        :class:`~gpytorch.distributions.MultitaskMultivariateNormal` in which the tasks of one point keep their covariance
        and points are independent. A batch of models, the outputs of a GPLVM and the draws of a deep GP are batch
        dimensions. ``likelihood(...)`` of it adds the noise.

    Example:
        >>> q = tighter_gp.predict(model, test_x, "subset", likelihood=likelihood, train_x=train_x)
        >>> q.mean.shape == test_x.shape[:-1]
        True
    """
    if not isinstance(x, (Tensor, np.ndarray)):
        raise TypeError(
            f"x must be a tensor or an array of test inputs, got {type(x).__name__}: call predict(model, x), with a "
            "likelihood, where one is needed, as likelihood=."
        )
    if last_term not in LAST_TERMS:
        raise ValueError(f"Unknown last_term {last_term!r}; choose {', '.join(map(repr, LAST_TERMS))}.")
    inner, transform = unwrapped(model)
    _refuse_unused(last_term, inner, likelihood=likelihood, train_x=train_x, noise=noise)
    like = reference(model)
    rows = input_rows(x, like)
    if not len(rows):
        raise ValueError("There are no test points.")
    with temporary_mode(model, False), full_precision(like.device.type):
        if last_term != "drop":
            given = None if train_x is None else transform(input_rows(train_x, like, "train_x")[:])
            variances = None if noise is None else Rows(noise, like, name="noise")[:]
            evaluate: Any = _WithLastTerm(inner, last_term, likelihood, given, variances, subset)
        else:
            evaluate = _Projected(inner) if is_ours(inner) else _Called(inner, num_samples)

        num_dims = None if isinstance(evaluate, _Called) else evaluate.posterior.num_dims

        def parts() -> Iterator[tuple[slice, FunctionValues]]:
            for part in chunks(len(rows), batch_size):
                inputs = transform(rows[part])
                if num_dims is not None:
                    check_dims(torch.Size([*rows.shape[:-1], inputs.size(-1)]), num_dims)
                raise_if_not_finite(inputs)
                yield part, evaluate(inputs)

        with seeded(seed, like.device) if isinstance(evaluate, _Called) else torch.no_grad():
            whole = joined(parts(), len(rows), like.dtype)
    if isinstance(evaluate, _WithLastTerm) and evaluate.num_clamped:
        warnings.warn(
            f"last_term='diagonal' made the residual variance negative at {evaluate.num_clamped} of "
            f"{whole.variance.numel()} test points; it was clamped to zero there. Use last_term='subset'.",
            UserWarning,
            stacklevel=2,
        )
    return as_distribution(whole)


def _refuse_unused(last_term: str, model: Any, **given: Any) -> None:
    """Raise for arguments that only a last term takes, and for those that a collapsed model has itself."""
    own = None
    if last_term == "drop":
        reason = "last_term='drop' needs no more"
    elif isinstance(model, (ExactGP, CollapsedGP)):
        reason, own = "A collapsed model has its own data and likelihood", model.likelihood
    else:
        return
    unused = [f"{name}=" for name, value in given.items() if value is not None and value is not own]
    if unused:
        hint = " predict_y takes a likelihood, and its noise= at the test points." if last_term == "drop" else ""
        raise TypeError(f"{reason}: leave out {', '.join(unused)}.{hint}")


def is_ours(model: Any) -> bool:
    """Whether q(f) comes from a strategy or a collapsed model of this package, with nothing around it."""
    if isinstance(model, ExactGP):
        return any(isinstance(module, TighterInducingPointKernel) for module in model.modules())
    if isinstance(model, CollapsedGP):
        return True
    is_plain = isinstance(model, ApproximateGP) and not has_own_call(model)
    return is_plain and isinstance(getattr(model, "variational_strategy", None), TighterStrategy)


def unwrapped(model: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The GP inside a model of BoTorch, and what its inputs become on the way to it."""
    if getattr(model, "outcome_transform", None) is not None:
        raise TypeError(
            "This model transforms its targets, and its likelihood is for the transformed ones; use its posterior."
        )
    transform: Callable[[Tensor], Tensor] = lambda x: x
    if getattr(model, "input_transform", None) is not None:
        transform = model.transform_inputs  # which a call leaves out in eval mode
    inner = getattr(model, "model", None)
    is_wrapper = hasattr(model, "transform_inputs") and isinstance(inner, GP)
    return (inner if is_wrapper else model), transform


class _Projected:
    """q(f) from the projection, with SVGP's conditional."""

    def __init__(self, model: Any) -> None:
        self.posterior = posterior_of(model)

    def __call__(self, x: Tensor) -> FunctionValues:
        return FunctionValues(*self.posterior.moments(self.posterior.projector(x)))


class _WithLastTerm:
    """q(f) from the projection, in float64, with the last term of the variance.

    :ivar num_clamped: At how many points a residual variance was negative and became zero.
    """

    def __init__(
        self,
        model: Any,
        last_term: str,
        likelihood: Likelihood | None,
        train_x: Tensor | None,
        noise: Tensor | None,
        subset: int | Tensor,
    ) -> None:
        self.posterior = posterior_of(model, torch.float64)
        if not is_ours(model):
            raise TypeError(
                f"{type(model).__name__} does something to its inputs before they reach the strategy, in a __call__ of its own; "
                "the last term is for models without. Use last_term='drop'."
            )
        training = training_points(self.posterior, last_term, likelihood, train_x, noise)
        self.last_term = LastTerm(self.posterior.projector, training, last_term, subset)
        self.counts, self.num_clamped = last_term == "diagonal", 0

    def __call__(self, x: Tensor) -> FunctionValues:
        points = self.posterior.projector(x)
        mean, variance = self.posterior.moments(points)
        residual = points.residual - self.last_term(x, points)
        self.num_clamped += int((residual < 0).sum()) if self.counts else 0
        return FunctionValues(mean, variance - (points.residual - residual.clamp_min(0.0)))


class _Called:
    """q(f) as the model returns it in eval mode, each point by itself."""

    def __init__(self, model: Any, num_samples: int | None) -> None:
        self.model, self.num_samples = model, num_samples or settings.num_likelihood_samples.value()

    def __call__(self, x: Tensor) -> FunctionValues:
        with settings.num_likelihood_samples(self.num_samples):
            q = self.model(x)
        if not isinstance(q, MultivariateNormal):
            raise TypeError(f"The model must return a MultivariateNormal in eval mode; got {type(q).__name__}.")
        return function_values(q)
