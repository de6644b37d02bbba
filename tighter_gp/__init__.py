"""Tighter sparse variational Gaussian processes for GPyTorch."""

from . import blocks, conditionals, diagnostics, gplvm, inducing, likelihoods, maths, mlls, models, settings, training
from .collapsed import CollapsedGP, TighterInducingPointKernel, collapsed_bound
from .conditionals import Blocks, PerPoint
from .diagnostics import diagnose
from .export import export_predictor
from .full_data import evaluate_bound, set_optimal_q
from .mlls import TighterELBO
from .neighbours import NeighbourGP
from .predictions import PredictiveDistribution, log_density, predict, predict_y
from .strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .training import Recipe, fit, initialize

__version__ = "0.4.0"

__all__ = [
    "Blocks",
    "CollapsedGP",
    "NeighbourGP",
    "PerPoint",
    "PredictiveDistribution",
    "Recipe",
    "SolveGPVariationalStrategy",
    "TighterELBO",
    "TighterInducingPointKernel",
    "TighterVariationalStrategy",
    "blocks",
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
    "log_density",
    "maths",
    "mlls",
    "models",
    "predict",
    "predict_y",
    "set_optimal_q",
    "settings",
    "training",
]
