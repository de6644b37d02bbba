"""The speed benchmark: that it measures what it says. The times themselves are for quiet machines."""

from __future__ import annotations

import pytest
import torch

from benchmarks import speed
from benchmarks.__main__ import main
from benchmarks.runs import read_results
from benchmarks.speed_tables import fit_table


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("speed")
    assert main(["speed", "--smoke", "--out", str(folder)]) == 0
    return folder


def test_smoke_run_writes_every_kind_of_line_and_a_figure(smoke):
    lines = read_results(smoke / "speed.jsonl")
    kinds = [line["experiment"] for line in lines]
    assert kinds == ["speed"] * 2 + ["speed fit"] * 2 + ["speed scaling"] * 3 + ["speed prediction", "speed collapsed"]
    assert (smoke / "speed.png").stat().st_size > 10_000
    for line in lines[:2]:
        assert set(line["milliseconds"]) == {"gpytorch svgp", "svgp", "t-svgp", "t-solve-gp"}
        assert all(value > 0 for value in [*line["milliseconds"].values(), *line["peak_memory_mib"].values()])
        assert line["counts"]["t-svgp"]["host_reads"] == 1 < line["counts"]["gpytorch svgp"]["host_reads"]
        assert line["counts"]["t-svgp"]["operations"] < line["counts"]["gpytorch svgp"]["operations"]


def test_table_has_a_ratio_per_line_and_their_geometric_mean():
    lines = [
        {"experiment": "speed", "num_inducing": m, "batch_size": 8, "milliseconds": {"gpytorch svgp": 2.0, "t-svgp": t}}
        for m, t in ((4, 1.0), (16, 4.0))
    ]
    lines.append(
        {"experiment": "speed peers", "method": "gpflow", "num_inducing": 4, "batch_size": 8, "milliseconds": 3.0}
    )
    text = speed.table(lines).splitlines()
    assert text[2].replace(" ", "") == "|4,8|2.0|1.0|3.0|0.50|"
    assert text[3].replace(" ", "") == "|16,8|2.0|4.0||2.00|"
    assert text[-1].endswith("t-svgp 1.00.")


def test_the_table_of_fit_has_the_price_of_natural_gradients_and_of_compiling():
    lines = [
        {"experiment": "speed fit", "num_inducing": m, "batch_size": 8, "milliseconds": {"adam": 2.0, "natural": t}}
        for m, t in ((4, 2.0), (16, 8.0))
    ]
    seconds = {"eager": 0.1, "cold": 9.0, "warm": 2.0}
    lines.append({"experiment": "speed compiling", "num_inducing": 4, "batch_size": 8, "seconds": seconds})
    text = fit_table(lines).splitlines()
    assert text[2:4] == ["| 4, 8 | 2.0 | 2.0 | 1.00 |", "| 16, 8 | 2.0 | 8.0 | 4.00 |"]
    assert text[-1].startswith(
        "Geometric mean of natural / adam: 2.00. The first step at 4, 8 takes 0.1 s eager, 9.0 s"
    )
    assert fit_table([]) == "" == speed.table(lines)


def test_memory_of_a_step_is_what_it_holds_at_once():
    def step():
        first = torch.empty(2**20)
        second = torch.empty(2**19)
        del first
        return second.sum()

    assert speed.peak_memory(step) == pytest.approx(6.0, abs=0.1)


def test_exponent_is_the_slope_in_logarithms():
    assert speed._exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)


def test_missing_peers_are_named(tmp_path, capsys):
    assert (
        main(["speed", "--smoke", "--no-compile", "--peers", "--peers-dir", str(tmp_path), "--out", str(tmp_path)]) == 2
    )
    assert "gpflow is not installed" in capsys.readouterr().err


def test_parts_without_a_grid_have_their_sentences_and_a_picture(tmp_path):
    line = {
        "experiment": "speed collapsed",
        "num_inducing": 5,
        "num_data": 1000,
        "seconds": 2.0,
        "extra_memory_mb": 3.0,
    }
    assert speed.table([line]) == "- Collapsed bound and gradient of 1,000 rows at M=5: 2 s, 3 MB extra."
    speed.draw([line], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000
