"""Mini-batches from a common warm start."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.mlls import VariationalELBO
from torch import Tensor

import tighter_gp
from tighter_gp import Recipe, gplvm
from tighter_gp.training import History, Step, fit

from ..traces import Trace
from .rows import Data

# Draws of x in the evaluation: the sampled bound is evaluated in rounds, whose spread gives a standard error.
_TEST_ROUNDS, _TEST_SAMPLES, _TRACE_SAMPLES = 8, 32, 8
LATENT_DIM, FIRST_NOISE = 10, 0.05


def start(data: Data, num_inducing: int, seed: int) -> gplvm.BayesianGPLVM:
    """The model that all methods start from."""
    generator = torch.Generator().manual_seed(seed)
    model = gplvm.BayesianGPLVM.from_data(data.train, LATENT_DIM, num_inducing, generator=generator)
    model.likelihood.noise = FIRST_NOISE
    tighter_gp.set_optimal_q(model, model.likelihood, model.latents.q().mean.detach(), data.train.mT)
    return model


def make_trace(elbo: gplvm.LatentVariableELBO, targets: Tensor, every: int, offset: int = 0) -> Trace:
    """A trace of the bound of all rows, with the same draws each time.

    :param every: Steps between notes.
    :param offset: Steps before this training.
    """

    def measure(state: Step) -> dict[str, float]:
        torch.manual_seed(0)
        value = elbo.evaluate(targets, num_samples=_TRACE_SAMPLES).item()
        return {"step": offset + state.step, "bound": value}

    return Trace(measure, lambda state: state.step % every == 0)


class WarmStart(NamedTuple):
    """Where both methods of a pair continue from."""

    state: dict[str, Any]
    seconds: float
    steps: int
    trace: list[dict[str, float]]


def warm_start(run: dict[str, Any], data: Data, checkpoint: Path) -> WarmStart:
    """Training with the base bound, from principal components.

    The same for both methods: what the first has done the second finds in the checkpoint.
    """
    config, model = run["config"], start(data, run["num_inducing"], run["seed"])
    if not config["warmup_epochs"]:
        return WarmStart(model.state_dict(), seconds=0.0, steps=0, trace=[])
    history, trace = fit_batches(
        model,
        make_elbo(model, data, tighter=False),
        data,
        run,
        config["warmup_epochs"],
        config["warmup_lr"],
        notes=8,
        checkpoint=checkpoint,
        resume=True,
    )
    return WarmStart(model.state_dict(), history.seconds, history.steps, trace.points)


def make_elbo(model: gplvm.BayesianGPLVM, data: Data, tighter: bool) -> gplvm.LatentVariableELBO:
    """TV-BGPLVM's bound or V-BGPLVM's."""
    objective = None if tighter else VariationalELBO
    return gplvm.LatentVariableELBO(model.likelihood, model, len(data.train), objective=objective)


def fit_batches(
    model: gplvm.BayesianGPLVM,
    elbo: gplvm.LatentVariableELBO,
    data: Data,
    run: dict[str, Any],
    epochs: int,
    lr: float,
    *,
    notes: int = 16,
    offset: int = 0,
    **kwargs: Any,
) -> tuple[History, Trace]:
    """Mini-batches: Adam, and SparseAdam for the latents, at a rate that falls to zero."""
    batch_size = run["config"]["batch_size"]
    steps = epochs * math.ceil(len(data.train) / batch_size)
    trace = make_trace(elbo, data.train, max(1, steps // notes), offset)
    history = fit(
        model,
        model.likelihood,
        None,
        data.train,
        objective=lambda likelihood, model, num_data: elbo,
        epochs=epochs,
        batch_size=batch_size,
        recipe=Recipe(lr=lr),
        seed=run["seed"],
        callbacks=[trace],
        progress=False,
        **kwargs,
    )
    return history, trace


def train_batches(
    run: dict[str, Any], data: Data, tighter: bool, warm_checkpoint: Path, checkpoint: Path, resume: bool
) -> tuple[gplvm.BayesianGPLVM, dict[str, Any]]:
    """The method's own bound from the common warm start."""
    config, warm = run["config"], warm_start(run, data, warm_checkpoint)
    model = start(data, run["num_inducing"], run["seed"])
    model.load_state_dict(warm.state)
    history, trace = fit_batches(
        model,
        make_elbo(model, data, tighter),
        data,
        run,
        config["epochs"],
        config["lr"],
        offset=warm.steps,
        checkpoint=checkpoint,
        resume=resume,
    )
    outcome: dict[str, Any] = {}
    for name in ("bound_tighter", "bound_base"):
        value, error = evaluate(make_elbo(model, data, name == "bound_tighter"), data, run["seed"])
        outcome |= {name: value, f"{name}_se": error}
    return model, outcome | {
        "seconds": round(warm.seconds + history.seconds, 3),
        "steps": warm.steps + history.steps,
        "warmup_steps": warm.steps,
        "trace": warm.trace + trace.points,
    }


def evaluate(elbo: gplvm.LatentVariableELBO, data: Data, seed: int) -> tuple[float, float]:
    """The bound of all rows over many draws of x, the same for every method, and the standard error left by them."""
    torch.manual_seed(seed)
    rounds = [elbo.evaluate(data.train, num_samples=_TEST_SAMPLES, batch_size=256).item() for _ in range(_TEST_ROUNDS)]
    return statistics.fmean(rounds), statistics.stdev(rounds) / math.sqrt(_TEST_ROUNDS)
