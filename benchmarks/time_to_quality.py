"""Quality against training time, from the lines of ``python -m benchmarks quality``: pictures, tables, a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plotting
from .report import label, setting, table

Line = dict[str, Any]

# Ours, in the order of the tables; every other method is a peer.
OURS = ("t-svgp", "t-solve-gp", "t-sgpr", "svgp", "solve-gp", "sgpr")
# The data set of the README's picture, and the peer of its sentence, if they are there.
HEADLINE, TUNED = "kin40k", "gpytorch tuned"

_PEERS = {
    "gpytorch tutorial": "GPyTorch SVGP, its tutorial's recipe",
    "gpytorch tuned": "GPyTorch SVGP, tuned",
    "gpytorch ngd": "GPyTorch SVGP, its natural gradients",
    "gpytorch large batch": "GPyTorch SVGP, its strategy for large batches",
    "gpflow ngd": "GPflow SVGP, natural gradients",
    "gpflow ngd float64": "GPflow SVGP, natural gradients, float64",
    "gpjax ngd": "GPJax SVGP, natural gradients",
}

_COLOURS = (plotting.VERMILION, plotting.ORANGE, plotting.PURPLE, plotting.GREEN)
_TONES = (plotting.BLUE, plotting.SKY, plotting.INK, plotting.GREY, "#8C6D31", "#5B8C5A", "#9E9AC8")

Runs = dict[str, list[Line]]  # by method, one per budget


def name_of(method: str) -> str:
    """A method in words."""
    return _PEERS.get(method, label(method))


def by_dataset(lines: Sequence[Line]) -> dict[str, Runs]:
    """The first split and seed of each data set, with the number of inducing points that most runs have."""
    found: dict[str, Runs] = {}
    for dataset in dict.fromkeys(line["dataset"] for line in lines):
        own = [line for line in lines if line["dataset"] == dataset and line.get("trace")]
        sizes = [line.get("num_inducing") for line in own]
        for line in own:
            place = _place(line)
            is_first = place == min(_place(other) for other in own if other["method"] == line["method"])
            if is_first and line.get("num_inducing") == max(dict.fromkeys(sizes), key=sizes.count):
                found.setdefault(dataset, {}).setdefault(line["method"], []).append(line)
    return found


def _place(line: Line) -> tuple[int, int]:
    return line.get("split") or 0, line.get("seed") or 0


def envelope(runs: Sequence[Line]) -> list[tuple[float, float]]:
    """Seconds and NLPD wherever a method is better than with any budget before."""
    best: list[tuple[float, float]] = []
    for seconds, nlpd in sorted((point[0], point[1]) for line in runs for point in line["trace"]):
        if not best or nlpd < best[-1][1]:
            best.append((seconds, nlpd))
    return best


def usual(methods: Runs) -> int | None:
    """The budget that most methods of ours have in common: none is chosen by what it scores."""
    budgets = [setting(line, "epochs") for method in OURS for line in methods.get(method, [])]
    return max(budgets, key=lambda epochs: (budgets.count(epochs), epochs or 0)) if budgets else None


def share(methods: Runs, method: str, peer: Line) -> float | None:
    """The fraction of a peer's time after which a method of ours, with the usual budget, has its final NLPD; None for never."""
    seconds, final = peer["trace"][-1][0], peer["trace"][-1][1]
    ours = [line for line in methods[method] if setting(line, "epochs") == usual(methods)]
    reached = [at for at, nlpd in envelope(ours) if nlpd <= final]
    return min(reached) / seconds if reached else None


def picture(methods: Runs, title: str) -> plotting.Figure:
    """Test NLPD against seconds of training, the best so far of each method; ours are thick."""
    with plotting.style():
        figure = plotting.new_figure(7.4, 4.4)
        axes = figure.subplots()
        ours = [method for method in OURS if method in methods]
        peers = [method for method in methods if method not in OURS]
        looks = dict(zip(ours, _COLOURS, strict=False))
        tones = dict(zip(peers, _TONES, strict=False))
        for method in [*peers, *ours]:
            points = envelope(methods[method])
            color = {**looks, **tones}.get(method, plotting.GREY)
            style = {"linewidth": 2.6} if method in ours else {"linewidth": 1.6, "linestyle": (0, (5, 1.5))}
            axes.plot(*zip(*points, strict=True), color=color, marker=".", label=name_of(method), **style)
        finals = [envelope(runs)[-1][1] for runs in methods.values()]
        spread = max(max(finals) - min(finals), 0.02)
        axes.set_ylim(min(finals) - 0.1 * spread, max(finals) + 1.5 * spread)
        axes.set_xscale("log")
        axes.set(xlabel="seconds of training", ylabel="test NLPD (lower is better)")
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize=9.5)
    return figure


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """One picture per data set."""
    drawn = []
    for dataset, methods in by_dataset(lines).items():
        drawn.append(folder / f"{dataset}.png")
        size = next(iter(methods.values()))[0].get("num_inducing")
        plotting.save(picture(methods, f"{dataset}, {size} inducing points"), drawn[-1])
    return drawn


def scores(methods: Runs) -> str:
    """Final scores, and in which fraction of each run's time ours have its final NLPD."""
    ours = [method for method in OURS if method in methods]
    rows = []
    for method in [*(name for name in methods if name not in OURS), *ours]:
        for line in methods[method]:
            seconds, nlpd, rmse = line["trace"][-1]
            shares = ["" if one == method else _shown(share(methods, one, line)) for one in ours]
            epochs = str(setting(line, "epochs") or "")
            rows.append([name_of(method), epochs, f"{seconds:.1f}", f"{nlpd:.4f}", f"{rmse:.4f}", *shares])
    columns = [f"{label(one)} ({usual(methods)} epochs) is there after" for one in ours]
    return table(["method", "epochs", "seconds", "NLPD", "RMSE", *columns], rows)


def _shown(fraction: float | None) -> str:
    return "never" if fraction is None else f"{fraction:.2f}"


def section(lines: Sequence[Line], folder: Path) -> str:
    """For the documentation: a table and a picture per data set."""
    parts = []
    for dataset, methods in by_dataset(lines).items():
        parts += [f"**{dataset}**", scores(methods)]
        if (folder / f"{dataset}.png").exists():
            parts.append(f"![Quality against time on {dataset}](../benchmarks/results/quality/{dataset}.png)")
    return "\n\n".join(parts)


def headline(lines: Sequence[Line], folder: Path) -> str:
    """For the README: the picture, and what it says in a sentence; nothing where there are no results."""
    methods = by_dataset(lines).get(HEADLINE, {})
    if "t-svgp" not in methods or not (folder / f"{HEADLINE}.png").exists():
        return ""
    text = f"![Test NLPD against training time on {HEADLINE}](benchmarks/results/quality/{HEADLINE}.png)"
    reached = share(methods, "t-svgp", methods[TUNED][-1]) if TUNED in methods else None
    if reached is not None:
        text += (
            f"\n\nOn {HEADLINE} (one split), T-SVGP trained by `fit` for {usual(methods)} epochs has the final NLPD of "
            f"GPyTorch's SVGP (Adam, tuned, {setting(methods[TUNED][-1], 'epochs')} epochs) after {reached:.2f} of its time."
        )
    return text
