"""Several processes, one model: what :func:`tighter_gp.fit` asks of :mod:`torch.distributed`.

Each process takes its part of every batch. A part's loss is a mean over its points plus the KL divergence. So losses and
gradients, each times its part's share of the batch, sum to those of the whole batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from linear_operator.utils.errors import NanError
from torch import Tensor

__all__ = ["agreed", "barrier", "group", "is_active", "local_device", "rank", "start", "stop", "world_size"]

# Groups started by this process so far; each meets in a corner of its own, since torchrun's store remembers the last.
_started = itertools.count()


def is_active() -> bool:
    """Whether this process belongs to a group of more than one.

    Example:
        >>> tighter_gp.training.distributed.is_active()
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Number of this process; 0 when there is but one.

    Example:
        >>> tighter_gp.training.distributed.rank()
        0
    """
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    """Number of processes.

    Example:
        >>> tighter_gp.training.distributed.world_size()
        1
    """
    return dist.get_world_size() if is_active() else 1


def local_device() -> torch.device:
    """The device of this process: the GPU that ``torchrun`` gave it by its local rank, the first one, or the CPU.

    Example:
        >>> tighter_gp.training.distributed.local_device().type in ("cpu", "cuda")
        True
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start(device: torch.device | str = "cpu") -> torch.device:
    r"""Join the group that ``torchrun`` describes in the environment, if there is one.

    The backend is ``nccl`` for CUDA, where each process gets a device of its own, and ``gloo`` otherwise.

    :param device: The device asked for.
    :return: The device of this process.

    Example:
        >>> tighter_gp.training.distributed.start("cpu")  # outside of torchrun nothing starts
        device(type='cpu')
    """
    device = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or not dist.is_available():
        return device
    if device.type == "cuda":
        device = local_device()
    if not dist.is_initialized():
        store, number, count = next(dist.rendezvous("env://"))
        corner = dist.PrefixStore(f"tighter_gp/{next(_started)}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=corner, rank=number, world_size=count, timeout=timedelta(hours=2))
    return device


@contextmanager
def group(device: torch.device) -> Iterator[None]:
    """The group that ``torchrun`` describes, for the length of the block, unless there is one or none is described.

    :param device: Where the model is; with CUDA each process needs one of its own.

    Example:
        >>> with tighter_gp.training.distributed.group(torch.device("cpu")):  # outside of torchrun nothing starts
        ...     tighter_gp.training.distributed.world_size()
        1
    """
    if "MASTER_ADDR" not in os.environ or not dist.is_available() or dist.is_initialized():
        yield
        return
    own = start(device)
    try:
        if own != device:
            raise ValueError(
                f"The model is on {device}, and {own} is this process's: move model and data there, such as with device = "
                "tighter_gp.training.distributed.local_device()."
            )
        yield
        barrier()
    finally:
        stop()


def stop() -> None:
    """Leave the group.

    Example:
        >>> tighter_gp.training.distributed.stop()  # where nothing was started nothing happens
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all processes.

    Example:
        >>> tighter_gp.training.distributed.barrier()  # a single process does not wait
    """
    if is_active():
        dist.barrier()


def agreed(flag: bool, device: torch.device) -> bool:
    """The first process's answer, for a question on which rounding could divide them.

    Example:
        >>> tighter_gp.training.distributed.agreed(True, torch.device("cpu"))
        True
    """
    return bool(first_ones(flag, device))


def first_ones(value: Any, device: torch.device) -> Any:
    """The first process's value, in every process: bytes, a text, a number or None."""
    if not is_active():
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, device=device)
    return values[0]


@torch.no_grad()
def summed(value: Tensor) -> Tensor:
    """Sum of a tensor over the processes."""
    if is_active():
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value)
    return value


def total(value: float, device: torch.device) -> float:
    """Sum of a number over the processes."""
    return float(summed(torch.tensor(float(value), dtype=torch.float64, device=device))) if is_active() else value


def check_same(data: bytes, device: torch.device) -> None:
    """Raise, in every process, unless all have the same data.

    :param data: A hash of them.
    """
    differs = torch.zeros(world_size(), device=device)
    differs[rank()] = float(data != first_ones(data, device))
    others = summed(differs).nonzero().flatten().tolist()
    if others:
        raise ValueError(
            f"The training data of process {', '.join(map(str, others))} differ from those of process 0. Every process must "
            "pass the same arrays: load or draw them with the same seed, such as torch.manual_seed(0) before a random split."
        )


@torch.no_grad()
def share_state(modules: Iterable[torch.nn.Module]) -> None:
    """Give every process the first one's parameters and buffers."""
    if not is_active():
        return
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    for tensor in tensors.values():
        data = tensor.data.contiguous()
        dist.broadcast(data, 0)
        tensor.data.copy_(data)


class StepSums:
    """Sums over the processes within one step, each in one flat message that also says how many processes failed.

    A process whose step fails sends zeros in place of its next message. All then raise, and none waits for another.

    :param messages: Tensors of the shapes and the dtype of each message, in their order.
    """

    def __init__(self, *messages: Sequence[Tensor]) -> None:
        self.messages = [message for message in messages if message]

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Sums of some tensors.

        :raises NanError: If a process failed.
        """
        return self._send(0.0, tensors) if is_active() else tensors

    def fail(self) -> None:
        """Say that this process failed, unless that came from another."""
        if is_active() and self.messages:
            with suppress(NanError):
                self._send(1.0, [torch.zeros_like(tensor) for tensor in self.messages[0]])

    @torch.no_grad()
    def largest(self, value: Tensor) -> Tensor:
        """The largest value over the processes."""
        if is_active():
            value = value.contiguous()
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def _send(self, failed: float, tensors: Sequence[Tensor]) -> list[Tensor]:
        like = self.messages.pop(0)[0]
        flat = torch.cat([like.new_full((1,), failed), *(tensor.reshape(-1).to(like) for tensor in tensors)])
        dist.all_reduce(flat)
        num_failed = int(flat[0])
        if num_failed:
            self.messages = []
            raise NanError(f"{num_failed} of {world_size()} processes failed")
        parts = flat[1:].split([tensor.numel() for tensor in tensors])
        return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
