"""Collapsed models: one core from sums over data to a bound."""

from .collapsed_gp import CollapsedGP, collapsed_bound
from .sums import DataSums, data_sums, projected_batches

__all__ = ["CollapsedGP", "DataSums", "collapsed_bound", "data_sums", "projected_batches"]
