"""Files of results, and what is recorded beside them."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import runs
from benchmarks.errors import UserError
from tests.benchmarks.support import lines


def test_a_line_cut_off_by_a_crash_is_ignored_and_then_replaced(tmp_path):
    path = tmp_path / "runs.jsonl"
    runs.append_result(path, {"a": 1})
    with open(path, "a") as file:
        file.write('{"a": 2, "b')
    assert runs.read_results(path) == [{"a": 1}]
    runs.append_result(path, {"a": 3, "b": math.nan, "c": [math.inf, 1.0]})
    assert lines(path) == [{"a": 1}, {"a": 3, "b": None, "c": [None, 1.0]}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"runs\.jsonl, line 2"):
        runs.read_results(path)


def test_peak_memory_is_that_since_the_reset():
    device = torch.device("cpu")
    runs.reset_peak_memory(device)
    before = runs.peak_memory_mb(device)
    block = torch.ones(20_000_000)  # 160 MB in float64
    after = runs.peak_memory_mb(device)
    assert after - before > 0.9 * block.numel() * block.element_size() / 1e6 or before > after / 2
    assert after > block.numel() * block.element_size() / 1e6


def test_a_recorded_command_has_no_folders_of_the_machine():
    given = ["uci", "--out", "some/where", "--epochs", "3", "--data-dir=else/where", "--peers-dir", "x", "--resume"]
    assert runs.command(given) == "python -m benchmarks uci --epochs 3 --resume"
