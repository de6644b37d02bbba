"""Tables and figures from the files of results."""

from __future__ import annotations

import pytest

from benchmarks import report, runs, sections
from benchmarks.errors import UserError
from tests.benchmarks.support import (
    result,
    results,
)


def test_paired_differences_have_the_standard_error_of_their_mean():
    text = report.pairs_table(results())
    # 0.1, 0.2, 0.3: mean 0.2, standard deviation 0.1, standard error 0.1 / sqrt(3)
    assert "+0.2000 ± 0.0577 (3/0/0)" in text
    # log-likelihood changes 0.05, 0.001, -0.03; RMSE changes -0.02, 0.01, -0.001
    assert "+0.0070 ± 0.0233 (1/1/1)" in text
    assert "-0.0037 ± 0.0088 (1/1/1)" in text
    assert "|   +0.0100 |" in text
    assert "split 2, seed 0, T-SVGP: test log-lik. -0.7000 → -0.7300" in text
    assert "split 1, seed 0, T-SVGP: RMSE 0.3100 → 0.3200" in text


def test_runs_with_other_settings_are_not_paired():
    changed = [{**one, "config": {"epochs": 3}} if one["method"] == "t-svgp" else one for one in results()]
    assert report.pairs_table(changed) is None


@pytest.mark.parametrize(
    ("difference", "outcome"), [(0.002, "win"), (0.0019, "tie"), (-0.0019, "tie"), (-0.002, "loss")]
)
def test_a_tie_is_a_difference_below_two_thousandths(difference, outcome):
    assert report.tally([difference], report.BOUND) == {outcome: 1}
    flipped = {"win": "loss", "loss": "win", "tie": "tie"}[outcome]
    assert report.tally([difference], report.RMSE) == {flipped: 1}
    # In per cent: a fifth of one.
    assert report.tally([100 * difference], report.ERROR) == {flipped: 1}


@pytest.mark.parametrize(
    ("method", "base"), [("t-svgp", "svgp"), ("tv-bgplvm", "v-bgplvm"), ("svgp", None), ("t-x", None)]
)
def test_a_tighter_method_knows_its_base(method, base):
    assert report.base_of(method, ["svgp", "t-svgp", "v-bgplvm", "tv-bgplvm", "t-x"]) == base


def test_a_table_is_aligned_markdown():
    text = report.table(["data", "M"], [["kin40k", "5"], ["x", "1024"]])
    assert text.splitlines() == ["| data   |    M |", "|--------|-----:|", "| kin40k |    5 |", "| x      | 1024 |"]


def test_the_report_has_tables_figures_and_commands(cli, smoke, tmp_path, capsys):
    path = tmp_path / "results" / "uci.jsonl"
    path.parent.mkdir()
    for one in results():
        runs.append_result(path, {**one, "command": "python -m benchmarks uci --epochs 2", "versions": {"torch": "2"}})
    assert cli("report", tmp_path / "results", smoke, "--out", tmp_path / "made") == 0
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "made" / "report.md").read_text().strip()
    for expected in (
        "+0.2000 ± 0.0577 (3/0/0)",
        "python -m benchmarks uci --epochs 2",
        "with last term",
        "kernel variance",
    ):
        assert expected in text
    figures = {path.name for path in (tmp_path / "made" / "figures").iterdir()}
    for name in (
        "uci_bound",
        "uci_rmse",
        "uci_log_likelihood",
        "uci_traces_kin40k",
        "snelson_fits",
        "prediction_seconds",
        "mnist_error",
    ):
        assert {f"{name}.png", f"{name}.svg"} <= figures
    for name in figures:
        assert (tmp_path / "made" / "figures" / name).stat().st_size > 2000


def test_a_later_result_of_the_same_run_replaces_the_earlier(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    runs.append_result(first, result("svgp", 0, -1.0, 0.5, 0.3))
    runs.append_result(second, result("svgp", 0, -0.9, 0.5, 0.3))
    assert [one["bound"] for one in report.load([tmp_path])] == [-0.9]


def test_runs_that_noted_little_beside_others_are_not_drawn():
    from benchmarks import figures

    long, short, none = (
        {**one, "trace": count * one["trace"]} for one, count in zip(results(), (6, 2, 0), strict=False)
    )
    short["trace"].pop()
    other = {**long, "dataset": "protein"}
    assert figures._with_trace([long, short, none, other], "kin40k") == [long]
    assert figures._with_trace([short, none], "kin40k") == [short]


def test_results_with_other_settings_have_rows_and_panels_of_their_own():
    from benchmarks import figures

    both = [*results(), *({**one, "config": {"epochs": 3}, "bound": one["bound"] + 5} for one in results())]
    text = report.means_table(both)
    assert "| epochs 2 |" in text
    assert "| epochs 3 |" in text
    assert "settings" not in report.means_table(results())
    assert report.pairs_table(both).count("+0.2000 ± 0.0577 (3/0/0)") == 2
    titles = [panel.get_title() for panel in figures._scores(both, report.BOUND).axes]
    assert titles == ["kin40k\nepochs 2", "kin40k\nepochs 3"]
    assert len(figures._traces(both).axes) == 6
    assert [panel.get_title() for panel in figures._scores(results(), report.BOUND).axes] == ["kin40k"]


@pytest.mark.parametrize(("bound", "flag"), [(-1.4189, "learnt the mean"), (-1.33, "RMSE of the mean")])
def test_flags_are_shown_with_their_number_and_by_what_the_bound_says(bound, flag):
    flagged = [
        {
            **result("drop", split, bound, 1.0, 1.0, seconds=1.0, mean_difference=0.0, num_train=9, num_inputs=2),
            "flags": ["learnt the mean"] if split else [],
        }
        for split in range(3)
    ]
    for text in (sections.prediction_table(flagged), report.means_table(flagged)):
        assert f"{flag} (2 of 3)" in text


def test_a_folder_of_folders_is_reported_without_smoke_runs_and_other_files(tmp_path):
    for name, experiment in (("a", "uci"), ("b/smoke", "uci"), ("demo", "demo"), ("speed", "speed peers")):
        (tmp_path / name).mkdir(parents=True)
        runs.append_result(
            tmp_path / name / "x.jsonl", {**result("svgp", len(name), -1.0, 0.5, 0.3), "experiment": experiment}
        )
    assert [(one["experiment"], one["split"]) for one in report.load([tmp_path])] == [("uci", 1)]


def test_files_without_results_are_refused(tmp_path):
    with pytest.raises(UserError, match="there are no results in"):
        report.load([tmp_path])
    runs.append_result(tmp_path / "other.jsonl", {"a": 1})
    with pytest.raises(UserError, match="a result has no experiment"):
        report.load([tmp_path])
