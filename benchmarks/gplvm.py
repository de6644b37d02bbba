"""Bayesian GPLVM on the oil flow: V-BGPLVM against TV-BGPLVM (the paper's Section 6.5).

Ten latent dimensions with one lengthscale each, 25 and 50 inducing points. Methods that are compared share seed, start,
batches, draws of x, budget and evaluation. By default they train in mini-batches. The GPLVM has many local optima, and
two runs from principal components that differ in anything at all end further apart than the bounds are
(``--warmup-epochs 0`` shows it); so both methods go on from the same warm start, which is trained from principal
components with the *base* bound, for half the epochs that each then trains with its own. The methods whose names end in
``collapsed`` train the collapsed bounds with L-BFGS on all rows, straight from principal components. Both bounds are
evaluated at each run's own parameters.

A quarter of the entries of the test rows is hidden, the latents of these rows are inferred from the rest, and the hidden
entries predicted. The data are scaled to unit variance, and so are bounds and errors: ``bound_raw`` is the bound in the
data's own units. Last, the time of a training step is compared for 1e3 and 1e6 rows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.mlls import VariationalELBO
from torch import Tensor

import tighter_gp
from tighter_gp import gplvm
from tighter_gp.gplvm import collapsed
from tighter_gp.training import History, Step, distributed, fit

from .data import load_oil_flow
from .errors import UserError
from .options import add_arguments as add_common
from .options import resolve, writable_folder
from .report import Mean, Result, grouped, mean, means_table, pairs, pairs_table, table
from .runs import Session

METHODS = ("v-bgplvm", "tv-bgplvm", "v-bgplvm-collapsed", "tv-bgplvm-collapsed")
DEFAULTS: dict[str, Any] = {
    "methods": ["v-bgplvm", "tv-bgplvm"],
    "datasets": ["oil"],
    "num_inducing": [25, 50],
    "epochs": 800,
    "batch_size": 500,
    "lr": 0.03,
    "dtype": "float64",
    "seed": [0, 1, 2],
}
OWN_DEFAULTS = {"warmup_epochs": 400, "iterations": 400}
SMOKE: dict[str, Any] = {
    "methods": list(METHODS),
    "datasets": ["phases"],
    "num_inducing": [8],
    "epochs": 8,
    "batch_size": 40,
    "seed": [0],
    "warmup_epochs": 4,
    "iterations": 15,
}

DATASETS = ("oil", "phases")
LATENT_DIM, FIRST_NOISE, HIDDEN = 10, 0.05, 0.25
WARMUP_LR = 0.1

# Draws of x: in training the collapsed bound has few Sobol points, in the evaluation many others. The sampled bound is
# evaluated in rounds, whose spread gives a standard error.
_TRAIN_NODES, _TEST_NODES = 8, 256
_TEST_ROUNDS, _TEST_SAMPLES, _TRACE_SAMPLES = 8, 32, 8
_TRACE_POINTS = 100


class Data(NamedTuple):
    """Rows of training and test data in units of the training rows' standard deviation, and labels of the former."""

    train: Tensor
    labels: Tensor
    test: Tensor
    stddev: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument(
        "--warmup-epochs",
        type=int,
        metavar="X",
        help=f"epochs with the base bound, common to a pair; 0 for none (default: {OWN_DEFAULTS['warmup_epochs']})",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="X",
        help=f"iterations of L-BFGS for the collapsed pair (default: {OWN_DEFAULTS['iterations']})",
    )


