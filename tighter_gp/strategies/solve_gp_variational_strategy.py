"""SOLVE-GP and tighter SOLVE-GP: inducing points and orthogonal points."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import Delta, Distribution, MultivariateNormal
from gpytorch.variational import _VariationalDistribution
from linear_operator.operators import DiagLinearOperator, RootLinearOperator
from torch import Tensor

from ..conditionals import Conditional
from ..maths.moments import Whitened
from ..maths.solve_gp import join_whitened
from .base import TighterStrategy


class SolveGPVariationalStrategy(TighterStrategy):
    r"""
    SOLVE-GP (Shi, Titsias and Mnih, 2020): a second set of inducing variables for what the first one leaves.

    The inducing variables :math:`u = f(Z)` explain part of :math:`f`. The orthogonal variables :math:`v` are what
    :math:`u` does not say about :math:`f(O)`: under the prior they are independent of :math:`u`, with covariance
    :math:`C_{vv} = K_{OO} - K_{OZ} K_{ZZ}^{-1} K_{ZO}`, so q(u) and q(v) are two small Gaussians in the place of a large
    one, and nothing larger than either set is factorised. With :math:`A = L_u^{-1} K_{ZX}` and
    :math:`B = L_v^{-1} (K_{OX} - K_{OZ} K_{ZZ}^{-1} K_{ZX})`

    .. math::

        q(f_n) = \mathcal N\bigl(\mu(x_n) + a_n^\top m_u + b_n^\top m_v,\;
        a_n^\top S_u a_n + b_n^\top S_v b_n + m_n d_n\bigr), \qquad d_n = k_{nn} - a_n^\top a_n - b_n^\top b_n

    both whitened. :class:`~gpytorch.mlls.VariationalELBO` has :math:`m_n = 1`, which is SOLVE-GP;
    :class:`~tighter_gp.TighterELBO` gives tighter SOLVE-GP. The same q(f) comes from one set of inducing points
    :math:`Z \cup O` whose whitened covariance is block diagonal; without orthogonal points it is
    :class:`~tighter_gp.TighterVariationalStrategy`.

    :param model: Model this strategy is applied to.
    :param inducing_points: :math:`Z`, shape ``... x M_u x D``.
    :param orthogonal_points: :math:`O`, shape ``... x M_v x D``, with the batch shape of ``inducing_points``.
        :func:`~tighter_gp.inducing.split_inducing_points` makes both from one set.
    :param variational_distribution: The form of q(u): Cholesky, mean-field, delta, natural or tril-natural.
    :param orthogonal_distribution: The form of q(v), of the same batch shape.
    :param learn_inducing_locations: Whether :math:`Z` and :math:`O` are parameters.
    :param jitter_val: Added to :math:`K_{ZZ}` and :math:`K_{OO}`; default
        :class:`~gpytorch.settings.variational_cholesky_jitter`.
    :param conditional: Who chooses :math:`m_n`, as in :class:`~tighter_gp.TighterVariationalStrategy`.
    :ivar torch.Tensor orthogonal_points: :math:`O`.
    :ivar ~tighter_gp.conditionals.Conditional conditional: The conditional.

    Example:
        >>> class MyGP(gpytorch.models.ApproximateGP):
        ...     def __init__(self, inducing_points, orthogonal_points):
        ...         q_u = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        ...         q_v = gpytorch.variational.CholeskyVariationalDistribution(orthogonal_points.size(0))
        ...         strategy = tighter_gp.SolveGPVariationalStrategy(self, inducing_points, orthogonal_points, q_u, q_v)
        ...         super().__init__(strategy)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> points = tighter_gp.inducing.kmeans(torch.rand(100, 2), 8)
        >>> model = MyGP(*tighter_gp.inducing.split_inducing_points(points))
        >>> model(torch.rand(7, 2)).mean.shape
        torch.Size([7])
    """

    def __init__(
        self,
        model: Any,
        inducing_points: Tensor,
        orthogonal_points: Tensor,
        variational_distribution: _VariationalDistribution,
        orthogonal_distribution: _VariationalDistribution,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
        *,
        conditional: str | Conditional = "optimal",
    ) -> None:
        inducing_points, orthogonal_points = (
            points.unsqueeze(-1) if points.dim() == 1 else points for points in (inducing_points, orthogonal_points)
        )
        pairs = (variational_distribution, inducing_points), (orthogonal_distribution, orthogonal_points)
        if variational_distribution is orthogonal_distribution or any(
            q.num_inducing_points != points.size(-2) for q, points in pairs
        ):
            sizes = " and ".join(str(points.size(-2)) for _, points in pairs)
            raise ValueError(f"q(u) and q(v) need a variational distribution each, over {sizes} variables.")
        super().__init__(
            model,
            inducing_points,
            variational_distribution,
            learn_inducing_locations,
            jitter_val,
            conditional=conditional,
        )
        if learn_inducing_locations:
            self.register_parameter("orthogonal_points", torch.nn.Parameter(orthogonal_points.clone()))
        else:
            self.register_buffer("orthogonal_points", orthogonal_points.clone())
        self._orthogonal_distribution = orthogonal_distribution

    @property
    def distributions(self) -> tuple[_VariationalDistribution, _VariationalDistribution]:
        """q(u) and q(v)."""
        return self._variational_distribution, self._orthogonal_distribution

    def whitened(self) -> Whitened:
        """The joint whitened q(u) q(v) as one Gaussian."""
        return join_whitened(*self.q())

    @property
    def variational_distribution(self) -> Distribution:
        """The joint whitened q(u) q(v)."""
        q = self.whitened()
        if q.root is None and q.stddev is None:
            return Delta(q.mean)
        covar = RootLinearOperator(q.root) if q.stddev is None else DiagLinearOperator(q.stddev.square())
        return MultivariateNormal(q.mean, covar)

    def all_points(self) -> Tensor:
        """Inducing points, then orthogonal points."""
        return torch.cat([self.inducing_points, self.orthogonal_points], dim=-2)

    @property
    def pseudo_points(self) -> Any:
        raise AttributeError("GPyTorch's pseudo-points are those of one set; get_fantasy_model does without them.")
