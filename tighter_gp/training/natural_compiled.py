"""A step with natural gradients as one compiled graph: projection, natural step of q(u), gradients of the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor
from torch.func import functional_call

from ..compiled import CompiledStep, Loss
from ..maths.natural import NaturalParameters
from .natural import NaturalGradients

log = logging.getLogger("tighter_gp")


class _MovedLoss(torch.nn.Module):
    """The loss after a natural step, with its gradients; a module, so that its parameters can be given as arguments."""

    def __init__(self, loss: Loss, natural: NaturalGradients) -> None:
        super().__init__()
        self.loss, self.natural = loss, natural

    def forward(
        self, x: Tensor, target: Tensor, kwargs: dict[str, Any], leaves: Sequence[Tensor], size: Tensor
    ) -> tuple[Tensor, Sequence[Tensor | None], list[Tensor]]:
        natural = self.natural
        of_likelihood = {name: value for name, value in kwargs.items() if name != "index"}
        gaussian = natural.gaussian_targets(self.loss.mll, target, **of_likelihood)
        evaluate = lambda: self.loss(x, target, kwargs).sum()
        loss, gradients, _ = natural.train_step(evaluate, leaves, size, gaussian)
        return loss, gradients, [tensor for entry in natural.entries for tensor in entry.tensors()]


class CompiledNaturalStep(CompiledStep):
    r"""
    A natural step of q(u) and the gradients of the other parameters at the new q(u), compiled.

    The natural parameters go in and out of the graph in float64. What an eager step would look at, such as whether the new
    precision is positive definite, is a flag: where one fails, the loss is NaN, and :meth:`NaturalGradients.undo
    <tighter_gp.training.natural.NaturalGradients.undo>` takes the step back.

    :param mll: The objective, which has the model and the likelihood.
    :param natural: The natural parameters of the model's q(u).
    :param is_asked_for: Whether somebody waits for a compiled step, and is warned if it cannot be had; else the log says so.
    :param options: Passed to :func:`torch.compile`.
    :ivar size: Size of the next natural step.

    Example:
        >>> mll = tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y))
        >>> natural = tighter_gp.training.natural.NaturalGradients(model, num_data=len(train_y))
        >>> step = tighter_gp.training.natural_compiled.CompiledNaturalStep(mll, natural, backend="aot_eager")
        >>> loss = step(train_x, train_y)
        >>> step.is_compiled
        True
    """

    _asks_precision = True

    def __init__(
        self, mll: MarginalLogLikelihood, natural: NaturalGradients, is_asked_for: bool = True, **options: Any
    ) -> None:
        super().__init__(mll, None, **options)
        self.natural, self.size, self.is_asked_for = natural, 0.1, is_asked_for

    def _say(self, message: str) -> None:
        if self.is_asked_for:
            super()._say(message)
        else:
            log.info(message)

    def _extra(self) -> dict[str, Tensor]:
        found = {"size": torch.full((1,), self.size, dtype=torch.float64, device=self._device)}
        for i, entry in enumerate(self.natural.entries):
            q, probe = entry.current(), entry.known_probe()
            found |= {f"{i}.precision": q.precision, f"{i}.linear": q.linear}
            if probe is not None:
                found[f"{i}.probe"] = probe
        return found

    def _trained(self, values: dict[str, Tensor]) -> list[str]:
        in_q = {id(parameter) for parameter in self.natural.parameters}
        return [name for name in super()._trained(values) if id(self._own[name]) not in in_q]

    def _values(self) -> dict[str, Tensor]:
        self._own = super()._values()
        return self._own

    def _differentiate(
        self,
        private: Loss,
        values: dict[str, Tensor],
        leaves: Sequence[Tensor],
        batch: tuple[Tensor, Tensor, dict[str, Any]],
        extra: dict[str, Tensor],
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        natural = NaturalGradients(private.mll.model, self.natural.num_data, self.natural.beta)
        for i, entry in enumerate(natural.entries):
            entry.give(NaturalParameters(extra[f"{i}.precision"], extra[f"{i}.linear"]), extra.get(f"{i}.probe"))
        # q(u) is written in place: to copies.
        is_leaf = {id(leaf) for leaf in leaves}
        values = {f"loss.{n}": v if id(v) in is_leaf else v.detach().clone() for n, v in values.items()}
        loss, found, results = functional_call(_MovedLoss(private, natural), values, (*batch, leaves, extra["size"]))
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, found, strict=True)
        ]
        return loss, gradients, results

    def _take(self, results: Sequence[Tensor]) -> None:
        found = iter(results)
        for entry in self.natural.entries:
            entry.take([next(found) for _ in entry.tensors()])

    def _eager(self, x: Tensor, target: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Not here: whoever asks has an eager step of their own."""
        nan = torch.full((), torch.nan, device=self._device)
        return nan, torch.ones((), dtype=torch.bool, device=self._device)
