r"""Natural gradients for a Gaussian q(u) in closed form, from the projection that a training step computes anyway.

With the slopes :math:`g_n = \partial / \partial \mu_n` and :math:`\lambda_n = -2\, \partial / \partial s_n` of the bound of all
data, a step of size :math:`\rho` is, see :mod:`tighter_gp.maths.natural`,

.. math::

    P \leftarrow (1 - \rho) P + \rho \Bigl(I + \sum_n \lambda_n a_n a_n^\top\Bigr), \qquad
    P m \leftarrow P m_{\text{old}} + \rho \Bigl(\sum_n g_n a_n - m_{\text{old}}\Bigr).

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

from ..data import spans
from ..maths.linalg import triangular_inverse
from ..maths.natural import data_sums, natural_step, reversed_factor, sum_to

Size = float | Tensor

_FORMS = (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    MeanFieldVariationalDistribution,
)

# Power iterations per step for the largest curvature that a mean-field mean sees.
_POWER_ITERATIONS = 3


class Natural(NamedTuple):
    r"""q(w) by its natural parameters, in float64.

    :param precision: :math:`P`, ``... x M x M``; its diagonal, ``... x M``, for a mean-field q.
    :param linear: :math:`h = P m`, ``... x M``.
    :param probe: Of a mean-field q, the leading direction of its scaled curvature, ``... x M``; else empty.
    """

    precision: Tensor
    linear: Tensor
    probe: Tensor


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

    q(u) of an SVGP is on its own. The best means of q(u) and q(v) of SOLVE-GP depend on each other, so :math:`(P, h)` of both
    are kept, correlations included, and the nearest independent distributions are written: the joint mean
    :math:`P^{-1} h` and the precisions :math:`P_{uu}` and :math:`P_{vv}`.

    :param strategy: The strategy.
    :param distributions: Its distributions; several only with full covariances.
    :param rows: Their rows of the projection.
    :param num_coupled: How many parts share the data: each takes the others for fixed, so a mean moves by :math:`1/K` at most.
    """

    def __init__(self, strategy: Any, distributions: tuple[Any, ...], rows: slice, num_coupled: int) -> None:
        self.strategy, self.distributions, self.rows, self.num_coupled = strategy, distributions, rows, num_coupled
        self.is_mean_field = isinstance(distributions[0], MeanFieldVariationalDistribution)
        self.within = spans(distribution.num_inducing_points for distribution in distributions)

    def parameters(self) -> list[Tensor]:
        """A vector and a matrix per distribution, in turn."""
        return [parameter for distribution in self.distributions for parameter in vector_and_matrix(distribution)]

    @torch.no_grad()
    def init(self) -> Natural:
        """The natural parameters of the distributions as they are."""
        parts = [_natural_of(distribution) for distribution in self.distributions]
        linear = torch.cat([linear for _, linear in parts], -1)
        if self.is_mean_field:
            return Natural(parts[0][0], linear, torch.ones_like(linear) / linear.size(-1) ** 0.5)
        precision = linear.new_zeros(*linear.shape, linear.size(-1))
        for (block, _), rows in zip(parts, self.within, strict=True):
            precision[..., rows, rows] = block
        return Natural(precision, linear, linear.new_zeros(0))

    @torch.no_grad()
    def knows_data(self, q: Natural) -> bool:
        """Whether this is not the prior, up to the noise with which GPyTorch starts a mean."""
        noise = max(distribution.mean_init_std for distribution in self.distributions)
        ones = torch.ones_like(q.linear)
        identity = ones if self.is_mean_field else torch.diag_embed(ones)
        return bool((q.precision - identity).abs().amax() > 1e-3) or bool(q.linear.abs().amax() > 1e-6 + 6 * noise)

    def mean(self, q: Natural) -> Tensor:
        """The mean as the forward pass sees it, ``... x M``."""
        found = []
        for distribution, rows in zip(self.distributions, self.within, strict=True):
            mean = vector_and_matrix(distribution)[0].detach()
            if isinstance(distribution, (NaturalVariationalDistribution, TrilNaturalVariationalDistribution)):
                factor, _ = reversed_factor(q.precision[..., rows, rows])
                root = triangular_inverse(factor)
                mean = (root @ (root.mT @ mean.double().unsqueeze(-1))).squeeze(-1)
            found.append(mean)
        return torch.cat(found, -1) if len(found) > 1 else found[0]

    def sums(self, q: Natural, slopes: Slopes) -> tuple[Tensor, Tensor]:
        r""":math:`\sum_n \lambda_n a_n a_n^\top` and :math:`\sum_n g_n a_n` of a batch."""
        matrix = slopes.matrix[..., self.rows, :]
        return data_sums(matrix, slopes.slope, slopes.curvature, q.linear.shape[:-1], self.is_mean_field)

    @torch.no_grad()
    def move(
        self,
        q: Natural,
        gram: Tensor,
        vector: Tensor,
        slopes: Slopes,
        size: Size,
        reach: float | Tensor | None,
        reduce: Any,
    ) -> tuple[Natural, list[Tensor], Tensor]:
        r"""One step.

        :param gram: :meth:`sums`, over all processes.
        :param vector: The same.
        :param slopes: Of the batch.
        :param size: :math:`\rho`, above 0 and at most 1; a tensor in a graph.
        :param reach: How far the mean of a point may move, where slopes depend on q(u): a rate of exp(f) explodes.
        :param reduce: Sums and maxima over processes.
        :return: The natural parameters, the values of :meth:`parameters`, and whether P is positive definite.
        """
        matrix, old = slopes.matrix[..., self.rows, :], self.mean(q).to(q.linear)
        gram, ascent = gram.to(q.precision), vector.to(q.linear) - old
        limit: Size = 1 / self.num_coupled
        mean_size: Size = size.clamp_max(limit) if isinstance(size, Tensor) else min(size, limit)
        precision, probe = natural_step(q.precision, gram, size, self.is_mean_field), q.probe
        if self.is_mean_field:
            kappa, probe = self._curvature(precision, matrix, slopes.curvature, probe, reduce)
            mean_size = kappa.reciprocal().clamp_max(mean_size)  # a larger one can diverge
        if reach is not None:
            direction = ascent / precision if self.is_mean_field else _solve(precision, ascent)  # dm, [..., M]
            change = (matrix.mT @ direction.to(matrix).unsqueeze(-1)).abs().amax().double()  # max |A' dm|
            change = reduce.largest(change)
            mean_size = mean_size * (reach / (mean_size * change).clamp_min(1e-300)).clamp_max(1.0)
        product = (
            precision * old if self.is_mean_field else (precision @ old.unsqueeze(-1)).squeeze(-1)
        )  # P m, [..., M]
        moved = Natural(precision, product + mean_size * ascent, probe)
        values, ok = self._values(moved)
        return moved, values, ok

    def _curvature(
        self, precision: Tensor, matrix: Tensor, curvature: Tensor, vector: Tensor, reduce: Any
    ) -> tuple[Tensor, Tensor]:
        r"""The largest eigenvalue of the curvature scaled by its diagonal, ``... x 1``, and its direction."""
        width = precision.rsqrt().to(matrix)
        vector = vector.to(matrix)
        for _ in range(_POWER_ITERATIONS):
            scaled = width * vector
            weights = (matrix.mT @ scaled.unsqueeze(-1)).squeeze(-1) * curvature.to(matrix)
            product = sum_to((matrix @ weights.unsqueeze(-1)).squeeze(-1), width.shape[:-1], width.shape[-1:])
            (product,) = reduce(product)
            product = width * (scaled + product)
            kappa = product.norm(dim=-1, keepdim=True)
            vector = product / kappa.clamp_min(torch.finfo(kappa.dtype).tiny)
        return kappa.double().clamp_min(1.0), vector.double()

    def _values(self, q: Natural) -> tuple[list[Tensor], Tensor]:
        if len(self.distributions) == 1:
            return _parameters_of(self.distributions[0], q.precision, q.linear)
        mean, ok = _solve(q.precision, q.linear), torch.isfinite(q.linear).all()
        values: list[Tensor] = []
        for distribution, rows in zip(self.distributions, self.within, strict=True):
            block = q.precision[..., rows, rows]
            found, is_fine = _parameters_of(distribution, block, (block @ mean[..., rows, None]).squeeze(-1))
            values, ok = values + found, ok & is_fine
        return values, ok


