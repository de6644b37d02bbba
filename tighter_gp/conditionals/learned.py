r"""Conditionals whose scales are learned."""

from __future__ import annotations

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from ..checks import check_device
from ..maths.bounds import optimal_scale, optimal_scale_penalty, scale_penalty
from .base import Conditional, checked_index


class BetaConditional(Conditional):
    r"""The paper's :math:`m_n = \beta / (\beta + d_n)` with one learned :math:`\beta > 0` per latent function.

    :param batch_shape: One :math:`\beta` for each member of this batch.
    :param beta_prior: Prior on :math:`\beta`.
    :param beta_constraint: Constraint on :math:`\beta`; default positive, learned as :math:`\log \beta`, since the best
        :math:`\beta` may be orders of magnitude away from where it starts.
    :ivar torch.Tensor beta: :math:`\beta`, shape ``batch_shape``; starts at 1, and :func:`~tighter_gp.fit` lets it start at
        one over the curvature of the likelihood if it is still there. :math:`\beta \to \infty` is SVGP.

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
        self.register_buffer("first_raw_beta", self.raw_beta.detach().clone(), persistent=False)

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
    r"""One learned :math:`m_n` per training point, with sparse gradients: call ``model(x, index=rows)`` in training.

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
        # One row per point, so that a batch of points is a sparse set of rows.
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
        if index is None or index.device.type == "cpu":  # elsewhere a look has its price, and the strategy has looked
            index = self.check_index(index, residual.size(-1))
        check_device(index, self.raw_m.device, "The index is")
        rows = torch.nn.functional.embedding(index, self.raw_m, sparse=True)
        return self._shaped(self.raw_m_constraint.transform(rows))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return self._rows(residual, index)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return scale_penalty(self._rows(residual, index))


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
