"""Where the batches of a training run come from: arrays drawn by index.

The order is a function of the seed and the step alone. A run resumed at step k therefore sees the batches that an
uninterrupted one sees, on any device and with any number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import Rows, check_kind, fingerprint, move, row_dim
from . import distributed
from .randomness import seed_of


class Batch(NamedTuple):
    """What one process works on in one step.

    :param x: Inputs; None for a latent-variable model.
    :param y: Targets.
    :param rows: Positions in the training set, shape ``B``; None if a DataLoader did not give them.
    :param kwargs: Arguments of the likelihood.
    :param weight: Share of the whole batch, over all processes, that this part is; the shares sum to one. A process without a
        part of its own has a row of another's, with weight zero.
    :param size: Points in the whole batch, over all processes.
    :param share: Size over that of the other batches, where a DataLoader cuts a short one: the loss and both kinds of step
        count by it.
    """

    x: Tensor | None
    y: Tensor
    rows: Tensor | None
    kwargs: dict[str, Any]
    weight: float
    size: int
    share: float = 1.0


class BatchSource(ABC):
    """Batches for as long as they are asked for.

    :ivar int num_data: Number of training points.
    :ivar int steps_per_epoch: Steps in which each of them is seen once.
    :ivar int batch_size: Points in the largest batch, over all processes.
    :ivar most_rows: What was asked for.
    :ivar like: Tensor whose dtype and device the batches have.
    :ivar generators: What is seeded on the way, besides the global random state.
    """

    num_data: int
    steps_per_epoch: int
    batch_size: int
    most_rows: int | None = None
    like: Tensor
    generators: Sequence[torch.Generator] = ()

    @abstractmethod
    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""

    def add_arguments(self, kwargs: dict[str, Any]) -> None:
        """Per-point arguments that go with the batches."""
        if kwargs:
            raise TypeError(f"A {type(self).__name__} has no place for {', '.join(kwargs)}.")

    def fingerprint(self) -> bytes:
        """A hash that is the same in every process if the data must be."""
        return b""


class ArrayBatches(BatchSource):
    """Batches drawn by index from tensors, on their device, or from numpy arrays, which may be memory-mapped.

    :param x: ``N x D``, ``... x N x D``, or ``N``; None for a latent-variable model.
    :param y: ``N``, ``N x T``, ``... x N`` or ``... x N x T``.
    :param kwargs: Arguments of the likelihood; a tensor or array has one value per point, ``... x N``, or the shape of y.
    :param batch_size: Points per step, at most: an epoch is cut evenly. None for all.
    :param seed: Seed of the order.
    :param like: Tensor whose dtype and device rows of numpy arrays take; inputs of integers become floating point.
    :param is_split: Whether processes share each batch, or each has the whole of it.
    :param check_y: Looks at the targets of a batch that was read from an array, before it goes to the device.
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
        check_y: Callable[[Tensor], None] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
        self.x = None if x is None else Rows(x, like, is_input=True, name="x")
        self.num_data = (y.shape[0] if y.ndim else 0) if self.x is None else len(self.x)
        if self.num_data == 0:
            raise ValueError(f"There are no training points: {'y' if x is None else 'x'} has no rows.")
        y_dim = row_dim(y.shape, self.num_data, is_batch=self.x is not None and len(self.x.shape) > 2)
        if y_dim is None:
            raise ValueError(
                f"x has {self.num_data} points, and y of shape {tuple(y.shape)} does not; give y as N, N x T or ... x N."
            )
        self.y = Rows(y, like, dim=y_dim, name="y")
        self.kwargs: dict[str, Any] = {}
        self.add_arguments(kwargs)
        self.seed, self.like, self.is_split, self.check_y = seed, like, is_split, check_y
        self._on_disk = self.y.is_array or (self.x is not None and self.x.is_array)
        # ceil(N / B) batches whose sizes differ by at most one: the mean over a short one would be a step of noise.
        self.most_rows = batch_size
        self.steps_per_epoch = 1 if batch_size is None else -(-self.num_data // batch_size)
        self.batch_size = -(-self.num_data // self.steps_per_epoch)

    def add_arguments(self, kwargs: dict[str, Any]) -> None:
        """Per-point arguments that go with the batches, beside those there are or in place of them."""
        self.kwargs |= {name: self._argument(name, value) for name, value in kwargs.items()}

    def _argument(self, name: str, value: Any) -> Any:
        check_kind(name, value)
        if not isinstance(value, (Tensor, np.ndarray)):
            return value
        if value.shape[-1:] != (self.num_data,) and tuple(value.shape) != tuple(self.y.shape):
            raise ValueError(
                f"{name}= must have one value per training point, ... x {self.num_data}; got {tuple(value.shape)}."
            )
        return Rows(value, self.y.like, dim=self.y.dim if tuple(value.shape) == tuple(self.y.shape) else -1, name=name)

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""
        rank, world_size = (distributed.rank(), distributed.world_size()) if self.is_split else (0, 1)
        epoch, position = divmod(start, self.steps_per_epoch)
        device = self.like.device
        while True:
            for rows in self._order(epoch).tensor_split(self.steps_per_epoch)[position:]:
                own = rows[rank::world_size]
                weight = len(own) / len(rows) if self.is_split else 1 / distributed.world_size()
                yield self._batch(own if len(own) else rows[:1], weight, len(rows), device)
            epoch, position = epoch + 1, 0

    def _order(self, epoch: int) -> Tensor:
        # Drawn on the CPU whatever the default device, so that CPU and CUDA runs see the same batches; one copy per epoch.
        device = torch.device("cpu") if self._on_disk else self.like.device
        if self.steps_per_epoch == 1:
            return torch.arange(self.num_data, device=device)
        generator = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, epoch))
        return move(torch.randperm(self.num_data, generator=generator, device="cpu"), device)

    def _batch(self, rows: Tensor, weight: float, size: int, device: torch.device) -> Batch:
        taken: Tensor | slice = rows
        if len(rows) == self.num_data and not self._on_disk:
            taken = slice(None)  # in order, no copy
        elif self._on_disk:
            taken = rows = rows.sort().values  # a file on disk is read front to back
        kwargs = {name: value[taken] if isinstance(value, Rows) else value for name, value in self.kwargs.items()}
        x = None if self.x is None else self.x[taken]
        y = self.y.on_host(taken)
        if self.y.is_array:
            if self.check_y is not None:
                self.check_y(y)
            y = move(y, device)
        return Batch(x, y, move(rows, device), kwargs, weight, size)

    def fingerprint(self) -> bytes:
        """A hash of all data."""
        return fingerprint(self.x, self.y, *self.kwargs.values())
