"""``python -m benchmarks million``: flights in memory maps, two GPs and two baselines."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks import flights
from tests.benchmarks.support import lines


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The lines of a run with --smoke, and its folder."""
    out = tmp_path_factory.mktemp("million")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command_line, "EXPERIMENTS", ("million",))
        assert command_line.main(["million", "--smoke", "--out", str(out)]) == 0
    torch.set_default_dtype(before)
    return lines(out / "smoke" / "million.jsonl"), out / "smoke"


def test_smoke_scores_all_methods(smoke):
    results, _ = smoke
    assert [one["method"] for one in results] == ["linear", "trees", "svgp", "t-svgp"]
    for one in results:
        assert math.isfinite(one["nlpd"])
        assert 0 < one["rmse"] < 1.1
        assert one["rows_per_second"] > 0
        assert (one["num_train"], one["num_test"]) == (1350, 150)
    for one in results[2:]:
        assert one["bound_tighter"] > one["bound_base"]
        assert [point["epoch"] for point in one["trace"]] == [1, 2]
        assert set(one["lengthscales"]) == set(flights.INPUTS)


def test_rows_lie_in_memory_maps_in_units_of_the_training_rows(smoke):
    (folder,) = (path for path in smoke[1].iterdir() if path.is_dir())
    rows = flights.load_rows(folder)
    assert isinstance(rows.train_x, np.memmap)
    np.testing.assert_allclose(rows.train_x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.train_x.std(0), 1, atol=1e-5)
    np.testing.assert_allclose(rows.train_y.std(), 1, atol=1e-5)
    table = flights.make_flights()
    own = np.sort(np.concatenate([rows.train_y, rows.test_y]) * rows.target_std)
    expected = np.sort(table.delay)
    np.testing.assert_allclose(own - own[0], expected - expected[0], atol=1e-3)


def test_least_squares_are_those_of_numpy(smoke):
    results, folder = smoke
    (kept,) = (path for path in folder.iterdir() if path.is_dir())
    rows = flights.load_rows(kept)
    design = lambda x: np.column_stack([x.astype(np.float64), np.ones(len(x))])
    weights = np.linalg.lstsq(design(rows.train_x), rows.train_y.astype(np.float64), rcond=None)[0]
    noise = np.square(design(rows.train_x) @ weights - rows.train_y).mean()
    error = design(rows.test_x) @ weights - rows.test_y
    density = -0.5 * np.log(2 * np.pi * noise) - 0.5 * error**2 / noise
    assert results[0]["noise"] == pytest.approx(noise, rel=1e-6)
    assert results[0]["nlpd"] == pytest.approx(-density.mean(), rel=1e-6)


def test_airports_on_a_plane_are_found_from_their_distances():
    table = flights.make_flights(4000)
    positions = flights.airport_positions(table)
    between = np.linalg.norm(positions[table.origin] - positions[table.destination], axis=-1)
    np.testing.assert_allclose(between, table.distance, atol=1.5)  # distances are whole miles


def test_a_flight_becomes_time_of_day_weekday_and_day():
    table = flights.make_flights(400)
    first = table._replace(minutes=np.full(400, 8 * 1440 + 75))  # 9 January, 1:15
    np.testing.assert_array_equal(flights.encode(first)[0, :3], [75, 1, 8])


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
def test_the_file_is_read_as_it_is(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.table(
        {
            "date": np.array(["2001-01-01T00:01", "2001-02-01T12:00"], dtype="datetime64[us]"),
            "delay": [33, -4],
            "distance": [2176, 215],
            "origin": ["LAS", "ATL"],
            "destination": ["ATL", "SAV"],
        }
    )
    path = tmp_path / "small.parquet"
    parquet.write_table(table, path)
    monkeypatch.setattr(flights, "locate", lambda name, data_dir: path)
    found = flights.read_flights(None)
    np.testing.assert_array_equal(found.minutes, [1, 31 * 1440 + 720])
    np.testing.assert_array_equal(found.delay, [33, -4])
    np.testing.assert_array_equal(found.distance, [2176, 215])
    assert found.origin[1] == found.destination[0]
    assert len({found.origin[0], found.origin[1], found.destination[1]}) == 3


def test_two_processes_are_told_from_one(smoke):
    results, _ = smoke
    assert [one["config"].get("processes") for one in results] == [None, None, 1, 1]
