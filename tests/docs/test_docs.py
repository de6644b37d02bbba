"""The code of README and guide runs, names and links exist, the map of contributing.md is right, pages are short."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import textwrap
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import pytest
import torch

import tighter_gp

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
GUIDE = {name: text for name, text in PAGES.items() if name != "README"}
MAP = PAGES["contributing"]
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.rst")))


def folder_of(name: str) -> Path:
    return ROOT if name == "README" else DOCS


# ---------------------------------------------------------------------------------------------------------------------
# Code
# ---------------------------------------------------------------------------------------------------------------------


def code_of(text: str) -> str:
    """All Python of a page, each line where it stands on the page."""
    lines, block, begun = text.splitlines(), [], False
    shown = [""] * len(lines)
    for number, line in enumerate(lines):
        if line.strip().startswith("```"):
            if begun:
                shown[number - len(block) : number] = textwrap.dedent("\n".join(block)).split("\n") if block else []
            begun, block = line.strip() == "```python", []
        elif begun:
            block.append(line)
    return "\n".join(shown)


@pytest.fixture
def _page(tmp_path, monkeypatch):
    """What a reader has who copies a page: float32, an empty folder, no display."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    rows = torch.rand(300, 3).numpy()
    (tmp_path / "data.csv").write_text("a,b,y\n" + "".join(f"{a},{100 * b},{300 + 50 * a + c}\n" for a, b, c in rows))
    with torch.random.fork_rng(devices=[]), gpytorch.settings.fast_computations():
        yield
    plt.close("all")


@pytest.mark.usefixtures("_page")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.onnx and BoTorch
@pytest.mark.filterwarnings("ignore:Using an (input|outcome) transform")  # BoTorch's own
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx's own
@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "```python\n" in text])
def test_code_of_a_page_runs(name, tmp_path):
    names: dict[str, object] = {"__name__": "page"}
    if name == "gpus":  # its pieces take a model and data for granted
        x = torch.rand(30, 2)
        model = tighter_gp.models.Regression(x, num_inducing=5)
        names |= {"torch": torch, "tighter_gp": tighter_gp, "model": model, "likelihood": model.likelihood}
        names |= {"train_x": x, "train_y": x.sum(-1)}
    elif name == "README":  # new rows of a later program
        names["new_x"] = torch.rand(5, 2)
    exec(compile(code_of(PAGES[name]), f"{name}.md", "exec"), names)
    for drawn in re.findall(r'savefig\("(\w+\.png)"', PAGES[name]):
        assert (tmp_path / drawn).stat().st_size > 5000
        assert f"_static/{drawn})" in PAGES[name]


def test_pictures_are_drawn_by_the_guide_and_small():
    drawn = set(re.findall(r'savefig\("(\w+\.png)"', "\n".join(PAGES.values())))
    found = {path.name: path.stat().st_size for path in (DOCS / "_static").glob("*.png")}
    assert drawn == set(found)
    assert max(found.values()) < 60_000


# ---------------------------------------------------------------------------------------------------------------------
# Names, links, lengths
# ---------------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_names_and_links_exist(name):
    text = PAGES[name]
    modules = {"tighter_gp": tighter_gp, "gpytorch": gpytorch, "torch": torch}
    for dotted in set(re.findall(r"\b((?:tighter_gp|gpytorch|torch)(?:\.[A-Za-z_]\w*)+)", text)):
        module, *rest = dotted.split(".")
        if rest[-1] in ("npy", "py", "pt") or (module, rest[0]) == ("torch", "onnx"):
            continue
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            functools.reduce(getattr, rest, modules[module])
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        target = folder_of(name) / path.replace("notebooks/", "../notebooks/" if name != "README" else "notebooks/")
        assert not path or target.exists(), link
        if anchor:
            assert anchor in anchors(text if not path else target.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_map_of_the_guide():
    index = PAGES["index"]
    listed = set(re.findall(r"^([a-z]+)$", index, re.MULTILINE))
    assert set(GUIDE) - {"index"} <= listed
    assert set(GUIDE) - {"index"} <= set(re.findall(r"\]\((\w+)\.md[#\w-]*\)", index))


def test_pages_are_short():
    """Words, without the lines of tables and code fences."""
    words = {name: len([word for word in text.split() if word.strip("|-:`")]) for name, text in GUIDE.items()}
    assert sum(words.values()) <= 13_000
    limits = {"evidence": 3000, "contributing": 1200, "recipes": 1500, "gpus": 900, "theory": 1300}
    for name, count in words.items():
        assert count <= limits.get(name, 700), f"{name}: {count} words"


def test_pages_name_no_place_outside_the_repository():
    for path in [*DOCS.glob("*.md"), *DOCS.glob("*.py"), *(DOCS / "api").glob("*")]:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"(?:\.\./)+[\w./]*", text):
            assert (path.parent / target).resolve().is_relative_to(ROOT), f"{path}: {target}"
            assert (path.parent / target).exists(), f"{path}: {target}"
        assert not re.search(r"/(work|home|tmp)/", text), path


# ---------------------------------------------------------------------------------------------------------------------
# The map of contributing.md
# ---------------------------------------------------------------------------------------------------------------------

PLACES = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", MAP + PAGES["theory"])))


def test_places_exist():
    assert len(PLACES) > 25
    for path, name in PLACES:
        source = (ROOT / "tighter_gp" / path).read_text(encoding="utf-8")
        found = set()
        for node in ast.parse(source).body:
            found.add(getattr(node, "name", None))
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
        assert name in found, f"{path} has no {name}"


def walk() -> list[str]:
    """The places of the table of stages, in order."""
    section = MAP.partition("## The walk of a step\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \|.*\| `([\w/]+\.py:[\w.]+)` \|$", section, re.MULTILINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_step_walks_as_the_table_says(dtype):
    torch.set_default_dtype(dtype)
    codes = {}
    for place in walk():
        path, _, name = place.partition(":")
        module = importlib.import_module("tighter_gp." + path.removesuffix(".py").replace("/", "."))
        codes[functools.reduce(getattr, name.split("."), module).__code__] = place
    assert len(codes) == 7
    x = torch.rand(13, 2)
    model = tighter_gp.models.Regression(x, num_inducing=4)
    mll = tighter_gp.TighterELBO(model.likelihood, model, num_data=13)
    step = lambda: -mll(model(x), torch.zeros(13))
    step()  # the first call also sets q(u)
    entered: list[str] = []

    def note(frame, event, _):
        if event == "call" and codes.get(frame.f_code) not in (None, *entered):
            entered.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert entered == walk()


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


def test_reference_names_what_exists_and_all_that_is_public():
    named = re.findall(r"^\.\. auto(?:class|function|module):: ([\w.]+)$", REFERENCE, re.MULTILINE)
    for dotted in named:
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            module, _, name = dotted.rpartition(".")
            assert hasattr(importlib.import_module(module), name), dotted
    for name in tighter_gp.__all__:
        assert any(dotted.startswith(f"tighter_gp.{name}") for dotted in named), name


def test_reference_lists_all_its_pages():
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in (DOCS / "api").glob("*.rst"))
    assert sorted(re.findall(r"\]\((\w+)\.rst\)", index)) == pages
    assert sorted(index.partition(":hidden:")[2].strip("`\n ").split()) == pages
