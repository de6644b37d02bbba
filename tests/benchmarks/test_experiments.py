"""Every experiment runs in seconds, is continued by ``--resume``, and says in one line what is wrong with its arguments."""

from __future__ import annotations

import math
import sys

import pytest

import tighter_gp
from benchmarks import __main__ as command_line
from benchmarks import uci
from tests.benchmarks.support import command, lines, own_set

# Of each experiment the file with its lines, and how many of them there are.
SMOKES = {
    "snelson": 4,
    "prediction": 4,
    "uci": 4,
    "neighbours": 3,
    "million": 4,
    "mnist": 4,
    "gplvm": 2,
    "oil_example": 2,
    "blocks": 4,
    "recipes": 10,
    "quality": 6,
}
SLOW = ("gplvm", "mnist", "recipes", "million", "quality")
SMALL = ("uci", "--datasets", "mine", "--splits", "0", "2", "--num-inducing", "5", "--epochs", "6")
SMALL += ("--batch-size", "16")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SMOKES])
def test_an_experiment_runs_offline_in_seconds(name, tmp_path):
    assert command(name, "--smoke", "--out", tmp_path) == 0
    results = lines(tmp_path / "smoke" / f"{name}.jsonl")
    assert len(results) == SMOKES[name]
    for result in results:
        assert {"dataset", "split", "seed", "method", "config", "commit", "command", "threads", "versions"} <= set(
            result
        )
        values = [result[key] for key in ("bound", "nlpd", "rmse") if result.get(key) is not None]
        assert values
        assert all(map(math.isfinite, values))
        if result.get("bound_tighter") is not None and name != "gplvm":
            assert result["bound_tighter"] >= result["bound_base"] - 1e-6
    assert not (tmp_path / "smoke" / "checkpoints").exists()


def test_the_demo_writes_its_table_and_figure(tmp_path, capsys):
    assert command("demo", "--smoke", "--out", tmp_path) == 0
    assert "| T-SVGP |" in capsys.readouterr().out
    assert len(lines(tmp_path / "demo.jsonl")) == 4
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_parts_of_the_speed_are_replaced(tmp_path):
    for parts in (("fit",), ("grid",), ("grid",)):
        assert command("speed", "--smoke", "--parts", *parts, "--out", tmp_path) == 0
    kinds = [line["experiment"] for line in lines(tmp_path / "speed.jsonl")]
    assert sorted(kinds) == ["speed", "speed", "speed fit", "speed fit"]


def test_all_experiments_are_listed(capsys):
    assert command() == 0
    text = capsys.readouterr().out
    for name in command_line.EXPERIMENTS:
        assert f"\n{name} " in text
    assert {*SMOKES, "demo", "speed", "report"} == set(command_line.EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("uci", "--datasets", "kin41k"), "unknown dataset 'kin41k'; choose from wine, "),
        (("uci", "--datasets", "mine", "--methods", "vfe"), "unknown method 'vfe'; choose from svgp, t-svgp"),
        (("uci", "--datasets", "mine", "--splits", "10"), "no split 10"),
        (("uci", "--datasets", "mine", "--num-inducing", "55"), "55 inducing points are more than the 54 training"),
        (("uci", "--datasets", "mine", "mine"), "--datasets names something twice"),
        (("uci", "--datasets", "mine", "--epochs", "-1"), "--epochs must be positive"),
        (("uci", "--datasets", "mine", "--device", "toaster"), "--device toaster"),
        (("uci", "--datasets", "wine"), "uci/wine/data.csv.gz is not in"),
        (("snelson",), "snelson.csv is not in"),
        (("guess",), "unknown experiment 'guess'"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, arguments, message):
    own_set(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "pooch", None)
    out = tmp_path / "out"
    assert command(*arguments, "--data-dir", tmp_path / "data", "--out", out) == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert text.startswith("error: ")
    assert message in text
    assert not out.exists() or not [path for path in out.rglob("*") if path.is_file()]


def test_an_interrupted_experiment_resumes_to_the_numbers_of_an_uninterrupted_one(tmp_path, monkeypatch):
    own_set(tmp_path)
    common = (*SMALL, "--methods", "t-svgp", "svgp", "--data-dir", tmp_path, "--traces", "3")
    assert command(*common, "--out", tmp_path / "whole") == 0

    class Crash(Exception):
        pass

    class CrashingTrace(uci.Trace):
        def __call__(self, state):
            super().__call__(state)
            if state.epoch_end and state.epoch == 4 and self.measure.args[1] == "bound_base":
                raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(uci, "Trace", CrashingTrace)
        with pytest.raises(Crash):
            command(*common, "--out", tmp_path / "parts")
    assert command(*common, "--out", tmp_path / "parts") == 2  # one run is there, and --resume was not said
    assert command(*common, "--resume", "--out", tmp_path / "parts") == 0
    whole, parts = (lines(tmp_path / name / "uci.jsonl") for name in ("whole", "parts"))
    assert [one["bound"] for one in parts] == pytest.approx([one["bound"] for one in whole], rel=1e-5)
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_a_run_that_fails_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("10 steps in a row failed\nand more")

    own_set(tmp_path)
    monkeypatch.setattr(uci.models, "warm_up", lambda: None)
    monkeypatch.setattr(tighter_gp, "fit", fail)
    assert command(*SMALL, "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == "error: uci mine split0 seed0 M5 svgp failed: 10 steps in a row failed\n"
