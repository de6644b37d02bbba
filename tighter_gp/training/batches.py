"""Batches of a training run, drawn by index from tensors or arrays.

Their order is a function of the seed and the step alone: a resumed run sees the batches of an uninterrupted one, on any
device and with any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import Rows, check_kind, fingerprint, move, row_dim
from ..draws import seed_of
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
