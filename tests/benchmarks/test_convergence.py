"""When a comparison is called converged, and what its checks may not do to the tables."""

from __future__ import annotations

import pytest

from benchmarks import convergence, report, sections
from tests.benchmarks.support import result


def pair(split: int, epochs: int, difference: float, **kwargs) -> list[dict]:
    config = {"epochs": epochs, "batch_size": 8}
    base = result("svgp", split, -1.0, 0.5, 0.3, config=config, **kwargs)
    return [base, {**base, "method": "t-svgp", "bound": -1.0 + difference}]


def made(doubled: float | None, *, half: float | None = None, differences=(0.10, 0.12, 0.14)) -> list[dict]:
    """Differences at 60 epochs on three splits, and on the first one at twice and half of them."""
    lines = [line for split, value in enumerate(differences) for line in pair(split, 60, value)]
    lines += [] if doubled is None else pair(0, 120, doubled)
    return lines + ([] if half is None else pair(0, 30, half))


def verdict(lines: list[dict]) -> str:
    return convergence.verdict(lines, lines[0], ("svgp", "t-svgp"))


# The standard error of .10, .12, .14 is .02 / sqrt(3) = .01155, a tenth of the first split's difference .01.
@pytest.mark.parametrize(
    ("doubled", "expected"),
    [
        (0.1114, "yes (60 → 120 epochs)"),
        (0.0886, "yes (60 → 120 epochs)"),
        (0.1117, "no, changed by +0.0117 (60 → 120 epochs)"),
        (0.0880, "no, changed by -0.0120 (60 → 120 epochs)"),
        (None, "not checked"),
    ],
)
def test_twice_the_budget_may_change_the_difference_by_its_standard_error(doubled, expected):
    assert verdict(made(doubled)) == expected


@pytest.mark.parametrize(("doubled", "converged"), [(0.1099, True), (0.1101, False), (0.0901, True), (0.0899, False)])
def test_or_by_a_tenth_where_all_splits_agree(doubled, converged):
    text = verdict(made(doubled, differences=(0.1, 0.1, 0.1)))
    assert text.startswith("yes" if converged else "no")


def test_a_single_split_has_the_tenth_alone():
    assert verdict(made(0.109, differences=(0.1,))).startswith("yes")
    assert verdict(made(0.111, differences=(0.1,))).startswith("no")


def test_without_twice_the_budget_half_of_it_is_compared():
    assert verdict(made(None, half=0.101)) == "yes (30 → 60 epochs)"
    assert verdict(made(None, half=0.05)) == "no, changed by +0.0500 (30 → 60 epochs)"
    assert verdict(made(0.101, half=0.05)) == "yes (60 → 120 epochs)"


def test_other_splits_and_settings_check_nothing():
    assert verdict([*made(None), *pair(7, 120, 0.1)]) == "not checked"
    other = [{**line, "config": {**line["config"], "batch_size": 9}} for line in pair(0, 120, 0.1)]
    assert verdict([*made(None), *other]) == "not checked"
    assert verdict([*made(None), *pair(0, 90, 0.1)]) == "not checked"


def test_runs_for_the_check_stand_in_no_table():
    lines = made(0.101, half=0.099)
    shown = sections.comparable(lines, "uci")
    assert {line["config"]["epochs"] for line in shown} == {60}
    text = sections.pairs_of(lines, "uci")
    assert "|     3 |" in text
    assert "| yes (60 → 120 epochs) |" in text
    assert "settings" not in text
    assert convergence.CAPTION in text
    assert sections.means_of(lines, "uci").count("SVGP") == 2
    # Of two budgets with as many runs the larger is shown; a budget that doubles nothing has rows of its own.
    both = [*made(None), *(line for split in range(3) for line in pair(split, 120, 0.1))]
    assert {line["config"]["epochs"] for line in sections.comparable(both, "uci")} == {120}
    odd = [*made(None), *pair(0, 90, 0.1)]
    assert {line["config"]["epochs"] for line in sections.comparable(odd, "uci")} == {60, 90}


def test_the_whole_report_says_it_too():
    text = report.make_report(made(0.2))
    assert "no, changed by +0.1000 (60 → 120 epochs)" in text
    assert convergence.CAPTION in report.make_summary(made(0.2))


def test_a_base_method_stands_beside_every_conditional():
    lines = []
    for kind in ("optimal", "beta"):
        lines += [{**line, "config": {**line["config"], "conditional": kind}} for line in pair(0, 20, 0.1)]
    only_tighter = [line for line in lines if (line["method"], line["config"]["conditional"]) != ("svgp", "beta")]
    assert len(only_tighter) == 3
    text = sections.pairs_of(only_tighter, "mnist")
    assert "conditional optimal" in text
    assert "conditional beta" in text
    assert len(sections.with_bases(lines)) == len(lines)


def test_seconds_are_shown_from_a_quiet_machine_alone():
    lines = [{**line, "seconds": 12.5} for line in made(None)]
    assert "seconds" not in sections.means_of(lines, "uci")
    quiet = [{**line, "quiet_machine": True} for line in lines]
    assert "12.5" in sections.means_of(quiet, "uci")
