"""One function per equation. Torch only."""

from . import bounds, collapsed, fused, linalg, moments, natural, solve_gp

__all__ = ["bounds", "collapsed", "fused", "linalg", "moments", "natural", "solve_gp"]
