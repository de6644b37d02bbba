"""SGPR, T-SGPR, SVGP and T-SVGP side by side on one-dimensional data: a table and a figure in under a minute.

All four start from the same hyperparameters (all 1) and inducing inputs (evenly spaced quantiles of the inputs), and
:func:`tighter_gp.fit` trains them: SGPR and T-SGPR by L-BFGS, SVGP and T-SVGP on mini-batches, with natural gradients for
q(u) and Adam for the rest. These two share q(u)'s start, every mini-batch and the learning rates; last, q(u) takes its
closed form. Rates and steps were tuned on this data and Snelson's until both methods reached their collapsed bounds;
T-SVGP needs more steps for it than SVGP. Reported bounds are those of the whole training set.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import tighter_gp
from tighter_gp.training import Step

from . import plotting
from .options import writable_folder
from .runs import environment
from .scores import table as markdown
from .toy import Data, make_toy, toy_function

JITTER = 1e-6
PUBLISHED = Path(__file__).parent / "results" / "demo"
RESULTS, FIGURE = "demo.jsonl", "demo.png"


class Budget(NamedTuple):
    """What a method may spend.

    :param iterations: Of L-BFGS.
    :param steps: Of Adam and natural gradients, each on one mini-batch.
    :param batch_size: Points per mini-batch.
    :param adam_rate: First learning rate of Adam, which falls to 0 along a cosine.
    :param natural_rate: Step size of the natural gradients.
    :param trace_every: Steps between two points of a trace.
    """

    iterations: int = 150
    steps: int = 800
    batch_size: int = 100
    adam_rate: float = 0.1
    natural_rate: float = 0.8
    trace_every: int = 10


SMOKE = Budget(iterations=3, steps=6, trace_every=2)


# ---------------------------------------------------------------------------------------------------------------------
# The models
# ---------------------------------------------------------------------------------------------------------------------


class UncollapsedGP(gpytorch.models.ApproximateGP):
    """SVGP under :class:`~gpytorch.mlls.VariationalELBO`, T-SVGP under :class:`~tighter_gp.TighterELBO`."""

    def __init__(self, inducing_points: Tensor) -> None:
        q = gpytorch.variational.NaturalVariationalDistribution(inducing_points.size(0))
        super().__init__(
            tighter_gp.TighterVariationalStrategy(self, inducing_points.clone(), q.double(), jitter_val=JITTER)
        )
        self.likelihood = make_likelihood()
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = make_kernel()

    @property
    def inducing_points(self) -> Tensor:
        """Where the inducing inputs are."""
        return self.variational_strategy.inducing_points

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_kernel() -> gpytorch.kernels.ScaleKernel:
    """A squared exponential kernel with variance and lengthscale 1."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 1.0
    return kernel


def make_likelihood() -> gpytorch.likelihoods.GaussianLikelihood:
    """Gaussian noise of variance 1."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 1.0
    return likelihood


def inducing_quantiles(x: Tensor, num_inducing: int) -> Tensor:
    """Evenly spaced quantiles of the inputs, ``num_inducing x 1``."""
    levels = (torch.arange(num_inducing, dtype=x.dtype) + 0.5) / num_inducing
    return torch.quantile(x.squeeze(-1), levels).unsqueeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """A trained model.

    :param bound: The bound on the log evidence of the whole training set, per datum.
    :param trace: The same bound during training: pairs of iteration or step, and value.
    """

    model: Any
    bound: float
    trace: list[tuple[int, float]]
    seconds: float


class Trace:
    """Callback of :func:`tighter_gp.fit` that notes the bound of the whole training set.

    :param bound: Evaluates it.
    :param every: Steps between two notes.
    """

    def __init__(self, bound: Callable[[], float], every: int) -> None:
        self.bound, self.every = bound, every
        self.points = [(0, bound())]

    def __call__(self, state: Step) -> bool:
        """After a step; ends the run when the bound has not moved for five notes of L-BFGS."""
        if state.step % self.every:
            return False
        self.points.append((state.step, self.bound()))
        return self.every == 1 and len(self.points) > 6 and self.points[-1][1] - self.points[-6][1] < 1e-8


def train_collapsed(bound: str, data: Data, z: Tensor, budget: Budget, seed: int) -> Fit:
    """Maximise a collapsed bound of the full data with L-BFGS."""
    prior = make_kernel(), make_likelihood(), gpytorch.means.ZeroMean()
    model = tighter_gp.CollapsedGP(data.x, data.y, z, *prior, bound=bound, jitter_val=JITTER)
    trace = Trace(lambda: bound_of(model, data), 1)
    history = tighter_gp.fit(
        model, model.likelihood, steps=budget.iterations, seed=seed, callbacks=[trace], progress=False
    )
    return Fit(model, bound_of(model, data), trace.points, history.seconds)


def train_uncollapsed(objective: type, data: Data, z: Tensor, budget: Budget, seed: int) -> Fit:
    """Maximise an uncollapsed bound on mini-batches: natural gradients for q(u), Adam for the rest."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UncollapsedGP(z)
        model(data.x[:1])  # q(u)'s start is drawn at the first call
    trace = Trace(lambda: bound_of(model, data, objective=objective), budget.trace_every)
    history = tighter_gp.fit(
        model,
        model.likelihood,
        data.x,
        data.y,
        objective=objective,
        steps=budget.steps,
        batch_size=budget.batch_size,
        recipe=tighter_gp.Recipe(lr=budget.adam_rate, natural=budget.natural_rate),
        seed=seed,
        callbacks=[trace],
        progress=False,
    )
    tighter_gp.set_optimal_q(model, model.likelihood, data.x, data.y)
    bound = bound_of(model, data, objective=objective)
    return Fit(model, bound, [*trace.points, (history.steps, bound)], history.seconds)


