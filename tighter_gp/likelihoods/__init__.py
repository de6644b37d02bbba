"""Likelihoods that GPyTorch lacks, and what the objective must know of any likelihood."""

from .bernoulli_logit_likelihood import BernoulliLogitLikelihood
from .heteroscedastic_likelihood import HeteroscedasticGaussianLikelihood
from .poisson_likelihood import PoissonLikelihood

__all__ = ["BernoulliLogitLikelihood", "HeteroscedasticGaussianLikelihood", "PoissonLikelihood"]
