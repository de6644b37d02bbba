r"""A training step as one compiled graph.

The eager step is run once and every tensor operation of it written down, forward and backward, from the raw parameters
to their gradients: what GPyTorch does in Python (constraints, lazy tensors, caches) is paid for once. The list is then
compiled. It holds no value read back to the host: what the eager step would look at becomes a flag of the graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from gpytorch import Module, settings
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from .checks import NUMERICAL_ERRORS, deferred_checks, first_line, plain_value, same_values
from .inductor import compile_recorded
from .maths.linalg import full_precision
from .settings import float32_factor

Graph = Callable[..., Sequence[Tensor]]

# What torch keeps in a module, and what GPyTorch and our strategies remember of earlier calls; the rest is its own.
_REMEMBERED = {"_memoize_cache", "_factor_cache", "_q_cache", "_initialized_key", "_warned"}
_OF_EVERY_MODULE = frozenset(vars(Module())) | _REMEMBERED

# Entries of a tensor of whole numbers that is looked at in every step.
_MOST_READ = 2**16

# Buffers that say what has been done.
_FLAGS = ("variational_params_initialized", "updated_strategy")


class Loss(torch.nn.Module):
    """Minus an objective as a function of the batch, with every parameter, buffer and other tensor below it."""

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        super().__init__()
        self.mll = mll

    def forward(self, x: Tensor, target: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Of ``kwargs`` the model gets ``index``, the objective the rest."""
        kwargs = dict(kwargs)
        call = {"index": kwargs.pop("index")} if "index" in kwargs else {}
        return -self.mll(self.mll.model(x, **call), target, **kwargs)


