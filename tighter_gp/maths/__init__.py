"""One function per equation. Torch only."""

from . import bounds, collapsed, derivatives, linalg, moments, natural, solve_gp

__all__ = ["bounds", "collapsed", "derivatives", "linalg", "moments", "natural", "solve_gp"]
