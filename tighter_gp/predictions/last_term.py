r"""The last term of the predictive variance, exact or approximated.

At a test point the tighter family has the variance

.. math:: v_* = d_* + s_* - r^\top V r, \qquad r = D_{f*}, \quad V = D^{-1/2}(I - M)D^{-1/2}

where :math:`D` is the residual covariance of the training points. Standard predictions drop the last term.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from ..likelihoods.family import gaussian_noise
from ..maths.bounds import optimal_scale
from ..maths.linalg import cholesky, solve_lower
from ..posterior import Posterior, TrainingData, require_gaussian
from .points import Marginals

LAST_TERMS = ("exact", "optimal", "subset")

# Eigenvalues of D below this fraction of the largest are taken as zero; r has nothing in their directions.
_EIGENVALUE_CUT = 1e-12


class LastTerm:
    r"""q(f) at a chunk of test points, with the last term, in float64.

    :param posterior: Of the model, in float64.
    :param last_term: Which one.
    :param likelihood: For the scales of ``conditional="optimal"``.
    :param x: Training inputs; a collapsed model has them.
    :param noise: Noise variances of the training points, if the likelihood does not have them.
    :param subset: For ``"subset"``: how many training points per test point, or the positions of those for all.
    """

    def __init__(
        self,
        posterior: Posterior,
        last_term: str,
        likelihood: Likelihood | None,
        x: Any,
        noise: Any,
        subset: int | Tensor,
    ) -> None:
        training, self.name = posterior.training, last_term
        if training is not None:
            x, noise, rows = training.x, training.noise, _with_target(training)
        elif x is None:
            raise ValueError("This last_term needs the training inputs: pass train_x=.")
        else:
            rows = torch.arange(x.size(-2), device=x.device)
        if isinstance(subset, int):
            self.nearest = min(subset, len(rows))
        elif last_term == "subset":  # of those that have a target, the same for all test points
            rows = subset[torch.isin(subset % x.size(-2), rows)] % x.size(-2)
            self.name = "exact"
        self.posterior = posterior = posterior.factorized(x)
        self.x = x[..., rows, :]
        points = posterior.prior(self.x)
        self.matrix, self.residual = points.matrix, points.residual  # A: [..., M, N], d: [..., N]
        if training is not None:
            noise = noise[..., rows].to(self.residual)
            self.scale = _collapsed_scale(training.bound, last_term, self.residual, noise)
        else:
            given = {} if noise is None else {"noise": noise}
            noise, self.scale = _scales(posterior.strategy, likelihood, given, x.size(-2), rows, self.residual)
        if noise is None and last_term == "optimal":
            raise ValueError("last_term='optimal' is for Gaussian noise; use 'exact' or 'subset'.")
        self.stddev = torch.ones_like(self.residual) if noise is None else noise.expand_as(self.residual).sqrt()
        if self.name == "subset":
            return
        covariance = posterior.prior.residual_covariance(self.x, self.x, self.matrix, self.matrix)  # D: [..., N, N]
        if self.name == "optimal":
            # chol(D + Sigma): [..., N, N]
            self.factor = cholesky(covariance + torch.diag_embed(self.stddev.square()), name="D + noise")
        else:
            self.root = _inverse_root(covariance, self.stddev)

    def __call__(self, x: Tensor) -> Marginals:
        """q(f) at test points ``B x D``."""
        points = self.posterior.prior(x)
        cross = self.posterior.prior.residual_covariance(self.x, x, self.matrix, points.matrix)  # r: [..., N, B]
        if self.name == "optimal":
            reduction = solve_lower(self.factor, cross).square().sum(-2)
        elif self.name == "subset":
            reduction = self._of_nearest(cross)
        else:
            reduction = _quadratic(self.root, cross, self.scale, self.stddev)
        mean, variance = self.posterior.moments(points)
        return Marginals(mean, variance - torch.minimum(reduction, points.residual))

    def _of_nearest(self, cross: Tensor) -> Tensor:
        """The exact term of the training points most correlated with each test point, given the inducing variables."""
        correlation = cross.square() / self.residual.clamp_min(1e-300).unsqueeze(-1)
        nearest = correlation.topk(self.nearest, dim=-2).indices  # [..., b, B]
        nearest = nearest.movedim(-1, 0)  # [B, ..., b]: test points first, so that kernel batches still broadcast

        def gather(values: Tensor) -> Tensor:
            """From ``... x N x F`` to ``B x ... x b x F``."""
            values = values.expand(*nearest.shape[:-1], *values.shape[-2:])
            return values.gather(-2, nearest.unsqueeze(-1).expand(*nearest.shape, values.size(-1)))

        x, matrix = gather(self.x), gather(self.matrix.mT).mT  # [B, ..., b, D] and [B, ..., M, b]
        stddev, scale = (gather(values.unsqueeze(-1)).squeeze(-1) for values in (self.stddev, self.scale))
        root = _inverse_root(self.posterior.prior.residual_covariance(x, x, matrix, matrix), stddev)
        own = gather(cross.movedim(-1, 0).unsqueeze(-1))  # [B, ..., b, 1]
        return _quadratic(root, own, scale, stddev).squeeze(-1).movedim(0, -1)


def _with_target(training: TrainingData) -> Tensor:
    """Positions of the training points that have a target, in every model of a batch."""
    if training.observed is None:
        return torch.arange(training.x.size(-2), device=training.x.device)
    seen = training.observed.reshape(-1, training.observed.size(-1))
    if not torch.equal(seen, seen[:1].expand_as(seen)):
        raise ValueError(
            "The last term needs targets for the same rows in every model of the batch. Use last_term='drop', or one model "
            "at a time."
        )
    return seen[0].nonzero().squeeze(-1)


def _collapsed_scale(bound: str, last_term: str, residual: Tensor, noise: Tensor) -> Tensor:
    """The scales :math:`m_n` of a collapsed model."""
    if bound not in ("titsias", "tighter") and last_term != "optimal":
        raise ValueError(
            f"The last term is known for one scale per point; this model has bound={bound!r}. Use 'drop' or 'optimal'."
        )
    return torch.ones_like(residual) if bound == "titsias" else optimal_scale(residual, noise.reciprocal())


def _scales(
    strategy: Any, likelihood: Any, given: dict[str, Tensor], num_data: int, rows: Tensor, residual: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Noise variances of the training points, or None, and the scales :math:`m_n` of a strategy."""
    conditional, batch = strategy.conditional, residual.shape[:-1]
    if conditional.is_gaussian_only:
        raise ValueError("The last term is known for one scale per point, not for Blocks. Use last_term='drop'.")
    if conditional.is_learned:
        return None, conditional.scale(residual, index=rows).to(residual)
    if likelihood is None:
        raise ValueError("conditional='optimal' takes its scales from the noise: pass likelihood=.")
    require_gaussian(likelihood, "predict with conditional='optimal'")
    noise = gaussian_noise(likelihood, batch, torch.Size([num_data]), **given)
    noise = noise.to(residual).expand(*batch, num_data)[..., rows]  # [..., N]
    return noise, optimal_scale(residual, noise.reciprocal())


def _inverse_root(covariance: Tensor, stddev: Tensor) -> Tensor:
    r"""Symmetric :math:`\tilde D^{-1/2}` on the range of :math:`\tilde D = \Sigma^{-1/2} D \Sigma^{-1/2}`."""
    values, vectors = torch.linalg.eigh(covariance / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2)))
    keep = values > _EIGENVALUE_CUT * values[..., -1:].clamp_min(0.0)
    inverse = torch.where(keep, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
    return (vectors * inverse.unsqueeze(-2)) @ vectors.mT


def _quadratic(root: Tensor, cross: Tensor, scale: Tensor, stddev: Tensor) -> Tensor:
    """:math:`r^\\top V r` for each column r of ``cross``."""
    return ((1 - scale).unsqueeze(-1) * (root @ (cross / stddev.unsqueeze(-1))).square()).sum(-2)
