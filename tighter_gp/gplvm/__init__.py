"""The Bayesian GPLVM: latent inputs, the tighter bound, new rows and missing entries."""

from . import collapsed, psi
from .bayesian_gplvm import BayesianGPLVM
from .collapsed_gplvm import CollapsedBayesianGPLVM
from .data import PrincipalComponents, principal_components
from .elbo import LatentELBOTerms, LatentVariableELBO
from .inference import Reconstruction, infer_latents, log_density, reconstruct
from .latents import LatentPrior, Latents, ParameterGroups, VariationalLatents, parameter_groups
from .report import Relevance, plot_latents, relevance

__all__ = [
    "BayesianGPLVM",
    "CollapsedBayesianGPLVM",
    "LatentELBOTerms",
    "LatentPrior",
    "LatentVariableELBO",
    "Latents",
    "ParameterGroups",
    "PrincipalComponents",
    "Reconstruction",
    "Relevance",
    "VariationalLatents",
    "collapsed",
    "infer_latents",
    "log_density",
    "parameter_groups",
    "plot_latents",
    "principal_components",
    "psi",
    "reconstruct",
    "relevance",
]
