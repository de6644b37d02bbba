"""Variational distributions as tensors: read, and set to an optimum."""

from __future__ import annotations

import torch
from gpytorch.distributions import Delta, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
)
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, RootLinearOperator
from torch import Tensor

from ..maths.linalg import cholesky
from ..maths.moments import Whitened
from ..maths.natural import reversed_factor


def whitened(distribution: _VariationalDistribution) -> Whitened:
    """The tensors of a whitened variational distribution, of GPyTorch's forms without a detour through operators."""
    if type(distribution) is CholeskyVariationalDistribution:
        return Whitened(distribution.variational_mean, root=distribution.chol_variational_covar.tril())
    if type(distribution) is MeanFieldVariationalDistribution:
        return Whitened(distribution.variational_mean, stddev=distribution._variational_stddev.abs())
    q = distribution()
    if isinstance(q, Delta):
        return Whitened(q.mean)
    covar = q.lazy_covariance_matrix
    if isinstance(covar, DiagLinearOperator):
        return Whitened(q.mean, stddev=covar.diagonal(dim1=-1, dim2=-2).sqrt())
    root = covar.root if isinstance(covar, RootLinearOperator) else covar.cholesky()
    return Whitened(q.mean, root=root.to_dense())


def standard_normal(*distributions: _VariationalDistribution) -> MultivariateNormal:
    """The whitened prior of all the variables these distributions are over."""
    first, size = distributions[0], sum(distribution.num_inducing_points for distribution in distributions)
    zeros = torch.zeros(*first.batch_shape, size, dtype=first.dtype, device=first.device)
    return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))


@torch.no_grad()
def is_untouched(distribution: _VariationalDistribution) -> bool:
    """Whether q(u) is as it was made: nothing of it was set by hand, or is not to be trained."""
    parameters = list(distribution.parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        return False
    if not type(distribution).__module__.startswith("gpytorch."):
        return True  # a class of your own, which may be made with other arguments
    with parameters[0].device:
        fresh = type(distribution)(distribution.num_inducing_points, batch_shape=distribution.batch_shape)
    return all(torch.equal(p, other.to(p)) for p, other in zip(parameters, fresh.parameters(), strict=True))


@torch.no_grad()
def set_distribution(distribution: _VariationalDistribution, mean: Tensor, precision: Tensor) -> None:
    r"""Set a variational distribution to the best of its form around :math:`\mathcal N(m, P^{-1})`.

    A mean-field q keeps the diagonal of the precision, a point mass the mean alone: the optimum of the bound in
    either form.

    :param mean: :math:`m`, ``... x M``.
    :param precision: :math:`P`, ``... x M x M``.
    """
    if isinstance(distribution, MeanFieldVariationalDistribution):
        # Not through a distribution, which rounds small variances up.
        distribution.variational_mean.copy_(mean)
        distribution._variational_stddev.copy_(precision.diagonal(dim1=-1, dim2=-2).rsqrt())
        return
    if isinstance(distribution, (NaturalVariationalDistribution, TrilNaturalVariationalDistribution)):
        distribution.natural_vec.copy_((precision @ mean.unsqueeze(-1)).squeeze(-1))
        if isinstance(distribution, NaturalVariationalDistribution):
            distribution.natural_mat.copy_(-0.5 * precision)
        else:
            distribution.natural_tril_mat.copy_(reversed_factor(precision)[0])  # a lower matrix C with C'C = P
        return
    factor = cholesky(precision, name="precision of q(u)")
    covar = DenseLinearOperator(torch.cholesky_inverse(factor))
    noise_std, distribution.mean_init_std = distribution.mean_init_std, 0.0
    try:
        q = MultivariateNormal(mean, covar).expand(distribution.batch_shape)
        distribution.initialize_variational_distribution(q)
    finally:
        distribution.mean_init_std = noise_std
