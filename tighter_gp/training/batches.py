"""Batches of a training run, drawn by index from tensors or arrays, or from a DataLoader.

The order of the former is a function of the seed and the step alone: a resumed run sees the batches of an uninterrupted one,
on any device and with any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SubsetRandomSampler

from ..checks import check_range
from ..data import Rows, check_array, check_kind, fingerprint, move, row_dim
from ..draws import seed_generators, seed_of
from ..likelihoods.family import signed
from . import distributed


class Batch(NamedTuple):
    """What one process works on in one step.

    :param x: Inputs; None for a latent-variable model.
    :param y: Targets.
    :param rows: Positions in the training set, shape ``B``; None if a DataLoader did not give them.
    :param kwargs: Arguments of the likelihood.
    :param weight: Share of this process in the whole batch. A process without a part of its own has another's row, with
        weight zero.
    :param share: Size of the batch over that of the others, for a short one of a DataLoader: the loss and both kinds of
        step count by it.
    """

    x: Tensor | None
    y: Tensor
    rows: Tensor | None
    kwargs: dict[str, Any]
    weight: float = 1.0
    share: float = 1.0


class ArrayBatches:
    """Batches of tensors, on their device, or of numpy arrays, which may be memory-mapped.

    An epoch is cut into ``ceil(N / B)`` batches whose sizes differ by at most one.

    :param x: ``N x D``, ``... x N x D``, or ``N``; None for a latent-variable model.
    :param y: ``N``, ``N x T``, ``... x N`` or ``... x N x T``.
    :param kwargs: Arguments of the likelihood; a tensor or array has one value per point, ``... x N``, or the shape of y.
    :param batch_size: Most points per step; None for all.
    :param seed: Seed of the order.
    :param like: Tensor whose dtype and device rows of numpy arrays take.
    :param is_split: Whether processes share each batch.
    :param check_y: Looks at targets that are read from an array, batch by batch.
    :ivar num_data: Number of training points.
    :ivar steps_per_epoch: Steps in which each of them is seen once.
    :ivar batch_size: Points in the largest batch, over all processes.
    """

    generators: Sequence[torch.Generator] = ()

    def __init__(
        self,
        x: Any,
        y: Any,
        kwargs: dict[str, Any],
        batch_size: int | None,
        seed: int,
        like: Tensor,
        is_split: bool = True,
        check_y: Callable[[Tensor], None] = lambda values: None,
    ) -> None:
        self.x = None if x is None else Rows(x, like, is_input=True)
        self.num_data = len(y) if self.x is None else len(self.x)
        if self.num_data == 0:
            raise ValueError(f"There are no training points: {'y' if x is None else 'x'} has no rows.")
        dim = row_dim(y.shape, self.num_data, is_batch=self.x is not None and len(self.x.shape) > 2)
        if dim is None:
            raise ValueError(
                f"x has {self.num_data} points, and y of shape {tuple(y.shape)} does not; give y as N, N x T or ... x N."
            )
        self.y = Rows(y, like, dim=dim, name="y")
        self.kwargs = {name: self._argument(name, value) for name, value in kwargs.items()}
        self.seed, self.like, self.is_split, self.check_y = seed, like, is_split, check_y
        self._on_disk = self.y.is_array or (self.x is not None and self.x.is_array)
        self.steps_per_epoch = 1 if batch_size is None else -(-self.num_data // batch_size)
        self.batch_size = -(-self.num_data // self.steps_per_epoch)

    def _argument(self, name: str, value: Any) -> Any:
        check_kind(name, value)
        if not isinstance(value, (Tensor, np.ndarray)):
            return value
        is_like_y = tuple(value.shape) == tuple(self.y.shape)
        if value.shape[-1:] != (self.num_data,) and not is_like_y:
            raise ValueError(
                f"{name}= must have one value per training point, ... x {self.num_data}; got {tuple(value.shape)}."
            )
        return Rows(value, self.y.like, dim=self.y.dim if is_like_y else -1, name=name)

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""
        rank, world_size = (distributed.rank(), distributed.world_size()) if self.is_split else (0, 1)
        epoch, position = divmod(start, self.steps_per_epoch)
        while True:
            for rows in self._order(epoch).tensor_split(self.steps_per_epoch)[position:]:
                own = rows[rank::world_size]
                weight = len(own) / len(rows) if self.is_split else 1 / distributed.world_size()
                yield self._batch(own if len(own) else rows[:1], weight)
            epoch, position = epoch + 1, 0

    def _order(self, epoch: int) -> Tensor:
        # Drawn on the CPU, so that every device sees the same batches.
        device = torch.device("cpu") if self._on_disk else self.like.device
        if self.steps_per_epoch == 1:
            return torch.arange(self.num_data, device=device)
        generator = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, epoch))
        return move(torch.randperm(self.num_data, generator=generator, device="cpu"), device)

    def _batch(self, rows: Tensor, weight: float) -> Batch:
        taken: Tensor | slice = rows
        if len(rows) == self.num_data and not self._on_disk:
            taken = slice(None)  # no copy
        elif self._on_disk:
            taken = rows = rows.sort().values  # a file is read front to back
        kwargs = {name: value[taken] if isinstance(value, Rows) else value for name, value in self.kwargs.items()}
        y = self.y.on_host(taken)
        if self.y.is_array:
            self.check_y(y)
            y = move(y, self.like.device)
        return Batch(None if self.x is None else self.x[taken], y, move(rows, self.like.device), kwargs, weight)

    def fingerprint(self) -> bytes:
        """A hash of all data."""
        return fingerprint(self.x, self.y, *self.kwargs.values())


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
