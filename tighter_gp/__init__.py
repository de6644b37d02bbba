"""Tighter sparse variational Gaussian processes for GPyTorch."""

from . import bounds, conditionals, likelihoods, linalg, moments
from .collapsed import CollapsedGP, collapsed_bound
from .compiled import CannotCompile, CompiledStep
from .conditionals import PerPoint
from .full_data import evaluate_bound, set_optimal_q
from .kernels import TighterInducingPointKernel
from .mlls import TighterELBO
from .predictive import predict
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy

__version__ = "0.1.0"

__all__ = [
    "CannotCompile",
    "CollapsedGP",
    "CompiledStep",
    "PerPoint",
    "SolveGPVariationalStrategy",
    "TighterELBO",
    "TighterInducingPointKernel",
    "TighterVariationalStrategy",
    "bounds",
    "collapsed_bound",
    "conditionals",
    "evaluate_bound",
    "likelihoods",
    "linalg",
    "moments",
    "predict",
    "set_optimal_q",
]
