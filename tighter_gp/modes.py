"""Going through data in chunks or parts, and running a model in another mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch


@contextmanager
def temporary_mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """``module.train(training)`` for the length of the block; each submodule gets its own mode back."""
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def chunks(num_rows: int, chunk_size: int) -> Iterator[slice]:
    """Consecutive slices of at most ``chunk_size`` rows."""
    if chunk_size < 1:
        raise ValueError(f"A chunk needs at least one row; got {chunk_size}.")
    return (slice(start, min(start + chunk_size, num_rows)) for start in range(0, num_rows, chunk_size))


def spans(sizes: Iterable[int]) -> list[slice]:
    """Consecutive slices of given lengths."""
    ends = list(accumulate(sizes))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
