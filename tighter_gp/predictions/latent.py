r"""Predictions, with the last term of the predictive variance dropped, exact or approximated.

At a test point the tighter family has the variance

.. math:: v_* = d_* + s_* - r^\top V r, \qquad r = D_{f*}, \quad V = D^{-1/2}(I - M)D^{-1/2}

where :math:`D` is the residual covariance of the training points. Standard predictions drop the last term.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..checks import check_device, check_inputs, raise_if_not_finite
from ..likelihoods.properties import gaussian_noise
from ..maths.bounds import optimal_scale
from ..maths.linalg import cholesky, full_precision, solve_lower
from ..modes import chunks, temporary_mode
from ..posterior import Posterior, posterior_of, require_gaussian
from ..prior import Projection, Projector

LAST_TERMS = ("drop", "exact", "optimal", "subset", "diagonal")

# Eigenvalues of D below this fraction of the largest are taken as zero; r has nothing in their directions.
_EIGENVALUE_CUT = 1e-12


class _Training(NamedTuple):
    """The training points as the last term needs them, in float64; ``noise`` is None for a learned conditional."""

    x: Tensor
    projection: Tensor
    residual: Tensor
    scale: Tensor
    noise: Tensor | None


@torch.no_grad()
def predict(
    model: Any,
    x: Tensor,
    last_term: str = "drop",
    *,
    likelihood: Likelihood | None = None,
    train_x: Tensor | None = None,
    noise: Tensor | None = None,
    subset: int | Tensor = 16,
    batch_size: int = 1024,
) -> MultivariateNormal:
    r"""The latent predictive distribution at test points, in diagonal form, a chunk of points at a time.

    ==============  =====================================================  ================================
    ``last_term``   :math:`V`                                              cost beyond ``"drop"``
    ==============  =====================================================  ================================
    ``"drop"``      0: SVGP's formula
    ``"exact"``     :math:`D^{-1/2}(I-M)D^{-1/2}`                          :math:`O(N^3)` once
    ``"optimal"``   :math:`(D + \Sigma)^{-1}`, Gaussian noise              :math:`O(N^3)` once
    ``"subset"``    the exact one of a few training points                 :math:`O(NM)` per test point
    ``"diagonal"``  :math:`\mathrm{diag}((1 - m_n)/d_n)`, clamped          :math:`O(NM)` per test point
    ==============  =====================================================  ================================

    For an uncollapsed model ``"drop"`` is what ``model(x)`` predicts. For a collapsed one it is SGPR's own formula, where
    GPyTorch's eval mode corrects the diagonal of the training covariance, as FITC does, and so predicts otherwise.
    ``"diagonal"`` counts correlated training points again and again, can turn negative and is then clamped with a
    warning; prefer ``"subset"``. All but ``"drop"`` are computed in float64.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package, or an
        :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`.
    :param x: Test inputs, ``N x D``.
    :param last_term: See the table.
    :param likelihood: The likelihood, for the scales :math:`m_n` of ``conditional="optimal"``; a collapsed model has it.
    :param train_x: Training inputs; a collapsed model has them.
    :param noise: Noise variances of the training points for
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`, if not stored there.
    :param subset: For ``"subset"``: how many training points for each test point, those most correlated with it given
        the inducing variables; or the positions of the training points to use for all.
    :param batch_size: Test points per chunk.
    :return: A :class:`~gpytorch.distributions.MultivariateNormal` with diagonal covariance; ``likelihood(...)`` of it
        adds the noise.

    Example:
        >>> q = tighter_gp.predict(model, test_x, "subset", likelihood=likelihood, train_x=train_x)
        >>> q.mean.shape == test_x.shape[:-1]
        True
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor of test inputs, got {type(x).__name__}: call predict(model, x), with a likelihood, where "
            "one is needed, as likelihood=."
        )
    if last_term not in LAST_TERMS:
        raise ValueError(f"Unknown last_term {last_term!r}; choose {', '.join(map(repr, LAST_TERMS))}.")
    if x.dim() == 1:
        x = x.unsqueeze(-1)
    means = variances = x.new_empty(0)
    clamped = 0
    with temporary_mode(model, False), full_precision(x.device.type):
        posterior = posterior_of(model, None if last_term == "drop" else torch.float64)
        check_inputs(x, posterior.num_dims)
        training = None
        if last_term != "drop":
            training = _training_points(posterior, likelihood, train_x, noise)
            reduce = _Reducer(posterior.projector, training, last_term, subset)
        for rows in chunks(x.size(-2), batch_size):
            raise_if_not_finite(x[..., rows, :])
            points = posterior.projector(x[..., rows, :])
            mean, variance = posterior.moments(points)
            if training is not None:
                residual = points.residual - reduce(x[..., rows, :], points)
                clamped += int((residual < 0).sum()) if last_term == "diagonal" else 0
                variance = variance - (points.residual - residual.clamp_min(0.0))
            if rows.start == 0:
                # Made at once: results kept chunk by chunk would lie between the large arrays and fragment the memory.
                means, variances = (x.new_empty(*moment.shape[:-1], x.size(-2)) for moment in (mean, variance))
            means[..., rows], variances[..., rows] = mean, variance
    if clamped:
        warnings.warn(
            f"last_term='diagonal' made the residual variance negative at {clamped} of {variances.numel()} test points; it was "
            "clamped to zero there. Use last_term='subset'.",
            UserWarning,
            stacklevel=2,
        )
    return MultivariateNormal(means, DiagLinearOperator(variances))


