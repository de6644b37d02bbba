r"""The one thing that turns a prior and inputs into (prior mean, A, d).

:math:`A = L^{-1} K_{ZX}` with :math:`L = \mathrm{chol}(K_{ZZ} + \epsilon I)`, and :math:`d_n = k_{nn} - a_n^\top a_n`.
Strategies, collapsed models and the inducing-point kernel each make a :class:`Projector`; training steps, predictions,
diagnostics and sums over the data take one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.settings import _linalg_dtype_cholesky
from linear_operator import LinearOperator, to_dense
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from ..checks import all_finite, asks_precision, check_device, passed, raise_if_not_finite, same_values
from ..maths.fused import reuse_cholesky
from ..maths.linalg import cholesky, project, residual_variance
from ..settings import float32_factor
from .kernels import LoweredKernel, lower_lazy
from .precision import (
    covariance_block,
    covariance_within,
    covers_rounding,
    diagonal,
    is_wide,
    jitter_suffices,
    noise_tolerance,
    read,
    unlowered_spread,
)

# Makes the factor of a joint covariance from a function of a block, its name and perhaps its scale.
Factorization = Callable[[Tensor, Callable[..., Tensor]], Tensor]


class Projection(NamedTuple):
    """What a sparse approximation knows about some points, before q.

    :param mean: Prior mean, ``... x B``.
    :param matrix: :math:`A`, ``... x M x B``.
    :param residual: :math:`d_n`, ``... x B``.
    """

    mean: Tensor
    matrix: Tensor
    residual: Tensor


class PriorBlocks(NamedTuple):
    r"""The prior at the inducing points and the data, in blocks.

    :param mean: Prior mean at the data, ``... x B``.
    :param inducing_covar: :math:`K_{ZZ}` without jitter, ``... x M x M``.
    :param cross_covar: :math:`K_{ZX}`, ``... x M x B``.
    :param data_variance: :math:`k_{nn}`, ``... x B``.
    :param spread: Largest squared norm of the inputs in lengthscales, or zero if it is not known.
    :param covar: The lazy covariance of inducing points and data together, ``... x (M + B) x (M + B)``.
    """

    mean: Tensor
    inducing_covar: Tensor
    cross_covar: Tensor
    data_variance: Tensor
    spread: Tensor | float
    covar: LinearOperator


class FactorCache:
    """The factor of the last matrix, used only for the very values it was computed from; holds no graph."""

    def __init__(self) -> None:
        self.known: tuple[Tensor, Tensor] | None = None

    def get(self, matrix: Tensor) -> Tensor | None:
        """The factor, if the matrix is what it was."""
        if self.known is None or not same_values(self.known[0], matrix):
            return None
        factor = self.known[1]
        return factor.clone() if factor.is_inference() and not torch.is_inference_mode_enabled() else factor

    def put(self, matrix: Tensor, factor: Tensor) -> None:
        """Keep a factor."""
        self.known = matrix.clone(), factor


def one_block(matrix: Tensor, factorize: Callable[..., Tensor]) -> Tensor:
    """The factorization of one set of inducing variables."""
    return factorize(matrix, "K_ZZ")


class Projector:
    r"""Projects inputs onto inducing variables, in a precision that it chooses once.

    The kernel is evaluated in the precision of the inputs if that suffices: if rounding stays below the jitter, or below
    the noise where that is known, given the prior variances and the inputs in lengthscales. Otherwise, or if
    :math:`K_{ZZ}` cannot be factorised, it is evaluated in float64.

    :param prior: From inputs to the prior there, as a model's ``forward``.
    :param points: :math:`Z`, ``... x M x D``.
    :param jitter: :math:`\epsilon`, added to :math:`K_{ZZ}` and to nothing else.
    :param noise: Noise variances, of a collapsed model. :math:`K_{ZZ}` is then evaluated in float64 always, since
        there may be no jitter.
    :param precision: In which to evaluate, instead of choosing.
    :param factorize: How the joint covariance of the inducing variables is factorised.
    :param inputs: From ``x`` to the prior mean and what the prior takes, if that is not ``x`` itself.
    :param lower: Whether common kernels are evaluated by their lowered form, which is faster and once differentiable.
    :param cache: Where the factor is kept from call to call.
    :param owner: Describes the hyperparameters in messages.
    :param warned: Names for which a jitter was reported already; a model reports each once.
    """

    def __init__(
        self,
        prior: Callable[..., MultivariateNormal],
        points: Tensor,
        *,
        jitter: float = 0.0,
        noise: Tensor | None = None,
        precision: torch.dtype | None = None,
        factorize: Factorization = one_block,
        inputs: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
        lower: bool = True,
        cache: FactorCache | None = None,
        owner: Callable[[], str] | None = None,
        warned: set[str] | None = None,
    ) -> None:
        self.prior, self.points, self.jitter, self.noise = prior, points, jitter, noise
        self.precision, self.factorize, self.inputs, self.lower = precision, factorize, inputs, lower
        self.cache, self.owner, self.warned = cache, owner, set() if warned is None else warned
        self.wide = _linalg_dtype_cholesky.value()
        self.is_exact = precision is not None
        self.least_spread: Tensor | float = 0.0
        self.factor: Tensor | None = None  # without a graph
        self.inducing_covar: Tensor | None = None  # with the graph of the call that factorised it

    @property
    def num_inducing(self) -> int:
        """Number of inducing variables."""
        return self.points.size(-2)

    # -- the prior in blocks ------------------------------------------------------------------------------------------

    def blocks(self, x: Tensor, dtype: torch.dtype, **kwargs: Any) -> PriorBlocks:
        """The prior at the points and at ``x``, evaluated in one precision."""
        mean, features = (None, x) if self.inputs is None else self.inputs(x)
        points = _together(self.points, features)
        joint = self.prior(points, **kwargs)
        mean = joint.mean[..., self.num_inducing :] if mean is None else mean
        covar = joint.lazy_covariance_matrix
        own = dtype if self.noise is None else self.wide
        lowered = lower_lazy(covar) if self.lower else None
        if lowered is not None:
            return PriorBlocks(mean, *self._lowered_blocks(lowered, covar.x1, dtype, own), covar)
        # A kernel of several outputs has that many rows per point.
        num_rows = self.num_inducing * (covar.size(-1) // points.size(-2))
        top, bottom = slice(None, num_rows), slice(num_rows, None)
        return PriorBlocks(
            mean,
            read(covar[..., top, top], to_dense, own),
            read(covar[..., top, bottom], to_dense, dtype),
            read(covar[..., bottom, bottom], diagonal, dtype),
            0 if dtype == self.wide else unlowered_spread(covar),
            covar,
        )

    def _lowered_blocks(
        self, lowered: LoweredKernel, features: Tensor, dtype: torch.dtype, own: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        # What the kernel sees: the inputs after any feature extractor and selection of dimensions.
        values = [value.to(dtype) for value in lowered.values]
        features = features.to(dtype)
        z, data = features[..., : self.num_inducing, :], features[..., self.num_inducing :, :]
        if own == dtype and lowered.blocks is not None:
            inducing, cross, largest = lowered.blocks(values, features, self.num_inducing)
            return inducing, cross, lowered.variance(values, data), largest
        if own == dtype:
            inducing = lowered.covariance(values, z, z)
        else:
            wide = z.to(own)
            inducing = lowered.covariance([value.to(own) for value in lowered.values], wide, wide)
        spread = 0 if lowered.spread is None or dtype == self.wide else lowered.spread(values, z, data)
        return inducing, lowered.covariance(values, z, data), lowered.variance(values, data), spread

    # -- the factor, and the one decision ------------------------------------------------------------------------------

    def factorized(self, x: Tensor, **kwargs: Any) -> tuple[PriorBlocks, Tensor]:
        r"""The prior at ``x`` and :math:`\mathrm{chol}(K_{ZZ} + \epsilon I)`, the latter without a graph.

        Whether the inputs are finite, the factorisation succeeded and the precision suffices is read back at once. If it
        does not, the prior is evaluated again in float64; a matrix that is not positive definite there gets a jitter of
        its own scale.
        """
        dtype = self._first_precision(x.dtype)
        prior = self.blocks(x, dtype, **kwargs)
        if self.factor is not None:
            if dtype == self.wide or self.is_exact or passed(self._covers(prior, self.factor, dtype)):
                return prior, self.factor
            self.factor, self.precision = None, self.wide
            return self.factorized(x, **kwargs)
        matrix = self._jittered(prior.inducing_covar)
        factor = None if self.cache is None else self.cache.get(matrix)
        flags = [] if self.is_exact else [all_finite(x)]
        if factor is None:
            factor, succeeded = self._try(matrix)
            flags.append(succeeded)
        if dtype != self.wide and not self.is_exact and asks_precision():
            flags.append(self._covers(prior, factor, dtype))
        if not flags or passed(*flags):
            return self._keep(prior, matrix, factor, dtype)
        raise_if_not_finite(x)
        if dtype != self.wide:
            dtype = self.wide
            prior = self.blocks(x, dtype, **kwargs)
        matrix = self._jittered(prior.inducing_covar, self.wide)
        return self._keep(prior, matrix, self.factorize(matrix, self._checked), dtype)

    def settle(self, inputs: Iterable[Tensor], **kwargs: Any) -> Projector:
        """Choose the precision for all of some inputs, so that every chunk of them is projected alike."""
        for x in inputs:
            raise_if_not_finite(x)
            prior = self.prior(_together(self.points, x if self.inputs is None else self.inputs(x)[1]), **kwargs)
            if self._first_precision(x.dtype) != self.wide:
                self._widen(prior.lazy_covariance_matrix)
        return self

    def _widen(self, covar: LinearOperator) -> None:
        """Let no later decision forget how far these inputs lie apart."""
        lowered, spread = lower_lazy(covar) if self.lower else None, None
        if lowered is None:
            spread = unlowered_spread(covar)
        elif lowered.spread is not None:
            z, data = covar.x1[..., : self.num_inducing, :], covar.x1[..., self.num_inducing :, :]
            spread = lowered.spread(lowered.values, z, data)
        if isinstance(spread, Tensor):
            self.least_spread = spread.clamp_min(self.least_spread)

    def _first_precision(self, dtype: torch.dtype) -> torch.dtype:
        if self.precision is None:
            wide = is_wide() or (self.noise is None and not jitter_suffices(self.jitter, dtype))
            return self.wide if wide else dtype
        return self.precision

    def _covers(self, prior: PriorBlocks, factor: Tensor, dtype: torch.dtype) -> Tensor:
        variance = prior.inducing_covar.diagonal(dim1=-1, dim2=-2)
        tolerance = self.jitter if self.noise is None else noise_tolerance(factor, self.noise)
        spread, least = prior.spread, self.least_spread
        if isinstance(least, Tensor):
            spread = least if not isinstance(spread, Tensor) else spread.clamp_min(least)
        return covers_rounding(tolerance, variance, dtype, spread, is_collapsed=self.noise is not None)

    def _jittered(self, inducing_covar: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None:
            dtype = inducing_covar.dtype if float32_factor.on() else self.wide
        matrix = inducing_covar.detach().to(dtype, copy=True)
        matrix.diagonal(dim1=-1, dim2=-2).add_(self.jitter)
        return matrix

    def _try(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The factor, and whether it is one; on CUDA NaN factorises without complaint."""
        succeeded = []

        def factorize(block: Tensor, *_: Any) -> Tensor:
            factor, info = torch.linalg.cholesky_ex(block)
            # Zero times NaN is NaN: one comparison for both questions.
            both = factor.diagonal(dim1=-1, dim2=-2).sum(-1) * 0 + info
            succeeded.append((both.sum() if both.dim() else both) == 0)
            return factor

        factor = self.factorize(matrix, factorize)
        return factor, reduce(torch.logical_and, succeeded)

    def _checked(self, matrix: Tensor, name: str, scale: Tensor | None = None) -> Tensor:
        try:
            return cholesky(matrix, name, scale, report=self._report)
        except torch.linalg.LinAlgError as error:
            kind = NotPSDError if bool(torch.isfinite(matrix).all()) else NanError
            owner = "" if self.owner is None else f" Hyperparameters: {self.owner()}."
            raise kind(
                f"{error} jitter_val was {self.jitter:g}.{owner} "
                "Try a larger jitter_val, inputs and targets scaled to unit variance, a smaller learning rate, fewer or "
                "better spread inducing points, or float64."
            ) from error

    def _report(self, name: str, message: str) -> None:
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(message, NumericalWarning, stacklevel=2)

    def _keep(
        self, prior: PriorBlocks, matrix: Tensor, factor: Tensor, dtype: torch.dtype
    ) -> tuple[PriorBlocks, Tensor]:
        if self.cache is not None and not matrix.is_meta:
            self.cache.put(matrix, factor)
        self.precision, self.factor, self.inducing_covar = dtype, factor, prior.inducing_covar
        return prior, factor

    # -- what the others take ------------------------------------------------------------------------------------------

    def project(self, prior: PriorBlocks) -> Tensor:
        """:math:`A` with a graph, for what the fused moments do not say."""
        assert self.factor is not None
        assert self.inducing_covar is not None
        factor = self.factor
        if torch.is_grad_enabled() and self.inducing_covar.requires_grad:
            factor = reuse_cholesky(self.inducing_covar.to(factor.dtype), factor)
        return project(factor, prior.cross_covar)

    def __call__(self, x: Tensor, **kwargs: Any) -> Projection:
        prior, _ = self.factorized(x, **kwargs)
        matrix = self.project(prior)
        return Projection(prior.mean, matrix, residual_variance(prior.data_variance, matrix))

    def data_covariance(self, prior: PriorBlocks) -> Tensor:
        """Prior covariance of the points of a batch."""
        data = slice(self.num_inducing, None)
        return covariance_block(prior.covar, data, data, prior.cross_covar.dtype, self.lower)

    def covariance(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Prior covariance between two sets of points, in the precision of the projections."""
        same = x1 is x2
        if self.inputs is not None:
            x1 = self.inputs(x1)[1]
            x2 = x1 if same else self.inputs(x2)[1]
        covar = self.prior(x1 if same else _together(x1, x2)).lazy_covariance_matrix
        rows = slice(None, x1.size(-2))
        columns = rows if same else slice(x1.size(-2), None)
        return covariance_block(covar, rows, columns, self.precision or x1.dtype, self.lower)

    def residual_covariance(self, x1: Tensor, x2: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """:math:`D` between two sets of points, given their projections."""
        return self.covariance(x1, x2) - first.mT @ second

    def residual_within(self, prior: PriorBlocks, matrix: Tensor, sets: Tensor) -> Tensor:
        """:math:`D` within sets of points of a batch: from their positions, ``K x S``, to ``... x K x S x S``."""
        covariance = covariance_within(prior.covar, sets + self.num_inducing, matrix.dtype, self.lower)
        columns = matrix[..., sets].movedim(-2, -3)
        return covariance - columns.mT @ columns


def _together(first: Tensor, second: Tensor) -> Tensor:
    """One set of points above the other, in their common batch shape."""
    check_device(second, first.device, "Inputs are")
    if first.shape[:-2] != second.shape[:-2]:
        batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
        first, second = first.expand(*batch, *first.shape[-2:]), second.expand(*batch, *second.shape[-2:])
    return torch.cat([first, second], dim=-2)
