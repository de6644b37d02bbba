"""Quality against time."""

from __future__ import annotations

import json

import torch

from benchmarks.__main__ import main
from benchmarks.quality import Score, table


def test_smoke_run_traces_every_method(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    assert main(["quality", "--smoke", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("quality.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["method"] for line in lines] == ["gpytorch tuned", "gpytorch ngd", "t-svgp", "t-sgpr"]
    for line in lines:
        seconds = [point[0] for point in line["trace"]]
        assert seconds == sorted(seconds)
        assert line["nlpd"] == line["trace"][-1][1]
    assert "t-svgp: time to this NLPD" in capsys.readouterr().out


def test_the_table_has_the_first_time_at_which_a_peer_is_reached():
    found = {
        "gpytorch tuned": [Score(5.0, 0.5, 0.3), Score(10.0, 0.2, 0.2)],
        "t-svgp": [Score(1.0, 0.4, 0.3), Score(2.0, 0.1, 0.2), Score(3.0, 0.3, 0.2)],
        "svgp": [Score(1.0, 0.9, 0.3)],
    }
    rows = table(found).splitlines()[2:]
    assert rows[0].split("|")[5:7] == [" 0.20 ", " never "]
    assert rows[1].split("|")[5:7] == ["  ", " never "]
