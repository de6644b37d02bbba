"""Variational strategies: from q(u) to q(f)."""

from .base import TighterStrategy, gp_of
from .solve_gp_variational_strategy import SolveGPVariationalStrategy
from .tighter_variational_strategy import TighterVariationalStrategy

__all__ = ["SolveGPVariationalStrategy", "TighterStrategy", "TighterVariationalStrategy", "gp_of"]