def _training_points(
    posterior: Posterior, likelihood: Likelihood | None, train_x: Tensor | None, noise: Tensor | None
) -> _Training:
    variances: Tensor | None = None
    if posterior.training is not None:
        if posterior.training.bound not in ("titsias", "tighter"):
            raise ValueError(
                f"The last term is known for one scale per point; this model has bound={posterior.training.bound!r}. Use "
                "last_term='drop' or 'optimal'."
            )
        train_x, variances = posterior.training.x, posterior.training.noise
        points = posterior.projector(train_x)
    else:
        assert posterior.strategy is not None
        conditional = posterior.strategy.conditional
        if conditional.needs_blocks:
            raise ValueError("The last term is known for one scale per point, not for Blocks. Use last_term='drop'.")
        if train_x is None:
            raise ValueError("This last_term needs the training inputs: pass train_x=.")
        train_x = train_x.unsqueeze(-1) if train_x.dim() == 1 else train_x
        points = posterior.projector(train_x)
        if not conditional.is_learned:
            if likelihood is None:
                raise ValueError("conditional='optimal' takes its scales from the noise: pass likelihood=.")
            require_gaussian(likelihood, "predict with conditional='optimal'")
            kwargs = {} if noise is None else {"noise": noise}
            check_device(likelihood, points.mean.device, "The likelihood is")
            variances = gaussian_noise(likelihood, points.mean.shape[:-1], points.mean.shape[-1:], **kwargs)
            check_device(variances, points.mean.device, "Noise variances are")
    residual = points.residual
    if variances is not None:
        variances = variances.to(residual.dtype).expand_as(residual)
        scale = optimal_scale(residual, variances.reciprocal())
    else:
        rows = torch.arange(train_x.size(-2), device=train_x.device)
        scale = conditional.scale(residual, index=rows).to(residual.dtype)
    return _Training(train_x, points.matrix, residual, scale, variances)


class _Reducer:
    """Computes :math:`r^\\top V r` for a chunk of test points."""

    def __init__(self, projector: Projector, training: _Training, last_term: str, subset: int | Tensor) -> None:
        self.projector = projector
        self.local = 0
        if last_term == "subset":
            num_data = training.x.size(-2)
            if isinstance(subset, int):
                if subset < 1:
                    raise ValueError(f"subset must be at least 1; got {subset}.")
                self.local = min(subset, num_data)
            else:
                training = _Training(
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
        training = self.training
        cross = self.projector.residual_covariance(training.x, x, training.projection, points.matrix)
        if self.last_term == "optimal":
            return solve_lower(self.factor, cross).square().sum(-2)
        if self.last_term == "diagonal":
            weight = (1 - training.scale) / training.residual.clamp_min(torch.finfo(torch.float64).tiny)
            return (weight.unsqueeze(-1) * cross.square()).sum(-2)
        if self.local:
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
