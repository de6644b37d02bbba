"""The README: its tables come from the published results, its program runs, its names and links exist."""

from __future__ import annotations

import functools
import re

import gpytorch
import numpy as np
import torch

import tighter_gp
from benchmarks import readme

TEXT = readme.README.read_text(encoding="utf-8")


def test_tables_are_made_from_the_published_results():
    assert readme.updated(TEXT) == TEXT


def test_names_exist():
    names = set(re.findall(r"\b((?:tighter_gp|bounds|gpytorch)(?:\.\w+)+)\(?", TEXT))
    assert len(names) > 10
    for name in names:
        module, *rest = name.split(".")
        start = {"tighter_gp": tighter_gp, "bounds": tighter_gp.bounds, "gpytorch": gpytorch}[module]
        functools.reduce(getattr, rest, start)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 5
    for link in links:
        assert link.startswith("https://") or (readme.README.parent / link).exists(), link


def test_tests_of_the_fault_table_exist():
    rows = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    for path, name in rows:
        source = (readme.README.parent / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"
    assert len(rows) > 10


def test_the_whole_program_runs(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 2))
    columns = np.column_stack([x, np.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * rng.standard_normal(400)])
    np.savetxt(tmp_path / "data.csv", columns, delimiter=",", header="a,b,y")
    monkeypatch.chdir(tmp_path)
    section = TEXT.split("## A whole program")[1]
    program = section.split("```python\n")[1].split("```")[0]
    exec(compile(program.replace("epochs=30", "epochs=3"), "README.md", "exec"), {})
    assert re.search(r"RMSE 0\.\d+\nbound per datum -?\d", capsys.readouterr().out)
    assert (tmp_path / "run.pt").exists()
