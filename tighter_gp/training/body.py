"""The body of a step, eager or captured: move q(u), then differentiate the loss of the rest at the new q(u)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood
from torch import Tensor

from ..carrier import Origin, find_carriers
from ..likelihoods.family import family, gaussian_noise, observed
from ..maths.linalg import full_precision
from ..mlls import TighterELBO
from ..posterior import has_own_call
from ..prior import Projection
from ..strategies import TighterStrategy
from .batches import Batch
from .natural import Natural, Part, Size, Slopes
from .problem import Problem, inner_gp

# How far a natural step may move the mean of a point, where the slopes depend on q(u).
_REACH = 3.0

# Targets on the scale of f: the reach is in units of their spread.
REAL_TARGETS = (GaussianLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood, LaplaceLikelihood)


class Result(NamedTuple):
    """What the body of a step computes, as tensors.

    :param loss: Minus the objective, times the weight of this process.
    :param gradients: Of the parameters that Adam trains.
    :param natural: The natural parameters of q(u), after their step.
    :param ok: Flags that must all be True.
    """

    loss: Tensor
    gradients: Sequence[Tensor]
    natural: list[Natural]
    ok: list[Tensor]


@torch.enable_grad()
def body(
    problem: Problem,
    parts: Sequence[Part],
    natural: Sequence[Natural],
    batch: Batch,
    size: Size,
    leaves: Sequence[Tensor],
    reduce: Any = None,
    check: bool = True,
    reseed: Callable[[], None] = lambda: None,
) -> Result:
    """Move q(u), then differentiate the loss at the new q(u). Only parameters of q(u) are changed, in place.

    :param parts: What natural gradients move; empty for Adam alone.
    :param size: Of the natural step.
    :param leaves: What Adam trains.
    :param reduce: Sums over processes.
    :param check: Whether to look at once if all went well.
    :param reseed: Lets a second pass draw what the first one did.
    """
    ok: list[Tensor] = []
    if not parts and batch.x is None:
        known = first_pass(problem, batch, check)
        loss = first = known.loss(known.q)
    elif not parts:
        loss = first = problem.loss(batch, check)
    elif is_closed(problem, parts, batch):
        projection = problem.gp.variational_strategy.project(batch.x, check=check)  # K, chol, A: once
        slopes = [_gaussian_slopes(problem, parts, natural, batch, projection)]
        natural, ok = _move(parts, natural, slopes, size, None, reduce)
        with _frozen(parts):
            q = problem.q(batch, projection=projection)
            loss = first = problem.loss_of(q, batch)
    else:
        known = first_pass(problem, batch, check)
        first, origins = known.loss(known.q), known.origins
        natural, ok = _move(parts, natural, _slopes(problem, first, origins), size, reach(problem, batch), reduce)
        reseed()
        with _frozen(parts):
            loss = known.loss(second_pass(problem, batch, origins))
        ok = [*ok, torch.isfinite(loss.detach())]
    gradients: Sequence[Tensor] = ()
    if leaves:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    gradients = [g.to_dense() if g.is_sparse else g for g in gradients]  # of a table of latent variables
    return Result(first.detach(), gradients, list(natural), ok)


@contextmanager
def _frozen(parts: Sequence[Part]) -> Iterator[None]:
    """q(u) is a constant: its gradients would cost as much as the projection's."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    asked = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in zip(parameters, asked, strict=True):
            parameter.requires_grad_(flag)


def is_closed(problem: Problem, parts: Sequence[Part], batch: Batch) -> bool:
    """Whether slopes need no pass: a single output with Gaussian noise, no missing targets, and q(f) from x alone."""
    strategy, likelihood, y = getattr(problem.gp, "variational_strategy", None), problem.likelihood, batch.y
    if batch.x is None or not isinstance(strategy, TighterStrategy) or not problem.is_plain:
        return False
    is_own = all(part.strategy is strategy for part in parts)
    return is_own and family(likelihood).is_gaussian and observed(likelihood, y, y.shape[-1:]) is None


@torch.no_grad()
def _gaussian_slopes(
    problem: Problem, parts: Sequence[Part], natural: Sequence[Natural], batch: Batch, projection: Projection
) -> tuple[Any, Slopes]:
    r""":math:`g_n = (y_n - \mu_n) / \sigma_n^2` and :math:`\lambda_n = 1 / \sigma_n^2`, scaled to all data."""
    y, strategy, matrix = batch.y, problem.gp.variational_strategy, projection.matrix.detach()
    noise = gaussian_noise(problem.likelihood, y.shape[:-1], y.shape[-1:], **batch.kwargs)
    means = [part.mean(q) for part, q in zip(parts, natural, strict=True)]
    if len(strategy.distributions) > 1:  # in the order of the rows, with those that are frozen
        means = [q.mean for q in strategy.q()]
    m = torch.cat([mean.to(matrix) for mean in means], -1)
    mean = projection.mean.detach() + (matrix.mT @ m.unsqueeze(-1)).squeeze(-1).to(projection.mean)  # [..., B]
    num_data, beta = _scale(problem)
    curvature = (num_data * batch.weight / (beta * y.size(-1)) / noise).expand(mean.shape)
    return strategy, Slopes(matrix, (y - mean) * curvature, curvature)


