r"""Where the gap between a bound and the evidence lies: what a tighter conditional, blocks or more points would close.

With :math:`F_1 \le F_5 \le F_4 \le F_B \le F_8 \le \log p(y)`, the step :math:`F_4 - F_1` is what the tighter bound gains,
:math:`F_8 - F_4` the most that blocks can add, and :math:`\log p(y) - F_8` what only inducing points can close.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from .blocks import block_table, partition
from .collapsed import DataSums
from .collapsed.prices import earlier_neighbours, price, rows_within
from .data import Rows, input_rows, reference
from .full_data import evaluate_bound, per_point, targets_and_noise
from .maths.bounds import PENALTIES, exact_log_evidence, optimal_scale
from .maths.collapsed import collapse, collapsed_log_prob
from .maths.linalg import full_precision
from .mlls import TighterELBO
from .modes import chunks, temporary_mode
from .posterior import gathered, posterior_of, require_gaussian, tighter_copy
from .prior import Prior

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# Nats per point below which a difference between bounds is not worth acting on.
_NEGLIGIBLE = 0.01

# Error over standard deviation of the targets from which on a model has learnt the mean alone.
_MEAN_ONLY = 0.98

# Share of the prior variance from which on the inducing points say nothing of a point.
_UNEXPLAINED = 0.9

_TITLES = {
    "current": "current q(u)",
    "titsias": "standard, F1",
    "spherical": "one scale, F5",
    "tighter": "tighter, F4",
    "block": "blocks, FB",
    "neighbours": "neighbours",
    "full": "full, F8",
    "evidence": "log evidence",
    "upper": "upper bound",
}


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
    :ivar current: The model's own objective with the current q(u); None for a collapsed model, whose q(u) is the best one.
    :ivar float jitter: What ``current`` pays for the jitter in the variances of q(f), :math:`\tfrac12 \sum_n j / \sigma_n^2`.
    :ivar float nystrom: Log density under the explained part of the prior; a bound is this less its price.
    :ivar float titsias: :math:`F_1`, SGPR, or SVGP at the best q(u).
    :ivar float spherical: :math:`F_5`, one scale for all points.
    :ivar float tighter: :math:`F_4`.
    :ivar block: :math:`F_B`, or None without blocks.
    :ivar neighbours: The bound with neighbours, or None without.
    :ivar full: :math:`F_8`, or None for many points.
    :ivar evidence: :math:`\log p(y)`, or None for many points.
    :ivar float upper: An upper bound on :math:`\log p(y)` at any :math:`N` (Titsias, 2014).
    :ivar float misfit: Root mean squared error on the training targets, over their standard deviation. Where the inducing
        points reach hardly more points than they are, that of the others: a target may be known by heart.
    :ivar bool is_standard: Whether the model is trained by the standard bound, on GPyTorch's own strategy.

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
    neighbours: float | None
    full: float | None
    evidence: float | None
    upper: float
    misfit: float
    is_standard: bool = False

    @property
    def advice(self) -> str:
        """In a few lines, whether the tighter bound, blocks or more inducing points would help."""
        return " ".join(self._advice())

    def _advice(self) -> Iterator[str]:
        if self.misfit >= _MEAN_ONLY:
            yield (
                f"The model has learnt the mean and no more: it misses the training targets by {self.misfit:.2f} of their "
                "standard deviation. Scale the inputs to unit variance, and train again with initialize=True."
            )
            return
        count = self.num_data
        gain = (self.tighter - self.titsias) / count
        if self.mean_ratio < 2 * _NEGLIGIBLE:
            yield (
                f"The inducing points explain nearly all of the prior variance (d/noise is {self.mean_ratio:.2g} on "
                "average): the tighter bound, blocks and more inducing points can change little here."
            )
        elif self.evidence is not None and self.full is not None:
            # Beyond F_4: closed by correlating points, and by inducing points alone.
            blocks, points = (self.full - self.tighter) / count, (self.evidence - self.full) / count
            gap = gain + blocks + points
            yield (
                f"Of the {gap:.2f} nats per point between the standard bound and the evidence, the tighter bound closes "
                f"{gain / gap:.0%}, blocks can close at most {blocks / gap:.0%} more, and the other "
                f"{points / gap:.0%} only more or better placed inducing points can."
            )
            if max(blocks, points) > _NEGLIGIBLE:
                yield f"Next: {'blocks' if blocks > points else 'more inducing points'}."
        else:
            paid = (self.nystrom - self.tighter) / count
            yield (
                f"The tighter bound gains {gain:.2f} nats per point over the standard one and still pays {paid:.2f} for "
                "variance that the inducing points leave; more inducing points, or blocks of near points, lower that."
            )
        if self.is_standard and gain > _NEGLIGIBLE:
            yield (
                "To train by it change two lines: TighterVariationalStrategy for VariationalStrategy, and TighterELBO for "
                "VariationalELBO."
            )
        if self.block is not None and self.mean_ratio >= 2 * _NEGLIGIBLE:
            yield f"These blocks gain {(self.block - self.tighter) / count:.2f} nats per point."
        best = self.titsias if self.is_standard else self.tighter
        lost = 0.0 if self.current is None else (best - self.current - self.jitter) / count
        if lost > _NEGLIGIBLE:
            yield f"The current q(u) gives away {lost:.2f} nats per point against the best one; see set_optimal_q."
        if self.jitter / count > _NEGLIGIBLE:
            yield (
                f"The jitter costs {self.jitter / count:.2f} nats per point beside this noise, which training inflates to avoid "
                "it: train in float64, or with gpytorch.settings.variational_cholesky_jitter(float_value=1e-6)."
            )

    def __str__(self) -> str:
        quantiles = lambda values: "  ".join(f"{value:.3g}" for value in values)
        lines = [
            f"{self.num_data} points, {self.num_inducing} inducing points, mean noise variance {self.noise:.3g}",
            f"residual over noise d/s2: mean {self.mean_ratio:.3g}; 5, 25, 50, 75, 95%: {quantiles(self.ratio_quantiles)}",
            f"best scales m: 5, 25, 50, 75, 95%: {quantiles(self.scale_quantiles)}",
        ]
        for i, count in enumerate(self.scale_histogram):
            width = -(-30 * count // max(self.scale_histogram))
            lines.append(f"  {i / 10:.1f}-{(i + 1) / 10:.1f} {'#' * width:<30} {count}")
        lines.append("bounds on the log evidence at these hyperparameters and the best q(u)")
        lines.append(f"{'':18}{'sum':>14}{'per point':>12}{'above F1':>12}")
        for name, title in _TITLES.items():
            value = getattr(self, name)
            if value is not None:
                each, above = value / self.num_data, (value - self.titsias) / self.num_data
                lines.append(f"{title:18}{value:>14.3f}{each:>12.4f}{above:>+12.4f}")
        return "\n".join([*lines, *self._advice()])


@torch.no_grad()
def diagnose(
    model: ApproximateGP | ExactGP,
    likelihood: Likelihood,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    blocks: Tensor | int | None = None,
    num_neighbours: int | None = None,
    seed: int = 0,
    max_exact: int = 2000,
    batch_size: int = 1024,
    **kwargs: Any,
) -> Diagnosis:
    r"""Compare the bounds of a trained model with Gaussian noise, at its hyperparameters and the best q(u).

    For SOLVE-GP the bounds are those of one joint q(u, v). Takes :math:`O(NM^2)` time and two passes over the data, and
    :math:`O(N^3)` more up to ``max_exact`` points. Sums are in float64. The model is left in the mode it was in.

    :param model: An :class:`~gpytorch.models.ApproximateGP` on a strategy of this package or on GPyTorch's own
        :class:`~gpytorch.variational.VariationalStrategy`, or an :class:`~gpytorch.models.ExactGP` with a
        :class:`TighterInducingPointKernel`.
    :param likelihood: A Gaussian likelihood; with another compare two calls of :func:`~tighter_gp.evaluate_bound`.
    :param x: Training inputs, ``N x D`` or ``N``: a tensor, or a numpy array, perhaps memory-mapped, of which only a chunk is
        in memory at a time.
    :param y: Training targets, ``N``; a tensor or an array.
    :param blocks: For :math:`F_B`: the block of each point, integers of shape ``N``, or a number of blocks to make with
        :func:`~tighter_gp.blocks.partition`. Default: the model's own, if it has any.
    :param num_neighbours: For the bound with so many neighbours, which takes :math:`O(N^2 M)`.
    :param seed: Of the order of the rows for it.
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
    hint = "For others compare evaluate_bound(...) with the same and objective=gpytorch.mlls.VariationalELBO."
    require_gaussian(likelihood, "diagnose", hint)
    is_standard = isinstance(model, ApproximateGP) and type(model.variational_strategy) is VariationalStrategy
    model = tighter_copy(model) if is_standard else model
    like = reference(model, likelihood)
    inputs, shape = input_rows(x, like), tuple(np.shape(y))
    if shape != inputs.shape[:-1] or len(shape) != 1:
        raise ValueError(
            f"diagnose takes one single-output model: x N x D and y N; got {tuple(inputs.shape)} and {shape}."
        )
    y, noise = targets_and_noise(likelihood, inputs, y, per_point(kwargs, likelihood, inputs))
    noise = noise.double()  # [N]
    found: dict[str, Any] = dict.fromkeys(("current", "block", "neighbours", "full", "evidence"))
    jitter, sets = 0.0, dict.fromkeys(PENALTIES)  # by bound, the points that may be correlated
    with temporary_mode(model, False), full_precision(y.device.type):
        posterior = posterior_of(model, torch.float64)
        if posterior.q.mean.dim() > 1 or posterior.prior(inputs[:1]).matrix.dim() > 2:
            raise ValueError("diagnose looks at one model at a time; this is a batch of them.")
        prior, sums = gathered(posterior.prior, inputs, y, noise, likelihood, batch_size)
        base, upper, misfit = _second_pass(prior, sums, inputs, y, noise, batch_size)
        labels = _labels(posterior.labels, inputs, blocks)
        if labels is not None:
            sets["block"] = block_table(labels)
        if num_neighbours is not None:
            sets["neighbours"] = earlier_neighbours(prior, inputs[:], noise, num_neighbours, seed)
        if len(y) <= max_exact:
            sets["full"] = None
            every = inputs[:]
            covariance = prior.covariance(every, every, torch.float64)  # K  [N, N]
            found["evidence"] = exact_log_evidence(covariance, (y - prior(every).mean).double(), noise)
        residual, within = sums.residual, rows_within(prior, inputs.__getitem__)
        for name, points in sets.items():
            found[name] = base - price(name, residual, noise, within, points)
    if posterior.strategy is not None:
        objective = VariationalELBO if is_standard else TighterELBO
        jitter = 0.5 * posterior.strategy.jitter_val * noise.reciprocal().sum().item()
        found["current"] = evaluate_bound(model, likelihood, x, y, batch_size, objective=objective, **kwargs)
    ratio, scale = residual / noise, optimal_scale(residual, noise.reciprocal())  # d_n / sigma_n^2 and m_n  [N]
    values: dict[str, Any] = {name: None if value is None else value.item() for name, value in found.items()}
    return Diagnosis(
        num_data=len(y),
        num_inducing=sums.linear.size(-1),
        noise=noise.mean().item(),
        mean_ratio=ratio.mean().item(),
        ratio_quantiles=_quantiles(ratio),
        scale_quantiles=_quantiles(scale),
        scale_histogram=(10 * scale).long().clamp(0, 9).bincount(minlength=10).tolist(),
        jitter=jitter,
        nystrom=base.item(),
        upper=upper.item(),
        misfit=misfit.item(),
        is_standard=is_standard,
        **values,
    )


