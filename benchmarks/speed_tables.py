"""Tables and the figure of ``python -m benchmarks speed``, from its lines."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .plotting import new_figure, save, style


def sentence(line: dict[str, Any]) -> str:
    """A measurement other than a step, in words."""
    if line["experiment"] == "speed scaling":
        return (
            f"Over {line['axis'].replace('_', ' ')} {', '.join(map(str, line['sizes']))}, a T-SVGP step's time grows with "
            f"exponent {line['exponent']:.2f} and its memory with {line['memory_exponent']:.2f}."
        )
    if line["experiment"] == "speed prediction":
        return (
            f"Predicting {line['num_points']:,} points at M={line['num_inducing']}: {line['seconds']:.0f} s, "
            f"{line['extra_memory_mb']:.0f} MB extra, {line['share_of_gemm']:.2f} of the machine's GEMM rate in solve and "
            f"products, {line['share_of_gemm_whole']:.2f} in all."
        )
    return (
        f"Collapsed bound and gradient of {line['num_data']:,} rows at M={line['num_inducing']}: {line['seconds']:.0f} s, "
        f"{line['extra_memory_mb']:.0f} MB extra."
    )


def row(line: dict[str, Any]) -> str:
    """The steps of one grid point, in words."""
    times = ", ".join(f"{method} {ms:.2f}" for method, ms in line["milliseconds"].items())
    return f"({line['num_inducing']}, {line['batch_size']}): {times} ms"


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: medians, the ratio to GPyTorch, and geometric means."""
    points = [line for line in lines if line["experiment"] == "speed"]
    apart = ("speed", "speed peers", "speed fit", "speed compiling")
    others = [f"- {sentence(line)}" for line in lines if line["experiment"] not in apart]
    if not points:
        return "\n".join(others)
    methods = list(points[0]["milliseconds"])
    peers: dict[tuple[int, int], dict[str, float]] = {}
    for line in lines:
        if line["experiment"] == "speed peers":
            peers.setdefault((line["num_inducing"], line["batch_size"]), {})[line["method"]] = line["milliseconds"]
    names = [*methods, *sorted({name for at in peers.values() for name in at})]
    rows = [f"| M, B | {' | '.join(names)} | t-svgp / gpytorch |", f"|{'---|' * (len(names) + 2)}"]
    for line in points:
        at = (line["num_inducing"], line["batch_size"])
        times = {**line["milliseconds"], **peers.get(at, {})}
        cells = " | ".join(f"{times[name]:.1f}" if name in times else "" for name in names)
        rows.append(f"| {at[0]}, {at[1]} | {cells} | {times['t-svgp'] / times['gpytorch svgp']:.2f} |")
    summary = []
    for method in methods[1:]:
        ratios = [line["milliseconds"][method] / line["milliseconds"]["gpytorch svgp"] for line in points]
        summary.append(f"{method} {statistics.geometric_mean(ratios):.2f}")
    rows += ["", f"Geometric mean of the ratio to GPyTorch's SVGP: {'; '.join(summary)}."]
    rows += ["", *others] if others else []
    return "\n".join(rows)


def fit_table(lines: list[dict[str, Any]]) -> str:
    """Markdown: steps of ``fit``, what natural gradients add to Adam, and what compiling takes."""
    points = [line for line in lines if line["experiment"] == "speed fit"]
    if not points:
        return ""
    ways = list(points[0]["milliseconds"])
    rows = [f"| M, B | {' | '.join(ways)} | natural / adam |", f"|{'---|' * (len(ways) + 2)}"]
    ratios = [line["milliseconds"]["natural"] / line["milliseconds"]["adam"] for line in points]
    for line, ratio in zip(points, ratios, strict=True):
        cells = " | ".join(f"{line['milliseconds'][way]:.1f}" for way in ways)
        rows.append(f"| {line['num_inducing']}, {line['batch_size']} | {cells} | {ratio:.2f} |")
    rows += ["", f"Geometric mean of natural / adam: {statistics.geometric_mean(ratios):.2f}."]
    for line in lines:
        if line["experiment"] == "speed compiling":
            seconds = line["seconds"]
            rows[-1] += (
                f" The first step at {line['num_inducing']}, {line['batch_size']} takes {seconds['eager']:.1f} s eager, "
                f"{seconds['cold']:.1f} s compiled, and {seconds['warm']:.1f} s compiled in a later process."
            )
    return "\n".join(rows)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Step times over the grid, and scaling."""
    points = [line for line in lines if line["experiment"] == "speed"]
    with style():
        figure = new_figure(11, 4.2)
        left, right = figure.subplots(1, 2)
        labels = [f"{line['num_inducing']}\n{line['batch_size']}" for line in points]
        methods = [m for m in points[0]["milliseconds"] if m != "svgp"] if points else []
        width = 0.8 / max(1, len(methods))
        for i, method in enumerate(methods):
            ratios = [line["milliseconds"][method] / line["milliseconds"]["gpytorch svgp"] for line in points]
            left.bar([j + i * width for j in range(len(points))], ratios, width=width, label=method)
        left.set_xticks([j + 0.4 - width / 2 for j in range(len(points))], labels)
        left.set(xlabel="M, B", ylabel="step time / GPyTorch SVGP", title="One training step", ylim=(0, 1.5))
        if points:
            left.legend(fontsize=9, ncols=2, loc="upper left")
        for line in lines:
            if line["experiment"] == "speed scaling":
                label = f"{line['axis'].replace('_', ' ')}: exponent {line['exponent']:.2f}"
                right.loglog(line["sizes"], line["milliseconds"], marker="o", label=label)
        right.set(xlabel="size", ylabel="ms per step", title="T-SVGP as one size grows")
        if right.lines:
            right.legend(fontsize=9)
        save(figure, path)
