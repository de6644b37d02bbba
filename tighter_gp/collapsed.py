r"""Collapsed bounds for many rows: a chunk at a time, recomputed in the backward pass.

Every collapsed bound needs the data only through :math:`\sum_n a_n a_n^\top/\sigma_n^2`,
:math:`\sum_n a_n y_n/\sigma_n^2`, the misfit, and the sum of a penalty of :math:`d_n/\sigma_n^2`. Memory is therefore
:math:`O(M^2 + MB)` for a chunk of :math:`B` rows, and the sums are kept in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch import Module
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean, ZeroMean
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._checks import check_inputs, raise_if_not_finite, same_values
from ._modes import chunks
from .kernels.precision import covariances, inducing_cholesky, sufficient_precision
from .likelihoods.properties import gaussian_noise, is_gaussian
from .linalg import project, residual_variance
from .moments import Whitened, add_identity_cholesky, explained_variance, projected_mean, whitened_from_gram

BOUNDS = ("titsias", "spherical", "tighter")


class _Sums(NamedTuple):
    """Sums over data, in float64: Gram matrix, linear term, sum of d/noise, sum of log(1 + d/noise)."""

    gram: Tensor
    linear: Tensor
    trace: Tensor
    log: Tensor


def collapsed_bound(
    kernel: Kernel,
    inducing_points: Tensor,
    x: Tensor,
    y: Tensor,
    noise: Tensor,
    *,
    bound: str = "tighter",
    chunk_size: int = 4096,
    jitter_val: float = 0.0,
) -> Tensor:
    r"""A collapsed bound on the log evidence, summed over the data.

    Equal to :func:`~tighter_gp.bounds.tighter_bound` (or its kin) and its gradient, whatever the chunk size; time is
    :math:`O(NM^2)`, memory :math:`O(M^2 + MB)` for chunks of :math:`B` rows, since the backward pass evaluates each chunk
    again. The quadratic form is a sum of squares, so that small noise cancels nothing. Where float32 does not know the
    residual variances to within the noise, the kernel is evaluated in float64.

    :param kernel: Any GPyTorch kernel; the common ones are lowered.
    :param inducing_points: :math:`Z`, shape ``M x D``.
    :param x: Inputs, ``N x D``.
    :param y: Targets less the prior mean, ``N``.
    :param noise: :math:`\sigma_n^2`, one number or one a row.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
    :param chunk_size: Rows a chunk.
    :param jitter_val: Added to :math:`K_{ZZ}`.

    Example:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> value = tighter_gp.collapsed_bound(kernel, x[::10], x, torch.sin(6 * x[:, 0]), torch.tensor(0.1))
        >>> value.shape
        torch.Size([])
    """
    _check_bound(bound)
    _check_shapes(x, y, inducing_points)
    num_data, given = len(y), y.dtype
    chol = inducing_cholesky(covariances(kernel, torch.float64), inducing_points, jitter_val)
    precision = sufficient_precision(chol, noise, given)
    y, noise = y.to(precision), noise.expand(y.shape).to(precision)
    sums = data_sums(kernel, inducing_points, chol, x, y, noise, chunk_size)
    factor = add_identity_cholesky(sums.gram)
    # The quadratic form is the minimum over w of misfit + |w|^2, so that its gradient needs no derivative of w.
    weights = torch.cholesky_solve(sums.linear.unsqueeze(-1), factor).squeeze(-1).detach()
    quadratic = weights.square().sum() + _misfit(kernel, inducing_points, chol, weights, x, y, noise, chunk_size)
    log_det = 2 * factor.diagonal().log().sum() + noise.double().log().sum()
    penalty = {
        "titsias": lambda: 0.5 * sums.trace,
        "spherical": lambda: 0.5 * num_data * torch.log1p(sums.trace / num_data),
        "tighter": lambda: 0.5 * sums.log,
    }[bound]()
    value = -0.5 * (num_data * math.log(2 * math.pi) + quadratic + log_det) - penalty
    return value.to(given)


def _check_bound(bound: str) -> None:
    if bound not in BOUNDS:
        raise ValueError(f"Unknown bound {bound!r}; choose {', '.join(map(repr, BOUNDS))}.")


def _check_shapes(x: Tensor, y: Tensor, inducing_points: Tensor) -> None:
    if y.shape != x.shape[:-1] or x.dim() != 2:
        raise ValueError(f"Expected x of shape N x D and y of shape N; got {tuple(x.shape)} and {tuple(y.shape)}.")
    if inducing_points.dim() != 2 or inducing_points.size(-1) != x.size(-1):
        raise ValueError(f"Expected inducing points M x {x.size(-1)}, like x; got {tuple(inducing_points.shape)}.")


def data_sums(
    kernel: Kernel, inducing_points: Tensor, chol: Tensor, x: Tensor, y: Tensor, noise: Tensor, chunk_size: int
) -> _Sums:
    """What a collapsed bound needs of the data, gathered in chunks that the backward pass evaluates again.

    The kernel is evaluated in the precision of ``y`` and ``noise``.
    """
    covariance, variance = covariances(kernel, y.dtype)

    def chunk(z: Tensor, chol: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        projection = project(chol, covariance(z, x))
        ratio = residual_variance(variance(x), projection) / noise
        weighted = projection / noise
        return (
            (weighted @ projection.mT).double(),
            (weighted @ y).double(),
            ratio.double().sum(),
            torch.log1p(ratio).double().sum(),
        )

    total: list[Tensor] | None = None
    for rows in chunks(len(y), chunk_size):
        parts = _recomputed(chunk, inducing_points, chol, x[rows], y[rows], noise[rows])
        total = list(parts) if total is None else [a + b for a, b in zip(total, parts, strict=True)]
    assert total is not None
    return _Sums(*total)


def _misfit(
    kernel: Kernel,
    inducing_points: Tensor,
    chol: Tensor,
    weights: Tensor,
    x: Tensor,
    y: Tensor,
    noise: Tensor,
    chunk_size: int,
) -> Tensor:
    r""":math:`\sum_n (y_n - a_n^\top w)^2/\sigma_n^2`; one matrix-vector product a chunk, no triangular solve."""
    covariance, _ = covariances(kernel, y.dtype)
    direction = torch.linalg.solve_triangular(chol.mT, weights.unsqueeze(-1), upper=True).squeeze(-1)

    def chunk(z: Tensor, direction: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        misfit = y - direction.to(y.dtype) @ covariance(z, x)
        return (misfit.square() / noise).double().sum()

    total: Tensor | float = 0.0
    for rows in chunks(len(y), chunk_size):
        total = total + _recomputed(chunk, inducing_points, direction, x[rows], y[rows], noise[rows])
    assert isinstance(total, Tensor)
    return total


def _recomputed(function: Callable[..., Any], *inputs: Tensor) -> Any:
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class CollapsedGP(Module):
    r"""
    Sparse GP regression on a collapsed bound, for as many rows as there is time for.

    :class:`~tighter_gp.TighterInducingPointKernel` does the same inside GPyTorch's ``ExactGP`` for data whose
    ``M x N`` projection fits into memory. Train by maximising :meth:`bound`, with L-BFGS for instance; all data at each
    evaluation, there are no mini-batches.

    :param x: Training inputs, ``N x D``.
    :param y: Training targets, ``N``.
    :param inducing_points: :math:`Z`, ``M x D``; a parameter.
    :param covar_module: Kernel.
    :param likelihood: Gaussian likelihood.
    :param mean_module: Mean; default zero.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
    :param chunk_size: Rows a chunk.
    :param jitter_val: Added to :math:`K_{ZZ}`.

    Example:
        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> gp = tighter_gp.CollapsedGP(x, torch.sin(6 * x[:, 0]), x[::10], kernel, gpytorch.likelihoods.GaussianLikelihood())
        >>> loss = -gp.bound() / len(x)
        >>> gp.predict(x[:3]).mean.shape
        torch.Size([3])
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        inducing_points: Tensor,
        covar_module: Kernel,
        likelihood: Likelihood,
        mean_module: Mean | None = None,
        *,
        bound: str = "tighter",
        chunk_size: int = 4096,
        jitter_val: float = 0.0,
    ) -> None:
        super().__init__()
        if not is_gaussian(likelihood):
            raise TypeError(f"A collapsed bound needs a Gaussian likelihood; got {type(likelihood).__name__}.")
        _check_bound(bound)
        _check_shapes(x, y, inducing_points)
        for name, tensor in (("x", x), ("y", y)):
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} holds NaN or infinity; drop or impute these rows.")
        self.register_buffer("train_x", x, persistent=False)
        self.register_buffer("train_y", y, persistent=False)
        self.inducing_points = torch.nn.Parameter(inducing_points.clone())
        self.covar_module = covar_module
        self.likelihood = likelihood
        self.mean_module = mean_module if mean_module is not None else ZeroMean()
        self.bound_name, self.chunk_size, self.jitter_val = bound, chunk_size, jitter_val
        self._posteriors: dict[torch.dtype | None, tuple[list[Tensor], tuple[Tensor, Whitened]]] = {}

    @property
    def _noise(self) -> Tensor:
        return gaussian_noise(self.likelihood, torch.Size(), self.train_y.shape).expand_as(self.train_y)

    def bound(self) -> Tensor:
        """The bound on the log evidence, summed over the data."""
        return collapsed_bound(
            self.covar_module,
            self.inducing_points,
            self.train_x,
            self.train_y - self.mean_module(self.train_x),
            self._noise,
            bound=self.bound_name,
            chunk_size=self.chunk_size,
            jitter_val=self.jitter_val,
        )

    def _posterior(self, precision: torch.dtype | None = None) -> tuple[Tensor, Whitened]:
        """The factor of :math:`K_{ZZ}` and the optimal q(w); gathered from the data once for each set of values.

        :param precision: In which the kernel is evaluated and q(w) given; default one that suffices.
        """
        kernel, z, noise = self.covar_module, self.inducing_points, self._noise
        # The data are buffers.
        current = [*self.parameters(), *self.buffers(), noise, torch.tensor(self.jitter_val)]
        if precision in self._posteriors:
            known, posterior = self._posteriors[precision]
            if all(map(same_values, known, current)):
                return posterior
        chol = inducing_cholesky(covariances(kernel, torch.float64), z, self.jitter_val)
        dtype = precision or sufficient_precision(chol, noise, self.train_y.dtype)
        targets = (self.train_y - self.mean_module(self.train_x)).to(dtype)
        sums = data_sums(kernel, z, chol, self.train_x, targets, noise.to(dtype), self.chunk_size)
        posterior = chol, whitened_from_gram(sums.gram, sums.linear).to(dtype)
        self._posteriors[precision] = [tensor.detach().clone() for tensor in current], posterior
        return posterior

    @torch.no_grad()
    def predict(self, x: Tensor) -> MultivariateNormal:
        """The latent predictive distribution, in diagonal form; needs no pass over the data the second time."""
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        chol, q = self._posterior()
        covariance, variance = covariances(self.covar_module, q.mean.dtype)
        means, variances = x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])
        for rows in chunks(x.size(-2), self.chunk_size):
            points = x[..., rows, :]
            projection = project(chol, covariance(self.inducing_points, points))
            means[..., rows] = self.mean_module(points) + projected_mean(projection, q)
            residual = residual_variance(variance(points), projection)
            variances[..., rows] = explained_variance(projection, q) + residual
        return MultivariateNormal(means, DiagLinearOperator(variances))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_posteriors": {}}