def _slopes(problem: Problem, loss: Tensor, origins: Sequence[Origin]) -> list[tuple[Any, Slopes]]:
    """Slopes by one backward pass that ends at the moments of q(f)."""
    moments = [moment for origin in origins for moment in (origin.mean, origin.explained)]
    found = torch.autograd.grad(loss, moments, allow_unused=True, materialize_grads=True)
    num_data, beta = _scale(problem)
    scale = -num_data / beta
    return [
        (origin.strategy, Slopes(origin.projection.matrix.detach(), scale * g, (-2 * scale * s).clamp_min(0)))
        for origin, g, s in zip(origins, found[::2], found[1::2], strict=True)
    ]


def _scale(problem: Problem) -> tuple[int, float]:
    """N, and the factor on the KL divergence."""
    return getattr(problem.objective, "num_data", problem.num_data), getattr(problem.objective, "beta", 1.0)


def _move(
    parts: Sequence[Part],
    natural: Sequence[Natural],
    slopes: Sequence[tuple[Any, Slopes]],
    size: Size,
    reach: float | Tensor | None,
    reduce: Any,
) -> tuple[list[Natural], list[Tensor]]:
    """A natural step of every part, written to the parameters of q(u); and flags."""
    reduce = reduce or Alone()
    of_strategy = {id(strategy): found for strategy, found in slopes}
    own = [of_strategy[id(part.strategy)] for part in parts]
    moved, flags = [], []
    with torch.no_grad(), full_precision(own[0].matrix.device.type):
        sums = [t for part, q, s in zip(parts, natural, own, strict=True) for t in part.sums(q, s)]
        sums = reduce(*sums)
        for number, (part, q, found) in enumerate(zip(parts, natural, own, strict=True)):
            gram, vector = sums[2 * number : 2 * number + 2]
            q, values, ok = part.move(q, gram, vector, found, size, reach, reduce)
            for parameter, value in zip(part.parameters(), values, strict=True):
                parameter.copy_(value)
            moved.append(q)
            flags.append(ok)
    return moved, flags


def reach(problem: Problem, batch: Batch) -> float | Tensor:
    """How far the mean of a point may move; with targets on the scale of f, in units of their spread."""
    if not isinstance(problem.likelihood, REAL_TARGETS):
        return _REACH
    return _REACH * torch.nan_to_num(batch.y.detach()).std(correction=0).double().clamp_min(1.0)


class Alone:
    """Sums over the processes where there is but one."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The sums of some tensors."""
        return tensors

    def largest(self, value: Tensor) -> Tensor:
        """The largest value."""
        return value


# ---------------------------------------------------------------------------------------------------------------------
# Passes: q(f) with what it was made of, and again at another q(u) from the same projection
# ---------------------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One evaluation of a model on a batch.

    :param q: q(f).
    :param loss: From q(f) to the loss of the batch.
    """

    q: MultivariateNormal
    loss: Callable[..., Tensor]

    @property
    def origins(self) -> list[Origin]:
        """What q(f) was made of, one per strategy."""
        found = (carrier.origin for carrier in find_carriers(self.q.lazy_covariance_matrix))
        return [origin for origin in found if origin is not None]


def first_pass(problem: Problem, batch: Batch, check: bool) -> Pass:
    """q(f) at the q(u) of the moment.

    :param check: Whether to look at once if all went well; where that can be deferred, what failed is NaN.
    """
    options = problem.unchecked(check)
    if batch.x is None:
        q_x = problem.model.latents.q(batch.rows)
        kwargs = {**batch.kwargs}
        x = q_x.rsample(torch.Size([kwargs.pop("num_samples", 1)]))  # the same draws in both passes  [S, B, Q]
        at = lambda q: -problem.objective.at(x, q_x, batch.y, index=batch.rows, q_f=q, **kwargs).bound * batch.weight
        return Pass(problem.objective.q_f(x, batch.rows, **options), at)
    # Samples show no curvature by themselves.
    if isinstance(problem.objective, TighterELBO) and family(problem.likelihood).is_sampled:
        loss = lambda q: problem.loss_of(q, batch, by_curvature=True)
    else:
        loss = lambda q: problem.loss_of(q, batch)
    found = Pass(problem.q(batch, **options), loss)
    if problem.is_direct is None and len(found.origins) == 1:
        with torch.no_grad():
            again = _from_origin(problem, found.origins[0])
            problem.is_direct = again.mean.shape == found.q.mean.shape and torch.equal(again.mean, found.q.mean)
    return found


def second_pass(problem: Problem, batch: Batch, origins: Sequence[Origin]) -> MultivariateNormal:
    """q(f) at another q(u), from the projection of the first pass where it alone makes q(f)."""
    if len(origins) > 1 or not problem.is_direct:
        return problem.q(batch)
    return _from_origin(problem, origins[0])


def _from_origin(problem: Problem, origin: Origin) -> MultivariateNormal:
    positions = {} if origin.index is None else {"index": origin.index}
    return problem.gp.variational_strategy(origin.x, projection=origin.projection, **positions)


def features(model: Any, x: Tensor) -> Tensor:
    """What the GP within a model sees of some inputs: those behind a network, for one."""
    if inner_gp(model) is model and not has_own_call(model):
        return x
    with torch.no_grad():
        origins = Pass(model(x), lambda q: q.mean).origins
    return origins[0].x if len(origins) == 1 else x
