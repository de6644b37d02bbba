"""Random numbers where they are needed, from a generator wherever it is."""

from __future__ import annotations

import torch
from torch import Tensor


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
