r"""q(f) at new inputs, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP, ApproximateGP, ExactGP
from torch import Tensor

from ..collapsed import CollapsedGP, TighterInducingPointKernel
from ..data import as_tensor, input_rows, reference
from ..draws import seeded
from ..maths.linalg import full_precision
from ..modes import chunks, temporary_mode
from ..posterior import has_own_call, posterior_of
from ..strategies import TighterStrategy
from .last_term import LAST_TERMS, LastTerm
from .points import Marginals, joined, marginals

# From a chunk of inputs, ``... x B x D``, to q(f) there.
Evaluate = Callable[[Tensor], Marginals]

# From inputs to what the GP sees of them.
Transform = Callable[[Tensor], Tensor]


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

    For everything that trains: one output or several, softmax, deep GPs, SOLVE-GP, collapsed models, a network before a GP, a
    GPLVM at latents, BoTorch's models, GPyTorch's own. Memory is that of the answer and of one chunk.

    ==============  =====================================================  ================================
    ``last_term``   :math:`V`                                              cost beyond ``"drop"``
    ==============  =====================================================  ================================
    ``"drop"``      0: SVGP's formula
    ``"exact"``     :math:`D^{-1/2}(I-M)D^{-1/2}`                          :math:`O(N^3)` once
    ``"optimal"``   :math:`(D + \Sigma)^{-1}`, Gaussian noise              :math:`O(N^3)` once
    ``"subset"``    the exact one of a few training points                 :math:`O(NM)` per test point
    ==============  =====================================================  ================================

    For an uncollapsed model ``"drop"`` is what ``model(x)`` predicts. For a collapsed one it is SGPR's own formula, where
    GPyTorch's eval mode corrects the diagonal of the training covariance, as FITC does, and so predicts otherwise.
    All but ``"drop"`` are computed in float64.

    :param model: A trained model; it is left in the mode it was in. A model of any other make takes part by a method
        ``f_at(x)`` that returns mean and variance of f at each row of ``x``, ``... x B`` both; without one it is called in eval
        mode. Of a model of BoTorch the input transform is applied; one with an outcome transform is refused, since its f is
        that of other targets than yours: use its ``posterior``.
    :param x: Test inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is in
        memory at a time.
    :param last_term: See the table; all but ``"drop"`` for one output, on a strategy or a collapsed model of this package.
    :param likelihood: For a last term: the likelihood, for the scales :math:`m_n` of ``conditional="optimal"``. A collapsed
        model has its own, and its own data.
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
    if last_term == "drop":
        if likelihood is not None or train_x is not None or noise is not None:
            raise TypeError("likelihood=, train_x= and noise= are for a last_term; predict_y takes a likelihood.")
        return f_at(model, x, batch_size, num_samples, seed).distribution()
    if last_term not in LAST_TERMS:
        raise ValueError(f"Unknown last_term {last_term!r}; choose 'drop', {', '.join(map(repr, LAST_TERMS))}.")
    like = reference(model)
    noise = None if noise is None else as_tensor(noise, like)
    given = None if train_x is None else input_rows(train_x, like, "train_x")[:]

    def with_term(inner: Any, transform: Transform) -> Evaluate:
        points = None if given is None else transform(given)
        return LastTerm(posterior_of(inner, torch.float64), last_term, likelihood, points, noise, subset)

    return f_at(model, x, batch_size, make=with_term).distribution()


@torch.no_grad()
def f_at(
    model: Any,
    x: Tensor | np.ndarray,
    batch_size: int = 1024,
    num_samples: int | None = None,
    seed: int = 0,
    make: Callable[[Any, Transform], Evaluate] | None = None,
) -> Marginals:
    """q(f) of any model at each row of ``x``; parameters as of :func:`predict`.

    :param make: Makes what evaluates a chunk, instead of what fits the model.
    """
    inner, transform = _unwrapped(model)
    like = reference(model)
    rows = input_rows(x, like)
    if not len(rows):  # the shapes of the answer are those of one row
        one = f_at(model, like.new_zeros(*rows.shape[:-2], 1, rows.shape[-1]), batch_size, num_samples, seed, make)
        return one.rows(slice(0, 0))
    spans = list(chunks(len(rows), batch_size))
    with temporary_mode(model, False), full_precision(like.device.type):
        if make is not None:
            evaluate = make(inner, transform)
        elif hasattr(inner, "f_at"):
            evaluate = lambda x: Marginals(*inner.f_at(x))
        elif is_ours(inner):
            posterior = posterior_of(inner)
            if len(spans) > 1:  # keep the factor of the inducing points
                posterior = posterior.factorized(transform(rows[spans[0]]))
            evaluate = lambda x: Marginals(*posterior.f_at(x))
        else:
            with seeded(seed, like.device):
                return joined([_called(inner, transform(rows[span]), num_samples) for span in spans])
        parts = [evaluate(transform(rows[span])) for span in spans]
    return joined(parts).map(lambda value: value.to(like.dtype))


def _called(model: Any, x: Tensor, num_samples: int | None) -> Marginals:
    """q(f) as the model returns it in eval mode, each point by itself."""
    with settings.num_likelihood_samples(num_samples or settings.num_likelihood_samples.value()):
        q = model(x)
    if not isinstance(q, MultivariateNormal):
        raise TypeError(f"The model must return a MultivariateNormal in eval mode; got {type(q).__name__}.")
    return marginals(q)


def is_ours(model: Any) -> bool:
    """Whether q(f) comes from a strategy or a collapsed model of this package, with nothing around it."""
    if isinstance(model, ExactGP):
        return any(isinstance(module, TighterInducingPointKernel) for module in model.modules())
    if isinstance(model, ApproximateGP):
        return isinstance(model.variational_strategy, TighterStrategy) and not has_own_call(model)
    return isinstance(model, CollapsedGP)


def _unwrapped(model: Any) -> tuple[Any, Transform]:
    """The GP inside a model of BoTorch, and what its inputs become on the way to it."""
    if getattr(model, "outcome_transform", None) is not None:
        raise TypeError(
            "This model transforms its targets, and its likelihood is for the transformed ones; use its posterior."
        )
    # A call of BoTorch's models leaves the transform out in eval mode.
    transform = model.transform_inputs if getattr(model, "input_transform", None) is not None else lambda x: x
    is_wrapper = hasattr(model, "transform_inputs") and isinstance(getattr(model, "model", None), GP)
    return (model.model if is_wrapper else model), transform