def run(args: argparse.Namespace) -> None:
    """Train, score and draw each method; print the tables."""
    args = resolve(args, {**DEFAULTS, **OWN_DEFAULTS}, SMOKE, METHODS, DATASETS)
    if args.iterations < 1:
        raise UserError(f"--iterations must be positive; got {args.iterations}.")
    if args.warmup_epochs < 0:
        raise UserError(f"--warmup-epochs must not be negative; got {args.warmup_epochs}.")
    loaded = {name: load(name, args) for name in args.datasets}
    for name, data in loaded.items():
        if max(args.num_inducing) > len(data.train):
            raise UserError(
                f"{max(args.num_inducing)} inducing points are more than the {len(data.train)} rows of {name}."
            )
    session = Session("gplvm", args)
    planned = [
        describe(args, name, number, seed, method)
        for name in args.datasets
        for number in args.num_inducing
        for seed in args.seed
        for method in args.methods
    ]
    session.plan(planned)
    figures, is_first = writable_folder(session.path.parent / "figures"), distributed.rank() == 0
    results = []
    if not args.resume:
        for one in planned:
            session.forget(session.shared(one))
    for one in planned:
        drawn = (
            figures / f"gplvm_latents_{one['method']}_M{one['num_inducing']}.png"
            if one["seed"] == args.seed[0] and is_first
            else None
        )
        results.append(session.run(one, partial(train, one, loaded[one["dataset"]], drawn, session.shared(one))))
    for one in planned:
        session.forget(session.shared(one))
    costs = Session("gplvm_step", args)
    step = describe_step(args)
    cost = costs.run(step, partial(step_cost, step, args))
    if not is_first:
        return
    print(f"\n{means_table(results)}\n")
    if paired := pairs_table(results):
        print(f"{paired}\n")
    print(f"{latents_table(results)}\n")
    if judged := judged_table(results):
        print(f"{judged}\n")
    draw_traces(results, figures / "gplvm_traces.png")
    print(step_line(cost))


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def load(name: str, args: argparse.Namespace) -> Data:
    """Training rows and test rows, scaled with the former's mean and standard deviation."""
    if name == "oil":
        parts = load_oil_flow(args.data_dir)
        (train, labels), (test, _) = parts["train"], parts["test"]
    else:
        train, labels = make_phases(150, seed=0)
        test, _ = make_phases(60, seed=1)
    mean, stddev = train.mean(0), train.std(0)
    scaled = [((rows - mean) / stddev).to(device=args.device, dtype=args.dtype) for rows in (train, test)]
    return Data(scaled[0], labels, scaled[1], stddev)