def parts_of(model: torch.nn.Module) -> list[Part]:
    """What natural gradients move: every Gaussian q(u) of our strategies, all of whose parameters are trained."""
    strategies = [module for module in model.modules() if hasattr(module, "distributions")]
    groups = [group for strategy in strategies for group in _groups(strategy)]
    latents = [module.num_latents for module in model.modules() if isinstance(module, LMCVariationalStrategy)]
    per_strategy = [sum(strategy is group[0] for group in groups) for strategy in strategies]
    num_coupled = max([1, *per_strategy]) * max([1, *latents]) * max(1, len(strategies))
    return [Part(*group, num_coupled) for group in groups if all(map(is_moved, group[1]))]


def _groups(strategy: Any) -> list[tuple[Any, tuple[Any, ...], slice]]:
    """All distributions of a strategy together if each has a full covariance, else each on its own."""
    found = strategy.distributions
    is_full = [is_moved(d) and not isinstance(d, MeanFieldVariationalDistribution) for d in found]
    if all(is_full):
        return [(strategy, tuple(found), slice(None))]
    rows = spans(distribution.num_inducing_points for distribution in found)
    return [(strategy, (d,), own) for d, own in zip(found, rows, strict=True)]


def has_natural_step(distribution: Any) -> bool:
    """Whether a distribution has natural parameters: Cholesky, natural, tril-natural or mean-field; not a point mass."""
    return type(distribution) in _FORMS


