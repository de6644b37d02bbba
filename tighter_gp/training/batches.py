"""Where the batches of a training run come from: arrays drawn by index, or a DataLoader.

The order is a function of the seed and the step alone. A run resumed at step k therefore sees the batches that an
uninterrupted one sees, on any device and with any number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from ..checks import check_range
from . import distributed

# Samplers whose length is not the number of points they visit, and where they have these points.
_POPULATIONS = {DistributedSampler: "dataset", RandomSampler: "data_source", WeightedRandomSampler: "weights"}


class Batch(NamedTuple):
    """What one process works on in one step.

    :param x: Inputs; None for a latent-variable model.
    :param y: Targets.
    :param rows: Positions in the training set, shape ``B``; None if a DataLoader did not give them.
    :param kwargs: Arguments of the likelihood.
    :param weight: Share of the whole batch, over all processes, that this part is; the shares sum to one.
    """

    x: Tensor | None
    y: Tensor
    rows: Tensor | None
    kwargs: dict[str, Any]
    weight: float


class BatchSource(ABC):
    """Batches for as long as they are asked for.

    :ivar int num_data: Number of training points.
    :ivar int steps_per_epoch: Steps in which each of them is seen once.
    :ivar int batch_size: Points a step, over all processes; the last batch of an epoch may be smaller.
    :ivar like: Tensor whose dtype and device the batches have.
    :ivar generators: What is seeded on the way, besides the global random state.
    """

    num_data: int
    steps_per_epoch: int
    batch_size: int
    like: Tensor
    generators: Sequence[torch.Generator] = ()

    @abstractmethod
    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""


def seed_of(*parts: int) -> int:
    """One seed from several numbers, such that neighbouring ones have nothing in common."""
    return int(np.random.SeedSequence([part % 2**32 for part in parts]).generate_state(1, np.uint64)[0] >> 1)


def from_numpy(values: np.ndarray, like: Tensor, is_input: bool) -> Tensor:
    """A tensor with the dtype and device of another; targets of integers, labels or counts, keep their kind.

    :param is_input: Whether integers, such as pixels, become floating point too.
    """
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    taken = torch.from_numpy(native if native.flags.writeable else native.copy())
    return taken.to(device=like.device, dtype=like.dtype if is_input or taken.is_floating_point() else taken.dtype)


class ArrayBatches(BatchSource):
    """Batches drawn by index from tensors, on their device, or from numpy arrays, which may be memory-mapped.

    :param x: ``N x D``, ``... x N x D``, or ``N``; None for a latent-variable model.
    :param y: ``N``, ``N x T`` or ``... x N``.
    :param kwargs: Arguments of the likelihood; a tensor has one value a point, ``... x N``.
    :param batch_size: Points a step; None for all.
    :param seed: Seed of the order.
    :param like: Tensor whose dtype and device rows of numpy arrays take; inputs of integers become floating point.
    :param is_split: Whether processes share each batch, or each has the whole of it.
    """

    def __init__(
        self,
        x: Tensor | np.ndarray | None,
        y: Tensor | np.ndarray,
        kwargs: dict[str, Any],
        batch_size: int | None,
        seed: int,
        like: Tensor,
        is_split: bool = True,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
        self.x_dim = 0 if x is None or x.ndim == 1 else x.ndim - 2
        rows = y if x is None else x
        self.num_data = rows.shape[self.x_dim] if rows.ndim else 0
        if self.num_data == 0:
            raise ValueError(f"There are no training points: {'y' if x is None else 'x'} has no rows.")
        self.y_dim = self._row_dim(x, y)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.shape[-1:] != (self.num_data,):
                raise ValueError(
                    f"{name}= must have one value a training point, ... x {self.num_data}; got {tuple(value.shape)}."
                )
        self.x, self.y, self.kwargs, self.seed, self.like, self.is_split = x, y, kwargs, seed, like, is_split
        self._on_disk = isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        self.batch_size = self.num_data if batch_size is None else min(batch_size, self.num_data)
        self.steps_per_epoch = -(-self.num_data // self.batch_size)

    def _row_dim(self, x: Tensor | np.ndarray | None, y: Tensor | np.ndarray) -> int:
        if (x is None or x.ndim <= 2) and y.ndim > 0 and y.shape[0] == self.num_data:
            return 0
        if y.ndim > 0 and y.shape[-1] == self.num_data:
            return y.ndim - 1
        raise ValueError(
            f"x has {self.num_data} points, and y of shape {tuple(y.shape)} does not; give y as N, N x T or ... x N."
        )

    def _rows(self, values: Tensor | np.ndarray, rows: Tensor, dim: int) -> Tensor:
        if isinstance(values, Tensor):
            return values.index_select(dim, rows.to(values.device, non_blocking=True))
        return from_numpy(np.take(values, rows.numpy(), axis=dim), self.like, is_input=values is self.x)

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""
        rank, world_size = (distributed.rank(), distributed.world_size()) if self.is_split else (0, 1)
        epoch, position = divmod(start, self.steps_per_epoch)
        device = self.like.device
        while True:
            order = self._order(epoch)
            order = order if self._on_disk else order.to(device)
            for first in range(position * self.batch_size, self.num_data, self.batch_size):
                rows = order[first : first + self.batch_size]
                own = rows[rank::world_size]
                weight = len(own) / len(rows) if self.is_split else 1 / distributed.world_size()
                yield self._batch(own if len(own) else rows[:1], weight, device)
            epoch, position = epoch + 1, 0

    def _order(self, epoch: int) -> Tensor:
        if self.steps_per_epoch == 1:
            return torch.arange(self.num_data)
        # Drawn on the CPU, so that CPU and CUDA runs see the same batches; one copy an epoch.
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.num_data, generator=generator)

    def _batch(self, rows: Tensor, weight: float, device: torch.device) -> Batch:
        if len(rows) == self.num_data and not self._on_disk:
            return Batch(self.x, self.y, rows, self.kwargs, weight)  # type: ignore[arg-type]  # in order, no copy
        if self._on_disk:
            rows = rows.sort().values  # a file on disk is read front to back
        kwargs = {
            name: self._rows(value, rows, value.ndim - 1) if isinstance(value, Tensor) else value
            for name, value in self.kwargs.items()
        }
        x = None if self.x is None else self._rows(self.x, rows, self.x_dim)
        return Batch(x, self._rows(self.y, rows, self.y_dim), rows.to(device), kwargs, weight)


class LoaderBatches(BatchSource):
    """Batches of a :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or ``(x, y, index)``.

    With several processes each has a loader of its own, such as one with a
    :class:`~torch.utils.data.distributed.DistributedSampler`.

    :param loader: The loader; its dataset must know its length.
    :param seed: Seed of the order, for a loader that shuffles.
    :param like: Tensor whose dtype and device the batches take.
    :param noise: Noise variances of all training points, ``... x N``, if the likelihood has them.
    """

    def __init__(self, loader: Any, seed: int, like: Tensor, noise: Tensor | None = None) -> None:
        try:
            self.num_data, self.steps_per_epoch = _num_visited(loader, like.device), len(loader)
        except TypeError:
            raise TypeError(
                "fit needs to know the number of training points: give the DataLoader a dataset with a length, or pass "
                "arrays; memory-mapped numpy arrays may be larger than the memory."
            ) from None
        if self.steps_per_epoch == 0:
            raise ValueError(
                "The DataLoader yields no batch; its batch_size is larger than its dataset with drop_last."
            )
        self.batch_size = getattr(loader, "batch_size", None) or 0
        self.loader, self.seed, self.like, self.noise = loader, seed, like, noise
        owners = (loader, getattr(loader, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        self.generators = [generator for generator in found if generator is not None]

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end; those before it in its epoch are read and dropped."""
        epoch, skip = divmod(start, self.steps_per_epoch)
        while True:
            batch = None
            for batch in self._epoch(epoch):
                if skip:
                    skip -= 1
                    continue
                yield self._batch(batch)
            if batch is None:
                raise ValueError(
                    f"The DataLoader yielded no batch in epoch {epoch} and promised {self.steps_per_epoch}; its dataset must "
                    "start anew each time it is iterated over."
                )
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Any]:
        seed = seed_of(self.seed, epoch)
        for generator in self.generators:
            generator.manual_seed(seed)
        if hasattr(getattr(self.loader, "sampler", None), "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        # A sampler without a generator asks the global one for a seed, and only then.
        torch.default_generator.manual_seed(seed)
        return iter(self.loader)

    def _batch(self, batch: Any) -> Batch:
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise TypeError(f"A DataLoader must yield (x, y) or (x, y, index); got {type(batch).__name__}.")
        moved = [
            part.to(device=self.like.device, dtype=self.like.dtype if part.is_floating_point() else part.dtype)
            for part in batch
        ]
        size = moved[0].shape[0]
        weight = size / distributed.total(size, self.like.device)
        rows = moved[2] if len(moved) == 3 else None
        return Batch(moved[0], moved[1], rows, self._kwargs(rows), weight)

    def _kwargs(self, rows: Tensor | None) -> dict[str, Any]:
        if self.noise is None:
            return {}
        if rows is None:
            raise ValueError(
                "The likelihood has a noise variance for each training point and must know which they are: let the "
                "DataLoader yield (x, y, index)."
            )
        check_range(rows, self.noise.size(-1), f"{self.noise.size(-1)} noise variances")
        return {"noise": self.noise[..., rows]}


def _num_visited(loader: Any, device: torch.device) -> int:
    """Number of points that the epochs visit, over all processes: all of the dataset, or what a sampler has of it."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for kind, points in _POPULATIONS.items():
        if isinstance(sampler, kind):
            return len(getattr(sampler, points))
    if sampler is None or not hasattr(sampler, "__len__"):
        return len(loader.dataset)
    return min(len(loader.dataset), int(distributed.total(len(sampler), device)))
