"""What is trained: the modules, the objective, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from ..checks import check_device
from ..collapsed import CollapsedGP
from ..data import first_parameter
from ..draws import seed_generators, seed_of
from ..gplvm import BayesianGPLVM, LatentVariableELBO
from ..likelihoods.targets import check_objective
from ..mlls import TighterELBO
from ..mlls.priors import counts_twice, log_prior
from ..posterior import has_own_call
from ..strategies import TighterStrategy
from . import distributed
from .batches import Batch


def inner_gp(model: Any) -> Any:
    """The GP within a model: the model itself, or its one part with a ``variational_strategy``, such as behind a network."""
    if is_collapsed(model) or hasattr(model, "variational_strategy"):
        return model
    found = [module for module in model.modules() if hasattr(module, "variational_strategy")]
    return found[0] if len(found) == 1 else model


def is_collapsed(model: Any) -> bool:
    """Whether a model has its data and trains on all of them at once."""
    return isinstance(model, (ExactGP, CollapsedGP))


def reference(model: Any, likelihood: Any) -> Tensor:
    """A parameter whose dtype and device the data take."""
    like = first_parameter(model, likelihood)
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"fit needs a model in float32 or float64; got {like.dtype}. Convert it, such as model.float()."
        )
    check_device(likelihood, like.device, "The likelihood is")
    return like


def make_objective(model: Any, likelihood: Any, objective: Callable[..., Any], num_data: int) -> Any:
    """What is maximised; None for a :class:`~tighter_gp.CollapsedGP`, which has a bound of its own."""
    if isinstance(model, CollapsedGP):
        if objective is not TighterELBO:
            raise ValueError("A CollapsedGP is trained on its own bound: leave objective= out.")
        return None
    if objective is TighterELBO and isinstance(model, ExactGP):
        return _ExactMLL(likelihood, model)
    if objective is TighterELBO and isinstance(model, BayesianGPLVM):
        objective = LatentVariableELBO
    return objective(likelihood, inner_gp(model), num_data)


class _ExactMLL(ExactMarginalLogLikelihood):
    """With each prior counted once: the kernel has the likelihood too."""

    def _add_other_terms(self, res: Tensor, params: Any) -> Tensor:
        for term in self.model.added_loss_terms():
            res = res.add(term.loss(*params))
        return res + log_prior(self.model, res.shape)


class Problem:
    """A model with its likelihood and objective. Nothing in it changes but the values of parameters.

    :param model: The model.
    :param likelihood: Its likelihood.
    :param objective: Is maximised: a module, or a function of q(f) and targets.
    :param num_data: Number of training points.
    :param seed: Seed of all that is random.
    :ivar parameters: All that is trained, by name.
    :ivar modules: The modules with a state, by name.
    """

    def __init__(self, model: Any, likelihood: Likelihood, objective: Any, num_data: int, seed: int) -> None:
        self.model, self.likelihood, self.objective = model, likelihood, objective
        self.gp, self.num_data, self.seed = inner_gp(model), num_data, seed
        modules = {"model": model, "likelihood": likelihood, "objective": objective}
        self.modules = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
        self.parameters = self._trained()
        if not self.parameters:
            raise ValueError("No parameter of the model, the likelihood or the objective requires a gradient.")
        is_ours = any(isinstance(module, TighterStrategy) for module in model.modules())
        # Whether strategies get the model's inputs as they are, and the keywords of its call.
        self.is_plain = is_ours and isinstance(model, ApproximateGP) and not has_own_call(model)
        # Whether q(f) of the model is that of its strategy; None where a first pass has to show it.
        self.is_direct = True if self.is_plain else None
        self.needs_index = any(getattr(module, "needs_index", False) for module in model.modules())
        self.device = next(iter(self.parameters.values())).device

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in _distinct(self.modules) if p.requires_grad}

    def check_parameters(self) -> None:
        """Raise if others are to be trained than at the start."""
        now = self._trained()
        names = sorted(name for name in {**self.parameters, **now} if self.parameters.get(name) is not now.get(name))
        if names:
            raise RuntimeError(
                f"A callback froze, unfroze or replaced {', '.join(names[:3])}, which fit cannot follow: return True to end "
                "the run, and call fit again."
            )

    # -- the loss -----------------------------------------------------------------------------------------------------

    def q(self, batch: Batch, **options: Any) -> MultivariateNormal:
        """Call the model on a batch.

        :param options: Of the strategy.
        """
        return self.model(batch.x, **self.positions(batch), **options)

    def loss_of(self, q: MultivariateNormal, batch: Batch, **options: Any) -> Tensor:
        """Minus the objective per datum, summed over a batch of models, times the weight of this process."""
        value = self.objective(q, batch.y, **batch.kwargs, **options)
        check_objective(value, q, batch.y)
        return -value.sum() * batch.weight

    def loss(self, batch: Batch, check: bool = True) -> Tensor:
        """The same, with q(f) of the model.

        :param check: Whether a strategy looks at once if all went well.
        """
        if isinstance(self.model, CollapsedGP):
            return -(self.model.bound() + log_prior(self.model)) * (batch.weight / self.num_data)
        if batch.x is None:  # of a latent-variable model
            return -self.objective(batch.rows, batch.y, **batch.kwargs).sum() * batch.weight
        if isinstance(self.model, ExactGP):
            return -self.objective(self.model(batch.x), batch.y).sum() * batch.weight
        return self.loss_of(self.q(batch, **self.unchecked(check)), batch)

    def unchecked(self, check: bool) -> dict[str, bool]:
        """The keyword that makes a strategy return NaN where something failed, instead of waiting for the device."""
        return {} if check or not self.is_plain else {"check": False}

    def positions(self, batch: Batch) -> dict[str, Tensor]:
        """The positions of a batch in the training set, if a conditional needs them."""
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
        """Take over the values of :meth:`state`."""
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        own = self._of_objective()
        for name, value in state["objective"].items():
            own[name].copy_(value)

    def copy_state(self) -> dict[str, dict[str, Tensor]]:
        """A copy of :meth:`state`."""
        return {
            name: {key: value.detach().clone() for key, value in values.items()}
            for name, values in self.state().items()
        }

    def _of_objective(self) -> dict[str, Tensor]:
        """Parameters and buffers of the objective that are in neither the model nor the likelihood."""
        tensors = _distinct(self.modules, with_buffers=True)
        return {name.partition(".")[2]: tensor for name, tensor in tensors if name.startswith("objective.")}

    def seed_step(self, step: int) -> None:
        """Seed the random numbers of a step, other ones in each process."""
        seed_generators(seed_of(self.seed, step, distributed.rank()), self.device)


def counts_a_prior_twice(objective: Any) -> bool:
    """Whether an objective of GPyTorch reaches a module with a prior in two ways."""
    is_stock = isinstance(objective, MarginalLogLikelihood) and type(objective).__module__.startswith("gpytorch.")
    return is_stock and counts_twice(objective)


def _distinct(modules: dict[str, torch.nn.Module], with_buffers: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, under the name of the first module that has it."""
    seen: set[int] = set()
    for prefix, module in modules.items():
        named = [*module.named_parameters(), *(module.named_buffers() if with_buffers else ())]
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}", tensor
