"""Collapsed tighter SGPR inside ExactGP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.mlls import AddedLossTerm
from linear_operator import LinearOperator
from torch import Tensor

from ..bounds import log_penalty, spherical_penalty
from ..likelihoods.properties import is_gaussian

_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "titsias": None,  # GPyTorch's own added loss term
    "spherical": spherical_penalty,
    "tighter": log_penalty,
}


class CollapsedAddedLossTerm(AddedLossTerm):
    r"""What the residual variance costs in a collapsed bound; GPyTorch adds it to the exact log density of q.

    :param residual: :math:`d_n`, shape ``... x N``.
    :param likelihood: Brings the noise.
    :param penalty: One of the penalties of :mod:`tighter_gp.bounds`.
    """

    def __init__(self, residual: Tensor, likelihood: Likelihood, penalty: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.residual = residual
        self.likelihood = likelihood
        self.penalty = penalty

    def loss(self, *params: Any) -> Tensor:
        noise = self.likelihood._shaped_noise_covar(self.residual.shape, *params).diagonal(dim1=-1, dim2=-2)
        return -self.penalty(self.residual, noise)


class TighterInducingPointKernel(InducingPointKernel):
    r"""
    Drop-in for :class:`~gpytorch.kernels.InducingPointKernel` that trains the tighter collapsed bound (T-SGPR).

    Inside an :class:`~gpytorch.models.ExactGP` with
    :class:`~gpytorch.mlls.ExactMarginalLogLikelihood` the objective is, per datum,

    .. math:: \log \mathcal N(y; \mu, Q + \sigma^2 I) - \tfrac12 \sum_n \log(1 + d_n/\sigma_n^2)

    for ``bound="tighter"``; ``"spherical"`` pays :math:`\tfrac N2 \log(1 + \sum_n d_n / N\sigma^2)`, and ``"titsias"``
    GPyTorch's :math:`\tfrac12 \sum_n d_n/\sigma_n^2`. All are strict bounds on the evidence of the full data; there are
    no mini-batches. At the same hyperparameters the three predict the same.

    :param base_kernel: The kernel to approximate.
    :param inducing_points: :math:`Z`, shape ``M x D``; a parameter.
    :param likelihood: The model's Gaussian likelihood.
    :param active_dims: Input dimensions to use.
    :param bound: ``"tighter"``, ``"spherical"`` or ``"titsias"``.
    :param jitter_val: Added to :math:`K_{ZZ}`, once; default 0 as in GPyTorch.

    Example:
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> kernel = tighter_gp.TighterInducingPointKernel(base, torch.rand(5, 2), likelihood)
        >>> kernel(torch.rand(7, 2)).shape
        torch.Size([7, 7])
    """

    def __init__(
        self,
        base_kernel: Kernel,
        inducing_points: Tensor,
        likelihood: Likelihood,
        active_dims: tuple[int, ...] | None = None,
        *,
        bound: str = "tighter",
        jitter_val: float = 0.0,
    ) -> None:
        if bound not in _PENALTIES:
            raise ValueError(f"Unknown bound {bound!r}; choose {', '.join(map(repr, _PENALTIES))}.")
        if not is_gaussian(likelihood):
            raise TypeError(f"A collapsed bound needs a Gaussian likelihood; got {type(likelihood).__name__}.")
        if bound != "titsias" and isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
            raise TypeError(
                f"bound={bound!r} is for a single output; use bound='titsias' with {type(likelihood).__name__}."
            )
        if jitter_val < 0:
            raise ValueError(f"jitter_val must not be negative; got {jitter_val}.")
        super().__init__(base_kernel, inducing_points, likelihood, active_dims)
        self.bound = bound
        self.jitter_val = jitter_val

    @property
    def _inducing_mat(self) -> Tensor:
        cached = None if self.training else getattr(self, "_cached_kernel_mat", None)
        if cached is not None:
            return cached
        matrix = self.base_kernel(self.inducing_points).add_jitter(self.jitter_val).to_dense()
        if not self.training:
            self._cached_kernel_mat = matrix
        return matrix

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **kwargs: Any) -> LinearOperator | Tensor:
        covar = super().forward(x1, x2, diag=False, **kwargs)
        penalty = _PENALTIES[self.bound]
        if self.training and penalty is not None:
            explained = covar.diagonal(dim1=-1, dim2=-2)
            residual = (self.base_kernel(x1, diag=True) - explained).clamp_min(0.0)
            term = CollapsedAddedLossTerm(residual, self.likelihood, penalty)
            self.update_added_loss_term("inducing_point_loss_term", term)
        return covar.diagonal(dim1=-1, dim2=-2) if diag else covar

    def __deepcopy__(self, memo: dict[int, Any]) -> TighterInducingPointKernel:
        copied = self.__class__(
            copy.deepcopy(self.base_kernel, memo),
            self.inducing_points.detach().clone(),
            copy.deepcopy(self.likelihood, memo),
            self.active_dims,
            bound=self.bound,
            jitter_val=self.jitter_val,
        )
        memo[id(self)] = copied
        copied.inducing_points.requires_grad_(self.inducing_points.requires_grad)
        copied.train(self.training)
        return copied
