"""Checkpoints: written whole or not at all, read without executing code."""

from __future__ import annotations

import io
import logging
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checks import first_line
from . import distributed

log = logging.getLogger("tighter_gp")

FORMAT = 3

# What a checkpoint of a run holds.
_PARTS = ("config", "finished", "total", "values", "step", "history", "best", "callbacks")

PathLike = str | os.PathLike[str]


def save(path: PathLike, state: dict[str, Any]) -> None:
    """Write a state so that at any moment the path holds the old file or the new one, never a part.

    The bytes are read back, written to a file of their own beside it, reach the disk, and take the name in one step. Where
    that fails, as on a full disk, the log says so and the old file stays. Only the first of several processes writes.
    """
    if distributed.rank() != 0:
        return
    path, buffer = Path(path), io.BytesIO()
    temporary = _temporary(path)
    try:
        torch.save({"format": FORMAT, **plain(state)}, buffer)
        torch.load(io.BytesIO(buffer.getbuffer()), map_location="cpu", weights_only=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except (OSError, pickle.PickleError, AttributeError, TypeError) as error:
        log.warning("no checkpoint was written to %s, and what was there stays: %s", path, first_line(error))
    finally:
        temporary.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's and torch's, which can be read back without executing code."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple, set) else value


def _temporary(path: Path) -> Path:
    """A name beside a file that no other process has."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def check_path(path: PathLike, device: torch.device) -> None:
    """Raise, in every process, unless the first one can write a checkpoint here."""
    reason = distributed.first_ones(_obstacle(Path(path)) if distributed.rank() == 0 else None, device)
    if reason is not None:
        raise ValueError(f"No checkpoint can be written to {path} ({reason}); use another path.")


def _obstacle(path: Path) -> str | None:
    """What stands in the way of a file, if anything."""
    temporary = _temporary(path)
    try:
        if path.is_dir():
            return "it is a directory"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return str(error)
    return None


def load(path: PathLike, device: torch.device, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a state, or None if there is none. The first of several processes reads for all. Tensors stay on the CPU.

    :param config: What tells this run from others.
    :raises ValueError: If the file is no checkpoint, or one of another run.
    """
    path = Path(path)
    data = distributed.first_ones(path.read_bytes() if distributed.rank() == 0 and path.exists() else None, device)
    if data is None:
        return None
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a broken file
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no data'}"
        raise ValueError(f"{path} is not a readable checkpoint ({reason}). Delete it to start anew.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or any(part not in state for part in _PARTS):
        raise ValueError(f"{path} is not a checkpoint of this version of fit. Delete it or use another path.")
    different = list(_differences(state["config"], config))
    if different:
        raise ValueError(f"{path} belongs to another run: {'; '.join(different)}. Delete it or use another path.")
    return state


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        if then.get(name) != value and isinstance(value, list):
            changed = [entry for entry in value if entry not in then[name]] or sorted({*then[name]} - {*value})
            yield f"{name} differ, such as {'; '.join(map(str, changed[:2]))}"
        elif then.get(name) != value:
            yield f"{name} was {then.get(name)} and is {value}"


def describe(modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Classes of all modules with their numbers, such as ``kernel.nu``, to tell one model from another."""
    found, seen = [], set()
    for prefix, module in modules.items():
        for path, child in module.named_modules(prefix=prefix):
            if id(child) in seen:
                continue
            seen.add(id(child))
            kinds = (bool, int, float, str)
            own = {n: v for n, v in vars(child).items() if isinstance(v, kinds) and n != "training" and n[0] != "_"}
            found.append(f"{path}: {type(child).__name__} {own or ''}".strip())
    return found


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
