"""What the tighter strategies share: from a projection and q(u) to q(f)."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import Distribution, MultivariateNormal
from gpytorch.variational import VariationalStrategy, _VariationalDistribution
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

from ..carrier import Carrier, Origin
from ..conditionals import Conditional, make_conditional
from ..conditionals.base import ConditionalAddedLossTerm
from ..maths.bounds import whitened_kl
from ..maths.collapsed import add_identity, collapse
from ..maths.linalg import cholesky, full_precision
from ..maths.moments import Whitened, explained_moments, explained_root
from ..prior import Prior, Projection
from .distributions import is_untouched, set_distribution, standard_normal, whitened
from .fantasies import FantasyGP, fantasy_gp


class TighterStrategy(VariationalStrategy):
    """Base of the strategies of this package. See :class:`TighterVariationalStrategy` for the parameters.

    Example:
        >>> isinstance(model.variational_strategy, tighter_gp.strategies.TighterStrategy)
        True
        >>> model.variational_strategy.project(train_x).residual.shape == train_y.shape
        True
    """

    def __init__(
        self,
        model: Any,
        inducing_points: Tensor,
        variational_distribution: _VariationalDistribution,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
        *,
        conditional: str | Conditional = "optimal",
    ) -> None:
        super().__init__(model, inducing_points, variational_distribution, learn_inducing_locations, jitter_val)
        self.conditional = make_conditional(conditional, variational_distribution.batch_shape, self.inducing_points)
        self._has_q = False  # what variational_params_initialized says, without reading it back from a device

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "conditional":  # at any time: an objective must know that there is a price
            self._added_loss_terms.pop(name, None)
            if value.is_learned:
                self.register_added_loss_term(name)
                self.update_added_loss_term(name, ConditionalAddedLossTerm(self))

    # ---- q(u) -------------------------------------------------------------------------------------------------------

    @property
    def distributions(self) -> tuple[_VariationalDistribution, ...]:
        """The independent factors of q(u), in the order of the rows of A."""
        return (self._variational_distribution,)

    @property
    def prior_distribution(self) -> MultivariateNormal:
        return standard_normal(*self.distributions)

    @property
    def variational_distribution(self) -> Distribution:
        return self._variational_distribution()

    def q(self) -> list[Whitened]:
        """Independent factors of the whitened q, as tensors."""
        return [whitened(distribution) for distribution in self.distributions]

    def whitened(self) -> Whitened:
        """q(w) of all whitened variables together, as tensors."""
        (q,) = self.q()
        return q

    def kl_divergence(self) -> Tensor:
        """KL divergence of q(u) from the prior; for a point mass minus the prior's log density, GPyTorch's convention."""
        return divergence(self.q())

    def set_optimal(self, gram: Tensor, linear: Tensor) -> None:
        r"""Put q(u) at its optimum for Gaussian noise, from sums over the training data.

        The mean is that of all whitened variables together, the covariance of each factor of q(u) that of its own.

        :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, ``... x M x M``.
        :param linear: :math:`\sum_n a_n (y_n - \mu(x_n)) / \sigma_n^2`, ``... x M``.
        """
        mean, start = collapse(gram, linear).weights, 0  # (I + G)^-1 l  [..., M]
        for distribution in self.distributions:
            rows = slice(start, start := start + distribution.num_inducing_points)
            set_distribution(distribution, mean[..., rows], add_identity(gram[..., rows, rows]))
        self.mark_initialized()

    def mark_initialized(self) -> None:
        """After q(u) was set by hand: GPyTorch must not overwrite it at the first call."""
        self.variational_params_initialized.fill_(1)

    def start_from_prior(self) -> None:
        """Start q(u) from the prior at the first call, unless it was set by hand."""
        if self._has_q:
            return
        if not self.updated_strategy:
            raise NotImplementedError(
                "This checkpoint is from before GPyTorch whitened q(u): load it into gpytorch's VariationalStrategy, call that "
                "model once, and save it again."
            )
        if not self.variational_params_initialized:
            for distribution in self.distributions:
                if is_untouched(distribution):
                    distribution.initialize_variational_distribution(standard_normal(distribution))
            self.mark_initialized()
        self._has_q = True

    # ---- the projection ---------------------------------------------------------------------------------------------

    def all_points(self) -> Tensor:
        """Where all inducing variables are."""
        return self.inducing_points

    def prior(self, dtype: torch.dtype | None = None) -> Prior:
        """What turns inputs into (prior mean, A, d).

        :param dtype: Of kernel and projection; default one that suffices.
        """
        points = self.all_points()

        def joint(x: Tensor, **kwargs: Any) -> tuple[Tensor, LinearOperator]:
            batch = torch.broadcast_shapes(points.shape[:-2], x.shape[:-2])
            first, second = points.expand(*batch, -1, -1), x.expand(*batch, -1, -1)  # [..., M, D] and [..., B, D]
            prior = self.model.forward(torch.cat([first, second], dim=-2), **kwargs)  # at M + B points
            return prior.mean[..., points.size(-2) :], prior.lazy_covariance_matrix

        if dtype is None and self.conditional.needs_double and self.training:
            dtype = torch.float64
        return Prior(joint, points.size(-2), self.jitter_val, dtype=dtype)

    def project(self, x: Tensor, *, check: bool = True, **kwargs: Any) -> Projection:
        """Prior mean, A and d at some inputs: one evaluation of the prior, one factorisation, one solve.

        :param x: ``... x B x D``.
        :param check: Whether to look at once if all went well, which waits for an accelerator; else what failed is NaN.
        """
        with full_precision(x.device.type):
            return self.prior()(x, check=check, **kwargs)

    def _cholesky_factor(self, induc_induc_covar: LinearOperator) -> TriangularLinearOperator:
        """For GPyTorch and BoTorch, which pass the prior of the inducing variables without its jitter."""
        matrix = to_dense(induc_induc_covar).double()
        jitter = self.jitter_val * torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
        return TriangularLinearOperator(cholesky(matrix + jitter, "K_ZZ"))

    # ---- q(f) -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Tensor,
        prior: bool = False,
        diag: bool = True,
        *,
        projection: Projection | None = None,
        index: Tensor | None = None,
        **kwargs: Any,
    ) -> MultivariateNormal:
        """q(f) at some inputs.

        :param x: ``... x B x D``.
        :param prior: Whether to return the prior instead.
        :param diag: Not used: covariances are evaluated lazily.
        :param projection: What :meth:`project` returned for these inputs, if it is known: the kernel is not evaluated again.
        :param index: Positions of the points in the training set, for a conditional that needs them.
        """
        if prior:
            return super().__call__(x, prior=True, **kwargs)
        if x.size(-1) != self.inducing_points.size(-1) or x.dim() < 2:
            hint = " Of a single row pass x[None]." if x.dim() < 2 else ""
            raise ValueError(
                f"Inputs must have shape ... x N x {self.inducing_points.size(-1)} like the inducing points; "
                f"got {tuple(x.shape)}.{hint}"
            )
        self.start_from_prior()
        with full_precision(x.device.type):
            return self.forward(x, projection=projection, index=index, **kwargs)

    def forward(
        self,
        x: Tensor,
        *,
        projection: Projection | None = None,
        index: Tensor | None = None,
        **kwargs: Any,
    ) -> MultivariateNormal:
        r"""From (prior mean, A, d) and q(w) to q(f), whose covariance carries :math:`(s, d)`."""
        points = self.prior()(x, **kwargs) if projection is None else projection  # A is [..., M, B]
        q = [whitened(factor).to(points.matrix.dtype) for factor in self.distributions]
        mean, explained = explained_moments(points.matrix, *q)  # A'm and s  [..., B]
        origin = Origin(self, x, index, points, mean, explained, q)
        dtype = points.mean.dtype
        # GPyTorch adds the jitter to the data's diagonal too. It rides in s, so that all bounds pay the same for it.
        location, s = points.mean + mean.to(dtype), explained.to(dtype) + self.jitter_val
        location, s, residual = torch.broadcast_tensors(location, s, points.residual.to(dtype))  # [..., B]
        conditional, kept, learned = self.conditional, residual, []
        if conditional.is_learned and (self.training or index is not None or not conditional.needs_index):
            scale, penalty = conditional.scale(residual, index=index), conditional.penalty(residual, index=index)
            learned = [scale.expand_as(residual), penalty.expand_as(residual)]
            kept = learned[0] * residual if self.training else residual  # m_n d_n
        shape, jitter = (*location.shape, x.size(-2)), self.jitter_val
        whole = lambda: self._covariance(x, points, q, jitter, **kwargs).expand(shape)  # [..., B, B]
        lazy = None if self.training and learned else whole
        return MultivariateNormal(location, Carrier(s + kept, s, residual, *learned, lazy=lazy, origin=origin))

    def _covariance(
        self, x: Tensor, points: Projection, q: list[Whitened], jitter: float, **kwargs: Any
    ) -> LinearOperator:
        r""":math:`K_{XX} + \epsilon I - A^\top A + A^\top S A`."""
        prior = self.model.forward(x, **kwargs).lazy_covariance_matrix
        dtype = points.mean.dtype
        matrix = points.matrix.to(dtype)  # [..., M, B]
        parts = [prior.add_jitter(jitter), MatmulLinearOperator(-matrix.mT, matrix)]
        for rows, part in zip(matrix.split([p.mean.size(-1) for p in q], dim=-2), q, strict=True):
            root = explained_root(rows, part.to(dtype))  # R' A  [..., R, B]
            parts += [] if root is None else [RootLinearOperator(root.mT)]
        return SumLinearOperator(*parts)

    # ---- fantasies --------------------------------------------------------------------------------------------------

    def amortized_exact_gp(self, mean_module: Any = None, covar_module: Any = None) -> FantasyGP:
        """An exact GP with the same q(f), at the parameters of the moment."""
        self.start_from_prior()
        return fantasy_gp(self, mean_module, covar_module)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, mean_module: Any = None, covar_module: Any = None, **kwargs: Any
    ) -> FantasyGP:
        """As in GPyTorch, an exact GP that knows what q(u) knows, and the new observations."""
        return self.amortized_exact_gp(mean_module, covar_module).get_fantasy_model(inputs, targets, **kwargs)


def divergence(q: list[Whitened]) -> Tensor:
    """KL divergence of independent factors of q(w) from the prior; of a point mass minus the prior's log density."""
    parts = [
        0.5 * (part.mean.square() + math.log(2 * math.pi)).sum(-1)
        if part.root is None and part.stddev is None
        else whitened_kl(part)
        for part in q
    ]
    return sum(parts[1:], start=parts[0])


def gp_of(model: Any) -> Any:
    """The GP within a model: the model itself, or its one part with a ``variational_strategy``, such as one behind a network."""
    if hasattr(model, "variational_strategy"):
        return model
    found = [module for module in model.modules() if hasattr(module, "variational_strategy")]
    if len(found) != 1:
        raise TypeError(
            f"Expected a model with a variational_strategy, or a module that holds one such; got {type(model).__name__}, which "
            f"holds {len(found)}."
        )
    return found[0]
