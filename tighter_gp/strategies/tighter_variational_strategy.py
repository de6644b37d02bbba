"""Tighter SVGP: one set of inducing points."""

from __future__ import annotations

from typing import Any

from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator
from linear_operator.operators import (
    DiagLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from ..linalg import project, residual_variance
from ..moments import (
    Moments,
    Whitened,
    add_identity,
    explained_root,
    explained_variance,
    projected_mean,
    whitened_from_gram,
)
from ._tighter_strategy import _TighterStrategy, set_distribution, to_whitened


class TighterVariationalStrategy(_TighterStrategy):
    r"""
    :class:`~gpytorch.variational.VariationalStrategy` whose q(f) can be narrower than the prior at the training points.

    With :math:`A = K_{ZZ}^{-1/2} K_{ZX}`, SVGP's :math:`q(f_n)` has the variance :math:`s_n + d_n`, where
    :math:`s_n = a_n^\top S a_n` and :math:`d_n = k_{nn} - a_n^\top a_n`. The tighter family
    (Bui, Ashman and Turner, 2025) has

    .. math:: q(f_n) = \mathcal N\bigl(\mu(x_n) + a_n^\top m,\; s_n + m_n d_n\bigr)

    at the training points and pays :math:`\tfrac12 \sum_n (m_n - 1 - \log m_n)` for it. Train it with
    :class:`~tighter_gp.TighterELBO`. In eval mode it predicts exactly as
    :class:`~gpytorch.variational.VariationalStrategy` does.

    :param model: Model this strategy is applied to.
    :param inducing_points: :math:`Z`, shape ``... x M x D``.
    :param variational_distribution: The form of q(u): Cholesky, mean-field, delta, natural or tril-natural.
    :param learn_inducing_locations: Whether :math:`Z` is a parameter.
    :param jitter_val: Added to :math:`K_{ZZ}`; default :class:`~gpytorch.settings.variational_cholesky_jitter`.
    :param conditional: Who chooses :math:`m_n`: ``"optimal"`` (Gaussian noise, no parameter), ``"beta"``,
        ``"scalar"``, or a :class:`~tighter_gp.conditionals.Conditional` such as
        :class:`~tighter_gp.conditionals.PerPoint`.
    :ivar ~tighter_gp.conditionals.Conditional conditional: The conditional.

    Example:
        >>> class MyGP(gpytorch.models.ApproximateGP):
        ...     def __init__(self, inducing_points):
        ...         q = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        ...         strategy = tighter_gp.TighterVariationalStrategy(self, inducing_points, q)
        ...         super().__init__(strategy)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> model = MyGP(torch.linspace(0, 1, 5).unsqueeze(-1))
        >>> model(torch.rand(7, 1)).mean.shape
        torch.Size([7])
    """

    def forward(
        self,
        x: Tensor,
        inducing_points: Tensor,
        inducing_values: Tensor,
        variational_inducing_covar: LinearOperator | None = None,
        diag: bool = True,
        *,
        index: Tensor | None = None,
        **kwargs: Any,
    ) -> MultivariateNormal:
        if not self.training:
            return super().forward(x, inducing_points, inducing_values, variational_inducing_covar, diag=diag, **kwargs)
        prior = self._prior_blocks(x, inducing_points, **kwargs)
        projection = project(self._factor(prior.inducing_covar, "K_ZZ"), prior.cross_covar)
        q = to_whitened(self.variational_distribution)
        moments = Moments(
            projected_mean(projection, q),
            explained_variance(projection, q),
            residual_variance(prior.data_covar.diagonal(dim1=-1, dim2=-2), projection),
        )

        def full_covar(scale: Tensor) -> LinearOperator:
            root = explained_root(projection, q)
            explained = ZeroLinearOperator(*prior.data_covar.shape) if root is None else RootLinearOperator(root.mT)
            residual = SumLinearOperator(prior.data_covar, MatmulLinearOperator(-projection.mT, projection))
            if self.conditional.is_learned:
                # Positive semi-definite, with the right diagonal; exactly C = mD where m is one scalar.
                width = DiagLinearOperator(scale.sqrt())
                residual = MatmulLinearOperator(MatmulLinearOperator(width, residual), width)
            return (explained + residual).add_jitter(self.jitter_val)

        return self._training_distribution(prior.mean, moments, index, None if diag else full_covar)

    def projected(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        r"""The prior mean at ``x``, the projection :math:`A` and the prior variance :math:`k_{nn}`."""
        x, inducing_points = self._expand_inputs(x, self.inducing_points)
        prior = self._prior_blocks(x, inducing_points, **kwargs)
        projection = project(self._factor(prior.inducing_covar, "K_ZZ"), prior.cross_covar)
        return prior.mean, projection, prior.data_covar.diagonal(dim1=-1, dim2=-2)

    def whitened(self) -> Whitened:
        """q(w) as tensors."""
        return to_whitened(self.variational_distribution)

    def set_optimal(self, gram: Tensor, linear: Tensor) -> None:
        r"""Put q(u) at its optimum for Gaussian noise, from sums over the training data.

        :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, ``... x M x M``.
        :param linear: :math:`\sum_n a_n (y_n - \mu(x_n)) / \sigma_n^2`, ``... x M``.
        """
        set_distribution(self._variational_distribution, whitened_from_gram(gram, linear).mean, add_identity(gram))
        self._mark_initialized()
