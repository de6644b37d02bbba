r"""Natural gradients for a Gaussian q(u) in closed form, from the projection that a training step computes anyway.

With the slopes :math:`g_n = \partial / \partial \mu_n` and :math:`\lambda_n = -2\, \partial / \partial s_n` of the bound of all
data, a step of size :math:`\rho` is, see :mod:`tighter_gp.maths.natural`,

.. math::

    P \leftarrow (1 - \rho) P + \rho \Bigl(I + \sum_n \lambda_n a_n a_n^\top\Bigr), \qquad
    m \leftarrow m + \rho P^{-1} \Bigl(\sum_n g_n a_n - m\Bigr).

The natural parameters are values that a step takes and returns; the model's own parameters stay those of its distribution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
)
from torch import Tensor

from ..maths.linalg import triangular_inverse
from ..maths.natural import data_sums, natural_step, reversed_factor
from ..modes import spans
from .distributed import StepSums

# The distributions that have natural parameters, and the names of theirs: a vector, and a matrix or standard deviations.
_FORMS = {
    CholeskyVariationalDistribution: ("variational_mean", "chol_variational_covar"),
    NaturalVariationalDistribution: ("natural_vec", "natural_mat"),
    TrilNaturalVariationalDistribution: ("natural_vec", "natural_tril_mat"),
    MeanFieldVariationalDistribution: ("variational_mean", "_variational_stddev"),
}


class Natural(NamedTuple):
    r"""q(w) in float64.

    :param precision: :math:`P`, ``... x M x M``.
    :param mean: :math:`m`, ``... x M``.
    """

    precision: Tensor
    mean: Tensor


class Slopes(NamedTuple):
    r"""Derivatives of the bound of all data at the points of a batch.

    :param matrix: :math:`A`, ``... x M x B``.
    :param slope: :math:`g_n`, ``... x B``.
    :param curvature: :math:`\lambda_n \ge 0`, ``... x B``.
    """

    matrix: Tensor
    slope: Tensor
    curvature: Tensor


class Part:
    r"""Distributions of one strategy whose natural parameters move together.

    The best means of independent distributions depend on each other, those of q(u) and q(v) of SOLVE-GP as those of the entries
    of a mean-field q(u). So the :math:`P` of all is kept, correlations included, and the nearest independent distributions are
    written: the joint mean, and the blocks of the precision that are theirs.

    :param strategy: The strategy.
    :param distributions: Its distributions.
    :param rows: Their rows of the projection.
    :param num_coupled: How many parts share the data: each takes the others for fixed, so a mean moves by :math:`1/K` at most.
    """

    def __init__(self, strategy: Any, distributions: tuple[Any, ...], rows: slice, num_coupled: int) -> None:
        self.strategy, self.distributions, self.rows, self.num_coupled = strategy, distributions, rows, num_coupled
        self.within = spans(distribution.num_inducing_points for distribution in distributions)
        self.parameters = [getattr(d, name) for d in distributions for name in _FORMS[type(d)]]

    @torch.no_grad()
    def init(self) -> Natural:
        """From the distributions as they are."""
        parts = [_natural_of(distribution) for distribution in self.distributions]
        mean = torch.cat([mean for _, mean in parts], -1)
        precision = mean.new_zeros(*mean.shape, mean.size(-1))
        for (block, _), rows in zip(parts, self.within, strict=True):
            precision[..., rows, rows] = block
        return Natural(precision, mean)

    @torch.no_grad()
    def knows_data(self, q: Natural) -> bool:
        """Whether this is not the prior, up to the noise with which GPyTorch starts a mean."""
        noise = max(distribution.mean_init_std for distribution in self.distributions)
        identity = torch.eye(q.mean.size(-1)).to(q.precision)
        return bool((q.precision - identity).abs().amax() > 1e-3) or bool(q.mean.abs().amax() > 1e-6 + 6 * noise)

    def sums(self, q: Natural, slopes: Slopes) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_n \lambda_n a_n a_n^\top` and :math:`\sum_n g_n a_n` of a batch."""
        gram, vector = data_sums(slopes.matrix[..., self.rows, :], slopes.slope, slopes.curvature, q.mean.shape[:-1])
        return gram.to(q.precision), vector.to(q.mean)

    @torch.no_grad()
    def move(
        self, q: Natural, gram: Tensor, vector: Tensor, matrix: Tensor, size: Tensor, reach: Any, sums: StepSums
    ) -> tuple[Natural, list[Tensor], Tensor]:
        r"""One step.

        :param gram: :meth:`sums`, over all processes.
        :param vector: The same.
        :param matrix: :math:`A` of the batch.
        :param size: :math:`\rho`, above 0 and at most 1.
        :param reach: How far the mean of a point may move, where slopes depend on q(u): a rate of exp(f) explodes.
        :param sums: Between processes.
        :return: The natural parameters, the values of ``parameters``, and whether P is positive definite.
        """
        precision = natural_step(q.precision, gram, size)
        factor, ok = reversed_factor(precision)  # P = T'T
        half = torch.linalg.solve_triangular(factor.mT, (vector - q.mean).unsqueeze(-1), upper=True)
        direction = torch.linalg.solve_triangular(factor, half, upper=False)  # P^-1 (sum_n g_n a_n - m)  [..., M, 1]
        length = size.clamp_max(1 / self.num_coupled)
        if reach is not None:
            change = (matrix[..., self.rows, :].mT @ direction.to(matrix)).abs().amax().double()  # max |A' dm|
            change = length * sums.largest(change)
            length = length * (reach / change.clamp_min(1e-300)).clamp_max(1.0)
        mean = q.mean + length * direction.squeeze(-1)
        values: list[Tensor] = []
        for distribution, rows in zip(self.distributions, self.within, strict=True):
            block = precision[..., rows, rows]
            own = factor if len(self.distributions) == 1 else reversed_factor(block)[0]
            values += _parameters_of(distribution, mean[..., rows], block, own)
        return Natural(precision, mean), values, ok & torch.isfinite(mean).all()


