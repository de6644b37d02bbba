"""Small models for the tests, set to known parameters."""

from __future__ import annotations

import gpytorch
import torch
from torch import Tensor

import tighter_gp


def make_kernel(kind: str, variance: float, lengthscales: Tensor) -> gpytorch.kernels.Kernel:
    dim = len(lengthscales)
    base = (
        gpytorch.kernels.RBFKernel(ard_num_dims=dim)
        if kind == "rbf"
        else gpytorch.kernels.MaternKernel(1.5, ard_num_dims=dim)
    )
    kernel = gpytorch.kernels.ScaleKernel(base)
    kernel.outputscale, kernel.base_kernel.lengthscale = variance, torch.as_tensor(lengthscales)
    return kernel


def make_noise(noise) -> gpytorch.likelihoods.Likelihood:
    """Homoscedastic for a number, fixed for a vector."""
    noise = torch.as_tensor(noise)
    if noise.dim():
        return gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    likelihood.noise = noise
    return likelihood


class GP(gpytorch.models.ApproximateGP):
    """An SVGP whose strategy is made by ``make_strategy(model)``."""

    def __init__(self, make_strategy, covar_module=None, mean: float = 0.0):
        super().__init__(make_strategy(self))
        self.mean_module = gpytorch.means.ConstantMean()
        self.mean_module.initialize(constant=mean)
        self.covar_module = covar_module or gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_gp(
    z: Tensor,
    kernel=None,
    q=None,
    *,
    strategy=tighter_gp.TighterVariationalStrategy,
    distribution=gpytorch.variational.CholeskyVariationalDistribution,
    jitter_val: float | None = 0.0,
    mean: float = 0.0,
    batch_shape: torch.Size = torch.Size(),
    **kwargs,
) -> GP:
    """A model on inducing points ``z``; with ``q = (mean, root)`` its whitened q(u) is set to that."""
    make = lambda model: strategy(
        model, z, distribution(z.size(-2), batch_shape=batch_shape), jitter_val=jitter_val, **kwargs
    )
    model = GP(make, kernel, mean)
    if q is not None:
        parameters = model.variational_strategy._variational_distribution
        parameters.variational_mean.data.copy_(q[0])
        parameters.chol_variational_covar.data.copy_(q[1])
        model.variational_strategy.variational_params_initialized.fill_(1)
    return model


class CollapsedGP(gpytorch.models.ExactGP):
    """An ExactGP on a :class:`TighterInducingPointKernel`."""

    def __init__(self, x, y, z, kernel, likelihood, mean: float = 0.0, **kwargs):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.mean_module.initialize(constant=mean)
        self.covar_module = tighter_gp.TighterInducingPointKernel(kernel, z, likelihood, **kwargs)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
