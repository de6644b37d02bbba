"""Several processes, one model: what :func:`tighter_gp.fit` asks of :mod:`torch.distributed`.

Each process takes its part of every batch. A part's loss is a mean over its points plus the KL divergence. So losses and
gradients, each times its part's share of the batch, sum to those of the whole batch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _start_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _start_group(backend: str) -> None:
    store, rank, world_size = next(dist.rendezvous("env://"))
    corner = dist.PrefixStore(f"tighter_gp/{next(_started)}", store)
    dist.init_process_group(backend, store=corner, rank=rank, world_size=world_size, timeout=timedelta(hours=2))


@contextmanager
def group(device: torch.device) -> Iterator[None]:
    """The group that ``torchrun`` describes, for the length of the block, unless there is one or none is described.

    :param device: Where the model is; with CUDA each process needs one of its own.

    Example:
        >>> with tighter_gp.training.distributed.group(torch.device("cpu")):  # outside of torchrun nothing starts
        ...     tighter_gp.training.distributed.world_size()
        1
    """
    is_described = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ
    if not is_described or not dist.is_available() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.device_count() > 1 and device.index != local:
            raise ValueError(
                f"The model is on {device} in the process with LOCAL_RANK {local}: move model and data to cuda:{local}, "
                "such as with device = tighter_gp.training.distributed.local_device()."
            )
        torch.cuda.set_device(device)
    _start_group("nccl" if device.type == "cuda" else "gloo")
    try:
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


def total(value: float, device: torch.device) -> float:
    """Sum of a number over the processes."""
    if not is_active():
        return value
    summed = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return float(summed)


def agreed(flag: bool, device: torch.device) -> bool:
    """The first process's answer, for a question on which rounding could divide them.

    Example:
        >>> tighter_gp.training.distributed.agreed(True, torch.device("cpu"))
        True
    """
    if not is_active():
        return flag
    answer = torch.tensor(int(flag), device=device)
    dist.broadcast(answer, 0)
    return bool(answer)


def check_same(data: bytes, device: torch.device) -> None:
    """Raise, in every process, unless all have the same data.

    :param data: A hash of them.
    """
    if not is_active():
        return
    own = torch.tensor([*hashlib.sha256(data).digest()], dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own)
    others = [number for number, other in enumerate(found) if not torch.equal(other, found[0])]
    if others:
        raise ValueError(
            f"The training data of process {', '.join(map(str, others))} differ from those of process 0. Every process must "
            "pass the same arrays: load or draw them with the same seed, such as torch.manual_seed(0) before a random split."
        )


def share_bytes(data: bytes | None, device: torch.device) -> bytes | None:
    """The first process's bytes, in every process."""
    if not is_active():
        return data
    length = torch.tensor(-1 if data is None else len(data), device=device)
    dist.broadcast(length, 0)
    if int(length) < 0:
        return None
    buffer = torch.empty(int(length), dtype=torch.uint8, device=device)
    if data is not None and rank() == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


@torch.no_grad()
def weighted_sum(value: Tensor, weight: float) -> Tensor:
    """The sum over the processes of each one's value times its weight."""
    if not is_active():
        return value
    total = (value * weight).contiguous()
    dist.all_reduce(total)
    return total


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

    A process whose step fails sends zeros in place of the next message. All then raise, and none waits for another.
    """

    def __init__(self, like: Tensor) -> None:
        self.like, self.has_failed = like, False

    @torch.no_grad()
    def __call__(self, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
        """Sums of some tensors.

        :param dtype: Of the message, the same in every process.
        :raises NanError: If a process failed.
        """
        if not is_active():
            return list(tensors)
        flat = torch.cat([torch.zeros_like(self.like, dtype=dtype), *(t.reshape(-1).to(dtype) for t in tensors)])
        self._send(flat)
        parts = flat[1:].split([tensor.numel() for tensor in tensors])
        return [part.reshape(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def fail(self, size: int, dtype: torch.dtype) -> None:
        """Say that this process failed, in place of a message of ``size`` numbers."""
        if is_active():
            flat = torch.zeros(1 + size, dtype=dtype, device=self.like.device)
            flat[0] = 1
            self._send(flat)

    @torch.no_grad()
    def largest(self, value: Tensor) -> Tensor:
        """The largest value over the processes."""
        if is_active():
            value = value.contiguous()
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def _send(self, flat: Tensor) -> None:
        dist.all_reduce(flat)
        num_failed = int(flat[0])
        if num_failed:
            self.has_failed = True
            raise NanError(f"{num_failed} of {world_size()} processes failed")
