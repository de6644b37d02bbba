"""Tables and figures from result files: means, paired differences with standard errors, wins, ties and losses.

Every number is read from the files; nothing is trained. A pair is a tighter method and its base with the same data,
split, seed, inducing points and budget.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError
from .options import writable_folder
from .runs import identity, read_results

Result = dict[str, Any]

# A difference smaller than this, in nats per datum or in units of the target's standard deviation, is a tie.
TIE = 0.002
# Flags, and what tells them apart: the log density per point that mean and variance of standardised targets give, and nats.
LEARNT_THE_MEAN, RMSE_OF_THE_MEAN = "learnt the mean", "RMSE of the mean"
BOUND_OF_THE_MEAN, WORTH_LEARNING = -0.5 * (math.log(2 * math.pi) + 1), 0.01

CAPTION = (
    "Mean ± standard error of tighter − base over splits and seeds, and (wins/ties/losses), a tie being less than "
    f"{TIE}, for errors {100 * TIE} percentage points. "
    "*Least gap*: the smallest tighter bound − standard bound at a run's own parameters."
)


class Metric(NamedTuple):
    """A column.

    :param title: Its heading.
    :param read: Its value in a result; None if there is none.
    :param sign: 1 if more is better, -1 if less is, 0 if neither.
    :param digits: Decimals.
    :param tie: A smaller difference is a tie.
    """

    title: str
    read: Callable[[Result], float | None]
    sign: int
    digits: int = 4
    tie: float = TIE


def field(name: str, factor: float = 1.0) -> Callable[[Result], float | None]:
    """Reads a number of a result."""
    return lambda result: None if result.get(name) is None else factor * float(result[name])


def _is_timed(result: Result) -> bool:
    """Whether the seconds of a run mean anything: long ones share the machine, unless the line says that they did not."""
    return result.get("experiment") not in ("uci", "mnist") or bool(result.get("quiet_machine"))


BOUND = Metric("bound / N", field("bound"), 1)
LOG_LIKELIHOOD = Metric("test log-lik.", field("nlpd", -1.0), 1)
RMSE = Metric("RMSE", field("rmse"), -1)
ERROR = Metric("error %", field("error", 100.0), -1, 2, 100 * TIE)
NOISE = Metric("noise", field("noise"), 0)
SECONDS = Metric("seconds", lambda result: field("seconds")(result) if _is_timed(result) else None, 0, 1)
STEP = Metric("ms per step", field("milliseconds"), 0, 2)
METRICS = (BOUND, LOG_LIKELIHOOD, RMSE, ERROR, NOISE, SECONDS, STEP)

LABELS = {
    "sgpr": "SGPR",
    "t-sgpr": "T-SGPR",
    "svgp": "SVGP",
    "t-svgp": "T-SVGP",
    "solve-gp": "SOLVE-GP",
    "t-solve-gp": "T-SOLVE-GP",
    "drop": "without last term",
    "exact": "with last term",
    "linear": "linear model",
    "trees": "boosted trees",
    "v-bgplvm": "V-BGPLVM",
    "tv-bgplvm": "TV-BGPLVM",
}
# Experiments that make tables and figures of their own.
OTHERS = ("demo", "quality", "recipes", "speed", "versions")
TITLES = {
    "snelson": "One-dimensional regression",
    "prediction": "Last term of the predictive variance",
    "uci": "Regression",
    "million": "Three million flights",
    "mnist": "Classification of digits",
    "gplvm": "Bayesian GPLVM",
    "oil_example": "Bayesian GPLVM by the protocol of GPyTorch's example",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the report."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[Path("results")],
        help="result files, or folders of them (default: results)",
    )
    parser.add_argument("--out", type=Path, help="folder for report.md and figures/ (default: that of the first path)")
    parser.add_argument("--no-figures", action="store_true", help="tables only")


def run(args: argparse.Namespace) -> None:
    """Read the files, print the tables, write them and the figures."""
    results = load(args.paths)
    first = args.paths[0]
    out = writable_folder(args.out or (first if first.is_dir() else first.parent))
    figures = []
    if not args.no_figures:
        from .figures import draw_all

        figures = draw_all(results, writable_folder(out / "figures"))
    text = make_report(results, figures)
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)


def load(paths: Sequence[Path]) -> list[Result]:
    """All results of some files and folders; of two with the same run, the later one."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; run an experiment first, or name its result files.")
        found = sorted(file for file in path.rglob("*.jsonl") if "smoke" not in file.relative_to(path).parts[:-1])
        files += found if path.is_dir() else [path]
    results = {
        identity(result): result
        for file in files
        for result in read_results(file)
        if str(result.get("experiment")).partition(" ")[0] not in OTHERS
    }
    if not results:
        raise UserError(f"there are no results in {', '.join(map(str, paths))}.")
    for result in results.values():
        for name in ("experiment", "dataset", "method"):
            if not isinstance(result.get(name), str):
                raise UserError(f"a result has no {name}; these are not result files of python -m benchmarks.")
    return list(results.values())


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean and its standard error, which one value alone does not have."""

    value: float
    error: float | None
    count: int

    def show(self, digits: int, signed: bool = False) -> str:
        """As text."""
        text = f"{self.value:{'+' if signed else ''}.{digits}f}"
        return text if self.error is None else f"{text} ± {self.error:.{digits}f}"


def mean(values: Iterable[float | None]) -> Mean | None:
    """Mean of those values that there are."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    average = math.fsum(found) / len(found)
    if len(found) == 1:
        return Mean(average, None, 1)
    variance = math.fsum((value - average) ** 2 for value in found) / (len(found) - 1)
    return Mean(average, math.sqrt(variance / len(found)), len(found))


