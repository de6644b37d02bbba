r"""Conditionals whose scales are learned."""

from __future__ import annotations

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from ..maths.bounds import optimal_scale, optimal_scale_penalty, scale_penalty
from .base import Conditional


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
        value = torch.as_tensor(value).to(self.raw_beta).expand(self.batch_shape)
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ValueError(f"beta must be positive and finite; got {value.tolist()}. A very large beta gives SVGP.")
        self.initialize(raw_beta=self.raw_beta_constraint.inverse_transform(value))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return optimal_scale(residual, self.beta.reciprocal().unsqueeze(-1))

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return optimal_scale_penalty(residual, self.beta.reciprocal().unsqueeze(-1))


class _Scales(Conditional):
    """Scales between 0 and 1, as parameters of some shape."""

    def __init__(self, batch_shape: torch.Size, shape: tuple[int, ...], scale_prior: Prior | None = None) -> None:
        super().__init__()
        self.batch_shape = torch.Size(batch_shape)
        self.register_parameter("raw_m", torch.nn.Parameter(torch.zeros(shape)))
        self.register_constraint("raw_m", Interval(0.0, 1.0))
        if scale_prior is not None:
            self.register_prior("scale_prior", scale_prior, _get_m, _Scales._set_m)
        self.m = 0.9

    @property
    def m(self) -> Tensor:
        return self.raw_m_constraint.transform(self.raw_m)

    @m.setter
    def m(self, value: Tensor | float) -> None:
        self._set_m(value)

    def _set_m(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_m).expand(self.raw_m.shape)
        if not bool(((value > 0) & (value < 1)).all()):
            raise ValueError(f"Scales must lie strictly between 0 and 1; got {value.tolist()}.")
        self.initialize(raw_m=self.raw_m_constraint.inverse_transform(value))

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return scale_penalty(self.scale(residual, index=index))


class ScalarConditional(_Scales):
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
        super().__init__(batch_shape, tuple(batch_shape), scale_prior)

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return self.m.unsqueeze(-1).expand_as(residual)


class PerPoint(_Scales):
    r"""One learned :math:`m_n` per training point: call ``model(x, index=rows)`` in training.

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
        super().__init__(batch_shape, (*batch_shape, num_data))
        self.num_data = num_data

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        if index is None:
            raise ValueError(
                "PerPoint needs to know which training points these are: call model(x, index=rows) in training, with "
                "rows the positions of x in the training set."
            )
        return self.raw_m_constraint.transform(self.raw_m[..., index])


def _get_beta(module: BetaConditional) -> Tensor:
    return module.beta


def _get_m(module: _Scales) -> Tensor:
    return module.m
