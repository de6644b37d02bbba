"""Seeds, and random numbers that leave the global random state as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

# Torch has one random state for all threads: those that train take turns, step by step.
_RANDOM_STATE = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws on the CPU and on a device follow a seed; afterwards the global state is as it was."""
    with kept_random_state(device):
        seed_generators(seed, device)
        yield


def seed_of(*parts: int) -> int:
    """One seed from several numbers, such that neighbouring ones have nothing in common."""
    numbers = [part if part >= 0 else part % 2**32 for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """The global random state is found again as it was, and no other thread that trains seeds it meanwhile."""
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


def drawn(seed: int, generator: torch.Generator | None, device: torch.device) -> AbstractContextManager[None]:
    """Draws follow a seed, :func:`seeded`, unless they come from a generator."""
    return seeded(seed, device) if generator is None else nullcontext()


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn or seeded within it, the global state of the CPU and of a device is found again as it was."""
    has_own = _has_generator(device)
    with torch.random.fork_rng([device] if has_own else [], device_type=device.type if has_own else "cuda"):
        yield


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


def standard_normal(shape: tuple[int, ...] | torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of the dtype and on the device of ``like``; without a generator from the device's global one."""
    where = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=where, generator=generator).to(like.device)


def permutation(
    size: int, device: torch.device | str, generator: torch.Generator | None, default: torch.device | str = "cpu"
) -> Tensor:
    """The numbers from 0 to ``size - 1`` in random order.

    :param default: The device whose global generator is used without a generator.
    """
    where = default if generator is None else generator.device
    return torch.randperm(size, device=where, generator=generator).to(device)
