"""The body of a step as one compiled graph.

The body is run once on a private copy of the modules, and every tensor operation of it is written down, forward and backward.
What GPyTorch does in Python is then paid for once. The list goes to torch's Inductor.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpytorch import Module, settings
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import _VariationalDistribution
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from ..checks import first_line
from ..likelihoods.family import family
from ..maths.linalg import full_precision
from . import distributed
from .batches import Batch
from .body import body
from .natural import Natural, Part, parts_of
from .problem import Problem

log = logging.getLogger("tighter_gp")

Graph = Callable[..., Sequence[Tensor]]

# What a step saves in seconds: Python around operations, and per entry of K_ZZ and K_ZX. Measured on one core with (M, B) from
# (64, 256) to (1024, 4096). Compiling took ten seconds there.
_PER_STEP, _PER_ENTRY, _WORTH = 1.2e-3, 4e-9, 15.0

# The C++ compiler is started once, without a test of what the processor says it can do.
_OPTIONS = {"cpp_wrapper": True, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}


class _Body(torch.nn.Module):
    """The body of a step as a module, so that parameters and buffers can be given as arguments."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.parts_in = torch.nn.ModuleDict(problem.modules)
        self.objective = problem.objective
        self.num_data, self.seed = problem.num_data, problem.seed

    def forward(self, batch: Batch, natural: Sequence[Natural], size: Tensor, leaves: Sequence[Tensor]) -> Any:
        problem = self._problem()
        parts = [] if not natural else parts_of(problem.model)
        result = body(problem, parts, natural, batch, size, leaves, check=False)
        return result, [parameter for part in parts for parameter in part.parameters()]

    @torch.no_grad()
    def warm_up(self, batch: Batch) -> None:
        """Strategies read the flags of their first call once."""
        self._problem().loss(batch)

    def _problem(self) -> Problem:
        return Problem(self.parts_in["model"], self.parts_in["likelihood"], self.objective, self.num_data, self.seed)


