"""The projection room: the one place that turns a prior and inputs into (prior mean, A, d)."""

from .projector import PriorBlocks, Projection, Projector

__all__ = ["PriorBlocks", "Projection", "Projector"]
