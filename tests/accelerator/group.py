"""A process group that takes tensors of the device and no others, as NCCL does; gloo does the work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.device import load

NAME = "devccl"


class DeviceGroup(dist.ProcessGroup):
    """What :mod:`torch.distributed` calls; every tensor must be on one device, this process's."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.device: torch.device | None = None

    def _down(self, tensors: Any) -> Any:
        """The CPU's view of the same memory."""
        if isinstance(tensors, (list, tuple)):
            return [self._down(tensor) for tensor in tensors]
        if tensors.device.type != "dev":
            raise RuntimeError(f"No backend type associated with device type {tensors.device.type}")
        if not tensors.is_contiguous() or tensors.is_sparse:
            raise RuntimeError("Tensors must be contiguous and dense")
        self.device = self.device or tensors.device
        if tensors.device != self.device:
            raise RuntimeError(f"This process communicates from {self.device}; got a tensor on {tensors.device}")
        return load().as_cpu(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.gloo.allreduce(self._down(tensors), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self.gloo.broadcast(self._down(tensors), opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.gloo.allgather(self._down(outputs), self._down(inputs), opts or dist.AllgatherOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(dist.BarrierOptions())

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        pass

    @property
    def pg_name(self) -> str:
        return "devccl-default"

    @property
    def group_name(self) -> str:
        return "devccl-default"


def register() -> None:
    """Make ``dist.init_process_group("devccl")`` known."""
    load()
    dist.Backend.register_backend(NAME, DeviceGroup, devices=["dev"])
