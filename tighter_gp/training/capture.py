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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import _VariationalDistribution
from linear_operator.utils.errors import NanError
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..checks import first_line
from ..gplvm import BayesianGPLVM
from ..likelihoods.family import family
from ..maths.linalg import full_precision
from . import distributed
from .batches import Batch
from .body import Result, body
from .distributed import StepSums
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

    def __init__(self, problem: Problem, leaves: Sequence[str]) -> None:
        super().__init__()
        self.model, self.likelihood, self.objective = problem.model, problem.likelihood, problem.objective
        self.settings, self.leaves = (problem.num_data, problem.seed), leaves

    def problem(self) -> Problem:
        """The same problem, with the parameters of the moment."""
        return Problem(self.model, self.likelihood, self.objective, *self.settings)

    def forward(self, batch: Batch, natural: Sequence[Natural], size: Tensor) -> tuple[Result, list[Tensor]]:
        """The result, and the parameters of q(u) after it."""
        problem = self.problem()
        parts = parts_of(problem.model) if natural else []
        leaves = [problem.parameters[name] for name in self.leaves]
        with torch.enable_grad():
            result = body(problem, parts, natural, batch, size, leaves, StepSums(), check=False)
        return result, [parameter for part in parts for parameter in part.parameters]


class Captured:
    """Compiled graphs of a step, one per shape of batch.

    :param problem: What is trained.
    :param parts: What natural gradients move.
    :param leaves: Names of the parameters whose gradients are wanted.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part], leaves: Sequence[str]) -> None:
        self.module, self.device_type = _Body(problem, leaves), problem.device.type
        self.in_q = [parameter for part in parts for parameter in part.parameters]
        self.graphs: dict[Any, tuple[Graph, TreeSpec] | None] = {}

    @torch.no_grad()
    def __call__(self, natural: Sequence[Natural], batch: Batch, size: Tensor) -> Result:
        """Take the step of q(u), and compute the rest.

        :raises NanError: If there is no graph.
        """
        values: dict[str, Tensor] = dict(self.module.named_parameters())
        values |= {name: buffer for name, buffer in self.module.named_buffers() if buffer.is_floating_point()}
        given, layout = tree_flatten((values, batch._replace(share=1.0), natural, size))
        # A parameter without a dimension gets one: torch would read its value for its guards.
        inputs = [torch.atleast_1d(value.detach().contiguous()) for value in given if isinstance(value, Tensor)]
        kinds = [(value.shape, value.dtype) for value in inputs]
        key = (*kinds, *(module.training for module in self.module.modules()))
        if key not in self.graphs:
            self.graphs[key] = self._capture(given, layout, inputs, batch)
        found = self.graphs[key]
        if found is None:
            raise NanError("the step is not compiled")
        graph, outputs = found
        with full_precision(self.device_type):
            result, written = tree_unflatten(list(graph(*inputs)), outputs)
        for parameter, value in zip(self.in_q, written, strict=True):
            parameter.copy_(value)
        return result

    def _capture(
        self, given: list[Any], layout: TreeSpec, inputs: list[Tensor], batch: Batch
    ) -> tuple[Graph, TreeSpec] | None:
        private, outputs = copy.deepcopy(self.module), []
        in_q = {id(parameter) for parameter in self.in_q}

        def like(value: Tensor, of: Any) -> Tensor:
            """An input with the shape of what it stands for; q(u) is written in place."""
            value = value.detach().reshape(of.shape)
            return (value.clone() if id(of) in in_q else value).requires_grad_(of.requires_grad)

        def step(*inputs: Tensor) -> list[Tensor]:
            left = iter(inputs)
            leaves = [like(next(left), value) if isinstance(value, Tensor) else value for value in given]
            values, *arguments = tree_unflatten(leaves, layout)
            found, layout_of_result = tree_flatten(functional_call(private, values, tuple(arguments)))
            outputs.append(layout_of_result)
            return [value.detach() for value in found]

        try:
            with warnings.catch_warnings(), full_precision(self.device_type):
                warnings.simplefilter("ignore")
                private.problem().loss(batch)  # strategies read the flags of their first call once
                _trust_priors(private)
                return _compiled(make_fx(step)(*inputs), inputs), outputs[-1]
        except Exception as error:
            log.debug("", exc_info=True)
            log.info("steps are not compiled: %s", first_line(error))
            return None


def _trust_priors(module: torch.nn.Module) -> None:
    """Priors do not look at the values of their arguments."""
    for part in module.modules():
        for prior, *_ in getattr(part, "_priors", {}).values():
            for distribution in (prior, getattr(prior, "base_dist", prior)):
                distribution._validate_args = False


def _compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
    """By Inductor itself on a CPU, which takes half the time; else, or where that fails, by :func:`torch.compile`."""
    if all(tensor.device.type == "cpu" for tensor in inputs):
        notes = logging.getLogger("torch._inductor.ir")  # on operations that it hands back to torch
        level = notes.level
        notes.setLevel(logging.ERROR)
        try:
            options = {"config_patches": _OPTIONS}
            direct = torch._inductor.standalone_compile(
                graph, list(inputs), dynamic_shapes="from_example_inputs", options=options
            )
            direct(*inputs)
            return direct
        except Exception as error:
            log.debug("Inductor did not take the step as it is: %s", first_line(error))
        finally:
            notes.setLevel(level)
    compiled = torch.compile(graph, fullgraph=True, dynamic=False)
    compiled(*inputs)
    return compiled


def compile_pays(problem: Problem, steps: int, batch_size: int) -> bool:
    """Whether a run on a CPU with a C++ compiler is long enough for compiled steps, by shapes and steps alone."""
    is_drawn = family(problem.likelihood).is_sampled or isinstance(problem.model, (DeepGP, BayesianGPLVM))
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "cl")))
    if is_drawn or problem.needs_index or problem.device.type != "cpu" or not has_compiler or distributed.is_active():
        return False
    forms = [module for module in problem.model.modules() if isinstance(module, _VariationalDistribution)]
    sizes = [(form.batch_shape.numel(), form.num_inducing_points) for form in forms]
    entries = sum(count * m * (m + batch_size) for count, m in sizes)
    saved = steps * (_PER_STEP + _PER_ENTRY * entries)
    if saved >= _WORTH:
        log.info("steps are compiled: over %d of them that saves about %.0f seconds", steps, saved)
    return saved >= _WORTH
