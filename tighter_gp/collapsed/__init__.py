"""Collapsed models: sums over the data, the best q(w), and the terms of the bound there."""

from .collapsed_gp import CollapsedGP, collapsed_bound
from .core import DataSums, data_sums

__all__ = ["CollapsedGP", "DataSums", "collapsed_bound", "data_sums"]
