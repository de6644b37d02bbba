"""A prior counts once for each model of a batch: alone where the module has the batch's shape, in full where it is shared."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.priors import NormalPrior

from tighter_gp.mlls.priors import log_prior


class Models(gpytorch.Module):
    def __init__(self, mean_batch, kernel_batch):
        super().__init__()
        self.mean = gpytorch.means.LinearMean(2, batch_shape=torch.Size(mean_batch))
        self.mean.weights.data = torch.arange(1.0, self.mean.weights.numel() + 1).view_as(self.mean.weights)
        self.mean.register_prior("weights_prior", NormalPrior(0.0, 1.0), "weights")
        prior = NormalPrior(0.0, 1.0)
        self.kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size(kernel_batch), lengthscale_prior=prior)


def normal(values):
    return torch.distributions.Normal(0.0, 1.0).log_prob(values)


def test_shared_weights_whose_shape_looks_like_the_batch():
    """Two models, and weights of 2 x 1 that both of them share."""
    models = Models((), (2,))
    models.kernel.lengthscale = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    expected = normal(torch.tensor([1.0, 2.0])).sum() + normal(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(log_prior(models, torch.Size([2])).detach(), expected)


def test_weights_of_each_model():
    models = Models((2,), ())
    expected = normal(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum(-1) + normal(models.kernel.lengthscale.detach()).sum()
    torch.testing.assert_close(log_prior(models, torch.Size([2])).detach(), expected)
