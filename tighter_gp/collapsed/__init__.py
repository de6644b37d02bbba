"""Collapsed models: sums over the data, the best q(w), and the terms of the bound there."""

from .collapsed_gp import CollapsedGP, collapsed_bound
from .core import DataSums, data_sums
from .tighter_inducing_point_kernel import TighterInducingPointKernel

__all__ = ["CollapsedGP", "DataSums", "TighterInducingPointKernel", "collapsed_bound", "data_sums"]
