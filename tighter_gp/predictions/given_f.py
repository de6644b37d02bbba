"""p(y | f), the distribution of y at a given value of f: what torch's distributions lack or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Binomial,
    Categorical,
    Distribution,
    Geometric,
    Independent,
    NegativeBinomial,
    Poisson,
    StudentT,
)

from ..maths.quadrature import incomplete_beta


@contextmanager
def unchecked() -> Iterator[None]:
    """Distributions do not look at their parameters: where a link over- or underflows, densities are zero or NaN."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def entries(conditional: Distribution) -> Any:
    """The distribution of each entry of y by itself."""
    return conditional.base_dist if isinstance(conditional, Independent) else conditional


def moments(conditional: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance; of classes those of each indicator."""
    if isinstance(conditional, Categorical):
        return conditional.probs, conditional.probs * (1 - conditional.probs)
    return conditional.mean, conditional.variance


def log_density(conditional: Distribution, y: Tensor) -> Tensor:
    """Log density of y, minus infinity outside the support."""
    with unchecked():
        return torch.where(conditional.support.check(y), conditional.log_prob(y), -torch.inf)  # type: ignore[union-attr]


def density(conditional: Distribution, y: Tensor) -> Tensor:
    """Density of each entry of y by itself."""
    return log_density(entries(conditional), y).exp()


def distribution_function(conditional: Distribution) -> Callable[[Tensor], Tensor] | None:
    """The distribution function of each entry of y, with those that torch lacks; None if there is none."""
    base = entries(conditional)
    if type(base) in _FUNCTIONS:
        return lambda y: _FUNCTIONS[type(base)](base, y)
    if type(base).cdf is Distribution.cdf:
        return None

    def cdf(y: Tensor) -> Tensor:
        inside, mean = base.support.check(y), base.mean
        return torch.where(inside, base.cdf(torch.where(inside, y, mean)), (y > mean).to(mean))

    return cdf


def _student_t(p: StudentT, y: Tensor) -> Tensor:
    t = (y - p.loc) / p.scale
    tail = 0.5 * incomplete_beta(p.df / 2, torch.full_like(p.df, 0.5), p.df / (p.df + t.square()))
    return torch.where(t > 0, 1 - tail, tail)


def _binomial(p: Binomial, y: Tensor) -> Tensor:
    total = p.total_count
    return torch.where(y < total, incomplete_beta((total - y).clamp_min(1), y + 1, 1 - p.probs), 1.0)


_FUNCTIONS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    Beta: lambda p, y: incomplete_beta(p.concentration1, p.concentration0, y.clamp(0, 1)),
    Binomial: _binomial,
    Geometric: lambda p, y: -torch.expm1((y + 1) * torch.log1p(-p.probs)),
    NegativeBinomial: lambda p, y: incomplete_beta(p.total_count, y + 1, 1 - p.probs),
    Poisson: lambda p, y: torch.special.gammaincc((y + 1).expand(p.rate.shape), p.rate),
    StudentT: _student_t,
}