def show_means(metrics: Iterable[Metric], results: Sequence[Result]) -> list[str]:
    """The mean of each metric as text; empty where no result has it."""
    found = ((metric, mean(map(metric.read, results))) for metric in metrics)
    return ["" if cell is None else cell.show(metric.digits) for metric, cell in found]


def setting(result: Result, name: str, default: Any = None) -> Any:
    """What a run was made with, where its line says so."""
    return (result.get("config") or {}).get(name, default)


def base_of(method: str, methods: Iterable[str]) -> str | None:
    """The base of a tighter method among the others: ``t-svgp`` has ``svgp``, ``tv-bgplvm`` has ``v-bgplvm``."""
    base = method[1:].lstrip("-") if method.startswith("t") else None
    return base if base in set(methods) else None


def pairs(results: Sequence[Result]) -> dict[tuple[str, str], list[tuple[Result, Result]]]:
    """Results of a base and its tighter method that differ in the method alone."""
    by_run = {identity(result): result for result in results}
    methods = {result["method"] for result in results}
    found: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for result in results:
        base = base_of(result["method"], methods)
        if base is None:
            continue
        partner = by_run.get(identity({**result, "method": base}))
        if partner is not None:
            found.setdefault((base, result["method"]), []).append((partner, result))
    return found


def tally(differences: Iterable[float], metric: Metric) -> Counter[str]:
    """Wins, ties and losses of differences tighter - base."""
    counts: Counter[str] = Counter()
    for difference in differences:
        better = metric.sign * difference
        counts["win" if better >= metric.tie else "loss" if better <= -metric.tie else "tie"] += 1
    return counts


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; words to the left, numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    words = [any(line[column][:1].isalpha() for line in lines[1:]) for column in range(len(header))]

    def show(line: list[str]) -> str:
        padded = [
            cell.ljust(width) if is_word else cell.rjust(width)
            for cell, width, is_word in zip(line, widths, words, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + ("-" if is_word else ":") for width, is_word in zip(widths, words, strict=True))
    return "\n".join([show(lines[0]), f"|{rule}|", *map(show, lines[1:])])


def label(method: str) -> str:
    """Name of a method in tables and figures."""
    return LABELS.get(method, method)


def group_key(result: Result) -> tuple[str, int, str]:
    """Results that may be averaged: same data, inducing points and settings."""
    return result["dataset"], result.get("num_inducing") or 0, json.dumps(result.get("config"), sort_keys=True)


def grouped(results: Sequence[Result]) -> dict[tuple[str, int, str], list[Result]]:
    """By :func:`group_key`, in the order of data and inducing points."""
    groups: dict[tuple[str, int, str], list[Result]] = {}
    for result in results:
        groups.setdefault(group_key(result), []).append(result)
    first = {name: i for i, name in reversed(list(enumerate(result["dataset"] for result in results)))}
    return dict(sorted(groups.items(), key=lambda item: (first[item[0][0]], item[0][1], item[0][2])))


def settings_of(results: Sequence[Result]) -> dict[tuple[str, int, str], str]:
    """What tells a group from others with the same data, inducing points and some method; empty where there are none."""
    groups = grouped(results)
    methods = {key: {result["method"] for result in group} for key, group in groups.items()}
    configs = {key: json.loads(key[2]) or {} for key in groups}
    found = {}
    for key, own in configs.items():
        rivals = [configs[other] for other in groups if other[:2] == key[:2] and methods[other] & methods[key]]
        differing = [name for name in own if any(rival.get(name) != own[name] for rival in rivals)]
        found[key] = ", ".join(f"{name} {own[name]}" for name in differing)
    return found


def methods_of(results: Iterable[Result]) -> list[str]:
    """Methods in the order in which they are known, then in which they came."""
    found = list(dict.fromkeys(result["method"] for result in results))
    known = list(LABELS)
    return sorted(found, key=lambda method: known.index(method) if method in known else len(known))


def means_table(results: Sequence[Result]) -> str:
    """Means over splits and seeds, with standard errors."""
    metrics = [metric for metric in METRICS if any(metric.read(result) is not None for result in results)]
    rows, settings = [], settings_of(results)
    for key, group in grouped(results).items():
        for method in methods_of(group):
            own = [result for result in group if result["method"] == method]
            shown, epochs = show_means(metrics, own), str(setting(own[0], "epochs", ""))
            first = [key[0], str(key[1] or ""), label(method), epochs, str(len(own))]
            rows.append([*first, *shown, settings[key], flags_of(own)])
    header = ["data", "M", "method", "epochs", "runs", *(metric.title for metric in metrics), "settings", "flags"]
    return table(*without_empty(header, rows))


def flags_of_scores(rmse: float, test_std: float) -> list[str]:
    """What a run is flagged with that predicts no better than the mean of the targets."""
    return [LEARNT_THE_MEAN] if rmse >= 0.98 * test_std else []


def flags(result: Result) -> list[str]:
    """What a run was flagged with.

    One whose RMSE is the mean's has learnt more if its bound on the training rows is above that of the mean: its test rows do
    not show it.
    """
    found: list[str] = result.get("flags", [])
    if result.get("bound") is None or result["bound"] < BOUND_OF_THE_MEAN + WORTH_LEARNING:
        return found
    return [RMSE_OF_THE_MEAN if flag == LEARNT_THE_MEAN else flag for flag in found]


def flags_of(results: Sequence[Result]) -> str:
    """What the runs were flagged with, and how many."""
    counts = Counter(flag for result in results for flag in flags(result))
    return ", ".join(f"{flag} ({count} of {len(results)})" for flag, count in sorted(counts.items()))


def without_empty(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns that not every table has and that nothing stands in."""
    optional = ("epochs", "converged", "of the mean alone", "settings", "flags")
    kept = [i for i, name in enumerate(header) if name not in optional or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def pairs_table(
    results: Sequence[Result],
    brief: bool = False,
    converged: Callable[[Result, tuple[str, str]], str] | None = None,
) -> str | None:
    """Differences tighter - base: mean, standard error, and wins / ties / losses; None if there are no pairs.

    :param brief: Without caption and list of losses.
    :param converged: Says of a row, given a result of it and its pair, whether it is converged.
    """
    metrics = [m for m in (BOUND, LOG_LIKELIHOOD, RMSE, ERROR) if any(m.read(result) is not None for result in results)]
    totals: dict[str, Counter[str]] = {metric.title: Counter() for metric in metrics}
    rows, losses, settings = [], [], settings_of(results)
    for key, group in grouped(results).items():
        dataset, num_inducing, _ = key
        for (base, tighter), matched in pairs(group).items():
            cells = []
            for metric in metrics:
                differences = []
                for first, second in matched:
                    before, after = metric.read(first), metric.read(second)
                    if before is None or after is None:
                        continue
                    differences.append(after - before)
                    if metric.sign * differences[-1] <= -metric.tie:
                        where = f"{dataset}, M={num_inducing}, split {second.get('split')}, seed {second.get('seed')}"
                        losses.append(
                            f"- {where}, {label(tighter)}: {metric.title} {before:.{metric.digits}f} → "
                            f"{after:.{metric.digits}f}"
                        )
                counts = tally(differences, metric)
                totals[metric.title] += counts
                average = mean(differences)
                cells.append("" if average is None else f"{average.show(metric.digits, signed=True)} ({_wins(counts)})")
            own = [gap(result) for pair in matched for result in pair]
            gaps = [gap for gap in own if gap is not None]
            cells.append(f"{min(gaps):+.4f}" if gaps else "")
            pair = f"{label(tighter)} − {label(base)}"
            verdict = "" if converged is None else converged(matched[0][1], (base, tighter))
            rows.append([dataset, str(num_inducing or ""), pair, str(len(matched)), *cells, verdict, settings[key]])
    if not rows:
        return None
    if len(rows) > 1:
        rows.append(["all", "", "", "", *(f"({_wins(totals[metric.title])})" for metric in metrics), "", "", ""])
    changes = [f"Δ {metric.title}" for metric in metrics]
    header = ["data", "M", "pair", "pairs", *changes, "least gap", "converged", "settings"]
    text = table(*without_empty(header, rows))
    if brief:
        return text
    text += f"\n\n{CAPTION}"
    if losses:
        text += "\n\nLosses:\n\n" + "\n".join(losses)
    return text


def _wins(counts: Counter[str]) -> str:
    return f"{counts['win']}/{counts['tie']}/{counts['loss']}"


def gap(result: Result) -> float | None:
    """The tighter bound less the standard one at a result's own parameters."""
    tighter, base = result.get("bound_tighter"), result.get("bound_base")
    return None if tighter is None or base is None else tighter - base


def make_report(results: Sequence[Result], figures: Sequence[Path] = ()) -> str:
    """The whole report in Markdown."""
    from .sections import means_of, pairs_of

    order = [*TITLES, *dict.fromkeys(result["experiment"] for result in results)]
    parts = ["# Results", _provenance(results)]
    for experiment in dict.fromkeys(order):
        own = [result for result in results if result["experiment"] == experiment]
        if not own:
            continue
        parts += [f"## {TITLES.get(experiment, experiment)} (`{experiment}`)", means_of(own, experiment)]
        paired = pairs_of(own, experiment)
        if paired is not None:
            parts += ["### Tighter against base", paired]
        drawn = [path for path in figures if path.name.startswith(f"{experiment}_")]
        parts += [f"![{path.stem.replace('_', ' ')}](figures/{path.name})" for path in drawn if path.suffix == ".png"]
        parts.append(commands(own))
    return "\n\n".join(parts) + "\n"


def commands(results: Sequence[Result]) -> str:
    """The command lines that made some results."""
    found = {result.get("command", "") for result in results}
    return "\n".join(["Made by:", "", "```", *sorted(filter(None, found)), "```"])


def make_summary(results: Sequence[Result]) -> str:
    """What the documentation shows: differences, and tables of their own of the experiments that have one."""
    from .convergence import CAPTION as CONVERGED
    from .sections import OWN_TABLES, pairs_of

    parts = []
    for experiment, title in TITLES.items():
        own = [result for result in results if result["experiment"] == experiment]
        if not own:
            continue
        shown = [OWN_TABLES[experiment](own)] if experiment in ("prediction", "million", "oil_example") else []
        paired = pairs_of(own, experiment, brief=True)
        parts += [f"**{title}** (`python -m benchmarks {experiment}`)", *shown, *([] if paired is None else [paired])]
    return "\n\n".join([*parts, CAPTION, CONVERGED])


def _provenance(results: Sequence[Result]) -> str:
    versions = sorted({json.dumps(result.get("versions", {}), sort_keys=True) for result in results})
    commits = sorted({_short(str(result.get("commit"))) for result in results})
    devices = sorted({str(result.get("device", "?")) for result in results})
    shown = "; ".join(", ".join(f"{name} {number}" for name, number in json.loads(text).items()) for text in versions)
    return (
        f"{len(results)} runs on {', '.join(devices)}, commit {', '.join(commits)}; {shown}. Numbers are means over splits "
        "and seeds ± standard errors, bounds in nats per training point, test log-likelihoods in nats per test point."
    )


def _short(commit: str) -> str:
    return commit[:10] + ("+" if commit.endswith("+") else "")
