"""What is trained: the modules, the loss of a batch, and the random numbers of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from gpytorch.models import ExactGP
from gpytorch.models.deep_gps import DeepGP
from torch import Tensor

from ..collapsed import CollapsedGP
from ..draws import seed_generators
from ..likelihoods.targets import check_objective
from ..mlls.priors import log_prior
from . import distributed
from .batches import Batch
from .initialization import start_beta
from .randomness import own_random_state, seed_of


class Problem:
    """A model with its likelihood and objective, as the steps and the run see it. Nothing in it changes but parameters.

    :param model: The model.
    :param likelihood: Its likelihood.
    :param objective: Is maximised: a module or a function of q(f) and targets. None for a
        :class:`~tighter_gp.CollapsedGP`, which has its own.
    :param num_data: Number of training points.
    :param seed: Seed of all that is random.
    :ivar parameters: All that is trained, by name.
    :ivar modules: The modules with a state, by name.
    """

    def __init__(self, model: Any, likelihood: Any, objective: Any, num_data: int, seed: int) -> None:
        self.model, self.likelihood, self.objective = model, likelihood, objective
        self.num_data, self.seed = num_data, seed
        modules = {"model": model, "likelihood": likelihood, "objective": objective}
        self.modules = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
        self.parameters = self._trained()
        if not self.parameters:
            raise ValueError(
                "No parameter of the model, the likelihood or the objective requires a gradient; call requires_grad_() on those "
                "to train."
            )
        self.needs_index = any(getattr(module, "needs_index", False) for module in model.modules())
        self.device = next(iter(self.parameters.values())).device

    def _trained(self) -> dict[str, Tensor]:
        tensors = _distinct(self.modules, torch.nn.Module.named_parameters)
        return {name: parameter for name, parameter in tensors if parameter.requires_grad}

    def check_parameters(self) -> None:
        """Raise if others are to be trained than at the start."""
        now = self._trained()
        changed = sorted(name for name in {**self.parameters, **now} if self.parameters.get(name) is not now.get(name))
        if changed:
            raise RuntimeError(
                f"A callback froze, unfroze or replaced {', '.join(changed[:3])}, which fit cannot follow: end the run, return "
                "True, and call fit again."
            )

    def loss(self, batch: Batch) -> Tensor:
        """Minus the objective per datum, summed over a batch of models."""
        if isinstance(self.model, CollapsedGP):
            return -(self.model.bound() + log_prior(self.model)) / self.num_data
        if batch.x is None:
            return -self.objective(batch.rows, batch.y, **batch.kwargs).sum()
        is_exact = isinstance(self.model, ExactGP)  # which knows its points
        q = self.model(batch.x, **({} if is_exact else self.positions(batch)))
        value = self.objective(q, batch.y, **({} if is_exact else batch.kwargs))
        check_objective(value, q, batch.y)
        return -value.sum()

    def weighted_loss(self, batch: Batch) -> Tensor:
        """The same times the weight of this process in the batch."""
        loss = self.loss(batch)
        return loss if batch.weight == 1 else loss * batch.weight

    def begin(self, batch: Batch, is_natural: bool) -> None:
        """See :func:`~tighter_gp.training.initialization.start_beta`; and several models may not share a q(u) that natural
        gradients move, since each pays its KL divergence, where a natural step pays once.
        """
        if batch.x is not None and hasattr(self.model, "variational_strategy") and not isinstance(self.model, DeepGP):
            q = self.model(batch.x, **self.positions(batch))
            members = q.batch_shape.numel()
            if is_natural and members > 1 and members > self.model.variational_strategy.kl_divergence().numel():
                raise ValueError(
                    f"A batch of {members} models shares one q(u), which natural gradients cannot move: give it "
                    f"batch_shape={tuple(q.batch_shape)}, or pass natural_gradients=False."
                )
            average = partial(distributed.weighted_sum, weight=batch.weight)
            start_beta(self.model, self.likelihood, q, batch.y, average=average, **batch.kwargs)

    def positions(self, batch: Batch) -> dict[str, Tensor]:
        """The argument of the model that says which training points these are, if a conditional needs it."""
        if not self.needs_index:
            return {}
        if batch.rows is None:
            raise ValueError("PerPoint and Blocks need positions: let the DataLoader yield (x, y, index).")
        return {"index": batch.rows}

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The values of all modules; of the objective what is its own."""
        found = {name: self.modules[name].state_dict() for name in ("model", "likelihood")}
        return {**found, "objective": {name: tensor.detach() for name, tensor in self._of_objective().items()}}

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over the values of a checkpoint, or of the best step."""
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        own = self._of_objective()
        for name, value in state.get("objective", {}).items():  # which the first checkpoints did not have
            own[name].copy_(value)

    def copy_state(self) -> dict[str, dict[str, Tensor]]:
        """The same, to be kept."""
        return {
            name: {key: value.detach().clone() for key, value in values.items()}
            for name, values in self.state().items()
        }

    def _of_objective(self) -> dict[str, Tensor]:
        """Parameters and buffers of the objective that are in neither the model nor the likelihood."""
        tensors = itertools.chain(
            _distinct(self.modules, torch.nn.Module.named_parameters),
            _distinct(self.modules, torch.nn.Module.named_buffers),
        )
        return {name.partition(".")[2]: tensor for name, tensor in tensors if name.startswith("objective.")}

    # -- random numbers -----------------------------------------------------------------------------------------------

    def seed_step(self, step: int) -> None:
        """Random numbers of a step, other ones in each process."""
        seed_generators(seed_of(self.seed, step, distributed.rank()), self.device)

    def own_random_state(self) -> AbstractContextManager[None]:
        """To be seeded at will within it."""
        return own_random_state(self.device)


def _distinct(modules: dict[str, torch.nn.Module], named: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, under the name of the first module that has it."""
    seen: set[int] = set()
    for prefix, module in modules.items():
        for name, tensor in named(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}", tensor
