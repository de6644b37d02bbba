r"""Who chooses the scales :math:`m_n` of q(f|u).

A conditional is chosen by name or as an object: ``TighterVariationalStrategy(..., conditional="beta")``.

=================  =============================  ===================================================================
``"optimal"``      :class:`OptimalConditional`    Gaussian noise: closed form, no parameter, the ELBO brings the noise
``"beta"``         :class:`BetaConditional`       :math:`m_n = \beta/(\beta + d_n)`, one learned :math:`\beta`
``"scalar"``       :class:`ScalarConditional`     one learned :math:`m \le 1`; a strict bound for every likelihood
``"curvature"``    :class:`CurvatureConditional`  the best :math:`m_n` for any likelihood at the current q, no parameter
an object          :class:`PerPoint`              one learned :math:`m_n` a training point
an object          :class:`~tighter_gp.Blocks`    Gaussian noise: the best block-diagonal :math:`M`, no parameter
=================  =============================  ===================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch import Module
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from ._checks import check_range
from .bounds import optimal_scale, optimal_scale_penalty, scale_penalty

__all__ = [
    "BetaConditional",
    "Conditional",
    "CurvatureConditional",
    "OptimalConditional",
    "PerPoint",
    "ResidualBlocks",
    "ScalarConditional",
    "block_table",
]


class ResidualBlocks(NamedTuple):
    r"""Residual covariances within the blocks of a batch.

    :param covariance: :math:`D_{bb}`, ``... x K x S x S``, zero where a block is filled up.
    :param rows: Positions of the points in the batch, ``K x S``, -1 where a block is filled up.

    Example:
        >>> conditional, residual = tighter_gp.Blocks(torch.tensor([0, 1, 1])), torch.tensor([0.5, 1.0, 2.0])
        >>> covariance = torch.diag(residual)
        >>> blocks = conditional.residual_blocks(residual, lambda rows: covariance[rows.unsqueeze(-1), rows.unsqueeze(-2)])
        >>> blocks.rows
        tensor([[ 0, -1],
                [ 1,  2]])
    """

    covariance: Tensor
    rows: Tensor


class Conditional(Module, ABC):
    r"""Chooses :math:`m_n` given the residual :math:`d_n`.

    :ivar bool is_learned: Whether the scales are set by the model alone. If so the strategy applies them in training,
        if not the objective does, since they depend on the likelihood.
    :ivar bool is_strict: Whether the objective is a lower bound on the evidence for every likelihood.
    :ivar bool is_gaussian_only: Whether the scales are known for Gaussian noise alone.
    :ivar bool needs_index: Whether a call in training must say which training points it holds, ``model(x, index=rows)``.
    :ivar bool needs_double: Whether it factorises residual covariances, which float32 does not know to within the noise.

    Example:
        >>> residual = torch.tensor([0.0, 1.0, 3.0])
        >>> noise = torch.tensor(2.0)
        >>> remaining, penalty = tighter_gp.conditionals.OptimalConditional().optimum(residual, 1 / noise)
        >>> remaining
        tensor([0.0000, 0.6667, 1.2000])
    """

    is_learned: bool = True
    is_strict: bool = False
    is_gaussian_only: bool = False
    needs_index: bool = False
    needs_double: bool = False
    batch_shape: torch.Size = torch.Size()

    def check_index(self, index: Tensor | None, num_points: int) -> Tensor | None:
        """The index, or an error before anything is computed if this conditional cannot use it."""
        return index

    @abstractmethod
    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`m_n`, broadcastable to ``residual``."""

    @abstractmethod
    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`-\phi(m_n) \ge 0` a point, broadcastable to ``residual``."""

    def residual_blocks(
        self, residual: Tensor, covariance: Callable[[Tensor], Tensor], *, index: Tensor | None = None
    ) -> ResidualBlocks | None:
        r"""What else of the residual the objective will need: None, or covariances within blocks of the batch.

        :param residual: :math:`d_n`, ``... x B``.
        :param covariance: Computes :math:`D` within sets of points: from positions in the batch, ``K x S``, to
            ``... x K x S x S``.
        :param index: Positions of the batch in the training set.
        """
        return None

    def optimum(
        self, residual: Tensor, precision: Tensor, blocks: ResidualBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""The best conditional where the expected log likelihood falls with the variance at rate :math:`\lambda_n/2`.

        :param residual: :math:`d_n`, ``... x B``.
        :param precision: :math:`\lambda_n \ge 0`, broadcastable to ``residual``; :math:`1/\sigma_n^2` for Gaussian noise.
        :param blocks: From :meth:`residual_blocks`.
        :return: What it leaves of the residual variance, :math:`m_n d_n`, and the penalty :math:`-\phi(m_n)` a point.
        """
        return residual * optimal_scale(residual, precision), optimal_scale_penalty(residual, precision)


