"""Tighter sparse variational Gaussian processes for GPyTorch."""

import sys

from . import (
    arguments,
    conditionals,
    data,
    diagnostics,
    gplvm,
    inducing,
    labels,
    likelihoods,
    maths,
    mlls,
    settings,
    training,
)
from .collapsed import CollapsedGP, collapsed_bound
from .compiled import CompiledStep
from .conditionals import Blocks, PerPoint, blocks
from .diagnostics import Diagnosis, diagnose
from .full_data import evaluate_bound, set_optimal_q
from .kernels import TighterInducingPointKernel
from .maths import bounds, linalg, moments
from .mlls import TighterELBO
from .predictive import predict
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .training import fit

# Modules that users import by name from the top of the package, wherever they live in it.
for _module in (blocks, bounds, linalg, moments):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "CollapsedGP",
    "CompiledStep",
    "Diagnosis",
    "PerPoint",
    "SolveGPVariationalStrategy",
    "TighterELBO",
    "TighterInducingPointKernel",
    "TighterVariationalStrategy",
    "arguments",
    "blocks",
    "bounds",
    "collapsed_bound",
    "conditionals",
    "data",
    "diagnose",
    "diagnostics",
    "evaluate_bound",
    "fit",
    "gplvm",
    "inducing",
    "labels",
    "likelihoods",
    "linalg",
    "maths",
    "mlls",
    "moments",
    "predict",
    "set_optimal_q",
    "settings",
    "training",
]
