"""Tighter sparse variational Gaussian processes for GPyTorch."""

from . import (
    blocks,
    bounds,
    conditionals,
    diagnostics,
    gplvm,
    inducing,
    jaakkola,
    likelihoods,
    linalg,
    models,
    moments,
    training,
)
from .blocks import Blocks
from .collapsed import CollapsedGP, collapsed_bound
from .compiled import CompiledStep
from .conditionals import PerPoint
from .diagnostics import Diagnosis, diagnose
from .export import ExportedPredictor, export_predictor
from .full_data import evaluate_bound, set_optimal_q
from .jaakkola import JaakkolaGPClassifier
from .kernels import TighterInducingPointKernel
from .mlls import TighterELBO
from .observations import predict_y
from .predictive import predict
from .predictive_distribution import PredictiveDistribution, distribution_of_y, log_density
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .training import fit

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "CollapsedGP",
    "CompiledStep",
    "Diagnosis",
    "ExportedPredictor",
    "JaakkolaGPClassifier",
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
    "distribution_of_y",
    "evaluate_bound",
    "export_predictor",
    "fit",
    "gplvm",
    "inducing",
    "jaakkola",
    "likelihoods",
    "linalg",
    "log_density",
    "models",
    "moments",
    "predict",
    "predict_y",
    "set_optimal_q",
    "training",
]