class Captured:
    """Compiled graphs of a step, one per shape of batch.

    :param problem: What is trained.
    :param parts: What natural gradients move.
    :param leaves: Names of the parameters whose gradients are wanted.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part], leaves: Sequence[str]) -> None:
        self.problem, self.module = problem, _Body(problem)
        self.leaves = [f"parts_in.{name}" for name in leaves]
        self.in_q = {id(parameter) for part in parts for parameter in part.parameters()}
        self.graphs: dict[Any, Graph | None] = {}

    def __call__(self, natural: Sequence[Natural], batch: Batch, size: float) -> tuple | None:
        """Loss, flag, gradients, natural parameters and values of q(u); None where there is no graph."""
        tensors = {name: value for name, value in batch.kwargs.items() if isinstance(value, Tensor)}
        values: dict[str, Tensor] = dict(self.module.named_parameters())
        values |= {name: buffer for name, buffer in self.module.named_buffers() if buffer.is_floating_point()}
        rows = self.problem.positions(batch)
        assert batch.x is not None
        given = [batch.x, batch.y, *rows.values(), *tensors.values()]
        state = [tensor for q in natural for tensor in q]
        step = torch.full((1,), size, dtype=torch.float64, device=self.problem.device)
        # A parameter without a dimension gets one: torch would read its value for its guards.
        inputs = [value.detach().contiguous() for value in (*map(_at_least_1d, values.values()), *given, *state, step)]
        key = (
            *((value.shape, value.dtype) for value in inputs),
            batch.weight,
            tuple(module.training for module in self.module.modules()),
            settings.num_likelihood_samples.value(),
            settings.observation_nan_policy.value(),
            torch.get_num_threads(),
        )
        if key not in self.graphs:
            self.graphs[key] = self._capture(values, batch, list(tensors), bool(rows), len(natural), inputs)
        graph = self.graphs[key]
        if graph is None:
            return None
        with torch.no_grad(), full_precision(self.problem.device.type):
            loss, ok, *rest = graph(*inputs)
        gradients, rest = rest[: len(self.leaves)], rest[len(self.leaves) :]
        moved = [Natural(*rest[3 * i : 3 * i + 3]) for i in range(len(natural))]
        return loss, ok, gradients, moved, rest[3 * len(natural) :]

    def _capture(
        self,
        values: dict[str, Tensor],
        batch: Batch,
        names: list[str],
        has_rows: bool,
        num_parts: int,
        inputs: list[Tensor],
    ) -> Graph | None:
        private = copy.deepcopy(self.module)
        private.warm_up(batch)
        shapes = {name: (value.shape, id(value) in self.in_q) for name, value in values.items()}

        def step(*inputs: Tensor) -> list[Tensor]:
            given = iter(inputs)
            own = {name: next(given).detach().reshape(shape) for name, (shape, _) in shapes.items()}
            own = {name: v.clone() if shapes[name][1] else v for name, v in own.items()}  # q(u) is written in place
            for name in self.leaves:
                own[name].requires_grad_()
            for name, (_, is_q) in shapes.items():
                if is_q:
                    own[name].requires_grad_()
            x, y = next(given), next(given)
            rows = next(given) if has_rows else None
            kwargs = {**batch.kwargs, **{name: next(given) for name in names}}
            natural = [Natural(next(given), next(given), next(given)) for _ in range(num_parts)]
            arguments = batch._replace(x=x, y=y, rows=rows, kwargs=kwargs), natural, next(given)
            leaves = [own[name] for name in self.leaves]
            with torch.enable_grad():
                result, written = functional_call(private, own, (*arguments, leaves))
            flags = torch.stack([flag.reshape(()).bool() for flag in result.ok] or [result.loss == result.loss])
            state = [tensor for q in result.natural for tensor in q]
            return [t.detach() for t in (result.loss, flags.all(), *result.gradients, *state, *written)]

        try:
            with (
                warnings.catch_warnings(),
                torch.no_grad(),
                full_precision(self.problem.device.type),
                _trusted(private),
            ):
                warnings.simplefilter("ignore")
                return _compiled(make_fx(step)(*inputs), inputs)
        except Exception as error:
            log.debug("", exc_info=True)
            log.info("steps are not compiled: %s", first_line(error))
            return None


def _at_least_1d(value: Tensor) -> Tensor:
    return value if value.dim() else value.reshape(1)


def _compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
    """By Inductor itself on a CPU, which takes half the time; else, or where that fails, by :func:`torch.compile`."""
    if all(tensor.device.type == "cpu" for tensor in inputs):
        try:
            with _untried_processor():
                options = {"config_patches": _OPTIONS}
                direct = torch._inductor.standalone_compile(
                    graph, list(inputs), dynamic_shapes="from_example_inputs", options=options
                )
                direct(*inputs)
            return direct
        except Exception as error:
            log.debug("Inductor did not take the step as it is: %s", first_line(error))
    compiled = torch.compile(graph, fullgraph=True, dynamic=False)
    compiled(*inputs)
    return compiled


@contextmanager
def _untried_processor() -> Iterator[None]:
    """What was believed of the processor without a try is forgotten afterwards, and Inductor's loggers are quiet."""
    from torch._inductor import cpu_vec_isa

    tries: list[Any] = [type(isa).__bool__ for isa in cpu_vec_isa.supported_vec_isa_list]
    caches = [f for f in (cpu_vec_isa.valid_vec_isa_list, *tries) if hasattr(f, "cache_info")]
    empty = [function for function in caches if not function.cache_info().currsize]
    loggers = [logging.getLogger(f"torch._inductor.{name}") for name in ("ir", "standalone_compile")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for function in empty:
            function.cache_clear()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _trusted(module: torch.nn.Module) -> Iterator[None]:
    """Priors do not look at the values of their arguments."""
    priors = [prior for part in module.modules() if isinstance(part, Module) for prior in part._priors.values()]
    found = [p for prior in priors for p in (prior[0], getattr(prior[0], "base_dist", None)) if p is not None]
    for prior in found:
        prior._validate_args = False
    yield


def compile_pays(problem: Problem, steps: int, batch_size: int) -> bool:
    """Whether a run on a CPU with a C++ compiler is long enough for compiled steps, by shapes and steps alone."""
    is_drawn = family(problem.likelihood).is_sampled or problem.needs_index or isinstance(problem.model, DeepGP)
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "cl")))
    if is_drawn or problem.device.type != "cpu" or not has_compiler or distributed.is_active():
        return False
    forms = [module for module in problem.model.modules() if isinstance(module, _VariationalDistribution)]
    sizes = [(form.batch_shape.numel(), form.num_inducing_points) for form in forms]
    entries = sum(count * m * (m + batch_size) for count, m in sizes)
    saved = steps * (_PER_STEP + _PER_ENTRY * entries)
    if saved >= _WORTH:
        log.info("steps are compiled: over %d of them that saves about %.0f seconds", steps, saved)
    return saved >= _WORTH