class CompiledStep:
    r"""
    One training step, compiled: ``loss = step(x, y)`` computes the loss, its gradients, and updates the parameters.

    Same numbers as ``-mll(model(x), y)`` and ``backward()``, to rounding; an objective that samples, as for a softmax,
    draws other numbers. A batch of another shape is compiled again, once for each shape, so keep the batch size fixed and
    let the last batch of an epoch be smaller. A step whose factorisation fails, or whose loss is not finite, returns NaN
    and leaves the parameters as they were; ``step.failed`` counts such steps on the device, and nothing is read back to
    the host if the optimizer is ``torch.optim.Adam(fused=True)`` (other optimizers cost one reading per step).

    What an eager step can do without looking at values can be captured: the kernels of
    ``tighter_gp.prior.kernels``, Gaussian noise, :class:`~tighter_gp.likelihoods.BernoulliLogitLikelihood`,
    :class:`~tighter_gp.likelihoods.PoissonLikelihood` and softmax, all strategies and GPyTorch's wrappers around them.
    For anything else a warning says what stood in the way, and steps are eager. One thing is lost: where float32 rounding
    of large prior variances exceeds the jitter, an eager step changes to the precision of the factor, a compiled one
    cannot. Scale the targets, or train in float64. A changed part of the model, a frozen or a replaced parameter
    makes another graph.

    :param mll: The objective, which has the model and the likelihood.
    :param optimizer: Updates the parameters; without one the gradients are left in ``.grad``.
    :param options: Passed to :func:`torch.compile`, such as ``backend=`` or ``mode=``. Without any, a CPU's step goes straight to
        torch's Inductor, which takes less than half the time.
    :ivar torch.Tensor failed: Number of steps that were not taken, on the device of the model.
    :ivar bool is_compiled: Whether the last step was a compiled one.

    Example:
        >>> optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01, fused=True)
        >>> step = tighter_gp.CompiledStep(tighter_gp.TighterELBO(likelihood, model, 40), optimizer, backend="aot_eager")
        >>> loss = step(train_x, train_y)
        >>> step.is_compiled
        True
    """

    def __init__(
        self, mll: MarginalLogLikelihood, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> None:
        self.mll, self.optimizer = mll, optimizer
        self.options = options
        self._loss = Loss(mll)
        self._device = next(self._loss.parameters()).device
        self._graphs: dict[tuple, Graph | None] = {}
        self._is_fused = bool(optimizer is not None and optimizer.defaults.get("fused"))
        self.failed = torch.zeros((), dtype=torch.int64, device=self._device)
        self.is_compiled = False

    def __call__(self, x: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        """Take one step on a batch; returns the loss, minus the bound per datum, without a graph.

        :param kwargs: Passed to the objective, such as ``noise=``; ``index=`` goes to the model.
        """
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        for name, value in {"x": x, "target": target, **tensors}.items():
            if value.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and a CompiledStep gives those of the objective's own parameters alone: "
                    "detach it, put what computes it into the model, or call mll(model(x), y) and backward()."
                )
        values, extra = self._values(), self._extra()
        # What the graph is made of besides the values of tensors.
        key = (
            *((value.shape, value.dtype, value.device) for value in (x, target, *tensors.values(), *extra.values())),
            *((name, value) for name, value in kwargs.items() if name not in tensors),
            *((name, value.shape, value.dtype, value.device, value.requires_grad) for name, value in values.items()),
            *self._constants(),
            settings._linalg_dtype_cholesky.value(),
            settings.num_likelihood_samples.value(),
            settings.variational_cholesky_jitter.value(x.dtype),
            settings.observation_nan_policy.value(),
            float32_factor.on(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        )
        if key not in self._graphs:
            with suppress(*NUMERICAL_ERRORS):  # the step fails for its values, and eagerly; the next may be captured
                self._graphs[key] = self._capture(values, x, target, tensors, kwargs, extra)
        graph = self._graphs.get(key)
        self.is_compiled = graph is not None
        self._move(next(iter(values.values())).device)
        if graph is None:
            loss, failed = self._eager(x, target, kwargs)
        else:
            loss, failed = self._run(graph, values, x, target, tensors, extra)
        self.failed += failed
        if self.optimizer is not None:
            self._update(failed)
        return loss

    def _move(self, device: torch.device) -> None:
        """Count where the model is now."""
        if device != self._device:
            self._device, self.failed = device, self.failed.to(device)

    def _run(
        self,
        graph: Graph,
        values: dict[str, Tensor],
        x: Tensor,
        target: Tensor,
        tensors: dict[str, Tensor],
        extra: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), full_precision(self._device.type):
            # Cloned: CUDA graphs write the results of the next step to the same place.
            inputs = _flat(values, x, target, tensors, extra)
            loss, failed, *results = (result.clone() for result in graph(*inputs))
        trained = self._trained(values)
        for name, parameter in values.items():
            if isinstance(parameter, torch.nn.Parameter) and name not in trained:
                parameter.grad = None
        for name, gradient in zip(trained, results, strict=False):
            values[name].grad = gradient
        self._take(results[len(trained) :])
        return loss, failed

    # -- what a step with a state of its own does otherwise -----------------------------------------------------------

    _asks_precision = False

    def _extra(self) -> dict[str, Tensor]:
        """Tensors that the graph takes besides the parameters and the batch."""
        return {}

    def _trained(self, values: dict[str, Tensor]) -> list[str]:
        """Whose gradients the graph gives."""
        return [name for name, value in values.items() if value.requires_grad]

    def _differentiate(
        self,
        private: Loss,
        values: dict[str, Tensor],
        leaves: Sequence[Tensor],
        batch: tuple[Tensor, Tensor, dict[str, Any]],
        extra: dict[str, Tensor],
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """The loss, its gradients, and what else a step results in."""
        loss = functional_call(private, values, batch)
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
        return loss, gradients, ()

    def _take(self, results: Sequence[Tensor]) -> None:
        """Keep what else a step resulted in."""

    def _say(self, message: str) -> None:
        """Tell whoever asked for a compiled step that there is none."""
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _eager(self, x: Tensor, target: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.mll.zero_grad(set_to_none=True)
        try:
            loss = self._loss(x, target, kwargs)
            loss.sum().backward()
        except NUMERICAL_ERRORS:
            loss = torch.full((), torch.nan, device=self._device)
        gradients = [parameter.grad for parameter in self._loss.parameters() if parameter.grad is not None]
        failed = ~_all_finite(loss.detach(), *(g.coalesce().values() if g.is_sparse else g for g in gradients))
        return torch.where(failed, torch.nan, loss.detach()), failed

    def _values(self) -> dict[str, Tensor]:
        """The parameters and buffers of the moment, and tensors that are neither, as fixed noise: any may have been replaced."""
        found: dict[str, Tensor] = dict(self._loss.named_parameters())
        found |= {name: buffer for name, buffer in self._loss.named_buffers() if buffer.is_floating_point()}
        for path, module in self._loss.named_modules():
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and isinstance(value, Tensor) and value.is_floating_point():
                    found[f"{path}.{name}"] = value.detach()
        return found

    def _constants(self) -> Iterator[Any]:
        """What else a graph depends on: the parts, their modes, numbers and whole numbers."""
        for module in self._loss.modules():
            yield id(module), module.training
            for name, value in (*module._buffers.items(), *vars(module).items()):
                if name in _OF_EVERY_MODULE:
                    continue
                if isinstance(value, Tensor) and not value.is_floating_point() and name not in _FLAGS:
                    yield name, value.shape, value.dtype, _by_value(value)
                else:
                    yield name, plain_value(value)

    def _capture(
        self,
        values: dict[str, Tensor],
        x: Tensor,
        target: Tensor,
        tensors: dict[str, Tensor],
        kwargs: dict[str, Any],
        extra: dict[str, Tensor],
    ) -> Graph | None:
        """The compiled graph of a step on batches of this shape, or None and a warning.

        The step is traced on a private copy, so that the user's modules are not touched.
        """
        self._first_call(x, target, kwargs)
        private, device = copy.deepcopy(self._loss), self._device.type
        trained = self._trained(values)
        shapes = {name: value.shape for name, value in values.items()}

        def step(*inputs: Tensor) -> list[Tensor]:
            """The loss, NaN if it cannot be used; whether it can not; and the gradients of what is trained."""
            given = iter(inputs)
            own = {name: next(given).detach().reshape(shape) for name, shape in shapes.items()}
            for name in trained:
                own[name].requires_grad_()
            batch = next(given), next(given), {**kwargs, **{name: next(given) for name in tensors}}
            more = {name: next(given) for name in extra}
            with torch.enable_grad(), deferred_checks(asks_precision=self._asks_precision) as passed:
                leaves = [own[name] for name in trained]
                loss, gradients, results = self._differentiate(private, own, leaves, batch, more)
            failed = ~torch.stack([*passed, _all_finite(loss, *gradients)]).all()
            results = [result.detach() for result in results]
            return [torch.where(failed, torch.nan, loss).detach(), failed, *gradients, *results]

        inputs = _flat(values, x, target, tensors, extra)
        before = {name: buffer.clone() for name, buffer in private.named_buffers()}
        with torch.no_grad():
            private(x, target, kwargs)  # strategies read their flags once
        changed = [name for name, buffer in private.named_buffers() if not torch.equal(before[name], buffer)]
        try:
            with warnings.catch_warnings(), torch.no_grad(), full_precision(device), _unvalidated_priors(private.mll):
                warnings.simplefilter("ignore")  # what torch says to itself
                if changed:
                    raise NotImplementedError(f"a step changes the buffers {', '.join(changed)}")
                return compile_recorded(make_fx(step)(*inputs), inputs, self.options)
        except Exception as error:
            self._say(f"The step is not compiled: {_reason(error)}")
            return None

    def _first_call(self, x: Tensor, target: Tensor, kwargs: dict[str, Any]) -> None:
        """Checks of what came, and what GPyTorch does when a model is called for the first time; buffers stay as they are."""
        buffers = [b for name, b in self._loss.named_buffers() if not name.endswith(_FLAGS)]
        before = [buffer.clone() for buffer in buffers]
        with torch.no_grad():
            self._loss(x, target, kwargs)
            for buffer, value in zip(buffers, before, strict=True):
                if not same_values(buffer, value):
                    buffer.copy_(value)

    def _update(self, failed: Tensor) -> None:
        assert self.optimizer is not None
        if self._is_fused:
            # The fused kernels skip the update on the device where this flag is set.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = failed.to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not bool(failed):
            self.optimizer.step()


def _by_value(value: Tensor) -> Any:
    """A tensor of whole numbers as part of a key; by its version if it is large or on an accelerator, which is not waited for."""
    is_read = value.device.type == "cpu" and value.numel() <= _MOST_READ
    return value.detach().numpy().tobytes() if is_read else (id(value), value._version)


def _all_finite(*tensors: Tensor) -> Tensor:
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()


def _flat(
    values: dict[str, Tensor], x: Tensor, target: Tensor, tensors: dict[str, Tensor], extra: dict[str, Tensor]
) -> list[Tensor]:
    """What a graph takes: without graphs of their own, and in one layout, since it knows no other.

    Parameters without a dimension get one: torch would read their values for its guards.
    """
    own = (value if value.dim() else value.reshape(1) for value in values.values())
    return [tensor.detach().contiguous() for tensor in (*own, x, target, *tensors.values(), *extra.values())]


@contextmanager
def _unvalidated_priors(mll: MarginalLogLikelihood) -> Iterator[None]:
    """Priors do not look at their arguments for the length of the block."""
    priors = [prior for _, _, prior, _, _ in mll.named_priors()]
    distributions = [d for prior in priors for d in (prior, getattr(prior, "base_dist", None)) if d is not None]
    validates = [distribution._validate_args for distribution in distributions]
    for distribution in distributions:
        distribution._validate_args = False
    try:
        yield
    finally:
        for distribution, validate in zip(distributions, validates, strict=True):
            distribution._validate_args = validate


def _reason(error: Exception) -> str:
    """What stood in the way of a graph, and where outside of torch it was."""
    torch_folder = str(Path(torch.__file__).parent)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(torch_folder)]
    place = frames[-1]
    return f"{first_line(error)} (in {place.name}, {Path(place.filename).name}:{place.lineno})"
