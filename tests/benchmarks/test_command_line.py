"""``python -m benchmarks``: bad input ends in one line, and leaves nothing behind."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.__main__ as command_line
import tighter_gp
from benchmarks import models
from tests.benchmarks.support import (
    EXPERIMENTS,
    SMALL,
    own_set,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("uci", "--datasets", "kin41k"), "unknown dataset 'kin41k'; choose from wine, "),
        (("uci", "--datasets", "../mine"), "unknown dataset '../mine'"),
        (("uci", "--datasets", "mine", "--methods", "vfe"), "unknown method 'vfe'; choose from svgp, t-svgp"),
        (("uci", "--datasets", "mine", "--splits", "10"), "no split 10"),
        (
            ("uci", "--datasets", "mine", "--num-inducing", "55"),
            "55 inducing points are more than the 54 training points",
        ),
        (("uci", "--datasets", "mine", "--num-inducing", "0"), "--num-inducing must be positive"),
        (("uci", "--datasets", "mine", "mine"), "--datasets names something twice"),
        (("uci", "--datasets", "mine", "--epochs", "-1"), "--epochs must be positive"),
        (("uci", "--datasets", "mine", "--device", "toaster"), "--device toaster"),
        (("uci", "--datasets", "mine", "--device", "meta"), "--device meta"),
        (("uci", "--datasets", "mine", "--seed", "-1"), "--seed must lie between 0 and 2**31 - 1; got -1"),
        (("mnist", "--splits", "1"), "--splits is not for this experiment: there is one split, 0"),
        (("prediction", "--lr", "0.1"), "--lr is not for this experiment: it has no meaning here"),
        (("uci", "--datasets", "wine"), "uci/wine/data.csv.gz is not in"),
        (("mnist",), "mnist/train-images-idx3-ubyte.gz is not in"),
        (("mnist", "--datasets", "letters"), "unknown dataset 'letters'; choose from mnist, digits"),
        (("mnist", "--datasets", "digits", "--num-inducing", "1501"), "more than the 1500 training points"),
        (("snelson",), "snelson.csv is not in"),
        (("snelson", "--datasets", "toy", "--num-inducing", "201"), "more than the 200 training points"),
        (("prediction", "--methods", "guess"), "unknown method 'guess'"),
        (("report", "nowhere"), "nowhere does not exist"),
    ],
)
def test_bad_input_gives_one_line_exit_code_2_and_leaves_nothing(
    cli, tmp_path, capsys, monkeypatch, arguments, message
):
    own_set(tmp_path / "data")
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "pooch", None)
    extra = () if arguments[0] == "report" else ("--data-dir", tmp_path / "data")
    assert cli(*arguments, *extra, "--out", out) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert not out.exists() or not [path for path in out.rglob("*") if path.is_file()]


def test_nans_and_damage_are_found_before_anything_is_run(cli, tmp_path, capsys):
    own_set(tmp_path, name="good")
    target = own_set(tmp_path, name="bad")
    np.savetxt(target / "data.csv.gz", np.full((60, 3), np.nan), delimiter=",")
    out = tmp_path / "out"
    arguments = ("--datasets", "good", "bad", "--data-dir", tmp_path, "--out", out)
    assert cli("uci", *arguments, "--num-inducing", "5", "--epochs", "1") == 2
    assert "has NaN or infinite values in 60 of 60 rows" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused(cli, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli("uci", "--smoke", "--out", tmp_path / "file") == 2
    assert cli("uci", "--smoke", "--out", tmp_path / "file" / "below") == 2
    assert capsys.readouterr().err.count("cannot make this folder") == 2


@pytest.mark.parametrize("arguments", [("--epochs", "many"), ("--dtype", "float16"), ("--nonsense",)])
def test_flags_that_cannot_be_parsed_give_one_line(cli, capsys, arguments):
    with pytest.raises(SystemExit) as info:
        cli("uci", *arguments)
    assert info.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert len(text.splitlines()) == 1


def test_the_one_split_may_be_named(cli, tmp_path):
    assert cli("snelson", "--smoke", "--splits", "0", "--methods", "sgpr", "--out", tmp_path) == 0


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_place_that_takes_no_files_is_refused_before_anything_is_run(cli, tmp_path, capsys, monkeypatch, below):
    own_set(tmp_path)
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    make = tempfile.TemporaryFile

    def refuse(*args, dir=None, **kwargs):
        if Path(dir) == tmp_path / "out" / below:
            raise PermissionError(13, "Permission denied")
        return make(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert cli(*SMALL, "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert "cannot write there (Permission denied)" in capsys.readouterr().err


def test_a_run_that_fails_is_named_in_one_line(cli, tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("10 steps in a row failed\nand more")

    own_set(tmp_path)
    monkeypatch.setattr(models, "warm_up", lambda: None)
    monkeypatch.setattr(tighter_gp, "fit", fail)
    assert cli(*SMALL, "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == "error: uci mine split0 seed0 M5 svgp failed: 10 steps in a row failed\n"
    assert not (tmp_path / "out" / "uci.jsonl").exists()


def test_a_data_folder_that_is_none_is_refused(cli, tmp_path, capsys):
    assert cli("uci", "--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out") == 2
    assert "--data-dir is" in capsys.readouterr().err


def test_every_experiment_documents_its_flags():
    for name in EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{name}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        text = parser.format_help()
        for flag in (
            "--methods",
            "--datasets",
            "--splits",
            "--num-inducing",
            "--epochs",
            "--batch-size",
            "--lr",
            "--device",
            "--dtype",
            "--seed",
            "--smoke",
            "--resume",
            "--out",
        ):
            assert flag in text
        assert module.__doc__


def test_without_the_extras_the_experiment_says_what_to_install(monkeypatch, capsys):
    for name in ("matplotlib", "tqdm"):
        with monkeypatch.context() as patched:
            for module in [module for module in sys.modules if module.split(".")[0] in ("benchmarks", name)]:
                patched.delitem(sys.modules, module)
            patched.setitem(sys.modules, name, None)
            assert command_line.main(["demo", "--smoke"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"error: demo needs {name}: pip install -e '.[benchmarks]'\n"


def test_a_module_of_ours_that_is_missing_is_no_matter_of_extras(monkeypatch):
    monkeypatch.setattr(command_line, "EXPERIMENTS", ("nowhere",))
    with pytest.raises(ModuleNotFoundError, match=r"benchmarks\.nowhere"):
        command_line.main(["nowhere"])


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (("uci", "--smoke"), r"finished runs, .* are kept in .*out; the same command with --resume continues"),
        (("demo", "--smoke"), "nothing was written"),
        (("speed", "--smoke"), r"what was measured is kept in .*out/speed\.jsonl"),
    ],
)
def test_an_interrupt_ends_in_one_line_that_says_what_is_kept(monkeypatch, tmp_path, capsys, arguments, kept):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for target in ("benchmarks.uci.train", "benchmarks.demo.run_methods", "benchmarks.speed.time_grid_point"):
        monkeypatch.setattr(target, interrupt)
    torch.set_default_dtype(torch.float32)
    assert command_line.main([*arguments, "--out", str(tmp_path / "out")]) == 130
    text = capsys.readouterr().err
    assert re.fullmatch(rf"interrupted: {kept}.*\n", text), text
