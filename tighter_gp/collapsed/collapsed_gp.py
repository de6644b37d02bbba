"""Collapsed bounds for many rows: a chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gpytorch import Module, settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean, ZeroMean
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..likelihoods.family import family, gaussian_noise
from ..maths.bounds import PENALTIES, check_bound
from ..maths.linalg import full_precision
from ..maths.moments import Whitened, explained_moments
from ..prior import Prior
from ..prior.projection import raise_if_not_finite
from .core import chunked_bound, data_sums, detached
from .prices import earlier_neighbours

if TYPE_CHECKING:
    import numpy as np

_BOUNDS = (*PENALTIES, "neighbours")


def collapsed_bound(
    kernel: Kernel,
    inducing_points: Tensor | np.ndarray,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    noise: Tensor | np.ndarray | float,
    *,
    bound: str = "tighter",
    num_neighbours: int = 20,
    seed: int = 0,
    chunk_size: int = 4096,
    jitter_val: float = 0.0,
) -> Tensor:
    r"""A collapsed bound on the log evidence, summed over the data.

    Equal to :func:`~tighter_gp.maths.bounds.tighter_bound` (or its kin) and its gradient, whatever the chunk size; time is
    :math:`O(NM^2)`, memory :math:`O(M^2 + MB)` for chunks of :math:`B` rows where the data are many. Where float32 does not
    know the residual variances to within the noise, the kernel is evaluated in float64.

    :param kernel: Any GPyTorch kernel.
    :param inducing_points: :math:`Z`, shape ``M x D``.
    :param x: Inputs, ``N x D`` or ``N``. Tensors or numpy arrays, here and below; their precision is that of the bound.
    :param y: Targets less the prior mean, ``N``.
    :param noise: :math:`\sigma_n^2`, one number or one per row.
    :param bound: ``"tighter"``, ``"spherical"``, ``"titsias"`` or ``"neighbours"``.
    :param num_neighbours: For ``"neighbours"``: how many earlier rows each row may be correlated with under q(f|u). They are
        chosen at the given hyperparameters, in :math:`O(N^2 M)`.
    :param seed: Of the order of the rows.
    :param chunk_size: Rows per chunk.
    :param jitter_val: Added to :math:`K_{ZZ}`.

    Example:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> value = tighter_gp.collapsed_bound(kernel, x[::10], x, torch.sin(6 * x[:, 0]), torch.tensor(0.1))
        >>> value.shape
        torch.Size([])
    """
    check_bound(bound, _BOUNDS)
    device = next((parameter.device for parameter in kernel.parameters()), None)
    x, y, inducing_points = _tensors(x, y, inducing_points, device)
    variances = _tensor(noise).to(y).expand(y.shape)  # sigma_n^2  [N]
    given = [detached(tensor) for tensor in (inducing_points, x, y, variances)]
    points, x, y, variances = (leaf for _, leaf in given)
    prior = kernel_prior(kernel, points, variances.detach(), jitter_val)
    sets = earlier_neighbours(prior, x, variances, num_neighbours, seed) if bound == "neighbours" else None
    leaves = [*((parameter, parameter) for parameter in kernel.parameters()), *given]
    return chunked_bound(prior, x.__getitem__, y, variances, bound, chunk_size, leaves, sets)


def kernel_prior(
    kernel: Kernel,
    inducing_points: Tensor,
    noise: Tensor,
    jitter_val: float,
    mean: Mean | None = None,
    dtype: torch.dtype | None = None,
) -> Prior:
    """The prior of a kernel and perhaps a mean.

    :param noise: Noise variances, to which the precision of the projections is matched.
    :param dtype: Of kernel and projection; default one that suffices.
    """

    def joint(x: Tensor) -> tuple[Tensor, LinearOperator]:
        points = inducing_points.expand(*x.shape[:-2], *inducing_points.shape[-2:])
        with settings.lazily_evaluate_kernels(True):  # which GPyTorch turns off within a kernel
            covar = kernel(torch.cat([points, x], dim=-2))
        return x.new_zeros(()).expand(x.shape[:-1]) if mean is None else mean(x), covar

    return Prior(joint, inducing_points.size(-2), jitter_val, noise, dtype)


def _tensor(values: Any, device: torch.device | None = None) -> Tensor:
    """A tensor as it is, an array or a number as a copy of its own precision; floating point."""
    if hasattr(values, "astype"):  # an array: native, in order
        values = values.astype(values.dtype.newbyteorder("="), order="C", copy=True)
    values = values if isinstance(values, Tensor) else torch.as_tensor(values, device=device)
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _inputs(values: Any, device: torch.device | None = None) -> Tensor:
    """The same of inputs, ``N x D`` or ``N``."""
    x = _tensor(values, device)
    return x.unsqueeze(-1) if x.dim() == 1 else x


def _tensors(x: Any, y: Any, inducing_points: Any, device: torch.device | None) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``N x D``, targets ``N`` and inducing points ``M x D``."""
    x, y, inducing_points = _inputs(x, device), _tensor(y, device), _inputs(inducing_points, device)
    if y.shape != x.shape[:-1] or x.dim() != 2:
        raise ValueError(f"Expected x of shape N x D and y of shape N; got {tuple(x.shape)} and {tuple(y.shape)}.")
    raise_if_not_finite(x)
    if not bool(torch.isfinite(y).all()):
        raise ValueError("y holds NaN or infinity; drop these rows.")
    return x, y, inducing_points


