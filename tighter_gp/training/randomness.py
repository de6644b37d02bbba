"""Seeds, and the global random state while somebody trains."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..draws import kept_random_state

# Torch has one random state for all threads: those that train take turns, step by step.
_RANDOM_STATE = threading.RLock()


def seed_of(*parts: int) -> int:
    """One seed from several numbers, such that neighbouring ones have nothing in common."""
    numbers = [part if part >= 0 else part % 2**32 for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """To be seeded at will: the global state is found again as it was, and no other thread seeds it meanwhile."""
    with _RANDOM_STATE, kept_random_state(device):
        yield


@contextmanager
def kept_states(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Generators are left as they were."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
