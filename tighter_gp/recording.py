"""Handing the projection of a training step to whoever trains q(u)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor


class Record(NamedTuple):
    r"""One forward pass of a strategy in training mode.

    :param strategy: The strategy.
    :param projection: :math:`A`, ``... x M x B``, without a graph.
    :param mean: :math:`A^\top m`, ``... x B``, with its graph.
    :param explained: :math:`s_n`, ``... x B``, with its graph.
    """

    strategy: Any
    projection: Tensor
    mean: Tensor
    explained: Tensor


_records: ContextVar[list[Record] | None] = ContextVar("records", default=None)


@contextmanager
def recorded_projections() -> Iterator[list[Record]]:
    """Collect a record of each forward pass within the block."""
    records: list[Record] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record(strategy: Any, projection: Tensor, mean: Tensor, explained: Tensor) -> None:
    """Note a forward pass, if somebody collects them."""
    records = _records.get()
    if records is not None:
        records.append(Record(strategy, projection, mean, explained))
