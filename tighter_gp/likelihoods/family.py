"""One record per likelihood: what the objective and predictions must know of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch import likelihoods, settings
from gpytorch.constraints import Positive
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.likelihood import Likelihood, _Likelihood, _OneDimensionalLikelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from torch import Tensor

from .bernoulli_logit_likelihood import BernoulliLogitLikelihood
from .heteroscedastic_likelihood import HeteroscedasticGaussianLikelihood
from .poisson_likelihood import PoissonLikelihood


class Family(NamedTuple):
    r"""What is known of a kind of likelihood.

    :param expectation: How its expected log likelihood is computed: ``"gaussian"`` or ``"laplace"``, in closed form; ``"own"``,
        by its ``expected_log_prob``; ``"moments"``, by its ``expected_log_prob_of_moments``; ``"quadrature"`` over its
        ``forward``; or ``"samples"`` of all functions of a point.
    :param is_gaussian_noise: Whether p(y | f) is Gaussian and independent between points.
    :param is_log_concave: Whether :math:`\log p(y \mid f)` is known to be concave in f.
    :param has_one_function: Whether every entry of y depends on one function.
    """

    expectation: str = "samples"
    is_gaussian_noise: bool = False
    is_log_concave: bool = False
    has_one_function: bool = False

    @property
    def is_sampled(self) -> bool:
        """Whether the expected log likelihood is estimated from samples."""
        return self.expectation == "samples"

    @property
    def is_gaussian(self) -> bool:
        """Whether the noise is Gaussian and trained as such, so that the best scales have a closed form."""
        return self.expectation == "gaussian"


def of_gpytorch(name: str) -> tuple[type, ...]:
    """A likelihood of GPyTorch, for ``isinstance``; empty for a version that lacks it."""
    return (getattr(likelihoods, name),) if hasattr(likelihoods, name) else ()


HADAMARD = of_gpytorch("HadamardGaussianLikelihood")

_ONE_FUNCTION = Family("own", has_one_function=True)
_FAMILIES: dict[type, Family] = {
    _MultitaskGaussianLikelihoodBase: Family("gaussian", is_gaussian_noise=True, is_log_concave=True),
    _GaussianLikelihoodBase: Family("gaussian", True, True, True),
    PoissonLikelihood: Family("moments", False, True, True),
    BernoulliLogitLikelihood: Family("moments", False, True, True),
    HeteroscedasticGaussianLikelihood: Family("moments", False, True, False),
    likelihoods.LaplaceLikelihood: Family("laplace", False, True, True),
    likelihoods.BernoulliLikelihood: _ONE_FUNCTION._replace(is_log_concave=True),
    **dict.fromkeys(of_gpytorch("PoissonLikelihood"), _ONE_FUNCTION._replace(is_log_concave=True)),
    _OneDimensionalLikelihood: _ONE_FUNCTION,
    likelihoods.SoftmaxLikelihood: Family("samples", is_log_concave=True),
    Likelihood: Family(),
    _Likelihood: Family(),
}


def family(likelihood: Any) -> Family:
    """What is known of a likelihood, by the nearest class of the table that it derives from.

    A class of your own that changes the density, in ``forward``, or its expectation is trained on what it says; that it is
    log-concave it may say itself, with an attribute ``is_log_concave = True``.
    """
    changed: set[str] = set()
    for kind in type(likelihood).__mro__:
        if kind in _FAMILIES:
            break
        if not kind.__module__.startswith("gpytorch."):
            changed |= vars(kind).keys() & {"forward", "expected_log_prob"}
    else:
        return Family()
    found = _FAMILIES[kind]
    if changed and kind is not _OneDimensionalLikelihood:  # whose rule is one for any density
        expectation = "own" if "expected_log_prob" in changed else "quadrature" if found.has_one_function else "samples"
        keeps_noise = found.is_gaussian_noise and "forward" not in changed
        found = Family(expectation, keeps_noise, False, found.has_one_function)
    declared = getattr(likelihood, "is_log_concave", None)
    return found if declared is None else found._replace(is_log_concave=bool(declared))


def has_own_noise(likelihood: Any) -> bool:
    """Whether the noise of a Gaussian likelihood may be another than its ``noise``: by a method or a noise model of your own."""
    if not type(likelihood)._shaped_noise_covar.__module__.startswith("gpytorch."):
        return True
    model = getattr(likelihood, "noise_covar", None)
    return model is not None and not type(model).forward.__module__.startswith("gpytorch.")


def gaussian_noise(likelihood: Any, batch_shape: torch.Size, event_shape: torch.Size, **kwargs: Any) -> Tensor:
    r"""Noise variance :math:`\sigma_n^2` of each observation, broadcastable to ``batch_shape + event_shape``.

    :param likelihood: Any Gaussian likelihood of GPyTorch.
    :param kwargs: What the objective was called with; ``noise=`` gives the variances of the points of this batch, ``tasks=``
        the task of each of them for :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood`.
    """
    if not has_own_noise(likelihood):
        if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood):
            return _fixed_noise(likelihood, event_shape, **kwargs)
        if isinstance(likelihood, HADAMARD):
            return _noise_of_tasks(likelihood, event_shape, **kwargs)
        if isinstance(likelihood, likelihoods.GaussianLikelihood) and "noise" not in kwargs:
            noise = likelihood.noise  # [..., 1]
            return noise.reshape(*noise.shape[:-1], *[1] * len(event_shape))
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase) and getattr(likelihood, "rank", 0) > 0:
        raise TypeError(
            f"{type(likelihood).__name__} with rank > 0 correlates the noise of the tasks. GPyTorch's expected log "
            "likelihood drops these correlations and is then no bound; build the likelihood with rank=0."
        )
    noise = likelihood._shaped_noise_covar(batch_shape + event_shape, **kwargs).diagonal(dim1=-1, dim2=-2)
    return noise.reshape(*noise.shape[:-1], *event_shape) if len(event_shape) > 1 else noise


def scale_noise(likelihood: Any, factor: Tensor) -> None:
    """Multiply the noise of a likelihood, also to less than its constraint allowed in training."""
    covar = likelihood.noise_covar
    if isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood):
        covar.noise = covar.noise * factor
        covar = likelihood.second_noise_covar
    if covar is not None:
        noise = covar.noise * factor
        covar.register_constraint("raw_noise", Positive())
        covar.noise = noise


def _fixed_noise(likelihood: Any, event_shape: torch.Size, noise: Tensor | None = None, **kwargs: Any) -> Tensor:
    fixed = likelihood.noise_covar.noise if noise is None else noise
    if fixed.size(-1) != event_shape[-1]:
        came = f"noise= of {fixed.size(-1)}" if noise is not None else f"{fixed.size(-1)} stored noise variances"
        raise ValueError(
            f"{type(likelihood).__name__} needs one noise variance per point: got {came} for a batch of {event_shape[-1]}. "
            "With mini-batches pass the batch's own, mll(model(x), y, noise=noise[rows])."
        )
    return fixed + likelihood.second_noise


def _noise_of_tasks(likelihood: Any, event_shape: torch.Size, tasks: Tensor | None = None, **kwargs: Any) -> Tensor:
    if tasks is None or tasks.shape != event_shape:
        came = "none" if tasks is None else f"shape {tuple(tasks.shape)}"
        raise ValueError(
            f"{type(likelihood).__name__} needs the task of each point, also if it is a column of the inputs: pass tasks=, "
            f"integers of shape {tuple(event_shape)}; got {came}."
        )
    return likelihood.noise[..., tasks.long()]


def observed(likelihood: Any, targets: Tensor, event_shape: torch.Size) -> Tensor | None:
    """Which targets count, or None if all must: NaN means missing where GPyTorch has been told so."""
    policy = settings.observation_nan_policy.value()
    if policy == "mask":
        return settings.observation_nan_policy._get_observed(targets, event_shape).expand_as(targets)
    if policy == "fill" or isinstance(likelihood, likelihoods.GaussianLikelihoodWithMissingObs):
        return ~torch.isnan(targets)
    return None


def signed(targets: Tensor) -> Tensor:
    """Bytes and truth values as integers, where 0 - 1 is not 255; others as they are."""
    return targets.long() if targets.dtype in (torch.uint8, torch.bool) else targets


def filled(targets: Tensor, mask: Tensor) -> Tensor:
    """Targets with something of the likelihood's support, the largest of them, where they are missing."""
    largest = torch.where(mask, targets, -torch.inf).amax()
    return torch.where(mask, targets, torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest)))
