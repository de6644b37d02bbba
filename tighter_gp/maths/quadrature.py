r"""One-dimensional integrals, draws and roots for predictive distributions, in float64, for every point at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_REACH = 256.0  # the interval of log_expectation, in standard deviations
_NUM_NODES = 241  # of its rule
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def leading(values: Tensor, like: Tensor) -> Tensor:
    """A vector as the first dimension in front of those of another tensor; what has these dimensions stays."""
    return values.to(like) if values.dim() > 1 else values.to(like).reshape(-1, *(1 for _ in like.shape))


def log_expectation(log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    r""":math:`\log \mathbb E_{\mathcal N(\mu_n, v_n)}[e^{h(f)}]` for a smooth :math:`h` whose integrand has one peak.

    The peak is found by zooming in, however narrow it is. Around it lie the nodes :math:`z = \hat z + w \sinh t` of a
    trapezoidal rule in :math:`t`: dense within the width :math:`w` of the peak, and far enough out for any tail.

    :param log_function: :math:`h`, from ``K x ...`` to the same shape; NaN counts as :math:`-\infty`.
    :param mean: :math:`\mu_n`, shape ``...``.
    :param variance: :math:`v_n`, like the mean.
    """
    stddev = variance.clamp_min(1e-20).sqrt()

    def log_integrand(z: Tensor) -> Tensor:
        value = log_function(mean + stddev * z) - 0.5 * z.square() - _HALF_LOG_2PI
        return value.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)

    line = lambda start, end, count: leading(torch.linspace(start, end, count, dtype=mean.dtype), mean)
    low, high = torch.full_like(mean, -_REACH), torch.full_like(mean, _REACH)
    for _ in range(10):
        nodes = low + (high - low) * line(0, 1, 17)
        best = log_integrand(nodes).argmax(0, keepdim=True)
        low = nodes.gather(0, (best - 1).clamp_min(0)).squeeze(0)
        high = nodes.gather(0, (best + 1).clamp_max(16)).squeeze(0)
    mode = (low + high) / 2
    # The width: how far on either side to where the integrand has fallen by a factor of sqrt(e).
    steps = 2 * _REACH * 0.5 ** line(0, 41, 42)
    top = log_integrand(mode.unsqueeze(0))
    fallen = [top - log_integrand(mode + sign * steps) >= 0.5 for sign in (-1, 1)]
    width = torch.minimum(*(torch.where(is_low, steps, 2 * _REACH).amin(0) for is_low in fallen))
    first, last = torch.asinh((-_REACH - mode) / width), torch.asinh((_REACH - mode) / width)
    places = first + (last - first) * line(0, 1, _NUM_NODES)
    log_weight = (width * torch.cosh(places) * (last - first) / (_NUM_NODES - 1)).log()
    return torch.logsumexp(log_integrand(mode + width * torch.sinh(places)) + log_weight, dim=0)


def normal_rule(
    centre: float = 0.0, width: float = 0.5, num_nodes: int = 161, reach: float = 37.0
) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights of a rule for :math:`\mathbb E_{\mathcal N(0, 1)}`, densest around one place.

    :param centre: Where the nodes are densest.
    :param width: How far around it.
    :param num_nodes: :math:`K`.
    :param reach: How far the nodes go from zero; for a bounded function 9 will do.
    :return: Nodes and weights that sum to one, both of shape ``K``, in float64.
    """
    first, last = (math.asinh((end - centre) / width) for end in (-reach, reach))
    places = torch.linspace(first, last, num_nodes, dtype=torch.float64)
    nodes = centre + width * torch.sinh(places)
    weights = torch.cosh(places) * torch.exp(-0.5 * nodes.square())
    return nodes, weights / weights.sum()


def mirrored_rule(centre: float, width: float = 0.02) -> tuple[Tensor, Tensor]:
    """:func:`normal_rule` for bounded functions, with nodes densest around a place and around its mirror image."""
    nodes, weights = normal_rule(centre, width, num_nodes=121, reach=9.0)
    # Two shares that sum to one, each with the rule that is dense on its side, and as smooth as the nodes in between allow.
    weights = weights * torch.special.ndtr(8 * nodes / math.copysign(max(abs(centre), width), centre))
    return torch.cat([nodes, -nodes]), torch.cat([weights, weights]) / (2 * weights.sum())


