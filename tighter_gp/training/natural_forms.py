"""Natural parameters from and to those of a variational distribution, in any of its forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
)
from torch import Tensor

from ..maths.linalg import triangular_inverse
from ..maths.natural import NaturalParameters, reversed_factor

_FORMS = (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    MeanFieldVariationalDistribution,
)


def has_natural_step(distribution: _VariationalDistribution) -> bool:
    """Whether a distribution has a natural step: Cholesky, natural, tril-natural or mean-field; not a point mass.

    Example:
        >>> tighter_gp.training.natural_forms.has_natural_step(gpytorch.variational.DeltaVariationalDistribution(3))
        False
    """
    return type(distribution) in _FORMS


@torch.no_grad()
def init_natural(distribution: _VariationalDistribution) -> NaturalParameters:
    r""":math:`(P, h)` in float64 of a distribution's parameters as they are.

    Example:
        >>> q = gpytorch.variational.CholeskyVariationalDistribution(2)
        >>> q.chol_variational_covar.data.mul_(0.5)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
        >>> tighter_gp.training.natural_forms.init_natural(q).precision
        tensor([[4., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    vector, matrix = (parameter.detach().double() for parameter in vector_and_matrix(distribution))
    if isinstance(distribution, MeanFieldVariationalDistribution):
        precision = matrix.square().reciprocal()
        state = NaturalParameters(precision, precision * vector)
    elif isinstance(distribution, NaturalVariationalDistribution):
        state = NaturalParameters(-(matrix + matrix.mT), vector.clone())
    elif isinstance(distribution, TrilNaturalVariationalDistribution):
        matrix = matrix.tril()
        state = NaturalParameters(matrix.mT @ matrix, vector.clone())
    else:
        inverse = triangular_inverse(matrix.tril())
        linear = (inverse.mT @ (inverse @ vector.unsqueeze(-1))).squeeze(-1)
        state = NaturalParameters(inverse.mT @ inverse, linear)
    if not bool(torch.isfinite(state.precision).all()):
        raise ValueError(
            f"q(u) has no natural parameters: the {type(distribution).__name__} has a variance of zero, or NaN. "
            "Natural gradients need a covariance of full rank."
        )
    return state


def parameter_values(form: type, q: NaturalParameters) -> tuple[Tensor, Tensor, Tensor]:
    """The vector and the matrix that a form of q(u) has as parameters, and whether they are of use; for a graph too."""
    finite = torch.isfinite(q.linear).all()
    if issubclass(form, MeanFieldVariationalDistribution):
        ok = finite & ((q.precision > 0) & torch.isfinite(q.precision)).all()
        return q.linear / q.precision, q.precision.rsqrt(), ok
    if issubclass(form, NaturalVariationalDistribution):
        _, ok = reversed_factor(q.precision)
        return q.linear, -0.5 * q.precision, ok & finite
    factor, ok = reversed_factor(q.precision)
    if issubclass(form, TrilNaturalVariationalDistribution):
        return q.linear, factor, ok & finite
    root = triangular_inverse(factor)
    return (root @ (root.mT @ q.linear.unsqueeze(-1))).squeeze(-1), root, ok & finite


def vector_and_matrix(distribution: _VariationalDistribution) -> tuple[Tensor, Tensor]:
    """The vector and the matrix (or the standard deviations)."""
    if isinstance(distribution, NaturalVariationalDistribution):
        return distribution.natural_vec, distribution.natural_mat
    if isinstance(distribution, TrilNaturalVariationalDistribution):
        return distribution.natural_vec, distribution.natural_tril_mat
    if isinstance(distribution, MeanFieldVariationalDistribution):
        return distribution.variational_mean, distribution._variational_stddev
    return distribution.variational_mean, distribution.chol_variational_covar


def mean_of(distribution: _VariationalDistribution, current: Callable[[], NaturalParameters]) -> Tensor:
    """The mean as the forward pass saw it.

    :param distribution: The distribution.
    :param current: Gives its natural parameters, for a form that has no mean of its own.
    """
    vector, matrix = (parameter.detach() for parameter in vector_and_matrix(distribution))
    if isinstance(distribution, (CholeskyVariationalDistribution, MeanFieldVariationalDistribution)):
        return vector
    q, factor = current(), matrix.tril().double()
    if isinstance(distribution, NaturalVariationalDistribution):
        factor, _ = reversed_factor(q.precision)
    upper = torch.linalg.solve_triangular(factor.mT, q.linear.unsqueeze(-1), upper=True)
    return torch.linalg.solve_triangular(factor, upper, upper=False).squeeze(-1)
