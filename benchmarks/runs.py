"""Results: one JSON line per finished run, on the disk before the next run starts."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import gpytorch
import linear_operator
import numpy as np
import torch

import tighter_gp
from tighter_gp.training import distributed

from .errors import UserError
from .options import writable_folder

# Flags whose values are folders of one machine.
FOLDERS = ("--out", "--data-dir", "--peers-dir")

# What tells one run from another.
IDENTITY = ("experiment", "dataset", "split", "seed", "method", "num_inducing", "config")


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was cut off is left out."""
    results = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            if not isinstance(result, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                continue
            raise UserError(f"{path}, line {number}: not a result ({error}).") from error
        results.append(result)
    return results


def append_result(path: Path, result: dict[str, Any]) -> None:
    """Add a line and see it onto the disk. A line that an interrupted run left unfinished is taken away first."""
    line = (json.dumps(_finite(result), allow_nan=False) + "\n").encode()
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def identity(result: dict[str, Any]) -> str:
    """A text that is equal for two results of the same run."""
    return json.dumps({name: result.get(name) for name in IDENTITY}, sort_keys=True)


def describe(
    dataset: str, num_inducing: int | None, seed: int, method: str, config: dict[str, Any], split: int = 0
) -> dict[str, Any]:
    """What tells a run from others.

    :param config: Its settings; a ``dtype`` may be PyTorch's.
    """
    if "dtype" in config:
        config = {**config, "dtype": str(config["dtype"]).removeprefix("torch.")}
    return {
        "dataset": dataset,
        "split": split,
        "seed": seed,
        "method": method,
        "num_inducing": num_inducing,
        "config": config,
    }


class Session:
    """The runs of one command.

    :param experiment: Its name.
    :param args: The flags, resolved.
    """

    def __init__(self, experiment: str, args: argparse.Namespace) -> None:
        self.is_quiet = getattr(args, "quiet_machine", False)
        folder = args.out / "smoke" if args.smoke else args.out
        if distributed.rank() == 0:
            writable_folder(folder)
            if (folder / "checkpoints").exists():
                writable_folder(folder / "checkpoints")
        self.experiment, self.resume, self.device = experiment, args.resume, args.device
        self.path, self.checkpoints = folder / f"{experiment}.jsonl", folder / "checkpoints"
        if args.smoke and not args.resume and distributed.rank() == 0:
            self.path.unlink(missing_ok=True)
        distributed.barrier()
        self.done = {identity(result): result for result in read_results(self.path)} if self.path.exists() else {}

    def is_done(self, run: dict[str, Any]) -> bool:
        """Whether the file holds a run."""
        return identity({"experiment": self.experiment, **run}) in self.done

    def plan(self, runs: list[dict[str, Any]]) -> None:
        """Complain, before anything is run, if the file already holds some of these runs and ``--resume`` was not given."""
        known = sum(map(self.is_done, runs))
        if known and not self.resume:
            raise UserError(
                f"{self.path} already holds {known} of these {len(runs)} runs: add --resume to keep them, or choose "
                "another --out."
            )

    def plan_splits(
        self, args: argparse.Namespace, configs: Callable[[str], list[dict[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """Plan each method on each set, size, split and seed: a list of runs for each of these.

        :param configs: The settings of a method; it is run once with each.
        """
        planned = [
            [
                describe(dataset, number, seed, method, config, split)
                for method in args.methods
                for config in configs(method)
            ]
            for dataset, number, split, seed in product(args.datasets, args.num_inducing, args.splits, args.seed)
        ]
        self.plan(list(chain(*planned)))
        return planned

    def all_done(self, runs: list[dict[str, Any]]) -> bool:
        """Whether nothing is left of these runs."""
        if distributed.agreed(all(map(self.is_done, runs)), self.device):
            for run in runs:
                self._say(f"{self._label(run)}: done before")
                self.forget(self.checkpoint(run))
            return True
        return False

    def checkpoint(self, run: dict[str, Any]) -> Path:
        """File for the state of a run; other settings, other files."""
        run = {"experiment": self.experiment, **run}
        digest = hashlib.sha256(identity(run).encode()).hexdigest()[:10]
        return self.checkpoints / f"{self._label(run).replace(' ', '_')}_{digest}.pt"

    def shared(self, run: dict[str, Any]) -> Path:
        """File for the state of what the methods of a comparison have in common; to be forgotten when all are done."""
        return self.checkpoint({**run, "method": "shared"})

    def forget(self, checkpoint: Path) -> None:
        """Delete a checkpoint that is needed no longer, and the folder with the last of them."""
        if distributed.rank() == 0:
            checkpoint.unlink(missing_ok=True)
            if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
                self.checkpoints.rmdir()

    def run(self, run: dict[str, Any], execute: Callable[[Path, bool], dict[str, Any]]) -> dict[str, Any]:
        """Execute a run that is not done, and write its line.

        :param run: What tells it from others: dataset, split, seed, method, num_inducing, config.
        :param execute: Called with the path for a checkpoint, and whether to resume from it; returns the results.
        """
        run = {"experiment": self.experiment, **run}
        key, checkpoint = identity(run), self.checkpoint(run)
        if distributed.agreed(key in self.done, self.device):
            self._say(f"{self._label(run)}: done before")
            self.forget(checkpoint)
            return self.done.get(key, run)
        reset_peak_memory(self.device)
        started = time.perf_counter()
        try:
            outcome = execute(checkpoint, self.resume)
        except (ValueError, RuntimeError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self._label(run)} failed: {reason}") from error
        result = {
            **run,
            **outcome,
            "wall_seconds": round(time.perf_counter() - started, 3),
            "peak_memory_mb": peak_memory_mb(self.device),
            **environment(str(self.device)),
            **({"quiet_machine": True} if self.is_quiet else {}),
        }
        if distributed.rank() == 0:
            append_result(self.path, result)
        self.forget(checkpoint)
        distributed.barrier()
        self.done[key] = result
        self._say(f"{self._label(run)}: {_summary(result)}")
        return result

    def _label(self, run: dict[str, Any]) -> str:
        parts = [run.get("experiment", self.experiment), run["dataset"], f"split{run['split']}", f"seed{run['seed']}"]
        if run.get("num_inducing") is not None:
            parts.append(f"M{run['num_inducing']}")
        return " ".join([*parts, run["method"]])

    def _say(self, text: str) -> None:
        if distributed.rank() == 0:
            print(text, flush=True)


def _summary(result: dict[str, Any]) -> str:
    shown = []
    for name, label in (("bound", "bound"), ("rmse", "RMSE"), ("error", "error"), ("nlpd", "NLPD"), ("noise", "noise")):
        if isinstance(result.get(name), float):
            shown.append(f"{label} {result[name]:.4f}")
    if isinstance(result.get("seconds"), float):
        shown.append(f"{result['seconds']:.1f} s")
    return ", ".join([*shown, *result.get("flags", [])])


# ---------------------------------------------------------------------------------------------------------------------
# Where and with what
# ---------------------------------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """Versions, machine, commit and command of this process."""
    return {
        "device": device,
        "processes": distributed.world_size(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "gpytorch": gpytorch.__version__,
            "linear_operator": linear_operator.__version__,
            "tighter_gp": tighter_gp.__version__,
        },
        "platform": f"{platform.system()} {platform.machine()}",
        "commit": commit(),
        "command": command(sys.argv[1:]),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def command(arguments: list[str]) -> str:
    """The command line without the folders of this machine."""
    kept, skip = [], False
    for argument in arguments:
        if argument in FOLDERS:
            skip = True
        elif skip or argument.startswith(tuple(f"{flag}=" for flag in FOLDERS)):
            skip = False
        else:
            kept.append(argument)
    processes = distributed.world_size()
    launcher = ["python"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes)]
    return shlex.join([*launcher, "-m", "benchmarks", *kept])


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit that is run, with ``+`` if code differs from it; None outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", "../tighter_gp", "*.py", "../constraints.txt"
        )
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Start to measure."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # without it the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float | None:
    """Most memory held since :func:`reset_peak_memory`, in MB: of the device for CUDA, of the process under Linux."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return round(found[0] * 1024 / 1e6, 1) if found else None
