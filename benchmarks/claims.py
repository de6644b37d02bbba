"""What the paper claims, and what the published lines say: a short line each. Reasons are footnotes of the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .registry import PAPER
from .scores import (
    BOUND,
    ERROR,
    LOG_LIKELIHOOD,
    RMSE,
    Metric,
    Result,
    differences,
    lines_of,
    mean,
    rows_of,
    setting,
    table,
    tally,
)

YES, PART, NO = "yes", "in part", "no"
# RMSE and log-likelihood on 5,000 rows of kin40k (Bui and Titsias, 2025), by inducing points, method and blocks.
_COLLAPSED = {
    (None, "exact", None): (0.12, 0.80),
    (256, "sgpr", None): (0.26, -0.14),
    (256, "t-sgpr", None): (0.22, -0.06),
    (256, "block", 50): (0.22, -0.05),
    (256, "block", 10): (0.20, -0.03),
    (512, "sgpr", None): (0.22, 0.02),
    (512, "t-sgpr", None): (0.18, 0.11),
    (512, "block", 50): (0.18, 0.12),
    (512, "block", 10): (0.17, 0.13),
}
_NEAR = 0.03


def table_of_claims() -> str:
    """Claim, paper, here, agrees."""
    rows = [*_snelson(), *_regression(), *_others(), *_collapsed()]
    return table(["claim", "paper", "here", "agrees"], rows)


def counted(lines: Sequence[Result], metric: Metric) -> tuple[str, int, int]:
    """Wins, ties and losses of all pairs in words, and the numbers of wins and of what is none."""
    values = [value for _, _, matched in rows_of(lines) for value in differences(matched, metric)]
    counts = tally(values, metric)
    return (
        f"{metric.title} {counts['win']}/{counts['tie']}/{counts['loss']}",
        counts["win"],
        len(values) - counts["win"],
    )


def _snelson() -> list[list[str]]:
    found = {line["method"]: line for line in lines_of("snelson")}
    learnt = "; ".join(f"{found[name]['noise']:.3f}, {found[name]['outputscale']:.3f}" for name in ("sgpr", "t-sgpr"))
    gains = [
        f"{value:+.3f}" for _, _, matched in rows_of(list(found.values())) for value in differences(matched, BOUND)
    ]
    near = "0.126, 0.087; 0.115, 0.107"
    agrees = (
        YES
        if all(abs(float(a) - float(b)) <= 0.0011 for a, b in zip(_numbers(learnt), _numbers(near), strict=True))
        else NO
    )
    return [
        ["Snelson: noise, kernel variance", near, learnt, agrees],
        [
            "Snelson: a higher bound, collapsed and not",
            "higher",
            ", ".join(gains),
            YES if min(map(float, gains)) > 0 else NO,
        ],
    ]


def _numbers(text: str) -> list[str]:
    return text.replace(";", ",").split(",")


def _regression() -> list[list[str]]:
    lines = [line for line in lines_of("uci") if line["dataset"] in PAPER]
    rows = []
    for metric in (LOG_LIKELIHOOD, RMSE):
        text, better, rest = counted(lines, metric)
        verdict = YES if not rest else PART if better else NO
        rows.append([f"regression: {metric.title} better on all sets[^sets]", "8 sets", text, verdict])
    for dataset in PAPER:
        own = [line for line in lines if line["dataset"] == dataset]
        gain = mean(value for _, _, matched in rows_of(own) for value in differences(matched, LOG_LIKELIHOOD))
        if gain is not None:
            verdict = YES if gain.value >= 0.002 else NO
            rows.append([f"{dataset}: a gain in log-likelihood", "a gain", gain.show(4, signed=True), verdict])
    ratios = [line["milliseconds"] for line in lines_of("speed") if line["experiment"] == "speed"]
    ratio = statistics.geometric_mean(at["t-svgp"] / at["svgp"] for at in ratios)
    return [
        *rows,
        ["run times are almost identical", "almost identical", f"{ratio:.2f} of SVGP's", YES if ratio < 1.1 else NO],
    ]


def _others() -> list[list[str]]:
    rows = []
    for kind, words in (("beta", "learned beta, as in the paper"), ("optimal", "the best scales")):
        lines = [
            line
            for line in lines_of("mnist")
            if setting(line, "conditional") == kind or not line["method"].startswith("t")
        ]
        found = [counted(lines, metric) for metric in (BOUND, LOG_LIKELIHOOD, ERROR)]
        verdict = (
            YES if not any(rest for _, _, rest in found) else PART if any(better for _, better, _ in found) else NO
        )
        rows.append([f"MNIST: gains, {words}[^mnist]", "all", "; ".join(text for text, _, _ in found), verdict])
    for name, words in (("gplvm", "our protocol"), ("oil_example", "GPyTorch's example")):
        for size in (25, 50):
            own = [line for line in lines_of(name) if line["num_inducing"] == size]
            gain = mean(value for _, _, matched in rows_of(own) for value in differences(matched, BOUND))
            if gain is not None:
                verdict = YES if gain.value >= 0.2 else PART if gain.value > 0 else NO
                rows.append(
                    [
                        f"oil flow, M = {size}, {words}: a lower loss[^oil]",
                        "by about 0.3",
                        f"by {gain.show(3)}",
                        verdict,
                    ]
                )
    return [*rows, *_last_term()]


def _last_term() -> list[list[str]]:
    rows, lines = [], [line for line in lines_of("prediction") if setting(line, "start") == "data"]
    for dataset in ("wine", "solar", "pumadyn32nm"):
        own = {
            method: [line for line in lines if (line["dataset"], line["method"]) == (dataset, method)]
            for method in ("drop", "exact")
        }
        worse = _average(own["exact"], "nlpd") - _average(own["drop"], "nlpd")
        times = _average(own["exact"], "seconds") / _average(own["drop"], "seconds")
        claim = f"{dataset}: the last term of the variance[^last]"
        rows.append([claim, "same", f"{-worse:+.4f} nats, {times:.0f} times the time", YES if worse > -0.01 else NO])
    return rows


def _average(lines: Sequence[Result], name: str) -> float:
    return statistics.mean(line[name] for line in lines)


def _collapsed() -> list[list[str]]:
    rows = []
    for (size, method, blocks), printed in _COLLAPSED.items():
        own = [
            line
            for line in lines_of("blocks")
            if (line["num_inducing"], line["method"], setting(line, "num_blocks")) == (size, method, blocks)
        ]
        if own:
            values = [own[0]["rmse"], -own[0]["nlpd"]]
            near = [abs(a - b) <= _NEAR for a, b in zip(values, printed, strict=True)]
            name = (
                "exact GP" if method == "exact" else f"{f'{blocks} blocks' if blocks else method.upper()}, M = {size}"
            )
            told, here = (", ".join(f"{value:.2f}" for value in pair) for pair in (printed, values))
            rows.append([f"kin40k: {name}[^blocks]", told, here, YES if all(near) else PART if any(near) else NO])
    return rows
