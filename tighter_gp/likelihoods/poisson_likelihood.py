"""Poisson likelihood with the exponential link."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson

from ..maths.quadrature import leading

# Steps of Newton's method for the best scale: enough for residual variances of some thousand.
_NEWTON_STEPS = 16


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
        return self.expected_log_prob_of_moments(observations, function_dist.mean, function_dist.variance)

    def expected_log_prob_of_moments(self, observations: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """``expected_log_prob`` from tensors: what a training step calls, since it reads nothing back."""
        return observations * mean - (mean + variance / 2).exp() - torch.lgamma(observations + 1)

    @torch.no_grad()
    def best_scale(self, mean: Tensor, explained: Tensor, residual: Tensor, beta: float = 1.0) -> Tensor:
        r"""The best :math:`m_n`, with :math:`x = \log m_n` the root of :math:`h(x) = x + \log(1 + d_n \lambda_n(e^x) / \beta)`.

        :math:`h` is convex and increasing, so Newton's method from its right, where the scale's own part of the rate is
        left out, never passes the root; far from it a step is nearly one.
        """
        log_rate = mean + explained / 2 + residual.log() - math.log(beta)  # log of d times the rate at m = 0
        x = -torch.nn.functional.softplus(log_rate)
        for _ in range(_NEWTON_STEPS):
            half = 0.5 * x.exp() * residual
            exponent = log_rate + half
            x = x - (x + torch.nn.functional.softplus(exponent)) / (1 + exponent.sigmoid() * half)
        return x.exp()

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        mean, variance = function_dist.mean, function_dist.variance
        with torch.no_grad():
            # Nodes about the mode of p(y|f) q(f), found by Newton's method from its right, where it is monotone.
            mode = torch.maximum(mean, observations.clamp_min(1e-3).log())
            for _ in range(30):
                curvature = mode.exp() + variance.reciprocal()
                mode = mode + (observations - mode.exp() - (mode - mean) / variance) / curvature
            width = math.sqrt(2) * (mode.exp() + variance.reciprocal()).rsqrt()
            locations, weights = (leading(part, mode) for part in (self.quadrature.locations, self.quadrature.weights))
            nodes = mode + width * locations
            log_weights = weights.log() + locations.square() + width.log()
        log_density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(nodes)
        return torch.logsumexp(log_weights + log_density + self.forward(nodes).log_prob(observations), dim=0)
