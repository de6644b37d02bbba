"""One training step: natural gradients for q(u), if it has any, and Adam for the rest, with one projection for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, deferred_checks
from ..likelihoods.properties import gaussian_noise, is_gaussian, observed
from ..maths.linalg import full_precision
from ..posterior import has_own_call
from ..strategies import TighterStrategy
from . import distributed, optimizer
from .batches import Batch
from .capture import Captured
from .natural import Natural, Part, Size, Slopes, parts_of
from .passes import Origin, first_pass, project, second_pass
from .problem import Problem
from .recipe import Recipe

# After a step that had to be repeated, so many are taken with their checks at once.
_CHECKED_STEPS = 20

# How far a natural step may move the mean of a point, where the slopes depend on q(u).
_REACH = 3.0

_REAL_TARGETS = (GaussianLikelihood, MultitaskGaussianLikelihood, StudentTLikelihood, LaplaceLikelihood)


class Call(NamedTuple):
    """What a step is told besides its state and its batch.

    :param number: Steps that were done before.
    :param total: Steps of the run.
    :param damping: Factor on the size of the step.
    :param undo: Puts the parameters back to where the step began.
    """

    number: int
    total: int
    damping: float
    undo: Callable[[], None]


class Info(NamedTuple):
    """What came of a step.

    :param loss: Minus the objective; NaN if it could not be computed.
    :param error: Why the step was not taken; None if it was.
    :param converged: Why no further step is needed; empty if one is.
    """

    loss: float
    error: Exception | None = None
    converged: str = ""


class Step(Protocol):
    """One way to train: :class:`GradientStep`, or :class:`~tighter_gp.training.lbfgs.LBFGSStep`."""

    def init(self) -> Any:
        """The state before the first step, from the parameters as they are."""
        ...

    def step(self, state: Any, batch: Batch, call: Call) -> tuple[Any, Info]:
        """Take a step."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# The body of a step, eager or captured
# ---------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What the body of a step computes, as tensors.

    :param loss: Minus the objective, times the weight of this process.
    :param gradients: Of the parameters that Adam trains.
    :param natural: The natural parameters of q(u), after their step.
    :param ok: Flags that must all be True.
    """

    loss: Tensor
    gradients: Sequence[Tensor]
    natural: list[Natural]
    ok: list[Tensor]


@torch.enable_grad()
def body(
    problem: Problem,
    parts: Sequence[Part],
    natural: Sequence[Natural],
    batch: Batch,
    size: Size,
    leaves: Sequence[Tensor],
    reduce: Any = None,
) -> Result:
    """Move q(u), then differentiate the loss at the new q(u). Only parameters of q(u) are changed, in place.

    :param parts: What natural gradients move; empty for Adam alone.
    :param size: Of the natural step.
    :param leaves: What Adam trains.
    :param reduce: Sums over processes.
    """
    ok: list[Tensor] = []
    if not parts:
        loss = first = problem.loss(batch)
    elif is_closed(problem, parts, batch):
        projection = project(problem, batch)
        slopes = [_gaussian_slopes(problem, parts, natural, batch, projection)]
        natural, ok = _move(parts, natural, slopes, size, None, reduce)
        with _frozen(parts):
            loss = first = second_pass(problem, batch, [projection])
    else:
        first, origins = first_pass(problem, batch)
        slopes = _slopes(problem, first, origins)
        natural, ok = _move(parts, natural, slopes, size, reach(problem, batch), reduce)
        with _frozen(parts):
            loss = second_pass(problem, batch, origins)
        ok = [*ok, torch.isfinite(loss.detach())]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True) if leaves else ()
    gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return Result(first.detach(), gradients, list(natural), ok)


@contextmanager
def _frozen(parts: Sequence[Part]) -> Iterator[None]:
    """q(u) is a constant: its gradients would cost as much as the projection's."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    asked = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in zip(parameters, asked, strict=True):
            parameter.requires_grad_(flag)


def is_closed(problem: Problem, parts: Sequence[Part], batch: Batch) -> bool:
    """Whether slopes need no pass: a single output with Gaussian noise, no missing targets, and q(f) from x alone."""
    model, strategy = problem.model, getattr(problem.gp, "variational_strategy", None)
    if model is not problem.gp or not isinstance(strategy, TighterStrategy) or has_own_call(model):
        return False
    is_plain = batch.x is not None and all(part.strategy is strategy for part in parts)
    likelihood, y = problem.likelihood, batch.y
    return is_plain and is_gaussian(likelihood) and observed(likelihood, y, y.shape[-1:]) is None


