"""Tighter sparse variational Gaussian processes for GPyTorch."""

from . import (
    arguments,
    blocks,
    bounds,
    conditionals,
    data,
    diagnostics,
    gplvm,
    inducing,
    jaakkola,
    labels,
    likelihoods,
    linalg,
    moments,
    training,
)
from .blocks import Blocks
from .collapsed import CollapsedGP, collapsed_bound
from .compiled import CompiledStep
from .conditionals import PerPoint
from .diagnostics import Diagnosis, diagnose
from .full_data import evaluate_bound, set_optimal_q
from .jaakkola import JaakkolaGPClassifier
from .kernels import TighterInducingPointKernel
from .mlls import TighterELBO
from .predictive import predict
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .training import fit

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "CollapsedGP",
    "CompiledStep",
    "Diagnosis",
    "JaakkolaGPClassifier",
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
    "jaakkola",
    "labels",
    "likelihoods",
    "linalg",
    "moments",
    "predict",
    "set_optimal_q",
    "training",
]
