"""Through GPyTorch's wrappers and back: variances of the tasks from those of the latent functions, and slopes in return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy
from torch import Tensor

from ..carrier import Carrier, find_carriers, mixes_points, replace_variance
from ..likelihoods.expectations import event_variance
from ..strategies.base import divergence


def carrier_of(q: Any) -> Carrier:
    """The one carrier in q(f), or a clear error."""
    if isinstance(q, MultivariateNormal) and isinstance(q.lazy_covariance_matrix, Carrier):  # nearly always
        return q.lazy_covariance_matrix
    if isinstance(q, Tensor):
        raise TypeError(
            "TighterELBO needs q(f), got a tensor: call mll(model(x), y), and for a latent-variable model use "
            "tighter_gp.gplvm.LatentVariableELBO, as objective= of fit."
        )
    carriers = find_carriers(q.lazy_covariance_matrix) if isinstance(q, MultivariateNormal) else []
    if len(carriers) != 1:
        raise TypeError(
            f"TighterELBO needs q(f) of one strategy as the model returns it, unsliced; this one carries {len(carriers)}."
        )
    if mixes_points(q.lazy_covariance_matrix):
        raise TypeError(
            "This q(f) mixes points, as sums over an area do: their variances depend on covariances between points, which a "
            "tighter q(f|u) would change too. Use gpytorch.mlls.VariationalELBO for the standard bound, with conditional="
            "'optimal'."
        )
    return carriers[0]


def with_variance(q: MultivariateNormal, variance: Tensor) -> MultivariateNormal:
    """q(f) with other variances of its latent functions and no correlation between points."""
    covar = replace_variance(q.lazy_covariance_matrix, variance)
    if isinstance(q, MultitaskMultivariateNormal):
        return MultitaskMultivariateNormal(q.mean, covar, interleaved=q._interleaved)
    return q.__class__(q.mean, covar)


def pull_back(
    q: MultivariateNormal,
    carrier: Carrier,
    weights: Tensor,
    covariance: Callable[[MultivariateNormal], Tensor] = event_variance,
) -> Tensor:
    r"""Derivative of ``(weights * variance).sum()`` with respect to the variance of each latent function.

    The variances are linear in it whatever the wrapper: :math:`\lambda = 1/\sigma^2` for a single output,
    :math:`1/\sigma_p^2` for independent tasks, :math:`\sum_p W_{pk}^2/\sigma_p^2` for the k-th latent of an LMC.

    :param covariance: What the weights are for: the variances of q, or the covariances between its tasks.
    """
    with torch.enable_grad():
        probe = torch.zeros_like(carrier.residual, requires_grad=True)
        values = covariance(with_variance(q, probe))
        (gradient,) = torch.autograd.grad((weights * values).sum(), probe, create_graph=True)
    return gradient


def copied_dims(q: MultivariateNormal, carrier: Carrier) -> tuple[int, ...]:
    """The dimensions of the carrier's batch that a wrapper consumed and that hold copies of one function."""
    # The wrappers move the dimension they consume to the end of the carrier's batch.
    return tuple(dim for dim in range(len(q.batch_shape), len(carrier.batch_shape)) if carrier.copied[dim])


def wrapped_divergence(strategy: Any, q: MultivariateNormal) -> Tensor:
    """KL divergence of the q(u) that made q(f), summed over the latent functions that make up one model."""
    (carrier,) = find_carriers(q.lazy_covariance_matrix)
    if not hasattr(strategy, "base_variational_strategy") and strategy is not carrier.origin.strategy:
        return strategy.kl_divergence()  # a deep GP, or a sum of several
    value = divergence(carrier.origin.q).to(q.mean.dtype)
    if isinstance(strategy, LMCVariationalStrategy):
        return value.sum(strategy.latent_dim)
    if not isinstance(strategy, IndependentMultitaskVariationalStrategy):
        return value
    # GPyTorch sums over the last dimension whatever task_dim is, and also where tasks are copies of one function.
    dim = strategy.task_dim if strategy.task_dim < 0 else strategy.task_dim - len(q.batch_shape) - 1
    return value.sum(dim) if -value.dim() <= dim < 0 else value
