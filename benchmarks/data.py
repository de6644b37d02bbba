r"""Data of the experiments: found in a folder, or downloaded once into a cache of the user's, and always checked.

A folder given by ``--data-dir`` or ``$TIGHTER_GP_DATA`` holds ``uci/NAME/data.csv.gz`` (last column the target) and
``uci/NAME/test_mask.csv.gz`` (one column per split, 1 = test), ``mnist/*.gz``, ``oil_flow/3PhData.tar.gz`` and
``snelson.csv``. A set of your own in the same layout works too. What is not there is looked for in the cache and
downloaded with pooch.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import sys
import tarfile
import tempfile
import warnings
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import UserError
from .registry import FILES, PARTS, SHAPES
from .toy import make_toy

NUM_SPLITS = 10

# Sets that need no file.
WITHOUT_FILES = ("toy",)


class Split(NamedTuple):
    """A training and a test set, standardised with the mean and standard deviation of the training rows.

    :param name: Name of the set.
    :param train_x: ``N x D``.
    :param train_y: ``N``; class labels for images.
    :param test_x: ``N* x D``.
    :param test_y: ``N*``.
    :param target_std: Standard deviation of the training targets in their own unit; 1 for labels.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    target_std: float = 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def data_folder(data_dir: Path | str | None) -> Path | None:
    """The folder asked for, if any."""
    chosen = data_dir or os.environ.get("TIGHTER_GP_DATA")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        origin = "--data-dir" if data_dir else "$TIGHTER_GP_DATA"
        raise UserError(f"{origin} is {folder}, which is not a folder.")
    return folder


def cache_folder() -> Path:
    """Where downloads go."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "tighter-gp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tighter-gp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tighter-gp"


def locate(name: str, data_dir: Path | str | None = None) -> Path:
    """The path of a file whose checksum was found right; downloaded if need be.

    :param name: Its place in the layout, such as ``uci/kin40k/data.csv.gz``.
    :param data_dir: The folder to look in first.
    """
    folder = data_folder(data_dir)
    checksum = FILES[name].checksum if name in FILES else None
    for root in (folder, cache_folder()):
        if root is not None and (root / name).is_file():
            _verify(root / name, checksum)
            return root / name
    if name not in FILES:
        raise UserError(f"{name} is not in {folder}, and is not a file that could be downloaded.")
    return _download(name, folder)


def _verify(path: Path, expected: str | None) -> None:
    if expected is None:
        return
    try:
        found = _checksum(path, expected.split(":")[0])
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); expected {expected}. Delete it and get it again.") from error
    if found != expected:
        raise UserError(f"{path} is damaged or another version: expected {expected}, got {found}. Get it again.")


def _checksum(path: Path, kind: str) -> str:
    if kind == "git":
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with gzip.open(path) if kind == "content" else open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"


def _download(name: str, folder: Path | None) -> Path:
    source, target = FILES[name], cache_folder() / name
    looked = f"{name} is not in {folder or 'the cache'}"
    try:
        import pooch
    except ImportError:
        raise UserError(
            f"{looked}: set --data-dir or TIGHTER_GP_DATA to a folder that has it, or `pip install pooch` to download "
            f"it from {source.url}."
        ) from None
    pooch.get_logger().setLevel("WARNING")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            try:
                downloaded = pooch.retrieve(source.url, known_hash=None, fname=target.name, path=temporary)
            except Exception as error:  # whatever the network or the server had to say
                raise UserError(
                    f"{looked}, and {source.url} could not be downloaded ({type(error).__name__}); without a network set "
                    "--data-dir or TIGHTER_GP_DATA to a folder that has it."
                ) from error
            _verify(Path(downloaded), source.checksum)
            os.replace(downloaded, target)
    except OSError as error:
        raise UserError(f"cannot write to the cache {cache_folder()}: {error.strerror}.") from error
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Regression
# ---------------------------------------------------------------------------------------------------------------------


def check_regression(names: list[str], splits: list[int], data_dir: Path | str | None) -> None:
    """Complain about an unknown set or split before anything is run."""
    folder = data_folder(data_dir)
    for name in names:
        own = folder is not None and name == Path(name).name and (folder / "uci" / name).is_dir()
        if name not in SHAPES and name not in WITHOUT_FILES and not own:
            known = ", ".join((*SHAPES, *WITHOUT_FILES))
            raise UserError(f"unknown dataset {name!r}; choose from {known}, or a folder of uci/ in --data-dir.")
    for split in splits:
        if not 0 <= split < NUM_SPLITS:
            raise UserError(f"there is no split {split}; splits are 0 to {NUM_SPLITS - 1}.")


def check_sizes(names: list[str], num_inducing: int, data_dir: Path | str | None) -> None:
    """Find every file and complain about too many inducing points before anything is run."""
    for name in names:
        if name in SHAPES:
            for part in (*PARTS.get(name, ("data.csv.gz",)), "test_mask.csv.gz"):
                locate(f"uci/{name}/{part}", data_dir)
            num_train = SHAPES[name][0] - -(-SHAPES[name][0] // NUM_SPLITS)
        else:
            num_train = len(load_regression(name, data_dir=data_dir).train_y)
        if num_inducing > num_train:
            raise UserError(f"{num_inducing} inducing points are more than the {num_train} training points of {name}.")


def load_regression(
    name: str,
    split: int = 0,
    *,
    data_dir: Path | str | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Split:
    """One split of a regression set.

    :param name: A registered set, ``toy``, or a folder of ``uci/`` in ``data_dir``.
    :param split: 0 to 9; the toy set has one split.
    """
    check_regression([name], [split], data_dir)
    if name == "toy":
        toy = make_toy()
        rows = torch.cat([torch.cat([toy.x, toy.test_x]), torch.cat([toy.y, toy.test_y]).unsqueeze(-1)], -1).numpy()
        is_test = np.arange(len(rows)) >= len(toy.x)
    else:
        rows, folds = _uci(name, str(data_dir) if data_dir else None)
        is_test = folds == split
    mean, std = rows[~is_test].mean(0), rows[~is_test].std(0)
    if std[-1] == 0:
        raise UserError(f"all training targets of {name}, split {split}, are equal.")
    # A constant input says nothing; it becomes zero.
    scaled = torch.from_numpy((rows - mean) / np.where(std > 0, std, 1.0)).to(device=device, dtype=dtype)
    mask = torch.from_numpy(is_test).to(device)
    train, test = scaled[~mask], scaled[mask]
    return Split(
        name,
        train[:, :-1].contiguous(),
        train[:, -1].clone(),
        test[:, :-1].contiguous(),
        test[:, -1].clone(),
        float(std[-1]),
    )


def load_split(run: dict[str, Any], args: argparse.Namespace) -> Split:
    """The data of a run of an experiment."""
    return load_regression(run["dataset"], run["split"], data_dir=args.data_dir, dtype=args.dtype, device=args.device)


@lru_cache(maxsize=2)
def _uci(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and in which of the splits each is a test row."""
    parts = [locate(f"uci/{name}/{part}", data_dir) for part in PARTS.get(name, ("data.csv.gz",))]
    rows = np.concatenate([_read_table(path) for path in parts])
    mask_path = locate(f"uci/{name}/test_mask.csv.gz", data_dir)
    mask = _read_table(mask_path)
    shape = (rows.shape[0], rows.shape[1] - 1)
    if name in SHAPES and shape != SHAPES[name]:
        raise UserError(f"{parts[0]} has {shape[0]} rows and {shape[1]} inputs; {name} has {SHAPES[name]}.")
    if rows.shape[1] < 2:
        raise UserError(f"{parts[0]} has one column; inputs and a target were wanted.")
    folds = mask.shape == (rows.shape[0], NUM_SPLITS) and bool(np.isin(mask, (0, 1)).all() and (mask.sum(1) == 1).all())
    if not folds:
        raise UserError(
            f"{mask_path} must have one row per point, {NUM_SPLITS} columns of 0 and 1, and a single 1 in each row."
        )
    return rows, mask.argmax(1)


