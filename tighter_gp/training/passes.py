"""How a step evaluates a model: q(f) with what it was made of, and again at another q(u) from the same projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from ..carrier import Origin, find_carriers
from ..likelihoods.family import family
from ..mlls import TighterELBO
from ..posterior import has_own_call
from ..prior import Projection
from .batches import Batch
from .problem import Problem, gp_of


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


def project(problem: Problem, batch: Batch, check: bool) -> Projection:
    """The projection of a batch by the only strategy of a plain model."""
    return problem.gp.variational_strategy.project(batch.x, check=check)


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
    if gp_of(model) is model and not has_own_call(model):
        return x
    with torch.no_grad():
        origins = Pass(model(x), lambda q: q.mean).origins
    return origins[0].x if len(origins) == 1 else x
