"""Objectives."""

from .data_terms import DataTerms, data_terms
from .tighter_elbo import ELBOTerms, TighterELBO

__all__ = ["DataTerms", "ELBOTerms", "TighterELBO", "data_terms"]
