"""Data sets: downloads that are checked, files that are damaged, sets of one's own."""

from __future__ import annotations

import gzip
import shutil
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import data
from benchmarks.errors import UserError
from benchmarks.registry import FILES, PAPER, PARTS, SHAPES
from tests.benchmarks.support import SHARED, needs_data, own_set


def test_every_registered_set_has_its_files():
    assert {*PAPER, "wine", "solar", "pumadyn32nm", "elevators", "bike", "pol"} <= set(SHAPES)
    for name in SHAPES:
        for part in (*PARTS.get(name, ("data.csv.gz",)), "test_mask.csv.gz"):
            assert f"uci/{name}/{part}" in FILES


@needs_data
@pytest.mark.parametrize("damage", ["corrupt", "truncated"])
def test_a_damaged_file_is_named_with_its_checksum(tmp_path, damage):
    target = tmp_path / "uci" / "wine"
    shutil.copytree(SHARED / "uci" / "wine", target, copy_function=shutil.copyfile)
    path = target / "data.csv.gz"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content if damage == "corrupt" else content[:1000])
    with pytest.raises(UserError, match=rf"{path}.*expected sha256:e2ca3346651d.*got sha256:"):
        data.load_regression("wine", data_dir=tmp_path)


def garbled(path: Path) -> None:
    """A gzipped file with a hole in the middle, which zlib itself stumbles over."""
    content = bytearray(gzip.compress(str(np.random.RandomState(0).rand(1000).tolist()).encode()))
    content[1000:3000] = bytes(2000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(zlib.error):
        gzip.decompress(path.read_bytes())


def test_a_garbled_file_gives_a_clear_message(tmp_path):
    garbled(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is damaged .*expected content:ba891046"):
        data.load_mnist(tmp_path)
    with pytest.raises(UserError, match="is not a gzipped IDX file"):
        data._read_idx(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    target = own_set(tmp_path)
    garbled(target / "data.csv.gz")
    with pytest.raises(UserError, match=r"cannot read .*mine/data.csv.gz"):
        data.load_regression("mine", data_dir=tmp_path)
    data._uci.cache_clear()
    (target / "data.csv.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"mine/data.csv.gz is empty"):
        data.load_regression("mine", data_dir=tmp_path)


@needs_data
def test_a_registered_set_is_standardised_with_the_training_rows_alone():
    split = data.load_regression("wine", 3, data_dir=SHARED)
    assert (len(split.train_y), len(split.test_y), split.train_x.size(-1)) == (1439, 160, 11)
    rows = np.loadtxt(SHARED / "uci" / "wine" / "data.csv.gz", delimiter=",")
    is_test = np.loadtxt(SHARED / "uci" / "wine" / "test_mask.csv.gz", delimiter=",")[:, 3].astype(bool)
    expected = (rows[is_test] - rows[~is_test].mean(0)) / rows[~is_test].std(0)
    torch.testing.assert_close(split.test_x, torch.from_numpy(expected[:, :-1]))
    torch.testing.assert_close(split.test_y, torch.from_numpy(expected[:, -1]))
    assert split.target_std == pytest.approx(rows[~is_test, -1].std())


@needs_data
def test_images_and_oil_flow_are_read_from_their_archives():
    images = data.load_mnist(SHARED, dtype=torch.float32)
    assert images.train_x.shape == (60000, 784)
    assert images.test_x.shape == (10000, 784)
    assert float(images.train_x.max()) == 1.0
    assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    flow = data.load_oil_flow(SHARED)
    assert all(rows.shape == (1000, 12) and set(labels.tolist()) == {0, 1, 2} for rows, labels in flow.values())


def test_a_set_of_ones_own_needs_no_registration(tmp_path):
    own_set(tmp_path)
    split = data.load_regression("mine", 4, data_dir=tmp_path)
    assert (len(split.train_y), len(split.test_y)) == (54, 6)
    torch.testing.assert_close(split.train_x.mean(0), torch.zeros(2), atol=1e-12, rtol=0)


def test_a_constant_input_becomes_zero_and_a_constant_target_is_refused(tmp_path):
    target = own_set(tmp_path)
    table = np.loadtxt(target / "data.csv.gz", delimiter=",")
    table[:, 1] = 7.0
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    assert bool((data.load_regression("mine", data_dir=tmp_path).train_x[:, 1] == 0).all())
    data._uci.cache_clear()
    table[:, -1] = 7.0
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    with pytest.raises(UserError, match="targets of mine, split 0, are equal"):
        data.load_regression("mine", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: np.savetxt(t / "data.csv.gz", [[1, np.nan], [2, 3]], delimiter=","), r"NaN .* 1 of 2 rows"),
        (lambda t: (t / "data.csv.gz").write_bytes(b"no gzip"), "cannot read"),
        (lambda t: (t / "data.csv.gz").write_bytes((t / "data.csv.gz").read_bytes()[:-40]), "cannot read"),
        (lambda t: np.savetxt(t / "data.csv.gz", np.ones((60, 1)), delimiter=","), "one column"),
        (lambda t: np.savetxt(t / "test_mask.csv.gz", np.ones((60, 10)), delimiter=","), "a single 1 in each row"),
        (lambda t: (t / "test_mask.csv.gz").unlink(), "test_mask.csv.gz is not in"),
    ],
)
def test_a_broken_set_gives_one_clear_message(tmp_path, damage, message):
    damage(own_set(tmp_path))
    with pytest.raises(UserError, match=message):
        data.load_regression("mine", data_dir=tmp_path)


def fake_pooch(monkeypatch, retrieve):
    module = types.SimpleNamespace(
        retrieve=retrieve, get_logger=lambda: types.SimpleNamespace(setLevel=lambda level: None)
    )
    monkeypatch.setitem(sys.modules, "pooch", module)


def test_without_pooch_or_a_network_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match=r"--data-dir or TIGHTER_GP_DATA .*`pip install pooch`"):
        data.load_regression("buzz")

    def no_network(url, known_hash, fname, path):
        raise ConnectionError("unreachable")

    fake_pooch(monkeypatch, no_network)
    with pytest.raises(
        UserError, match=r"could not be downloaded \(ConnectionError\); without a network set --data-dir"
    ):
        data.load_regression("buzz")