def normal_draws(num_draws: int, num_dims: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Nodes and weights for expectations under a standard normal of several dimensions.

    A product of trapezoidal rules for one or two dimensions, Sobol's points for more.

    :param num_draws: How many of Sobol's points.
    :param num_dims: Dimensions.
    :param seed: Of the scrambling of Sobol's points.
    :return: Nodes, ``K x num_dims``, and weights that sum to one, ``K``, in float64.
    """
    if num_dims <= 2:
        count = 64 if num_dims == 2 else 241
        line = torch.linspace(-7.5, 7.5, count, dtype=torch.float64)
        nodes = torch.cartesian_prod(*[line] * num_dims).reshape(-1, num_dims)
        weights = torch.exp(-0.5 * nodes.square().sum(-1))
        return nodes, weights / weights.sum()
    return sobol_normal(num_draws, num_dims, seed), torch.full((num_draws,), 1 / num_draws, dtype=torch.float64)


def sobol_normal(num_draws: int, num_dims: int, seed: int | None) -> Tensor:
    """Scrambled Sobol's points mapped to standard normal ones, ``K x num_dims``, in float64."""
    engine = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=seed)
    uniform = engine.draw(num_draws, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return torch.special.ndtri(uniform)


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    r"""The regularised incomplete beta function :math:`I_x(a, b)`, by its continued fraction.

    :param a: :math:`a > 0`.
    :param b: :math:`b > 0`.
    :param x: :math:`0 \le x \le 1`.
    """
    a, b, x = torch.broadcast_tensors(a, b, x)
    flipped = x > (a + 1) / (a + b + 2)
    a, b, x = torch.where(flipped, b, a), torch.where(flipped, a, b), torch.where(flipped, 1 - x, x)
    tiny = torch.finfo(x.dtype).tiny ** 0.5
    guarded = lambda value: torch.where(value.abs() < tiny, torch.full_like(value, tiny), value)
    # Lentz's method: the fraction is the product of c d.
    c = torch.ones_like(x)
    d = guarded(1 - (a + b) * x / (a + 1)).reciprocal()
    fraction = d
    for m in range(1, 2000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = guarded(1 + factor * d).reciprocal()
            c = guarded(1 + factor / c)
            fraction = fraction * c * d
        if m % 8 == 0 and bool(((c * d - 1).abs() < 4 * torch.finfo(x.dtype).eps).all()):
            break
    log_front = torch.xlogy(a, x) + b * torch.log1p(-x) - torch.lgamma(a) - torch.lgamma(b) + torch.lgamma(a + b)
    value = torch.exp(log_front) * fraction / a
    return torch.where(flipped, 1 - value, value).clamp(0, 1)


def solve_increasing(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], target: float, start: Tensor, scale: Tensor
) -> Tensor:
    """Where an increasing function reaches a value: Newton's method within a bracket that halves if it must.

    :param function: Value and slope at a point.
    :param target: The value.
    :param start: A place to start from.
    :param scale: A distance over which the function changes.
    """
    low, high, step = start - scale, start + scale, scale
    for _ in range(1000):
        too_high, too_low = function(low)[0] > target, function(high)[0] < target
        if not bool((too_high | too_low).any()):
            break
        step = 2 * step
        low, high = torch.where(too_high, low - step, low), torch.where(too_low, high + step, high)
    y, previous = start.clamp(low, high), torch.full_like(start, torch.inf)
    for _ in range(200):
        value, slope = function(y)
        error = value - target
        low, high = torch.where(error < 0, y, low), torch.where(error < 0, high, y)
        newton = y - error / slope
        # Halve the bracket where Newton's step leaves it, or where the last step gained little.
        usable = (newton > low) & (newton < high) & (error.abs() < 0.5 * previous)
        following = torch.where(usable, newton, (low + high) / 2)
        done = ((following - y).abs() <= 1e-13 * y.abs()) | (error.abs() <= 1e-12)
        following = torch.where(done, y, following)
        y, previous = following, error.abs()
        if bool(done.all()):
            break
    return y


def smallest_integer(function: Callable[[Tensor], Tensor], target: float, start: Tensor) -> Tensor:
    """The smallest integer from 0 at which an increasing function reaches a value.

    :param function: The function.
    :param target: The value.
    :param start: Roughly where.
    """
    target = target - 1e-12  # a value that is reached up to rounding is reached
    low, high = torch.full_like(start, -1), start.clamp_min(1).ceil()
    for _ in range(60):
        short = function(high) < target
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    for _ in range(70):
        if bool((high - low <= 1).all()):
            break
        middle = ((low + high) / 2).floor().clamp_min(0)
        reached = function(middle) >= target
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