def _read_table(path: Path) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*input contained no data", UserWarning)
            table = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}.") from error
    if not table.size:
        raise UserError(f"{path} is empty.")
    bad = int((~np.isfinite(table)).any(1).sum())
    if bad:
        raise UserError(f"{path} has NaN or infinite values in {bad} of {len(table)} rows; drop or impute them.")
    return table


def load_snelson(data_dir: Path | str | None = None) -> tuple[Tensor, Tensor]:
    """Snelson and Ghahramani's one-dimensional set, in its own units: inputs ``200 x 1`` and targets."""
    rows = torch.from_numpy(_read_table(locate("snelson.csv", data_dir)))
    return rows[:, :1].contiguous(), rows[:, 1].clone()


# ---------------------------------------------------------------------------------------------------------------------
# Images, and the oil flow
# ---------------------------------------------------------------------------------------------------------------------


def load_mnist(
    data_dir: Path | str | None = None, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Split:
    """MNIST: pixels from 0 to 1 and labels."""
    images = [_read_idx(locate(f"mnist/{part}-images-idx3-ubyte.gz", data_dir)) for part in ("train", "t10k")]
    labels = [_read_idx(locate(f"mnist/{part}-labels-idx1-ubyte.gz", data_dir)) for part in ("train", "t10k")]
    x = [torch.from_numpy(part.reshape(len(part), -1)).to(device=device, dtype=dtype) / 255 for part in images]
    y = [torch.from_numpy(part).to(device=device, dtype=torch.int64) for part in labels]
    return Split("mnist", x[0], y[0], x[1], y[1])


def _read_idx(path: Path) -> np.ndarray:
    try:
        content = gzip.decompress(path.read_bytes())
        num_dims = content[3]
        shape = np.frombuffer(content, ">i4", num_dims, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy()
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} is not a gzipped IDX file: {error}.") from error


def load_digits(*, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Split:
    """scikit-learn's 1797 digits of 8 x 8 pixels; the last 297 are the test set."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise UserError("the small set of digits comes with scikit-learn: `pip install scikit-learn`.") from None
    pixels, labels = load(return_X_y=True)
    x = torch.from_numpy(pixels / 16).to(device=device, dtype=dtype)
    y = torch.from_numpy(labels).to(device=device, dtype=torch.int64)
    return Split("digits", x[:1500], y[:1500], x[1500:], y[1500:])


def load_oil_flow(data_dir: Path | str | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Three-phase oil flow: ``train``, ``validation`` and ``test``, each ``1000 x 12`` with labels 0, 1, 2.

    The archive is read in memory; nothing is extracted.
    """
    path = locate("oil_flow/3PhData.tar.gz", data_dir)
    parts = {"train": "Trn", "validation": "Vdn", "test": "Tst"}
    loaded = {}
    with tarfile.open(path) as archive:
        for name, code in parts.items():
            tables = []
            for member in (f"Data{code}.txt", f"Data{code}Lbls.txt"):
                file = archive.extractfile(member)
                assert file is not None
                tables.append(torch.from_numpy(np.loadtxt(io.TextIOWrapper(file, "ascii"), ndmin=2)))
            loaded[name] = (tables[0], tables[1].argmax(-1))
    return loaded
