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
from .modes import chunks

__all__ = [
    "Rows",
    "as_tensor",
    "check_array",
    "check_kind",
    "fingerprint",
    "first_parameter",
    "from_array",
    "input_rows",
    "move",
    "num_rows",
    "reference",
    "row_dim",
    "signed",
]

# How many points a look at the data takes, and how many values may all be looked at.
_SAMPLE, _ALL = 4096, 2**27
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows:
    """Data with one entry per point, from which batches are taken in the precision and on the device of a model.

    Nothing is read before a batch is asked for, and of an array only that batch. Arrays of any kind of number will do:
    big-endian, read-only, memory-mapped. Inputs become floating point; targets of integers, labels or counts, keep
    their kind. Inputs of one dimension are ``N x 1``.

    :param values: A tensor, or a numpy array.
    :param like: Tensor whose dtype and device the batches have.
    :param dim: The dimension that counts the points; default by ``is_input``: the last but one, or the last.
    :param is_input: Whether these are inputs.
    :param name: What they are called, for messages.

    Example:
        >>> pixels = torch.arange(12, dtype=torch.uint8).view(6, 2).numpy()
        >>> rows = tighter_gp.data.Rows(pixels, like=torch.zeros((), dtype=torch.float64), is_input=True)
        >>> len(rows), rows[2:4].dtype, rows[torch.tensor([5, 0])].shape
        (6, torch.float64, torch.Size([2, 2]))
    """

    def __init__(
        self,
        values: Tensor | np.ndarray,
        like: Tensor,
        *,
        dim: int | None = None,
        is_input: bool = False,
        name: str = "x",
    ) -> None:
        check_array(name, values)
        if isinstance(values, Tensor):
            check_device(values, like.device, f"{name} is")
            if is_input and values.is_floating_point() and values.dtype != like.dtype:
                raise ValueError(
                    f"{name} is {values.dtype} and the model {like.dtype}; convert one, such as {name}.to({like.dtype})."
                )
        if is_input and values.ndim == 1:
            values = values[:, None]
        if dim is None:
            dim = -2 if is_input else -1
        self.values, self.like, self.is_input, self.name = values, like, is_input, name
        self.dim = dim % values.ndim if values.ndim else 0

    def __len__(self) -> int:
        return self.values.shape[self.dim] if self.values.ndim else 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.values.shape)

    @property
    def is_array(self) -> bool:
        """Whether a batch is read from the host's memory, or from a file, and converted."""
        return isinstance(self.values, np.ndarray)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some of the points, by a slice or by positions of shape ``B``."""
        return move(self.on_host(rows), self.like.device) if self.is_array else self.on_host(rows)

    def on_host(self, rows: slice | Tensor) -> Tensor:
        """The same, where the data are: of an array before the batch goes to the device."""
        values = self.values
        if isinstance(values, np.ndarray):
            place = (slice(None),) * self.dim
            taken = (
                np.take(values, rows.cpu().numpy(), axis=self.dim)
                if isinstance(rows, Tensor)
                else values[(*place, rows)]
            )
            return self._converted(from_array(taken))
        if isinstance(rows, Tensor):
            return self._converted(values.index_select(self.dim, rows.to(values.device, non_blocking=True)))
        return self._converted(values[(slice(None),) * self.dim + (rows,)])

    def _converted(self, values: Tensor) -> Tensor:
        if values.dtype == torch.bool and self.name == "mask":
            return values
        values = values if self.is_input else signed(values)
        if isinstance(self.values, Tensor) and not self.is_input:
            return values  # a user's tensor of targets is taken as it is
        return values.to(self.like.dtype) if self.is_input or values.is_floating_point() else values

    def fingerprint(self) -> bytes:
        """A hash of the shape, of a sample of the values and, up to some hundred million, of the sum of their bits.

        It is the same for the same data on any machine.
        """
        described = str(tuple(self.shape))
        if self.shape.numel() <= _ALL:
            described += f" {sum(map(self._sum_of_bits, chunks(len(self), 2**16)))}"
        return hashlib.sha256(described.encode() + self.sample().contiguous().numpy().tobytes()).digest()

    def _sum_of_bits(self, rows: slice) -> int:
        """Of some points: an exact sum, in which no order counts."""
        values = self.on_host(rows).detach().contiguous()
        return int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))

    def sample(self) -> Tensor:
        """Some thousand of the points, evenly spaced, in float64 on the host."""
        stride = max(1, len(self) // _SAMPLE)
        return self.on_host(torch.arange(0, len(self), stride, device="cpu")).detach().cpu().double()


def fingerprint(*parts: Any) -> bytes:
    """A hash of all :class:`Rows` among some data.

    Example:
        >>> rows = tighter_gp.data.Rows(torch.ones(5), torch.zeros(2))
        >>> tighter_gp.data.fingerprint(rows, None) == tighter_gp.data.fingerprint(rows)
        True
    """
    return hashlib.sha256(b"".join(part.fingerprint() for part in parts if isinstance(part, Rows))).digest()


def input_rows(x: Tensor | np.ndarray, like: Tensor, name: str = "x") -> Rows:
    """Inputs for a model that is trained: tensors too take its precision.

    :param x: A tensor or an array, ``... x N x D`` or ``N``.
    :param like: Tensor whose dtype and device the batches have.
    :param name: What they are called, for messages.

    Example:
        >>> tighter_gp.data.input_rows(torch.ones(5, dtype=torch.float64), torch.zeros(2)).shape
        torch.Size([5, 1])
    """
    if isinstance(x, Tensor) and x.is_floating_point() and x.device == like.device:
        x = x.to(like.dtype)
    return Rows(x, like, is_input=True, name=name)


def as_tensor(values: Tensor | np.ndarray, like: Tensor, name: str = "y", *, is_input: bool = False) -> Tensor:
    """All of some data as a tensor, floating point: arrays become like the model, tensors keep their precision.

    :param values: A tensor or an array.
    :param like: Tensor whose dtype and device an array takes.
    :param name: What they are called, for messages.
    :param is_input: Whether these are inputs, ``N x D`` or ``N``.

    Example:
        >>> tighter_gp.data.as_tensor(torch.arange(3).numpy(), torch.zeros(()), is_input=True).shape
        torch.Size([3, 1])
    """
    if isinstance(values, Tensor):
        check_array(name, values)
        found = values.unsqueeze(-1) if is_input and values.dim() == 1 else values
    else:
        found = Rows(values, like, is_input=is_input, name=name)[:]
    return found if found.is_floating_point() else found.to(like.dtype)


def check_array(name: str, values: Any, wanted: str = "a tensor or a numpy array") -> None:
    """Raise unless values are a tensor or an array of real numbers.

    :param name: What they are called, for messages.
    :param values: What came.
    :param wanted: What may come, for messages.

    Example:
        >>> tighter_gp.data.check_array("x", [1.0, 2.0])
        Traceback (most recent call last):
            ...
        TypeError: x must be a tensor or a numpy array; got list.
    """
    if not isinstance(values, (Tensor, np.ndarray)):
        hint = f" Pass {name}.to_numpy()." if hasattr(values, "to_numpy") else ""
        raise TypeError(f"{name} must be {wanted}; got {type(values).__name__}.{hint}")
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise TypeError(
            f"{name} is a masked array, and {np.ma.count_masked(values)} of its values would lose their mask: pass "
            f"{name}.filled(numpy.nan) where NaN stands for missing values, or leave these rows out."
        )
    is_real = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "biuf"
    if not is_real:
        raise TypeError(f"{name} must hold real numbers; got {values.dtype}.")


def check_kind(name: str, value: Any) -> None:
    """Raise if ``noise=`` is not a tensor or an array with one variance per point; other arguments may be anything.

    It reads all values: to be called once, not in every step.

    Example:
        >>> tighter_gp.data.check_kind("noise", torch.ones(3))
    """
    if name != "noise":
        return
    if not isinstance(value, (Tensor, np.ndarray)):
        raise TypeError(
            f"noise= must be a tensor or an array with one variance per point; got {type(value).__name__}. One value for all "
            "points is the likelihood's own: likelihood.noise = value."
        )
    check_array(name, value)
    count = 0 if isinstance(value, Tensor) and value.is_meta else int((value < 0).sum())
    if count:
        raise ValueError(
            f"noise= must hold variances; {count} of {math.prod(value.shape)} values are negative. Of logarithms pass "
            "noise.exp()."
        )


def signed(values: Tensor) -> Tensor:
    """Bytes and truth values as integers, where 0 - 1 is not 255; others as they are.

    Example:
        >>> tighter_gp.data.signed(torch.tensor([True, False])) - 1
        tensor([ 0, -1])
    """
    return values.long() if values.dtype in (torch.uint8, torch.bool) else values


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
    """Whether torch pins memory for this kind of device: its one accelerator, which before torch 2.6 is CUDA."""
    if not hasattr(torch, "accelerator"):
        return device_type == "cuda"
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
    :param is_batch: Whether the inputs are a batch, ``... x N x D``, so that the first dimension of targets is none of
        points unless it is the only one.
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
    for module in _with_likelihood(model, *likelihood):
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    raise ValueError("The model has no parameters to train.")


def _with_likelihood(model: torch.nn.Module, *likelihood: torch.nn.Module) -> list[torch.nn.Module]:
    """Both, if both are what they should be."""
    for second in likelihood:
        check_modules(model, second)
    return [model, *likelihood]


def reference(model: torch.nn.Module, *likelihood: torch.nn.Module) -> Tensor:
    """A floating point parameter or buffer whose dtype and device inputs should have; of the default kind if there is none.

    Example:
        >>> tighter_gp.data.reference(model, likelihood).device
        device(type='cpu')
    """
    for module in _with_likelihood(model, *likelihood):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.is_floating_point():
                return tensor
    return torch.empty(0)


def from_array(values: np.ndarray) -> Tensor:
    """A tensor of an array that torch can take: native, contiguous, writeable, of a kind that torch has.

    Example:
        >>> tighter_gp.data.from_array(torch.arange(3).numpy()[::-1].astype(">f4")).tolist()
        [2.0, 1.0, 0.0]
    """
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)  # torch has few operations on other unsigned integers
    elif values.dtype.kind == "f" and values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    # One row of a reversed array is contiguous to numpy, and has a negative stride.
    usable = native.flags.writeable and min(native.strides, default=0) >= 0
    return torch.from_numpy(native if usable else native.copy())