def make_phases(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """An embedded set like the oil flow: three noisy curves in twelve dimensions, and which curve a row is on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_rows) % 3
    position = 2 * torch.rand(num_rows, 1, generator=generator, dtype=torch.float64) - 1
    column = torch.arange(12, dtype=torch.float64)
    phase = labels.unsqueeze(-1)
    rows = torch.sin(position * (1 + phase / 2) + column * (1 + phase)) + 0.7 * torch.cos(column * phase)
    return rows + 0.05 * torch.randn(rows.shape, generator=generator, dtype=torch.float64), labels


# ---------------------------------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------------------------------


def describe(args: argparse.Namespace, dataset: str, num_inducing: int, seed: int, method: str) -> dict[str, Any]:
    """What tells a run from others."""
    config = {
        "latent_dim": LATENT_DIM,
        "first_noise": FIRST_NOISE,
        "hidden": HIDDEN,
        "infer_steps": 30 if args.smoke else 100,
        "dtype": str(args.dtype).removeprefix("torch."),
    }
    if method.endswith("collapsed"):
        config |= {"iterations": args.iterations, "nodes": _TRAIN_NODES}
    else:
        config |= {
            "warmup_epochs": args.warmup_epochs,
            "warmup_lr": WARMUP_LR,
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "lr": args.lr,
        }
    return {
        "dataset": dataset,
        "split": 0,
        "seed": seed,
        "method": method,
        "num_inducing": num_inducing,
        "config": config,
    }


def train(
    run: dict[str, Any], data: Data, drawn: Path | None, warm: Path, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train one method and score it.

    :param drawn: Where to draw the latent space, if anywhere.
    :param warm: Checkpoint of the common warm start.
    """
    started = time.process_time()
    tighter = run["method"].startswith("t")
    if run["method"].endswith("collapsed"):
        model, outcome = train_collapsed(run, data, tighter)
    else:
        model, outcome = train_batches(run, data, tighter, warm, checkpoint, resume)
    if drawn is not None:
        draw_latents(model, run, data, drawn)
    bound = outcome["bound_tighter" if tighter else "bound_base"]
    return {
        "bound": bound,
        "bound_raw": bound - data.stddev.log().sum().item(),
        **outcome,
        **separation(model, data),
        **hidden_entries(model, data, tighter, run["seed"], run["config"]["infer_steps"]),
        "noise": model.likelihood.noise.item(),
        "outputscale": model.covar_module.outputscale.item(),
        "num_train": len(data.train),
        "num_inputs": data.train.size(-1),
        "cpu_seconds": round(time.process_time() - started, 3),
    }


def start(data: Data, num_inducing: int, seed: int) -> gplvm.BayesianGPLVM:
    """The model that all methods start from."""
    generator = torch.Generator().manual_seed(seed)
    model = gplvm.BayesianGPLVM.from_data(data.train, LATENT_DIM, num_inducing, generator=generator)
    model.likelihood.noise = FIRST_NOISE
    tighter_gp.set_optimal_q(model, model.likelihood, model.latents.q().mean.detach(), data.train.mT)
    return model


class Trace:
    """Callback of :func:`~tighter_gp.fit` that notes the bound of all rows now and then, with the same draws each time.

    Its state is in the checkpoint, so that an interrupted run keeps what it noted.

    :param elbo: The bound.
    :param every: Steps between notes.
    :param offset: Steps before this training.
    """

    def __init__(self, elbo: gplvm.LatentVariableELBO, targets: Tensor, every: int, offset: int = 0) -> None:
        self.elbo, self.targets, self.every, self.offset = elbo, targets, every, offset
        self.points: list[dict[str, float]] = []

    def __call__(self, state: Step) -> None:
        """After a step."""
        if state.step % self.every == 0:
            torch.manual_seed(0)
            value = self.elbo.evaluate(self.targets, num_samples=_TRACE_SAMPLES).item()
            self.points.append({"step": self.offset + state.step, "bound": value})

    def state_dict(self) -> dict[str, Any]:
        """What was noted."""
        return {"points": self.points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.points = state["points"]


class WarmStart(NamedTuple):
    """Where both methods of a pair go on from."""

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
    trace = Trace(elbo, data.train, max(1, steps // notes), offset)
    history = fit(
        model,
        model.likelihood,
        None,
        data.train,
        objective=lambda likelihood, model, num_data: elbo,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
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


def train_collapsed(run: dict[str, Any], data: Data, tighter: bool) -> tuple[gplvm.BayesianGPLVM, dict[str, Any]]:
    """All rows at once: L-BFGS."""
    first = start(data, run["num_inducing"], run["seed"])
    latents = gplvm.VariationalLatents(first.latents.q().mean, stddev=first.latents.q().stddev, sparse=False)
    model = gplvm.CollapsedBayesianGPLVM(
        latents,
        first.variational_strategy.inducing_points,
        data.train,
        first.likelihood,
        first.covar_module,
        bound="tighter" if tighter else "titsias",
        num_nodes=_TRAIN_NODES,
        seed=run["seed"],
    )
    iterations, losses = run["config"]["iterations"], []
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=100,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -model()
        loss.backward()
        losses.append(loss.item())
        return loss

    started = time.perf_counter()
    optimizer.step(closure)
    seconds = time.perf_counter() - started
    # The best so far: the line search also looks at points that are worse.
    best = list(itertools.accumulate(losses, min))
    every = max(1, len(best) // _TRACE_POINTS)
    trace = [{"step": step, "bound": -best[step]} for step in range(0, len(best), every)]
    with torch.no_grad():
        problem, kl = model.problem(), latents.kl_divergence().sum()
        sums = collapsed.statistics(problem)
        nodes = collapsed.sobol_nodes(_TEST_NODES, LATENT_DIM, data.train, seed=run["seed"] + 1)
        bounds = {
            "bound_tighter": collapsed.tighter_bound(problem, nodes, sums=sums, kl=kl),
            "bound_base": collapsed.titsias_bound(problem, sums, kl),
        }
    outcome: dict[str, Any] = {name: value.item() / len(data.train) for name, value in bounds.items()}
    outcome |= {"seconds": round(seconds, 3), "steps": len(losses), "trace": trace}
    return model.uncollapsed(), outcome


def separation(model: gplvm.BayesianGPLVM, data: Data) -> dict[str, Any]:
    """How often the nearest other row in the two most relevant latents is of another phase."""
    report = gplvm.relevance(model)
    latents = model.latents.q().mean.detach()[:, report.order[:2]].cpu()
    distance = torch.cdist(latents, latents).fill_diagonal_(torch.inf)
    error = (data.labels[distance.argmin(-1)] != data.labels).double().mean().item()
    return {
        "error": error,
        "relevance": [round(value, 4) for value in report.relevance.tolist()],
        "relevant": report.order[:2].tolist(),
    }


def hidden_entries(model: gplvm.BayesianGPLVM, data: Data, tighter: bool, seed: int, steps: int) -> dict[str, Any]:
    """Errors on entries of the test rows that the inference of their latents did not see."""
    generator = torch.Generator().manual_seed(1000 + seed)
    observed = (torch.rand(data.test.shape, generator=generator) >= HIDDEN).to(data.test.device)
    torch.manual_seed(seed)
    objective = None if tighter else VariationalELBO
    q_x = model.infer_latents(data.test, observed, num_steps=steps, objective=objective)
    error = (model.reconstruct(q_x).mean - data.test)[~observed]
    density = model.log_density(data.test, q_x, ~observed)[~observed]
    rmse, column_mean = error.square().mean().sqrt().item(), data.test[~observed].square().mean().sqrt().item()
    return {
        "rmse": rmse,
        "rmse_column_mean": column_mean,
        "nlpd": -density.mean().item(),
        "flags": ["rmse above half the column mean's"] if rmse >= 0.5 * column_mean else [],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Step cost
# ---------------------------------------------------------------------------------------------------------------------


def describe_step(args: argparse.Namespace) -> dict[str, Any]:
    """What tells the comparison of steps from others."""
    sizes, steps = ([1000, 20_000], 10) if args.smoke else ([1000, 1_000_000], 100)
    config = {"sizes": sizes, "steps": steps, "batch_size": 100, "latent_dim": LATENT_DIM, "num_outputs": 12}
    return {"dataset": "synthetic", "split": 0, "seed": 0, "method": "step", "num_inducing": 25, "config": config}


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


# ---------------------------------------------------------------------------------------------------------------------
# Tables and figures
# ---------------------------------------------------------------------------------------------------------------------


def latents_table(results: list[Result]) -> str:
    """What the other tables do not show, run by run."""
    header = [
        "data",
        "M",
        "seed",
        "method",
        "-bound / N",
        "raw units",
        "1-NN accuracy",
        "RMSE / column mean's",
        "relevance",
    ]
    rows = [
        [
            result["dataset"],
            str(result["num_inducing"]),
            str(result["seed"]),
            result["method"],
            Mean(-result["bound"], own_error(result), 1).show(3),
            f"{-result['bound_raw']:.3f}",
            f"{1 - result['error']:.3f}",
            f"{result['rmse'] / result['rmse_column_mean']:.3f}",
            " ".join(f"{value:.2f}" for value in result["relevance"][:5]),
        ]
        for result in results
    ]
    return table(header, rows)


def own_error(result: Result) -> float | None:
    """Standard error of the bound that a run was trained with, from the draws of x; None for a collapsed bound."""
    name = "bound_tighter_se" if result["method"].startswith("t") else "bound_base_se"
    return result.get(name)


def judged_table(results: list[Result]) -> str | None:
    """What the comparison is judged by, tighter against base; None if there are no pairs."""
    header = [
        "data",
        "M",
        "pair",
        "lower -bound",
        "least 1-NN accuracy",
        "largest RMSE / column mean's",
        "Δ RMSE",
        "Δ NLPD",
        "RMSE worse by > 1 s.e.",
    ]
    rows = []
    for (dataset, num_inducing, _), group in grouped(results).items():
        for (base, tighter), matched in pairs(group).items():
            both = [result for pair in matched for result in pair]
            wins = sum(second["bound"] > first["bound"] for first, second in matched)
            rmse, nlpd = (mean(second[name] - first[name] for first, second in matched) for name in ("rmse", "nlpd"))
            assert rmse is not None
            assert nlpd is not None
            rows.append(
                [
                    dataset,
                    str(num_inducing),
                    f"{tighter} − {base}",
                    f"{wins} of {len(matched)}",
                    f"{1 - max(result['error'] for result in both):.3f}",
                    f"{max(result['rmse'] / result['rmse_column_mean'] for result in both):.3f}",
                    rmse.show(4, signed=True),
                    nlpd.show(4, signed=True),
                    "" if rmse.error is None else "yes" if rmse.value > rmse.error else "no",
                ]
            )
    return table(header, rows) if rows else None


def draw_latents(model: gplvm.BayesianGPLVM, run: dict[str, Any], data: Data, path: Path) -> None:
    """The latent space by phase."""
    from . import plotting

    with plotting.style():
        figure = plotting.new_figure(5.4, 5.4)
        axes = figure.subplots()
        gplvm.plot_latents(model, [f"phase {label + 1}" for label in data.labels.tolist()], ax=axes)
        axes.grid(False)
        axes.get_legend().remove()
        figure.legend(loc="outside lower center", ncols=4, handletextpad=0.2, columnspacing=1.2, markerscale=1.8)
        method = run["method"].removesuffix("-collapsed").upper()
        axes.set_title(f"{method}, M = {run['num_inducing']} (grey: less certain)")
        plotting.save(figure, path)


def draw_traces(results: list[Result], path: Path) -> None:
    """The negative bound in training, and below it that of V-BGPLVM less that of TV-BGPLVM, seed by seed.

    One column a number of inducing points and way of training.
    """
    from . import plotting

    columns = sorted({(result["num_inducing"], result["method"].endswith("collapsed")) for result in results})
    with plotting.style():
        figure = plotting.new_figure(4.6 * len(columns) + 0.4, 6.0)
        panels = figure.subplots(2, len(columns), squeeze=False, sharex="col", height_ratios=[1.6, 1])
        for (size, is_collapsed), upper, lower in zip(columns, *panels, strict=True):
            own = [r for r in results if (r["num_inducing"], r["method"].endswith("collapsed")) == (size, is_collapsed)]
            upper.set_title(f"M = {size}, {'collapsed' if is_collapsed else 'mini-batches'}")
            upper.set_ylabel("negative bound / N")
            lower.set_ylabel("V − TV")
            lower.set_xlabel("evaluation in L-BFGS" if is_collapsed else "step")
            _draw_bounds(upper, own)
            _draw_gaps(lower, own)
            if warmup := own[0].get("warmup_steps"):
                for axes in (upper, lower):
                    axes.axvspan(0, warmup, color=plotting.GREY, alpha=0.15, linewidth=0)
                upper.text(warmup / 2, 0.03, "common\nwarm start", ha="center", transform=upper.get_xaxis_transform())
        plotting.save(figure, path)


def _draw_bounds(axes: Any, results: list[Result]) -> None:
    from . import plotting

    shown = []
    for result in results:
        tighter = result["method"].startswith("t")
        values = [-point["bound"] for point in result["trace"]]
        shown += values
        axes.plot(
            [point["step"] for point in result["trace"]],
            values,
            label=("TV-BGPLVM" if tighter else "V-BGPLVM") if result["seed"] == results[0]["seed"] else None,
            linewidth=1.2,
            **plotting.method_style("T-" if tighter else ""),
        )
    low, high = min(shown), sorted(shown)[int(0.9 * len(shown))]
    axes.set_ylim(low - 0.05 * (high - low), high)
    axes.legend()


def _draw_gaps(axes: Any, results: list[Result]) -> None:
    """At the base's steps, between which the other's trace is taken as straight."""
    from . import plotting

    axes.axhline(0, color=plotting.INK, linewidth=0.8)
    markers = "o^sDvP"
    for matched in pairs(results).values():
        for position, (base, tighter) in enumerate(matched):
            steps, values, others, other_steps = (
                [point[name] for point in result["trace"]]
                for result, name in ((base, "step"), (base, "bound"), (tighter, "bound"), (tighter, "step"))
            )
            gap = np.interp(steps, other_steps, others) - np.asarray(values)
            axes.plot(
                steps,
                gap,
                label=f"seed {base['seed']}",
                color=plotting.VERMILION,
                linewidth=1.0,
                marker=markers[position % len(markers)],
                markersize=4,
                alpha=0.8,
            )
            axes.legend()
