"""The paper's figures, from result files; each as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import plotting
from .plotting import BLUE, GREY, INK, ORANGE, SKY, VERMILION
from .report import BOUND, ERROR, LOG_LIKELIHOOD, RMSE, Metric, Result, grouped, label, mean, methods_of, settings_of
from .sections import comparable

STYLES: dict[str, dict[str, Any]] = {
    "svgp": {"color": BLUE, "marker": "o", "linestyle": (0, (5, 1.5))},
    "t-svgp": {"color": VERMILION, "marker": "o", "linestyle": "-"},
    "solve-gp": {"color": SKY, "marker": "s", "linestyle": (0, (5, 1.5))},
    "t-solve-gp": {"color": ORANGE, "marker": "s", "linestyle": "-"},
    "sgpr": {"color": SKY, "marker": "s", "linestyle": (0, (5, 1.5))},
    "t-sgpr": {"color": ORANGE, "marker": "s", "linestyle": "-"},
    "drop": {"color": BLUE, "marker": "o", "linestyle": (0, (5, 1.5))},
    "exact": {"color": VERMILION, "marker": "o", "linestyle": "-"},
}


def draw_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw what the results allow; returns the files."""
    drawn: list[Path] = []
    by_experiment: dict[str, list[Result]] = {}
    for result in results:
        by_experiment.setdefault(result["experiment"], []).append(result)
    with plotting.style():
        for experiment, everything in by_experiment.items():
            own = comparable(everything, experiment)
            if experiment == "snelson":
                figures = {"fits": _snelson(own)}
            elif experiment == "prediction":
                figures = {"seconds": _prediction(own)}
            elif experiment == "oil_example":
                figures = {"losses": _losses(own)}
            elif experiment == "million":
                continue
            else:
                figures = {
                    name: _scores(own, metric)
                    for name, metric in {
                        "bound": BOUND,
                        "log_likelihood": LOG_LIKELIHOOD,
                        "rmse": RMSE,
                        "error": ERROR,
                    }.items()
                    if any(metric.read(result) is not None for result in own)
                }
                dataset = _traced(own)
                if dataset is not None:
                    figures[f"traces_{dataset}"] = _traces(_with_trace(own, dataset))
            for name, figure in figures.items():
                drawn += _save(figure, folder / f"{experiment}_{name}")
    return drawn


def _save(figure: Figure, path: Path) -> list[Path]:
    plotting.save(figure, path.with_suffix(".png"))
    with mpl.rc_context({"svg.hashsalt": path.name}):  # the same bytes every time
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return [path.with_suffix(".png"), path.with_suffix(".svg")]


def _style(method: str) -> dict[str, Any]:
    if method in STYLES:
        return STYLES[method]
    tighter = method.startswith("t")
    return {"color": VERMILION if tighter else BLUE, "marker": "o", "linestyle": "-" if tighter else (0, (5, 1.5))}


