"""Tighter sparse variational Gaussian processes for GPyTorch."""

from . import bounds, conditionals, likelihoods, linalg, moments
from .conditionals import PerPoint
from .full_data import evaluate_bound, set_optimal_q
from .kernels import TighterInducingPointKernel
from .mlls import TighterELBO
from .predictive import predict
from .strategies import TighterVariationalStrategy

__version__ = "0.1.0"

__all__ = [
    "PerPoint",
    "TighterELBO",
    "TighterInducingPointKernel",
    "TighterVariationalStrategy",
    "bounds",
    "conditionals",
    "evaluate_bound",
    "likelihoods",
    "linalg",
    "moments",
    "predict",
    "set_optimal_q",
]
