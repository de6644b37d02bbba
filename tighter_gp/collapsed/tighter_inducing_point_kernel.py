"""Collapsed tighter SGPR inside ExactGP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.mlls import AddedLossTerm
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator, MatmulLinearOperator
from torch import Tensor

from ..conditionals import Blocks, block_table
from ..likelihoods.family import family
from ..maths.bounds import check_bound
from ..maths.linalg import full_precision
from ..prior import Prior, Projection
from .collapsed_gp import kernel_prior
from .prices import price
from .sgpr_prediction import CurrentPredictionStrategy, explained_covariance


class CollapsedAddedLossTerm(AddedLossTerm):
    r"""What the residual costs in a collapsed bound; GPyTorch adds it to the exact log density of q.

    :param shape: Shape of the targets.
    :param likelihood: Brings the noise.
    :param price: From noise variances, ``... x N``, to the price.
    """

    def __init__(self, shape: torch.Size, likelihood: Likelihood, price: Callable[[Tensor], Tensor]) -> None:
        self.shape, self.likelihood, self.price = shape, likelihood, price

    def loss(self, *params: Any) -> Tensor:
        _refuse_missing()
        noise = self.likelihood._shaped_noise_covar(self.shape, *params).diagonal(dim1=-1, dim2=-2)
        with full_precision(noise.device.type):
            return -self.price(noise).to(noise.dtype)


def _refuse_missing() -> None:
    """The price of a residual is not paid for a missing target, and an added loss term sees no targets."""
    policy = settings.observation_nan_policy.value()
    if policy != "ignore":
        raise NotImplementedError(
            f"TighterInducingPointKernel does not see which targets are missing under observation_nan_policy({policy!r}); "
            "drop the rows whose target is missing."
        )


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
    ``"block"``      :math:`\tfrac12 \sum_b \log|I + D_{bb}/\sigma^2|`   :math:`O(S^2(M+S))` per block of :math:`S` points
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
        check_bound(bound)
        if (bound == "block") != (blocks is not None):
            got = "without" if blocks is None else "with"
            raise ValueError(f"blocks= and bound='block' belong together; got bound={bound!r} {got} blocks=.")
        if not family(likelihood).is_gaussian:
            raise TypeError(f"A collapsed bound needs a Gaussian likelihood; got {type(likelihood).__name__}.")
        if bound != "titsias" and isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
            kind = type(likelihood).__name__
            raise TypeError(f"bound={bound!r} is for a single output; use bound='titsias' with {kind}.")
        if jitter_val < 0:
            raise ValueError(f"jitter_val must not be negative; got {jitter_val}.")
        # A copy: GPyTorch's parameter would share its memory, perhaps with the training inputs.
        super().__init__(base_kernel, inducing_points.detach().clone(), likelihood, active_dims)
        self.bound = bound
        labels = None if blocks is None else Blocks(blocks).labels
        self.register_buffer("labels", labels, persistent=False)
        self.register_buffer("_sets", None if labels is None else block_table(labels), persistent=False)
        self.jitter_val = jitter_val
        self._was_called = False

    def prior(self, noise: Tensor | None = None, dtype: torch.dtype | None = None) -> Prior:
        """What turns inputs, as this kernel sees them, into (prior mean, A, d).

        :param noise: Noise variances; default the likelihood's.
        :param dtype: Of kernel and projection; default one that suffices for the bound.
        """
        if noise is None:
            noise = torch.as_tensor(getattr(self.likelihood, "noise", 0.0))
        if self.bound in ("block", "full"):
            dtype = torch.float64  # their residual covariances are factorised
        return kernel_prior(self.base_kernel, self.inducing_points, noise.detach(), self.jitter_val, dtype=dtype)

    def sets_of(self, num_data: int, rows: Tensor | None = None) -> Tensor | None:
        """The points of each block, ``K x S``, of all data or of some rows; None without blocks."""
        if self.labels is None:
            return None
        if len(self.labels) != num_data:
            raise ValueError(f"blocks= has {len(self.labels)} labels, but there are {num_data} points.")
        return self._sets if rows is None else block_table(self.labels[rows])

    def _project(self, x: Tensor) -> Projection:
        with full_precision(x.device.type):
            return self.prior()(x)

    def _get_covariance(self, x1: Tensor, x2: Tensor) -> LinearOperator:
        """As GPyTorch's, which evaluates in the precision of the inputs and keeps the factor in eval mode."""
        points = self._project(x1)
        if not torch.equal(x1, x2):
            return MatmulLinearOperator(points.matrix.mT.to(x1.dtype), self._project(x2).matrix.to(x2.dtype))
        covar = explained_covariance(points.matrix.mT, x1.dtype)
        if self.training or settings.sgpr_diagonal_correction.off():
            return covar
        return covar + DiagLinearOperator(points.residual.to(x1.dtype))

    def __call__(self, x1: Tensor, x2: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if settings.lazily_evaluate_kernels.on():
            self._was_called = True  # by a model, not by another kernel
        return super().__call__(x1, x2, *args, **kwargs)

    def train(self, mode: bool = True) -> TighterInducingPointKernel:
        """As of any module; another kernel may have been put around this one since it was called."""
        self._was_called = False
        return super().train(mode)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **kwargs: Any) -> LinearOperator | Tensor:
        if self.training and not self._was_called:
            raise TypeError(
                "TighterInducingPointKernel is inside another kernel, or gpytorch.settings.lazily_evaluate_kernels is off. "
                "Put the other kernel inside, TighterInducingPointKernel(ScaleKernel(...), inducing_points, likelihood)."
            )
        if self.training and self.bound == "titsias":
            _refuse_missing()  # GPyTorch's own term would let every row pay
        if not self.training or self.bound == "titsias":
            return super().forward(x1, x2, diag=diag, **kwargs)
        if not torch.equal(x1, x2):
            raise RuntimeError("In training the kernel is for the covariance of the training inputs with themselves.")
        points = self._project(x1)  # A  [..., M, N] and d  [..., N]
        within = partial(self.prior().residual_within, points, x1)
        sets = self.sets_of(x1.size(-2))
        cost = lambda noise: price(self.bound, points.residual, noise, within, sets)
        term = CollapsedAddedLossTerm(points.residual.shape, self.likelihood, cost)
        self.update_added_loss_term("inducing_point_loss_term", term)
        covar = explained_covariance(points.matrix.mT, x1.dtype)
        return covar.diagonal(dim1=-1, dim2=-2) if diag else covar

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Likelihood
    ) -> CurrentPredictionStrategy:
        """What ExactGP predicts with."""
        return CurrentPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood)

    # Copied as any module; GPyTorch's copy would share the likelihood.
    __deepcopy__: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # The terms of the last step have a graph, which can be neither copied nor saved.
        return {**self.__dict__, "_added_loss_terms": dict.fromkeys(self._added_loss_terms)}
