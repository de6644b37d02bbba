"""The tables of README and documentation, made anew from the published results."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import claims, demo, recipes, report, sections, speed_tables, time_to_quality
from .registry import PAPER
from .runs import read_results

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PUBLISHED = Path(__file__).resolve().parent / "results"

# The pair that the README shows of each experiment, and its data sets.
HEADLINE = {"uci": ("svgp", PAPER), "mnist": ("svgp", ("mnist",)), "gplvm": ("v-bgplvm", ("oil",))}

# The columns of the README's table of step times, as far as they were measured.
STEPS = {
    "gpytorch svgp": "GPyTorch SVGP",
    "t-svgp": "T-SVGP",
    "t-solve-gp": "T-SOLVE-GP",
    "t-svgp compiled": "T-SVGP compiled",
    "gpflow": "GPflow SVGP",
    "gpjax": "GPJax SVGP",
}

Block = Callable[[], str]


def published() -> list[report.Result]:
    """The results of the experiments that the repository holds."""
    return report.load([PUBLISHED])


def _lines(name: str) -> list[dict[str, Any]]:
    path = PUBLISHED / name / f"{name}.jsonl"
    return read_results(path) if path.exists() else []


def headline(results: list[report.Result]) -> str:
    """One row per data set, of the package's default scales: of its runs with the same settings those with most pairs, then
    most inducing points, then newest.
    """
    chosen: list[report.Result] = []
    for experiment, (base, datasets) in HEADLINE.items():
        shown = sections.comparable([one for one in results if one["experiment"] == experiment], experiment)
        for dataset in datasets:
            own = [one for one in shown if one["dataset"] == dataset and _has_default_scales(one)]
            found = []
            for key, group in report.grouped(own).items():
                matched = [pair for names, pair in report.pairs(group).items() if names[0] == base]
                runs = [run for pair in matched for both in pair for run in both]
                newest = max((str(run.get("finished")) for run in runs), default="")
                found.append((len(runs), key[1], newest, runs))
            chosen += max(found, key=lambda one: one[:3], default=(0, 0, "", []))[3]
    text = report.pairs_table(chosen, brief=True)
    return "" if text is None else f"{text}\n\n{report.CAPTION}"


def _has_default_scales(result: report.Result) -> bool:
    return report.setting(result, "conditional", "optimal") == "optimal"


def steps(lines: list[dict[str, Any]]) -> str:
    """Milliseconds of one training step, and the geometric mean of our share of GPyTorch's."""
    points = [line for line in lines if line["experiment"] == "speed"]
    times = {(line["num_inducing"], line["batch_size"]): dict(line["milliseconds"]) for line in points}
    for line in lines:
        if line["experiment"] == "speed peers":
            times.get((line["num_inducing"], line["batch_size"]), {})[line["method"]] = line["milliseconds"]
    names = [name for name in STEPS if any(name in at for at in times.values())]
    rows = [[f"{m}, {b}", *(f"{at[name]:.1f}" if name in at else "" for name in names)] for (m, b), at in times.items()]
    ratio = statistics.geometric_mean(at["t-svgp"] / at["gpytorch svgp"] for at in times.values())
    text = report.table(["M, B", *(STEPS[name] for name in names)], rows)
    threads = ", ".join(sorted({str(line["threads"]) for line in points}))
    return f"{text}\n\nGeometric mean of T-SVGP's share of GPyTorch's time: {ratio:.2f} ({threads} threads)."


def versions(lines: list[dict[str, Any]]) -> str:
    """What was tested with which versions."""
    header = ["Python", "torch", "gpytorch", "linear-operator", "numpy", "outcome"]
    rows = []
    for line in lines:
        found = [line["versions"][name] for name in header[1:5]]
        counts = ", ".join(f"{number} {word}" for word, number in line["counts"].items())
        lowest = " (the lowest versions allowed)" if line["which"] == "lowest" else ""
        rows.append([line["python"], *found, f"{counts}{lowest}"])
    return report.table(header, rows) if rows else ""


def recipe_differences(lines: list[dict[str, Any]]) -> str:
    """Whether the default recipe holds its own, with its heading."""
    if not lines:
        return ""
    words = (
        "## Recipes after the same time\n\n"
        "T-SVGP by the default recipe of `fit` for a number of epochs, and by others for as many steps as take the processor "
        "as long (`python -m benchmarks recipes`). Differences are the NLPD of the default less that of the other, over splits: "
        "negative is better. The default *holds its own* where it is at most "
        f"{recipes.SLACK}, or two standard errors, worse than every other. Paces were judged by short runs; the last column has "
        "what the others took in the end.\n\n"
    )
    return words + recipes.differences(lines)


def oil_picture(folder: Path) -> str:
    """The losses of the oil flow by the protocol of GPyTorch's example, if they were drawn."""
    path = folder / "figures" / "oil_example_losses.png"
    text = "![Losses on the oil flow by the protocol of GPyTorch's example](../benchmarks/results/figures/oil_example_losses.png)"
    return text if path.exists() else ""


BLOCKS: dict[str, Block] = {
    "demo": lambda: demo.table(_lines("demo")),
    "headline": lambda: headline(published()),
    "results": lambda: report.make_summary(published()),
    "commands": lambda: report.commands(published()),
    "steps": lambda: steps(_lines("speed")),
    "speed": lambda: speed_tables.table(_lines("speed")),
    "fit-speed": lambda: speed_tables.fit_table(_lines("speed")),
    "quality-picture": lambda: time_to_quality.headline(_lines("quality"), PUBLISHED / "quality"),
    "quality": lambda: time_to_quality.section(_lines("quality"), PUBLISHED / "quality"),
    "recipes": lambda: recipe_differences(_lines("recipes")),
    "oil-picture": lambda: oil_picture(PUBLISHED),
    "versions": lambda: versions(_lines("versions")),
    "claims": lambda: claims.table(published(), _lines("speed")),
}


def pages() -> list[Path]:
    """README and the pages of the documentation that have blocks."""
    found = [README, *sorted(DOCS.glob("*.md"))]
    return [page for page in found if ":begin -->" in page.read_text(encoding="utf-8")]


def updated(text: str) -> str:
    """A page with every block between ``<!-- name:begin -->`` and ``<!-- name:end -->`` made anew."""

    def anew(match: re.Match[str]) -> str:
        name = match[1]
        return "\n".join(filter(None, [f"<!-- {name}:begin -->", BLOCKS[name](), f"<!-- {name}:end -->"]))

    return re.sub(r"<!-- ([\w-]+):begin -->\n.*?<!-- \1:end -->", anew, text, flags=re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> None:
    """Draw the pictures of quality against time, and rewrite the pages."""
    lines = _lines("quality")
    drawn = time_to_quality.draw(lines, PUBLISHED / "quality") if lines else []
    for page in pages():
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {', '.join(str(path.relative_to(ROOT)) for path in [*drawn, *pages()])}")
