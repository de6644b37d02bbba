"""What the model says of the data at given latents."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.distributions import Normal

from ..draws import drawn, standard_normal
from ..modes import chunks, temporary_mode
from ..predictions import PredictiveDistribution as distribution_of_y, predict
from ..predictions import log_density as entry_density
from ..strategies import TighterStrategy
from .data import as_observed, check_count


class Reconstruction(NamedTuple):
    """Predictive mean and variance of the data, noise included; ``B x P`` each.

    Example:
        >>> reconstruction = model.reconstruct(torch.zeros(3, model.latents.latent_dim))
        >>> reconstruction.mean.shape == reconstruction.variance.shape == (3, model.num_outputs)
        True
    """

    mean: Tensor
    variance: Tensor


def _decode(model: Any, x: Tensor) -> MultivariateNormal:
    """q(f) at latents ``n x Q``: batch shape ``P``, diagonal covariance, the last term of the variance dropped."""
    if isinstance(model.variational_strategy, TighterStrategy):
        return predict(model, x)
    with temporary_mode(model.variational_strategy, True):  # where GPyTorch computes the diagonal only
        q_f = model(x)
    return MultivariateNormal(q_f.mean, DiagLinearOperator(q_f.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)))


def _draws(x: Normal | Tensor, rows: slice, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """``S x b x Q``; points stand for themselves."""
    if isinstance(x, Tensor):
        return x[rows].unsqueeze(0)
    mean, stddev = x.mean[rows], x.stddev[rows]
    return mean + stddev * standard_normal((num_samples, *mean.shape), mean, generator)


def _check_latents(model: Any, x: Normal | Tensor, num_samples: int) -> int:
    """The number of rows."""
    check_count("num_samples", num_samples)
    shape = x.shape if isinstance(x, Tensor) else x.batch_shape
    if len(shape) != 2 or shape[-1] != model.latents.latent_dim:
        raise ValueError(f"Latents must have shape B x {model.latents.latent_dim}; got {tuple(shape)}.")
    return shape[0]


def _entries(model: Any, num_rows: int) -> Tensor:
    """Room for one value per entry, ``B x P``."""
    return model.variational_strategy.inducing_points.new_empty(num_rows, model.num_outputs)


@torch.no_grad()
def reconstruct(
    model: Any,
    x: Normal | Tensor,
    *,
    num_samples: int = 32,
    batch_size: int = 1024,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> Reconstruction:
    r"""Predictive mean and variance of every entry, over f, the noise and the uncertainty of x.

    :param model: A :class:`BayesianGPLVM`.
    :param x: q(x) of the rows, or points ``B x Q``.
    :param num_samples: Draws of x per row; points need none.
    :param batch_size: Points per chunk.
    :param seed: Of the draws of x; the global random state is left as it was.
    :param generator: Source of the draws in place of the seed, on any device.

    Example:
        >>> mean, variance = model.reconstruct(model.infer_latents(Y_new, num_steps=20))
        >>> mean.shape == Y_new.shape
        True
    """
    num_rows = _check_latents(model, x, num_samples)
    num_samples = 1 if isinstance(x, Tensor) else num_samples
    means, variances = (_entries(model, num_rows) for _ in range(2))
    with temporary_mode(model, False), drawn(seed, generator, means.device):
        for rows in chunks(num_rows, max(1, batch_size // num_samples)):
            points = _draws(x, rows, num_samples, generator)
            y = distribution_of_y(model.likelihood, _decode(model, points.flatten(0, 1)))
            shape = (model.num_outputs, points.size(0), points.size(1))
            mean, variance = (moment.reshape(shape) for moment in (y.mean, y.variance))
            means[rows] = mean.mean(1).mT
            variances[rows] = (variance.mean(1) + mean.var(1, correction=0)).mT
    return Reconstruction(means, variances)


@torch.no_grad()
def log_density(
    model: Any,
    targets: Tensor,
    x: Normal | Tensor,
    mask: Tensor | None = None,
    *,
    num_samples: int = 32,
    batch_size: int = 1024,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Log predictive density of each entry given q(x) of its row, :math:`\log \mathbb E_{q(x_n)}\, p(y_{np} \mid x_n)`.

    :param model: A :class:`BayesianGPLVM`.
    :param targets: Entries to score, ``B x P``; those held out from :func:`infer_latents`, say.
    :param x: q(x) of the rows, or points ``B x Q``.
    :param mask: True where an entry is to be scored, ``B x P``.
    :param num_samples: Draws of x per row; points need none.
    :param batch_size: Points per chunk.
    :param seed: Of the draws of x; the global random state is left as it was.
    :param generator: Source of the draws in place of the seed, on any device.
    :return: Shape ``B x P``; NaN where ``targets`` is NaN or masked.

    Example:
        >>> q_x = model.infer_latents(Y_new, mask=observed, num_steps=20)
        >>> held_out = model.log_density(Y_new, q_x, mask=~observed)
        >>> torch.equal(held_out.isnan(), observed | Y_new.isnan())
        True
    """
    targets, _ = as_observed(targets, mask, model.num_outputs)
    targets = targets.to(model.variational_strategy.inducing_points)
    num_rows = _check_latents(model, x, num_samples)
    if targets.size(0) != num_rows:
        raise ValueError(f"There are {targets.size(0)} rows of data for {num_rows} latents.")
    num_samples = 1 if isinstance(x, Tensor) else num_samples
    values = _entries(model, num_rows)
    with temporary_mode(model, False), drawn(seed, generator, values.device):
        for rows in chunks(num_rows, max(1, batch_size // num_samples)):
            points = _draws(x, rows, num_samples, generator)
            q_f = _decode(model, points.flatten(0, 1))
            repeated = targets[rows].mT.repeat(1, num_samples)
            value = entry_density(model.likelihood, q_f, repeated)
            value = value.reshape(model.num_outputs, num_samples, -1).logsumexp(1) - math.log(num_samples)
            values[rows] = value.mT
    return torch.where(torch.isnan(targets), torch.full_like(targets, torch.nan), values)
