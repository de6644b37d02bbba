"""A package that others can depend on: built, installed into an empty environment, imported and trained from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tighter_gp
from tests.tools import versions

ROOT = Path(__file__).resolve().parents[2]

BUILD = """
import sys
import setuptools.build_meta as backend
print(getattr(backend, f"build_{sys.argv[1]}")(sys.argv[2]))
"""
STEP = """
import torch, tighter_gp
x = torch.rand(30, 2)
model = tighter_gp.models.Regression(x, num_inducing=5)
history = tighter_gp.fit(model, model.likelihood, x, x.sum(-1), steps=1)
low, high = tighter_gp.predict_y(model, model.likelihood, x).interval(0.95)
assert history.steps == 1 and bool((low < high).all())
print(tighter_gp.__version__, tighter_gp.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Unpacked source distribution, made from what git would check out."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in files:
        if name.startswith("tighter_gp/") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    archive = folder / run(sys.executable, "-c", BUILD, "sdist", folder, cwd=source).splitlines()[-1]
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    """The wheel, made from the source distribution and nothing else."""
    return sdist.parent / run(sys.executable, "-c", BUILD, "wheel", sdist.parent, cwd=sdist).splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"tighter_gp-{tighter_gp.__version__}-py3-none-any.whl"
    packed = {name for name in names if name.startswith("tighter_gp/")}
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "tighter_gp").rglob("*.py")} | {"tighter_gp/py.typed"}
    assert packed == here
    assert {name.split("/")[0] for name in names} == {"tighter_gp", f"tighter_gp-{tighter_gp.__version__}.dist-info"}
    metadata = zipfile.ZipFile(wheel).read(f"tighter_gp-{tighter_gp.__version__}.dist-info/METADATA").decode()
    for requirement in versions.lowest():
        assert f"Requires-Dist: {requirement.replace('==', '>=')}" in metadata
    assert "# tighter_gp" in metadata


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    place = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path))
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)  # a pure wheel is installed by unpacking it
    # The dependencies are those of this environment, without the checkout that it has installed.
    (place / "dependencies.pth").write_text(
        f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    version, file_name = run(python, "-W", "ignore", "-c", STEP, cwd=tmp_path).split()
    assert version == tighter_gp.__version__
    assert Path(file_name).resolve().is_relative_to(place.resolve())


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {tighter_gp.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {tighter_gp.__version__}" in changelog
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    authors = re.findall(r"family-names: (.*)\n +given-names: (.*)", citation)
    assert len(authors) == 3
    for family, given in authors:
        assert f"{family}, {given}" in readme


def test_lowest_versions_are_named_and_below_those_tested():
    floors = dict(one.split("==") for one in versions.lowest())
    assert floors.keys() == set(versions.DEPENDENCIES)
    pins = dict(one.split("==") for one in versions.tested() if "==" in one)
    number = lambda text: [int(part) for part in re.findall(r"\d+", text)[:3]]
    for name, pin in pins.items():
        assert number(floors[name]) <= number(pin), name
