"""Whether compiled steps pay, from shapes and the number of steps alone."""

from __future__ import annotations

import logging
import os
import shutil

from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import _VariationalDistribution

from ..likelihoods.properties import is_sampled
from . import distributed
from .problem import Problem

log = logging.getLogger("tighter_gp")

# Seconds that a step saves: what Python does around operations, and per entry of K_ZZ and K_ZX. Measured on one core with
# (M, B) from (64, 256) to (1024, 4096), where 1.3 to 19 milliseconds were saved.
_PER_STEP, _PER_ENTRY = 1.2e-3, 4e-9

# Compiling took 10 seconds on that core.
_WORTH = 15.0

_COMPILERS = ("g++", "clang++", "cl")


def seconds_saved(num_entries: int, steps: int) -> float:
    """What compiled steps save, about, on a core of 2025.

    :param num_entries: Entries of :math:`K_{ZZ}` and :math:`K_{ZX}`, over all functions.
    :param steps: Steps of the run.

    Example:
        >>> tighter_gp.training.compiling.seconds_saved(256 * (256 + 1024), steps=5000)
        12.554
    """
    return round(steps * (_PER_STEP + _PER_ENTRY * num_entries), 3)


def compile_pays(problem: Problem, steps: int, batch_size: int) -> bool:
    """Whether a run on a CPU with a C++ compiler is long enough for compiled steps; the log says so if it is.

    The rule knows shapes and the length of the whole run. So every process decides alike, and a run that is resumed as the
    one that was not interrupted.

    :param problem: What is trained.
    :param steps: Steps of the run, with those that were done before it was resumed.
    :param batch_size: Points per step.
    """
    # What is drawn on the way, or has sparse gradients, is not the same or not possible in a graph.
    if is_sampled(problem.likelihood) or problem.needs_index or isinstance(problem.model, DeepGP):
        return False
    if problem.device.type != "cpu" or not any(map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))):
        return False
    forms = [module for module in problem.model.modules() if isinstance(module, _VariationalDistribution)]
    sizes = [(form.batch_shape.numel(), form.num_inducing_points) for form in forms]
    saved = seconds_saved(sum(functions * m * (m + batch_size) for functions, m in sizes), steps)
    pays = saved >= _WORTH
    if pays and distributed.rank() == 0:
        log.info("steps are compiled: over %d of them that saves about %.0f seconds", steps, saved)
    return pays
