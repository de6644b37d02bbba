"""The body of a step, eager or captured: move q(u), then differentiate the loss of the rest at the new q(u)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood
from torch import Tensor

from ..carrier import Origin
from ..likelihoods.family import family, gaussian_noise, observed
from ..prior import Projection
from .batches import Batch
from .distributed import StepSums
from .natural import Natural, Part, Slopes
from .problem import Problem

# How far a natural step may move the mean of a point, where the slopes depend on q(u).
_REACH = 3.0

# Targets on the scale of f: the reach is in units of their spread.
REAL_TARGETS = (GaussianLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood, LaplaceLikelihood)


class Result(NamedTuple):
    """What the body of a step computes, as tensors.

    :param loss: Minus the objective, times the weight of this process.
    :param gradients: Of the parameters that Adam trains.
    :param natural: q(u) by its natural parameters, after their step.
    :param ok: Flags that must all be True.
    """

    loss: Tensor
    gradients: Sequence[Tensor]
    natural: Sequence[Natural]
    ok: Sequence[Tensor]


@torch.enable_grad()
def body(
    problem: Problem,
    parts: Sequence[Part],
    natural: Sequence[Natural],
    batch: Batch,
    size: Tensor,
    leaves: Sequence[Tensor],
    sums: StepSums,
    check: bool = True,
    reseed: Callable[[], None] = lambda: None,
) -> Result:
    """Move q(u), then differentiate the loss at the new q(u). Only parameters of q(u) are changed, in place.

    :param parts: What natural gradients move; empty for Adam alone.
    :param size: Of the natural step.
    :param leaves: What Adam trains.
    :param sums: Between processes.
    :param check: Whether to look at once if all went well.
    :param reseed: Lets a second pass draw what the first one did.
    """
    ok: Sequence[Tensor] = ()
    if is_closed(problem, parts, batch):
        projection = problem.gp.variational_strategy.project(batch.x, check=check)  # K, chol, A: once
        slopes = _gaussian_slopes(problem, natural, batch, projection)
        natural, ok = _move(parts, natural, {problem.gp.variational_strategy: slopes}, size, None, sums)
        with _constant(parts):
            loss = first = problem.loss_of(problem.q(batch, projection=projection), batch)
    else:
        known = problem.first_pass(batch, check, is_natural=bool(parts))
        loss = first = known.loss(known.q)
        if parts:
            origins = known.origins
            natural, ok = _move(parts, natural, _slopes(problem, first, origins), size, reach(problem, batch), sums)
            reseed()
            with _constant(parts):
                loss = known.loss(problem.second_pass(batch, origins))
            ok = [*ok, torch.isfinite(loss.detach())]
    gradients: Sequence[Tensor] = ()
    if leaves:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    gradients = [g.to_dense() if g.is_sparse else g for g in gradients]  # of a table of latent variables
    return Result(first.detach(), gradients, natural, ok)


@contextmanager
def _constant(parts: Sequence[Part]) -> Iterator[None]:
    """Without gradients of q(u), which would cost as much as the projection's."""
    for part in parts:
        for parameter in part.parameters:
            parameter.requires_grad_(False)
    try:
        yield
    finally:
        for part in parts:
            for parameter in part.parameters:
                parameter.requires_grad_()


def is_closed(problem: Problem, parts: Sequence[Part], batch: Batch) -> bool:
    """Whether slopes need no pass: a single output with Gaussian noise, no missing targets, and q(f) from x alone."""
    if not parts or batch.x is None or not problem.is_plain or not family(problem.likelihood).is_gaussian:
        return False
    is_own = all(part.strategy is problem.gp.variational_strategy for part in parts)
    return is_own and observed(problem.likelihood, batch.y, batch.y.shape[-1:]) is None


@torch.no_grad()
def _gaussian_slopes(problem: Problem, natural: Sequence[Natural], batch: Batch, projection: Projection) -> Slopes:
    r""":math:`g_n = (y_n - \mu_n) / \sigma_n^2` and :math:`\lambda_n = 1 / \sigma_n^2`, scaled to all data."""
    y, matrix = batch.y, projection.matrix.detach()
    noise = gaussian_noise(problem.likelihood, y.shape[:-1], y.shape[-1:], **batch.kwargs)  # [..., B] or [..., 1]
    m = natural[0].mean.to(matrix)  # [..., M]
    if m.size(-1) < matrix.size(-2):  # some distributions are frozen, or point masses
        m = torch.cat([q.mean for q in problem.gp.variational_strategy.q()], -1).to(matrix)
    mean = projection.mean.detach() + (matrix.mT @ m.unsqueeze(-1)).squeeze(-1).to(projection.mean)  # [..., B]
    num_data, beta = _scale(problem)
    curvature = (num_data * batch.weight / (beta * y.size(-1)) / noise).expand(mean.shape)
    return Slopes(matrix, (y - mean) * curvature, curvature)


def _slopes(problem: Problem, loss: Tensor, origins: Sequence[Origin]) -> dict[torch.nn.Module, Slopes]:
    """Slopes of each strategy by one backward pass that ends at the moments of q(f)."""
    moments = [moment for origin in origins for moment in (origin.mean, origin.explained)]
    found = torch.autograd.grad(loss, moments, allow_unused=True, materialize_grads=True)
    num_data, beta = _scale(problem)
    scale = -num_data / beta
    return {
        origin.strategy: Slopes(origin.projection.matrix.detach(), scale * g, (-2 * scale * s).clamp_min(0))
        for origin, g, s in zip(origins, found[::2], found[1::2], strict=True)
    }


def _scale(problem: Problem) -> tuple[int, float]:
    """N, and the factor on the KL divergence."""
    return getattr(problem.objective, "num_data", problem.num_data), getattr(problem.objective, "beta", 1.0)


@torch.no_grad()
def _move(
    parts: Sequence[Part],
    natural: Sequence[Natural],
    slopes: dict[Any, Slopes],
    size: Tensor,
    reach: Any,
    sums: StepSums,
) -> tuple[list[Natural], list[Tensor]]:
    """A natural step of every part, written to the parameters of q(u); and flags."""
    own = [part.sums(q, slopes[part.strategy]) for part, q in zip(parts, natural, strict=True)]
    total = sums(*[tensor for pair in own for tensor in pair])
    moved, flags = [], []
    for part, q, gram, vector in zip(parts, natural, total[::2], total[1::2], strict=True):
        q, values, ok = part.move(q, gram, vector, slopes[part.strategy].matrix, size, reach, sums)
        for parameter, value in zip(part.parameters, values, strict=True):
            parameter.copy_(value)
        moved.append(q)
        flags.append(ok)
    return moved, flags


def reach(problem: Problem, batch: Batch) -> float | Tensor:
    """How far the mean of a point may move; with targets on the scale of f, in units of their spread."""
    if not isinstance(problem.likelihood, REAL_TARGETS):
        return _REACH
    return _REACH * torch.nan_to_num(batch.y.detach()).std(correction=0).double().clamp_min(1.0)
