"""Collapsed tighter SGPR inside ExactGP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.mlls import AddedLossTerm
from linear_operator import LinearOperator
from linear_operator.operators import (
    DiagLinearOperator,
    MatmulLinearOperator,
)
from torch import Tensor

from ..blocks import Blocks
from ..bounds import block_penalty, log_penalty, spherical_penalty
from ..conditionals import ResidualBlocks
from ..likelihoods.properties import is_gaussian
from ..linalg import project
from .precision import Covariances, inducing_cholesky, sufficient_precision, unlowered_covariances
from .sgpr_prediction import CurrentPredictionStrategy, explained_covariance

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
        noise_in_blocks = noise[..., self.blocks.rows.clamp_min(0)].to(self.blocks.covariance.dtype)
        return -block_penalty(self.blocks.covariance, noise_in_blocks).to(noise.dtype)


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
    predict the same. Predictions in eval mode follow every change of the model at once. Where float32 does not know the
    residual variances to within the noise, they are computed in float64.

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

    def prior(self, precision: torch.dtype) -> Covariances:
        """The base kernel as functions, evaluated in some precision."""
        return unlowered_covariances(self.base_kernel, precision)

    def inducing_cholesky(self) -> Tensor:
        r""":math:`L = \mathrm{chol}(K_{ZZ} + \epsilon I)` in float64, with a jitter of the kernel's scale where one is needed."""
        return inducing_cholesky(self.prior(torch.float64), self.inducing_points, self.jitter_val)

    def _projection(self, x: Tensor) -> Tensor:
        """Transpose of A, ``... x N x M``, in a precision that suffices for the bound."""
        chol = self.inducing_cholesky()
        noise = 0.0 if self.bound in ("block", "full") else getattr(self.likelihood, "noise", 0.0)
        precision = sufficient_precision(chol, noise, x.dtype)
        return project(chol, self.prior(precision).covariance(self.inducing_points, x)).mT

    def _residual(self, x: Tensor, root: Tensor) -> Tensor:
        """:math:`d_n` in the dtype of the inputs."""
        variance = self.prior(root.dtype).variance(x)
        return (variance - root.square().sum(-1)).clamp_min(0.0).to(x.dtype)

    def _get_covariance(self, x1: Tensor, x2: Tensor) -> LinearOperator:
        """As GPyTorch's, which evaluates in the precision of the inputs and keeps the factor in eval mode."""
        root = self._projection(x1)
        if not torch.equal(x1, x2):
            return MatmulLinearOperator(root.to(x1.dtype), self._projection(x2).mT.to(x2.dtype))
        covar = explained_covariance(root, x1.dtype)
        if self.training or settings.sgpr_diagonal_correction.off():
            return covar
        return covar + DiagLinearOperator(self._residual(x1, root))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **kwargs: Any) -> LinearOperator | Tensor:
        if not self.training or self.bound == "titsias":
            return super().forward(x1, x2, diag=diag, **kwargs)
        if not torch.equal(x1, x2):
            raise RuntimeError("In training the kernel is for the covariance of the training inputs with themselves.")
        root = self._projection(x1)
        self.update_added_loss_term("inducing_point_loss_term", self._penalty_term(x1, root))
        covar = explained_covariance(root, x1.dtype)
        return covar.diagonal(dim1=-1, dim2=-2) if diag else covar

    def _penalty_term(self, x: Tensor, root: Tensor) -> AddedLossTerm:
        residual = self._residual(x, root)
        if self.bound in _PENALTIES:
            return CollapsedAddedLossTerm(residual, self.likelihood, _PENALTIES[self.bound])
        # The full bound is that of a single block.
        one = torch.zeros(residual.size(-1), dtype=torch.long, device=x.device)
        blocks = Blocks(one) if self.bound == "full" else self.blocks
        if blocks is None:
            raise ValueError("bound='block' needs the labels of the training points: build the kernel with blocks=.")

        def covariance(rows: Tensor) -> Tensor:
            # Blocks go in front of the kernel's own batch.
            points = x.expand(*root.shape[:-2], *x.shape[-2:])[..., rows, :].movedim(-3, 0)
            roots = root[..., rows, :]
            return self.prior(root.dtype).covariance(points, points).movedim(0, -3) - roots @ roots.mT

        return BlockAddedLossTerm(blocks.residual_blocks(residual, covariance), residual.shape, self.likelihood)

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Likelihood
    ) -> CurrentPredictionStrategy:
        """What ExactGP predicts with."""
        return CurrentPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood)

    def __deepcopy__(self, memo: dict[int, Any]) -> TighterInducingPointKernel:
        """As of any module; GPyTorch's would share the likelihood."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        # The terms of the last step have a graph, which cannot be copied.
        state = {**self.__dict__, "_added_loss_terms": dict.fromkeys(self._added_loss_terms)}
        copied.__dict__.update(copy.deepcopy(state, memo))
        return copied
