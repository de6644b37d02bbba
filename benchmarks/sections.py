"""What the report shows of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import convergence
from .report import (
    BOUND,
    LOG_LIKELIHOOD,
    NOISE,
    RMSE,
    STEP,
    Metric,
    Result,
    base_of,
    field,
    flags_of,
    grouped,
    label,
    mean,
    means_table,
    methods_of,
    pairs_table,
    settings_of,
    show_means,
    table,
    without_empty,
)
from .runs import identity


def means_of(results: Sequence[Result], experiment: str) -> str:
    """The table of means, or the experiment's own."""
    if experiment in OWN_TABLES:
        return OWN_TABLES[experiment](results)
    return means_table(comparable(results, experiment))


def pairs_of(results: Sequence[Result], experiment: str, brief: bool = False) -> str | None:
    """Tighter against base, and whether that is converged where the experiment's budget was doubled."""
    if experiment == "prediction":
        return None
    if experiment not in convergence.EXPERIMENTS:
        return pairs_table(results, brief)
    everything = with_bases(results)
    shown = convergence.shown(everything)
    text = pairs_table(shown, brief, lambda one, pair: convergence.verdict(everything, one, pair))
    return text if text is None or brief else f"{text}\n\n{convergence.CAPTION}"


def comparable(results: Sequence[Result], experiment: str) -> list[Result]:
    """Results that stand in tables and figures: those that only check convergence do not."""
    return convergence.shown(with_bases(results)) if experiment in convergence.EXPERIMENTS else list(results)


def with_bases(results: Sequence[Result]) -> list[Result]:
    """Results, and those of a base method beside each kind of conditional of its tighter one: it has none of its own."""
    found = {identity(result): result for result in results}
    by_run: dict[str, Result] = {}
    for result in results:
        by_run.setdefault(_without_conditional(result), result)
    methods = {result["method"] for result in results}
    for result in results:
        base = base_of(result["method"], methods)
        partner = None if base is None else by_run.get(_without_conditional({**result, "method": base}))
        if partner is not None:
            copy = {**partner, "config": result.get("config")}
            found.setdefault(identity(copy), copy)
    return list(found.values())


def _without_conditional(result: Result) -> str:
    config = {name: value for name, value in (result.get("config") or {}).items() if name != "conditional"}
    return identity({**result, "config": config})


def prediction_table(results: Sequence[Result]) -> str:
    """The paper's Table 1, and the differences it is about."""
    results = [{**one, "config": {"start": "median", **(one.get("config") or {})}} for one in results]
    rows, notes, settings = [], [], settings_of(results)
    metrics = (RMSE, LOG_LIKELIHOOD, Metric("", field("nlpd_mean", -1.0), 0), Metric("", field("seconds"), 0))
    for key, group in grouped(results).items():
        dataset = key[0]
        where = ", ".join(filter(None, (dataset, settings[key])))
        size = f"{group[0].get('num_train')}/{group[0].get('num_inputs')}"
        for method in methods_of(group):
            own = [result for result in group if result["method"] == method]
            cells = [mean(map(metric.read, own)) for metric in metrics]
            shown = ["" if cell is None else cell.show(3) for cell in cells]
            rows.append([dataset, size, label(method), str(len(own)), *shown, settings[key], flags_of(own)])
        dropped = {_place(result): result for result in group if result["method"] == "drop"}
        for method in methods_of(group):
            matched = [(dropped[_place(r)], r) for r in group if r["method"] == method and _place(r) in dropped]
            if method == "drop" or not matched:
                continue
            difference = mean(first["nlpd"] - second["nlpd"] for first, second in matched)
            furthest = max(result["mean_difference"] for _, result in matched)
            assert difference is not None
            notes.append(
                f"- {where}, {label(method)}: log-likelihood {difference.show(4, signed=True)} against dropping the term; "
                f"predictive means differ by at most {furthest:.1e}."
            )
    header = [
        "data",
        "N/D",
        "variance",
        "runs",
        "RMSE",
        "test log-lik.",
        "of the mean alone",
        "seconds",
        "settings",
        "flags",
    ]
    return table(*without_empty(header, rows)) + ("\n\n" + "\n".join(notes) if notes else "")


def _place(result: Result) -> tuple[Any, Any]:
    return result.get("split"), result.get("seed")


def snelson_table(results: Sequence[Result]) -> str:
    """Bounds and hyperparameters on the one-dimensional data."""
    columns = {"bound / N": "bound", "noise": "noise", "kernel variance": "outputscale", "lengthscale": "lengthscale"}
    rows = []
    for (dataset, num_inducing, _), group in grouped(results).items():
        for method in methods_of(group):
            for result in (result for result in group if result["method"] == method):
                values = [result.get(name) for name in columns.values()]
                shown = ["" if value is None else f"{value:.4f}" for value in values]
                rows.append([dataset, str(num_inducing), label(method), *shown, str(result.get("steps", ""))])
    return table(["data", "M", "method", *columns, "steps"], rows)


def million_table(results: Sequence[Result]) -> str:
    """Scores, speed and memory, method by method."""
    metrics = (
        RMSE,
        LOG_LIKELIHOOD,
        BOUND,
        NOISE,
        Metric("rows per second", field("rows_per_second"), 0, 0),
        Metric("peak memory, MB", field("peak_memory_mb"), 0, 0),
    )
    rows = []
    for (dataset, num_inducing, _), group in grouped(results).items():
        for method in methods_of(group):
            own = [result for result in group if result["method"] == method]
            shown = show_means(metrics, own)
            config = own[0]["config"]
            where = [str(config.get("epochs", "")), str(config.get("processes", ""))]
            rows.append([dataset, str(num_inducing or ""), label(method), *where, str(len(own)), *shown])
    header = ["data", "M", "method", "epochs", "processes", "runs", *(metric.title for metric in metrics)]
    first = results[0]
    note = (
        f"{first['num_train']:,} rows for training from a memory map, {first['num_test']:,} for testing. RMSE and log-likelihood "
        f"are in units of the delays' standard deviation, {first['target_std']:.1f} minutes. A row counts once per pass over it."
    )
    if not all(result.get("quiet_machine") for result in results):
        note += " Rows per second were measured beside other programs."
    return f"{table(header, rows)}\n\n{note}"


def example_table(results: Sequence[Result]) -> str:
    """The losses that GPyTorch's example shows, after a third of training and at its end."""
    metrics = (
        Metric("loss after a third", _third, 0, 3),
        Metric("loss at the end", lambda result: -float(result["bound"]), 0, 3),
        NOISE,
        STEP,
    )
    rows = []
    for (dataset, num_inducing, _), group in grouped(results).items():
        for method in methods_of(group):
            own = [result for result in group if result["method"] == method]
            shown = show_means(metrics, own)
            rows.append([dataset, str(num_inducing), label(method), str(own[0]["steps"]), str(len(own)), *shown])
    return table(["data", "M", "method", "steps", "runs", *(metric.title for metric in metrics)], rows)


def _third(result: Result) -> float | None:
    """The loss of a trace after a third of the steps."""
    found = [-point["bound"] for point in result.get("trace", []) if point["step"] <= result["steps"] / 3]
    return found[-1] if found else None


OWN_TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "prediction": prediction_table,
    "snelson": snelson_table,
    "million": million_table,
    "oil_example": example_table,
}
