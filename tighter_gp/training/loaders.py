"""Batches of a DataLoader, and how many training points it has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ..blocks import BlockBatchSampler
from ..checks import check_range
from ..data import check_array, move, signed
from ..draws import seed_generators
from . import distributed
from .batches import Batch, BatchSource
from .randomness import kept_states, own_random_state, seed_of

# Samplers whose length is not the number of points they visit, and where they have these points.
_POPULATIONS = {DistributedSampler: "dataset", RandomSampler: "data_source"}


class LoaderBatches(BatchSource):
    """Batches of a :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or ``(x, y, index)``.

    With several processes each has a loader of its own, such as one with a
    :class:`~torch.utils.data.distributed.DistributedSampler`.

    :param loader: The loader; one without a length needs ``num_data``, and is iterated over again and again.
    :param seed: Seed of the order, for a loader that shuffles.
    :param like: Tensor whose dtype and device the batches take.
    :param noise: Noise variances of all training points, ``... x N``, if the likelihood has them.
    :param num_data: Number of training points, over all processes; default what the loader says.
    :param check_y: Looks at the targets of a batch before it goes to the device.
    :param limits: Numbers of rows that the index of a batch must keep to, and whose they are; without any, a third part of a
        batch is not looked at.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        like: Tensor,
        noise: Tensor | None = None,
        num_data: int | None = None,
        check_y: Callable[[Tensor], None] | None = None,
        limits: Sequence[tuple[int, str]] = (),
    ) -> None:
        try:
            self.num_data = num_visited(loader, like.device) if num_data is None else num_data
        except TypeError:
            raise TypeError(
                "fit needs to know the number of training points: pass num_data=, give the DataLoader a dataset with a length, "
                "or pass arrays; memory-mapped numpy arrays may be larger than the memory."
            ) from None
        per_process = _batch_size(loader)
        self._most_rows = 0 if num_data is not None else per_process
        self.batch_size = round(distributed.total(per_process, like.device))
        self.steps_per_epoch, self.has_length = _num_batches(loader, self.num_data, per_process)
        if self.steps_per_epoch == 0:
            raise ValueError(
                "The DataLoader yields no batch; its batch_size is larger than its dataset with drop_last."
            )
        self.loader, self.seed, self.like, self.noise, self.check_y = loader, seed, like, noise, check_y
        self.generators, self.limits = _generators(loader), list(limits)
        if noise is not None:
            self.limits.append((noise.size(-1), f"{noise.size(-1)} noise variances"))

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end; those before it in its epoch are read and dropped, and without a
        length all before it.
        """
        epoch, skip = divmod(start, self.steps_per_epoch) if self.has_length else (0, start)
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
        # A sampler without a generator asks the global one for a seed, with the first batch at the latest.
        seed_generators(seed, self.like.device)
        batches = iter(self.loader)
        for position in itertools.count(1):
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            # A dataset may draw, and a sampler as it is asked: other numbers for each batch, whoever reads it.
            seed_generators(seed_of(self.seed, epoch, position, distributed.rank()), self.like.device)

    def _batch(self, batch: Any) -> Batch:
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise TypeError(f"A DataLoader must yield (x, y) or (x, y, index); got {type(batch).__name__}.")
        x, y, *index = batch
        if not self.limits:
            index = []  # nothing asks which rows these are
        check_array("x", x)
        check_array("y", y)
        if self.check_y is not None:
            self.check_y(y)
        if self._most_rows and len(x) > self._most_rows:
            raise ValueError(
                f"A batch of {self._most_rows} items has {len(x)} rows, so the number of items is not that of training points: "
                "pass that, fit(..., num_data=)."
            )
        if index and (not isinstance(index[0], Tensor) or index[0].is_floating_point() or index[0].dtype == torch.bool):
            kind = getattr(index[0], "dtype", type(index[0]).__name__)
            raise TypeError(f"The third part of a batch is the index of its rows, integers; got {kind}.")
        for size, owner in self.limits if index else ():
            check_range(index[0], size, owner)
        x, y = x.unsqueeze(-1) if x.dim() == 1 else x, signed(y)
        x, y = x.to(self.like.dtype), y.to(self.like.dtype) if y.is_floating_point() else y
        x, y, *index = (move(part, self.like.device) for part in (x, y, *index))
        size = round(distributed.total(len(x), self.like.device))
        rows = index[0] if index else None
        share = min(1.0, size / self.batch_size) if self.batch_size else 1.0
        return Batch(x, y, rows, self._kwargs(rows), len(x) / size, size, share)

    def _kwargs(self, rows: Tensor | None) -> dict[str, Any]:
        if self.noise is None:
            return {}
        if rows is None:
            raise ValueError(
                "The likelihood has a noise variance for each training point and must know which they are: let the "
                "DataLoader yield (x, y, index)."
            )
        return {"noise": self.noise[..., rows]}


def _batch_size(loader: Any) -> int:
    """Rows per batch of one process; 0 where nobody says."""
    return (
        getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 0
    )


def _num_batches(loader: Any, num_data: int, batch_size: int) -> tuple[int, bool]:
    """Number of batches in an epoch, and whether the loader says so itself."""
    try:
        return len(loader), True
    except TypeError:
        if not batch_size:
            raise TypeError(
                "The DataLoader has neither a length nor a batch_size, so that fit does not know how long an epoch is: give its "
                "dataset a length."
            ) from None
        return -(-num_data // (batch_size * distributed.world_size())), False


def num_visited(loader: Any, device: torch.device) -> int:
    """Number of points that the epochs visit, over all processes: all of the dataset, or what a sampler has of it.

    :param device: Where processes exchange messages.
    :raises ValueError: If only a part of the dataset can be seen, and it is unknown which.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and batch_sampler is None:
        batch_sampler = loader.sampler  # batch_size=None: what it yields are batches, or items of the dataset are
        if not isinstance(batch_sampler, BatchSampler | BlockBatchSampler):
            raise ValueError(
                "A DataLoader with batch_size=None does not say how many points its batches have in all: pass their number, "
                "fit(..., num_data=)."
            )
    if batch_sampler is None:
        return len(loader.dataset)
    if isinstance(batch_sampler, BlockBatchSampler):
        return int(batch_sampler.sizes.sum())
    if not hasattr(batch_sampler, "sampler"):
        return _joined(_num_listed(loader, batch_sampler), loader, device)
    sampler = batch_sampler.sampler
    for kind, points in _POPULATIONS.items():
        if isinstance(sampler, kind):
            return len(getattr(sampler, points))
    if isinstance(sampler, SequentialSampler) and batch_sampler.drop_last:
        count = len(sampler)
        return _joined(count - count % batch_sampler.batch_size, loader, device)  # the others are never seen
    if isinstance(sampler, WeightedRandomSampler):
        return int((sampler.weights > 0).sum())
    if hasattr(sampler, "indices"):
        return _joined(len({int(row) for row in sampler.indices}), loader, device)
    if isinstance(sampler, (list, tuple)):
        return _joined(len({int(row) for row in sampler}), loader, device)
    return len(loader.dataset) if not hasattr(sampler, "__len__") else _joined(len(sampler), loader, device)


def _joined(count: int, loader: Any, device: torch.device) -> int:
    return min(len(loader.dataset), int(distributed.total(count, device)))


def _num_listed(loader: Any, batches: Iterable[Any]) -> int:
    """Number of points in batches that are listed, or that are drawn anew in each epoch and always all."""
    if isinstance(batches, (list, tuple)):
        return len({int(row) for batch in batches for row in batch})
    if not hasattr(batches, "__next__"):  # an iterator would be used up
        with kept_states(_generators(loader)), own_random_state(torch.device("cpu")):
            count = len({int(row) for batch in batches for row in batch})
        if count == len(loader.dataset):
            return count
    raise ValueError(
        f"The batch_sampler ({type(batches).__name__}) does not say which of the {len(loader.dataset)} points of the dataset "
        "it visits over all epochs: pass their number, fit(..., num_data=), or use a list of batches or "
        "torch.utils.data.BatchSampler."
    )


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {
        id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)
    }
    return list(found.values())
