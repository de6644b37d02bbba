"""Objectives."""

from .tighter_elbo import ELBOTerms, TighterELBO

__all__ = ["ELBOTerms", "TighterELBO"]
