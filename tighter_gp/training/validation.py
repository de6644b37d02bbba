"""The score of a model on held-out data."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from .._modes import temporary_mode
from ..full_data import chunks
from ..predictive import predict
from ..strategies._tighter_strategy import _TighterStrategy


@torch.no_grad()
def mean_nlpd(model: Any, likelihood: Likelihood, x: Tensor, y: Tensor, batch_size: int = 1024, **kwargs: Any) -> float:
    r"""Mean negative log predictive density of held-out points, :math:`-\frac1N \sum_n \log p(y_n \mid x_n)`; lower is
    better.

    :param model: A trained model; it is left in the mode it was in.
    :param likelihood: Its likelihood. One without a closed form is sampled
        :class:`~gpytorch.settings.num_likelihood_samples` times.
    :param x: Inputs, ``... x N x D``.
    :param y: Targets, ``N``, ``N x T`` or ``... x N``.
    :param batch_size: Points a chunk.
    :param kwargs: Per-point arguments of the likelihood, ``... x N``, such as ``noise=``.

    Example:
        >>> score = tighter_gp.training.mean_nlpd(model, likelihood, test_x, test_y)
        >>> math.isfinite(score)
        True
    """
    num_points = x.size(0) if x.dim() == 1 else x.size(-2)
    rows_first = y.size(0) == num_points and x.dim() <= 2
    total, count = 0.0, 0
    # In training mode a sampled likelihood draws from the marginals of q(f), which is all a density a point needs.
    with temporary_mode(model, False), temporary_mode(likelihood, True):
        if isinstance(model, ExactGP) or isinstance(getattr(model, "variational_strategy", None), _TighterStrategy):
            density = likelihood.log_marginal(y, predict(model, x, batch_size=batch_size), **kwargs)
            return -float(density.double().mean())
        for rows in chunks(num_points, batch_size):
            q = model(x[rows] if x.dim() == 1 else x[..., rows, :])
            sliced = {name: value[..., rows] for name, value in kwargs.items()}
            density = likelihood.log_marginal(y[rows] if rows_first else y[..., rows], q, **sliced)
            total, count = total - float(density.double().sum()), count + density.numel()
    return total / count
