"""What a run says while it runs: a bar in a terminal, or a line per tenth in the log; and a line at its end."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

from . import distributed
from .history import History

log = logging.getLogger("tighter_gp")


class Progress:
    """A progress bar where tqdm and a terminal are, otherwise lines in the log; nothing but in the first process.

    :param show: Whether to show a bar: None for a choice by what is there, False for neither a bar nor lines.
    :param total: Number of steps.
    """

    def __init__(self, show: bool | None, total: int) -> None:
        self.total, self.is_first = total, distributed.rank() == 0
        self.bar = _bar(show, total) if self.is_first else None
        self.has_lines = self.bar is None and show is not False and self.is_first

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def start(self, history: History) -> None:
        """Begin, or continue after the steps that were done before."""
        if self.bar is not None:
            self.bar.update(history.steps)

    def step(self, history: History, total: int) -> None:
        """After a step; ``total`` is the number of steps, which may have become smaller."""
        done, loss = history.steps, history.loss[-1]
        self.total = total
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(1)
            if done % 10 == 0:
                self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        # When another tenth is full; a short run has fewer lines.
        if self.has_lines and done * 10 // self.total > (done - 1) * 10 // self.total and done < self.total:
            log.info("step %d of %d, %.1f s: %s", done, self.total, history.seconds, _scores(history))

    def end(self, history: History, was_finished: bool) -> None:
        """The last line."""
        if not self.is_first:
            return
        skipped = f", {len(history.skipped)} steps skipped" if history.skipped else ""
        stopped = f", stopped: {history.stopped}" if history.stopped else ""
        if was_finished:
            log.info("resumed: already finished after %d steps, nothing trained: %s", history.steps, _scores(history))
        else:
            log.info("%d steps in %.1f s: %s%s%s", history.steps, history.seconds, _scores(history), skipped, stopped)


def _scores(history: History) -> str:
    """Loss, bound and validation in words."""
    loss = next((loss for loss in reversed(history.loss) if math.isfinite(loss)), math.nan)
    text = f"loss {loss:.4f} per datum of the last batch"
    if history.validation:
        text += f", validation {history.validation[-1][1]:.4f}"
    if history.best_step is not None:
        text += f", best after step {history.best_step}"
    return text


def _bar(show: bool | None, total: int) -> Any:
    if show is False or (show is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        if show:
            raise ImportError("progress=True needs tqdm: pip install tqdm.") from None
        return None
    return tqdm(total=total, unit="step", leave=False, dynamic_ncols=True)
