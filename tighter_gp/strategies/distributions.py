"""Variational distributions as tensors: read, set to the prior, set to an optimum. No matrix is inverted by LU."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import Delta, Distribution, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
)
from gpytorch.variational.natural_variational_distribution import _NaturalToMuVarSqrt
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, RootLinearOperator
from torch import Tensor

from ..checks import passed
from ..maths.linalg import cholesky, solve_lower, triangular_inverse
from ..maths.moments import Whitened
from ..maths.natural import lower_root, reversed_factor


def to_whitened(q: Distribution) -> Whitened:
    """The tensors of a whitened variational distribution."""
    if isinstance(q, Delta):
        return Whitened(q.mean)
    if not isinstance(q, MultivariateNormal):
        raise TypeError(f"q(u) must be a MultivariateNormal or a Delta; got {type(q).__name__}.")
    covar = q.lazy_covariance_matrix
    if isinstance(covar, DiagLinearOperator):
        return Whitened(q.mean, stddev=covar.diagonal(dim1=-1, dim2=-2).sqrt())
    if isinstance(covar, RootLinearOperator):
        return Whitened(q.mean, root=covar.root.to_dense())
    return Whitened(q.mean, root=covar.cholesky().to_dense())


class _NaturalToRoot(torch.autograd.Function):
    """Mean and lower root from natural parameters, with GPyTorch's backward pass, which gives natural gradients."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, root: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        mean = (root @ (root.mT @ vector.unsqueeze(-1))).squeeze(-1)
        ctx.save_for_backward(mean, root)
        return mean, root.clone()

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_root: Tensor) -> tuple[Tensor, None, Tensor]:
        mean, root = ctx.saved_tensors
        inverse = triangular_inverse(root)
        by_vector, by_matrix = _NaturalToMuVarSqrt._backward(grad_mean, grad_root, mean, root, inverse)
        return by_vector, None, by_matrix


def _of_natural(distribution: NaturalVariationalDistribution) -> Whitened | None:
    """With one factorisation, where GPyTorch takes two; None where there is none without a jitter."""
    vector, matrix = distribution.natural_vec, distribution.natural_mat
    root, ok = lower_root(-2 * matrix.detach().mT)  # from the lower triangle, as there
    return Whitened(*_NaturalToRoot.apply(vector, root, matrix)) if passed(ok) else None


def parameters_of(distribution: _VariationalDistribution) -> Whitened | None:
    """The tensors of a distribution without a detour through operators; None for an unknown one."""
    if type(distribution) is DeltaVariationalDistribution:
        return Whitened(distribution.variational_mean)
    if type(distribution) is NaturalVariationalDistribution:
        return _of_natural(distribution)
    if type(distribution) is CholeskyVariationalDistribution:
        return Whitened(distribution.variational_mean, root=distribution.chol_variational_covar.tril())
    if type(distribution) is MeanFieldVariationalDistribution:
        return Whitened(distribution.variational_mean, stddev=distribution._variational_stddev.abs())
    return None


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
def set_to_prior(distribution: _VariationalDistribution) -> None:
    """Start from the whitened prior, with GPyTorch's noise on the mean."""
    if not isinstance(distribution, (NaturalVariationalDistribution, TrilNaturalVariationalDistribution)):
        distribution.initialize_variational_distribution(standard_normal(distribution))
        return
    vector = distribution.natural_vec
    identity = torch.eye(vector.size(-1), dtype=vector.dtype, device=vector.device)
    vector.copy_(torch.randn_like(vector).mul_(distribution.mean_init_std))
    if isinstance(distribution, NaturalVariationalDistribution):
        distribution.natural_mat.copy_(-0.5 * identity)
    else:
        distribution.natural_tril_mat.copy_(identity)


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
            # A lower matrix C with C'C = P.
            distribution.natural_tril_mat.copy_(reversed_factor(precision)[0])
        return
    factor = cholesky(precision, name="precision of q(u)")
    covar = DenseLinearOperator(torch.cholesky_inverse(factor))
    noise_std, distribution.mean_init_std = distribution.mean_init_std, 0.0
    try:
        q = MultivariateNormal(mean, covar).expand(distribution.batch_shape)
        distribution.initialize_variational_distribution(q)
    finally:
        distribution.mean_init_std = noise_std


@torch.no_grad()
def whiten(distribution: _VariationalDistribution, prior_mean: Tensor, chol: Tensor) -> None:
    r"""Take over q(u) of a checkpoint from before GPyTorch whitened; a point mass is left as it is, as there.

    :param prior_mean: :math:`\mu(Z)`, ``... x M``.
    :param chol: :math:`L = \mathrm{chol}(K_{ZZ})`, ``... x M x M``.
    """
    q = to_whitened(distribution())
    root = q.root if q.stddev is None else torch.diag_embed(q.stddev)
    if root is None:
        return
    mean = solve_lower(chol, (q.mean - prior_mean).to(chol.dtype).unsqueeze(-1)).squeeze(-1)
    covar = RootLinearOperator(solve_lower(chol, root.to(chol.dtype)).to(root.dtype))
    noise_std, distribution.mean_init_std = distribution.mean_init_std, 0.0
    distribution.initialize_variational_distribution(MultivariateNormal(mean.to(root.dtype), covar))
    distribution.mean_init_std = noise_std
