r"""Where the gap between a bound and the evidence lies: what a tighter conditional, blocks or more points would close.

With :math:`F_1 \le F_5 \le F_4 \le F_B \le F_8 \le \log p(y)`, the step :math:`F_4 - F_1` is what the tighter bound gains,
:math:`F_8 - F_4` the most that blocks can add, and :math:`\log p(y) - F_8` what only inducing points can close.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from .blocks import partition
from .checks import check_device
from .data import Rows, as_tensor, input_rows, reference
from .full_data import evaluate_bound, per_point
from .likelihoods.properties import gaussian_noise
from .maths.bounds import (
    exact_log_evidence,
    full_penalty,
    log_penalty,
    optimal_scale,
    spherical_penalty,
    trace_penalty,
)
from .maths.collapsed import collapse, collapsed_log_prob
from .maths.linalg import full_precision
from .modes import chunks, temporary_mode
from .posterior import Posterior, gathered, posterior_of, require_gaussian

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# Nats per point below which a difference between bounds is not worth acting on.
_NEGLIGIBLE = 0.01

# Error over standard deviation of the targets from which on a model has learnt the mean alone.
_MEAN_ONLY = 0.98

# Share of the prior variance from which on the inducing points say nothing of a point.
_UNEXPLAINED = 0.9


@dataclass(frozen=True)
class Diagnosis:
    r"""The bounds of one model side by side; ``print`` it for a table. Bounds are sums over the data.

    :ivar int num_data: :math:`N`.
    :ivar int num_inducing: :math:`M`.
    :ivar float noise: Mean noise variance.
    :ivar float mean_ratio: Mean of :math:`d_n / \sigma_n^2`.
    :ivar list ratio_quantiles: Its quantiles at 5, 25, 50, 75 and 95 per cent.
    :ivar list scale_quantiles: The same of the best scales, :math:`m_n = \sigma_n^2 / (\sigma_n^2 + d_n)`.
    :ivar list scale_histogram: Number of points with :math:`m_n` in each tenth of the unit interval.
    :ivar current: What :class:`~tighter_gp.TighterELBO` bounds with the current q(u); None for a collapsed model, whose
        q(u) is the best one.
    :ivar float jitter: What ``current`` pays for the jitter in the variances of q(f), :math:`\tfrac12 \sum_n j / \sigma_n^2`.
    :ivar float nystrom: Log density under the explained part of the prior; a bound is this less its price.
    :ivar float titsias: :math:`F_1`, SGPR, or SVGP at the best q(u).
    :ivar float spherical: :math:`F_5`, one scale for all points.
    :ivar float tighter: :math:`F_4`.
    :ivar block: :math:`F_B`, or None without blocks.
    :ivar full: :math:`F_8`, or None for many points.
    :ivar evidence: :math:`\log p(y)`, or None for many points.
    :ivar float upper: An upper bound on :math:`\log p(y)` at any :math:`N` (Titsias, 2014).
    :ivar float misfit: Root mean squared error on the training targets, over their standard deviation. Where the inducing
        points reach hardly more points than they are, that of the others: a target may be known by heart.

    Example:
        >>> diagnosis = tighter_gp.diagnose(model, likelihood, train_x, train_y)
        >>> diagnosis.num_data, diagnosis.num_inducing
        (40, 5)
        >>> print(diagnosis)  # doctest: +ELLIPSIS
        40 points, 5 inducing points, mean noise variance ...
    """

    num_data: int
    num_inducing: int
    noise: float
    mean_ratio: float
    ratio_quantiles: list[float]
    scale_quantiles: list[float]
    scale_histogram: list[int]
    current: float | None
    jitter: float
    nystrom: float
    titsias: float
    spherical: float
    tighter: float
    block: float | None
    full: float | None
    evidence: float | None
    upper: float
    misfit: float

    @property
    def advice(self) -> str:
        """In a line, whether the tighter bound, blocks or more inducing points would help."""
        return " ".join(self._advice())

    def _advice(self) -> Iterator[str]:
        gain = self._per_point(self.tighter - self.titsias)
        # Beyond F_4: closed by correlating points, and by inducing points alone.
        correlated = None if self.full is None else self._per_point(self.full - self.tighter)
        unreachable = None if self.evidence is None or self.full is None else self._per_point(self.evidence - self.full)
        paid = self._per_point(self.nystrom - self.tighter)
        if self.misfit >= _MEAN_ONLY:
            yield (
                f"The model has learnt the mean and no more: it misses the training targets by {self.misfit:.2f} of their "
                "standard deviation. Scale the inputs to unit variance, and train again with initialize=True, which tries a "
                "few lengthscales to start from; a tighter bound or more inducing points change nothing before that."
            )
            return
        if self.mean_ratio < 2 * _NEGLIGIBLE:
            yield (
                f"The inducing points explain nearly all of the prior variance (d/noise is {self.mean_ratio:.2g} on "
                "average): the tighter bound, blocks and more inducing points can change little here."
            )
        elif correlated is not None and unreachable is not None:
            gap = gain + correlated + unreachable
            yield (
                f"Of the {gap:.2f} nats per point between the standard bound and the evidence, the tighter bound closes "
                f"{gain / gap:.0%}, blocks can close at most {correlated / gap:.0%} more, and the other "
                f"{unreachable / gap:.0%} only more or better placed inducing points can."
            )
            if max(correlated, unreachable) > _NEGLIGIBLE:
                yield f"Next: {'blocks' if correlated > unreachable else 'more inducing points'}."
        else:
            yield (
                f"The tighter bound gains {gain:.2f} nats per point over the standard one and still pays {paid:.2f} for "
                "variance that the inducing points leave; more inducing points, or blocks of near points, lower that."
            )
        if self.block is not None and self.mean_ratio >= 2 * _NEGLIGIBLE:
            yield f"These blocks gain {self._per_point(self.block - self.tighter):.2f} nats per point."
        given_away = 0.0 if self.current is None else self._per_point(self.tighter - self.current - self.jitter)
        if given_away > _NEGLIGIBLE:
            yield (
                f"The current q(u) gives away {given_away:.2f} nats per point against the best one with a full covariance; see "
                "set_optimal_q."
            )
        if self._per_point(self.jitter) > _NEGLIGIBLE:
            yield (
                f"The jitter costs {self._per_point(self.jitter):.2f} nats per point beside this noise, which training inflates "
                "to avoid it: train in float64, or with gpytorch.settings.variational_cholesky_jitter(float_value=1e-6)."
            )

    def _per_point(self, value: float) -> float:
        return value / self.num_data

    def __str__(self) -> str:
        quantile = lambda values: "  ".join(f"{value:.3g}" for value in values)
        largest = max(self.scale_histogram)
        lines = [
            f"{self.num_data} points, {self.num_inducing} inducing points, mean noise variance {self.noise:.3g}",
            f"residual over noise d/s2: mean {self.mean_ratio:.3g}; 5, 25, 50, 75, 95%: {quantile(self.ratio_quantiles)}",
            f"best scales m: 5, 25, 50, 75, 95%: {quantile(self.scale_quantiles)}",
        ]
        lines += [
            f"  {i / 10:.1f}-{(i + 1) / 10:.1f} {'#' * math.ceil(30 * count / largest):<30} {count}"
            for i, count in enumerate(self.scale_histogram)
        ]
        rows = [
            ("current q(u)", self.current),
            ("standard, F1", self.titsias),
            ("one scale, F5", self.spherical),
            ("tighter, F4", self.tighter),
            ("blocks, FB", self.block),
            ("full, F8", self.full),
            ("log evidence", self.evidence),
            ("upper bound", self.upper),
        ]
        lines.append("bounds on the log evidence at these hyperparameters and the best q(u)")
        lines.append(f"{'':18}{'sum':>14}{'per point':>12}{'above F1':>12}")
        lines += [
            f"{name:18}{value:>14.3f}{self._per_point(value):>12.4f}{self._per_point(value - self.titsias):>+12.4f}"
            for name, value in rows
            if value is not None
        ]
        return "\n".join([*lines, *self._advice()])


@torch.no_grad()
def diagnose(
    model: ApproximateGP | ExactGP,
    likelihood: Likelihood,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    blocks: Tensor | int | None = None,
    max_exact: int = 2000,
    batch_size: int = 1024,
    **kwargs: Any,
) -> Diagnosis:
    r"""Compare the bounds of a trained model with Gaussian noise, at its hyperparameters and the best q(u).

    For SOLVE-GP the bounds are those of one joint q(u, v). Takes :math:`O(NM^2)` time and two passes over the data, and
    :math:`O(N^3)` more up to ``max_exact`` points. Sums are in float64. The model is left in the mode it was in.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package, or an
        :class:`~gpytorch.models.ExactGP` with a :class:`TighterInducingPointKernel`.
    :param likelihood: A Gaussian likelihood; with another compare two calls of :func:`~tighter_gp.evaluate_bound`.
    :param x: Training inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is
        in memory at a time.
    :param y: Training targets, ``N``; a tensor or an array.
    :param blocks: For :math:`F_B`: the block of each point, integers of shape ``N``, or a number of blocks to make with
        :func:`~tighter_gp.blocks.partition`. Default: the model's own, if it has any.
    :param max_exact: :math:`F_8` and the evidence itself are computed for at most this many points.
    :param batch_size: Points per chunk; the result does not depend on it.
    :param kwargs: ``noise=`` for :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.

    Example:
        >>> diagnosis = tighter_gp.diagnose(model, likelihood, train_x, train_y)
        >>> diagnosis.titsias <= diagnosis.tighter <= diagnosis.upper
        True
        >>> diagnosis.advice  # doctest: +ELLIPSIS
        'Of the ... nats per point between the standard bound and the evidence, the tighter bound closes ...'
    """
    require_gaussian(
        likelihood,
        "diagnose",
        "For others compare evaluate_bound(model, likelihood, x, y) with the same and objective=gpytorch.mlls.VariationalELBO.",
    )
    like = reference(model, likelihood)
    inputs, y = input_rows(x, like), as_tensor(y, like)
    if y.dim() != 1 or inputs.shape[:-1] != y.shape:
        raise ValueError(
            f"diagnose looks at one single-output model: x N x D and y N; got {tuple(inputs.shape)} and {tuple(y.shape)}."
        )
    if not bool(torch.isfinite(y).all()):
        raise ValueError(f"{int((~torch.isfinite(y)).sum())} of {len(y)} targets are NaN or infinite; drop them.")
    rows_of = per_point(kwargs, likelihood, len(y), like, diagnose)
    given: dict[str, Any] = {name: rows[:] for name, rows in rows_of.items()}
    check_device(y, like.device, "Targets are")
    check_device(likelihood, like.device, "The likelihood is")
    noise = gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **given).expand_as(y).double()
    with temporary_mode(model, False), full_precision(y.device.type):
        posterior = posterior_of(model, torch.float64)
        projector = posterior.projector
        batch_shape = projector(inputs[:1]).matrix.shape[:-2] or posterior.q.mean.shape[:-1]
        if batch_shape:
            raise ValueError(f"diagnose looks at one model at a time; this is a batch of {tuple(batch_shape)}.")
        base, upper, residual, misfit = _collapsed(posterior, likelihood, inputs, y, noise, batch_size)
        labels = _labels(posterior, inputs, blocks)
        block = None if labels is None else base - _block_penalty(posterior, inputs, noise, labels)
        full = evidence = None
        if len(y) <= max_exact:
            every = inputs[:]
            points = projector(every)
            projection, covariance = points.matrix, projector.covariance(every, every)
            full = base - full_penalty(covariance - projection.mT @ projection, noise)
            evidence = exact_log_evidence(covariance, (y - points.mean).double(), noise)
    current, jitter = None, 0.0
    if posterior.strategy is not None:
        jitter = 0.5 * posterior.strategy.jitter_val * noise.reciprocal().sum().item()
        current = evaluate_bound(model, likelihood, inputs.values, y, batch_size, **given)
    ratio, scale = residual / noise, optimal_scale(residual, noise.reciprocal())
    return Diagnosis(
        num_data=len(y),
        num_inducing=projector.num_inducing,
        noise=noise.mean().item(),
        mean_ratio=ratio.mean().item(),
        ratio_quantiles=_quantiles(ratio),
        scale_quantiles=_quantiles(scale),
        scale_histogram=(10 * scale).long().clamp(0, 9).bincount(minlength=10).tolist(),
        current=_item(current),
        jitter=jitter,
        nystrom=base.item(),
        titsias=(base - trace_penalty(residual, noise)).item(),
        spherical=(base - spherical_penalty(residual, noise)).item(),
        tighter=(base - log_penalty(residual, noise)).item(),
        block=_item(block),
        full=_item(full),
        evidence=_item(evidence),
        upper=upper.item(),
        misfit=misfit,
    )


def _collapsed(
    posterior: Posterior, likelihood: Any, x: Rows, y: Tensor, noise: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    r"""The log density under the explained prior, an upper bound on the evidence, :math:`d_n`, and the relative error.

    The upper bound lowers :math:`(Q + D + \Sigma)^{-1}` to :math:`(Q + (1 + t)\Sigma)^{-1}`, with :math:`t` the trace of
    :math:`\Sigma^{-1/2} D \Sigma^{-1/2}`, and the determinant to that of :math:`Q + \Sigma`.
    """
    gram, linear, residual = gathered(posterior.projector, x, y, noise, likelihood, batch_size)
    widths = torch.stack([torch.ones_like(residual.sum()), 1 + (residual / noise).sum()])  # 1 and 1 + t
    core = collapse(gram / widths.view(2, 1, 1), linear / widths.view(2, 1))
    misfit = torch.zeros_like(widths)
    squares, explained = torch.empty_like(residual), torch.empty_like(residual)
    for rows in chunks(len(y), batch_size):
        points = posterior.projector(x[rows])
        explained[rows] = points.matrix.square().sum(-2).to(explained)
        left = (y[rows] - points.mean).double() - core.weights @ points.matrix
        misfit, squares[rows] = misfit + (left.square() / noise[rows]).sum(-1), left[0].square()
    quadratic = misfit / widths + core.weights.square().sum(-1)
    base, upper = collapsed_log_prob(quadratic, core.log_det[0], noise.log().sum(), len(y))
    spread, tiny = (y.double() - y.double().mean()).square(), torch.finfo(torch.float64).tiny
    counts = residual >= _UNEXPLAINED * (residual + explained)
    if (~counts).sum() > 2 * posterior.projector.num_inducing or not counts.any():
        counts = torch.ones_like(counts)
    error = (squares[counts].sum() / spread[counts].sum().clamp_min(tiny)).sqrt()
    return base, upper, residual, error.item()


def _labels(posterior: Posterior, x: Rows, blocks: Tensor | int | None) -> Tensor | None:
    if isinstance(blocks, int):
        return partition(x[:], blocks)
    if blocks is None:
        blocks = posterior.labels
        if blocks is None or len(blocks) != len(x):
            return None
    if blocks.shape != x.shape[:-1] or blocks.is_floating_point():
        raise ValueError(
            f"blocks must have one integer label per point, shape ({len(x)},); "
            f"got {str(blocks.dtype).removeprefix('torch.')} of shape {tuple(blocks.shape)}."
        )
    return blocks


def _block_penalty(posterior: Posterior, x: Rows, noise: Tensor, labels: Tensor) -> Tensor:
    order, sizes = labels.argsort(), labels.unique(return_counts=True)[1]
    penalty = torch.zeros_like(noise[0])
    for rows in order.split(sizes.tolist()):
        inputs = x[rows]
        projection = posterior.projector(inputs).matrix
        covariance = posterior.projector.residual_covariance(inputs, inputs, projection, projection)
        penalty = penalty + full_penalty(covariance, noise[rows])
    return penalty


def _quantiles(values: Tensor) -> list[float]:
    # torch.quantile takes at most 2**24 values.
    place = [round(q * (len(values) - 1)) for q in QUANTILES]
    return values.sort().values[place].tolist()


def _item(value: Tensor | None) -> float | None:
    return None if value is None else value.item()
