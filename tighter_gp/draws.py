"""Seeds, random states and modes of a module: what is changed for a while and found again as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Torch has one random state for all threads.
_RANDOM_STATE = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws on the CPU and on a device follow a seed; afterwards the global state is as it was."""
    with own_random_state(device):
        seed_generators(seed, device)
        yield


def seed_of(*parts: int) -> int:
    """One seed from several numbers, such that neighbouring ones have nothing in common."""
    numbers = [part if part >= 0 else part % 2**32 for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """The global state of the CPU and of a device is found again as it was; threads that seed it take turns."""
    has_own = _has_generator(device)
    kind = device.type if has_own else "cuda"
    with _RANDOM_STATE, torch.random.fork_rng([device] if has_own else [], device_type=kind):
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


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and that of a device."""
    # torch.manual_seed would seed every kind of device, and walks the stack for those that are not there.
    torch.default_generator.manual_seed(seed)
    if _has_generator(device):
        module = getattr(torch, device.type)
        with module.device(device):
            module.manual_seed(seed)


def _has_generator(device: torch.device) -> bool:
    """Whether numbers on this device are drawn from a generator other than the CPU's."""
    return device.type not in ("cpu", "meta") and hasattr(getattr(torch, device.type, None), "manual_seed")
