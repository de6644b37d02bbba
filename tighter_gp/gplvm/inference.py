"""Latents of new rows, and what the model says of the data at given latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.distributions import Normal

from ..data import chunks
from ..draws import seeded, temporary_mode
from ..mlls import TighterELBO
from ..predictions import PredictiveDistribution
from ..predictions.f import f_at
from ..predictions.points import Marginals, marginals
from ..strategies import TighterStrategy
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
            f = _decode(model, (mean + stddev * draws).flatten(0, 1))  # [P, S B]
            f = f.map(lambda value: value.unflatten(-1, (num_samples, -1)).movedim(1, 0))  # [S, P, B]
            parts.append(compute(PredictiveDistribution(model.likelihood, f, is_mixture=True), rows))
    return torch.cat(parts, -2)


def _decode(model: Any, x: Tensor) -> Marginals:
    """q(f) at latents ``n x Q``, ``P x n``."""
    if isinstance(model.variational_strategy, TighterStrategy):
        return f_at(model, x, batch_size=max(1, len(x)))
    with temporary_mode(model.variational_strategy, True):  # where GPyTorch computes the diagonal only
        return marginals(model(x))


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
        candidates = None if hasattr(model.latents, "encode") else _Candidates.of(model, num_candidates)
        for rows in chunks(len(targets), batch_size):
            part = targets[rows]
            start = model.latents.encode(part) if candidates is None else candidates.nearest(part, model.latents.prior)
            found.append(_optimise(elbo, start, part, num_steps, lr, num_samples))
    mean, stddev = (torch.cat(values) for values in zip(*((q.mean, q.stddev) for q in found), strict=True))
    return Normal(mean, stddev, validate_args=False)


class _Candidates(NamedTuple):
    """q(x) of training rows and their reconstructions: ``C x Q`` twice and ``C x P``."""

    mean: Tensor
    stddev: Tensor
    reconstruction: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, count: int) -> _Candidates:
        """Some rows at random, or all."""
        num_data, device = model.latents.num_data, model.variational_strategy.inducing_points.device
        index = torch.arange(num_data, device=device)
        q = model.latents.q(index if count >= num_data else torch.randperm(num_data, device=device)[:count])
        return cls(q.mean, q.stddev, reconstruct(model, q.mean).mean)

    def nearest(self, targets: Tensor, prior: Any) -> Normal:
        """q(x) of the candidate whose reconstruction is nearest to each row, ``B x P``, in the entries observed."""
        observed = ~torch.isnan(targets)
        # Squared distance in the observed entries, less the part that is the same for every candidate: [B, C].
        cross = targets.nan_to_num(nan=0.0) @ self.reconstruction.mT
        nearest = (observed.to(targets) @ self.reconstruction.square().mT - 2 * cross).argmin(-1)
        anything = observed.any(-1, keepdim=True)
        mean, stddev = prior.moments(self.mean)
        mean = torch.where(anything, self.mean[nearest], mean)
        return Normal(mean, torch.where(anything, self.stddev[nearest], stddev), validate_args=False)


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
