"""The time of a training step, with few and with many rows."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tighter_gp import gplvm

from ..runs import describe
from ..scores import Result
from .training import LATENT_DIM


def describe_step(args: argparse.Namespace) -> dict[str, Any]:
    """What tells the comparison of steps from others."""
    sizes, steps = ([1000, 20_000], 10) if args.smoke else ([1000, 1_000_000], 100)
    config = {"sizes": sizes, "steps": steps, "batch_size": 100, "latent_dim": LATENT_DIM, "num_outputs": 12}
    return describe("synthetic", 25, 0, "step", config)


def step_cost(run: dict[str, Any], args: argparse.Namespace, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Median milliseconds of a step with few and with many rows, taken in turns."""
    config = run["config"]
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(args.device)
    steppers = []
    for size in config["sizes"]:
        latents = gplvm.VariationalLatents(draw(size, LATENT_DIM))
        model = gplvm.BayesianGPLVM(latents, draw(run["num_inducing"], LATENT_DIM), config["num_outputs"])
        steppers.append(_stepper(model, draw(size, config["num_outputs"]), config["batch_size"], generator))
    times: list[list[float]] = [[] for _ in steppers]
    for round_ in range(config["steps"] + 5):  # the first ones allocate the optimizers' state
        for stepper, seen in zip(steppers, times, strict=True):
            seconds = stepper()
            if round_ >= 5:
                seen.append(1000 * seconds)
    medians = [round(statistics.median(seen), 3) for seen in times]
    return {"step_ms": medians, "ratio": medians[1] / medians[0], "seconds": sum(map(sum, times)) / 1000}


def _stepper(model: gplvm.BayesianGPLVM, targets: Tensor, batch_size: int, generator: torch.Generator) -> Any:
    elbo = gplvm.LatentVariableELBO(model.likelihood, model, len(targets))
    dense, sparse = gplvm.parameter_groups(model)
    optimizers = [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam(sparse, lr=0.01)]

    def step() -> float:
        started = time.perf_counter()
        rows = torch.randint(len(targets), (batch_size,), generator=generator).to(targets.device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (-elbo(rows, targets[rows])).backward()
        for optimizer in optimizers:
            optimizer.step()
        return time.perf_counter() - started

    return step


def step_line(result: Result) -> str:
    """The comparison in words."""
    few, many = result["config"]["sizes"]
    return (
        f"A step of {result['config']['batch_size']} rows: {result['step_ms'][0]:.2f} ms of {few:,} rows, "
        f"{result['step_ms'][1]:.2f} ms of {many:,}, {result['ratio']:.2f} times as long."
    )