def _second_pass(
    prior: Prior, sums: DataSums, x: Rows, y: Tensor, noise: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The log density under the explained prior, an upper bound on the evidence, and the relative error.

    The upper bound lowers :math:`(Q + D + \Sigma)^{-1}` to :math:`(Q + (1 + t)\Sigma)^{-1}`, with :math:`t` the trace of
    :math:`\Sigma^{-1/2} D \Sigma^{-1/2}`, and the determinant to that of :math:`Q + \Sigma`.
    """
    ratio = (sums.residual / noise).sum()  # t
    widths = torch.stack([torch.ones_like(ratio), 1 + ratio])  # 1 and 1 + t
    # The best q(w) under noise of either width.
    core = collapse(sums.gram / widths.view(2, 1, 1), sums.linear / widths.view(2, 1))
    left, norms = [], []
    for rows in chunks(len(y), batch_size):
        points = prior(x[rows])
        left.append((y[rows] - points.mean).double() - core.weights @ points.matrix)  # y - mu - A'w  [2, B]
        norms.append(points.matrix.square().sum(-2))
    squares, explained = torch.cat(left, -1).square(), torch.cat(norms)  # [2, N] and a_n'a_n  [N]
    quadratic = (squares / noise).sum(-1) / widths + core.weights.square().sum(-1)
    base, upper = collapsed_log_prob(quadratic, core.log_det[0], noise.log().sum(), len(y))
    # A target may be known by heart where inducing points reach hardly more points than they are.
    counts = explained <= (1 - _UNEXPLAINED) * (sums.residual + explained)
    if (~counts).sum() > 2 * sums.linear.size(-1) or not counts.any():
        counts = torch.ones_like(counts)
    # Root mean squared error over standard deviation, of the points that count.
    spread = (y.double() - y.double().mean()).square()[counts].sum()
    misfit = (squares[0, counts].sum() / spread.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return base, upper, misfit


def _labels(own: Tensor | None, x: Rows, blocks: Tensor | int | None) -> Tensor | None:
    """The block of each point: given, to be made, or the model's own."""
    if isinstance(blocks, int):
        return partition(x[:], blocks)
    if blocks is not None and blocks.shape != x.shape[:-1]:
        raise ValueError(f"blocks must have one label per point, shape ({len(x)},); got {tuple(blocks.shape)}.")
    return own if blocks is None and own is not None and len(own) == len(x) else blocks


def _quantiles(values: Tensor) -> list[float]:
    # torch.quantile takes at most 2**24 values.
    place = [round(q * (len(values) - 1)) for q in _QUANTILES]
    return values.sort().values[place].tolist()
