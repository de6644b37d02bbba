"""L-BFGS that comes back from where the objective fails."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FullBatchLBFGS:
    """L-BFGS with a strong Wolfe line search on a deterministic objective, one iteration per call.

    A trial point where the objective fails is taken as a very bad one, so the line search comes back from it. An
    iteration that raises, or is interrupted, leaves parameters and state as it found them.

    :param parameters: The parameters.
    :param evaluate: Computes the loss and its gradients; may raise one of ``failures``.
    :param failures: Exceptions that mean a numerical failure.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        evaluate: Callable[[], Tensor],
        failures: tuple[type[Exception], ...],
    ) -> None:
        self.parameters, self.evaluate = parameters, evaluate
        self.failures: tuple[type[Exception], ...] = (*failures, FloatingPointError)
        self.optimizer = torch.optim.LBFGS(
            parameters, max_iter=1, max_eval=26, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0.0
        )
        self.known: list[tuple[Tensor, Tensor, Tensor]] = []
        self.error: Exception | None = None
        self.loss = math.inf

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.optimizer.load_state_dict(state)

    def step(self) -> tuple[float, bool]:
        """One iteration.

        :return: The loss at the new parameters, and whether they moved. ``self.error`` is the last failure, if any.
        """
        self.error, before = None, self._point()
        state = copy.deepcopy(self.optimizer.state_dict()["state"])  # small beside an evaluation
        try:
            self.optimizer.step(self._closure)
            after = self._point()
            loss = self._recall(after)
            if loss is None:
                loss = self._closure()
        except BaseException:
            self._return_to(before)
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
            raise
        self.loss = float(loss)
        self.known = [entry for entry in self.known if torch.equal(entry[0], after)]
        return self.loss, not torch.equal(before, after)

    def _point(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def _split(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([parameter.numel() for parameter in self.parameters])
        return [part.reshape(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def _return_to(self, point: Tensor) -> None:
        for parameter, part in zip(self.parameters, self._split(point), strict=True):
            parameter.copy_(part)

    def _recall(self, point: Tensor) -> Tensor | None:
        for known, loss, gradient in self.known:
            if torch.equal(known, point):
                for parameter, part in zip(self.parameters, self._split(gradient), strict=True):
                    parameter.grad = part.clone()
                return loss
        return None

    def _closure(self) -> Tensor:
        point = self._point()
        loss = self._recall(point)
        if loss is not None:
            return loss
        for parameter in self.parameters:
            parameter.grad = None
        try:
            loss = self.evaluate().detach()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            gradient = torch.cat([grad.to_dense().reshape(-1) for grad in grads])
            if not bool(torch.isfinite(loss) & torch.isfinite(gradient).all()):
                raise FloatingPointError("the loss or its gradient is not finite")
        except self.failures as error:
            if not self.known:
                raise
            self.error = error
            worst = max(float(entry[1]) for entry in self.known)
            loss, gradient = self.known[0][1].new_tensor(worst + 1.0 + abs(worst)), torch.zeros_like(point)
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            return loss
        self.known.append((point, loss, gradient))
        return loss
