"""No network for any of these tests."""

from __future__ import annotations

import socket

import pytest

from benchmarks import data


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No network, no data folder and an empty cache, whatever the machine has."""

    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("TIGHTER_GP_DATA", raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    data._uci.cache_clear()
