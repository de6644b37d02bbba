"""A step with natural gradients for q(u) and Adam for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import VariationalELBO
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import LMCVariationalStrategy
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, passed
from ..conditionals import Conditional
from ..likelihoods.properties import is_sampled
from ..mlls import TighterELBO
from ..strategies import TighterStrategy
from . import distributed
from .batches import Batch
from .natural import NaturalGradients
from .natural_compiled import CompiledNaturalStep
from .natural_forms import has_natural_step
from .optimizers import Optimizers
from .problem import Problem
from .recipe import Recipe
from .steps import Attempts, Call, Info, is_full


def refusal(model: torch.nn.Module, likelihood: Any, objective: Any) -> str:
    """Why natural gradients cannot train a model, for a message; empty if they can."""
    strategies: list[Any] = [module for module in model.modules() if isinstance(module, TighterStrategy)]
    forms = [distribution for strategy in strategies for distribution in strategy.distributions]
    if isinstance(model, DeepGP):
        return "the slopes of a deep GP's hidden layers are sampled, and no curvature"
    if not forms:
        return "the model has no strategy of tighter_gp"
    if not any(map(has_natural_step, forms)):
        return f"q(u) is a {type(forms[0]).__name__}, which has no natural parameters"
    if not isinstance(objective, VariationalELBO | TighterELBO) and not hasattr(objective, "is_tighter"):
        return f"{type(objective).__name__} is not known to be an evidence lower bound"
    bases = [base for base in (TighterELBO, VariationalELBO) if isinstance(objective, base)]
    methods = ("forward", "_log_likelihood_term")
    if any(getattr(type(objective), name) is not getattr(base, name) for base in bases[:1] for name in methods):
        return f"{type(objective).__name__} changes the bound, and q(u) would be moved to the optimum of another"
    if is_sampled(likelihood) and not isinstance(objective, TighterELBO):
        return f"{type(objective).__name__} samples {type(likelihood).__name__}, whose slopes are then no curvature"
    return ""


class NaturalState(NamedTuple):
    """What a run with natural gradients remembers.

    :param natural: q(u) by its natural parameters.
    :param optimizers: Adam for the rest.
    :param spread: Unit of the inducing points' learning rate.
    :param is_warm: Whether the run began with a q(u) that knew of data.
    """

    natural: NaturalGradients
    optimizers: Optimizers
    spread: float
    is_warm: bool


class NaturalStep:
    """Moves q(u) by a natural gradient, then the other parameters by Adam, with one projection for both.

    :param problem: What is trained.
    :param recipe: Step sizes.
    :param schedule: Factor on the learning rates as a function of the fraction done; default the recipe's own.
    :param batch_size: Points per step, over all processes.
    :param other_lr: Learning rate of parameters that are none of a GP: a network's weights, tables of latents.
    :param compile: Whether steps are compiled: True, False, or ``"auto"`` where nobody waits for it.
    """

    name = "natural"

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        schedule: Callable[[float], float] | None,
        batch_size: int,
        other_lr: float,
        compile: bool | str = False,
    ) -> None:
        self.problem, self.recipe, self.schedule = problem, recipe, schedule
        self.batch_size, self.other_lr = batch_size, other_lr
        self.kinds, self.attempts = _kinds(problem), Attempts(problem)
        is_asked_for = compile is True
        self.compiled = CompiledNaturalStep(problem.objective, self._natural(), is_asked_for) if compile else None

    def init(self) -> NaturalState | None:
        """None: which gradients are sparse, and the spread of the inputs, are known after the first batch."""
        return None

    def step(self, state: NaturalState | None, batch: Batch, call: Call) -> tuple[NaturalState | None, Info]:
        """Take a step, unless the loss or a gradient is not finite; then q(u) is as it was."""
        natural = self._natural() if state is None else state.natural
        in_q = {id(parameter) for parameter in natural.parameters}
        rest = {name: p for name, p in self.problem.parameters.items() if id(p) not in in_q}
        is_warm = natural.knows_data() if state is None else state.is_warm
        size = call.damping * self._natural_size(batch, call, is_warm)

        def gradients(batch: Batch) -> tuple[Tensor | None, Exception | None]:
            return self._gradients(natural, rest, batch, call, size)

        loss, largest, error = self.attempts(rest, gradients, batch, call.number, natural.undo)
        if error is not None:
            natural.undo()
            return state, Info(math.nan, error)
        if state is None:
            sparse = {name for name, p in rest.items() if p.grad is not None and p.grad.is_sparse}
            spread = 1.0 if batch.x is None else _spread(batch.x) or self._inducing_spread()
            state = NaturalState(natural, self._optimizers(sparse, spread), spread, is_warm)
        call.keep(natural.values_before())
        state.optimizers.scale_down(largest, batch.share)
        state.optimizers.step(self._factor(call), call.damping * batch.share)
        return state, Info(loss)

    def _gradients(
        self, natural: NaturalGradients, rest: dict[str, Tensor], batch: Batch, call: Call, size: float
    ) -> tuple[Tensor | None, Exception | None]:
        """Move q(u); the weighted loss at the new one, with gradients of the rest in ``.grad``."""
        if self.compiled is not None and is_full(batch, self.batch_size):
            loss = self._compiled_loss(self.compiled, natural, batch, call, size)
            if loss is not None:
                return loss, None
        problem, agreed = self.problem, _Agreement(self.problem.device)
        natural.forget()
        natural.reduce = agreed.sum if distributed.is_active() else None

        def evaluate() -> Tensor:
            problem.seed_step(call.number)  # a second pass draws what the first did
            return problem.weighted_loss(batch)

        gaussian = None
        if batch.x is not None:
            gaussian = natural.gaussian_targets(problem.objective, batch.y, **batch.kwargs)
        weight = 1.0 if gaussian is None else batch.weight
        try:
            loss, gradients, _ = natural.train_step(evaluate, list(rest.values()), size, gaussian, weight)
        except NUMERICAL_ERRORS as error:
            agreed.give_up()
            return None, error
        for parameter, gradient in zip(rest.values(), gradients, strict=True):
            parameter.grad = gradient
        return loss.detach().sum(), None

    def _compiled_loss(
        self, compiled: CompiledNaturalStep, natural: NaturalGradients, batch: Batch, call: Call, size: float
    ) -> Tensor | None:
        """The same by a compiled graph; None where that failed."""
        assert batch.x is not None
        natural.forget()
        compiled.natural, compiled.size = natural, size
        self.problem.seed_step(call.number)
        loss = compiled(batch.x, batch.y, **self.problem.positions(batch), **batch.kwargs).sum()
        if compiled.is_compiled and passed(torch.isfinite(loss)):
            return loss
        natural.undo()
        self.problem.objective.zero_grad(set_to_none=True)
        return None

    def _natural(self) -> NaturalGradients:
        objective = self.problem.objective
        num_data = getattr(objective, "num_data", self.problem.num_data)
        return NaturalGradients(self.problem.model, num_data, getattr(objective, "beta", 1.0))

    def _inducing_spread(self) -> float:
        """For batches of one row, which have none."""
        points = [p for name, p in self.problem.parameters.items() if self.kinds[name] == "inducing"]
        return math.sqrt(sum(float(p.detach().double().var(-2).mean()) for p in points if p.size(-2) > 1)) or 1.0

    def _natural_size(self, batch: Batch, call: Call, is_warm: bool) -> float:
        is_full = self.batch_size >= self.problem.num_data
        if self.schedule is not None:
            factor, end = self.schedule(call.fraction), self.recipe.natural_end
            size = self.recipe.natural * (factor + end * (1 - factor))
            return self.recipe.natural_full if is_full else batch.share * size
        return self.recipe.natural_size(call.number, call.total, batch.share, is_full, is_warm)

    def _factor(self, call: Call) -> Callable[[str], float]:
        """Factor on the learning rate of a kind of parameter."""
        if self.schedule is not None:
            factor = self.schedule(call.fraction)
            return lambda kind: factor
        usual = self.recipe.lr_factor(call.number, call.total)
        inducing = self.recipe.inducing_lr_factor(call.number, call.total)
        return lambda kind: inducing if kind == "inducing" else usual

    def _optimizers(self, sparse: set[str], spread: float) -> Optimizers:
        rates = {"hyper": self.recipe.lr, "inducing": self.recipe.inducing_lr * spread, "other": self.other_lr}
        rest = {name: p for name, p in self.problem.parameters.items() if self.kinds[name] != "q"}
        return Optimizers(rest, sparse, self.kinds, rates)

    def state_dict(self, state: NaturalState | None) -> dict[str, Any]:
        """Natural parameters, and states of the optimizers."""
        if state is None:
            return {"natural": None}
        return {
            "natural": state.natural.state_dict(),
            "optimizers": state.optimizers.state_dict(),
            "spread": state.spread,
            "is_warm": state.is_warm,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> NaturalState | None:
        """The state that was saved."""
        if saved.get("natural") is None:
            return None
        natural, states = self._natural(), saved["optimizers"]
        natural.load_state_dict(saved["natural"])
        optimizers = self._optimizers(set(states["sparse"]), saved["spread"])
        optimizers.load_state_dict(states)
        return NaturalState(natural, optimizers, saved["spread"], saved.get("is_warm", False))


class _Agreement:
    """Sums over processes that none enters if one of them failed: each says so once per step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_known = device, False

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the processes, in place."""
        if self._tell(0.0):
            raise NanError("another process failed")
        distributed.sum_tensors(tensors)

    def give_up(self) -> None:
        """Say that this process failed before it had anything to add."""
        self._tell(1.0)

    def _tell(self, failed: float) -> float:
        """How many failed, if that was not said before."""
        if self.is_known:
            return 0.0
        self.is_known = True
        return distributed.total(failed, self.device)


def _spread(inputs: Tensor) -> float:
    """Root mean square over dimensions of the standard deviation of a batch's inputs, over all processes.

    The unit of the learning rate of inducing points; 1 for standardised inputs. The inducing points themselves would not
    do: k-means puts some on outliers.
    """
    inputs = inputs.detach().double().unsqueeze(-1) if inputs.dim() == 1 else inputs.detach().double()
    inputs = inputs.reshape(-1, inputs.size(-1))
    sums = [inputs.new_tensor([len(inputs)]), inputs.sum(0), inputs.square().sum(0)]
    if distributed.is_active():
        distributed.sum_tensors(sums)
    count, first, second = sums
    return math.sqrt(max(0.0, float((second / count - (first / count).square()).mean())))


def _hyperparameters(module: torch.nn.Module) -> Iterator[Tensor]:
    """The parameters of a part of a GP, without those of networks inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, gpytorch.Module):
            yield from _hyperparameters(child)


def _kinds(problem: Problem) -> dict[str, str]:
    """Which parameters are q(u)'s, inducing points, hyperparameters of a GP, or something else."""
    kinds: dict[int, str] = {}
    for root in problem.modules.values():
        for module in root.modules():
            if isinstance(module, TighterStrategy):
                for distribution in module.distributions:
                    # One that is frozen in part has no natural step: Adam trains the rest of it.
                    if has_natural_step(distribution) and all(p.requires_grad for p in distribution.parameters()):
                        kinds |= {id(p): "q" for p in distribution.parameters()}
            if isinstance(module, Kernel | Mean | Likelihood | Conditional):
                for parameter in _hyperparameters(module):
                    kinds.setdefault(id(parameter), "hyper")
            if isinstance(module, LMCVariationalStrategy):
                kinds[id(module.lmc_coefficients)] = "hyper"
    found = {}
    for name, parameter in problem.parameters.items():
        is_location = name.endswith(("inducing_points", "orthogonal_points"))
        found[name] = "inducing" if is_location else kinds.get(id(parameter), "other")
    return found