class OptimalConditional(Conditional):
    r"""The closed form for Gaussian noise, :math:`m_n = \sigma_n^2 / (\sigma_n^2 + d_n)`; has no parameter.

    Only the objective knows the noise, so in training q(f) keeps SVGP's variance :math:`s_n + d_n`, and
    :class:`~gpytorch.mlls.VariationalELBO` on it is plain SVGP.

    Example:
        >>> conditional = tighter_gp.conditionals.OptimalConditional()
        >>> conditional.is_strict, len(list(conditional.parameters()))
        (True, 0)
    """

    is_learned = False
    is_strict = True
    is_gaussian_only = True

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.ones_like(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.zeros_like(residual)


class BetaConditional(Conditional):
    r"""The paper's :math:`m_n = \beta / (\beta + d_n)` with one learned :math:`\beta > 0` a latent function.

    :param batch_shape: One :math:`\beta` for each member of this batch.
    :param beta_prior: Prior on :math:`\beta`.
    :param beta_constraint: Constraint on :math:`\beta`; default positive, learned as :math:`\log \beta`, since the best
        :math:`\beta` may be orders of magnitude away from where it starts.
    :ivar torch.Tensor beta: :math:`\beta`, shape ``batch_shape``; starts at 1. :math:`\beta \to \infty` is SVGP.

    Example:
        >>> conditional = tighter_gp.conditionals.BetaConditional()
        >>> conditional.beta = 2.0
        >>> conditional.scale(torch.tensor([0.0, 2.0])).detach()
        tensor([1.0000, 0.5000])
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),
        beta_prior: Prior | None = None,
        beta_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.batch_shape = torch.Size(batch_shape)
        self.register_parameter("raw_beta", torch.nn.Parameter(torch.zeros(self.batch_shape)))
        constraint = beta_constraint or Positive(transform=torch.exp, inv_transform=torch.log)
        self.register_constraint("raw_beta", constraint)
        if beta_prior is not None:
            self.register_prior("beta_prior", beta_prior, _get_beta, BetaConditional._set_beta)
        # A constraint of the user's may start elsewhere or exclude 1; the raw value zero is inside every one.
        if constraint.initial_value is None and constraint.check(torch.ones(())):
            self.beta = 1.0

    @property
    def beta(self) -> Tensor:
        return self.raw_beta_constraint.transform(self.raw_beta)

    @beta.setter
    def beta(self, value: Tensor | float) -> None:
        self._set_beta(value)

    def _set_beta(self, value: Tensor | float) -> None:
        value = _checked_shape(value, self.raw_beta, self.batch_shape, "beta")
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ValueError(f"beta must be positive and finite; got {value.tolist()}. A very large beta gives SVGP.")
        self.initialize(raw_beta=self.raw_beta_constraint.inverse_transform(value))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return optimal_scale(residual, self.beta.reciprocal().unsqueeze(-1))

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return optimal_scale_penalty(residual, self.beta.reciprocal().unsqueeze(-1))


class ScalarConditional(Conditional):
    r"""One learned scale for all points, :math:`C = mD`: a strict bound for every likelihood.

    :param batch_shape: One :math:`m` for each member of this batch.
    :param scale_prior: Prior on :math:`m`.
    :ivar torch.Tensor m: :math:`0 < m < 1`, shape ``batch_shape``; starts at 0.9.

    Example:
        >>> conditional = tighter_gp.conditionals.ScalarConditional()
        >>> conditional.m = 0.5
        >>> conditional.scale(torch.tensor([0.0, 2.0])).detach()
        tensor([0.5000, 0.5000])
    """

    is_strict = True

    def __init__(self, batch_shape: torch.Size = torch.Size(), scale_prior: Prior | None = None) -> None:
        super().__init__()
        self.batch_shape = torch.Size(batch_shape)
        self.register_parameter("raw_m", torch.nn.Parameter(torch.zeros(self.batch_shape)))
        self.register_constraint("raw_m", Interval(0.0, 1.0))
        if scale_prior is not None:
            self.register_prior("scale_prior", scale_prior, _get_m, ScalarConditional._set_m)
        self.m = 0.9

    @property
    def m(self) -> Tensor:
        return self.raw_m_constraint.transform(self.raw_m)

    @m.setter
    def m(self, value: Tensor | float) -> None:
        self._set_m(value)

    def _set_m(self, value: Tensor | float) -> None:
        value = _checked_scale(value, self.raw_m, self.batch_shape)
        self.initialize(raw_m=self.raw_m_constraint.inverse_transform(value))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return self.m.unsqueeze(-1).expand_as(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return scale_penalty(self.m).unsqueeze(-1).expand_as(residual)


class PerPoint(Conditional):
    r"""One learned :math:`m_n` a training point, with sparse gradients: call ``model(x, index=rows)`` in training.

    The table's gradient is sparse, so give it an optimizer that takes one, such as
    :class:`torch.optim.SparseAdam`; a step then costs the same for every ``num_data``.

    :param num_data: Number of training points; ``index`` runs from 0 to ``num_data - 1``.
    :param batch_shape: One table for each member of this batch.
    :ivar torch.Tensor m: :math:`0 < m_n < 1`, shape ``batch_shape x num_data``; starts at 0.9.

    Example:
        >>> conditional = tighter_gp.PerPoint(num_data=4)
        >>> conditional.scale(torch.tensor([1.0, 2.0]), index=torch.tensor([3, 0])).detach()
        tensor([0.9000, 0.9000])
    """

    needs_index = True

    def __init__(self, num_data: int, batch_shape: torch.Size = torch.Size()) -> None:
        super().__init__()
        if num_data < 1:
            raise ValueError(f"PerPoint needs at least one training point; got num_data={num_data}.")
        self.num_data = num_data
        self.batch_shape = torch.Size(batch_shape)
        # One row a point, so that a batch of points is a sparse set of rows.
        self.register_parameter("raw_m", torch.nn.Parameter(torch.zeros(num_data, self.batch_shape.numel())))
        self.register_constraint("raw_m", Interval(0.0, 1.0))
        self.m = 0.9

    @property
    def m(self) -> Tensor:
        return self._shaped(self.raw_m_constraint.transform(self.raw_m))

    @m.setter
    def m(self, value: Tensor | float) -> None:
        value = _checked_scale(value, self.raw_m, (*self.batch_shape, self.num_data))
        rows = value.reshape(self.batch_shape.numel(), self.num_data).mT
        self.initialize(raw_m=self.raw_m_constraint.inverse_transform(rows))

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.mT.reshape(*self.batch_shape, rows.size(-2))

    def check_index(self, index: Tensor | None, num_points: int) -> Tensor:
        if index is None:
            raise ValueError(
                "PerPoint needs to know which training points these are: call model(x, index=rows) in training, with "
                "rows the positions of x in the training set."
            )
        return checked_index(index, num_points, self.num_data, "PerPoint")

    def _rows(self, residual: Tensor, index: Tensor | None) -> Tensor:
        index = self.check_index(index, residual.size(-1))
        rows = torch.nn.functional.embedding(index, self.raw_m, sparse=True)
        return self._shaped(self.raw_m_constraint.transform(rows))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return self._rows(residual, index)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return scale_penalty(self._rows(residual, index))


class CurvatureConditional(Conditional):
    r"""The best scale of each point for any likelihood, at the current q; has no parameter.

    .. math:: m_n = \frac{1}{1 + \lambda_n d_n}, \qquad
              \lambda_n = \mathbb E_{\mathcal N(\mu_n,\, s_n + m_n d_n)}
              \Bigl[-\frac{\partial^2 \log p(y_n \mid f)}{\partial f^2}\Bigr]

    This is where the derivative of the objective in :math:`m_n` vanishes. It is solved by a fixed number of bracketed
    steps and detached: at the solution :math:`m_n` has no part in the gradient. With Gaussian noise it is
    :class:`OptimalConditional`.

    :math:`\lambda_n` is minus twice the derivative of the expected log likelihood with respect to the variance. Where a
    likelihood estimates its expected log likelihood by sampling, as :class:`~gpytorch.likelihoods.SoftmaxLikelihood`
    does, it is the mean second derivative over samples instead, drawn once a call, and the solution is as exact as
    :class:`~gpytorch.settings.num_likelihood_samples` makes it. Where :math:`\lambda_n < 0` at :math:`m_n = 1`, the
    likelihood asks for more variance, not less, and :math:`m_n` stays 1 as in SVGP.

    As with ``"beta"``, the objective is a strict bound for log-concave likelihoods, where all :math:`m_n \le 1` are, and
    an approximation for others. In a hidden layer of a deep GP :math:`m = 1`.

    :param num_steps: Number of evaluations of :math:`\lambda_n` after the first.

    Example:
        >>> conditional = tighter_gp.conditionals.CurvatureConditional()
        >>> conditional.solve(torch.tensor([0.0, 1.0, 3.0]), lambda m: torch.full_like(m, 0.5))  # a constant curvature
        tensor([1.0000, 0.6667, 0.4000])
    """

    is_learned = False

    def __init__(self, num_steps: int = 10) -> None:
        super().__init__()
        if num_steps < 1:
            raise ValueError(f"CurvatureConditional needs at least one step; got num_steps={num_steps}.")
        self.num_steps = num_steps

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.ones_like(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.zeros_like(residual)

    @torch.no_grad()
    def solve(self, residual: Tensor, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        r"""Solve :math:`m = 1 / (1 + \lambda(m) d)` for each point.

        With :math:`x = \log m` this is the root of :math:`h(x) = x + \log(1 + \lambda(e^x) d)`, which is not negative at
        :math:`x = 0`. The step :math:`x - h(x)` is repeated until it passes the root, and then regula falsi (with
        Illinois weights) between the nearest points on either side.

        :param residual: :math:`d_n`, ``... x B``.
        :param curvature: :math:`\lambda_n` as a function of all :math:`m_n`.
        :return: :math:`m_n`, without a graph.
        """

        def excess(x: Tensor) -> Tensor:
            return x + torch.log1p((curvature(x.exp()) * residual).clamp_min(0.0))

        above = torch.zeros_like(residual)
        excess_above = excess(above)
        below, excess_below = torch.zeros_like(above), -torch.ones_like(above)
        is_bracketed = was_below = torch.zeros_like(above, dtype=torch.bool)
        x = above - excess_above
        for _ in range(self.num_steps):
            value = excess(x)
            is_below = value < 0
            # Illinois: an end that stays put twice counts half, so that it too moves next time.
            stuck = is_bracketed & (is_below == was_below)
            excess_above = torch.where(is_below, torch.where(stuck, 0.5, 1.0) * excess_above, value)
            excess_below = torch.where(is_below, value, torch.where(stuck, 0.5, 1.0) * excess_below)
            above, below = torch.where(is_below, above, x), torch.where(is_below, x, below)
            is_bracketed, was_below = is_bracketed | is_below, is_below
            secant = (above - below) / (excess_above - excess_below)
            x = above - excess_above * torch.where(is_bracketed, secant, 1.0)
        return x.exp()


def block_table(labels: Tensor) -> Tensor:
    r"""The positions of the points of each block.

    :param labels: Label of each point, shape ``N``.
    :return: ``K x S``, a row for each label that occurs, in increasing order; filled up with -1.

    Example:
        >>> tighter_gp.conditionals.block_table(torch.tensor([2, 0, 2]))
        tensor([[ 1, -1],
                [ 0,  2]])
    """
    _, block, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    order = torch.argsort(block, stable=True)
    column = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[block[order]]
    table = order.new_full((len(counts), int(counts.max())), -1)
    table[block[order], column] = order
    return table


def checked_index(index: Tensor, num_points: int, num_data: int, name: str) -> Tensor:
    """The positions of a batch in the training set, or a clear error if they cannot be that."""
    if index.dtype not in (torch.int32, torch.int64) or index.shape != (num_points,):
        raise ValueError(
            f"{name} needs one integer index a row of x, shape ({num_points},); "
            f"got {str(index.dtype).removeprefix('torch.')} of shape {tuple(index.shape)}."
        )
    check_range(index, num_data, f"{name}(num_data={num_data})")
    return index


def _get_beta(module: BetaConditional) -> Tensor:
    return module.beta


def _get_m(module: ScalarConditional) -> Tensor:
    return module.m


def _checked_shape(value: Tensor | float, like: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    value = torch.as_tensor(value).to(like)
    try:
        return value.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} has shape {tuple(shape)}; got a value of shape {tuple(value.shape)}.") from None


def _checked_scale(value: Tensor | float, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    value = _checked_shape(value, like, shape, "m")
    if not bool(((value > 0) & (value < 1)).all()):
        raise ValueError(f"Scales must lie strictly between 0 and 1; got {value.tolist()}.")
    return value


_BY_NAME: dict[str, Callable[[torch.Size], Conditional]] = {
    "optimal": lambda batch_shape: OptimalConditional(),
    "beta": BetaConditional,
    "scalar": ScalarConditional,
    "curvature": lambda batch_shape: CurvatureConditional(),
}


def make_conditional(conditional: str | Conditional, batch_shape: torch.Size, like: Tensor) -> Conditional:
    r"""Resolve a name to a conditional for a batch of latent functions; an object is checked and passed through.

    :param conditional: A key of the table above or a :class:`Conditional`.
    :param batch_shape: Batch shape of the variational distribution.
    :param like: Tensor whose dtype and device the parameters take.
    """
    if isinstance(conditional, str):
        if conditional not in _BY_NAME:
            names = ", ".join(repr(name) for name in _BY_NAME)
            raise ValueError(
                f"Unknown conditional {conditional!r}; choose {names}, or pass a Conditional such as PerPoint."
            )
        return _BY_NAME[conditional](batch_shape).to(dtype=like.dtype, device=like.device)
    if not isinstance(conditional, Conditional):
        raise TypeError(f"conditional must be a name or a Conditional; got {type(conditional).__name__}.")
    try:
        broadcast = torch.broadcast_shapes(conditional.batch_shape, batch_shape)
    except RuntimeError:
        broadcast = None
    if broadcast != batch_shape:
        raise ValueError(
            f"{type(conditional).__name__} has batch_shape {tuple(conditional.batch_shape)}, which does not fit the "
            f"variational distribution's {tuple(batch_shape)}; build it with batch_shape={tuple(batch_shape)}."
        )
    return conditional
