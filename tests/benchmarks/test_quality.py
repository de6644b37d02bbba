"""Quality against time."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main


def test_smoke_run_traces_every_method(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    assert main(["quality", "--smoke", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("quality.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["method"] for line in lines] == ["gpytorch tuned", "gpytorch ngd", *3 * ["t-svgp"], "t-sgpr"]
    for line in lines:
        seconds = [point[0] for point in line["trace"]]
        assert seconds == sorted(seconds)
        assert line["nlpd"] == line["trace"][-1][1]
    assert "T-SVGP (2 epochs) is there after" in capsys.readouterr().out


@pytest.fixture
def peers(tmp_path):
    """An environment whose python prints what a peer's script would, or fails."""
    folder = tmp_path / "peers" / "gpflow" / "bin"
    folder.mkdir(parents=True)

    def write(program):
        (folder / "python").write_text(f"#!/bin/sh\n{program}\n")
        (folder / "python").chmod(0o755)
        return str(tmp_path / "peers")

    return write


def smoke(tmp_path, peers):
    flags = ["--methods", "gpflow ngd", "--peers-dir", peers, "--out", str(tmp_path / "out")]
    return main(["quality", "--smoke", *flags])


def test_a_peer_runs_in_its_own_environment_with_the_same_data(tmp_path, peers):
    program = 'echo noise; echo "[1.5, 0.25, 0.5]"; echo "[$3, 0.125, 0.25]"; test -s "$2"'
    assert smoke(tmp_path, peers(program)) == 0
    (line,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("quality.jsonl"))
    assert line["trace"] == [[1.5, 0.25, 0.5], [2, 0.125, 0.25]]  # the second number is the budget in epochs
    assert line["nlpd"] == 0.125


@pytest.mark.parametrize("program", ["echo broken >&2; exit 1", "exit 0"])
def test_a_peer_that_fails_is_named_in_one_line(tmp_path, peers, capsys, program):
    assert smoke(tmp_path, peers(program)) == 2
    assert "gpflow failed: " in capsys.readouterr().err


def test_a_peer_that_was_asked_for_must_be_installed(tmp_path, capsys):
    assert smoke(tmp_path, str(tmp_path / "nowhere")) == 2
    assert "run `make peers`" in capsys.readouterr().err
