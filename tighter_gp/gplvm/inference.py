"""Latents of new rows, and what the model says of the data at given latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.distributions import Normal

from ..draws import seeded
from ..mlls import TighterELBO
from ..modes import chunks, temporary_mode
from ..predictions import PredictiveDistribution
from ..predictions.f import f_at
from .data import as_observed
from .elbo import LatentVariableELBO
from .latents import VariationalLatents


class Reconstruction(NamedTuple):
    """Predictive mean and variance of the data, noise included; ``B x P`` each.

    Example:
        >>> reconstruction = model.reconstruct(torch.zeros(3, model.latents.latent_dim))
        >>> reconstruction.mean.shape == reconstruction.variance.shape == (3, model.num_outputs)
        True
    """

    mean: Tensor
    variance: Tensor


def reconstruct(
    model: Any, x: Normal | Tensor, *, num_samples: int = 32, batch_size: int = 1024, seed: int = 0
) -> Reconstruction:
    r"""Predictive mean and variance of every entry, over f, the noise and the uncertainty of x.

    :param model: A :class:`BayesianGPLVM`.
    :param x: q(x) of the rows, or points ``B x Q``.
    :param num_samples: Draws of x per row; points need none.
    :param batch_size: Points per chunk.
    :param seed: Of the draws of x; the global random state is left as it was.

    Example:
        >>> mean, variance = model.reconstruct(model.infer_latents(Y_new, num_steps=20))
        >>> mean.shape == Y_new.shape
        True
    """
    compute = lambda y, rows: torch.stack([y.mean.mT, y.variance.mT])
    return Reconstruction(*_by_rows(model, x, compute, num_samples, batch_size, seed))


def log_density(
    model: Any,
    targets: Tensor,
    x: Normal | Tensor,
    mask: Tensor | None = None,
    *,
    num_samples: int = 32,
    batch_size: int = 1024,
    seed: int = 0,
) -> Tensor:
    r"""Log predictive density of each entry given q(x) of its row, :math:`\log \mathbb E_{q(x_n)}\, p(y_{np} \mid x_n)`.

    :param model: A :class:`BayesianGPLVM`.
    :param targets: Entries to score, ``B x P``; those held out from :func:`infer_latents`, say.
    :param x: q(x) of the rows, or points ``B x Q``.
    :param mask: True where an entry is to be scored, ``B x P``.
    :param num_samples: Draws of x per row; points need none.
    :param batch_size: Points per chunk.
    :param seed: Of the draws of x; the global random state is left as it was.
    :return: Shape ``B x P``; NaN where ``targets`` is NaN or masked.

    Example:
        >>> q_x = model.infer_latents(Y_new, mask=observed, num_steps=20)
        >>> held_out = model.log_density(Y_new, q_x, mask=~observed)
        >>> torch.equal(held_out.isnan(), observed | Y_new.isnan())
        True
    """
    targets, _ = as_observed(targets, mask, model.num_outputs)
    compute = lambda y, rows: y.log_prob(targets[rows].mT).mT
    return _by_rows(model, x, compute, num_samples, batch_size, seed)


@torch.no_grad()
def _by_rows(
    model: Any,
    x: Normal | Tensor,
    compute: Callable[[PredictiveDistribution, slice], Tensor],
    num_samples: int,
    batch_size: int,
    seed: int,
) -> Tensor:
    """Something of the predictive distribution of each entry, ``P x B``, a chunk of rows at a time: ``... x B x P``."""
    means, stddevs = (x, torch.zeros_like(x)) if isinstance(x, Tensor) else (x.mean, x.stddev)
    num_samples = 1 if isinstance(x, Tensor) else num_samples
    parts = []
    with temporary_mode(model, False), seeded(seed, means.device):
        for rows in [*chunks(len(means), max(1, batch_size // num_samples))] or [slice(0, 0)]:
            mean, stddev = means[rows], stddevs[rows]
            draws = torch.randn(num_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
            x_drawn = (mean + stddev * draws).flatten(0, 1)  # [S B, Q]
            f = f_at(model, x_drawn, batch_size=max(1, len(x_drawn)))  # [P, S B]
            f = f.map(lambda value: value.unflatten(-1, (num_samples, -1)).movedim(1, 0))  # [S, P, B]
            # The draws of x are components of a mixture, over which it is averaged.
            parts.append(compute(PredictiveDistribution(model.likelihood, f, is_mixture=True), rows))
    return torch.cat(parts, -2)


def infer_latents(
    model: Any,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    num_steps: int = 200,
    lr: float = 0.05,
    num_samples: int = 4,
    num_candidates: int = 4096,
    batch_size: int = 1024,
    objective: type[TighterELBO] | type[VariationalELBO] | None = None,
    seed: int = 0,
) -> Normal:
    r"""q(x) of new rows, with the decoder frozen: maximises the bound over those rows' q alone.

    Each row starts at the training row whose reconstruction is nearest to it in the entries observed, or where
    ``model.latents.encode`` puts it, if there is one. A row without any observed entry goes to the prior. The rows do not
    influence each other, and the model is not changed.

    :param model: A trained :class:`BayesianGPLVM`.
    :param targets: New rows, ``B x P``; NaN marks a missing entry.
    :param mask: True where observed, ``B x P``.
    :param num_steps: Steps of Adam; the rate falls linearly to zero.
    :param lr: First learning rate.
    :param num_samples: Draws of x per row and step.
    :param num_candidates: Training rows to compare with, drawn at random if there are more.
    :param batch_size: Rows per chunk.
    :param objective: As in :class:`LatentVariableELBO`; give the one that the model was trained with.
    :param seed: Of all draws; the global random state is left as it was.
    :return: Batch shape ``B x Q``, without a graph.

    Example:
        >>> q_x = model.infer_latents(Y_new, num_steps=20)
        >>> filled = torch.where(torch.isnan(Y_new), model.reconstruct(q_x).mean, Y_new)
        >>> bool(filled.isnan().any())
        False
    """
    targets, _ = as_observed(targets, mask, model.num_outputs)
    targets = targets.to(model.variational_strategy.inducing_points)
    if getattr(getattr(model.variational_strategy, "conditional", None), "needs_index", False):
        raise TypeError("PerPoint has a scale for each training row and none for new ones; use another conditional.")
    elbo = LatentVariableELBO(model.likelihood, model, len(targets), objective=objective)
    found = []
    with temporary_mode(model, False), seeded(seed, targets.device):
        first_guess = _first_guess(model, num_candidates)
        for rows in chunks(len(targets), batch_size):
            found.append(_optimise(elbo, first_guess(targets[rows]), targets[rows], num_steps, lr, num_samples))
    return Normal(torch.cat([q.mean for q in found]), torch.cat([q.stddev for q in found]), validate_args=False)


@torch.no_grad()
def _first_guess(model: Any, count: int) -> Callable[[Tensor], Normal]:
    """From rows ``B x P`` to q(x) of the training row whose reconstruction is nearest in the entries observed.

    :param count: How many training rows to compare with, at random.
    """
    if hasattr(model.latents, "encode"):
        return model.latents.encode
    num_data, device = model.latents.num_data, model.variational_strategy.inducing_points.device
    index = torch.arange(num_data, device=device)
    q_x = model.latents.q(index if count >= num_data else torch.randperm(num_data, device=device)[:count])  # [C, Q]
    reconstruction = reconstruct(model, q_x.mean).mean  # [C, P]
    prior_mean, prior_stddev = model.latents.prior.moments(q_x.mean)

    def nearest(targets: Tensor) -> Normal:
        observed = ~torch.isnan(targets)
        # Squared distance in the observed entries, less the part that is the same for every candidate: [B, C].
        cross = targets.nan_to_num(nan=0.0) @ reconstruction.mT
        best = (observed.to(targets) @ reconstruction.square().mT - 2 * cross).argmin(-1)
        anything = observed.any(-1, keepdim=True)
        mean = torch.where(anything, q_x.mean[best], prior_mean)  # [B, Q]
        return Normal(mean, torch.where(anything, q_x.stddev[best], prior_stddev), validate_args=False)

    return nearest


def _optimise(
    elbo: LatentVariableELBO, start: Normal, targets: Tensor, num_steps: int, lr: float, num_samples: int
) -> Normal:
    latents = VariationalLatents(start.mean, stddev=start.stddev.detach(), sparse=False)
    parameters = list(latents.parameters())
    optimizer = torch.optim.Adam(parameters, lr=lr)
    with temporary_mode(elbo.model.variational_strategy, True), torch.enable_grad():
        for step in range(num_steps):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / num_steps)
            q_x = latents.q()
            loss = -elbo.at(q_x.rsample(torch.Size([num_samples])), q_x, targets).bound
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return Normal(latents.mean.detach(), latents.stddev.detach(), validate_args=False)
