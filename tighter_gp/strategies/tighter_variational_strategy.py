"""Tighter SVGP: one set of inducing points."""

from __future__ import annotations

from .base import TighterStrategy


class TighterVariationalStrategy(TighterStrategy):
    r"""
    :class:`~gpytorch.variational.VariationalStrategy` whose q(f) can be narrower than the prior at the training points.

    With :math:`A = K_{ZZ}^{-1/2} K_{ZX}`, SVGP's :math:`q(f_n)` has the variance :math:`s_n + d_n`, where
    :math:`s_n = a_n^\top S a_n` and :math:`d_n = k_{nn} - a_n^\top a_n`. The tighter family
    (Bui, Ashman and Turner, 2025) has

    .. math:: q(f_n) = \mathcal N\bigl(\mu(x_n) + a_n^\top m,\; s_n + m_n d_n\bigr)

    at the training points and pays :math:`\tfrac12 \sum_n (m_n - 1 - \log m_n)` for it. Train it with
    :class:`~tighter_gp.TighterELBO`. In eval mode it predicts as
    :class:`~gpytorch.variational.VariationalStrategy` does.

    :param model: Model this strategy is applied to.
    :param inducing_points: :math:`Z`, shape ``... x M x D``.
    :param variational_distribution: The form of q(u): Cholesky, mean-field, delta, natural or tril-natural.
    :param learn_inducing_locations: Whether :math:`Z` is a parameter.
    :param jitter_val: Added to :math:`K_{ZZ}`; default :class:`~gpytorch.settings.variational_cholesky_jitter`.
    :param conditional: Who chooses :math:`m_n`: ``"optimal"`` (the best for any likelihood, no parameter), ``"beta"``,
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
