"""The contributor's page names what exists and its code runs; the reference has a page for every public module."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.variational import CholeskyVariationalDistribution, IndependentMultitaskVariationalStrategy

import benchmarks.__main__ as command_line
import tighter_gp
from tests.docs.test_doctests import PUBLIC
from tests.tools.factories import GP

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "contributing.md").read_text(encoding="utf-8")
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.rst")))
SNIPPETS = {
    title: code
    for title, section in (part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    for code in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
}
DEPARTURES = (DOCS / "theory.md").read_text(encoding="utf-8")
PLACES = re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE + DEPARTURES)


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


@pytest.mark.parametrize("module", ["maths/bounds.py", "maths/solve_gp.py", "gplvm/psi.py"])
def test_every_equation_of_the_package_has_a_row(module):
    equations = {name for name in definitions(file_of(module)) if name.islower() and name.isidentifier()}
    hidden = {name for name in equations if name.startswith("_")} | {"check_bound", "pack_pairs", "unpack_pairs"}
    assert equations - hidden <= {name for path, name in PLACES if path == module}


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table in a section, without its header."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# ---------------------------------------------------------------------------------------------------------------------
# The walk from x to the loss
# ---------------------------------------------------------------------------------------------------------------------

WALK = [row[2].strip("`") for row in rows_of("From x to the loss")]


def code_of(place: str) -> types.CodeType:
    """The code that runs at ``path.py:name``."""
    path, _, name = place.partition(":")
    module = importlib.import_module("tighter_gp." + path.removesuffix(".py").replace("/", "."))
    found = functools.reduce(getattr, name.split("."), module)
    return (found.fget if isinstance(found, property) else found).__code__


def stages_of(run: Callable[[], object]) -> list[str]:
    """The stages of the walk that are entered while ``run()`` runs, in the order of their entry."""
    places, entered = {code_of(place): place for place in WALK}, []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in places:
            entered.append(places[frame.f_code])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


def test_walk_is_short_and_numbered():
    assert [row[0] for row in rows_of("From x to the loss")] == [str(i + 1) for i in range(len(WALK))]
    assert len(WALK) == len(set(WALK)) <= 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", ["one set of points", "two sets of points", "several outputs"])
def test_walk_from_x_to_the_loss_enters_each_stage_once_in_this_order(kind, dtype):
    torch.set_default_dtype(dtype)
    x, num_tasks = torch.rand(13, 2), 3 if kind == "several outputs" else None
    batch_shape = torch.Size([num_tasks] if num_tasks else [])
    q = lambda size: CholeskyVariationalDistribution(size, batch_shape=batch_shape)

    def make(model):
        if kind == "two sets of points":
            return tighter_gp.SolveGPVariationalStrategy(model, x[:4], x[4:7], q(4), q(3))
        strategy = tighter_gp.TighterVariationalStrategy(model, x[:4], q(4))
        return strategy if num_tasks is None else IndependentMultitaskVariationalStrategy(strategy, num_tasks)

    model = GP(make)
    y = torch.randn(13) if num_tasks is None else torch.randn(13, num_tasks)
    likelihood = GaussianLikelihood() if num_tasks is None else MultitaskGaussianLikelihood(num_tasks)
    mll = tighter_gp.TighterELBO(likelihood, model, 13)
    step = lambda: -mll(model(x), y)
    step()  # the first call also sets q(u)
    # Inside a wrapper the terms of the points are not one operation.
    assert stages_of(step) == [stage for stage in WALK if num_tasks is None or "gaussian_terms" not in stage]


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
