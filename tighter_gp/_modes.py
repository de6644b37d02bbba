"""Run a model in another mode and put every module back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
