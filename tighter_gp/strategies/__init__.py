"""Variational strategies: from q(u) to q(f)."""

from .tighter_variational_strategy import TighterVariationalStrategy

__all__ = ["TighterVariationalStrategy"]
