"""p(y | f), the distribution of y at a given value of f: what torch's distributions lack or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Binomial,
    Distribution,
    Geometric,
    Independent,
    NegativeBinomial,
    Poisson,
    StudentT,
)

from ..maths.quadrature import incomplete_beta


def conditional_cdf(conditional: Distribution) -> Callable[[Tensor], Tensor] | None:
    """The distribution function of p(y|f), with those that torch lacks; None if there is none.

    :param conditional: p(y|f).
    """
    if isinstance(conditional, Independent):
        return conditional_cdf(conditional.base_dist)
    if isinstance(conditional, Poisson):
        rate = conditional.rate
        return lambda y: torch.special.gammaincc((y + 1).expand(rate.shape), rate)
    if isinstance(conditional, NegativeBinomial):
        count, probs = conditional.total_count, conditional.probs
        return lambda y: incomplete_beta(count, y + 1, 1 - probs)
    if isinstance(conditional, Binomial):
        total, probs = conditional.total_count, conditional.probs
        return lambda y: torch.where(y < total, incomplete_beta((total - y).clamp_min(1), y + 1, 1 - probs), 1.0)
    if isinstance(conditional, Geometric):
        probs = conditional.probs
        return lambda y: -torch.expm1((y + 1) * torch.log1p(-probs))
    if isinstance(conditional, StudentT):
        return lambda y: _student_t_cdf(conditional.df, (y - conditional.loc) / conditional.scale)
    if isinstance(conditional, Beta):
        a, b = conditional.concentration1, conditional.concentration0
        return lambda y: incomplete_beta(a, b, y.clamp(0, 1))
    if type(conditional).cdf is Distribution.cdf:
        return None

    def cdf(y: Tensor) -> Tensor:
        inside, mean = support(conditional).check(y), conditional.mean
        return torch.where(inside, conditional.cdf(torch.where(inside, y, mean)), (y > mean).to(mean))

    return cdf


def _student_t_cdf(df: Tensor, t: Tensor) -> Tensor:
    tail = 0.5 * incomplete_beta(df / 2, torch.full_like(df, 0.5), df / (df + t.square()))
    return torch.where(t > 0, 1 - tail, tail)


def entries(conditional: Distribution) -> Distribution:
    """The distribution of each entry of y by itself."""
    return conditional.base_dist if isinstance(conditional, Independent) else conditional


def support(conditional: Distribution) -> Any:
    """The values that each entry of y can have."""
    return entries(conditional).support


def conditional_density(conditional: Distribution, y: Tensor) -> Tensor:
    """Of each entry of y by itself; zero outside the support."""
    base = entries(conditional)
    inside = support(conditional).check(y)
    return torch.where(inside, base.log_prob(torch.where(inside, y, base.mean)).exp(), 0.0)
