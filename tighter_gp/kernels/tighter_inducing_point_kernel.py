"""Collapsed tighter SGPR inside ExactGP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.mlls import AddedLossTerm
from linear_operator import LinearOperator
from torch import Tensor

from .._checks import same_values
from ..blocks import Blocks
from ..bounds import block_penalty, log_penalty, spherical_penalty
from ..conditionals import ResidualBlocks
from ..likelihoods.properties import is_gaussian
from ..linalg import cholesky

BOUNDS = ("titsias", "spherical", "tighter", "block", "full")
_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"spherical": spherical_penalty, "tighter": log_penalty}


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


class BlockAddedLossTerm(AddedLossTerm):
    r"""What the residual covariance within blocks costs; see :func:`~tighter_gp.bounds.block_penalty`.

    :param blocks: :math:`D_{bb}` and the points of each block.
    :param shape: Shape of the targets.
    :param likelihood: Brings the noise.
    """

    def __init__(self, blocks: ResidualBlocks, shape: torch.Size, likelihood: Likelihood) -> None:
        self.blocks = blocks
        self.shape = shape
        self.likelihood = likelihood

    def loss(self, *params: Any) -> Tensor:
        noise = self.likelihood._shaped_noise_covar(self.shape, *params).diagonal(dim1=-1, dim2=-2)
        return -block_penalty(self.blocks.covariance, noise[..., self.blocks.rows.clamp_min(0)])


class TighterInducingPointKernel(InducingPointKernel):
    r"""
    Drop-in for :class:`~gpytorch.kernels.InducingPointKernel` that trains the tighter collapsed bound (T-SGPR).

    Inside an :class:`~gpytorch.models.ExactGP` with
    :class:`~gpytorch.mlls.ExactMarginalLogLikelihood` the objective is, per datum,

    .. math:: \log \mathcal N(y; \mu, Q + \sigma^2 I) - \tfrac12 \sum_n \log(1 + d_n/\sigma_n^2)

    for ``bound="tighter"``. In increasing order of the bound, the residual costs

    ===============  ==================================================  ===================
    ``"titsias"``    :math:`\tfrac12 \sum_n d_n/\sigma_n^2`              GPyTorch's own
    ``"spherical"``  :math:`\tfrac N2 \log(1 + \sum_n d_n / N\sigma^2)`
    ``"tighter"``    :math:`\tfrac12 \sum_n \log(1 + d_n/\sigma_n^2)`
    ``"block"``      :math:`\tfrac12 \sum_b \log|I + D_{bb}/\sigma^2|`   :math:`O(S^2(M+S))` a block of :math:`S` points
    ``"full"``       :math:`\tfrac12 \log|I + D/\sigma^2|`               :math:`O(N^3)`
    ===============  ==================================================  ===================

    All are strict bounds on the evidence of the full data; there are no mini-batches. At the same hyperparameters all
    predict the same.

    :param base_kernel: The kernel to approximate.
    :param inducing_points: :math:`Z`, shape ``M x D``; a parameter.
    :param likelihood: The model's Gaussian likelihood.
    :param active_dims: Input dimensions to use.
    :param bound: One of the table above.
    :param blocks: For ``"block"``: the block of each training point, integers of shape ``N``; see
        :func:`~tighter_gp.blocks.partition`.
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
        blocks: Tensor | None = None,
        jitter_val: float = 0.0,
    ) -> None:
        if bound not in BOUNDS:
            raise ValueError(f"Unknown bound {bound!r}; choose {', '.join(map(repr, BOUNDS))}.")
        if (bound == "block") != (blocks is not None):
            came = "none" if blocks is None else f"them with bound={bound!r}"
            raise ValueError(
                f"blocks= and bound='block' belong together: the labels of the training points; got {came}."
            )
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
        self.blocks = None if blocks is None else Blocks(blocks)
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

    @property
    def _inducing_inv_root(self) -> Tensor:
        cached = None if self.training else getattr(self, "_cached_kernel_inv_root", None)
        if cached is not None:
            return cached
        # A jitter of the scale of the kernel where one is needed; GPyTorch's is absolute.
        chol = cholesky(self._inducing_mat, name="K_ZZ")
        identity = torch.eye(chol.size(-1), dtype=chol.dtype, device=chol.device)
        # From the left, as GPyTorch solves: the standard bound is then its own to the last bit.
        root = torch.linalg.solve_triangular(chol.mT, identity, upper=True)
        if not self.training:
            self._cached_kernel_inv_root = root
        return root

    def _forget_if_changed(self) -> None:
        """In eval mode: nothing is computed from hyperparameters that are no longer there, nor silently."""
        current = [*self.base_kernel.parameters(), self.inducing_points, *self.likelihood.parameters()]
        known = getattr(self, "_cached_for", None)
        if known is not None and hasattr(self, "_cached_kernel_mat") and not all(map(same_values, known, current)):
            self._clear_cache()
            warnings.warn(
                "Hyperparameters were changed in eval mode, and GPyTorch's ExactGP keeps what it computed for the old "
                "ones: call model.train() and model.eval(), or predict with tighter_gp.predict(model, x).",
                RuntimeWarning,
                stacklevel=2,
            )
        self._cached_for = [value.detach().clone() for value in current]

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **kwargs: Any) -> LinearOperator | Tensor:
        if not self.training:
            self._forget_if_changed()
        covar = super().forward(x1, x2, diag=False, **kwargs)
        if self.training and self.bound != "titsias":
            self.update_added_loss_term("inducing_point_loss_term", self._penalty_term(x1, covar))
        return covar.diagonal(dim1=-1, dim2=-2) if diag else covar

    def _penalty_term(self, x: Tensor, covar: LinearOperator) -> AddedLossTerm:
        explained = covar.diagonal(dim1=-1, dim2=-2)
        residual = (self.base_kernel(x, diag=True) - explained).clamp_min(0.0)
        if self.bound in _PENALTIES:
            return CollapsedAddedLossTerm(residual, self.likelihood, _PENALTIES[self.bound])
        # The full bound is that of a single block.
        one = torch.zeros(residual.size(-1), dtype=torch.long, device=x.device)
        blocks = Blocks(one) if self.bound == "full" else self.blocks
        if blocks is None:
            raise ValueError("bound='block' needs the labels of the training points: build the kernel with blocks=.")
        root = covar.root.to_dense()  # transpose of A, ... x N x M

        def covariance(rows: Tensor) -> Tensor:
            # Blocks go in front of the kernel's own batch.
            points = x.expand(*root.shape[:-2], *x.shape[-2:])[..., rows, :].movedim(-3, 0)
            roots = root[..., rows, :]
            return self.base_kernel(points).to_dense().movedim(0, -3) - roots @ roots.mT

        return BlockAddedLossTerm(blocks.residual_blocks(residual, covariance), residual.shape, self.likelihood)

    def __deepcopy__(self, memo: dict[int, Any]) -> TighterInducingPointKernel:
        copied = self.__class__(
            copy.deepcopy(self.base_kernel, memo),
            self.inducing_points.detach().clone(),
            copy.deepcopy(self.likelihood, memo),
            self.active_dims,
            bound=self.bound,
            blocks=None if self.blocks is None else self.blocks.labels.clone(),
            jitter_val=self.jitter_val,
        )
        memo[id(self)] = copied
        copied.inducing_points.requires_grad_(self.inducing_points.requires_grad)
        copied.train(self.training)
        return copied