def bound_of(model: Any, data: Data, **kwargs: Any) -> float:
    """The bound of the whole training set, per datum."""
    return tighter_gp.evaluate_bound(model, model.likelihood, data.x, data.y, **kwargs).item() / len(data.y)


METHODS: dict[str, tuple[Callable[..., Fit], Any]] = {
    "SGPR": (train_collapsed, "titsias"),
    "T-SGPR": (train_collapsed, "tighter"),
    "SVGP": (train_uncollapsed, gpytorch.mlls.VariationalELBO),
    "T-SVGP": (train_uncollapsed, tighter_gp.TighterELBO),
}


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def describe(fit: Fit, data: Data) -> dict[str, Any]:
    """What is reported of a trained model."""
    model, noise = fit.model, fit.model.likelihood.noise
    kernel = model.covar_module
    log_evidence = tighter_gp.maths.bounds.exact_log_evidence(kernel(data.x).to_dense(), data.y, noise)
    test = tighter_gp.predict(model, data.test_x)
    variance = test.variance + noise
    nlpd = 0.5 * (torch.log(2 * math.pi * variance) + (data.test_y - test.mean).square() / variance)
    low, high = data.x.min().item(), data.x.max().item()
    grid = torch.linspace(low - 0.1 * (high - low), high + 0.1 * (high - low), 200, dtype=data.x.dtype)
    f = tighter_gp.predict(model, grid.unsqueeze(-1))
    return {
        "bound_per_datum": fit.bound,
        "log_evidence_per_datum": log_evidence.item() / len(data.y),
        "noise_variance": noise.item(),
        "kernel_variance": kernel.outputscale.item(),
        "lengthscale": kernel.base_kernel.lengthscale.item(),
        "rmse": (data.test_y - test.mean).square().mean().sqrt().item(),
        "mean_nlpd": nlpd.mean().item(),
        "seconds": round(fit.seconds, 3),
        "inducing_inputs": model.inducing_points.squeeze(-1).tolist(),
        "trace": [[step, round(value, 5)] for step, value in fit.trace],
        "fit": {"x": _rounded(grid), "mean": _rounded(f.mean), "stddev": _rounded(f.stddev)},
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table with a caption; what is printed and what the documentation shows."""
    first = results[0]
    header = ["method", "bound", "exact", "noise", "kernel variance", "RMSE", "mean NLPD", "seconds"]
    rows = [
        [result["method"]]
        + [f"{result[key]:.4f}" for key in ("bound_per_datum", "log_evidence_per_datum", "noise_variance")]
        + [f"{result[key]:.4f}" for key in ("kernel_variance", "rmse", "mean_nlpd")]
        + [f"{result['seconds']:.1f}"]
        for result in results
    ]
    caption = (
        f"{first['dataset']}: {first['num_data']} training points, {first['num_inducing']} inducing points. "
        "bound: lower bound on the log evidence, per datum, higher is tighter; exact: the log evidence per datum at the "
        f"learnt hyperparameters; noise: learnt noise variance (the data were made with {first['true_noise']:g}); RMSE and "
        f"NLPD: on {first['num_test']} test points, lower is better."
    )
    return f"{markdown(header, rows)}\n\n{textwrap.fill(caption, 120)}"


def draw(results: list[dict[str, Any]], data: Data) -> plotting.Figure:
    """The two collapsed fits in one panel, what all four have learnt beside it, and the bounds during training."""
    by_method = {result["method"]: result for result in results}
    with plotting.style():
        figure = plotting.new_figure(13.5, 4.6)
        grid = figure.add_gridspec(2, 3, width_ratios=(1.5, 0.8, 1.0))
        _draw_fits(figure.add_subplot(grid[:, 0]), [by_method["SGPR"], by_method["T-SGPR"]], data)
        _draw_bars(figure.add_subplot(grid[0, 1]), results, "noise_variance", "Learnt noise variance", data.noise)
        _draw_bars(figure.add_subplot(grid[1, 1]), results, "kernel_variance", "Learnt kernel variance", None)
        for row, (family, step) in enumerate((("SGPR", "L-BFGS iteration"), ("SVGP", "step (mini-batches)"))):
            _draw_traces(figure.add_subplot(grid[row, 2]), [by_method[family], by_method[f"T-{family}"]], step)
    return figure


def _draw_traces(axes: Any, results: list[dict[str, Any]], step: str) -> None:
    for result in results:
        look = plotting.method_style(result["method"])
        steps, values = zip(*result["trace"], strict=True)
        axes.plot(steps, values, **look, label=f"{result['method']}: {result['bound_per_datum']:.3f}")
    # The interesting end of the traces: the first steps lie far below.
    ends = [result["bound_per_datum"] for result in results]
    bottom = max(min(ends) - 3 * max(max(ends) - min(ends), 0.05), min(v for r in results for _, v in r["trace"]))
    margin = 0.1 * (max(ends) - bottom)
    axes.set_ylim(bottom - margin, max(ends) + margin)
    axes.set_xlabel(step)
    axes.set_title("Bound per datum")
    axes.legend(loc="lower right")


def _draw_bars(axes: Any, results: list[dict[str, Any]], key: str, title: str, truth: float | None) -> None:
    for position, result in enumerate(results):
        color = plotting.method_style(result["method"])["color"]
        bars = axes.bar(position, result[key], color=color, width=0.7)
        axes.bar_label(bars, fmt="%.4f", fontsize=9)
    if truth is not None:
        axes.axhline(truth, color=plotting.INK, linestyle=":", linewidth=1.4)
        axes.text(len(results) - 0.5, truth, " truth", va="center", fontsize=9.5)
    axes.set_xticks(range(len(results)), [result["method"] for result in results], fontsize=9.5)
    axes.margins(y=0.18)
    axes.grid(visible=False, axis="x")
    axes.set_title(title)


def _draw_fits(axes: Any, results: list[dict[str, Any]], data: Data) -> None:
    """Bands of y, less the function that the data were made with."""
    x, y = data.x.squeeze(-1).numpy(), data.y.numpy()
    axes.scatter(x, y - toy_function(x), s=9, color=plotting.INK, alpha=0.5, linewidths=0, zorder=3, label="data")
    for result, marker in zip(results, "v^", strict=True):
        look, where = plotting.method_style(result["method"]), np.asarray(result["fit"]["x"])
        inside = (where >= x.min()) & (where <= x.max())
        mean = np.asarray(result["fit"]["mean"]) - toy_function(where)
        width = 2 * np.sqrt(np.square(result["fit"]["stddev"]) + result["noise_variance"])
        low, high = (mean - width)[inside], (mean + width)[inside]
        axes.fill_between(where[inside], low, high, color=look["color"], alpha=0.16, linewidth=0)
        axes.plot(where[inside], low, **look, label=f"{result['method']}, ±2 std")
        axes.plot(where[inside], high, **look)
        points = result["inducing_inputs"]
        place = {"transform": axes.get_xaxis_transform(), "linestyle": "none", "marker": marker, "markersize": 8}
        axes.plot(points, [0.03] * len(points), color=look["color"], **place)
    edge = 2 * math.sqrt(data.noise)
    axes.axhline(edge, color=plotting.INK, linewidth=1.4, linestyle=":", label="truth, ±2 std")
    axes.axhline(-edge, color=plotting.INK, linewidth=1.4, linestyle=":")
    axes.set(xlabel="x (triangles: inducing inputs)", ylabel="y − true function")
    axes.set_title(f"Predictions of y: {results[0]['num_inducing']} inducing points, {len(y)} data")
    axes.legend(loc="upper center", fontsize=9.5, ncols=2)
    axes.margins(y=0.14)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m benchmarks demo``."""
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/demo"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of mini-batches and q(u)'s start")
    parser.add_argument("--num-inducing", type=int, default=5, metavar="M", help="default %(default)s")
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that it runs")
    parser.add_argument("--publish", action="store_true", help="write the files that README and documentation show")


