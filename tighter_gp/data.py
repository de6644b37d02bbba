"""Rows of tensors, numpy arrays and memory maps, in the precision and on the device of a model."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import check_device, check_modules
from .likelihoods.family import signed

# Points in a sample of the data.
_SAMPLE = 4096


class Rows:
    """Data with one entry per point, from which batches are taken in the precision and on the device of a model.

    Arrays may hold any real numbers: big-endian, read-only or memory-mapped; only the batch that is asked for is read.
    Inputs become floating point, labels and counts stay integers.

    :param values: A tensor, or a numpy array.
    :param like: Tensor whose dtype and device the batches have.
    :param dim: The dimension that counts the points; default the last but one of inputs, the last of other values.
    :param is_input: Whether these are inputs; ``N`` becomes ``N x 1``.
    :param name: What they are called in messages.

    Example:
        >>> pixels = torch.arange(12, dtype=torch.uint8).view(6, 2).numpy()
        >>> rows = tighter_gp.data.Rows(pixels, like=torch.zeros((), dtype=torch.float64), is_input=True)
        >>> len(rows), rows[2:4].dtype, rows[torch.tensor([5, 0])].shape
        (6, torch.float64, torch.Size([2, 2]))
    """

    def __init__(
        self, values: Any, like: Tensor, *, dim: int | None = None, is_input: bool = False, name: str = "x"
    ) -> None:
        check_array(name, values)
        self.is_array = isinstance(values, np.ndarray)
        if not self.is_array:
            check_device(values, like.device, f"{name} is")
        self.values = values[:, None] if is_input and values.ndim == 1 else values
        self.like, self.is_input, self.name = like, is_input, name
        dim = (-2 if is_input else -1) if dim is None else dim
        self.dim = dim % self.values.ndim if self.values.ndim else 0

    def __len__(self) -> int:
        return self.values.shape[self.dim] if self.values.ndim else 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.values.shape)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some of the points, by a slice or by positions of shape ``B``."""
        return move(self.on_host(rows), self.like.device) if self.is_array else self.on_host(rows)

    def on_host(self, rows: slice | Tensor) -> Tensor:
        """The same, but rows of an array stay on the CPU."""
        if isinstance(rows, slice):
            taken = self.values[(*(slice(None),) * self.dim, rows)]
        elif self.is_array:
            taken = np.take(self.values, rows.cpu().numpy(), axis=self.dim)
        else:
            taken = self.values.index_select(self.dim, rows.to(self.values.device, non_blocking=True))
        found = from_array(taken) if self.is_array else taken
        if not self.is_input and not (found.dtype == torch.bool and self.name == "mask"):
            found = signed(found)
        is_like = self.is_input or (self.is_array and found.is_floating_point())
        return found.to(self.like.dtype) if is_like else found

    def fingerprint(self) -> bytes:
        """A hash of the shape and of :meth:`sample`."""
        described = f"{tuple(self.shape)}".encode()
        return hashlib.sha256(described + self.sample().contiguous().numpy().tobytes()).digest()

    def sample(self) -> Tensor:
        """Up to some thousand of the points, evenly spaced, in float64 on the CPU."""
        rows = torch.arange(0, len(self), max(1, len(self) // _SAMPLE), device="cpu")
        return self.on_host(rows).detach().cpu().double()


def fingerprint(*parts: Any) -> bytes:
    """A hash of all :class:`Rows` among some data.

    Example:
        >>> rows = tighter_gp.data.Rows(torch.ones(5), torch.zeros(2))
        >>> tighter_gp.data.fingerprint(rows, None) == tighter_gp.data.fingerprint(rows)
        True
    """
    return hashlib.sha256(b"".join(part.fingerprint() for part in parts if isinstance(part, Rows))).digest()


def input_rows(x: Tensor | np.ndarray, like: Tensor, name: str = "x") -> Rows:
    """:class:`Rows` of inputs, ``... x N x D`` or ``N``.

    Example:
        >>> tighter_gp.data.input_rows(torch.ones(5, dtype=torch.float64), torch.zeros(2)).shape
        torch.Size([5, 1])
    """
    return Rows(x, like, is_input=True, name=name)


def as_tensor(values: Tensor | np.ndarray, like: Tensor, name: str = "y") -> Tensor:
    """All of some data as a floating point tensor: arrays become like the model, tensors keep their precision.

    :param values: A tensor or an array.
    :param like: Tensor whose dtype and device an array takes.
    :param name: What they are called in messages.

    Example:
        >>> tighter_gp.data.as_tensor(torch.arange(3).numpy(), torch.zeros(()))
        tensor([0., 1., 2.])
    """
    check_array(name, values)
    found = values if isinstance(values, Tensor) else Rows(values, like, name=name)[:]
    return found if found.is_floating_point() else found.to(like.dtype)


def check_array(name: str, values: Any, wanted: str = "a tensor or a numpy array") -> None:
    """Raise unless values are a tensor or an array of real numbers.

    Example:
        >>> tighter_gp.data.check_array("x", [1.0, 2.0])
        Traceback (most recent call last):
            ...
        TypeError: x must be a tensor or a numpy array; got list.
    """
    if not isinstance(values, (Tensor, np.ndarray)):
        hint = f" Pass {name}.to_numpy()." if hasattr(values, "to_numpy") else ""
        raise TypeError(f"{name} must be {wanted}; got {type(values).__name__}.{hint}")
    if np.ma.is_masked(values):
        raise TypeError(f"{name} is a masked array: pass {name}.filled(numpy.nan), or leave the masked rows out.")
    is_real = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "biuf"
    if not is_real:
        raise TypeError(f"{name} must hold real numbers; got {values.dtype}.")


def check_kind(name: str, value: Any) -> None:
    """Raise if ``noise=`` is not a tensor or an array of variances; other arguments may be anything.

    Example:
        >>> tighter_gp.data.check_kind("noise", torch.ones(3))
    """
    if name != "noise":
        return
    if not isinstance(value, (Tensor, np.ndarray)):
        raise TypeError(
            f"noise= must be a tensor or an array with one variance per point; got {type(value).__name__}. One value for all "
            "is the likelihood's own: likelihood.noise = value."
        )
    check_array(name, value)
    count = 0 if isinstance(value, Tensor) and value.is_meta else int((value < 0).sum())
    if count:
        raise ValueError(f"noise= must hold variances; {count} of {math.prod(value.shape)} values are negative.")


def move(values: Tensor, device: torch.device) -> Tensor:
    """A batch on a device; to an accelerator through pinned memory, without waiting.

    Example:
        >>> tighter_gp.data.move(torch.ones(3), torch.device("cpu")).device
        device(type='cpu')
    """
    if values.device.type == "cpu" and _has_pinned_memory(device.type):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _has_pinned_memory(device_type: str) -> bool:
    """Whether torch pins memory for this kind of device: its one accelerator."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device_type == accelerator.type != "mps"


def num_rows(x: Any) -> int:
    """Number of points of inputs, ``N x D``, ``... x N x D`` or ``N``.

    Example:
        >>> tighter_gp.data.num_rows(torch.zeros(3, 5, 2)), tighter_gp.data.num_rows(torch.zeros(7))
        (5, 7)
    """
    check_array("x", x)
    return int(x.shape[0] if x.ndim == 1 else x.shape[-2]) if x.ndim else 0


def row_dim(shape: torch.Size | tuple[int, ...], num_data: int, is_batch: bool = False) -> int | None:
    """The dimension of targets that counts the points: ``N``, ``N x T``, ``... x N`` or ``... x N x T``.

    :param shape: Shape of the targets.
    :param num_data: Number of points.
    :param is_batch: Whether the inputs are a batch, ``... x N x D``: then the first dimension is tried last.
    :return: The dimension, from the front; None if there is none of this size.

    Example:
        >>> tighter_gp.data.row_dim((5, 2), 5), tighter_gp.data.row_dim((3, 5), 5), tighter_gp.data.row_dim((4,), 5)
        (0, 1, None)
    """
    count = len(shape)
    candidates = ([count - 1, count - 2] if is_batch else [0, count - 1, count - 2]) if math.prod(shape) else []
    return next((dim for dim in candidates if 0 <= dim < count and shape[dim] == num_data), None)


def first_parameter(model: torch.nn.Module, *likelihood: torch.nn.Module) -> Tensor:
    """A floating point parameter whose dtype and device are those of a model, or else of its likelihood.

    Example:
        >>> tighter_gp.data.first_parameter(model, likelihood).device
        device(type='cpu')
    """
    parameter = reference(model, *likelihood)
    if not isinstance(parameter, torch.nn.Parameter):
        raise ValueError("The model has no parameters to train.")
    return parameter


def reference(model: torch.nn.Module, *likelihood: torch.nn.Module) -> Tensor:
    """A parameter or buffer whose dtype and device inputs should have; of the default kind if there is none.

    Example:
        >>> tighter_gp.data.reference(model, likelihood).device
        device(type='cpu')
    """
    for part in likelihood:
        check_modules(model, part)
    tensors = itertools.chain(*((*module.parameters(), *module.buffers()) for module in (model, *likelihood)))
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def from_array(values: np.ndarray) -> Tensor:
    """A tensor of an array of any real numbers, copied where torch cannot share its memory.

    Example:
        >>> tighter_gp.data.from_array(torch.arange(3).numpy()[::-1].astype(">f4")).tolist()
        [2.0, 1.0, 0.0]
    """
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)  # torch has few operations on other unsigned integers
    elif values.dtype.kind == "f" and values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    usable = native.flags.writeable and min(native.strides, default=0) >= 0
    return torch.from_numpy(native if usable else native.copy())
