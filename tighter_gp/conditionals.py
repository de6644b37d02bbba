r"""Who chooses the scales :math:`m_n` of q(f|u).

A conditional is chosen by name or as an object: ``TighterVariationalStrategy(..., conditional="beta")``.

=================  =============================  ===================================================================
``"optimal"``      :class:`OptimalConditional`    Gaussian noise: closed form, no parameter, the ELBO brings the noise
``"beta"``         :class:`BetaConditional`       :math:`m_n = \beta/(\beta + d_n)`, one learned :math:`\beta`
``"scalar"``       :class:`ScalarConditional`     one learned :math:`m \le 1`; a strict bound for every likelihood
an object          :class:`PerPoint`              one learned :math:`m_n` a training point
=================  =============================  ===================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from gpytorch import Module
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from .bounds import optimal_scale, optimal_scale_penalty, scale_penalty


class Conditional(Module, ABC):
    r"""Chooses :math:`m_n` given the residual :math:`d_n`.

    :ivar bool is_learned: Whether the scales are set by the model alone. If so the strategy applies them in training,
        if not the objective does, since they depend on the likelihood.
    :ivar bool is_strict: Whether the objective is a lower bound on the evidence for every likelihood.
    """

    is_learned: bool = True
    is_strict: bool = False
    batch_shape: torch.Size = torch.Size()

    @abstractmethod
    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`m_n`, broadcastable to ``residual``."""

    @abstractmethod
    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        r""":math:`-\phi(m_n) \ge 0` a point, broadcastable to ``residual``."""


class OptimalConditional(Conditional):
    r"""The closed form for Gaussian noise, :math:`m_n = \sigma_n^2 / (\sigma_n^2 + d_n)`; has no parameter.

    Only the objective knows the noise, so in training q(f) keeps SVGP's variance :math:`s_n + d_n`, and
    :class:`~gpytorch.mlls.VariationalELBO` on it is plain SVGP.
    """

    is_learned = False
    is_strict = True

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.ones_like(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.zeros_like(residual)


class BetaConditional(Conditional):
    r"""The paper's :math:`m_n = \beta / (\beta + d_n)` with one learned :math:`\beta > 0` a latent function.

    :param batch_shape: One :math:`\beta` for each member of this batch.
    :param beta_prior: Prior on :math:`\beta`.
    :param beta_constraint: Constraint on :math:`\beta`; default :class:`~gpytorch.constraints.Positive`.
    :ivar torch.Tensor beta: :math:`\beta`, shape ``batch_shape``; starts at 1. :math:`\beta \to \infty` is SVGP.
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
        self.register_constraint("raw_beta", beta_constraint if beta_constraint is not None else Positive())
        if beta_prior is not None:
            self.register_prior("beta_prior", beta_prior, lambda m: m.beta, lambda m, v: m._set_beta(v))
        self.beta = torch.ones(())

    @property
    def beta(self) -> Tensor:
        return self.raw_beta_constraint.transform(self.raw_beta)

    @beta.setter
    def beta(self, value: Tensor | float) -> None:
        self._set_beta(value)

    def _set_beta(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_beta)
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
    """

    is_strict = True

    def __init__(self, batch_shape: torch.Size = torch.Size(), scale_prior: Prior | None = None) -> None:
        super().__init__()
        self.batch_shape = torch.Size(batch_shape)
        self.register_parameter("raw_m", torch.nn.Parameter(torch.zeros(self.batch_shape)))
        self.register_constraint("raw_m", Interval(0.0, 1.0))
        if scale_prior is not None:
            self.register_prior("scale_prior", scale_prior, lambda module: module.m, lambda module, v: module._set_m(v))
        self.m = 0.9

    @property
    def m(self) -> Tensor:
        return self.raw_m_constraint.transform(self.raw_m)

    @m.setter
    def m(self, value: Tensor | float) -> None:
        self._set_m(value)

    def _set_m(self, value: Tensor | float) -> None:
        value = _checked_scale(value, self.raw_m)
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
    """

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
        value = _checked_scale(value, self.raw_m).expand(*self.batch_shape, self.num_data)
        rows = value.reshape(self.batch_shape.numel(), self.num_data).mT
        self.initialize(raw_m=self.raw_m_constraint.inverse_transform(rows))

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.mT.reshape(*self.batch_shape, rows.size(-2))

    def _rows(self, residual: Tensor, index: Tensor | None) -> Tensor:
        if index is None:
            raise ValueError(
                "PerPoint needs to know which training points these are: call model(x, index=rows) in training, with "
                "rows the positions of x in the training set."
            )
        if index.dtype not in (torch.int32, torch.int64) or index.shape != residual.shape[-1:]:
            raise ValueError(
                f"PerPoint needs one integer index a row of x, shape ({residual.size(-1)},); "
                f"got {str(index.dtype).removeprefix('torch.')} of shape {tuple(index.shape)}."
            )
        if not index.is_meta and bool(((index < 0) | (index >= self.num_data)).any()):
            raise IndexError(
                f"index must lie in 0..{self.num_data - 1} for PerPoint(num_data={self.num_data}); "
                f"got values from {int(index.min())} to {int(index.max())}."
            )
        rows = torch.nn.functional.embedding(index, self.raw_m, sparse=True)
        return self._shaped(self.raw_m_constraint.transform(rows))

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return self._rows(residual, index)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return scale_penalty(self._rows(residual, index))


def _checked_scale(value: Tensor | float, like: Tensor) -> Tensor:
    value = torch.as_tensor(value).to(like)
    if not bool(((value > 0) & (value < 1)).all()):
        raise ValueError(f"Scales must lie strictly between 0 and 1; got {value.tolist()}.")
    return value


_BY_NAME: dict[str, Callable[[torch.Size], Conditional]] = {
    "optimal": lambda batch_shape: OptimalConditional(),
    "beta": BetaConditional,
    "scalar": ScalarConditional,
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
