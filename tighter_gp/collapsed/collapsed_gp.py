"""Collapsed bounds for many rows: a chunk at a time, computed again for the derivative where memory asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch import Module, settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean, ZeroMean
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..checks import ModuleState, check_device, check_dims, describe_hyperparameters, host_values, raise_if_not_finite
from ..data import Rows, as_tensor, input_rows, reference
from ..likelihoods.properties import gaussian_noise, is_gaussian
from ..maths.bounds import PENALTIES, check_bound
from ..maths.moments import Whitened, explained_variance, projected_mean
from ..modes import chunks
from ..prior import Projector
from .sums import chunked_bound, data_sums, leaves_of, projected_batches, stand_in


def collapsed_bound(
    kernel: Kernel,
    inducing_points: Tensor | np.ndarray,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    noise: Tensor | np.ndarray | float,
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
    :param x: Inputs, ``N x D`` or ``N``. Tensors or numpy arrays, here and below.
    :param y: Targets less the prior mean, ``N``.
    :param noise: :math:`\sigma_n^2`, one number or one per row.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
    :param chunk_size: Rows per chunk.
    :param jitter_val: Added to :math:`K_{ZZ}`.

    Example:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> value = tighter_gp.collapsed_bound(kernel, x[::10], x, torch.sin(6 * x[:, 0]), torch.tensor(0.1))
        >>> value.shape
        torch.Size([])
    """
    check_bound(bound, tuple(PENALTIES))
    x, y, inducing_points = _tensors(x, y, inducing_points, reference(kernel))
    check_device(kernel, inducing_points.device, "The kernel is")
    check_device(y, inducing_points.device, "Targets are")
    variances = (
        noise.to(y.device) if isinstance(noise, Tensor) else torch.as_tensor(np.array(noise, dtype=np.float64)).to(y)
    )
    variances = variances.expand(y.shape)
    points, inputs = stand_in(inducing_points), stand_in(x)
    projector = kernel_projector(kernel, points[1], variances, jitter_val)
    return chunked_bound(projector, inputs[1], y, variances, bound, chunk_size, [*leaves_of(kernel), points, inputs])


def kernel_projector(
    kernel: Kernel,
    inducing_points: Tensor,
    noise: Tensor,
    jitter_val: float,
    mean: Mean | None = None,
    precision: torch.dtype | None = None,
    warned: set[str] | None = None,
) -> Projector:
    """The projector of a kernel and perhaps a mean."""

    def prior(x: Tensor) -> MultivariateNormal:
        with settings.lazily_evaluate_kernels(True):  # which GPyTorch turns off within a kernel
            covar = kernel(x)
        return MultivariateNormal(x.new_zeros(()).expand(x.shape[:-1]) if mean is None else mean(x), covar)

    owner = lambda: describe_hyperparameters(kernel)
    return Projector(
        prior, inducing_points, jitter=jitter_val, noise=noise, owner=owner, precision=precision, warned=warned
    )