@torch.no_grad()
def _gaussian_slopes(
    problem: Problem, parts: Sequence[Part], natural: Sequence[Natural], batch: Batch, origin: Origin
) -> tuple[Any, Slopes]:
    r""":math:`g_n = (y_n - \mu_n) / \sigma_n^2` and :math:`\lambda_n = 1 / \sigma_n^2`, scaled to all data."""
    y, strategy, matrix = batch.y, origin.strategy, origin.matrix.detach()
    noise = gaussian_noise(problem.likelihood, y.shape[:-1], y.shape[-1:], **batch.kwargs)
    moved = {id(d) for part in parts for d in part.distributions}
    means = [(part.rows, part.mean(q)) for part, q in zip(parts, natural, strict=True)]
    start = 0
    for distribution in strategy.distributions:  # those that are frozen too
        rows = slice(start, start := start + distribution.num_inducing_points)
        if id(distribution) not in moved:
            means.append((rows, distribution().mean))
    mean = origin.prior_mean.detach()
    for rows, part_mean in means:
        mean = mean + (matrix[..., rows, :].mT @ part_mean.to(matrix).unsqueeze(-1)).squeeze(-1).to(mean)
    num_data, beta = _scale(problem)
    curvature = (num_data * batch.weight / (beta * y.size(-1)) / noise).expand(mean.shape)
    return strategy, Slopes(matrix, (y - mean) * curvature, curvature)


def _slopes(problem: Problem, loss: Tensor, origins: Sequence[Origin]) -> list[tuple[Any, Slopes]]:
    """Slopes by one backward pass that ends at the moments of q(f)."""
    moments = [moment for origin in origins for moment in (origin.mean, origin.explained)]
    found = torch.autograd.grad(loss, moments, allow_unused=True, materialize_grads=True)
    num_data, beta = _scale(problem)
    scale = -num_data / beta
    return [
        (origin.strategy, Slopes(origin.matrix.detach(), scale * g, (-2 * scale * s).clamp_min(0)))
        for origin, g, s in zip(origins, found[::2], found[1::2], strict=True)
    ]


def _scale(problem: Problem) -> tuple[int, float]:
    """N, and the factor on the KL divergence."""
    return getattr(problem.objective, "num_data", problem.num_data), getattr(problem.objective, "beta", 1.0)


def _move(
    parts: Sequence[Part],
    natural: Sequence[Natural],
    slopes: Sequence[tuple[Any, Slopes]],
    size: Size,
    reach: float | None,
    reduce: Any,
) -> tuple[list[Natural], list[Tensor]]:
    """A natural step of every part, written to the parameters of q(u); and flags."""
    reduce = reduce or Alone()
    of_strategy = {id(strategy): found for strategy, found in slopes}
    own = [of_strategy[id(part.strategy)] for part in parts]
    moved, flags = [], []
    with torch.no_grad(), full_precision(own[0].matrix.device.type):
        sums = [t for part, q, s in zip(parts, natural, own, strict=True) for t in part.sums(q, s)]
        sums = reduce.first(*sums)
        for number, (part, q, found) in enumerate(zip(parts, natural, own, strict=True)):
            gram, vector = sums[2 * number : 2 * number + 2]
            q, values, ok = part.move(q, gram, vector, found, size, reach, reduce)
            for parameter, value in zip(part.parameters(), values, strict=True):
                parameter.copy_(value)
            moved.append(q)
            flags.append(ok)
    return moved, flags


def reach(problem: Problem, batch: Batch) -> float | Tensor:
    """How far the mean of a point may move; with targets on the scale of f, in units of their spread."""
    if not isinstance(problem.likelihood, _REAL_TARGETS):
        return _REACH
    return _REACH * torch.nan_to_num(batch.y.detach()).std(correction=0).double().clamp_min(1.0)


