"""Tighter sparse variational Gaussian processes for GPyTorch."""

import sys

from . import (
    blocks,
    conditionals,
    diagnostics,
    gplvm,
    inducing,
    likelihoods,
    maths,
    mlls,
    models,
    settings,
    training,
)
from .collapsed import CollapsedGP, collapsed_bound
from .compiled import CompiledStep
from .conditionals import Blocks, PerPoint
from .diagnostics import Diagnosis, diagnose
from .export import ExportedPredictor, export_predictor
from .full_data import evaluate_bound, set_optimal_q
from .kernels import TighterInducingPointKernel
from .maths import bounds, linalg, moments
from .mlls import TighterELBO
from .predictions import PredictiveDistribution, log_density, predict, predict_y
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .training import fit, initialize

# Modules that users import by name from the top of the package, wherever they live in it.
for _module in (bounds, linalg, moments):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

__version__ = "0.3.0"

__all__ = [
    "Blocks",
    "CollapsedGP",
    "CompiledStep",
    "Diagnosis",
    "ExportedPredictor",
    "PerPoint",
    "PredictiveDistribution",
    "SolveGPVariationalStrategy",
    "TighterELBO",
    "TighterInducingPointKernel",
    "TighterVariationalStrategy",
    "blocks",
    "bounds",
    "collapsed_bound",
    "conditionals",
    "diagnose",
    "diagnostics",
    "evaluate_bound",
    "export_predictor",
    "fit",
    "gplvm",
    "inducing",
    "initialize",
    "likelihoods",
    "linalg",
    "log_density",
    "maths",
    "mlls",
    "models",
    "moments",
    "predict",
    "predict_y",
    "set_optimal_q",
    "settings",
    "training",
]
