"""Training: one loop with mini-batches, schedules, early stopping, checkpoints and several processes."""

from . import distributed
from .fit import History, Step, fit
from .validation import mean_nlpd

__all__ = ["History", "Step", "distributed", "fit", "mean_nlpd"]
