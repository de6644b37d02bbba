"""Three million flights of 2001 as rows of numbers, in memory maps."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .data import locate
from .errors import UserError

INPUTS = (
    "minute of the day",
    "day of the week",
    "day of the year",
    "distance",
    "origin, first coordinate",
    "origin, second coordinate",
    "destination, first coordinate",
    "destination, second coordinate",
)

# Changes with what the rows hold, so that older ones are not taken for them.
_VERSION = 1
_PARTS = ("train_x", "train_y", "test_x", "test_y")


class Table(NamedTuple):
    """Flights, one entry each; airports are numbered.

    :param minutes: Since the start of the year.
    :param delay: In minutes.
    :param distance: In miles.
    """

    minutes: np.ndarray
    delay: np.ndarray
    distance: np.ndarray
    origin: np.ndarray
    destination: np.ndarray


class Rows(NamedTuple):
    """Memory maps of inputs, ``N x 8``, and delays, standardised with the training rows, and the delays' unit in minutes."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    target_std: float


def read_flights(data_dir: Path | None) -> Table:
    """The registered file; a part of it is in memory at a time."""
    import pyarrow.parquet as parquet

    path = locate("flights3m/flights-3m.parquet", data_dir)
    numbers: dict[str, int] = {}
    columns: list[list[np.ndarray]] = [[] for _ in Table._fields]
    names = ["date", "delay", "distance", "origin", "destination"]
    for batch in parquet.ParquetFile(path).iter_batches(200_000, columns=names, use_threads=False):
        dates, delays, distances = (batch.column(name).to_numpy(zero_copy_only=False) for name in names[:3])
        columns[0].append((dates.astype("datetime64[m]") - np.datetime64("2001-01-01", "m")).astype(np.int32))
        columns[1].append(delays.astype(np.float32))
        columns[2].append(distances.astype(np.float32))
        for column, name in zip(columns[3:], names[3:], strict=True):
            encoded = batch.column(name).dictionary_encode()
            own = [numbers.setdefault(airport, len(numbers)) for airport in encoded.dictionary.to_pylist()]
            column.append(np.array(own, dtype=np.int16)[encoded.indices.to_numpy()])
    return Table(*map(np.concatenate, columns))


def make_flights(num_rows: int = 1500, seed: int = 0) -> Table:
    """An embedded set like the flights: delays grow through the day, and with some of twelve airports on a map."""
    random = np.random.RandomState(seed)
    places = random.uniform(0, 2000, (12, 2))
    origin = random.randint(12, size=num_rows)
    destination = (origin + 1 + random.randint(11, size=num_rows)) % 12
    minutes = np.sort(random.randint(181 * 1440, size=num_rows))
    delay = 10 * np.sin(minutes % 1440 / 500) + places[origin, 0] / 200 + 8 * random.randn(num_rows)
    distance = np.linalg.norm(places[origin] - places[destination], axis=-1).round()
    return Table(minutes, delay, distance, origin, destination)


def airport_positions(table: Table) -> np.ndarray:
    """Where airports lie on a plane, up to rotation: classical scaling of the distances between them.

    The distance of two airports without a flight between them is that of the shortest way over others.
    """
    from scipy.sparse.csgraph import shortest_path

    count = 1 + int(max(table.origin.max(), table.destination.max()))
    known = np.full((count, count), np.inf)
    known[table.origin, table.destination] = table.distance
    ways = shortest_path(np.fmin(known, known.T))
    if not np.isfinite(ways).all():
        raise UserError("there are airports between which no flights lead.")
    centring = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centring @ ways**2 @ centring)
    return vectors[:, -2:] * np.sqrt(values[-2:])


def encode(table: Table) -> np.ndarray:
    """Inputs as in :data:`INPUTS` and the delay, ``N x 9``; the first of January of 2001 was a Monday."""
    days, positions = table.minutes // 1440, airport_positions(table)
    columns = [table.minutes % 1440, days % 7, days, table.distance]
    columns += [*positions[table.origin].T, *positions[table.destination].T, table.delay]
    rows = np.empty((len(table.delay), len(columns)), dtype=np.float32)
    for i, column in enumerate(columns):
        rows[:, i] = column
    return rows


def memory_maps(table: Table, folder: Path, num_test: int, split: int) -> None:
    """Write training and test rows; whole or not at all.

    :param num_test: Rows for testing, drawn at random.
    :param split: Seed of the draw.
    """
    rows = encode(table)
    is_test = np.zeros(len(rows), dtype=bool)
    is_test[np.random.RandomState(split).permutation(len(rows))[:num_test]] = True
    train = rows[~is_test]
    mean, std = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, part in (("train", train), ("test", rows[is_test])):
            scaled = ((part - mean) / std).astype(np.float32)
            np.save(temporary / f"{name}_x.npy", scaled[:, :-1])
            np.save(temporary / f"{name}_y.npy", scaled[:, -1])
        np.save(temporary / "target_std.npy", std[-1])
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def rows_folder(parent: Path, dataset: str, num_test: int, split: int) -> Path:
    """Where the rows of a split are kept."""
    return parent / f"{dataset}_v{_VERSION}_{num_test}_split{split}"


def load_rows(folder: Path) -> Rows:
    """Open what :func:`memory_maps` wrote."""
    parts = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _PARTS]
    return Rows(*parts, target_std=float(np.load(folder / "target_std.npy")))
