"""Tables of README and documentation are those of the result files, and differences are counted as said."""

from __future__ import annotations

import pytest

from benchmarks import report, scores

TEXT = "\n".join(page.read_text(encoding="utf-8") for page in report.pages())


@pytest.mark.parametrize("page", report.pages(), ids=lambda path: path.stem)
def test_tables_are_made_from_the_published_results(page):
    text = page.read_text(encoding="utf-8")
    assert report.updated(text) == text


def test_every_block_stands_on_a_page():
    assert all(f"<!-- {name}:begin -->" in TEXT for name in report.BLOCKS)


def line(method: str, split: int, bound: float, epochs: int = 2, **values) -> dict:
    run = {"experiment": "uci", "dataset": "kin40k", "split": split, "seed": 0, "method": method, "num_inducing": 64}
    return {
        **run,
        "config": {"epochs": epochs},
        "bound": bound,
        "bound_tighter": bound,
        "bound_base": bound - 0.01,
        **values,
    }


def test_a_tie_is_no_win():
    lines = [line("svgp", split, -1.0) for split in range(4)]
    lines += [line("t-svgp", split, -1.0 + gain) for split, gain in enumerate((0.1, 0.0019, -0.0019, -0.1))]
    ((place, pair, matched),) = scores.rows_of(lines)
    assert (place, pair) == (("kin40k", 64), ("svgp", "t-svgp"))
    values = list(scores.differences(matched, scores.BOUND))
    assert values == pytest.approx([0.1, 0.0019, -0.0019, -0.1])
    assert scores.wins(scores.tally(values, scores.BOUND)) == "1/2/1"


def test_runs_of_another_budget_stand_beside_those_of_most():
    lines = [
        line(method, split, split + 0.1 * (method == "t-svgp")) for method in ("svgp", "t-svgp") for split in (0, 1)
    ]
    lines += [line(method, 0, 0.3 * (method == "t-svgp"), epochs=4) for method in ("svgp", "t-svgp")]
    text = report.pairs_table(scores.rows_of(lines), lines)
    assert "+0.1000±0.0000 (2/0/0)" in text
    assert "+0.1000@2, +0.3000@4" in text


def test_a_base_is_paired_with_every_conditional_of_its_tighter_method():
    lines = [
        line("svgp", 0, -1.0),
        *(line("t-svgp", 0, -0.9) | {"config": {"epochs": 2, "conditional": kind}} for kind in "ab"),
    ]
    assert [row[0] for row in scores.rows_of(lines, "conditional")] == [("kin40k", 64, "a"), ("kin40k", 64, "b")]


def test_a_mean_has_its_standard_error():
    assert scores.mean([1.0, 2.0, None, 3.0]) == scores.Mean(2.0, pytest.approx(1 / 3**0.5), 3)
    assert scores.mean([None]) is None
    assert scores.Mean(0.5, None, 1).show(2, signed=True) == "+0.50"


def test_the_share_of_a_peers_time():
    peer = {"trace": [[1.0, 0.5, 0.0], [4.0, 0.2, 0.0]]}
    ours = {"method": "t-svgp", "config": {"epochs": 15}, "trace": [[1.0, 0.3, 0.0], [2.0, 0.1, 0.0]]}
    assert report.share([ours], peer) == 0.5
    assert report.share([{**ours, "trace": [[1.0, 0.3, 0.0]]}], peer) is None
