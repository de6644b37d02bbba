r"""The best scales at the current q, without a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..maths.bounds import optimal_scale, optimal_scale_penalty
from .base import Conditional, Within

# Logarithms of scales beyond which nothing changes in any precision.
_LEAST_LOG_SCALE = -80.0


class OptimalConditional(Conditional):
    r"""The best scale of each point at the current q, for every likelihood; has no parameter.

    .. math:: m_n = \frac{1}{1 + \lambda_n d_n}, \qquad
              \lambda_n = \mathbb E_{\mathcal N(\mu_n,\, s_n + m_n d_n)}
              \Bigl[-\frac{\partial^2 \log p(y_n \mid f)}{\partial f^2}\Bigr]

    For Gaussian noise :math:`\lambda_n = 1/\sigma_n^2`, so that :math:`m_n = \sigma_n^2/(\sigma_n^2 + d_n)`. For other
    likelihoods this is where the derivative of the objective in :math:`m_n` vanishes. It is solved by a fixed number of
    bracketed steps and detached: at the solution :math:`m_n` has no part in the gradient.

    Only the objective knows the likelihood, so in training q(f) keeps SVGP's variance :math:`s_n + d_n`, and
    :class:`~gpytorch.mlls.VariationalELBO` on it is plain SVGP. Where :math:`\lambda_n < 0` at :math:`m_n = 1`, the
    likelihood asks for more variance, not less, and :math:`m_n` stays 1 as in SVGP.

    The objective is a strict bound for log-concave likelihoods, where all :math:`m_n \le 1` are, and an approximation
    for others. In a hidden layer of a deep GP :math:`m = 1`.

    :param num_steps: Number of evaluations of :math:`\lambda_n` after the first; for Gaussian noise there is none.

    Example:
        >>> conditional = tighter_gp.conditionals.OptimalConditional()
        >>> conditional.solve(torch.tensor([0.0, 1.0, 3.0]), lambda m: torch.full_like(m, 0.5))  # a constant curvature
        tensor([1.0000, 0.6667, 0.4000])
    """

    is_learned = False

    def __init__(self, num_steps: int = 5) -> None:
        super().__init__()
        self.num_steps = num_steps

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.ones_like(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        return torch.zeros_like(residual)

    def optimum(
        self, residual: Tensor, precision: Tensor, within: Within | None = None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""The best conditional where the expected log likelihood falls with the variance at rate :math:`\lambda_n/2`.

        :param residual: :math:`d_n`, ``... x B``.
        :param precision: :math:`\lambda_n \ge 0`, broadcastable to ``residual``; :math:`1/\sigma_n^2` for Gaussian noise.
        :param within: :math:`D` within sets of points of the batch.
        :param index: Positions of the batch in the training set.
        :return: What it leaves of the residual variance, :math:`m_n d_n`, and the penalty :math:`-\phi(m_n)` per point.
        """
        return residual * optimal_scale(residual, precision), optimal_scale_penalty(residual, precision)

    @torch.no_grad()
    def solve(self, residual: Tensor, curvature: Callable[[Tensor], Tensor], num_steps: int | None = None) -> Tensor:
        r"""Solve :math:`m = 1 / (1 + \lambda(m) d)` for each point.

        With :math:`x = \log m` this is the root of :math:`h(x) = x + \log(1 + \lambda(e^x) d)`, which is not negative at
        :math:`x = 0`. The step :math:`x - h(x)` is repeated until it passes the root, and then regula falsi (with
        Illinois weights) between the nearest points on either side.

        :param residual: :math:`d_n`, ``... x B``.
        :param curvature: :math:`\lambda_n` as a function of all :math:`m_n`.
        :param num_steps: Instead of this conditional's own.
        :return: :math:`m_n`, without a graph.
        """

        def excess(x: Tensor) -> Tensor:
            return x + torch.log1p((curvature(x.exp()) * residual).clamp_min(0)).clamp_max(-_LEAST_LOG_SCALE)

        above = torch.zeros_like(residual)  # x = log m = 0  [..., B]
        excess_above = excess(above)  # h(x) >= 0
        below = excess_below = torch.zeros_like(above)  # until one is found
        is_bracketed = was_below = torch.zeros_like(above, dtype=torch.bool)
        x = above - excess_above  # x - h(x), which may pass the root
        for _ in range(num_steps or self.num_steps):
            value = excess(x)
            is_below = value < 0
            # Illinois: an end that stays put twice counts half, so that it too moves next time.
            stuck = is_bracketed & (is_below == was_below)
            halved = [torch.where(stuck, 0.5 * end, end) for end in (excess_above, excess_below)]
            excess_above = torch.where(is_below, halved[0], value)
            excess_below = torch.where(is_below, value, halved[1])
            above, below = torch.where(is_below, above, x), torch.where(is_below, x, below)
            is_bracketed, was_below = is_bracketed | is_below, is_below
            secant = (above - below) / (excess_above - excess_below)  # slope of regula falsi
            x = (above - excess_above * torch.where(is_bracketed, secant, 1.0)).clamp_min(_LEAST_LOG_SCALE)
        return x.exp()
