"""The tables of the README, made anew from the published results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from . import demo, report, speed
from .runs import read_results

README = Path(__file__).resolve().parents[1] / "README.md"
PUBLISHED = Path(__file__).resolve().parent / "results"

BLOCKS: dict[str, Callable[[], str]] = {
    "demo": lambda: demo.table(read_results(PUBLISHED / "demo" / "demo.jsonl")),
    "speed": lambda: speed.table(read_results(PUBLISHED / "speed" / "speed.jsonl")),
    "results": lambda: report.make_summary(published()),
}


def published() -> list[report.Result]:
    """The results of the experiments that the repository holds."""
    return report.load([PUBLISHED])


def updated(text: str) -> str:
    """A README with every block between ``<!-- name:begin -->`` and ``<!-- name:end -->`` made anew."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> None:
    """Rewrite the README."""
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {README.name}")
