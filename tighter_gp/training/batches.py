"""Batches of a training run, drawn by index from tensors or arrays, or from a DataLoader.

The order of the former is a function of the seed and the step alone: a resumed run sees the batches of an uninterrupted one,
on any device and with any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood
from torch import Tensor
from torch.utils.data import SubsetRandomSampler

from ..checks import check_range
from ..data import Rows, check_array, check_kind, fingerprint, move, row_dim
from ..draws import seed_generators, seed_of
from ..likelihoods.family import signed
from ..likelihoods.targets import check_targets
from . import distributed
from .validation import check_finite


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
    :param likelihood: The likelihood. It may have noise variances of all points.
    :param like: Tensor whose dtype and device rows of numpy arrays take.
    :param batch_size: Most points per step; None for all.
    :param seed: Seed of the order.
    :ivar num_data: Number of training points.
    :ivar steps_per_epoch: Steps in which each of them is seen once.
    :ivar batch_size: Points in the largest batch, over all processes.
    """

    generators: Sequence[torch.Generator] = ()

    def __init__(
        self, x: Any, y: Any, kwargs: dict[str, Any], likelihood: Any, like: Tensor, batch_size: int | None, seed: int
    ) -> None:
        x, y = (value.detach() if isinstance(value, Tensor) else value for value in (x, y))
        if x is not None:
            check_array("x", x, "a tensor, a numpy array or a DataLoader")
        check_array("y", y)
        self.x = None if x is None else Rows(x, like, is_input=True)
        self.num_data = len(y) if self.x is None else len(self.x)
        if self.num_data == 0:
            raise ValueError(f"There are no training points: {'y' if x is None else 'x'} has no rows.")
        dim = row_dim(y.shape, self.num_data, is_batch=self.x is not None and len(self.x.shape) > 2)
        if dim is None:
            raise ValueError(
                f"x has {self.num_data} points, and y of shape {tuple(y.shape)} does not; give y as N, N x T or ... x N."
            )
        if isinstance(likelihood, DirichletClassificationLikelihood) and y.ndim == 1:
            raise ValueError("Of DirichletClassificationLikelihood pass y=likelihood.transformed_targets, not labels.")
        self.y, self.likelihood = Rows(y, like, dim=dim, name="y"), likelihood
        kwargs = stored_noise(likelihood) | kwargs
        self.kwargs = {name: self._argument(name, value) for name, value in kwargs.items()}
        self.seed, self.like = seed, like
        self._on_disk = self.y.is_array or (self.x is not None and self.x.is_array)
        self.steps_per_epoch = 1 if batch_size is None else -(-self.num_data // batch_size)
        self.batch_size = -(-self.num_data // self.steps_per_epoch)
        if isinstance(x, Tensor):
            check_finite("x", x)
        if isinstance(y, Tensor):  # arrays are looked at batch by batch
            self._check_targets(y)

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

    def _check_targets(self, y: Tensor) -> None:
        """A latent-variable model takes NaN for a missing entry."""
        check_targets(self.likelihood, y[~torch.isnan(y)] if self.x is None else y, "values of y")

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end."""
        rank, world_size = distributed.rank(), distributed.world_size()
        epoch, position = divmod(start, self.steps_per_epoch)
        while True:
            for rows in self._order(epoch).tensor_split(self.steps_per_epoch)[position:]:
                own = rows[rank::world_size]
                yield self._batch(own if len(own) else rows[:1], len(own) / len(rows))
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
            self._check_targets(y)
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
    :param model: The model. The index of a batch is used if a part of it, or the likelihood, asks for one.
    :param likelihood: The likelihood. It may have noise variances of all points.
    :param like: Tensor whose dtype and device the batches take.
    :param seed: Seed of the order, for a loader that shuffles.
    :param num_data: Number of training points, over all processes; default the length of the loader's dataset.
    """

    def __init__(
        self, loader: Any, model: torch.nn.Module, likelihood: Any, like: Tensor, seed: int, num_data: int | None
    ) -> None:
        sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        if num_data is None:
            try:  # the part of a dataset that a split visits
                num_data = len(sampler if isinstance(sampler, SubsetRandomSampler) else loader.dataset)
            except TypeError:
                raise TypeError("The dataset has no length: pass the number of training points, num_data=.") from None
        # Rows per batch; 0 where the loader does not say.
        per_process = getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None) or 0
        self.batch_size, self.num_data = round(distributed.total(per_process, like.device)), num_data
        try:
            self.steps_per_epoch, self.has_length = len(loader), True
        except TypeError:
            self.steps_per_epoch, self.has_length = -(-self.num_data // max(1, self.batch_size)), False
        if self.steps_per_epoch == 0:
            raise ValueError("The DataLoader yields no batch: batch_size is larger than its dataset, with drop_last.")
        self.loader, self.likelihood, self.seed, self.like = loader, likelihood, seed, like
        owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = {getattr(owner, "generator", None) for owner in owners}
        self.generators = [generator for generator in found if isinstance(generator, torch.Generator)]
        self.noise = stored_noise(likelihood).get("noise")
        indexed = [module for module in model.modules() if getattr(module, "needs_index", False)]
        self.limits: list[tuple[Any, str]] = [
            (module.num_data, f"{type(module).__name__}(num_data={module.num_data})") for module in indexed
        ]
        if self.noise is not None:
            self.limits.append((self.noise.size(-1), f"{self.noise.size(-1)} noise variances"))

    def iterate(self, start: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, without end; earlier ones of that epoch are read and dropped."""
        epoch, skip = divmod(start, self.steps_per_epoch) if self.has_length else (0, start)
        for number in itertools.count(epoch):
            batch = None
            for batch in self._epoch(number):
                if skip:
                    skip -= 1
                else:
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
        check_targets(self.likelihood, y, "values of y")
        x, y = x.unsqueeze(-1) if x.dim() == 1 else x, signed(y)
        x, y = x.to(self.like.dtype), y.to(self.like.dtype) if y.is_floating_point() else y
        rows = None
        if index and self.limits:
            if index[0].is_floating_point() or index[0].dtype == torch.bool:
                raise TypeError(f"The third part of a batch is the index of its rows, integers; got {index[0].dtype}.")
            for number, owner in self.limits:
                check_range(index[0], number, owner)
            rows = move(index[0], self.like.device)
        if self.noise is not None and rows is None:
            raise ValueError("The likelihood has a noise per training point: let the DataLoader yield (x, y, index).")
        kwargs = {} if self.noise is None else {"noise": self.noise[..., rows]}
        size = round(distributed.total(len(x), self.like.device))
        if self.batch_size and size > self.batch_size:
            raise ValueError("An item of the dataset has several rows: pass the number of training points, num_data=.")
        share = size / self.batch_size if self.batch_size else 1.0
        return Batch(move(x, self.like.device), move(y, self.like.device), rows, kwargs, len(x) / size, share)

    def fingerprint(self) -> bytes:
        """Nothing is known of the data before they come."""
        return b""


def stored_noise(likelihood: Any) -> dict[str, Tensor]:
    """The noise variances of all training points, of a likelihood that has them."""
    is_fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
    return {"noise": likelihood.noise_covar.noise} if is_fixed else {}
