"""The latent space, and the bounds during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tighter_gp import gplvm

from .. import plotting
from ..report import Result, pairs
from .rows import Data


def draw_latents(model: gplvm.BayesianGPLVM, run: dict[str, Any], data: Data, path: Path) -> None:
    """The latent space by phase."""
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

    One column per number of inducing points and way of training.
    """
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
