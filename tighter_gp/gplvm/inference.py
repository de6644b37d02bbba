"""Latents of new rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.distributions import Normal

from ..conditionals import PerPoint
from ..draws import drawn, permutation, standard_normal
from ..mlls import TighterELBO
from ..modes import chunks, temporary_mode
from .data import as_observed, check_count
from .elbo import LatentVariableELBO
from .encoded_latents import EncodedLatents
from .latent_variables import VariationalLatents
from .reconstruction import reconstruct


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
    generator: torch.Generator | None = None,
) -> Normal:
    r"""q(x) of new rows, with the decoder frozen: maximises the bound over those rows' q alone.

    Each row starts at the training row whose reconstruction is nearest to it in the entries observed; with
    :class:`EncodedLatents` it starts at the encoder's answer, and ``num_steps=0`` returns that. A row without any
    observed entry goes to the prior. The rows do not influence each other, and the model is not changed.

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
    :param generator: Source of the draws in place of the seed, on any device.
    :return: Batch shape ``B x Q``, without a graph.

    Example:
        >>> q_x = model.infer_latents(Y_new, num_steps=20)
        >>> filled = torch.where(torch.isnan(Y_new), model.reconstruct(q_x).mean, Y_new)
        >>> bool(filled.isnan().any())
        False
    """
    check_count("num_samples", num_samples)
    check_count("num_candidates", num_candidates)
    targets, _ = as_observed(targets, mask, model.num_outputs)
    check_count("The number of new rows", targets.size(0))
    targets = targets.to(model.variational_strategy.inducing_points)
    if isinstance(getattr(model.variational_strategy, "conditional", None), PerPoint):
        raise TypeError("PerPoint has a scale for each training row and none for new ones; use another conditional.")
    elbo = LatentVariableELBO(model.likelihood, model, targets.size(0), objective=objective)
    means, stddevs = [], []
    with temporary_mode(model, False), drawn(seed, generator, targets.device):
        candidates = (
            None if isinstance(model.latents, EncodedLatents) else _candidates(model, num_candidates, generator)
        )
        for rows in chunks(targets.size(0), batch_size):
            start = _start(model, targets[rows], candidates)
            q_x = _optimise(elbo, start, targets[rows], num_steps, lr, num_samples, generator)
            means.append(q_x.mean)
            stddevs.append(q_x.stddev)
    return Normal(torch.cat(means), torch.cat(stddevs), validate_args=False)


class _Candidates(NamedTuple):
    """q(x) of training rows and their reconstructions: ``C x Q`` twice and ``C x P``."""

    mean: Tensor
    stddev: Tensor
    reconstruction: Tensor


@torch.no_grad()
def _candidates(model: Any, num_candidates: int, generator: torch.Generator | None) -> _Candidates:
    num_data, device = model.latents.num_data, model.variational_strategy.inducing_points.device
    if num_candidates < num_data:
        index = permutation(num_data, device, generator, default=device)[:num_candidates]
    else:
        index = torch.arange(num_data, device=device)
    q = model.latents.q(index)
    return _Candidates(q.mean, q.stddev, reconstruct(model, q.mean).mean)


@torch.no_grad()
def _start(model: Any, targets: Tensor, candidates: _Candidates | None) -> Normal:
    if candidates is None:
        q = model.latents.encode(targets)
        return Normal(q.mean, q.stddev, validate_args=False)
    observed = ~torch.isnan(targets)
    filled = torch.where(observed, targets, torch.zeros_like(targets))
    # Squared distance in the observed entries, less the part that is the same for every candidate: B x C.
    distance = observed.to(targets) @ candidates.reconstruction.square().mT - 2 * filled @ candidates.reconstruction.mT
    nearest = distance.argmin(-1)
    anything = observed.any(-1, keepdim=True)
    prior_mean, prior_stddev = model.latents.prior.moments(candidates.mean)
    return Normal(
        torch.where(anything, candidates.mean[nearest], prior_mean),
        torch.where(anything, candidates.stddev[nearest], prior_stddev),
        validate_args=False,
    )


def _optimise(
    elbo: LatentVariableELBO,
    start: Normal,
    targets: Tensor,
    num_steps: int,
    lr: float,
    num_samples: int,
    generator: torch.Generator | None,
) -> Normal:
    latents = VariationalLatents(start.mean, stddev=start.stddev, sparse=False)
    optimizer = torch.optim.Adam(latents.parameters(), lr=lr)
    parameters = list(latents.parameters())
    with temporary_mode(elbo.model.variational_strategy, True), torch.enable_grad():
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / num_steps)
            q_x = latents.q()
            noise = standard_normal((num_samples, *q_x.mean.shape), q_x.mean, generator)
            bound = elbo.at(q_x.mean + q_x.stddev * noise, q_x, targets)
            assert isinstance(bound, Tensor)
            loss = -bound
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return Normal(latents.mean.detach(), latents.stddev.detach(), validate_args=False)
