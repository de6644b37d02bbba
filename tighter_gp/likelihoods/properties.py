"""What the objective must know of a likelihood: its Gaussian noise, if it has one, and whether it is log-concave."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import likelihoods, settings
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from torch import Tensor

_LOG_CONCAVE = (
    _GaussianLikelihoodBase,
    likelihoods.BernoulliLikelihood,
    likelihoods.LaplaceLikelihood,
    likelihoods.SoftmaxLikelihood,
)


def is_gaussian(likelihood: Any) -> bool:
    """Whether the noise is Gaussian and independent between points, so that the best scales have a closed form."""
    return isinstance(likelihood, _GaussianLikelihoodBase)


def is_log_concave(likelihood: Any) -> bool:
    r"""Whether :math:`\log p(y \mid f)` is known to be concave in :math:`f`.

    A likelihood of your own says so with an attribute ``is_log_concave = True``.
    """
    declared = getattr(likelihood, "is_log_concave", None)
    return isinstance(likelihood, _LOG_CONCAVE) if declared is None else bool(declared)


def gaussian_noise(likelihood: Any, batch_shape: torch.Size, event_shape: torch.Size, **kwargs: Any) -> Tensor:
    r"""Noise variance :math:`\sigma_n^2` of each observation, broadcastable to ``batch_shape + event_shape``.

    :param likelihood: Any Gaussian likelihood of GPyTorch.
    :param kwargs: What the objective was called with; ``noise=`` gives the variances of the points of this batch.
    """
    if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood):
        return _fixed_noise(likelihood, event_shape, **kwargs)
    if isinstance(likelihood, likelihoods.GaussianLikelihood) and "noise" not in kwargs:
        noise = likelihood.noise
        return noise.reshape(*noise.shape[:-1], *(1 for _ in event_shape))
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase) and getattr(likelihood, "rank", 0) > 0:
        raise TypeError(
            f"{type(likelihood).__name__} with rank > 0 correlates the noise of the tasks. GPyTorch's expected log "
            "likelihood drops these correlations and is then no bound; build the likelihood with rank=0."
        )
    noise = likelihood._shaped_noise_covar(batch_shape + event_shape, **kwargs).diagonal(dim1=-1, dim2=-2)
    return noise.reshape(*noise.shape[:-1], *event_shape) if len(event_shape) > 1 else noise


def _fixed_noise(likelihood: Any, event_shape: torch.Size, noise: Tensor | None = None, **kwargs: Any) -> Tensor:
    fixed = likelihood.noise_covar.noise if noise is None else noise
    if fixed.size(-1) != event_shape[-1]:
        came = f"noise= of {fixed.size(-1)}" if noise is not None else f"{fixed.size(-1)} stored noise variances"
        raise ValueError(
            f"{type(likelihood).__name__} needs one noise variance a point: got {came} for a batch of {event_shape[-1]}. "
            "With mini-batches pass the batch's own, mll(model(x), y, noise=noise[rows])."
        )
    return fixed + likelihood.second_noise


def observed(likelihood: Any, targets: Tensor, event_shape: torch.Size) -> Tensor | None:
    """Which targets count, or None if all must: NaN means missing where GPyTorch has been told so."""
    policy = settings.observation_nan_policy.value()
    if policy == "mask":
        return settings.observation_nan_policy._get_observed(targets, event_shape).expand_as(targets)
    if policy == "fill" or isinstance(likelihood, likelihoods.GaussianLikelihoodWithMissingObs):
        return ~torch.isnan(targets)
    return None
