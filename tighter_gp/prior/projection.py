r"""From a prior and inputs to (prior mean, A, d), and the one rule for the precision in which that is done.

:math:`A = L^{-1} K_{ZX}` with :math:`L = \mathrm{chol}(K_{ZZ} + \epsilon I)`, and :math:`d_n = k_{nn} - a_n^\top a_n`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.settings import _linalg_dtype_cholesky
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import ConstantMulLinearOperator, SumLinearOperator
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from ..maths.derivatives import through_factor, whiten
from ..maths.linalg import cholesky
from ..settings import float32_factor
from . import kernels

# From inputs to the prior mean there, and the covariance of the inducing points followed by the inputs.
Joint = Callable[..., tuple[Tensor, LinearOperator]]

# Rounding errors of a covariance, in units of its variance times the unit of rounding, that must stay below the tolerance.
_MARGIN = 64

# Variance of the inputs in squared lengthscales from which on gradients in float32 are not to be trusted.
_MOST_SPREAD = 1000

# A jitter below this many units of rounding will not do whatever the variance, nearly always.
_LEAST_JITTER = 256


class Projection(NamedTuple):
    """What a sparse approximation knows about some points, before q.

    :param mean: Prior mean, ``... x B``.
    :param matrix: :math:`A`, ``... x M x B``.
    :param residual: :math:`d_n`, ``... x B``.
    """

    mean: Tensor
    matrix: Tensor
    residual: Tensor


class Factor(NamedTuple):
    r"""The factor of the inducing points, for several calls of one prior.

    :param covariance: :math:`K_{ZZ}` without jitter, ``... x M x M``; its graph leads through the factor.
    :param chol: :math:`\mathrm{chol}(K_{ZZ} + \epsilon I)`, without a graph, ``... x M x M``.
    :param dtype: In which projections are computed.
    :param limit: The largest variance for which that precision suffices; None where it is float64, or was asked for.
    """

    covariance: Tensor
    chol: Tensor
    dtype: torch.dtype
    limit: Tensor | float | None


class Prior(NamedTuple):
    r"""The prior at the inducing points and at data.

    Kernel and projection are computed in the dtype of the inputs if that suffices: if :math:`64\, k\, \mathrm{eps}` is at most
    the jitter, with :math:`k` the largest variance, and the inputs spread over some thirty lengthscales at most. In a collapsed
    model, where there may be no jitter, the noise times :math:`\sqrt{p/k}` takes its place, with :math:`p` the smallest pivot of
    :math:`K_{ZZ}`. Otherwise, or if :math:`K_{ZZ}` cannot be factorised, they are computed in float64.

    :param joint: From inputs to the prior mean there, and the covariance of the inducing points followed by the inputs.
    :param num_inducing: Number of inducing points.
    :param jitter: :math:`\epsilon`, added to :math:`K_{ZZ}` and to nothing else.
    :param noise: Noise variances of a collapsed model.
    :param dtype: In which to compute, instead of choosing.
    :param factor: The factor of the inducing points, if it is known; see :meth:`factorized`.
    """

    joint: Joint
    num_inducing: int
    jitter: float = 0.0
    noise: Tensor | None = None
    dtype: torch.dtype | None = None
    factor: Factor | None = None

    def __call__(self, x: Tensor, *, check: bool = True, **kwargs: Any) -> Projection:
        """The projection of some inputs.

        :param x: ``... x B x D``.
        :param check: Whether to look at once, which waits for an accelerator. Otherwise what failed is NaN.
        """
        mean, covar = self.joint(x, **kwargs)  # [..., B] and [..., M + B, M + B], lazy
        known = self._factor(covar, self._first_dtype(x.dtype)) if self.factor is None else (self.factor,)
        matrix, residual, ok = self._project(covar, *known)
        if not check:
            return Projection(mean, matrix, residual.where(ok, torch.nan))
        if not _passed(ok):
            raise_if_not_finite(x)
            matrix, residual, _ = self._project(covar, self._wide_factor(covar))
        return Projection(mean, matrix, residual)

    def factorized(self, x: Tensor, **kwargs: Any) -> Prior:
        """The same prior with the factor of its inducing points, for several calls.

        :param x: Some inputs, for which the precision must suffice.
        """
        _, covar = self.joint(x, **kwargs)
        factor, cross, ok = self._factor(covar, self._first_dtype(x.dtype))
        if not _passed(self._project(covar, factor, cross, ok)[2]):
            raise_if_not_finite(x)
            factor = self._wide_factor(covar)
        return self._replace(factor=factor)

    def covariance(self, x1: Tensor, x2: Tensor, dtype: torch.dtype) -> Tensor:
        """Prior covariance between two sets of inputs, ``... x N1 x N2``."""
        size = x1.size(-2)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])  # of both sets of inputs
        both = x1 if x1 is x2 else torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (x1, x2)], -2)
        rows = slice(self.num_inducing, self.num_inducing + size)
        columns = rows if x1 is x2 else slice(self.num_inducing + size, None)
        return block(self.joint(both)[1], rows, columns, dtype)

    def residual_covariance(self, x1: Tensor, x2: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """:math:`D` between two sets of inputs, given their projections, ``... x M x N1`` and ``... x M x N2``."""
        return self.covariance(x1, x2, first.dtype) - first.mT @ second

    def residual_within(self, projection: Projection, x: Tensor, sets: Tensor) -> Tensor:
        r""":math:`D = K - A^\top A` within sets of points: from their positions, ``K x S``, to ``... x K x S x S``.

        :param projection: Of ``x``.
        :param x: ``... x B x D``.
        """
        matrix = projection.matrix
        columns = matrix[..., sets].movedim(-2, 0)  # [K, ..., M, S]
        _, covar = self.joint(x)
        is_kernel = _is_kernel(covar)  # of what it sees, without the inducing points in each set
        inputs = covar.x1[..., self.num_inducing :, :].to(matrix.dtype) if is_kernel else x
        inputs = inputs.expand(*matrix.shape[:-2], *inputs.shape[-2:])[..., sets, :].movedim(-3, 0)  # [K, ..., S, D]
        if is_kernel:
            covariance = kernels.covariance(covar.kernel, inputs, slice(None), slice(None), is_selected=True)
        else:
            covariance = self.covariance(inputs, inputs, matrix.dtype)
        return (covariance - columns.mT @ columns).movedim(0, -3)  # [..., K, S, S]

    # ---- precision --------------------------------------------------------------------------------------------------

    def _first_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The precision to try first."""
        if self.dtype is not None:
            return self.dtype
        is_hopeless = self.noise is None and self.jitter < _LEAST_JITTER * torch.finfo(dtype).eps
        return _wide() if is_hopeless else dtype

    def _limit(self, chol: Tensor, dtype: torch.dtype) -> Tensor | float | None:
        """The largest variance whose rounding errors do no harm."""
        if dtype == _wide() or self.dtype is not None:
            return None
        unit = _MARGIN * torch.finfo(dtype).eps
        if self.noise is None:
            return self.jitter / unit
        pivot = chol.diagonal(dim1=-1, dim2=-2).amin()  # its root; k^(3/2) is at most that times the noise
        return (self.noise.detach().amin() * pivot / unit) ** (2 / 3)

    def _factor(self, covar: LinearOperator, dtype: torch.dtype) -> tuple[Factor, Tensor | None, Tensor]:
        """The factor, :math:`K_{ZX}` if it came along, and whether all went well, a flag on the device."""
        top = slice(None, self.num_inducing)
        if self.noise is None:  # in one pass over both
            cross: Tensor | None
            inducing, cross = block(covar, top, slice(None), dtype).tensor_split([self.num_inducing], dim=-1)
        else:
            inducing, cross = block(covar, top, top, _wide()), None
        chol, info = torch.linalg.cholesky_ex(self._jittered(inducing, dtype))  # L  [..., M, M]
        # On CUDA NaN factorises without complaint.
        ok = (info == 0).all() & torch.isfinite(chol.diagonal(dim1=-1, dim2=-2)).all()
        limit = self._limit(chol, dtype)
        if limit is not None:
            ok = ok & (inducing.detach().diagonal(dim1=-1, dim2=-2).amax() <= limit)
        return Factor(through_factor(inducing, chol), chol, dtype, limit), cross, ok

    def _wide_factor(self, covar: LinearOperator) -> Factor:
        """In float64, with a jitter of the matrix's own scale where there must be one, or a clear error."""
        top = slice(None, self.num_inducing)
        inducing = block(covar, top, top, _wide())
        matrix = self._jittered(inducing, _wide())
        try:
            chol = cholesky(matrix, "K_ZZ", report=lambda _, text: warnings.warn(text, NumericalWarning, stacklevel=2))
        except torch.linalg.LinAlgError as error:
            kind = NotPSDError if bool(torch.isfinite(matrix).all()) else NanError
            raise kind(
                f"{error} jitter_val was {self.jitter:g}. Try a larger jitter_val, inputs and targets scaled to unit variance, "
                "a smaller learning rate, fewer or better spread inducing points, or float64."
            ) from error
        return Factor(through_factor(inducing, chol), chol, _wide(), None)

    def _jittered(self, inducing: Tensor, dtype: torch.dtype) -> Tensor:
        """What is factorised, without a graph."""
        matrix = inducing.detach().to(dtype if float32_factor.on() else _wide(), copy=True)
        matrix.diagonal(dim1=-1, dim2=-2).add_(self.jitter)
        return matrix

    def _project(
        self, covar: LinearOperator, factor: Factor, cross: Tensor | None = None, ok: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A, d, and whether all went well and the precision suffices."""
        rest = slice(self.num_inducing, None)
        if cross is None:
            cross = block(covar, slice(None, self.num_inducing), rest, factor.dtype)
        variance = diagonal(covar, rest, factor.dtype)  # k_nn  [..., B]
        matrix, norms = whiten(factor.covariance, factor.chol, cross)  # A  [..., M, B] and a_n'a_n  [..., B]
        residual = (variance - norms).clamp_min(0)  # [..., B]
        is_finite = torch.isfinite(residual.detach().sum())  # false for NaN in inputs and hyperparameters too
        ok = is_finite if ok is None else ok & is_finite
        if factor.limit is not None and variance.numel():
            ok = ok & (variance.detach().amax() <= factor.limit)
            if _is_kernel(covar):
                ok = ok & torch.as_tensor(kernels.spread(covar.kernel, covar.x1, is_selected=True) <= _MOST_SPREAD)
        return matrix, residual, ok


def _passed(ok: Tensor) -> bool:
    """The one value that is read back from a device; nothing is where there are no values, or only their trace."""
    return ok.is_meta or torch.jit.is_tracing() or bool(ok)


def _wide() -> torch.dtype:
    return _linalg_dtype_cholesky.value()


def raise_if_not_finite(x: Tensor) -> None:
    """Raise if there is a row that holds NaN or infinity."""
    if not bool(torch.isfinite(x).all()):
        rows = int((~torch.isfinite(x)).any(-1).sum())
        raise ValueError(f"Inputs hold NaN or infinity in {rows} of {x.shape[:-1].numel()} rows; drop or impute them.")


# ---- covariances as models return them -------------------------------------------------------------------------------


def _is_kernel(covar: LinearOperator) -> bool:
    """Whether it is a kernel, not evaluated yet, of some inputs with themselves."""
    is_lazy = isinstance(covar, LazyEvaluatedKernelTensor) and covar.x1 is covar.x2
    return is_lazy and not covar.params and not covar.last_dim_is_batch


def block(covar: LinearOperator, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """A dense block of the covariance of some inputs, computed in ``dtype``: kernels are evaluated here."""
    if _is_kernel(covar):
        return kernels.covariance(covar.kernel, covar.x1.to(dtype), rows, columns, is_selected=True)
    if isinstance(covar, SumLinearOperator):
        return reduce(torch.add, (block(part, rows, columns, dtype) for part in covar.linear_ops))
    if isinstance(covar, ConstantMulLinearOperator):
        constant = covar.expanded_constant.to(dtype)
        return constant * block(covar.base_linear_op, rows, columns, dtype)
    return to_dense(covar[..., rows, columns]).to(dtype)


def diagonal(covar: LinearOperator, rows: slice, dtype: torch.dtype) -> Tensor:
    """Variances of some of the inputs, likewise."""
    if _is_kernel(covar):
        return kernels.variance(covar.kernel, covar.x1[..., rows, :].to(dtype), is_selected=True)
    if isinstance(covar, SumLinearOperator):
        return reduce(torch.add, (diagonal(part, rows, dtype) for part in covar.linear_ops))
    if isinstance(covar, ConstantMulLinearOperator):
        return covar._constant.to(dtype).unsqueeze(-1) * diagonal(covar.base_linear_op, rows, dtype)
    return covar[..., rows, rows].diagonal(dim1=-1, dim2=-2).to(dtype)
