"""No network for any of these tests; ``--smoke`` of every experiment once."""

from __future__ import annotations

import socket

import pytest

from benchmarks import data
from tests.benchmarks.support import (
    EXPERIMENTS,
    refuse,
    run_main,
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No network, no data folder and an empty cache, whatever the machine has."""
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("TIGHTER_GP_DATA", raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    data._uci.cache_clear()


@pytest.fixture
def cli(monkeypatch):
    return lambda *argv: run_main(monkeypatch, *argv)


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """The folder with what ``--smoke`` of every experiment writes, offline."""
    out = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        patched.delenv("TIGHTER_GP_DATA", raising=False)
        patched.setattr(data, "cache_folder", lambda: out / "cache")
        for experiment in EXPERIMENTS:
            assert run_main(patched, experiment, "--smoke", "--out", out) == 0
    return out / "smoke"
