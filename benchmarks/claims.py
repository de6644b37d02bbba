"""What the paper claims, and what the published results say: one row per claim, none where there are no results.

Numbers in the column of the paper are printed there (in Bui and Titsias, 2025, for the collapsed models). What was found here is
computed from result lines, and so are the verdict and the reason.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import convergence, report
from .registry import PAPER
from .report import BOUND, ERROR, LOG_LIKELIHOOD, RMSE, Metric, Result, label
from .runs import identity
from .sections import comparable, with_bases

AGREES, PARTLY, DIFFERS = "yes", "in part", "no"

# How near RMSE and log-likelihood of a collapsed model must be to the paper's: its rows were other random ones.
_NEAR = 0.03

# Half a unit of the last digit that the paper prints, and its own rounding.
_LAST_DIGIT = {2: 0.01, 3: 0.001}

# RMSE and log-likelihood on 5,000 rows of kin40k, by inducing points, method and blocks (Bui and Titsias, 2025), and the
# standard deviation of the noise where it is known.
_COLLAPSED = {
    (None, "exact", None): (0.12, 0.80, 0.00),
    (256, "sgpr", None): (0.26, -0.14, 0.30),
    (256, "t-sgpr", None): (0.22, -0.06, 0.26),
    (256, "block", 50): (0.22, -0.05, None),
    (256, "block", 10): (0.20, -0.03, 0.23),
    (512, "sgpr", None): (0.22, 0.02, 0.25),
    (512, "t-sgpr", None): (0.18, 0.11, 0.21),
    (512, "block", 50): (0.18, 0.12, None),
    (512, "block", 10): (0.17, 0.13, 0.19),
}
# Log-likelihood with and without the last term of the predictive variance, Table 1.
_TABLE_1 = {"wine": (-0.66, -0.66), "solar": (-1.57, -1.56), "pumadyn32nm": (-1.42, -1.42)}


# Who chooses the scales of a classifier, where a line says so.
_CONDITIONALS = {"beta": ", one learned beta per class as in the paper", "optimal": ", the best scales"}


class Row(NamedTuple):
    """A claim, what the paper prints, what was found, whether the two agree, and if not why, as far as the lines tell."""

    claim: str
    paper: str
    found: str
    agrees: str
    why: str = ""


def table(results: Sequence[Result], speed: Sequence[dict[str, Any]]) -> str:
    """The claims for which there are results, as Markdown."""
    rows = [
        *_snelson(_of(results, "snelson")),
        *_last_term(_of(results, "prediction")),
        *_regression(_of(results, "uci")),
        *_run_time(speed),
        *_digits(_of(results, "mnist")),
        *_latents(_of(results, "gplvm")),
        *_latents_by_example(_of(results, "oil_example")),
        *_collapsed(_of(results, "blocks")),
    ]
    if not rows:
        return ""
    return (
        f"{report.table(['claim', 'the paper', 'found here', 'agrees?', 'why'], rows)}\n\n"
        f"*Wins* and *losses* are differences of at least {report.TIE}, in nats per point or standard deviations of the target, "
        f"for error rates {100 * report.TIE} percentage points. *In part*: some of it, or by less than the paper reports. "
        f"{convergence.CAPTION} Collapsed models agree where RMSE and log-likelihood are both within {_NEAR} of the paper's."
    )


def _of(results: Sequence[Result], experiment: str) -> list[Result]:
    return [result for result in results if result["experiment"] == experiment]


def _gains(matched: Sequence[tuple[Result, Result]], metric: Metric) -> list[float]:
    """Tighter less base, where both have the metric."""
    values = [(metric.read(base), metric.read(tighter)) for base, tighter in matched]
    return [after - before for before, after in values if before is not None and after is not None]


def _differences(results: Sequence[Result], metric: Metric) -> list[float]:
    """Tighter less base, over all pairs."""
    groups = report.grouped(results).values()
    return [gain for group in groups for matched in report.pairs(group).values() for gain in _gains(matched, metric)]


def _wins(results: Sequence[Result], metric: Metric) -> str:
    """Wins, ties and losses in words."""
    counts = report.tally(_differences(results, metric), metric)
    return f"{metric.title} {counts['win']} wins, {counts['tie']} ties, {counts['loss']} losses"


def _lost(results: Sequence[Result], metric: Metric) -> list[str]:
    """Where the tighter method loses, and how far apart the two bounds are there at the same parameters."""
    found = []
    for (dataset, size, _), group in report.grouped(results).items():
        for (_, tighter), matched in report.pairs(group).items():
            differences = _gains(matched, metric)
            losses = report.tally(differences, metric)["loss"]
            gap = report.mean(report.gap(one) for pair in matched for one in pair)
            if losses:
                apart = "" if gap is None else f", bounds {gap.value:.4f} apart"
                found.append(f"{dataset} M={size} {label(tighter)} ({losses} of {len(differences)}{apart})")
    return found


def _snelson(results: Sequence[Result]) -> list[Row]:
    """Learnt noise and kernel variance, and the order of the bounds, on the one-dimensional data."""
    printed = {"sgpr": (0.126, 0.087), "t-sgpr": (0.115, 0.107)}
    by_method = {result["method"]: result for result in results if result["dataset"] == "snelson"}
    rows = []
    if printed.keys() <= by_method.keys():
        learnt = {name: (by_method[name]["noise"], by_method[name]["outputscale"]) for name in printed}
        near = all(
            abs(a - b) <= _LAST_DIGIT[3] for name in printed for a, b in zip(learnt[name], printed[name], strict=True)
        )
        show = lambda found: "; ".join(f"{label(name)} {a:.3f}, {b:.3f}" for name, (a, b) in found.items())
        rows.append(
            Row(
                "Snelson, 5 inducing points: less noise, a larger kernel variance (noise, variance)",
                show(printed),
                show(learnt),
                AGREES if near else DIFFERS,
            )
        )
    differences = _differences(results, BOUND)
    if differences:
        rows.append(
            Row(
                "Snelson: both tighter bounds end above their base",
                "higher",
                ", ".join(f"{one:+.4f} nats per point" for one in differences),
                AGREES if min(differences) > 0 else DIFFERS,
            )
        )
    return rows


def _last_term(results: Sequence[Result]) -> list[Row]:
    """Table 1: the last term of the predictive variance changes nothing, and costs time."""
    rows = []
    for dataset, (printed_with, printed_without) in _TABLE_1.items():
        for start in ("median", "data"):
            own = [one for one in results if (one["dataset"], _start(one)) == (dataset, start)]
            by_method = {name: [one for one in own if one["method"] == name] for name in ("drop", "exact")}
            without, with_term = (report.mean(map(LOG_LIKELIHOOD.read, by_method[name])) for name in ("drop", "exact"))
            if without is None or with_term is None:
                continue
            flags = Counter(flag for one in by_method["drop"] for flag in report.flags(one))
            flagged = flags[report.LEARNT_THE_MEAN]
            times = statistics.mean(one["seconds"] for one in by_method["exact"]) / statistics.mean(
                one["seconds"] for one in by_method["drop"]
            )
            same = abs(with_term.value - without.value) <= _LAST_DIGIT[2]
            moved = sum(one.get("start", "median") != "median" for one in by_method["drop"])
            if start == "data" and not moved:
                continue  # the better of two starts was the usual one everywhere: the row above again
            reasons = [f"{flagged} of {without.count} runs learnt the mean alone, and show nothing"] if flagged else []
            if unseen := flags[report.RMSE_OF_THE_MEAN]:
                reasons.append(
                    f"{unseen} of {without.count} runs have the RMSE of the mean on their test rows; their bound says that they "
                    "learnt more"
                )
            if start == "data" and moved < without.count:
                reasons.append(f"the better start was another than above in {moved} of {without.count} runs")
            where = f"{dataset}{'' if start == 'median' else ', from a better start'}"
            rows.append(
                Row(
                    f"{where}: predictions without the last term are as good, and cheaper (log-likelihood with, without)",
                    f"{printed_with:.2f}, {printed_without:.2f}",
                    f"{with_term.show(3)}, {without.show(3)}; {times:.0f} times the time with it",
                    DIFFERS if not same or times <= 1 else PARTLY if flagged == without.count else AGREES,
                    "; ".join(reasons),
                )
            )
    return rows


def _start(result: Result) -> str:
    return report.setting(result, "start", "median")


def _regression(results: Sequence[Result]) -> list[Row]:
    """The large regression sets."""
    everything = [result for result in results if result["dataset"] in PAPER]
    own = comparable(everything, "uci")
    differences = _differences(own, LOG_LIKELIHOOD)
    if not differences:
        return []
    lost = {metric.title: _lost(own, metric) for metric in (LOG_LIKELIHOOD, RMSE)}
    names = [name for name in PAPER if any(result["dataset"] == name for result in own)]
    gains = {}
    for name in names:
        found = report.mean(_differences([result for result in own if result["dataset"] == name], LOG_LIKELIHOOD))
        if found is not None:
            gains[name] = found
    checked = convergence.summary(everything)
    shown = {identity(result) for result in own}
    hidden = [result for result in with_bases(everything) if identity(result) not in shown]
    if _differences(hidden, LOG_LIKELIHOOD):
        checked += f"; runs with other budgets, which only check that: {_wins(hidden, LOG_LIKELIHOOD)}"
    rows = [
        Row(
            "tighter methods match or outperform their base on every data set",
            "8 of 8 data sets, 3 of them significantly",
            f"{len(names)} of these sets: {_wins(own, LOG_LIKELIHOOD)}; {_wins(own, RMSE)}; {checked}",
            AGREES if not any(lost.values()) else PARTLY if min(differences) < 0 < sum(differences) else DIFFERS,
            "; ".join(f"losses in {title}: {', '.join(where)}" for title, where in lost.items() if where),
        ),
        Row(
            "the gain in log-likelihood depends on the data set",
            "clear on 3 of 8",
            "; ".join(f"{name} {gain.show(4, signed=True)}" for name, gain in gains.items()),
            AGREES
            if min(g.value for g in gains.values()) < report.TIE <= max(g.value for g in gains.values())
            else PARTLY,
        ),
    ]
    sizes = sorted({result["num_inducing"] for result in own})
    if len(sizes) > 1:
        ahead = {size: _ahead([one for one in own if one["num_inducing"] == size]) for size in sizes}
        without = [where for _, not_ahead in ahead.values() for where in not_ahead]
        counts = [
            f"M={size}: bound ahead in {len(has)} of {len(has) + len(not_)}" for size, (has, not_) in ahead.items()
        ]
        rows.append(
            Row(
                "the gain is there for every number of inducing points",
                "M = 256, 512, 1024",
                f"{'; '.join(counts)} rows of the table",
                AGREES if not without else PARTLY if any(has for has, _ in ahead.values()) else DIFFERS,
                f"not ahead: {', '.join(without)}" if without else "",
            )
        )
    return [*rows, *_during_training([result for result in own if result["dataset"] == "kin40k"])]


def _ahead(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Rows whose mean bound is above that of the base, and the others."""
    has, has_not = [], []
    for (dataset, size, _), group in report.grouped(results).items():
        for (_, tighter), matched in report.pairs(group).items():
            gain = report.mean(_gains(matched, BOUND))
            if gain is not None:
                where = f"{dataset} M={size} {label(tighter)} ({gain.show(4, signed=True)})"
                (has if gain.value > 0 else has_not).append(where)
    return has, has_not


