"""Bernoulli likelihood with the logistic link."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Bernoulli

from ..maths.quadrature import leading


class BernoulliLogitLikelihood(_OneDimensionalLikelihood):
    r"""
    Binary classification with :math:`p(y = 1 \mid f) = 1 / (1 + e^{-f})`.

    Labels are 0 and 1; -1 is read as 0. GPyTorch's own :class:`~gpytorch.likelihoods.BernoulliLikelihood` uses the
    probit link. Log-concave, so the tighter bound is strict with every conditional.

    Example:
        >>> likelihood = tighter_gp.likelihoods.BernoulliLogitLikelihood()
        >>> likelihood(torch.zeros(3)).probs
        tensor([0.5000, 0.5000, 0.5000])
    """

    is_log_concave = True

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        return Bernoulli(logits=function_samples)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        return self.expected_log_prob_of_moments(observations, function_dist.mean, function_dist.variance)

    def expected_log_prob_of_moments(self, observations: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """``expected_log_prob`` from tensors: what a training step calls, since it reads nothing back."""
        sign = torch.where(observations > 0, 1.0, -1.0).to(mean.dtype)
        shape = (-1, *(1 for _ in range(max(sign.dim(), mean.dim()))))
        locations, weights = (
            part.to(mean).reshape(shape) for part in (self.quadrature.locations, self.quadrature.weights)
        )
        log_prob = torch.nn.functional.logsigmoid(sign * (mean + (2 * variance).sqrt() * locations))
        return (weights * log_prob).sum(0) / math.sqrt(math.pi)

    def curvature_of_moments(self, observations: Tensor, mean: Tensor) -> Callable[[Tensor], Tensor]:
        r"""Minus twice the derivative of the rule's ``expected_log_prob`` in the variance, as a function of the variance.

        Nodes and weights are symmetric, so that the label's sign can go to the mean:
        :math:`\sqrt{2 / (\pi v)} \sum_i w_i x_i\, \sigma(\pm\mu + \sqrt{2v}\, x_i)`.
        """
        mean = torch.where(observations > 0, mean, -mean)
        locations, weights = (leading(part, mean) for part in (self.quadrature.locations, self.quadrature.weights))
        weights = weights * locations * (2 / math.sqrt(math.pi))  # [K, 1, ...]

        def curvature(variance: Tensor) -> Tensor:
            width = (2 * variance).sqrt()  # [..., N]
            return (torch.addcmul(mean, width, locations).sigmoid() * weights).sum(0) / width

        return curvature

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        sign = torch.where(observations > 0, 1.0, -1.0).to(function_dist.loc.dtype)
        return self.quadrature(lambda f: torch.sigmoid(sign * f), function_dist).log()

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        return Bernoulli(probs=self.quadrature(torch.sigmoid, function_dist))
