"""Priors on hyperparameters: each is counted once, and for its own model of a batch."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.priors import GammaPrior, NormalPrior

import tighter_gp
from tests.tools.factories import make_gp, make_kernel
from tests.tools.support import double_problem
from tests.training.problems import gplvm
from tighter_gp.mlls.priors import log_prior

P = double_problem()


def gamma():
    return GammaPrior(50.0, 100.0)


def noise(batch_shape=()):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_prior=gamma(), batch_shape=torch.Size(batch_shape))
    likelihood.noise = torch.full((*batch_shape, 1), 0.3)
    return likelihood


def expected(value=0.3):
    return torch.distributions.Gamma(50.0, 100.0).log_prob(torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize("is_attribute", [False, True])
def test_a_likelihood_that_is_also_the_models_counts_once(is_attribute):
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), jitter_val=1e-6), noise()
    if is_attribute:
        model.likelihood = likelihood
    mll = tighter_gp.TighterELBO(likelihood, model, len(P.x), combine_terms=False)
    torch.testing.assert_close(mll(model(P.x), P.y).log_prior * len(P.x), expected())


def test_a_kernel_in_two_places_counts_once():
    kernel = gpytorch.kernels.RBFKernel(lengthscale_prior=gamma())
    kernel.lengthscale = 0.3
    torch.testing.assert_close(log_prior(kernel + kernel), expected())


def test_two_priors_that_are_one_object_count_twice():
    prior = gamma()
    kernels = [gpytorch.kernels.RBFKernel(lengthscale_prior=prior) for _ in range(2)]
    for kernel in kernels:
        kernel.lengthscale = 0.3
    torch.testing.assert_close(log_prior(kernels[0] + kernels[1]), 2 * expected())


def test_each_model_of_a_batch_has_its_own():
    model, likelihood = make_gp(P.z.expand(2, *P.z.shape).clone(), batch_shape=torch.Size([2])), noise((2,))
    likelihood.noise = torch.tensor([[0.3], [0.5]])
    mll = tighter_gp.TighterELBO(likelihood, model, len(P.x), combine_terms=False)
    found = mll(model(P.x), P.y.expand(2, -1)).log_prior * len(P.x)
    torch.testing.assert_close(found, torch.stack([expected(0.3), expected(0.5)]))


def test_latent_variable_models_count_once():
    model, *_ = gplvm()
    model.likelihood.noise_covar.register_prior("noise_prior", gamma(), "noise")
    model.likelihood.noise = 0.3
    torch.testing.assert_close(log_prior(model.objective(40)), expected(), check_dtype=False)
    latents, rows = tighter_gp.gplvm.VariationalLatents.from_pca(torch.randn(20, 4), 2), torch.randn(20, 4)
    collapsed = tighter_gp.gplvm.CollapsedBayesianGPLVM(latents, latents.mean[:5].detach(), rows)
    before = collapsed()
    collapsed.covar_module.register_prior("outputscale_prior", NormalPrior(100.0, 0.1), "outputscale")
    density = torch.distributions.Normal(100.0, 0.1).log_prob(collapsed.covar_module.outputscale)
    torch.testing.assert_close(collapsed() - before, density / 20)
