r"""The last term of the predictive variance, exact or approximated.

At a test point the tighter family has the variance

.. math:: v_* = d_* + s_* - r^\top V r, \qquad r = D_{f*}, \quad V = D^{-1/2}(I - M)D^{-1/2}

where :math:`D` is the residual covariance of the training points. Standard predictions drop the last term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from ..likelihoods.properties import gaussian_noise
from ..maths.bounds import optimal_scale
from ..maths.linalg import cholesky, solve_lower
from ..posterior import Posterior, require_gaussian
from ..prior import Prior as Projector
from ..prior import Projection

LAST_TERMS = ("drop", "exact", "optimal", "subset", "diagonal")

# Eigenvalues of D below this fraction of the largest are taken as zero; r has nothing in their directions.
_EIGENVALUE_CUT = 1e-12


class TrainingPoints(NamedTuple):
    """The training points as the last term needs them, in float64.

    :param noise: None for a learned conditional.
    :param observed: Which of all training points these are, ``N``; None if all.
    """

    x: Tensor
    projection: Tensor
    residual: Tensor
    scale: Tensor
    noise: Tensor | None
    observed: Tensor | None = None


def training_points(
    posterior: Posterior, last_term: str, likelihood: Likelihood | None, train_x: Tensor | None, noise: Tensor | None
) -> TrainingPoints:
    """The training points of a model, its own or those passed; those without a target have nothing to say.

    :param posterior: Of the model, in float64.
    :param last_term: Which one.
    :param likelihood: For the scales of ``conditional="optimal"``.
    :param train_x: Training inputs; a collapsed model has them.
    :param noise: Noise variances of the training points, if the likelihood does not have them.
    """
    variances: Tensor | None = None
    seen: Tensor | None = None
    if posterior.training is not None:
        if posterior.training.bound not in ("titsias", "tighter") and last_term != "optimal":
            raise ValueError(
                f"The last term is known for one scale per point; this model has bound={posterior.training.bound!r}. Use "
                "last_term='drop' or 'optimal'."
            )
        train_x, variances = posterior.training.x, posterior.training.noise
        if posterior.training.observed is not None:
            seen = _of_every_member(posterior.training.observed)
            train_x, variances = train_x[..., seen, :], variances[..., seen]
        points = posterior.projector(train_x)
    else:
        assert posterior.strategy is not None
        conditional = posterior.strategy.conditional
        if conditional.is_gaussian_only:
            raise ValueError("The last term is known for one scale per point, not for Blocks. Use last_term='drop'.")
        if train_x is None:
            raise ValueError("This last_term needs the training inputs: pass train_x=.")
        points = posterior.projector(train_x)
        if not conditional.is_learned:
            if likelihood is None:
                raise ValueError("conditional='optimal' takes its scales from the noise: pass likelihood=.")
            require_gaussian(likelihood, "predict with conditional='optimal'")
            kwargs = {} if noise is None else {"noise": noise}
            variances = gaussian_noise(likelihood, points.mean.shape[:-1], points.mean.shape[-1:], **kwargs)
    residual = points.residual
    if variances is not None:
        variances = variances.to(residual.dtype).expand_as(residual)
        is_prior = posterior.training is not None and posterior.training.bound == "titsias"
        scale = torch.ones_like(residual) if is_prior else optimal_scale(residual, variances.reciprocal())
    else:
        rows = torch.arange(train_x.size(-2), device=train_x.device)
        scale = conditional.scale(residual, index=rows).to(residual.dtype)
    return TrainingPoints(train_x, points.matrix, residual, scale, variances, seen)


def _of_every_member(observed: Tensor) -> Tensor:
    """Which targets there are, ``N``, in every model of a batch."""
    first = observed.reshape(-1, observed.size(-1))[0]
    if not torch.equal(observed, first.expand_as(observed)):
        raise ValueError(
            "The last term needs targets for the same rows in every model of the batch. Use last_term='drop', or one model "
            "at a time."
        )
    return first


class LastTerm:
    r"""Computes :math:`r^\top V r` for a chunk of test points.

    :param projector: Of the model, in float64.
    :param training: The training points.
    :param last_term: Which one, other than ``"drop"``.
    :param subset: For ``"subset"``: how many training points per test point, or the positions of those for all.
    """

    def __init__(self, projector: Projector, training: TrainingPoints, last_term: str, subset: int | Tensor) -> None:
        self.projector = projector
        self.local = 0
        if last_term == "subset":
            num_data = training.x.size(-2)
            if isinstance(subset, int):
                if subset < 1:
                    raise ValueError(f"subset must be at least 1; got {subset}.")
                self.local = min(subset, num_data)
            else:
                if training.observed is not None:  # positions among all, as positions among those with a target
                    subset = torch.arange(len(training.observed), device=training.x.device)[subset]
                    subset = (training.observed.cumsum(0) - 1)[subset[training.observed[subset]]]
                training = TrainingPoints(
                    training.x[..., subset, :],
                    training.projection[..., subset],
                    training.residual[..., subset],
                    training.scale[..., subset],
                    None if training.noise is None else training.noise[..., subset],
                )
                last_term = "exact"
        self.training, self.last_term = training, last_term
        if self.last_term in ("exact", "optimal"):
            covariance = self.projector.residual_covariance(
                training.x, training.x, training.projection, training.projection
            )
            if self.last_term == "exact":
                self.root = _inverse_root(covariance, training.noise)
            else:
                if training.noise is None:
                    raise ValueError("last_term='optimal' is for Gaussian noise; use 'exact' or 'subset'.")
                self.factor = cholesky(covariance + torch.diag_embed(training.noise), name="D + noise")

    def __call__(self, x: Tensor, points: Projection) -> Tensor:
        """The term at test points ``B x D``, given their projection."""
        training = self.training
        cross = self.projector.residual_covariance(training.x, x, training.projection, points.matrix)
        if self.last_term == "optimal":
            return solve_lower(self.factor, cross).square().sum(-2)
        if self.last_term == "diagonal":
            weight = (1 - training.scale) / training.residual.clamp_min(torch.finfo(torch.float64).tiny)
            return (weight.unsqueeze(-1) * cross.square()).sum(-2)
        if self.last_term == "subset":
            return self._local(cross)
        return _quadratic(self.root, cross, training.scale, training.noise)

    def _local(self, cross: Tensor) -> Tensor:
        """The exact term of the training points most correlated with each test point, given the inducing variables."""
        training = self.training
        correlation = cross.square() / training.residual.clamp_min(1e-300).unsqueeze(-1)
        nearest = correlation.topk(self.local, dim=-2).indices  # ... x b x B
        nearest = nearest.movedim(-1, 0)  # B x ... x b: test points first, so that kernel batches still broadcast

        def gather(values: Tensor) -> Tensor:
            return values.expand(*nearest.shape[:-1], values.size(-1)).gather(-1, nearest)

        batch = nearest.shape[:-1]
        x = training.x.expand(*batch, *training.x.shape[-2:])
        x = x.gather(-2, nearest.unsqueeze(-1).expand(*nearest.shape, x.size(-1)))
        projection = training.projection.expand(*batch, *training.projection.shape[-2:])
        projection = projection.gather(-1, nearest.unsqueeze(-2).expand(*batch, projection.size(-2), self.local))
        covariance = self.projector.residual_covariance(x, x, projection, projection)
        noise = None if training.noise is None else gather(training.noise)
        own = gather(cross.movedim(-1, 0)).unsqueeze(-1)
        reduction = _quadratic(_inverse_root(covariance, noise), own, gather(training.scale), noise)
        return reduction.squeeze(-1).movedim(0, -1)


def _inverse_root(covariance: Tensor, noise: Tensor | None) -> Tensor:
    r"""Symmetric :math:`\tilde D^{-1/2}` on the range of :math:`\tilde D = \Sigma^{-1/2} D \Sigma^{-1/2}`."""
    if noise is not None:
        stddev = noise.sqrt()
        covariance = covariance / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2))
    values, vectors = torch.linalg.eigh(covariance)
    keep = values > _EIGENVALUE_CUT * values[..., -1:].clamp_min(0.0)
    inverse = torch.where(keep, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), torch.zeros_like(values))
    return (vectors * inverse.unsqueeze(-2)) @ vectors.mT


def _quadratic(root: Tensor, cross: Tensor, scale: Tensor, noise: Tensor | None) -> Tensor:
    if noise is not None:
        cross = cross / noise.sqrt().unsqueeze(-1)
    return ((1 - scale).unsqueeze(-1) * (root @ cross).square()).sum(-2)
