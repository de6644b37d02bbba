"""From a prior and inputs to (prior mean, A, d): kernels, projection, precision."""

from .projection import Factor, Prior, Projection

__all__ = ["Factor", "Prior", "Projection"]
