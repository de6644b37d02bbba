"""Gaussian noise whose variance is a function of the input."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Normal

_LOG_2PI = math.log(2 * math.pi)


class HeteroscedasticGaussianLikelihood(Likelihood):
    r"""
    Two latent functions per point, the mean and the logarithm of the noise variance: :math:`y \sim \mathcal N(f, e^g)`.

    With :math:`q(f)q(g)` and :math:`w = \mathbb E[e^{-g}] = e^{-\mu_g + v_g/2}` the expected log likelihood is

    .. math:: -\tfrac12 \bigl[\log 2\pi + \mu_g + w \bigl((y - \mu_f)^2 + v_f\bigr)\bigr].

    The best scale of f is :math:`1/(1 + w d_f)`, and in g the log likelihood is concave, so that the tighter bound is strict
    for two independent functions, as of an
    :class:`~gpytorch.variational.IndependentMultitaskVariationalStrategy` with two tasks.

    Example:
        >>> likelihood = tighter_gp.likelihoods.HeteroscedasticGaussianLikelihood()
        >>> likelihood(torch.zeros(3, 2)).stddev
        tensor([1., 1., 1.])
    """

    is_log_concave = True  # in each function given the other, which is what a factorised q asks for

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        mean, log_noise = function_samples.unbind(-1)
        return Normal(mean, (0.5 * log_noise).exp())

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.expected_log_prob_of_moments(observations, function_dist.mean, function_dist.variance)

    def expected_log_prob_of_moments(self, observations: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """``expected_log_prob`` from tensors.

        :param observations: ``... x N``.
        :param mean: Of the two functions, ``... x N x 2``.
        :param variance: The same.
        """
        (mean_f, mean_g), (var_f, var_g) = mean.unbind(-1), variance.unbind(-1)
        precision = torch.exp(0.5 * var_g - mean_g)  # E[e^-g]
        return -0.5 * (_LOG_2PI + mean_g + precision * ((observations - mean_f).square() + var_f))
