"""SOLVE-GP and tighter SOLVE-GP: inducing points and orthogonal points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import Delta, Distribution, MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy, _VariationalDistribution
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator, RootLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.distributions.kl import kl_divergence, register_kl

from ..conditionals import Conditional
from ..maths.moments import Whitened
from ..maths.solve_gp import join_whitened, orthogonal_cholesky
from ..modes import spans
from .base import TighterStrategy
from .distributions import to_whitened


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
        _check_points(inducing_points, orthogonal_points)
        _check_distributions(inducing_points, orthogonal_points, variational_distribution, orthogonal_distribution)
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

    # -- the two distributions and their joint --------------------------------------------------------------------------

    @property
    def distributions(self) -> tuple[_VariationalDistribution, _VariationalDistribution]:
        """q(u) and q(v)."""
        return self._variational_distribution, self._orthogonal_distribution

    @staticmethod
    def joined(*parts: Whitened) -> Whitened:
        return join_whitened(*parts)

    @property
    def variational_distribution(self) -> Distribution:
        """The joint whitened q(u) q(v), whose KL from ``prior_distribution`` is the sum of theirs."""
        return _join(self._cached_q(0), self._cached_q(1))

    # -- both sets of points ---------------------------------------------------------------------------------------------

    def all_points(self) -> Tensor:
        """Inducing points, then orthogonal points."""
        return torch.cat([self.inducing_points, self.orthogonal_points], dim=-2)

    def factorize(self, matrix: Tensor, factorize: Callable[..., Tensor]) -> Tensor:
        try:
            return orthogonal_cholesky(matrix, self.inducing_points.size(-2), factorize)
        except NotPSDError as error:
            raise NotPSDError(f"{error} {self._describe_closest(matrix)}") from error

    def _describe_closest(self, covar: Tensor) -> str:
        """Name the two points that are most correlated under the prior."""
        num_inducing, num_points = self.inducing_points.size(-2), covar.size(-1)
        stddev = covar.diagonal(dim1=-1, dim2=-2).sqrt()
        correlation = (covar / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2))).abs().nan_to_num(0.0).tril(-1)
        highest, pair = correlation.reshape(-1, num_points * num_points).amax(0).max(-1)
        names = [
            f"inducing point {index}" if index < num_inducing else f"orthogonal point {index - num_inducing}"
            for index in reversed(divmod(int(pair), num_points))
        ]
        return f"Most alike are {names[0]} and {names[1]}, with prior correlation {highest.item():.9g}."

    # -- pseudo-data, for fantasies ---------------------------------------------------------------------------------------

    def _joined(self) -> VariationalStrategy:
        """GPyTorch's strategy on both sets of points with the same q(f)."""
        points, q = self.all_points(), self.whitened()
        joint = CholeskyVariationalDistribution(points.size(-2), self._variational_distribution.batch_shape).to(points)
        joint.variational_mean.data.copy_(q.mean)
        joint.chol_variational_covar.data.copy_(q.root)
        strategy = VariationalStrategy(self.model, points, joint, False, self._jitter_val)
        strategy.variational_params_initialized.fill_(1)
        return strategy

    @property
    def pseudo_points(self) -> tuple[Tensor, Tensor]:
        """Pseudo-data at both sets of points."""
        self._check_pseudo_points(AttributeError)
        return self._joined().pseudo_points


class _JointNormal(MultivariateNormal):
    """Independent blocks as one Gaussian; some of them may be point masses."""

    def __init__(
        self,
        mean: Tensor,
        covariance_matrix: LinearOperator | Tensor,
        validate_args: bool = False,
        *,
        parts: tuple[Distribution, ...] = (),
    ) -> None:
        super().__init__(mean, covariance_matrix, validate_args)
        self.parts = parts


@register_kl(_JointNormal, MultivariateNormal)
def _kl_joint(p: _JointNormal, q: MultivariateNormal) -> Tensor:
    """Sum over the blocks of p where q is independent, each by the rule of its own kind."""
    variance = q.lazy_covariance_matrix
    if not p.parts or not isinstance(variance, DiagLinearOperator):
        return kl_divergence(MultivariateNormal(p.mean, p.lazy_covariance_matrix), q)
    total = p.mean.new_zeros(())
    for part, rows in zip(p.parts, spans(part.mean.size(-1) for part in p.parts), strict=True):
        diagonal = variance.diagonal(dim1=-1, dim2=-2)[..., rows]
        total = total + kl_divergence(part, MultivariateNormal(q.mean[..., rows], DiagLinearOperator(diagonal)))
    return total


def _join(q_u: Distribution, q_v: Distribution) -> Distribution:
    joint = join_whitened(to_whitened(q_u), to_whitened(q_v))
    if joint.root is None and joint.stddev is None:
        return Delta(joint.mean)
    covar = RootLinearOperator(joint.root) if joint.stddev is None else DiagLinearOperator(joint.stddev.square())
    return _JointNormal(joint.mean, covar, parts=(q_u, q_v))


def _check_points(inducing_points: Tensor, orthogonal_points: Tensor) -> None:
    for what in ("dtype", "device"):
        first, second = getattr(inducing_points, what), getattr(orthogonal_points, what)
        if first != second:
            raise TypeError(f"Orthogonal points must have the {what} of the inducing points, {first}; got {second}.")
    first_shape, second_shape = (
        points.shape[:-2] + points.shape[-1:] for points in (inducing_points, orthogonal_points)
    )
    if first_shape != second_shape:
        raise ValueError(
            "Inducing and orthogonal points must differ in their number only, ... x M_u x D and ... x M_v x D; "
            f"got {tuple(inducing_points.shape)} and {tuple(orthogonal_points.shape)}."
        )


def _check_distributions(
    inducing_points: Tensor, orthogonal_points: Tensor, q_u: _VariationalDistribution, q_v: _VariationalDistribution
) -> None:
    if q_u is q_v:
        raise ValueError("q(u) and q(v) need a variational distribution each; got the same object twice.")
    for name, points, q in (("variational", inducing_points, q_u), ("orthogonal", orthogonal_points, q_v)):
        if q.num_inducing_points != points.size(-2):
            raise ValueError(
                f"{name}_distribution is over {q.num_inducing_points} variables for {points.size(-2)} points; "
                f"build it with num_inducing_points={points.size(-2)}."
            )
    if q_u.batch_shape != q_v.batch_shape:
        raise ValueError(
            f"q(u) and q(v) must have one batch shape; got {tuple(q_u.batch_shape)} and {tuple(q_v.batch_shape)}."
        )
