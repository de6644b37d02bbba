"""Likelihoods that GPyTorch lacks, and what the objective must know of any likelihood."""

from .bernoulli_logit_likelihood import BernoulliLogitLikelihood
from .poisson_likelihood import PoissonLikelihood

__all__ = ["BernoulliLogitLikelihood", "PoissonLikelihood"]
