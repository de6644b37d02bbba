"""What a training step computes on the way and others can use: the projection, and the moments with their graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Record", "recorded_projections"]


Before = Callable[[Any, Tensor, Tensor], None]


class Record(NamedTuple):
    r"""One forward pass of one strategy in training mode.

    :param strategy: The strategy.
    :param projection: :math:`A`, shape ``... x M x B``, without a graph. Its rows are those of
        ``strategy.distributions``, one after the other.
    :param mean: :math:`A^\top m` with its graph, before the prior mean is added; shape ``... x B``.
    :param explained: :math:`s_n` with its graph, before the jitter is added; shape ``... x B``.
    :param prior: What the strategy needs to make q(f) again with another q(u); for ``replay``.

    Example:
        >>> with tighter_gp.recording.recorded_projections() as records:
        ...     q = model(train_x)
        >>> records[0].projection.size(-1) == len(train_x)
        True
    """

    strategy: Any
    projection: Tensor
    mean: Tensor
    explained: Tensor
    prior: Any = None


class _Recording:
    """The records so far, whom to call before q(u) is read, and the records of an earlier pass that is repeated."""

    def __init__(self, before: Before | None, earlier: Sequence[Record]) -> None:
        self.records: list[Record] = []
        self.before, self.earlier = before, list(earlier)


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recorded_projections(before: Before | None = None, replay: Sequence[Record] = ()) -> Iterator[list[Record]]:
    """While it is active, every strategy of this package appends a :class:`Record` per forward pass in training mode.

    :param before: Called with the strategy, the prior mean and the projection before q(u) is read, which it may change.
    :param replay: Records of an earlier pass on the same inputs with the same hyperparameters: their kernel matrices and
        projections are used again, graph included, and only q(u) is read anew.

    Example:
        >>> with tighter_gp.recording.recorded_projections() as records:
        ...     q = model(train_x)
        >>> len(records)
        1
    """
    recording = _Recording(before, replay)
    token = _recording.set(recording)
    try:
        yield recording.records
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether the slopes of this step will be read, so that a sampled likelihood must give a curvature.

    Example:
        >>> tighter_gp.recording.is_recording()
        False
    """
    return _recording.get() is not None


def earlier_prior(strategy: Any) -> tuple[Any, Tensor] | None:
    """What a strategy needs for q(f), and its projection, from the pass that is repeated, if one is; each is used once."""
    recording = _recording.get()
    for i, known in enumerate(() if recording is None else recording.earlier):
        if known.strategy is strategy and known.prior is not None:
            assert recording is not None
            del recording.earlier[i]
            return known.prior, known.projection
    return None


def announce(strategy: Any, prior_mean: Tensor, projection: Tensor) -> None:
    """Tell whoever wants to change q(u) before it is read."""
    recording = _recording.get()
    if recording is not None and recording.before is not None:
        recording.before(strategy, prior_mean, projection)


def record(strategy: Any, projection: Tensor, mean: Tensor, explained: Tensor, prior: Any = None) -> None:
    """Append a :class:`Record`, if anybody listens.

    Example:
        >>> with tighter_gp.recording.recorded_projections() as records:
        ...     tighter_gp.recording.record(None, torch.eye(2), torch.zeros(2), torch.ones(2))
        >>> records[0].projection.shape
        torch.Size([2, 2])
    """
    recording = _recording.get()
    if recording is not None:
        if torch.is_grad_enabled() and not mean.requires_grad:  # nothing but q(u) is trained
            mean.requires_grad_()
            explained.requires_grad_()
        recording.records.append(Record(strategy, projection, mean, explained, prior))