class CollapsedGP(Module):
    r"""
    Sparse GP regression on a collapsed bound, for as many rows as there is time for.

    :class:`~tighter_gp.TighterInducingPointKernel` does the same inside GPyTorch's ``ExactGP`` for data whose
    ``M x N`` projection fits into memory. Train by maximising :meth:`bound`, with L-BFGS for instance; all data at each
    evaluation, there are no mini-batches.

    :param x: Training inputs, ``N x D`` or ``N``: a tensor or a numpy array. Float64 makes a model in float64.
    :param y: Training targets, ``N``.
    :param inducing_points: :math:`Z`, ``M x D`` or ``M``; a parameter.
    :param covar_module: Kernel.
    :param likelihood: Gaussian likelihood.
    :param mean_module: Mean; default zero.
    :param bound: ``"tighter"``, ``"spherical"``, ``"titsias"`` or ``"neighbours"``.
    :param num_neighbours: For ``"neighbours"``: how many earlier rows each row may be correlated with under q(f|u). They are
        chosen now, in :math:`O(N^2 M)`, and again by :meth:`choose_neighbours`: training needs an objective that stays.
    :param seed: Of the order of the rows.
    :param chunk_size: Rows per chunk.
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
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray,
        inducing_points: Tensor | np.ndarray,
        covar_module: Kernel,
        likelihood: Likelihood,
        mean_module: Mean | None = None,
        *,
        bound: str = "tighter",
        num_neighbours: int = 20,
        seed: int = 0,
        chunk_size: int = 4096,
        jitter_val: float = 0.0,
    ) -> None:
        super().__init__()
        if not family(likelihood).is_gaussian:
            raise TypeError(f"A collapsed bound needs a Gaussian likelihood; got {type(likelihood).__name__}.")
        check_bound(bound, _BOUNDS)
        own = next(covar_module.parameters(), torch.empty(0))
        x, y, inducing_points = _tensors(x, y, inducing_points, own.device)
        self.register_buffer("train_x", x, persistent=False)
        self.register_buffer("train_y", y, persistent=False)
        self.inducing_points = torch.nn.Parameter(inducing_points.detach().clone())
        self.covar_module, self.likelihood = covar_module, likelihood
        self.mean_module = mean_module if mean_module is not None else ZeroMean()
        self.bound_name, self.chunk_size, self.jitter_val = bound, chunk_size, jitter_val
        self.num_neighbours, self.seed = num_neighbours, seed
        self.to(torch.promote_types(x.dtype, own.dtype))
        self.register_buffer("neighbours", None)
        if bound == "neighbours":
            self.choose_neighbours()

    def choose_neighbours(self) -> None:
        """For ``bound="neighbours"``: each row's neighbours, at the present hyperparameters."""
        noise = self.train_noise
        self.neighbours = earlier_neighbours(self.prior(), self.train_x, noise, self.num_neighbours, self.seed)

    @property
    def train_noise(self) -> Tensor:
        """Noise variances of the training points, ``N``."""
        return gaussian_noise(self.likelihood, torch.Size(), self.train_y.shape).expand_as(self.train_y)

    def prior(self, dtype: torch.dtype | None = None) -> Prior:
        """What turns inputs into (prior mean, A, d).

        :param dtype: Of kernel and projection; default one that suffices.
        """
        noise = self.train_noise.detach()
        return kernel_prior(self.covar_module, self.inducing_points, noise, self.jitter_val, self.mean_module, dtype)

    def bound(self) -> Tensor:
        """The bound on the log evidence, summed over the data."""
        noise = detached(self.train_noise)
        leaves = [*((parameter, parameter) for parameter in self.parameters()), noise]
        data = self.train_x.__getitem__, self.train_y, noise[1]
        return chunked_bound(self.prior(), *data, self.bound_name, self.chunk_size, leaves, self.neighbours)

    @torch.no_grad()
    def posterior(self, dtype: torch.dtype | None = None) -> tuple[Prior, Whitened]:
        """The prior with its factor and the best q(w), gathered in a pass over the data: keep it for several predictions.

        :param dtype: Of kernel and projection; default one that suffices.
        """
        training = self.train_x, self.train_y, self.train_noise.reciprocal()
        chunks = zip(*(part.split(self.chunk_size) for part in training), strict=True)
        with full_precision(self.train_x.device.type):
            prior = self.prior(dtype).factorized(self.train_x[: self.chunk_size])
            return prior, data_sums((prior(x), y, precision) for x, y, precision in chunks).best_q()

    @torch.no_grad()
    def predict(self, x: Tensor | np.ndarray) -> MultivariateNormal:
        """The latent predictive distribution, in diagonal form, at inputs ``... x B x D``; one pass over the training data."""
        x = _inputs(x).to(self.inducing_points)
        (prior, q), moments = self.posterior(), []
        with full_precision(x.device.type):
            for rows in x.split(self.chunk_size, dim=-2):
                points = prior(rows)  # A  [..., M, B]
                mean, explained = explained_moments(points.matrix, q.to(points.matrix.dtype))  # A'm and s  [..., B]
                moments.append((points.mean + mean, explained + points.residual))
        means, variances = (torch.cat(parts, -1).to(x.dtype) for parts in zip(*moments, strict=True))
        return MultivariateNormal(means, DiagLinearOperator(variances))
