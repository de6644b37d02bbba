"""Skip a step that fails, undo the update that led there, take smaller ones, and at last give up.

A wrapper of any :class:`~tighter_gp.training.steps.Step`; of optimizers it knows nothing. It sees the parameters, and
the gradients only where they say which rows of a table will move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, first_line
from . import distributed
from .batches import Batch
from .steps import Call, Step

_SMALLER, _LARGER = 0.25, 1.1


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers.

    :param inner: State of the step.
    :param before: Parameters before the last update.
    :param rows: Of tables with sparse gradients: the rows that it touched, and their values before.
    :param damping: Factor on the size of an update, which failures lower and successes raise.
    :param failures: Failed steps in a row.
    :param error: The last failure of this process.
    """

    inner: Any
    before: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    damping: float = 1.0
    failures: int = 0
    error: Exception | None = None


class GuardInfo(NamedTuple):
    """What came of a step.

    :param loss: Its loss; NaN if there is none.
    :param skipped: Why it was not taken; empty if it was.
    :param converged: Why no further step is needed; empty if one is.
    """

    loss: float
    skipped: str = ""
    converged: str = ""


class Guard:
    """A step that may fail.

    :param step: The step.
    :param parameters: What it changes, by name.
    :param max_failures: Failures in a row before the error is raised.
    :param describe: Says what the hyperparameters are, for that error; is given the error.
    """

    def __init__(
        self, step: Step, parameters: Mapping[str, Tensor], max_failures: int, describe: Callable[[Exception], str]
    ) -> None:
        self.inner, self.parameters = step, parameters
        self.max_failures, self.describe = max_failures, describe

    def init(self) -> GuardState:
        """The state before the first step."""
        return GuardState(self.inner.init())

    def step(self, state: GuardState, batch: Batch, number: int, total: int) -> tuple[GuardState, GuardInfo]:
        """Take a step, or return to where the last was taken from.

        :param number: How many steps were done before.
        :param total: How many there are.
        :raises RuntimeError: After too many failures in a row.
        """
        kept: list[tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]] = []
        call = Call(number, total, state.damping, lambda changed: kept.append(self._keep(state.before, changed)))
        inner, info = self.inner.step(state.inner, batch, call)
        state = replace(state, inner=inner)
        if info.error is None:
            if kept:
                before, rows = kept[-1]
                state = replace(state, before=before, rows=rows)
            damping = min(1.0, _LARGER * state.damping)
            return replace(state, damping=damping, failures=0), GuardInfo(info.loss, converged=info.converged)
        state = replace(state, failures=state.failures + 1, error=info.error)
        reason = first_line(info.error)
        if state.failures == 2 and _can_undo(state):
            state, reason = self._undo(state), reason + " The last update was undone."
        if state.failures >= self.max_failures:
            self.give_up(state, number)
        return state, GuardInfo(info.loss, skipped=reason)

    @torch.no_grad()
    def settle(self, state: GuardState, loss: Callable[[], Tensor]) -> tuple[GuardState, str]:
        """Undo the last update of a run if the bound cannot be computed after it: no further step would notice.

        :param loss: Computes the loss at the end.
        :return: The state, and why the update was undone, if it was.
        """
        if not _can_undo(state):
            return state, ""
        reason = "the bound is not finite."
        try:
            usable = bool(torch.isfinite(loss()).all())
        except NUMERICAL_ERRORS as error:
            usable, reason = False, first_line(error)
        device = next(iter(self.parameters.values())).device
        if not distributed.total(float(not usable), device):
            return state, ""
        return self._undo(state), reason + " The last update was undone."

    def give_up(self, state: GuardState, number: int) -> NoReturn:
        """Raise with all that is known.

        :param number: The last step that failed.
        """
        assert state.error is not None
        raise RuntimeError(
            f"{state.failures} steps in a row failed, the last, step {number}, with: {state.error} "
            f"Hyperparameters: {self.describe(state.error)}. The parameters are the last for which a step "
            "succeeded. A smaller lr, scaled data or float64 may help."
        ) from state.error

    def _keep(
        self, into: dict[str, Tensor], changed: Mapping[int, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """The parameters before the step; of tables with sparse gradients the rows that it will touch."""
        rows, whole = {}, {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                touched = parameter.grad.indices()
                rows[name] = touched, parameter.data[tuple(touched)]
            else:
                whole[name] = changed.get(id(parameter), parameter.data)
        # The memory of the last copy is used again.
        before = into if into.keys() == whole.keys() else {name: torch.empty_like(v) for name, v in whole.items()}
        torch._foreach_copy_(list(before.values()), list(whole.values()))
        return before, rows

    @torch.no_grad()
    def _undo(self, state: GuardState) -> GuardState:
        for name, value in state.before.items():
            self.parameters[name].copy_(value)
        for name, (rows, value) in state.rows.items():
            self.parameters[name][tuple(rows)] = value
        # A state that holds the gradients that led astray would lead there again.
        return replace(state, inner=self.inner.init(), before={}, rows={}, damping=_SMALLER * state.damping)

    def state_dict(self, state: GuardState) -> dict[str, Any]:
        """For a checkpoint."""
        own = {"before": state.before, "rows": state.rows, "damping": state.damping}
        return {**self.inner.state_dict(state.inner), **own}

    def load_state_dict(self, saved: dict[str, Any] | None, failures: int) -> GuardState:
        """The state from a checkpoint; the first ones had fewer parts."""
        saved = saved or {}
        rows = saved.get("rows", {})
        return GuardState(
            inner=self.inner.load_state_dict(saved),
            before={name: value.to(self.parameters[name].device) for name, value in saved.get("before", {}).items()},
            rows={name: tuple(part.to(self.parameters[name].device) for part in rows[name]) for name in rows},
            damping=saved.get("damping", 1.0),
            failures=failures,
        )


def _can_undo(state: GuardState) -> bool:
    return bool(state.before or state.rows)
