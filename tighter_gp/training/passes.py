"""How a step evaluates a model: once with what q(f) was made of, and again at another q(u) from the same projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..recording import Record, recorded_projections
from .batches import Batch
from .problem import Problem


class Origin(NamedTuple):
    strategy: Any
    matrix: Tensor
    mean: Tensor
    explained: Tensor
    prior_mean: Tensor
    record: Any


def project(problem: Problem, batch: Batch) -> Origin:
    strategy = problem.gp.variational_strategy
    strategy._initialize(batch.x)
    projector = strategy.projector(lower=True)
    prior, chol = projector.factorized(batch.x)
    import torch

    from ..maths.linalg import project as solve

    with torch.no_grad():
        matrix = solve(chol, prior.cross_covar)
    record = Record(strategy, matrix, prior.mean, prior.mean, (projector, prior, chol))
    return Origin(strategy, matrix, None, None, prior.mean, record)


def first_pass(problem: Problem, batch: Batch) -> tuple[Tensor, list[Origin]]:
    with recorded_projections() as records:
        loss = problem.loss(batch)
    return loss, [Origin(r.strategy, r.projection, r.mean, r.explained, None, r) for r in records]


def second_pass(problem: Problem, batch: Batch, origins: Sequence[Origin]) -> Tensor:
    for strategy in problem.model.modules():
        if hasattr(strategy, "_q_cache"):
            strategy._q_cache.clear()
    with recorded_projections(replay=[origin.record for origin in origins]):
        return problem.loss(batch)


def features(model, x):
    """What the GP within a model sees of some inputs."""
    return x