def parts_of(model: torch.nn.Module) -> list[Part]:
    """What natural gradients move: every Gaussian q(u) of our strategies, all of whose parameters are trained."""
    strategies = [module for module in model.modules() if hasattr(module, "distributions")]
    groups = [group for strategy in strategies for group in _groups(strategy)]
    latents = [module.num_latents for module in model.modules() if isinstance(module, LMCVariationalStrategy)]
    per_strategy = [sum(strategy is group[0] for group in groups) for strategy in strategies]
    num_coupled = max([1, *per_strategy]) * max([1, *latents]) * max(1, len(strategies))
    return [Part(*group, num_coupled) for group in groups if all(map(is_moved, group[1]))]


def _groups(strategy: Any) -> list[tuple[Any, tuple[Any, ...], slice]]:
    """All distributions of a strategy together if each has natural parameters, else each on its own."""
    found = strategy.distributions
    if all(map(is_moved, found)):
        return [(strategy, tuple(found), slice(None))]
    rows = spans(distribution.num_inducing_points for distribution in found)
    return [(strategy, (d,), own) for d, own in zip(found, rows, strict=True)]


def has_natural_step(distribution: Any) -> bool:
    """Whether a distribution has natural parameters: Cholesky, natural, tril-natural or mean-field; not a point mass."""
    return type(distribution) in _FORMS


def is_moved(distribution: Any) -> bool:
    """The same, and all of it is trained; Adam trains the rest of one that is frozen in part."""
    return has_natural_step(distribution) and all(p.requires_grad for p in distribution.parameters())


def _natural_of(distribution: _VariationalDistribution) -> tuple[Tensor, Tensor]:
    """(P, m) of a distribution's parameters, in float64."""
    vector, matrix = (getattr(distribution, name).detach().double() for name in _FORMS[type(distribution)])
    if isinstance(distribution, MeanFieldVariationalDistribution):
        return torch.diag_embed(matrix.square().reciprocal()), vector
    if isinstance(distribution, CholeskyVariationalDistribution):
        inverse = triangular_inverse(matrix.tril())
        return inverse.mT @ inverse, vector
    is_tril = isinstance(distribution, TrilNaturalVariationalDistribution)
    precision = matrix.tril().mT @ matrix.tril() if is_tril else -(matrix + matrix.mT)
    return precision, torch.linalg.solve(precision, vector)


def _parameters_of(
    distribution: _VariationalDistribution, mean: Tensor, precision: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The parameters that give a distribution its mean and precision P = T'T."""
    if isinstance(distribution, MeanFieldVariationalDistribution):
        return mean, precision.diagonal(dim1=-1, dim2=-2).rsqrt()
    if isinstance(distribution, CholeskyVariationalDistribution):
        return mean, triangular_inverse(factor)
    linear = (precision @ mean.unsqueeze(-1)).squeeze(-1)  # h
    if isinstance(distribution, TrilNaturalVariationalDistribution):
        return linear, factor
    return linear, -0.5 * precision