def run(args: argparse.Namespace) -> None:
    """Train the four models, print the table, write the results and the figure."""
    torch.set_num_threads(1)  # matrices this small are slower to share between threads
    data, out = make_toy(), writable_folder(PUBLISHED if args.publish else args.out)
    results = run_methods(data, args.num_inducing, SMOKE if args.smoke else Budget(), args.seed)
    print(table(results))
    (out / RESULTS).write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    plotting.save(draw(results, data), out / FIGURE)
    print(f"\nFigure: {out / FIGURE}\nResults: {out / RESULTS}")


def run_methods(data: Data, num_inducing: int, budget: Budget, seed: int) -> list[dict[str, Any]]:
    """Train and describe all methods."""
    z = inducing_quantiles(data.x, num_inducing)
    shared = {
        "experiment": "demo",
        "dataset": data.name,
        "num_data": len(data.y),
        "num_test": len(data.test_y),
        "true_noise": data.noise,
        "num_inducing": num_inducing,
        "seed": seed,
        "config": budget._asdict(),
        **environment("cpu"),
    }
    results = []
    for method, (train, choice) in METHODS.items():
        if not method.startswith("T-"):  # the first call of its kind is slow: keep that out of the seconds
            train(choice, data, z, SMOKE, seed)
        fit = train(choice, data, z, budget, seed)
        results.append({"method": method, **shared, **describe(fit, data)})
    return results
