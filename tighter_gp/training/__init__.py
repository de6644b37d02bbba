"""Training: one loop with mini-batches, schedules, early stopping, checkpoints and several processes."""

from . import distributed
from .fitting import fit
from .history import History, Step
from .validation import mean_nlpd

__all__ = ["History", "Step", "distributed", "fit", "mean_nlpd"]
