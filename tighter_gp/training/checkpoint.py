"""Checkpoints: written whole or not at all, read without executing code."""

from __future__ import annotations

import io
import logging
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checks import first_line
from . import distributed
from .structure import differences

log = logging.getLogger("tighter_gp")

FORMAT = 1

# What a checkpoint of a run holds, and has held from the start.
_PARTS = ("config", "finished", "total", "model", "likelihood", "optimizer", "history", "failures", "best", "callbacks")


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state so that at any moment the path holds the old file or the new one, never a part.

    The bytes go to a file of their own beside it, are read back, reach the disk, and take the name in one step. Only the first
    of several processes writes. Where that fails, as on a full disk, the log says so, and the old file stays.
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


def check_path(path: str | os.PathLike[str], device: torch.device) -> None:
    """Raise, in every process, unless the first one can write a checkpoint here.

    :param device: Where processes exchange messages.
    """
    reason = distributed.share_bytes(_obstacle(Path(path)) if distributed.rank() == 0 else None, device)
    if reason is not None:
        raise ValueError(f"No checkpoint can be written to {path} ({reason.decode()}); use another path.")


def _obstacle(path: Path) -> bytes | None:
    """What stands in the way of a file, if anything."""
    temporary = _temporary(path)
    try:
        if path.is_dir():
            return b"it is a directory"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return str(error).encode()
    return None


def load(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any] | None:
    """Read a state, or None if there is none. The first of several processes reads for all.

    Tensors stay on the CPU: modules and optimizers put theirs where they belong, and Adam's step counters belong there.

    :param device: Where processes exchange messages.
    :raises ValueError: If the file is no checkpoint.
    """
    path = Path(path)
    data = path.read_bytes() if distributed.rank() == 0 and path.exists() else None
    data = distributed.share_bytes(data, device)
    if data is None:
        return None
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a broken file
        reason = str(error).partition("\n")[0] or "no data"
        raise ValueError(
            f"{path} is not a readable checkpoint ({type(error).__name__}: {reason}). Delete it to start anew."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"{path} is not a checkpoint of this version: expected format {FORMAT}, got {found}.")
    return state


def check_state(path: str | os.PathLike[str], state: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise unless a state is of the run that is to continue.

    :param state: What was read.
    :param config: What tells this run from another.
    """
    missing = [name for name in _PARTS if name not in state]
    if missing:
        raise ValueError(
            f"{path} is not a checkpoint of fit: it has no {', '.join(missing)}. Delete it or use another path."
        )
    different = differences(state["config"], config)
    if different:
        raise ValueError(f"{path} belongs to another run: {'; '.join(different)}. Delete it or use another path.")


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
