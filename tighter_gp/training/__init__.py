"""Training: one loop with mini-batches, schedules, early stopping, checkpoints and several processes."""

from . import distributed
from .fitting import fit
from .history import History, Step
from .initialization import initialize
from .recipe import Recipe
from .validation import mean_nlpd

__all__ = ["History", "Recipe", "Step", "distributed", "fit", "initialize", "mean_nlpd"]
