"""Tables and figures of README and documentation, made anew from the published result files by one command.

Nothing is trained. Every block between ``<!-- name:begin -->`` and ``<!-- name:end -->`` is one of :data:`BLOCKS`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import claims, recipes
from .scores import (
    BOUND,
    ERROR,
    LOG_LIKELIHOOD,
    RMSE,
    Metric,
    Result,
    Row,
    differences,
    grouped,
    label,
    lines_of,
    mean,
    pairs,
    rows_of,
    setting,
    table,
    tally,
    wins,
)

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
EXPERIMENTS = ("neighbours", "uci", "mnist", "gplvm", "oil_example", "prediction", "million", "quality", "recipes")
OURS = ("t-svgp", "neighbours", "t-solve-gp", "t-sgpr", "svgp")
HEADLINE = ("kin40k", "protein", "pol", "bike", "elevators", "keggdirected")
NEIGHBOURS = ("t-svgp", "neighbours", "trees", "exact")
# The columns of the table of step times, as far as they were measured.
STEPS = {
    "gpytorch svgp": "GPyTorch SVGP",
    "t-svgp": "T-SVGP",
    "t-solve-gp": "T-SOLVE-GP",
    "t-svgp compiled": "T-SVGP compiled",
    "gpflow": "GPflow SVGP",
    "gpjax": "GPJax SVGP",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the report."""
    parser.add_argument("--no-figures", action="store_true", help="tables only")


def run(args: argparse.Namespace) -> None:
    """Draw the figures and rewrite the pages."""
    if not args.no_figures:
        from .figures import draw_all

        draw_all()
    for page in pages():
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


def pages() -> list[Path]:
    """README and the pages of the documentation that have blocks."""
    found = [README, *sorted(DOCS.glob("*.md"))]
    return [page for page in found if ":begin -->" in page.read_text(encoding="utf-8")]


