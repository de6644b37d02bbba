"""Every notebook runs, and its .ipynb is what its script makes. Reads .ipynb as JSON, so nothing of Jupyter is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"

NAMES = [
    "01_regression",
    "02_large_scale",
    "03_classification",
    "04_solve_gp",
    "05_gplvm",
    "06_tightness",
    "07_botorch",
]
MAX_BYTES = 300 * 1024


def split(text: str) -> list[tuple[str, str]]:
    """Kind and source of each cell of a percent script."""
    cells: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("# %%"):
            cells.append(("markdown" if "[markdown]" in line else "code", []))
        else:
            assert cells, f"before the first cell: {line!r}"
            cells[-1][1].append(line)
    return [(kind, "\n".join(lines).strip("\n")) for kind, lines in cells]


def notebook(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def source(cell: dict) -> str:
    text = cell["source"]
    return (text if isinstance(text, str) else "".join(text)).strip("\n")


def outputs(name: str) -> list[dict]:
    return [output for cell in notebook(name)["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path):
    # Coverage is measured by the tests proper, not by the notebooks, which it would slow.
    environment = {
        name: os.environ[name] for name in os.environ if not name.startswith(("TIGHTER_GP_DATA", "COVERAGE"))
    }
    environment |= {"TIGHTER_GP_QUICK": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    # In a folder of its own: a notebook reads and leaves no files.
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_ipynb_has_the_cells_of_its_script(name):
    script = split((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    cells = notebook(name)["cells"]
    hint = f"run `python notebooks/build.py {name}`"
    assert [cell["cell_type"] for cell in cells] == [kind for kind, _ in script], hint
    for cell, (kind, text) in zip(cells, script, strict=True):
        if kind == "code":
            assert source(cell) == text, hint
        else:
            lines = text.strip('"\n').splitlines() if text.startswith('"""') else text.splitlines()
            plain = [line.removeprefix("#").removeprefix(" ") if text.startswith("#") else line for line in lines]
            assert source(cell).splitlines() == plain, hint


@pytest.mark.parametrize("name", NAMES)
def test_ipynb_was_executed_in_order_without_errors_and_warnings(name):
    counts = [cell["execution_count"] for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    kinds = [output["output_type"] for output in outputs(name)]
    assert "error" not in kinds
    assert "stream" in kinds
    assert "stderr" not in [output.get("name") for output in outputs(name)]
    assert any("image/png" in output.get("data", {}) for output in outputs(name))


@pytest.mark.parametrize("name", NAMES)
def test_ipynb_is_small_and_says_nothing_of_the_machine(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MAX_BYTES
    text = path.read_text(encoding="utf-8")
    for trace in (str(ROOT), str(Path.home()) + "/", "site-packages", "/tmp/"):
        assert trace not in text, trace
