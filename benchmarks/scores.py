"""Numbers from result lines: means with standard errors, pairs, wins, ties and losses, tables."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .runs import identity, read_results

Result = dict[str, Any]
# Where the pairs are, their methods, and the pairs.
Row = tuple[tuple[Any, ...], tuple[str, str], list[tuple[Result, Result]]]

PUBLISHED = Path(__file__).resolve().parent / "results"
# A difference smaller than this, in nats per point or in standard deviations of the target, is a tie.
TIE = 0.002
LEARNT_THE_MEAN = "learnt the mean"
LABELS = {
    "sgpr": "SGPR",
    "t-sgpr": "T-SGPR",
    "svgp": "SVGP",
    "t-svgp": "T-SVGP",
    "solve-gp": "SOLVE-GP",
    "t-solve-gp": "T-SOLVE-GP",
    "neighbours": "T-SVGP with neighbours",
    "linear": "linear model",
    "trees": "boosted trees",
    "v-bgplvm": "V-BGPLVM",
    "tv-bgplvm": "TV-BGPLVM",
    "gpytorch tutorial": "GPyTorch SVGP, its tutorial's recipe",
    "gpytorch tuned": "GPyTorch SVGP, tuned",
    "gpytorch ngd": "GPyTorch SVGP, its natural gradients",
    "gpytorch large batch": "GPyTorch SVGP, its strategy for large batches",
    "gpflow ngd": "GPflow SVGP, natural gradients",
    "gpflow ngd float64": "GPflow SVGP, natural gradients, float64",
    "gpjax ngd": "GPJax SVGP, natural gradients",
    "gpboost vecchia": "GPBoost, Vecchia (one thread)",
    "gpboost vif": "GPBoost, VIF (one thread)",
}


class Metric(NamedTuple):
    """A column.

    :param title: Its heading.
    :param name: Its name in result lines.
    :param sign: 1 if more is better, -1 if less is.
    :param factor: Of the number in the line.
    """

    title: str
    name: str
    sign: int
    factor: float = 1.0
    digits: int = 4

    def read(self, result: Result) -> float | None:
        """Its value in a result."""
        value = result.get(self.name)
        return None if value is None else self.factor * float(value)

    @property
    def tie(self) -> float:
        """A smaller difference is none."""
        return TIE * abs(self.factor)


BOUND = Metric("bound / N", "bound", 1)
LOG_LIKELIHOOD = Metric("test log-lik.", "nlpd", 1, -1.0)
RMSE = Metric("RMSE", "rmse", -1)
ERROR = Metric("error %", "error", -1, 100.0, 2)


class Mean(NamedTuple):
    """A mean and its standard error, which one value alone does not have."""

    value: float
    error: float | None
    count: int

    def show(self, digits: int, signed: bool = False) -> str:
        """As text."""
        text = f"{self.value:{'+' if signed else ''}.{digits}f}"
        return text if self.error is None else f"{text}±{self.error:.{digits}f}"


def lines_of(name: str) -> list[Result]:
    """The published lines of an experiment; of two with the same run, the later one."""
    path = PUBLISHED / name / f"{name}.jsonl"
    lines = read_results(path) if path.exists() else []
    return list({identity(line) if "dataset" in line else str(i): line for i, line in enumerate(lines)}.values())


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


def setting(result: Result, name: str, default: Any = None) -> Any:
    """What a run was made with, where its line says so."""
    return (result.get("config") or {}).get(name, default)


def label(method: str) -> str:
    """Name of a method in tables and figures."""
    return LABELS.get(method, method)


def grouped(results: Sequence[Result], *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """Results by data, inducing points and the settings named, or all of them."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        config = result.get("config") or {}
        chosen = {name: config.get(name) for name in names} if names else config
        key = (result["dataset"], result.get("num_inducing") or 0, json.dumps(chosen, sort_keys=True))
        groups.setdefault(key, []).append(result)
    return groups


def base_of(method: str) -> str:
    """The base of a tighter method: ``t-svgp`` has ``svgp``, ``tv-bgplvm`` has ``v-bgplvm``."""
    return method[1:].lstrip("-") if method.startswith("t") else ""


def pairs(results: Sequence[Result]) -> dict[tuple[str, str], list[tuple[Result, Result]]]:
    """Results of a base and its tighter method that differ in the method alone; a base has no conditional of its own."""

    def place(result: Result, method: str) -> str:
        config = {name: value for name, value in (result.get("config") or {}).items() if name != "conditional"}
        return identity({**result, "method": method, "config": config})

    bases = {place(result, result["method"]): result for result in results if not base_of(result["method"])}
    found: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for result in results:
        base = base_of(result["method"])
        partner = bases.get(place(result, base)) if base else None
        if partner is not None:
            found.setdefault((base, result["method"]), []).append((partner, result))
    return found


def rows_of(lines: Sequence[Result], *names: str) -> list[Row]:
    """Of every data set, size, pair and settings named the runs with the budget that has most pairs, the larger of two."""
    found: dict[tuple[Any, ...], list[tuple[Result, Result]]] = {}
    for pair, matched in pairs(lines).items():
        for both in matched:
            place = (both[1]["dataset"], both[1]["num_inducing"], *(str(setting(both[1], name)) for name in names))
            found.setdefault((place, pair), []).append(both)
    rows: list[Row] = []
    for (place, pair), matched in found.items():
        epochs = [setting(tighter, "epochs") or 0 for _, tighter in matched]
        most = max(epochs, key=lambda budget, all_of=epochs: (all_of.count(budget), budget))
        rows.append((place, pair, [both for both, own in zip(matched, epochs, strict=True) if own == most]))
    return sorted(rows, key=lambda row: [str(row[0][0]), row[0][1] or 0, *row[0][2:], row[1]])


def differences(matched: Iterable[tuple[Result, Result]], metric: Metric) -> Iterator[float]:
    """Tighter less base, where both have the metric."""
    for first, second in matched:
        before, after = metric.read(first), metric.read(second)
        if before is not None and after is not None:
            yield after - before


def tally(values: Iterable[float], metric: Metric) -> Counter[str]:
    """Wins, ties and losses of differences tighter - base."""
    better = [metric.sign * value for value in values]
    words = ["win" if value >= metric.tie else "loss" if value <= -metric.tie else "tie" for value in better]
    return Counter(words)


def wins(counts: Counter[str]) -> str:
    """As in tables."""
    return f"{counts['win']}/{counts['tie']}/{counts['loss']}"


def flags_of_scores(rmse: float, test_std: float) -> list[str]:
    """What a run is flagged with that predicts no better than the mean of the targets."""
    return [LEARNT_THE_MEAN] if rmse >= 0.98 * test_std else []


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
