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
    """A progress bar where tqdm and a terminal are, otherwise lines in the log, in the first process only.

    :param show: Whether to show a bar; None for a choice by what is there, False for neither a bar nor lines.
    """

    def __init__(self, show: bool | None) -> None:
        self.is_first = distributed.rank() == 0
        self.bar = _bar(show) if self.is_first else None
        is_read = log.isEnabledFor(logging.INFO)
        self.has_lines = self.bar is None and show is not False and self.is_first and is_read

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def is_due(self, done: int, total: int) -> bool:
        """Whether another tenth of the run is done after ``done`` steps."""
        shows = self.bar is not None or self.has_lines
        return shows and done < total and done * 10 // total > (done - 1) * 10 // total

    def step(self, history: History, total: int, loss: float | None) -> None:
        """After a step.

        :param total: Steps of the run.
        :param loss: Minus the bound per datum on a batch before it was used, where a line is due.
        """
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(history.steps - self.bar.n)
        if loss is None:
            return
        text = f"loss {loss:.4f} per datum on a new batch{_scores(history)}"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        if self.has_lines:
            log.info("step %d of %d, %.1f s: %s", history.steps, total, history.seconds, text)

    def end(self, history: History, was_finished: bool) -> None:
        """The last line."""
        if not self.is_first:
            return
        if was_finished:
            log.info("resumed: already finished after %d steps, nothing trained%s", history.steps, _scores(history))
            return
        skipped = f", {len(history.skipped)} steps skipped" if history.skipped else ""
        stopped = f", stopped: {history.stopped}" if history.stopped else ""
        last = next((loss for loss in reversed(history.loss) if math.isfinite(loss)), math.nan)
        text = f"loss {last:.4f} per datum of the last batch{_scores(history)}{skipped}{stopped}"
        log.info("%d steps in %.1f s: %s", history.steps, history.seconds, text)


def _scores(history: History) -> str:
    """Validation in words."""
    text = f", validation {history.validation[-1][1]:.4f}" if history.validation else ""
    return text if history.best_step is None else f"{text}, best after step {history.best_step}"


def _bar(show: bool | None) -> Any:
    if show is False or (show is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        if show:
            raise ImportError("progress=True needs tqdm: pip install tqdm.") from None
        return None
    return tqdm(unit="step", leave=False, dynamic_ncols=True)
