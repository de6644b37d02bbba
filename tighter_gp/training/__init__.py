"""Training: one loop with mini-batches, schedules, early stopping, checkpoints and several processes."""

from . import distributed
from .fitting import fit
from .history import History, Step
from .natural import NaturalGradients
from .natural_optimizer import NaturalGradient
from .validation import mean_nlpd

__all__ = ["History", "NaturalGradient", "NaturalGradients", "Step", "distributed", "fit", "mean_nlpd"]