def is_moved(distribution: Any) -> bool:
    """The same, and all of it is trained; Adam trains the rest of one that is frozen in part."""
    return has_natural_step(distribution) and all(p.requires_grad for p in distribution.parameters())


def vector_and_matrix(distribution: _VariationalDistribution) -> tuple[Tensor, Tensor]:
    """The parameters of a distribution: a vector, and a matrix or the standard deviations."""
    if isinstance(distribution, NaturalVariationalDistribution):
        return distribution.natural_vec, distribution.natural_mat
    if isinstance(distribution, TrilNaturalVariationalDistribution):
        return distribution.natural_vec, distribution.natural_tril_mat
    if isinstance(distribution, MeanFieldVariationalDistribution):
        return distribution.variational_mean, distribution._variational_stddev
    return distribution.variational_mean, distribution.chol_variational_covar


def _natural_of(distribution: _VariationalDistribution) -> tuple[Tensor, Tensor]:
    """(P, h) of a distribution's parameters, in float64."""
    vector, matrix = (parameter.detach().double() for parameter in vector_and_matrix(distribution))
    if isinstance(distribution, MeanFieldVariationalDistribution):
        precision = matrix.square().reciprocal()
        return precision, precision * vector
    if isinstance(distribution, NaturalVariationalDistribution):
        return -(matrix + matrix.mT), vector.clone()
    if isinstance(distribution, TrilNaturalVariationalDistribution):
        return matrix.tril().mT @ matrix.tril(), vector.clone()
    inverse = triangular_inverse(matrix.tril())
    return inverse.mT @ inverse, (inverse.mT @ (inverse @ vector.unsqueeze(-1))).squeeze(-1)


def _parameters_of(
    distribution: _VariationalDistribution, precision: Tensor, linear: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The values that :func:`vector_and_matrix` should have, and whether they are of use."""
    finite = torch.isfinite(linear).all()
    if isinstance(distribution, MeanFieldVariationalDistribution):
        ok = finite & ((precision > 0) & torch.isfinite(precision)).all()
        return [linear / precision, precision.rsqrt()], ok
    factor, ok = reversed_factor(precision)  # P = T'T
    if isinstance(distribution, NaturalVariationalDistribution):
        return [linear, -0.5 * precision], ok & finite
    if isinstance(distribution, TrilNaturalVariationalDistribution):
        return [linear, factor], ok & finite
    root = triangular_inverse(factor)
    return [(root @ (root.mT @ linear.unsqueeze(-1))).squeeze(-1), root], ok & finite


def _solve(precision: Tensor, vector: Tensor) -> Tensor:
    factor, _ = torch.linalg.cholesky_ex(precision)
    return torch.cholesky_solve(vector.unsqueeze(-1), factor).squeeze(-1)
