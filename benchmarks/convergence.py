"""Whether a comparison has converged: what twice the budget changes in the difference of a pair's bounds.

A pair at a budget of E epochs is converged if twice the budget changes its difference of bounds, on the splits and seeds that
were run with both, by less than the difference's standard error or a tenth of it. Runs with half or twice the budget of most
others serve this check, and stand in no table of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import report
from .report import BOUND, Result

# Experiments whose budget is doubled.
EXPERIMENTS = ("uci", "mnist")

# A change of less than this share of the difference does not count.
SHARE = 0.1
CAPTION = (
    "*Converged*: whether twice the epochs, on the splits that were run with both, change the difference of bounds by less "
    f"than its standard error or {SHARE:.0%}."
)
UNCHECKED = "not checked"

# Data set, inducing points and all settings but the budget.
Family = tuple[str, int, str]
Place = tuple[Any, Any]


class Check(NamedTuple):
    """Two budgets compared.

    :param before: Epochs.
    :param after: Twice as many.
    :param change: Of the mean difference of bounds, tighter less base.
    :param allowed: What it may be.
    """

    before: int
    after: int
    change: float
    allowed: float

    @property
    def converged(self) -> bool:
        """Whether the change is small enough."""
        return abs(self.change) < self.allowed

    def show(self) -> str:
        """As text."""
        digits = BOUND.digits
        text = "yes" if self.converged else f"no, changed by {self.change:+.{digits}f}"
        return f"{text} ({self.before} → {self.after} epochs)"


def family(result: Result) -> Family:
    """Results that differ at most in budget, method, split and seed."""
    config = {name: value for name, value in (result.get("config") or {}).items() if name != "epochs"}
    return result["dataset"], result.get("num_inducing") or 0, json.dumps(config, sort_keys=True)


def _epochs(result: Result) -> int | None:
    return report.setting(result, "epochs")


def _families(results: Sequence[Result]) -> dict[Family, dict[int, list[Result]]]:
    """Results by family and budget."""
    found: dict[Family, dict[int, list[Result]]] = {}
    for result in results:
        epochs = _epochs(result)
        if epochs is not None:
            found.setdefault(family(result), {}).setdefault(epochs, []).append(result)
    return found


def _budget(by_epochs: dict[int, list[Result]]) -> int:
    """The budget of most runs; of two with as many the larger."""
    return max(by_epochs, key=lambda epochs: (len(by_epochs[epochs]), epochs))


def shown(results: Sequence[Result]) -> list[Result]:
    """Results without those that only serve the check: with the budget of most others times a power of two."""
    hidden = {
        (key, epochs)
        for key, by_epochs in _families(results).items()
        for epochs in by_epochs
        if epochs != _budget(by_epochs) and math.log2(epochs / _budget(by_epochs)).is_integer()
    }
    return [result for result in results if (family(result), _epochs(result)) not in hidden]


def _differences(results: Sequence[Result], pair: tuple[str, str]) -> dict[Place, float]:
    """Tighter bound less base, by split and seed."""
    found = {}
    for base, tighter in report.pairs(results).get(pair, []):
        before, after = BOUND.read(base), BOUND.read(tighter)
        if before is not None and after is not None:
            found[tighter.get("split"), tighter.get("seed")] = after - before
    return found


def check(results: Sequence[Result], key: Family, pair: tuple[str, str], epochs: int) -> Check | None:
    """A pair at a budget against twice the budget, or if that was not run against half of it; None where neither was."""
    by_epochs = _families(results).get(key, {})
    for before, after in ((epochs, 2 * epochs), (epochs // 2, epochs)):
        if 2 * before != after or not {before, after} <= by_epochs.keys():
            continue
        first, second = (_differences(by_epochs[budget], pair) for budget in (before, after))
        common = first.keys() & second.keys()
        if not common:
            continue
        old, new = (report.mean(found[place] for place in common) for found in (first, second))
        spread = report.mean(max((first, second), key=len).values())
        assert old is not None
        assert new is not None
        assert spread is not None
        return Check(before, after, new.value - old.value, max(spread.error or 0.0, SHARE * abs(old.value)))
    return None


def of_row(results: Sequence[Result], one: Result, pair: tuple[str, str]) -> Check | None:
    """The check of a row of a table; None if there is none.

    :param results: All results of the experiment, those for the check too.
    :param one: A result of the row.
    :param pair: Base and tighter method.
    """
    epochs = _epochs(one)
    return None if epochs is None else check(results, family(one), pair, epochs)


def verdict(results: Sequence[Result], one: Result, pair: tuple[str, str]) -> str:
    """What a row of a table says; parameters as for :func:`of_row`."""
    found = of_row(results, one, pair)
    return UNCHECKED if found is None else found.show()


def summary(results: Sequence[Result]) -> str:
    """How many of the pairs that stand in tables are converged, in words."""
    checks = [
        of_row(results, matched[0][1], pair)
        for group in report.grouped(shown(results)).values()
        for pair, matched in report.pairs(group).items()
    ]
    found = [one.converged for one in checks if one is not None]
    unchecked = len(checks) - len(found)
    return f"of {len(checks)} rows {sum(found)} converged, {len(found) - sum(found)} not, {unchecked} not checked"
