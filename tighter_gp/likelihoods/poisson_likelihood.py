"""Poisson likelihood with the exponential link."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson


class PoissonLikelihood(_OneDimensionalLikelihood):
    r"""
    Counts with rate :math:`e^f`; its expected log likelihood has a closed form.

    .. math:: \mathbb E_{\mathcal N(\mu, v)}[\log p(y \mid f)] = y\mu - e^{\mu + v/2} - \log y!

    Log-concave, so the tighter bound is strict with every conditional.

    Example:
        >>> likelihood = tighter_gp.likelihoods.PoissonLikelihood()
        >>> likelihood(torch.zeros(3)).rate
        tensor([1., 1., 1.])
    """

    is_log_concave = True

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        return Poisson(rate=function_samples.exp())

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        mean, variance = function_dist.mean, function_dist.variance
        return observations * mean - (mean + variance / 2).exp() - torch.lgamma(observations + 1)
