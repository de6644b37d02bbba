"""Several processes, one model: what :func:`tighter_gp.fit` asks of :mod:`torch.distributed`.

Each process takes its part of every batch. The parts' losses are means over their own points plus the same KL
divergence, so weighting each with its share of the batch and summing the gradients gives the gradient of the joined
batch, with the KL divergence counted once, whatever the sizes of the parts.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
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
        >>> tighter_gp.training.distributed.barrier()  # one process waits for nobody
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
def sum_tensors(tensors: Sequence[Tensor]) -> None:
    """Sum tensors over the processes, in place."""
    for tensor, total in zip(tensors, _summed(tensors), strict=True):
        tensor.copy_(total)


def _summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums over the processes: one message per dtype, in the same order everywhere, since messages have no names."""
    sums = list(tensors)
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.all_reduce(flat)
        for place, part in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
            sums[place] = part.reshape(tensors[place].shape)
    return sums


def weighted_sum(value: Tensor, weight: float) -> Tensor:
    """The sum over the processes of each one's value times its weight."""
    if not is_active():
        return value
    total = (value * weight).contiguous()
    sum_tensors([total])
    return total


@torch.no_grad()
def share_state(modules: Iterable[torch.nn.Module]) -> None:
    """Give every process the first one's parameters and buffers."""
    if not is_active():
        return
    seen: set[int] = set()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                data = tensor.data.contiguous()
                dist.broadcast(data, 0)
                tensor.data.copy_(data)


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], loss: Tensor | None) -> tuple[Tensor | None, int]:
    """Sum weighted losses and their gradients over the processes, sparse gradients included.

    :param parameters: The same parameters in the same order in every process.
    :param loss: This process's weighted loss, or None if its step failed.
    :return: The loss of the joined batch and the number of processes that failed. If any failed, no gradient is summed.
    """
    if not is_active():
        return loss, int(loss is None)
    grads = [parameter.grad for parameter in parameters]
    dense = [float(grad is not None and not grad.is_sparse) for grad in grads]
    sparse = [float(grad is not None and grad.is_sparse) for grad in grads]
    value = 0.0 if loss is None else float(loss.detach())
    header = torch.tensor(
        [float(loss is None), value, *dense, *sparse], dtype=torch.float64, device=parameters[0].device
    )
    dist.all_reduce(header)
    failed, value, *flags = header.tolist()
    if failed:
        return None, int(failed)
    is_dense, is_sparse = flags[: len(grads)], flags[len(grads) :]
    members = [parameter for parameter, flag in zip(parameters, is_dense, strict=True) if flag]
    known = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in members]
    for parameter, total in zip(members, _summed(known), strict=True):
        parameter.grad = total.clone()
    for parameter, flag in zip(parameters, is_sparse, strict=True):
        if flag:
            parameter.grad = _sum_sparse(parameter)
    return header.new_tensor(value), 0


def _sum_sparse(parameter: Tensor) -> Tensor:
    """The rows that any process touched; their number differs between processes, so the shorter lists are padded."""
    if parameter.grad is None:
        rows = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros(0, *parameter.shape[1:])
    else:
        grad = parameter.grad.coalesce()
        rows, values = grad.indices(), grad.values()
    lengths = [torch.zeros(1, dtype=torch.int64, device=parameter.device) for _ in range(world_size())]
    dist.all_gather(lengths, torch.tensor([rows.size(1)], device=parameter.device))
    counts = [int(length) for length in lengths]
    padding = max(counts) - rows.size(1)
    rows = torch.cat([rows, rows.new_zeros(rows.size(0), padding)], dim=1)
    values = torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
    all_rows = [torch.empty_like(rows) for _ in counts]
    all_values = [torch.empty_like(values) for _ in counts]
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_values, values)
    # The padding must go again: an optimizer with momentum moves every row it is given, even by a gradient of zero.
    return torch.sparse_coo_tensor(
        torch.cat([part[:, :count] for part, count in zip(all_rows, counts, strict=True)], dim=1),
        torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)]),
        parameter.shape,
        check_invariants=False,
    ).coalesce()
