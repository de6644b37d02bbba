"""Checkpoints: written whole or not at all, read without executing code."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from . import distributed
from .structure import differences

FORMAT = 1

# What a checkpoint of a run holds, and has held from the start.
_PARTS = ("config", "finished", "total", "model", "likelihood", "optimizer", "history", "failures", "best", "callbacks")


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state so that at any moment the path holds the old file or the new one, never a part.

    The bytes go to ``<name>.tmp`` beside it, reach the disk, and take the name in one step. Only the first of several
    processes writes.
    """
    if distributed.rank() != 0:
        return
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def check_path(path: str | os.PathLike[str], device: torch.device) -> None:
    """Raise, in every process, unless the first one can write a checkpoint here.

    :param device: Where processes exchange messages.
    """
    reason = distributed.share_bytes(_obstacle(Path(path)) if distributed.rank() == 0 else None, device)
    if reason is not None:
        raise ValueError(f"No checkpoint can be written to {path} ({reason.decode()}); use another path.")


def _obstacle(path: Path) -> bytes | None:
    """What stands in the way of a file, if anything."""
    temporary = path.with_name(path.name + ".tmp")
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
