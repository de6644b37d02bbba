"""The README: short, its program runs, its names and links exist. Its tables are tested with those of the guide."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch

import tighter_gp
from benchmarks import readme

TEXT = readme.README.read_text(encoding="utf-8")
PROGRAM, LATER = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def write_data(folder: Path) -> np.ndarray:
    """A table far from standardised: inputs, and a target with a spread of about 40."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 2)) * [1, 100]
    table = np.column_stack([x, 50 * np.sin(6 * x[:, 0]) + x[:, 1] + 5 * rng.standard_normal(400) + 300])
    np.savetxt(folder / "data.csv", table, delimiter=",", header="a,b,y")
    return table


def test_it_is_short():
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    words = [word for line in prose.splitlines() if not line.startswith("|") for word in line.split()]
    assert len(words) <= 900
    assert len(TEXT.splitlines()) < 200


def test_names_exist():
    names = set(re.findall(r"\b((?:tighter_gp|gpytorch)(?:\.\w+)+)\(?", TEXT))
    assert len(names) > 10
    for name in names:
        module, *rest = name.split(".")
        functools.reduce(getattr, rest, {"tighter_gp": tighter_gp, "gpytorch": gpytorch}[module])
    section = TEXT.split("## Which class for which job")[1].split("\n## ")[0]
    for row in section.splitlines():
        if row.startswith("| ") and not row.startswith(("| ---", "| job")):
            for name in re.findall(r"`([A-Za-z_]+)`", row.split("|")[2]):
                assert hasattr(tighter_gp, name), name


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 5
    for link in links:
        assert link.startswith("https://") or (readme.ROOT / link).exists(), link


def test_the_whole_program_runs(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    table = write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(compile(PROGRAM, "README.md", "exec"), found)
    match = re.search(
        r"NLPD (-?\d+\.\d+), RMSE (\d+\.\d+), within the 95 % intervals: (\d\.\d+)", capsys.readouterr().out
    )
    # Noise with a standard deviation of 5 has an NLPD of 3.03 in these units.
    assert 2.7 < float(match[1]) < 4.0
    assert 4.0 < float(match[2]) < 10.0
    assert float(match[3]) > 0.8
    # The statistics are those of the training rows.
    order = np.random.default_rng(0).permutation(400)
    assert found["centre"].numpy() == pytest.approx(table[order[80:]].mean(0), rel=1e-4)

    new = {"torch": torch, "tighter_gp": tighter_gp, "new_x": torch.tensor(table[order[:40], :-1], dtype=torch.float32)}
    exec(compile(LATER, "README.md", "exec"), new)
    torch.testing.assert_close(new["low"], found["low"], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(new["high"], found["high"], rtol=1e-4, atol=1e-3)


def test_the_program_run_again_resumes_with_the_same_rows(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    program = PROGRAM.replace('"epochs": 30', '"epochs": 2').replace("num_inducing=256", "num_inducing=16")
    for _ in range(2):
        exec(compile(program, "README.md", "exec"), {})
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("NLPD"))
    assert first == second