def _tensors(x: Any, y: Any, inducing_points: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and inducing points as tensors, or a clear error."""
    x, inducing_points = (as_tensor(v, like, name, is_input=True) for v, name in ((x, "x"), (inducing_points, "Z")))
    y = as_tensor(y, like)
    if y.shape != x.shape[:-1] or x.dim() != 2:
        raise ValueError(f"Expected x of shape N x D and y of shape N; got {tuple(x.shape)} and {tuple(y.shape)}.")
    if inducing_points.dim() != 2 or inducing_points.size(-1) != x.size(-1):
        raise ValueError(f"Expected inducing points M x {x.size(-1)}, like x; got {tuple(inducing_points.shape)}.")
    for name, tensor in (("x", x), ("y", y)):
        values = host_values(tensor)
        if values is not None and not np.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinity; drop or impute these rows.")
    return x, y, inducing_points


class CollapsedGP(Module):
    r"""
    Sparse GP regression on a collapsed bound, for as many rows as there is time for.

    :class:`~tighter_gp.TighterInducingPointKernel` does the same inside GPyTorch's ``ExactGP`` for data whose
    ``M x N`` projection fits into memory. Train by maximising :meth:`bound`, with L-BFGS for instance; all data at each
    evaluation, there are no mini-batches.

    :param x: Training inputs, ``N x D`` or ``N``: a tensor or a numpy array, which becomes a tensor like the kernel's.
    :param y: Training targets, ``N``.
    :param inducing_points: :math:`Z`, ``M x D`` or ``M``; a parameter.
    :param covar_module: Kernel.
    :param likelihood: Gaussian likelihood.
    :param mean_module: Mean; default zero.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
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
        chunk_size: int = 4096,
        jitter_val: float = 0.0,
    ) -> None:
        super().__init__()
        if not is_gaussian(likelihood):
            raise TypeError(f"A collapsed bound needs a Gaussian likelihood; got {type(likelihood).__name__}.")
        check_bound(bound, tuple(PENALTIES))
        x, y, inducing_points = _tensors(x, y, inducing_points, reference(covar_module, likelihood))
        self.register_buffer("train_x", x, persistent=False)
        self.register_buffer("train_y", y, persistent=False)
        self.inducing_points = torch.nn.Parameter(inducing_points.clone())
        self.covar_module = covar_module
        self.likelihood = likelihood
        self.mean_module = mean_module if mean_module is not None else ZeroMean()
        self.bound_name, self.chunk_size, self.jitter_val = bound, chunk_size, jitter_val
        self._warned: set[str] = set()
        self._known: dict[torch.dtype | None, tuple[ModuleState, Projector, Whitened]] = {}

    @property
    def train_noise(self) -> Tensor:
        """Noise variances of the training points, ``N``."""
        return gaussian_noise(self.likelihood, torch.Size(), self.train_y.shape).expand_as(self.train_y)

    def projector(self, precision: torch.dtype | None = None) -> Projector:
        """What turns inputs into (prior mean, A, d).

        :param precision: Of kernel and projection; default one that suffices.
        """
        return kernel_projector(
            self.covar_module,
            self.inducing_points,
            self.train_noise,
            self.jitter_val,
            self.mean_module,
            precision,
            self._warned,
        )

    def bound(self) -> Tensor:
        """The bound on the log evidence, summed over the data."""
        inputs = stand_in(self.train_x)
        leaves = [*leaves_of(self.covar_module, self.mean_module), (self.inducing_points, self.inducing_points), inputs]
        return chunked_bound(
            self.projector(), inputs[1], self.train_y, self.train_noise, self.bound_name, self.chunk_size, leaves
        )

    @torch.no_grad()
    def posterior(self, precision: torch.dtype | None = None) -> tuple[Projector, Whitened]:
        """The projector and the optimal q(w); gathered from the data once for each state of the model.

        :param precision: Of kernel and projection; default one that suffices.
        """
        if precision in self._known:
            state, projector, q = self._known[precision]
            if state.is_current(self):
                return projector, q
        projector = self.projector(precision)
        projector.settle(self.train_x[rows] for rows in chunks(len(self.train_y), 65536))
        weights = self.train_noise.reciprocal()
        x = Rows(self.train_x, self.train_x, is_input=True)
        batches = projected_batches(projector, x, self.train_y, weights, self.chunk_size)
        core = data_sums(batches).collapse()
        q = Whitened(core.weights, core.root)
        self._known[precision] = ModuleState(self), projector, q
        return projector, q

    @torch.no_grad()
    def predict(self, x: Tensor | np.ndarray) -> MultivariateNormal:
        """The latent predictive distribution, in diagonal form; needs no pass over the data the second time."""
        rows_of_x = input_rows(x, self.inducing_points)
        check_dims(rows_of_x.shape, self.train_x.size(-1))
        projector, q = self.posterior()
        means, variances = (self.inducing_points.new_empty(rows_of_x.shape[:-1]) for _ in range(2))
        for rows in chunks(len(rows_of_x), self.chunk_size):
            chunk = rows_of_x[rows]
            raise_if_not_finite(chunk)
            points = projector(chunk)
            narrow = q.to(points.matrix.dtype)
            means[..., rows] = points.mean + projected_mean(points.matrix, narrow)
            variances[..., rows] = explained_variance(points.matrix, narrow) + points.residual
        return MultivariateNormal(means, DiagLinearOperator(variances))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}
