"""Checkpoints: written whole or not at all, read without executing code."""

from __future__ import annotations

import io
import logging
import os
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checks import first_line
from . import distributed
from .problem import Problem

log = logging.getLogger("tighter_gp")

FORMAT = 3

PathLike = str | os.PathLike[str]


def save(path: PathLike, state: dict[str, Any]) -> None:
    """Write a state so that at any moment the path holds the old file or the new one, never a part.

    The bytes are read back, written to a file of their own beside it, reach the disk, and take the name in one step. Where
    that fails, as on a full disk, the log says so and the old file stays. Only the first of several processes writes.
    """
    if distributed.rank() != 0:
        return
    temporary, buffer = _temporary(path), io.BytesIO()
    try:
        torch.save({"format": FORMAT, **plain(state)}, buffer)
        torch.load(io.BytesIO(buffer.getbuffer()), map_location="cpu", weights_only=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
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


def _temporary(path: PathLike) -> Path:
    """A name beside a file that no other process has."""
    return Path(f"{os.fspath(path)}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def check_path(path: PathLike, device: torch.device) -> None:
    """Raise, in every process, unless the first one can write a checkpoint here."""
    reason, temporary = "", _temporary(path)
    if distributed.rank() == 0:
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            reason = str(error)
        reason = "it is a directory" if Path(path).is_dir() else reason
    reason = distributed.first_ones(reason, device)
    if reason:
        raise ValueError(f"No checkpoint can be written to {path} ({reason}); use another path.")


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
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{path} is not a readable checkpoint ({reason}). Delete it to start anew.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or not {"config", "values"} <= state.keys():
        raise ValueError(f"{path} is not a checkpoint of this version of fit. Delete it or use another path.")
    then = state["config"]
    different = sorted(name for name in {**then, **config} if then.get(name) != config.get(name))
    if different:
        changes = "; ".join(f"{name} was {then.get(name)} and is {config.get(name)}" for name in different[:3])
        raise ValueError(f"{path} belongs to another run: {changes}. Delete it or use another path.")
    return state


def describe(problem: Problem) -> dict[str, str]:
    """Shapes of all parameters, and classes of all modules with their numbers, such as ``nu``, to tell models apart."""
    found = {name: str(tuple(parameter.shape)) for name, parameter in problem.parameters.items()}
    for path, module in list(torch.nn.ModuleDict(problem.modules).named_modules())[1:]:
        own = {n: v for n, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and n[0] != "_"}
        own.pop("training", None)
        found[path] = f"{type(module).__name__} {own or ''}".strip()
    return found
