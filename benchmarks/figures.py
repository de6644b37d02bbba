"""Pictures from the published result files, as PNG."""

from __future__ import annotations

import numpy as np

from . import plotting
from .scores import BOUND, LOG_LIKELIHOOD, PUBLISHED, Result, label, lines_of, mean, setting

NEAR = {"neighbours": plotting.INK, "gpboost vecchia": plotting.GREY}
OURS = {"t-svgp": plotting.VERMILION, "t-solve-gp": plotting.ORANGE, "t-sgpr": plotting.PURPLE, "svgp": plotting.GREEN}
_TONES = (plotting.BLUE, plotting.SKY, plotting.INK, plotting.GREY, "#8C6D31", "#5B8C5A", "#9E9AC8")


def draw_all() -> None:
    """Every picture."""
    with plotting.style():
        for dataset in ("kin40k", "protein"):
            quality(dataset)
        traces()
        neighbours()


def _envelope(runs: list[Result]) -> list[tuple[float, float]]:
    """Seconds and NLPD wherever a method is better than with any budget before."""
    best: list[tuple[float, float]] = []
    for seconds, nlpd in sorted((point[0], point[1]) for line in runs for point in line["trace"]):
        if not best or nlpd < best[-1][1]:
            best.append((seconds, nlpd))
    return best


def quality(dataset: str) -> None:
    """Test NLPD against seconds of training, the best so far of each method; ours are thick, what sees near rows lies below."""
    lines = [line for line in lines_of("quality") if line["dataset"] == dataset]
    methods = sorted({line["method"] for line in lines} - {*NEAR}, key=lambda name: (name in OURS, name))
    tones = iter(_TONES)
    figure = plotting.new_figure(7.6, 4.8)
    (axes, below), finals = figure.subplots(2, 1, sharex=True, height_ratios=(3.5, 1)), []
    for method, colour in NEAR.items():
        points = _envelope([line for line in lines if line["method"] == method])
        below.plot(*zip(*points, strict=True), marker="o", color=colour, linewidth=2.6, label=label(method))
    below.set(xlabel="seconds of training", ylabel="test NLPD")
    below.margins(y=0.4)
    for method in methods:
        points = _envelope([line for line in lines if line["method"] == method])
        finals.append(points[-1][1])
        look = (
            {"color": OURS[method], "linewidth": 2.6} if method in OURS else {"color": next(tones), "linestyle": "--"}
        )
        axes.plot(*zip(*points, strict=True), marker=".", label=label(method), **look)
    spread = max(max(finals) - min(finals), 0.02)
    axes.set_ylim(min(finals) - 0.1 * spread, max(finals) + 1.5 * spread)
    axes.set(ylabel="test NLPD (lower is better)", title=f"{dataset}, 256 inducing points")
    axes.set_xscale("log")
    figure.legend(loc="outside right upper", fontsize=9.5)
    plotting.save(figure, PUBLISHED / "quality" / f"{dataset}.png", dpi=100)


def traces(dataset: str = "kin40k", size: int = 256, epochs: int = 120) -> None:
    """Bound and test log-likelihood over training; means over splits."""
    lines = [
        line
        for line in lines_of("uci")
        if (line["dataset"], line["num_inducing"], setting(line, "epochs")) == (dataset, size, epochs)
    ]
    figure = plotting.new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    for axes, metric in zip(panels, (BOUND, LOG_LIKELIHOOD), strict=True):
        for method in ("svgp", "t-svgp"):
            runs = [line["trace"] for line in lines if line["method"] == method]
            at = [point["epoch"] for point in runs[0]]
            values = np.array([[metric.read(point) for point in run] for run in runs if len(run) == len(at)])
            axes.plot(at, values.mean(0), label=label(method), **plotting.method_style(label(method)))
            axes.fill_between(
                at, values.min(0), values.max(0), alpha=0.15, color=plotting.method_style(label(method))["color"]
            )
        axes.set(xlabel="epoch", title=f"{metric.title}, {dataset}, M = {size}")
    panels[0].legend()
    plotting.save(figure, PUBLISHED / "figures" / f"uci_traces_{dataset}.png", dpi=100)


def neighbours() -> None:
    """RMSE with neighbours and of boosted trees, as fractions of the usual one's."""
    lines = [line for line in lines_of("neighbours") if line["num_inducing"] == 256]
    datasets = list(dict.fromkeys(line["dataset"] for line in sorted(lines, key=lambda line: line["num_train"])))
    of = lambda method, dataset: mean(
        line["rmse"] for line in lines if (line["method"], line["dataset"]) == (method, dataset)
    )
    figure = plotting.new_figure(8, 3.2)
    axes = figure.subplots()
    for offset, method, color in ((-0.2, "neighbours", plotting.VERMILION), (0.2, "trees", plotting.GREY)):
        found = [(of(method, dataset), of("t-svgp", dataset)) for dataset in datasets]
        heights = [own.value / usual.value if own and usual else 0.0 for own, usual in found]
        axes.bar([i + offset for i in range(len(datasets))], heights, 0.38, color=color, label=label(method))
    axes.axhline(1, color=plotting.BLUE, label="T-SVGP, 256 inducing points")
    axes.set_xticks(range(len(datasets)), datasets, rotation=30, ha="right", fontsize=9.5)
    axes.set(ylabel="RMSE / T-SVGP's")
    figure.legend(loc="outside upper center", ncols=3)
    plotting.save(figure, PUBLISHED / "neighbours" / "neighbours.png", dpi=90)