def _panels(count: int, columns: int = 4, width: float = 3.2, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = plotting.new_figure(width * columns + 0.4, height * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for empty in axes[count:]:
        empty.set_visible(False)
    return figure, axes[:count]


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=max(2, min(6, int(figure.get_figwidth() / 1.6))),
        )


def _scores(results: Sequence[Result], metric: Metric) -> Figure:
    """One panel per data set and settings: a metric against the number of inducing points."""
    panels: dict[str, list[Result]] = {}
    settings = settings_of(results)
    for key, group in grouped(results).items():
        panels.setdefault("\n".join(filter(None, (key[0], settings[key]))), []).extend(group)
    figure, axes = _panels(len(panels))
    for (title, own), panel in zip(panels.items(), axes, strict=True):
        sizes = sorted({result.get("num_inducing") or 0 for result in own})
        methods = methods_of(own)
        for i, method in enumerate(methods):
            points = []
            for position, size in enumerate(sizes):
                values = [r for r in own if r["method"] == method and (r.get("num_inducing") or 0) == size]
                average = mean(map(metric.read, values))
                if average is not None:
                    points.append((position + 0.09 * (i - (len(methods) - 1) / 2), average))
            if points:
                panel.errorbar(
                    [x for x, _ in points],
                    [average.value for _, average in points],
                    yerr=[average.error or 0.0 for _, average in points],
                    label=label(method),
                    capsize=2,
                    **_style(method),
                )
        panel.set_xticks(range(len(sizes)), list(map(str, sizes)))
        panel.set_xlim(-0.5, len(sizes) - 0.5)
        panel.set_title(title)
        panel.set_xlabel("inducing points")
    axes[0].set_ylabel(_axis(metric))
    _legend(figure, axes)
    return figure


def _axis(metric: Metric) -> str:
    better = {1: " (higher is better)", -1: " (lower is better)"}.get(metric.sign, "")
    return metric.title + better


def _traced(results: Sequence[Result]) -> str | None:
    datasets = [result["dataset"] for result in results if result.get("trace")]
    return "kin40k" if "kin40k" in datasets else datasets[0] if datasets else None


def _with_trace(results: Sequence[Result], dataset: str) -> list[Result]:
    """Runs of a data set that have a trace, but for those of which little was noted beside the others."""
    found = [result for result in results if result["dataset"] == dataset and result.get("trace")]
    most = max(len(result["trace"]) for result in found)
    return [result for result in found if 3 * len(result["trace"]) >= most]


def _traces(results: Sequence[Result]) -> Figure:
    """Bound and test scores over training; thin lines are runs, thick ones their means."""
    rows, settings = grouped(results), settings_of(results)
    metrics = [m for m in (BOUND, LOG_LIKELIHOOD, RMSE, ERROR) if m.read(results[0]["trace"][-1]) is not None]
    figure = plotting.new_figure(3.6 * len(metrics) + 0.4, 2.8 * len(rows) + 0.5)
    panels = figure.subplots(len(rows), len(metrics), squeeze=False)
    for (key, own), row in zip(rows.items(), panels, strict=True):
        size = key[1]
        for panel, metric in zip(row, metrics, strict=True):
            for method in methods_of(own):
                style = {name: value for name, value in _style(method).items() if name != "marker"}
                runs = [result["trace"] for result in own if result["method"] == method]
                for trace in runs:
                    panel.plot(*_line(trace, metric), alpha=0.25, linewidth=0.8, **style)
                panel.plot(*_mean_line(runs, metric), label=label(method), **style)
            values = [v for r in own for v in _line(r["trace"], metric)[1]]
            _skip_start(panel, values, metric.sign)
            panel.set_xlabel("epoch" if "epoch" in own[0]["trace"][0] else "step")
            where = ", ".join(filter(None, (f"M = {size}" if size else "", settings[key])))
            panel.set_title(", ".join(filter(None, (_axis(metric), where))), fontsize=10.5)
    _legend(figure, panels.flatten())
    return figure


def _losses(results: Sequence[Result]) -> Figure:
    """The negative bound over training, as in the paper's figure; thin lines are seeds, thick ones their means."""
    figure, (panel,) = _panels(1, width=5.2, height=3.4)
    for method in methods_of(results):
        style = {name: value for name, value in _style(method).items() if name != "marker"}
        runs = [
            [{**point, "bound": -point["bound"]} for point in one["trace"]]
            for one in results
            if one["method"] == method
        ]
        for trace in runs:
            panel.plot(*_line(trace, BOUND), alpha=0.25, linewidth=0.8, **style)
        panel.plot(*_mean_line(runs, BOUND), label=label(method), **style)
    _skip_start(panel, [-point["bound"] for one in results for point in one["trace"]], -1)
    panel.set_xlabel("step")
    panel.set_ylabel("negative bound / N")
    panel.legend()
    return figure


def _line(trace: Sequence[Result], metric: Metric) -> tuple[list[float], list[float]]:
    where = "epoch" if "epoch" in trace[0] else "step"
    points = [(point[where], metric.read(point)) for point in trace]
    return [x for x, y in points if y is not None], [y for _, y in points if y is not None]


def _mean_line(runs: Sequence[Sequence[Result]], metric: Metric) -> tuple[list[float], list[float]]:
    values: dict[float, list[float]] = {}
    for trace in runs:
        for x, y in zip(*_line(trace, metric), strict=True):
            values.setdefault(x, []).append(y)
    complete = {x: ys for x, ys in sorted(values.items()) if len(ys) == len(runs)}
    return list(complete), [sum(ys) / len(ys) for ys in complete.values()]


def _skip_start(panel: Axes, values: Sequence[float], sign: int) -> None:
    """Leave the first, steep part of the curves out of the frame."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    margin = 0.15 * (high - low) or 0.1
    if sign > 0:
        panel.set_ylim(low - margin, ordered[-1] + margin)
    else:
        panel.set_ylim(ordered[0] - margin, high + margin)


def _snelson(results: Sequence[Result]) -> Figure:
    """Traces of the bounds, and the fits of the collapsed pair."""
    shown = [result for result in results if result["dataset"] == results[0]["dataset"]]
    shown = [result for result in shown if result["seed"] == shown[0]["seed"]]
    fits = [result for result in shown if result["method"] in ("sgpr", "t-sgpr")] or shown[:2]
    figure = plotting.new_figure(4.4 + 4.2 * len(fits), 3.4)
    axes = figure.subplots(1, 1 + len(fits), squeeze=False)[0]
    for method in methods_of(shown):
        trace = next(result["trace"] for result in shown if result["method"] == method)
        style = {name: value for name, value in _style(method).items() if name != "marker"}
        axes[0].plot(
            [point["step"] + 1 for point in trace], [point["bound"] for point in trace], label=label(method), **style
        )
    axes[0].set_xscale("log")
    _skip_start(axes[0], [point["bound"] for result in shown for point in result["trace"]], 1)
    axes[0].set_xlabel("iteration (SGPR: L-BFGS, SVGP: Adam)")
    axes[0].set_ylabel("bound / N")
    axes[0].legend(loc="lower right")
    for panel, result in zip(axes[1:], fits, strict=True):
        curve = result["curve"]
        panel.plot(curve["data_x"], curve["data_y"], ".", color=INK, markersize=3, alpha=0.6)
        color = _style(result["method"])["color"]
        plotting.fit_bands(panel, curve["x"], curve["mean"], curve["stddev"], result["noise"], color)
        low = panel.get_ylim()[0]
        panel.plot(
            curve["inducing"], [low] * len(curve["inducing"]), "^", color=GREY, clip_on=False, label="inducing inputs"
        )
        panel.set_ylim(low, None)
        panel.set_title(
            f"{label(result['method'])}: noise {result['noise']:.3f}, variance {result['outputscale']:.3f}",
            fontsize=10.5,
        )
        panel.set_xlabel("x")
    axes[1].legend(loc="lower right", fontsize=8.5)
    return figure


def _prediction(results: Sequence[Result]) -> Figure:
    """Seconds of a prediction against the number of training points."""
    figure, (panel,) = _panels(1, width=4.6, height=3.4)
    for method in methods_of(results):
        sizes = sorted({result["num_train"] for result in results if result["method"] == method})
        times = [
            mean(r["seconds"] for r in results if r["method"] == method and r["num_train"] == size) for size in sizes
        ]
        panel.plot(sizes, [time.value for time in times if time is not None], label=label(method), **_style(method))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("training points")
    panel.set_ylabel("seconds to predict the test set")
    panel.legend()
    return figure
