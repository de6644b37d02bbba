"""Random numbers where they are needed, from a generator wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws on the CPU and on a device follow a seed; afterwards every global generator is as it was."""
    has_own = device.type not in ("cpu", "meta")
    with torch.random.fork_rng([device] if has_own else [], device_type=device.type if has_own else "cuda"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices of others too
        if has_own:
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield


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
