"""The projection room: the one place that turns a prior and inputs into (prior mean, A, d)."""

from .precision import wide_precision
from .projector import PriorBlocks, Projection, Projector

__all__ = ["PriorBlocks", "Projection", "Projector", "wide_precision"]
