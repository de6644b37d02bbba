"""What is trained: the modules, the objective, and the loss of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from ..carrier import Origin, find_carriers
from ..checks import check_device
from ..collapsed import CollapsedGP
from ..data import first_parameter
from ..draws import seed_generators, seed_of
from ..gplvm import BayesianGPLVM, LatentVariableELBO
from ..likelihoods.family import family
from ..likelihoods.targets import check_objective
from ..mlls import TighterELBO
from ..mlls.priors import log_prior
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
    if getattr(model, "outcome_transform", None) is not None:
        raise TypeError("This model of BoTorch transforms its targets: train it by botorch.fit.fit_gpytorch_mll.")
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


class Pass(NamedTuple):
    """One evaluation of a model on a batch.

    :param q: q(f).
    :param loss: From q(f) to the loss of the batch.
    """

    q: MultivariateNormal
    loss: Callable[[MultivariateNormal], Tensor]

    @property
    def origins(self) -> list[Origin]:
        """What q(f) was made of, one per strategy."""
        return origins_of(self.q)


def origins_of(q: MultivariateNormal) -> list[Origin]:
    """What q(f) was made of, one per strategy."""
    found = (carrier.origin for carrier in find_carriers(q.lazy_covariance_matrix))
    return [origin for origin in found if origin is not None]


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
        """Each parameter once, under the name of the first module that has it."""
        named = torch.nn.ModuleDict(self.modules).named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

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
        return self.model(batch.x, **self._positions(batch), **options)

    def loss_of(self, q: MultivariateNormal, batch: Batch, **options: Any) -> Tensor:
        """Minus the objective per datum, summed over a batch of models, times the weight of this process."""
        value = self.objective(q, batch.y, **batch.kwargs, **options)
        check_objective(value, q, batch.y)
        return -value.sum() * batch.weight

    def loss(self, batch: Batch) -> Tensor:
        """The same, with q(f) of the model."""
        if isinstance(self.model, CollapsedGP):
            return -(self.model.bound() + log_prior(self.model)) / self.num_data
        if batch.x is None:  # of a latent-variable model
            return -self.objective(batch.rows, batch.y, **batch.kwargs).sum() * batch.weight
        if isinstance(self.model, ExactGP):
            return -self.objective(self.model(*self.model.train_inputs), self.model.train_targets).sum()
        return self.loss_of(self.q(batch), batch)

    def first_pass(self, batch: Batch, check: bool, is_natural: bool) -> Pass:
        """q(f) at the q(u) of the moment.

        :param check: Whether to look at once if all went well; where that can be deferred, what failed is NaN.
        :param is_natural: Whether a natural step follows: it asks samples for a curvature, which they do not show by themselves.
        """
        options = {} if check or not self.is_plain else {"check": False}
        if batch.x is None:
            q_x = self.model.latents.q(batch.rows)
            kwargs = {**batch.kwargs}
            x = q_x.rsample(torch.Size([kwargs.pop("num_samples", 1)]))  # the same draws in both passes  [S, B, Q]
            at = lambda q: -self.objective.at(x, q_x, batch.y, index=batch.rows, q_f=q, **kwargs).bound * batch.weight
            return Pass(self.objective.q_f(x, batch.rows, **options), at)
        is_sampled = is_natural and isinstance(self.objective, TighterELBO) and family(self.likelihood).is_sampled
        told = {"by_curvature": True} if is_sampled else {}
        found = Pass(self.q(batch, **options), lambda q: self.loss_of(q, batch, **told))
        if is_natural and self.is_direct is None and len(found.origins) == 1:
            with torch.no_grad():
                again = _from_origin(self.gp, found.origins[0])
                self.is_direct = again.mean.shape == found.q.mean.shape and torch.equal(again.mean, found.q.mean)
        return found

    def second_pass(self, batch: Batch, origins: Sequence[Origin]) -> MultivariateNormal:
        """q(f) at another q(u), from the projection of the first pass where it alone makes q(f)."""
        if len(origins) > 1 or not self.is_direct:
            return self.q(batch)
        return _from_origin(self.gp, origins[0])

    def _positions(self, batch: Batch) -> dict[str, Tensor]:
        """The positions of a batch in the training set, if a conditional needs them."""
        if not self.needs_index:
            return {}
        if batch.rows is None:
            raise ValueError("PerPoint and Blocks need positions: let the DataLoader yield (x, y, index).")
        return {"index": batch.rows}

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The values of all modules."""
        return {name: module.state_dict() for name, module in self.modules.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the values of :meth:`state`."""
        for name, module in self.modules.items():
            module.load_state_dict(state[name])

    def copy_state(self) -> dict[str, Any]:
        """A copy of :meth:`state`, in which modules share what they share here."""
        return copy.deepcopy(self.state())

    def seed_step(self, step: int) -> None:
        """Seed the random numbers of a step, other ones in each process."""
        seed_generators(seed_of(self.seed, step, distributed.rank()), self.device)


def _from_origin(gp: Any, origin: Origin) -> MultivariateNormal:
    positions = {} if origin.index is None else {"index": origin.index}
    return gp.variational_strategy(origin.x, projection=origin.projection, **positions)