def _during_training(results: Sequence[Result]) -> list[Row]:
    """Whether the tighter bound leads through the whole run, after its first tenth."""
    # By the number of points of a trace: what part of the run is over, and tighter bound less base.
    leads: dict[int, list[tuple[float, float]]] = {}
    for group in report.grouped(results).values():
        for matched in report.pairs(group).values():
            for base, tighter in matched:
                values = list(zip(base.get("trace") or [], tighter.get("trace") or [], strict=False))
                for before, after in values[len(values) // 10 :]:
                    if before.get("bound") is not None and after.get("bound") is not None:
                        part = after["epoch"] / values[-1][1]["epoch"]
                        leads.setdefault(len(values), []).append((part, after["bound"] - before["bound"]))
    total = sum(map(len, leads.values()))
    if not total:
        return []
    behind = {size: [(part, -lead) for part, lead in found if lead <= 0] for size, found in leads.items()}
    share = 1 - sum(map(len, behind.values())) / total
    found = f"ahead in {share:.0%} of {total} points of the traces"
    verdict = AGREES if share > 0.95 else PARTLY if share > 0.5 else DIFFERS
    why = [
        f"in traces of {size} points behind at {len(late)} of {len(leads[size])}, the last of them {max(late)[0]:.0%} into "
        f"training, by up to {max(by for _, by in late):.4f} nats per point"
        for size, late in behind.items()
        if late
    ]
    return [Row("kin40k: the gain is there throughout training", "all iterations", found, verdict, "; ".join(why))]


def _run_time(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """A step of the tighter method over one of its base."""
    ratios = [
        line["milliseconds"]["t-svgp"] / line["milliseconds"]["svgp"]
        for line in lines
        if line["experiment"] == "speed" and {"svgp", "t-svgp"} <= line["milliseconds"].keys()
    ]
    if not ratios:
        return []
    ratio = statistics.geometric_mean(ratios)
    found = f"T-SVGP takes {ratio:.2f} of SVGP's time per step, geometric mean over {len(ratios)} sizes"
    return [Row("run times are almost identical", "almost identical", found, AGREES if ratio < 1.1 else DIFFERS)]


def _digits(results: Sequence[Result]) -> list[Row]:
    """Classification, by who chooses the scales."""
    everything = with_bases([result for result in results if result["dataset"] == "mnist"])
    shown = comparable(everything, "mnist")
    rows = []
    for kind in dict.fromkeys(report.setting(one, "conditional") for one in shown):
        own = [one for one in shown if report.setting(one, "conditional") == kind]
        metrics = (BOUND, LOG_LIKELIHOOD, ERROR)
        counts = {metric.title: report.tally(_differences(own, metric), metric) for metric in metrics}
        if not any(sum(one.values()) for one in counts.values()):
            continue
        all_won = all(one["win"] == sum(one.values()) for one in counts.values())
        any_won = any(one["win"] for one in counts.values())
        why = _why_so_little(own)
        checked = convergence.summary([one for one in everything if report.setting(one, "conditional") == kind])
        rows.append(
            Row(
                f"MNIST{_CONDITIONALS.get(kind, '')}: substantial gains in all metrics",
                "all metrics",
                "; ".join([*(_wins(own, metric) for metric in metrics), checked]),
                AGREES if all_won else PARTLY if any_won else DIFFERS,
                "" if all_won else why,
            )
        )
    return rows


def _why_so_little(results: Sequence[Result]) -> str:
    """How far apart the bounds of a classifier are at all, and what is left to gain."""
    tighter = [one for one in results if one["method"].startswith("t-")]  # with scales of its own
    gap = report.mean(map(report.gap, tighter))
    share, ratio = (report.mean(one.get(name) for one in tighter) for name in ("residual_share", "curvature_ratio"))
    reasons = [] if gap is None else [f"at the same parameters the bounds are {gap.value:.4f} nats per image apart"]
    if share is not None and ratio is not None:
        reasons.append(
            f"the inducing points leave {share.value:.0%} of the prior variance, but where a class is nearly certain the "
            f"likelihood hardly bends: curvature times residual variance is {ratio.value:.3f} on average"
        )
    return "; ".join(reasons)


def _latents(results: Sequence[Result]) -> list[Row]:
    """The latent variable model."""
    rows = []
    for (_, size, _), group in report.grouped([one for one in results if one["dataset"] == "oil"]).items():
        difference = report.mean(_differences(group, BOUND))
        if difference is not None:
            found = f"{-difference.value:+.3f} per point, from {difference.count} pairs"
            verdict = DIFFERS if difference.value <= 0 else AGREES if 0.2 <= difference.value <= 0.4 else PARTLY
            claim = f"oil flow, M={size}: a lower negative bound"
            why = "our own protocol: standardised data, and a warm start that both methods share"
            rows.append(Row(claim, "roughly -5.5 against -5.2", found, verdict, "" if verdict == AGREES else why))
    return rows


def _latents_by_example(results: Sequence[Result]) -> list[Row]:
    """The latent variable model by the protocol of GPyTorch's example, whose losses are minus the bounds."""
    rows = []
    for (_, size, _), group in report.grouped([one for one in results if one["dataset"] == "oil"]).items():
        matched = report.pairs(group).get(("v-bgplvm", "tv-bgplvm"), [])
        base, tighter = (report.mean(-pair[i]["bound"] for pair in matched) for i in (0, 1))
        gain = report.mean(second["bound"] - first["bound"] for first, second in matched)
        if base is None or tighter is None or gain is None:
            continue
        wins = sum(second["bound"] > first["bound"] for first, second in matched)
        is_clear = gain.error is not None and gain.value > 2 * gain.error
        verdict = DIFFERS if gain.value <= 0 else AGREES if is_clear and gain.value >= 0.2 else PARTLY
        ends = [-pair[0]["bound"] for pair in matched]
        why = f"seeds of the base alone end up to {max(ends) - min(ends):.2f} apart: the model has many local optima"
        rows.append(
            Row(
                f"oil flow, M={size}, by the protocol of GPyTorch's example: a lower negative bound",
                "roughly -5.5 against -5.2",
                f"{tighter.show(2)} against {base.show(2)}, lower by {gain.show(3)}, in {wins} of {len(matched)} seeds",
                verdict,
                "" if verdict == AGREES else why,
            )
        )
    return rows


def _collapsed(results: Sequence[Result]) -> list[Row]:
    """Collapsed models on 5,000 rows of kin40k."""
    rows = []
    for (size, method, blocks), printed in _COLLAPSED.items():
        key = ("kin40k", size, method, blocks)
        own = [one for one in results if _key(one) == key]
        base = [one for one in results if _key(one) == ("kin40k", size, "sgpr", None)]
        found = [report.mean(map(metric.read, own)) for metric in (RMSE, LOG_LIKELIHOOD)]
        values = [one for one in found if one is not None]
        if len(values) < 2:
            continue
        *scores, deviation = printed
        near = [abs(one.value - number) <= _NEAR for one, number in zip(values, scores, strict=True)]
        reasons = [_noise(own, deviation) if not all(near) else "", _stopped(own, base if method != "sgpr" else [])]
        name = "exact GP" if method == "exact" else f"{blocks} blocks" if blocks else label(method)
        rows.append(
            Row(
                f"kin40k, 5,000 rows, {name}{'' if size is None else f', M={size}'} (RMSE, log-likelihood)",
                ", ".join(f"{number:.2f}" for number in scores),
                ", ".join(one.show(2) for one in values),
                AGREES if all(near) else PARTLY if any(near) else DIFFERS,
                "; ".join(filter(None, reasons)),
            )
        )
    return [*rows, *_order_of_blocks(results)]


def _order_of_blocks(results: Sequence[Result]) -> list[Row]:
    """Whether larger blocks are better, by bound and by test log-likelihood."""
    rows = []
    for size in (256, 512):
        found, ratios = {}, {}
        for name, method, blocks in (
            ("T-SGPR", "t-sgpr", None),
            ("50 blocks", "block", 50),
            ("10 blocks", "block", 10),
        ):
            own = [one for one in results if _key(one) == ("kin40k", size, method, blocks)]
            values = [report.mean(map(metric.read, own)) for metric in (BOUND, LOG_LIKELIHOOD)]
            if all(one is not None for one in values):
                found[name] = [one.value for one in values if one is not None]
            ratio = report.mean(
                math.sqrt(one["noise"]) / one["rmse"] for one in own if one.get("noise") and one.get("rmse")
            )
            if ratio is not None:
                ratios[name] = ratio.value
        if len(found) < 3:
            continue
        told = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
        why = (
            f"the standard deviation of the noise falls faster than the error: over RMSE it is {told}" if ratios else ""
        )
        rises = [list(column) == sorted(column) for column in zip(*found.values(), strict=True)]
        rows.append(
            Row(
                f"kin40k, 5,000 rows, M={size}: larger blocks are better (bound, log-likelihood)",
                "in both",
                "; ".join(f"{name} {bound:.3f}, {density:.3f}" for name, (bound, density) in found.items()),
                AGREES if all(rises) else PARTLY if any(rises) else DIFFERS,
                "" if all(rises) or sorted(ratios.values(), reverse=True) != [*ratios.values()] else why,
            )
        )
    return rows


def _noise(own: Sequence[Result], printed: float | None) -> str:
    """The noise that was learnt beside the paper's, which tells whether the two ended at the same optimum."""
    found = report.mean(math.sqrt(one["noise"]) for one in own if one.get("noise") is not None)
    if found is None or printed is None or abs(found.value - printed) <= _LAST_DIGIT[2]:
        return ""
    return f"the standard deviation of the noise is {found.value:.2f} here, {printed:.2f} there: not the same optimum"


def _stopped(own: Sequence[Result], base: Sequence[Result]) -> str:
    """What L-BFGS still gained where it was stopped, for itself and over SGPR; empty where it ended by itself."""
    if all(one.get("converged", True) for one in own):
        return ""
    text = f"L-BFGS was stopped after {report.setting(own[0], 'max_iter'):,} iterations"
    end, half = (report.mean(one.get(name) for one in own) for name in ("bound", "bound_at_half"))
    if end is None or half is None:
        return text
    text += f"; their second half raised the bound by {end.value - half.value:.4f} nats per point"
    base_end, base_half = (report.mean(one.get(name) for one in base) for name in ("bound", "bound_at_half"))
    if base_end is None or base_half is None:
        return text
    change = (end.value - base_end.value) / (half.value - base_half.value) - 1
    verdict = "converged" if abs(change) < convergence.SHARE else "not converged"
    return f"{text}, its lead over SGPR by {change:.0%}: {verdict}"


def _key(result: Result) -> tuple[Any, ...]:
    blocks = report.setting(result, "num_blocks")
    return result["dataset"], result.get("num_inducing"), result["method"], blocks