class Alone:
    """Sums over the processes where there is but one."""

    def first(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The sums of the step."""
        return tensors

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return tensors

    def largest(self, value: Tensor) -> Tensor:
        """The largest value."""
        return value


# ---------------------------------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a run remembers.

    :param natural: q(u) by its natural parameters.
    :param adam: Of the other parameters.
    :param spread: Standard deviation of the inputs, the unit of the inducing points' learning rate; None before a batch.
    :param is_warm: Whether the run began with a q(u) that knew of data.
    """

    natural: list[Natural]
    adam: optimizer.Adam
    spread: float | None
    is_warm: bool


class GradientStep:
    """Moves q(u) by natural gradients, the rest by Adam.

    :param problem: What is trained.
    :param recipe: Step sizes, resolved; ``natural=0`` for Adam alone.
    :param full_batch: Whether every batch has all data.
    :param compile: Whether steps are compiled.
    """

    def __init__(self, problem: Problem, recipe: Recipe, full_batch: bool, compile: bool = False) -> None:
        self.problem, self.recipe, self.full_batch = problem, recipe, full_batch
        self.parts = parts_of(problem.model) if recipe.natural else []
        in_q = {id(parameter) for part in self.parts for parameter in part.parameters()}
        self.rest = {name: p for name, p in problem.parameters.items() if id(p) not in in_q}
        self.kinds, self.bounds = optimizer.kinds_of(problem), optimizer.stated_bounds(problem)
        self.captured = Captured(problem, body, self.parts, list(self.rest)) if compile else None
        self.num_checked = 0

    def init(self) -> State:
        """From the parameters as they are."""
        natural = [part.init() for part in self.parts]
        is_warm = any(part.knows_data(q) for part, q in zip(self.parts, natural, strict=True))
        return State(natural, optimizer.init(list(self.rest.values())), None, is_warm)

    def step(self, state: State, batch: Batch, call: Call) -> tuple[State, Info]:
        """Take a step, unless the loss or a gradient is not finite."""
        size = self.recipe.natural_size(call.number, call.total, self.full_batch, state.is_warm)
        attempts = [self._checked]
        if self.captured is not None and not distributed.is_active():
            attempts.insert(0, self._compiled)
        elif self.problem.device.type != "cpu" and not distributed.is_active() and not self.num_checked:
            attempts.insert(0, self._unseen)
        self.num_checked = max(0, self.num_checked - 1)
        loss, result, error = math.nan, None, None
        for number, attempt in enumerate(attempts):
            if number:
                call.undo()
                self.num_checked = _CHECKED_STEPS
            self.problem.seed_step(call.number)
            error = None
            try:
                loss, result = attempt(state, batch, call.damping * batch.share * size)
            except NUMERICAL_ERRORS as caught:
                error = caught
            if error is None and result is not None:
                break
        if error is not None or result is None:
            return state, Info(math.nan, error)
        spread = _spread(self.problem, self.kinds, batch) if state.spread is None else state.spread
        rates = self._rates(call, batch.share, spread)
        gradients = [gradient * batch.share for gradient in result.gradients] if batch.share < 1 else result.gradients
        adam = optimizer.update(state.adam, gradients, list(self.rest.values()), rates)
        with torch.no_grad():
            for parameter, lower, upper in self.bounds:
                parameter.clamp_(lower, upper)
        return State(result.natural, adam, spread, state.is_warm), Info(loss)

    def _rates(self, call: Call, share: float, spread: float) -> list[float]:
        """The learning rate of every parameter that Adam trains."""
        recipe = self.recipe
        lr, factor = recipe.lr or 0.01, call.damping * share * recipe.lr_factor(call.number, call.total)
        if not recipe.natural:
            return [lr * factor] * len(self.rest)
        inducing = call.damping * share * recipe.inducing_lr_factor(call.number, call.total)
        rates = {"inducing": lr * recipe.inducing_lr * spread * inducing, "other": recipe.other_lr * factor}
        return [rates.get(self.kinds[name], lr * factor) for name in self.rest]

    # -- attempts: each gives the loss over all processes and the result, or raises ------------------------------------

    def _checked(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        leaves, sums = list(self.rest.values()), Sums(self.problem, self.parts, state.natural)
        try:
            result = body(self.problem, self.parts, state.natural, batch, size, leaves, sums)
        except NUMERICAL_ERRORS:
            sums.fail(leaves)
            raise
        loss, *gradients = sums.last(result.loss, *result.gradients)
        return _read(result._replace(loss=loss, gradients=gradients))

    def _unseen(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        """With one look at the device: what a step would look at on its way is read with the loss."""
        with deferred_checks(asks_precision=True) as flags:
            try:
                result = body(self.problem, self.parts, state.natural, batch, size, list(self.rest.values()))
            except ValueError as error:
                raise NanError(str(error)) from error
        return _read(result._replace(ok=[*result.ok, *flags]))

    def _compiled(self, state: State, batch: Batch, size: float) -> tuple[float, Result]:
        assert self.captured is not None
        found = self.captured(state.natural, batch, size)
        if found is None:
            raise NanError("the step is not compiled")
        loss, ok, gradients, natural, values = found
        parameters = (parameter for part in self.parts for parameter in part.parameters())
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return _read(Result(loss, gradients, natural, [ok]))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, state: State) -> dict[str, Any]:
        """The state as tensors, numbers, lists and dicts."""
        return {
            "natural": [list(q) for q in state.natural],
            "adam": list(state.adam),
            "spread": state.spread,
            "is_warm": state.is_warm,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> State:
        """The state from that."""
        device = self.problem.device
        natural = [Natural(*(tensor.to(device) for tensor in q)) for q in saved["natural"]]
        count, *moments = saved["adam"]
        adam = optimizer.Adam(count, *([tensor.to(device) for tensor in tensors] for tensors in moments))
        return State(natural, adam, saved["spread"], saved["is_warm"])


def _read(result: Result) -> tuple[float, Result]:
    """The loss as a number, if it and all gradients are finite and all flags True: one read from the device."""
    norms = torch._foreach_norm(list(result.gradients), math.inf) if result.gradients else []
    flags = [flag.reshape(()).double() for flag in result.ok]
    norms = [norm.double() for norm in norms]
    values = torch.stack([result.loss.reshape(()).double(), *norms, *flags]).tolist()
    passed = all(values[len(values) - len(flags) :]) if flags else True
    if not passed or not all(map(math.isfinite, values)):
        raise NanError(f"the loss is {values[0]}, or a gradient or the precision of q(u) is of no use.")
    return values[0], result


class Sums(Alone):
    """The two messages of a step between processes: the sums of the natural step, then the loss with its gradients.

    A process whose step failed says so in the place of the next one, so that none waits for it.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part], natural: Sequence[Natural]) -> None:
        like = next(iter(problem.parameters.values()))
        self.send, self.dtype = distributed.StepSums(like.detach().reshape(-1)[:1]), like.dtype
        self.num_natural = sum(q.precision.numel() + q.linear.numel() for q in natural)
        self.is_first = bool(parts)

    def first(self, *tensors: Tensor) -> Sequence[Tensor]:
        self.is_first = False
        return self.send(torch.float64, *tensors)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.send(torch.float64, *tensors)

    def largest(self, value: Tensor) -> Tensor:
        return self.send.largest(value)

    def last(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The loss and its gradients, summed."""
        return self.send(self.dtype, *tensors)

    def fail(self, leaves: Sequence[Tensor]) -> None:
        """Say that this process failed, unless that came from another."""
        if not self.send.has_failed:
            size = self.num_natural if self.is_first else 1 + sum(leaf.numel() for leaf in leaves)
            with suppress(NanError):
                self.send.fail(size, torch.float64 if self.is_first else self.dtype)


def _spread(problem: Problem, kinds: Mapping[str, str], batch: Batch) -> float:
    """Root mean square over dimensions of the standard deviation of a batch's inputs, over all processes.

    Inducing points would not do: k-means puts some on outliers.
    """
    if batch.x is None:
        return 1.0
    inputs = batch.x.detach().double()
    inputs = inputs.reshape(-1, inputs.size(-1)) if inputs.dim() > 1 else inputs.unsqueeze(-1)
    sums = distributed.StepSums(inputs.reshape(-1)[:1])
    count, first, second = sums(
        torch.float64, inputs.new_tensor([len(inputs)]), inputs.sum(0), inputs.square().sum(0)
    )
    found = math.sqrt(max(0.0, float((second / count - (first / count).square()).mean())))
    if found:
        return found
    points = [p.detach().double() for name, p in problem.parameters.items() if kinds[name] == "inducing"]
    return math.sqrt(sum(float(p.var(-2).mean()) for p in points if p.size(-2) > 1)) or 1.0
