r"""From the distribution of f at a point to that of y, in float64: a mixture of p(y | f) over values of f.

===========================  =====================================================================================
Gaussian of any kind         closed form, with the covariance of the tasks of a point
Bernoulli (probit)           closed form
Laplace, Student-t           mixtures of Gaussians over their scale, by quadrature
noise that depends on x      likewise, over the second function
any other of one function    quadrature over f; densities around the peak of the integrand
softmax, other several       draws of all functions of a point together: Sobol's points, or a product rule for two
===========================  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import torch
from gpytorch import likelihoods
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Distribution,
    Geometric,
    Independent,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
)
from torch.special import log_ndtr, ndtr

from ..draws import seeded
from ..likelihoods import HeteroscedasticGaussianLikelihood
from ..likelihoods.family import family
from ..maths.quadrature import (
    incomplete_beta,
    leading,
    log_expectation,
    mirrored_rule,
    normal_draws,
    normal_rule,
    smallest_integer,
    solve_increasing,
)
from .points import Marginals

_LOG_2PI = math.log(2 * math.pi)


class Density:
    """The distribution of y at each point by itself; here of any likelihood, by draws of all functions of a point.

    :param likelihood: The likelihood, in float64.
    :param f: f at the points, or y with Gaussian noise.
    :param arguments: Further arguments of its ``forward`` at the points.
    :param is_mixture: Whether the first dimension of f counts components of equal weight.
    :param num_draws: Of the functions, where there is no rule for their number.
    :param seed: Of the draws.
    """

    def __init__(
        self,
        likelihood: Any,
        f: Marginals,
        arguments: dict[str, Any],
        is_mixture: bool = False,
        num_draws: int = 1024,
        seed: int = 0,
    ) -> None:
        self.likelihood, self.f, self.arguments, self.is_mixture = likelihood, f, arguments, is_mixture
        self.num_draws, self.seed = num_draws, seed

    def conditional(self, f: Tensor) -> Any:
        """p(y | f)."""
        with unchecked():
            if type(self.likelihood).forward is not likelihoods.SoftmaxLikelihood.forward:
                return self.likelihood.forward(f, **self.arguments)
            # GPyTorch takes as many points as there are functions for the functions: hand over one point at a time.
            return Categorical(logits=self.likelihood.forward(f.unsqueeze(-2)).logits.squeeze(-2))

    def draws(self) -> tuple[Any, Tensor]:
        """p(y | f) at draws of the functions of a point together, in a first dimension, and their log weights, ``K``."""
        nodes, weights = normal_draws(self.num_draws, self.f.mean.size(-1), self.seed)
        nodes = nodes.to(self.f.mean).reshape(len(nodes), *(1 for _ in self.f.mean.shape[:-1]), -1)  # [K, ..., 1, T]
        return self.conditional(self.f.place(nodes)), weights.to(nodes).log()

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """p(y | f) at nodes, in a first dimension, and their log weights, ``K`` or ``K x ... x N``.

        :param p: The nodes are to be dense around this quantile of f.
        """
        return self.draws()

    def log_average(self, log_values: Tensor, log_weights: Tensor) -> Tensor:
        """Logarithm of the mean over nodes, ``K x ...``, and over the components of a mixture."""
        return self.over_components(torch.logsumexp(log_values + leading(log_weights, log_values[0]), 0))

    def over_components(self, log_value: Tensor) -> Tensor:
        """Logarithm of the mean over the components of a mixture."""
        return torch.logsumexp(log_value, 0) - math.log(len(log_value)) if self.is_mixture else log_value

    def average(self, values: Tensor, log_weights: Tensor) -> Tensor:
        """Mean over nodes, ``K x ...``, and over the components of a mixture."""
        value = (values * leading(log_weights, values[0]).exp()).sum(0)
        return value.mean(0) if self.is_mixture else value

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of y; for several classes of the label as a vector of zeros and a one."""
        conditional, log_weights = self.nodes()
        return self.total_moments(*moments(conditional), log_weights)

    def total_moments(self, mean: Tensor, variance: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of a mixture from those of its parts, ``K x ...``."""
        total = self.average(mean, log_weights)  # [..., N]
        # E[Var(y | f)] + Var(E[y | f])
        return total, self.average(variance + (mean - total).square(), log_weights)

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over the tasks observed; where tasks have no densities of their own, over all."""
        conditional, log_weights = self.draws()
        value = log_density(conditional, y)  # [K, ..., N], or [K, ..., N, T] by task
        if conditional.event_shape:
            return torch.where(observed.all(-1), self.log_average(value, log_weights), torch.nan)
        return self.log_average(self.over_tasks(value, observed), log_weights)

    def over_tasks(self, log_prob: Tensor, observed: Tensor) -> Tensor:
        """Sum over the tasks observed, if y has tasks."""
        num_dims = self.f.mean.dim() - self.f.is_several - self.is_mixture
        return torch.where(observed, log_prob, 0.0).sum(-1) if observed.dim() > num_dims else log_prob

    def quantile(self, p: float) -> Tensor:
        """Where the distribution function of each entry of y by itself reaches ``p``."""
        conditional, log_weights = self.nodes(p)
        cdf = distribution_function(conditional)
        if cdf is None:
            with seeded(self.seed, self.f.mean.device):
                draws = self.sample(self.num_draws)
            return draws.sort(0).values[math.ceil(p * len(draws)) - 1]
        below = lambda y: self.average(cdf(y), log_weights)
        place, variance = Density.moments(self)  # over nodes, and so finite: where to look
        if entries(conditional).support.is_discrete:
            return smallest_integer(below, p, place)
        slope = lambda y: self.average(density(conditional, y), log_weights)
        return solve_increasing(lambda y: (below(y), slope(y)), p, place, variance.sqrt())

    def sample(self, num_samples: int) -> Tensor:
        """Draws of y in a first dimension; of a mixture each point has a component of its own."""
        if self.is_mixture:
            points = torch.arange(self.f.num_points, device=self.f.mean.device)
            component = torch.randint(len(self.f.mean), (num_samples, len(points)), device=points.device)
            f = self.f.map(lambda value: value[component, points])
        else:
            f = self.f.map(lambda value: value.expand(num_samples, *value.shape))
        return self.y_of(f.place(torch.randn_like(f.mean)))  # [S, N] or [S, N, T]

    def y_of(self, f: Tensor) -> Tensor:
        """A draw of y given f."""
        return self.conditional(f).sample()


class OneFunction(Density):
    """Any likelihood of one function per entry of y."""

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """Nodes are dense around the quantile of f and its mirror image: y may rise or fall with f."""
        nodes, weights = normal_rule() if p is None else mirrored_rule(NormalDist().inv_cdf(p))
        mean, stddev = self.f.mean, self.f.variance.clamp_min(0).sqrt()  # [..., N] or [..., N, T]
        return self.conditional(mean + stddev * leading(nodes, mean)), weights.to(mean).log()

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """By quadrature; over draws where functions are correlated."""
        if self.f.covariance is not None:
            return super().log_prob(y, observed)
        return self.over_components(self.over_tasks(self.log_prob_of_entries(y), observed))

    def log_prob_of_entries(self, y: Tensor) -> Tensor:
        """By quadrature around the peak of p(y|f) q(f)."""
        return log_expectation(lambda f: log_density(self.conditional(f), y), self.f.mean, self.f.variance)


class Gaussian(OneFunction):
    """Gaussian y, whose moments are given."""

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """One."""
        mean, stddev = self.f.mean.unsqueeze(0), self.f.variance.sqrt().unsqueeze(0)
        return Normal(mean, stddev, validate_args=False), mean.new_zeros(1)

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over the tasks observed."""
        if self.f.covariance is None:
            return super().log_prob(y, observed)
        # A missing task becomes one of mean y and variance one that is independent of the others.
        pairs = observed.unsqueeze(-1) & observed.unsqueeze(-2)  # [..., N, T, T]
        covariance = torch.where(pairs, self.f.covariance, torch.diag_embed((~observed).to(y)))  # [..., N, T, T]
        joint = MultivariateNormal(torch.where(observed, self.f.mean, y), covariance, validate_args=False)
        return self.over_components(joint.log_prob(y) + 0.5 * _LOG_2PI * (~observed).sum(-1))

    def log_prob_of_entries(self, y: Tensor) -> Tensor:
        """In closed form."""
        return self.nodes()[0].log_prob(y).squeeze(0)

    def y_of(self, f: Tensor) -> Tensor:
        """Itself: the noise is in it."""
        return f


class Probit(OneFunction):
    """Two classes with the probit link, in closed form."""

    def link(self) -> Tensor:
        r""":math:`\mu / \sqrt{1 + v}`: the probability of class one is its normal distribution function."""
        return self.f.mean / (1 + self.f.variance).sqrt()

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """One."""
        link = self.link().unsqueeze(0)  # [1, ..., N]
        return Bernoulli(probs=ndtr(link), validate_args=False), link.new_zeros(1)

    def log_prob_of_entries(self, y: Tensor) -> Tensor:
        """The label's own tail, which does not round to zero."""
        return log_ndtr((2 * y - 1) * self.link())


class ScaleMixture(OneFunction):
    """Gaussian noise of a random variance, added to f: its nodes are Gaussians."""

    def log_prob_of_entries(self, y: Tensor) -> Tensor:
        """Over the nodes, which reach as far as the noise does."""
        conditional, log_weights = self.nodes()
        return torch.logsumexp(conditional.log_prob(y) + log_weights, 0)


class StudentTNoise(ScaleMixture):
    r"""Student-t noise: :math:`e^t` has a gamma distribution of mean one."""

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """Over the scale of the noise."""
        half = self.likelihood.deg_free / 2
        log_density = lambda t: half * (t - t.exp())
        width = half.rsqrt().clamp_max(1)
        return _scale_mixture(self.f.mean, self.f.variance, self.likelihood.noise, width, (-80, 8), log_density)

    def moments(self) -> tuple[Tensor, Tensor]:
        """In closed form: tails may be too heavy for nodes."""
        one = self.f.mean.new_zeros(1)  # the log weight of one node
        mean, variance = self.total_moments(self.f.mean.unsqueeze(0), self.f.variance.unsqueeze(0), one)
        noise_mean, noise_variance = student_t_moments(self.likelihood)
        return mean + noise_mean, variance + noise_variance


class LaplaceNoise(ScaleMixture):
    """Laplace noise: its variance has an exponential distribution."""

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """Over the scale of the noise."""
        log_density = lambda t: -t - torch.exp(-t)
        spread = 2 * self.likelihood.noise
        return _scale_mixture(self.f.mean, self.f.variance, spread, torch.ones_like(spread), (-8, 80), log_density)

    def log_prob_of_entries(self, y: Tensor) -> Tensor:
        """In closed form: either side of the kink is an exponential times a normal tail."""
        scale, stddev = self.likelihood.noise.sqrt(), self.f.variance.clamp_min(1e-20).sqrt()
        misfit, ratio = y - self.f.mean, stddev / scale
        # p(y) = exp(r^2 / 2) [exp(-u / b) Phi(u / s - r) + exp(u / b) Phi(-u / s - r)] / 2b, with r = s / b and u the misfit
        above = log_ndtr(misfit / stddev - ratio) - misfit / scale
        below = log_ndtr(-misfit / stddev - ratio) + misfit / scale
        return 0.5 * ratio.square() + torch.logaddexp(above, below) - (2 * scale).log()


class VaryingNoise(ScaleMixture):
    """Gaussian noise whose log variance is the second of two independent functions."""

    def nodes(self, p: float | None = None) -> tuple[Any, Tensor]:
        """Over the second function."""
        (mean, log_noise), (variance, spread) = self.f.mean.unbind(-1), self.f.variance.clamp_min(1e-12).unbind(-1)
        log_density = lambda t: -0.5 * t.square() / spread
        return _scale_mixture(mean, variance, log_noise.exp(), spread.sqrt(), (-40, 40), log_density)


def _scale_mixture(
    mean: Tensor, variance: Tensor, spread: Tensor, width: Tensor, limits: tuple[float, float], log_density: Any
) -> tuple[Normal, Tensor]:
    r"""Gaussians with noise of variance :math:`w\,e^{-t}` at nodes of t, and their log weights, ``K x ... x N`` both.

    :param mean: Of f, ``... x N``; ``variance`` likewise.
    :param spread: :math:`w`.
    :param width: How far t varies around zero: nodes are dense there.
    :param limits: Between which t lies.
    :param log_density: Of t, but for a constant.
    """
    first, last = (torch.asinh(limit / width) for limit in limits)
    fractions = torch.linspace(0, 1, 241, dtype=mean.dtype, device=mean.device)
    places = first + (last - first) * leading(fractions, mean)
    t = width * torch.sinh(places)  # [K, ..., N]
    stddev = (variance + spread * torch.exp(-t)).sqrt()
    log_weights = (torch.cosh(places).log() + log_density(t)).expand(stddev.shape)  # dt = w cosh(place) d(place)
    conditional = Normal(mean.expand(stddev.shape), stddev, validate_args=False)
    return conditional, log_weights - log_weights.logsumexp(0)


def student_t_moments(likelihood: likelihoods.StudentTLikelihood) -> tuple[Tensor, Tensor]:
    """Mean and variance of Student-t noise: no mean for one degree of freedom or fewer, infinite variance for two or fewer."""
    nu = likelihood.deg_free
    mean = torch.where(nu > 1, torch.zeros_like(nu), torch.nan)
    return mean, likelihood.noise * torch.where(nu > 2, nu / (nu - 2), torch.inf)


_CLOSED_FORMS: dict[Any, type[Density]] = {
    likelihoods.BernoulliLikelihood: Probit,
    likelihoods.LaplaceLikelihood: LaplaceNoise,
    likelihoods.StudentTLikelihood: StudentTNoise,
    HeteroscedasticGaussianLikelihood: VaryingNoise,
}


def kind_of(likelihood: Any, f: Marginals) -> type[Density]:
    """The class for a likelihood without Gaussian noise."""
    if isinstance(likelihood, likelihoods.LikelihoodList):
        raise TypeError("A LikelihoodList is for several models; call this with each of them and its own likelihood.")
    for base, kind in _CLOSED_FORMS.items():
        if type(likelihood).forward is base.forward and (kind is not VaryingNoise or f.covariance is None):
            return kind
    return Density if f.is_several and not family(likelihood).has_one_function else OneFunction


# ---- p(y | f): what torch's distributions lack or refuse ---------------------------------------------------------------


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