def updated(text: str) -> str:
    """A page with every block made anew."""
    anew = lambda match: f"<!-- {match[1]}:begin -->\n{BLOCKS[match[1]]()}\n<!-- {match[1]}:end -->"
    return re.sub(r"<!-- ([\w-]+):begin -->\n.*?<!-- \1:end -->", anew, text, flags=re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------------
# Tighter against base
# ---------------------------------------------------------------------------------------------------------------------


def pairs_table(rows: Sequence[Row], lines: Sequence[Result] = ()) -> str:
    """Differences tighter - base.

    :param lines: All lines, if a column is to say what another budget gives.
    """
    metrics = [m for m in (BOUND, LOG_LIKELIHOOD, RMSE, ERROR) if any(m.read(row[2][0][1]) is not None for row in rows)]
    totals = {metric.title: Counter[str]() for metric in metrics}
    shown = []
    for (dataset, size, *own), (base, tighter), matched in rows:
        cells = []
        for metric in metrics:
            values = list(differences(matched, metric))
            totals[metric.title] += tally(values, metric)
            found = mean(values)
            cells.append((found and f"{found.show(metric.digits, signed=True)} ({wins(tally(values, metric))})") or "")
        other = [_other_budget(lines, matched)] if lines else []
        name = f"{label(tighter)} − {label(base)}" + (f" ({', '.join(own)})" if own else "")
        shown.append([dataset, str(size), name, *cells, *other])
    is_single = len({row[2] for row in shown}) == 1
    if len(shown) > 1:
        shown.append(
            ["all", "", "", *(f"({wins(totals[metric.title])})" for metric in metrics), *([""] if lines else [])]
        )
    changes = [f"Δ {metric.title}" for metric in metrics]
    header = ["data", "M", "pair", *changes, *(["Δ bound, two budgets"] if lines else [])]
    kept = [i for i in range(len(header)) if i != 2 or not is_single]
    return table([header[i] for i in kept], [[row[i] for i in kept] for row in shown])


def _other_budget(lines: Sequence[Result], matched: Sequence[tuple[Result, Result]]) -> str:
    """The difference of bounds with twice or half the epochs, on the splits that have both."""
    base, one = matched[0]
    epochs, place = setting(one, "epochs"), lambda run: (run["split"], run["seed"])
    for budget in (2 * epochs, epochs // 2):
        same = lambda run, m=budget: (
            run["dataset"] == one["dataset"]
            and run.get("num_inducing") == one.get("num_inducing")
            and run["config"] | {"epochs": epochs} in (one["config"], base["config"])
            and setting(run, "epochs") == m
        )
        other = pairs([line for line in lines if same(line)]).get((base["method"], one["method"]), [])
        common = {place(run) for _, run in other} & {place(run) for _, run in matched}
        values = [
            mean(differences([pair for pair in found if place(pair[1]) in common], BOUND)) for found in (matched, other)
        ]
        if values[0] is not None and values[1] is not None:
            return f"{values[0].value:+.4f}@{epochs}, {values[1].value:+.4f}@{budget}"
    return "not tried"


def compared(name: str, *settings: str) -> str:
    """The pairs of an experiment."""
    return pairs_table(rows_of(lines_of(name), *settings))


def regression() -> str:
    """T-SVGP row by row, and T-SOLVE-GP in a sentence."""
    lines = lines_of("uci")
    rows = {base: [row for row in rows_of(lines) if row[1][0] == base] for base in ("svgp", "solve-gp")}
    told = []
    for metric in (BOUND, LOG_LIKELIHOOD, RMSE):
        values = [value for _, _, matched in rows["solve-gp"] for value in differences(matched, metric)]
        told.append(f"{metric.title} {wins(tally(values, metric))}")
    return f"{pairs_table(rows['svgp'], lines)}\n\nT-SOLVE-GP − SOLVE-GP on the same sets: {', '.join(told)}."


def mnist() -> str:
    """T-SVGP on images, by who chooses the scales."""
    return pairs_table([row for row in rows_of(lines_of("mnist"), "conditional") if row[1][0] == "svgp"])


def headline() -> str:
    """What comes of a tighter bound and of neighbours, a line per data set."""
    rows, near, quality_lines = [], lines_of("neighbours"), lines_of("quality")
    pairs_of = {
        own[0]: matched for own, (base, _), matched in rows_of(lines_of("uci")) if (own[1], base) == (256, "svgp")
    }
    for dataset in HEADLINE:
        gain = mean(differences(pairs_of[dataset], BOUND))
        cells = [cell(near, dataset, 256, name, digits, NEIGHBOURS[:3]) for name, digits in (("nlpd", 2), ("rmse", 3))]
        same = [line for line in quality_lines if line["dataset"] == dataset]
        tuned = [line for line in same if line["method"] == "gpytorch tuned"]
        rows.append(
            [dataset, gain.show(3, signed=True) if gain else "", *cells, *(f"{share(same, t):.2f}" for t in tuned)]
        )
        rows[-1] += [""] * (5 - len(rows[-1]))
    header = ["data", "bound per point over SVGP's", "test NLPD", "RMSE", "time to GPyTorch's NLPD"]
    return f"{table(header, rows)}\n\nNLPD and RMSE: T-SVGP/with neighbours/boosted trees, M = 256, means over five splits."


# ---------------------------------------------------------------------------------------------------------------------
# Experiments with tables of their own
# ---------------------------------------------------------------------------------------------------------------------


def means(lines: Sequence[Result], metrics: Sequence[Metric], *settings: str) -> str:
    """Means over splits and seeds, one row per method."""
    rows = []
    for group in grouped(lines, *settings).values():
        for method in dict.fromkeys(line["method"] for line in group):
            own = [line for line in group if line["method"] == method]
            found = [(metric, mean(map(metric.read, own))) for metric in metrics]
            cells = [one.show(metric.digits) if one else "" for metric, one in found]
            told = [str(setting(own[0], name) or "") for name in settings]
            rows.append([label(method), *told, *cells])
    return table(["method", *settings, *(metric.title for metric in metrics)], rows)


def by_split(lines: Sequence[Result], dataset: str, size: int, method: str) -> dict[int, Result]:
    """The runs of one method on one data set."""
    wanted = dataset, size, method
    return {one["split"]: one for one in lines if (one["dataset"], one["num_inducing"], one["method"]) == wanted}


def cell(
    lines: Sequence[Result], dataset: str, size: int, name: str, digits: int, methods: Sequence[str] = NEIGHBOURS
) -> str:
    """Means over splits of some methods, side by side."""
    found = [mean(run[name] for run in by_split(lines, dataset, size, method).values()) for method in methods]
    return "/".join(f"{one.value:.{digits}f}" if one else "" for one in found).rstrip("/")


def neighbours() -> str:
    """RMSE, NLPD and coverage side by side, and how often neighbours are better than without."""
    lines, rows, sizes = lines_of("neighbours"), [], (256, 512)
    totals: dict[tuple[int, str], Counter[str]] = {}
    largest = {line["dataset"]: line["num_train"] for line in lines}
    for dataset in sorted(largest, key=lambda name: largest[name]):
        row = [dataset, str(largest[dataset])]
        for size in sizes:
            usual, near = (by_split(lines, dataset, size, method) for method in NEIGHBOURS[:2])
            for metric, name, digits in ((RMSE, "rmse", 3), (LOG_LIKELIHOOD, "nlpd", 2)):
                counts = tally(differences([(usual[split], run) for split, run in near.items()], metric), metric)
                totals.setdefault((size, name), Counter()).update(counts)
                found = cell(lines, dataset, size, name, digits)
                row.append(f"{found} ({wins(counts)})" if found else "")
        row[4:4] = [cell(lines, dataset, 256, "coverage", 2), cell(lines, dataset, 256, "processor_seconds", 1)]
        rows.append(row)
    every = [f"({wins(counts)})" for counts in totals.values()]
    rows.append(["all", "", *every[:2], "", "", *every[2:]])
    header = ["data", "N", "RMSE", "NLPD", "coverage of 95 %", "seconds", "RMSE, M = 512", "NLPD, M = 512"]
    note = (
        "In each cell: T-SVGP/with neighbours/boosted trees/exact GP, means over five splits, M = 256 where nothing is said, and "
        "on how many splits neighbours win/tie/lose."
    )
    return f"{table(header, rows)}\n\n{note}"


def million() -> str:
    """Scores, speed and memory, method by method."""
    metrics = (
        RMSE,
        LOG_LIKELIHOOD,
        BOUND,
        Metric("rows per second", "rows_per_second", 1, 1.0, 0),
        Metric("predictions per second", "predictions_per_second", 1, 1.0, 0),
        Metric("peak memory, MB", "peak_memory_mb", -1, 1.0, 0),
    )
    return means(lines_of("million"), metrics, "processes")


def share(lines: Sequence[Result], peer: Result) -> float | None:
    """The fraction of a peer's time after which T-SVGP, with one of its budgets, has the peer's final NLPD; None for never."""
    seconds, final = peer["trace"][-1][:2]
    ours = [line for line in lines if line["method"] == "t-svgp"]
    reached = [at for line in ours for at, nlpd, _ in line["trace"] if nlpd <= final]
    return min(reached) / seconds if reached else None


def quality() -> str:
    """Final scores, and in which fraction of each run's time T-SVGP has its final NLPD."""
    lines, datasets = lines_of("quality"), ("kin40k", "protein")
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for line in sorted(lines, key=lambda line: line["method"] in OURS):
        (seconds, nlpd, _), same = line["trace"][-1], [one for one in lines if one["dataset"] == line["dataset"]]
        part = share(same, line)
        told = "" if line["method"] == "t-svgp" else "never" if part is None else f"{part:.2f}"
        epochs = "" if line["method"].startswith("gpboost") else str(setting(line, "epochs"))
        own = cells.setdefault((label(line["method"]), epochs), {})
        own[line["dataset"]] = [f"{seconds:.1f}", f"{nlpd:.3f}", told]
    rows = [
        [name, epochs, *(cell for one in datasets for cell in own.get(one, [""] * 3))]
        for (name, epochs), own in cells.items()
    ]
    header = [f"{dataset}: {word}" for dataset in datasets for word in ("seconds", "NLPD", "T-SVGP after")]
    return table(["method", "epochs", *header], rows)


def quality_picture() -> str:
    """For the README: the picture, and what it says in a sentence."""
    lines = [line for line in lines_of("quality") if line["dataset"] == "kin40k"]
    tuned = next(line for line in lines if line["method"] == "gpytorch tuned")
    return (
        "![Test NLPD against training time on kin40k](benchmarks/results/quality/kin40k.png)\n\nOn kin40k (one split), T-SVGP "
        "trained by `fit` has the final NLPD of GPyTorch's SVGP (Adam, tuned, "
        f"{setting(tuned, 'epochs')} epochs) after {share(lines, tuned):.2f} of its time."
    )


def steps() -> str:
    """Milliseconds of one step in a loop of one's own, and our share of GPyTorch's time."""
    lines = lines_of("speed")
    times = {
        (line["num_inducing"], line["batch_size"]): dict(line["milliseconds"])
        for line in lines
        if line["experiment"] == "speed"
    }
    for line in lines:
        if line["experiment"] == "speed peers":
            times[line["num_inducing"], line["batch_size"]][line["method"]] = line["milliseconds"]
    names = [name for name in STEPS if any(name in at for at in times.values())]
    rows = [[f"{m}, {b}", *(f"{at[name]:.1f}" if name in at else "" for name in names)] for (m, b), at in times.items()]
    text = table(["M, B", *(STEPS[name] for name in names)], rows)
    ratio = statistics.geometric_mean(at["t-svgp"] / at["gpytorch svgp"] for at in times.values())
    threads = lines_of("speed")[0]["threads"]
    return f"{text}\n\nGeometric mean of T-SVGP's share of GPyTorch's time: {ratio:.2f} ({threads} threads)."


def versions() -> str:
    """What was tested with which versions."""
    header = ["Python", "torch", "gpytorch", "linear-operator", "numpy"]
    rows = [
        [
            line["python"],
            *(line["versions"][name] for name in header[1:]),
            ", ".join(f"{number} {word}" for word, number in line["counts"].items()),
        ]
        for line in lines_of("versions")
    ]
    return table([*header, "outcome"], rows)


def provenance() -> str:
    """Commits and versions of the lines, experiment by experiment."""
    rows = []
    for name in (*EXPERIMENTS, "blocks", "snelson", "speed"):
        lines = [line.get("environment", line) for line in lines_of(name)]
        told = [
            ",".join(sorted({str(read(line)) for line in lines}))
            for read in (
                lambda line: str(line["commit"])[:7],
                lambda line: line["versions"]["tighter_gp"],
                lambda line: line["threads"],
            )
        ]
        if lines:
            rows.append([name, *told])
    return table(["experiment", "commit", "version", "threads"], rows)


BLOCKS = {
    "headline": headline,
    "regression": regression,
    "mnist": mnist,
    "gplvm": lambda: compared("gplvm"),
    "million": million,
    "neighbours": neighbours,
    "steps": steps,
    "quality-picture": quality_picture,
    "quality": quality,
    "recipes": lambda: recipes.differences(lines_of("recipes")),
    "claims": claims.table_of_claims,
    "versions": versions,
    "provenance": provenance,
}
