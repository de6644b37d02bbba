"""The guide: every piece of code runs, page by page, every table is made from results, every name and link exists."""

from __future__ import annotations

import functools
import re

import gpytorch
import pytest
import torch

import tighter_gp
from benchmarks import readme

DOCS = readme.DOCS
PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")) if path.stem != "contributing"
}
GUIDE = {
    "recipes",
    "predictions",
    "classification",
    "outputs",
    "collapsed",
    "latent",
    "botorch",
    "saving",
    "large",
    "gpus",
    "when",
    "results",
    "claims",
    "speed",
    "faults",
    "theory",
}


def code_of(text: str) -> str:
    """All code of a page, each line where it stands on the page."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def run(name: str, namespace: dict[str, object]) -> dict[str, object]:
    exec(compile(code_of(PAGES[name]), str(DOCS / f"{name}.md"), "exec"), namespace)
    return namespace


@pytest.fixture
def _page(tmp_path, monkeypatch):
    """What a reader has who copies a page: float32, an empty folder, no display."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with torch.random.fork_rng(devices=[]), gpytorch.settings.fast_computations():
        yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.usefixtures("_page")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.onnx and BoTorch
@pytest.mark.filterwarnings("ignore:Using an (input|outcome) transform")  # BoTorch's own
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx's own
@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "```python\n" in text and name != "gpus"])
def test_code_of_a_page_runs(name, tmp_path):
    run(name, {"__name__": "page"})
    for drawn in re.findall(r'savefig\("(\w+\.png)"\)', PAGES[name]):
        assert (tmp_path / drawn).stat().st_size > 5000
        assert f"_static/{drawn})" in PAGES[name]
        assert (DOCS / "_static" / drawn).exists()


@pytest.mark.usefixtures("_page")
def test_code_of_the_page_on_gpus_runs_with_a_model_and_data():
    train_x = torch.rand(30, 2)
    model = tighter_gp.models.Regression(train_x, num_inducing=5)
    names = {"model": model, "likelihood": model.likelihood, "train_x": train_x, "train_y": train_x.sum(-1)}
    namespace = run("gpus", {"torch": torch, "gpytorch": gpytorch, "tighter_gp": tighter_gp, **names})
    assert namespace["history"].steps == 3


def test_every_subject_has_a_page_that_the_map_leads_to():
    index = PAGES["index"]
    linked, listed = set(re.findall(r"\]\((\w+)\.md\)", index)), set(re.findall(r"^([a-z]+)$", index, re.MULTILINE))
    assert PAGES.keys() - {"index", "notebooks"} == GUIDE
    assert linked >= GUIDE
    assert listed >= GUIDE


@pytest.mark.parametrize("page", readme.pages(), ids=lambda path: path.stem)
def test_tables_are_made_from_the_published_results(page):
    text = page.read_text(encoding="utf-8")
    assert readme.updated(text) == text


def test_every_block_stands_on_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in readme.pages())
    assert set(re.findall(r"<!-- ([\w-]+):begin -->", text)) == set(readme.BLOCKS)


@pytest.mark.parametrize("name", PAGES)
def test_names_and_links_exist(name):
    text = PAGES[name]
    for dotted in set(re.findall(r"\b((?:tighter_gp|gpytorch|torch)(?:\.[A-Za-z_]\w*)+)", text)):
        module, *rest = dotted.split(".")
        if rest[-1] in ("npy", "py") or (module, rest[0]) == ("torch", "onnx"):
            continue
        start = {"tighter_gp": tighter_gp, "gpytorch": gpytorch, "torch": torch}[module]
        functools.reduce(getattr, rest, start)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        target = DOCS / link.replace("notebooks/", "../notebooks/")
        assert link.startswith("https://") or target.exists(), link


def test_tests_of_the_fault_table_exist():
    rows = re.findall(r"^\|.*`(tests/[\w/]+\.py)::(\w+)` \|$", PAGES["faults"], re.MULTILINE)
    for path, name in rows:
        source = (readme.ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"
    assert len(rows) == len(re.findall(r"^\| .*tests/", PAGES["faults"], re.MULTILINE)) > 25


def test_pages_are_short():
    for name, text in PAGES.items():
        prose = re.sub(r"```.*?```|<!-- .*? -->", "", text, flags=re.DOTALL)
        words = [word for line in prose.splitlines() if not line.startswith("|") for word in line.split()]
        assert len(words) < (1300 if name == "gpus" else 900), f"{name}: {len(words)} words"


def test_pictures_of_the_guide_are_drawn_by_it():
    drawn = set(re.findall(r'savefig\("(\w+\.png)"\)', "\n".join(PAGES.values())))
    assert drawn == {path.name for path in (DOCS / "_static").glob("*.png")}
