"""Time of a step of ``fit``: by Adam, by natural gradients, compiled."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch

import tighter_gp

from .models import Start, make_regression

# What each way gives to ``fit``.
WAYS: dict[str, dict[str, Any]] = {
    "adam": {"recipe": tighter_gp.Recipe(natural=0, compile=False)},
    "natural": {"recipe": tighter_gp.Recipe(compile=False)},
    "natural, compiled": {"recipe": tighter_gp.Recipe(compile=True)},
}
_NUM_DIMS, _NUM_BATCHES = 8, 8

# Steps at the start of a run that do not count.
_WARM_UP = 3


def milliseconds(way: str, num_inducing: int, batch_size: int, device: str, steps: int) -> list[float]:
    """Of each step of one run of T-SVGP with Gaussian noise in float32, from one call of a callback to the next."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(_NUM_BATCHES * batch_size, _NUM_DIMS, generator=generator).to(device)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(len(x), generator=generator).to(device)
    model, likelihood = make_regression("t-svgp", Start(x[:num_inducing].clone(), torch.ones(())))
    times = [time.perf_counter()]
    options = {"steps": _WARM_UP + steps, "batch_size": batch_size, "progress": False, **WAYS[way]}
    tighter_gp.fit(model, likelihood, x, y, callbacks=[lambda state: times.append(time.perf_counter())], **options)
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


def measure(num_inducing: int, batch_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of every way, runs of a few steps in turn."""
    ways = [way for way in WAYS if args.compile or "compiled" not in way]
    rounds, steps = (2, 2) if args.smoke else (5, max(4, args.repeats // 4 if num_inducing < 1024 else 4))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            times[way] += milliseconds(way, num_inducing, batch_size, args.device, steps)[_WARM_UP:]
    return {
        "experiment": "speed fit",
        "num_inducing": num_inducing,
        "batch_size": batch_size,
        "repeats": rounds * steps,
        "milliseconds": {way: statistics.median(values) for way, values in times.items()},
        "fastest": {way: min(values) for way, values in times.items()},
    }
