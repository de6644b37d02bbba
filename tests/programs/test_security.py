"""Nothing that is loaded is executed, nothing downloaded is used unchecked, nothing is unpacked outside its folder."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import data
from benchmarks.errors import UserError
from tests.tools.factories import make_gp, make_kernel, make_noise
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit

ROOT = Path(__file__).resolve().parents[2]


class Malicious:
    """Makes a folder where it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


# ---- Checkpoints ------------------------------------------------------------------------------------------------------


def as_pickle(path: Path, content) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def as_torch_file(path: Path, content) -> None:
    torch.save(content, path)


def as_legacy_torch_file(path: Path, content) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


WRITERS = [as_pickle, as_torch_file, as_legacy_torch_file]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("place", ["whole", "inside"])
def test_a_malicious_checkpoint_is_refused_by_fit_and_not_executed(tmp_path, write, place):
    path, target = tmp_path / "run.pt", tmp_path / "made"
    evil = Malicious(target)
    write(path, evil if place == "whole" else {"format": checkpoints.FORMAT, "config": {}, "model": evil})
    content = path.read_bytes()
    x = torch.rand(9, 2)
    model, likelihood = make_gp(x[:3], make_kernel("rbf", 1.0, torch.ones(2))), make_noise(0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"run\.pt is not a readable checkpoint"):
        fit(model, likelihood, x, x[:, 0], steps=2, checkpoint=path, resume=True, progress=False)
    assert not target.exists()
    assert path.read_bytes() == content
    assert all(map(torch.equal, model.parameters(), before))


def test_a_checkpoint_of_fit_holds_nothing_but_tensors_and_plain_values(tmp_path):
    """So that weights_only is enough to read it."""
    path = tmp_path / "run.pt"
    x = torch.rand(9, 2)
    model, likelihood = make_gp(x[:3], make_kernel("rbf", 1.0, torch.ones(2))), make_noise(0.1)
    fit(model, likelihood, x, x[:, 0], steps=2, checkpoint=path, progress=False)
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        program = archive.read(name)
    allowed = ("collections OrderedDict", "torch._utils", "torch ")
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            assert str(argument).startswith(allowed), argument
    assert torch.load(path, weights_only=True)["format"] == checkpoints.FORMAT


# ---- Downloads and archives -------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TIGHTER_GP_DATA", raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def serve(monkeypatch, content: bytes) -> list[str]:
    """A pooch that downloads this, and the addresses it was asked for."""
    asked: list[str] = []

    def retrieve(url, known_hash, fname, path):
        asked.append(url)
        target = Path(path) / fname
        target.write_bytes(content)
        return str(target)

    fake = types.ModuleType("pooch")
    fake.retrieve = retrieve
    fake.get_logger = lambda: types.SimpleNamespace(setLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "pooch", fake)
    return asked


@pytest.mark.parametrize("name", sorted(name for name, file in data.FILES.items() if file.checksum))
def test_no_download_is_used_or_kept_unless_its_hash_is_right(name, monkeypatch, cache):
    asked = serve(monkeypatch, b"something else")
    with pytest.raises(UserError, match=r"damaged"):
        data.locate(name)
    assert asked == [data.FILES[name].url]
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_every_file_is_fetched_over_https_and_has_a_hash():
    for name, file in data.FILES.items():
        assert file.url.startswith("https://"), name
        kind, _, digest = file.checksum.partition(":")
        assert (kind, len(digest)) in {("sha256", 64), ("content", 64), ("git", 40)}, name


def test_a_file_changed_after_its_download_is_not_used(monkeypatch, cache):
    good = b"0,1\n" * 3
    checksum = "sha256:" + hashlib.sha256(good).hexdigest()
    monkeypatch.setitem(data.FILES, "snelson.csv", data.FILES["snelson.csv"]._replace(checksum=checksum))
    serve(monkeypatch, good)
    path = data.locate("snelson.csv")
    assert path.is_relative_to(cache)
    path.write_bytes(good.replace(b"1", b"2"))
    with pytest.raises(UserError, match="is damaged or another version: expected sha256:"):
        data.locate("snelson.csv")


EVIL = ["../evil.txt", "/evil.txt", "a/../../evil.txt", "link/evil.txt"]


def test_members_of_an_archive_that_point_outside_are_never_written(tmp_path, monkeypatch):
    """The archive is read by the names of its six members; nothing is unpacked, not even what is asked for."""
    folder = tmp_path / "in" / "oil_flow"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "3PhData.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        tables = {
            f"Data{code}{kind}.txt": row
            for code in ("Trn", "Vdn", "Tst")
            for kind, row in (("", b"1 2 3\n4 5 6\n"), ("Lbls", b"1 0 0\n0 0 1\n"))
        }
        for name, content in {**dict.fromkeys(EVIL, b"evil"), **tables}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(data, "_verify", lambda path, expected: None)
    loaded = data.load_oil_flow(tmp_path / "in")
    assert loaded["test"][0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["3PhData.tar.gz"]
