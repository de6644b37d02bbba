"""The contributor's page names what exists and its code runs; the reference has a page for every public module."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import itertools
import json
import re
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
import tighter_gp
from tests.docs.test_doctests import PUBLIC
from tests.test_architecture import LAYERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "contributing.md").read_text(encoding="utf-8")
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.rst")))
SNIPPETS = {
    title: code
    for title, section in (part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    for code in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
}


def _dataflow() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("dataflow", DOCS / "dataflow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURE = _dataflow()
BOXES = [box for column in PICTURE.COLUMNS for box in column.boxes]
PLACES = re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)


# ---------------------------------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def definitions(path: Path) -> set[str]:
    """Functions and classes of a file, methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def file_of(path: str) -> Path:
    return ROOT / path if path.startswith("tests/") else ROOT / "tighter_gp" / path


@pytest.mark.parametrize(("path", "name"), sorted(set(PLACES)))
def test_place_of_an_equation_exists(path, name):
    assert file_of(path).is_file(), path
    assert name in definitions(file_of(path)), f"{path} has no {name}"


def test_no_place_escapes_the_check():
    """A cell of the last column holds places and nothing else."""
    section = PAGE.partition("## Where each equation lives")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    places = [row.rstrip("| ").rpartition("| ")[2] for row in rows if not row.endswith("| where |")]
    assert len(places) > 50
    for cell in places:
        assert re.fullmatch(r"`[\w/]+\.py:[\w.]+`(, `[\w/]+\.py:[\w.]+`)*", cell), cell


@pytest.mark.parametrize("module", ["bounds.py", "jaakkola.py", "gplvm/psi.py"])
def test_every_equation_of_the_package_has_a_row(module):
    equations = {name for name in definitions(file_of(module)) if name.islower() and name.isidentifier()}
    hidden = {name for name in equations if name.startswith("_")} | {"pack_pairs", "unpack_pairs"}
    assert equations - hidden <= {name for path, name in PLACES if path == module}


@pytest.mark.parametrize("box", BOXES, ids=lambda box: box.text[0])
def test_box_of_the_picture_names_what_exists_and_holds_its_text(box):
    path, _, name = box.where.partition(":")
    assert not path or name in definitions(ROOT / "tighter_gp" / path), box.where
    text, code = PICTURE.lines_of(box)
    room = PICTURE.WIDTH - 8
    assert all(len(line) * PICTURE.TEXT_WIDTH <= room for line in text)
    assert all(len(line) * PICTURE.CODE_WIDTH <= room for line in code)


def test_picture_is_well_formed():
    picture = ElementTree.fromstring(PICTURE.svg())
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {column.title for column in PICTURE.COLUMNS} <= set(words)


def test_layers_are_those_of_the_architecture():
    section = PAGE.partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(LAYERS) + 1))
    assert tuple(tuple(re.findall(r"`(\w+)`", names)) for _, names in rows) == LAYERS


# ---------------------------------------------------------------------------------------------------------------------
# Code
# ---------------------------------------------------------------------------------------------------------------------


def test_snippets_are_found():
    assert list(SNIPPETS) == ["Add a conditional", "Add a bound", "Add an experiment"]
    assert PAGE.count("```python\n") == len(SNIPPETS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("title", ["Add a conditional", "Add a bound"])
def test_snippet_runs(title, dtype):
    torch.set_default_dtype(dtype)
    exec(compile(SNIPPETS[title], f"<{title}>", "exec"), {"__name__": "snippet"})


def test_snippet_of_an_experiment_is_an_experiment(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    path = tmp_path / "growth.py"
    path.write_text(SNIPPETS["Add an experiment"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("benchmarks.growth", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "benchmarks.growth", module)
    monkeypatch.setattr(command_line, "EXPERIMENTS", ("growth",))
    assert command_line.main(["growth", "--smoke", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "smoke" / "growth.jsonl").read_text(encoding="utf-8").splitlines()
    results = {(run["method"], run["num_inducing"]): run["bound"] for run in map(json.loads, lines)}
    assert len(results) == 4
    for few, many in itertools.pairwise(module.SMOKE["num_inducing"]):
        assert results["titsias", few] < results["tighter", few]
        assert results["titsias", few] < results["titsias", many]


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_in_the_reference(name):
    if re.search(rf"^\.\. auto(class|function):: {re.escape(name)}$", REFERENCE, re.MULTILINE):
        return
    module = name.rpartition(".")[0]
    page = re.search(rf"^\.\. automodule:: {re.escape(module)}\n((?:   :.*\n?)*)", REFERENCE, re.MULTILINE)
    assert page, f"no page has {name}"
    assert ":members:\n" in page[1]
    assert name.rpartition(".")[2] not in page[1].partition(":exclude-members:")[2]


@pytest.mark.parametrize(
    "module", [module.__name__ for module in vars(tighter_gp).values() if inspect.ismodule(module)]
)
def test_public_module_has_a_page(module):
    if module.rpartition(".")[2] in tighter_gp.__all__:
        assert f".. automodule:: {module}\n" in REFERENCE


def test_reference_lists_all_its_pages():
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in (DOCS / "api").glob("*.rst"))
    assert sorted(re.findall(r"\]\((\w+)\.rst\)", index)) == pages
    assert sorted(index.partition(":hidden:")[2].strip("`\n ").split()) == pages


def test_pages_name_no_place_outside_the_repository():
    for path in [*DOCS.glob("*.md"), *DOCS.glob("*.py"), *(DOCS / "api").glob("*")]:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"(?:\.\./)+[\w./]*", text):
            assert (path.parent / target).resolve().is_relative_to(ROOT), f"{path}: {target}"
            assert (path.parent / target).exists(), f"{path}: {target}"
        assert not re.search(r"/(work|home|tmp)/", text), path
