"""Batches of a DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SubsetRandomSampler

from ..checks import check_range
from ..data import check_array, move, signed
from ..draws import seed_generators, seed_of
from . import distributed
from .batches import Batch


class LoaderBatches:
    """Batches of a :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or ``(x, y, index)``.

    With several processes each has a loader of its own, such as one with a
    :class:`~torch.utils.data.distributed.DistributedSampler`.

    :param loader: The loader.
    :param seed: Seed of the order, for a loader that shuffles.
    :param like: Tensor whose dtype and device the batches take.
    :param noise: Noise variances of all training points, ``... x N``, of a likelihood that has them.
    :param num_data: Number of training points, over all processes; default the length of the loader's dataset.
    :param check_y: Looks at the targets of a batch.
    :param limits: Numbers of rows that the index of a batch must keep to, and what has them. Without any the index is not
        used.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        like: Tensor,
        noise: Tensor | None = None,
        num_data: int | None = None,
        check_y: Callable[[Tensor], None] = lambda values: None,
        limits: Sequence[tuple[int, str]] = (),
    ) -> None:
        try:
            self.num_data = _num_data(loader) if num_data is None else num_data
        except TypeError:
            raise TypeError("The dataset has no length: pass the number of training points, num_data=.") from None
        per_process = _batch_size(loader)
        self.batch_size = round(distributed.total(per_process, like.device))
        try:
            self.steps_per_epoch, self.has_length = len(loader), True
        except TypeError:
            self.steps_per_epoch, self.has_length = -(-self.num_data // max(1, self.batch_size)), False
        if self.steps_per_epoch == 0:
            raise ValueError("The DataLoader yields no batch: batch_size is larger than its dataset, with drop_last.")
        self.loader, self.seed, self.like, self.noise, self.check_y = loader, seed, like, noise, check_y
        self.generators, self.limits = _generators(loader), list(limits)
        if noise is not None:
            self.limits.append((noise.size(-1), f"{noise.size(-1)} noise variances"))

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end; earlier ones of that epoch are read and dropped."""
        epoch, skip = divmod(start, self.steps_per_epoch) if self.has_length else (0, start)
        for number in itertools.count(epoch):
            batch = None
            for batch in self._epoch(number):
                if skip:
                    skip -= 1
                    continue
                yield self._batch(batch)
            if batch is None:
                raise ValueError(f"The DataLoader yielded no batch in epoch {number}: its dataset must start anew.")

    def _epoch(self, epoch: int) -> Iterator[Any]:
        seed = seed_of(self.seed, epoch)
        for generator in self.generators:
            generator.manual_seed(seed)
        if hasattr(getattr(self.loader, "sampler", None), "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        seed_generators(seed, self.like.device)  # of samplers without a generator
        for position, batch in enumerate(self.loader, 1):
            yield batch
            # The dataset may draw: other numbers for each batch and process.
            seed_generators(seed_of(self.seed, epoch, position, distributed.rank()), self.like.device)

    def _batch(self, batch: Any) -> Batch:
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise TypeError(f"A DataLoader must yield (x, y) or (x, y, index); got {type(batch).__name__}.")
        x, y, *index = batch
        check_array("x", x)
        check_array("y", y)
        self.check_y(y)
        x, y = x.unsqueeze(-1) if x.dim() == 1 else x, signed(y)
        x, y = x.to(self.like.dtype), y.to(self.like.dtype) if y.is_floating_point() else y
        rows = self._index(*index) if index and self.limits else None
        x, y = move(x, self.like.device), move(y, self.like.device)
        size = round(distributed.total(len(x), self.like.device))
        if self.batch_size and size > self.batch_size:
            raise ValueError("An item of the dataset has several rows: pass the number of training points, num_data=.")
        share = size / self.batch_size if self.batch_size else 1.0
        return Batch(x, y, rows, self._kwargs(rows), len(x) / size, share)

    def _index(self, index: Any) -> Tensor:
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
            kind = getattr(index, "dtype", type(index).__name__)
            raise TypeError(f"The third part of a batch is the index of its rows, integers; got {kind}.")
        for size, owner in self.limits:
            check_range(index, size, owner)
        return move(index, self.like.device)

    def _kwargs(self, rows: Tensor | None) -> dict[str, Any]:
        if self.noise is None:
            return {}
        if rows is None:
            raise ValueError("The likelihood has a noise per training point: let the DataLoader yield (x, y, index).")
        return {"noise": self.noise[..., rows]}

    def fingerprint(self) -> bytes:
        """Nothing is known of the data before they come."""
        return b""


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def _batch_size(loader: Any) -> int:
    """Rows per batch of one process; 0 where the loader does not say."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None) or 0


def _num_data(loader: Any) -> int:
    """Length of the dataset, or of the part of it that a split visits."""
    sampler = getattr(loader, "sampler", None)
    return len(sampler) if isinstance(sampler, SubsetRandomSampler) else len(loader.dataset)
