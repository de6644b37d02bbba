"""Seeds, and the global random state while somebody trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Torch has one random state for all threads: those that train take turns, step by step.
_RANDOM_STATE = threading.RLock()


def seed_of(*parts: int) -> int:
    """One seed from several numbers, such that neighbouring ones have nothing in common."""
    numbers = [part if part >= 0 else part % 2**32 for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and that of a device."""
    # torch.manual_seed would seed every kind of device, and walks the stack for those that are not there.
    torch.default_generator.manual_seed(seed)
    if _has_generator(device):
        module = getattr(torch, device.type)
        with module.device(device):
            module.manual_seed(seed)


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """To be seeded at will: the global state is found again as it was, and no other thread seeds it meanwhile."""
    has_own = _has_generator(device)
    kind = device.type if has_own else "cuda"
    with _RANDOM_STATE, torch.random.fork_rng(devices=[device] if has_own else [], device_type=kind):
        yield


def _has_generator(device: torch.device) -> bool:
    """Whether numbers on this device are drawn from a generator other than the CPU's."""
    return device.type not in ("cpu", "meta") and hasattr(getattr(torch, device.type, None), "manual_seed")
