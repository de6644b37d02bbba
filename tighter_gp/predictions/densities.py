r"""From the distribution of f at a point to that of y: one class per kind of likelihood, in float64.

===========================  =====================================================================================
Gaussian of any kind         closed form, with the covariance of the tasks of a point
Bernoulli (probit)           closed form
Laplace, Student-t           mixtures of Gaussians over their scale, by quadrature
any other of one function    quadrature over f, around the peak of the integrand
softmax, other several       draws of all functions of a point together: Sobol's points, or a product rule for two
===========================  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from gpytorch import likelihoods
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.special import log_ndtr, ndtr

from ..likelihoods import HeteroscedasticGaussianLikelihood
from ..likelihoods.family import family
from ..maths.quadrature import log_expectation, log_integral, mirrored_rule, normal_draws, normal_rule
from .given_f import density, distribution_function, entries, log_density, unchecked
from .points import Marginals

_LOG_2PI = math.log(2 * math.pi)

# Value and slope of a distribution function.
DistributionFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


class Density:
    """The distribution of y at each point by itself, a mixture over values of f.

    :param likelihood: The likelihood, in float64.
    :param f: f at the points, or y with Gaussian noise.
    :param arguments: Further arguments of its ``forward`` at the points.
    :param num_draws: Of the functions, where there is no rule for their number.
    :param seed: Of the draws.
    """

    is_discrete = False
    has_classes = False

    def __init__(
        self,
        likelihood: Any,
        f: Marginals,
        arguments: dict[str, Any] | None = None,
        num_draws: int = 1024,
        seed: int = 0,
    ) -> None:
        self.likelihood, self.f, self.arguments = likelihood, f, arguments or {}
        self.num_draws, self.seed = num_draws, seed

    def conditional(self, f: Tensor) -> Any:
        """p(y | f)."""
        with unchecked():
            return self.likelihood.forward(f, **self.arguments)

    def draws(self) -> tuple[Any, Tensor]:
        """p(y | f) at draws of the functions of a point together, in a first dimension, and their weights."""
        nodes, weights = normal_draws(self.num_draws, self.f.mean.size(-1), self.seed)
        nodes = nodes.to(self.f.mean).reshape(len(nodes), *(1 for _ in self.f.mean.shape[:-1]), -1)  # [K, ..., 1, T]
        return self.conditional(self.f.place(nodes)), weights.to(nodes)

    def mixture(self, p: float | None = None) -> tuple[Any, Tensor]:
        """p(y | f) at nodes, in a first dimension, and their weights.

        :param p: The nodes are to be dense around this quantile of f.
        """
        conditional, weights = self.draws()
        return conditional, weights.reshape(-1, *(1 for _ in conditional.mean.shape[1:]))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        conditional, weights = self.mixture()
        mean = (weights * conditional.mean).sum(0)
        return mean, (weights * (conditional.variance + (conditional.mean - mean).square())).sum(0)

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over what is observed there; an observation missing in part counts as missing."""
        conditional, weights = self.draws()
        value = log_mean(log_density(conditional, y), weights)
        return value if observed.dim() == value.dim() else torch.where(observed.all(-1), value, torch.nan)

    def distribution_function(self, p: float) -> DistributionFunction | None:
        """Of each entry of y by itself, most accurate around its quantile ``p``; None if it must be sampled."""
        conditional, weights = self.mixture(p)
        cdf = distribution_function(conditional)
        if cdf is None:
            return None

        def function(y: Tensor) -> tuple[Tensor, Tensor]:
            value = (weights * cdf(y)).sum(0)
            return value, value if self.is_discrete else (weights * density(conditional, y)).sum(0)

        return function

    def around(self) -> tuple[Tensor, Tensor]:
        """Where to look for quantiles: a place and a distance."""
        mean, variance = self.moments()
        return mean, variance.sqrt()

    def sample(self) -> Tensor:
        """One draw of y."""
        return self.conditional(self.f.place(torch.randn_like(self.f.mean))).sample()


class Gaussian(Density):
    """Gaussian y, whose moments are given."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        return self.f.mean, self.f.variance

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over what is observed there."""
        if self.f.covariance is None:
            return _over_tasks(self._log_prob(y), self.f, observed)
        # A missing task becomes one of mean y and variance one that is independent of the others.
        pairs = observed.unsqueeze(-1) & observed.unsqueeze(-2)
        covariance = torch.where(pairs, self.f.covariance, torch.diag_embed((~observed).to(y)))
        difference = torch.where(observed, y - self.f.mean, 0.0)
        root = torch.linalg.cholesky(covariance)  # [..., N, T, T]
        white = torch.linalg.solve_triangular(root, difference.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = 2 * root.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return -0.5 * (white.square().sum(-1) + log_det + _LOG_2PI * observed.sum(-1))

    def _log_prob(self, y: Tensor) -> Tensor:
        return _normal_log_prob(y - self.f.mean, self.f.variance)

    def distribution_function(self, p: float) -> DistributionFunction:
        """Of each entry of y by itself."""
        stddev = self.f.variance.sqrt()
        return lambda y: (ndtr((y - self.f.mean) / stddev), self._log_prob(y).exp())

    def sample(self) -> Tensor:
        """One draw of y."""
        return self.f.place(torch.randn_like(self.f.mean))


class OneFunction(Density):
    """Any likelihood of one function per entry of y."""

    def mixture(self, p: float | None = None) -> tuple[Any, Tensor]:
        """Nodes are dense around the quantile of f and its mirror image: y may rise or fall with f."""
        rule = normal_rule() if p is None else mirrored_rule(NormalDist().inv_cdf(p), 0.02, num_nodes=121, reach=9)
        nodes, weights = (part.to(self.f.mean).reshape(-1, *(1 for _ in self.f.mean.shape)) for part in rule)
        return self.conditional(self.f.mean + self.f.variance.clamp_min(0).sqrt() * nodes), weights

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """By quadrature; over draws where functions are correlated."""
        if self.f.covariance is None:
            return _over_tasks(self._log_prob(y), self.f, observed)
        conditional, weights = self.draws()
        return log_mean(torch.where(observed, log_density(conditional, y), 0.0).sum(-1), weights)

    def _log_prob(self, y: Tensor) -> Tensor:
        """By quadrature around the peak of p(y|f) q(f)."""
        return log_expectation(lambda f: log_density(self.conditional(f), y), self.f.mean, self.f.variance)


class Count(OneFunction):
    """The same, of integers."""

    is_discrete = True


class ScaleMixture(OneFunction):
    r"""Gaussian noise of variance :math:`w\,e^{-t}` with a random t, added to f.

    :ivar spread: :math:`w`.
    :ivar limits: Between which t lies.
    :ivar width: How far t varies.
    """

    limits = -80.0, 8.0

    @property
    def spread(self) -> Tensor:
        """:math:`w`."""
        return self.likelihood.noise

    @property
    def width(self) -> Tensor:
        """How far t varies."""
        return (2 / self.likelihood.deg_free).sqrt().clamp_max(1)

    def log_weight(self, t: Tensor) -> Tensor:
        """Log density of t: for Student-t :math:`e^t` has a gamma distribution of mean one."""
        half = self.likelihood.deg_free / 2
        return half * half.log() - torch.lgamma(half) + half * (t - t.exp())

    def noise(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        return student_t_moments(self.likelihood)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        mean, variance = self.noise()
        return self.f.mean + mean, self.f.variance + variance

    def around(self) -> tuple[Tensor, Tensor]:
        """Where to look for quantiles."""
        return self.f.mean, (self.f.variance + self.spread).sqrt()

    def _log_prob(self, y: Tensor) -> Tensor:
        """By quadrature over t."""

        def integrand(t: Tensor) -> Tensor:
            return self.log_weight(t) + _normal_log_prob(y - self.f.mean, self.f.variance + self.spread * torch.exp(-t))

        low, high = (torch.full_like(self.f.mean + y, limit) for limit in self.limits)
        return log_integral(integrand, low, high)

    def distribution_function(self, p: float) -> DistributionFunction:
        """Of each entry of y by itself."""
        low, high = (torch.asinh(limit / self.width) for limit in self.limits)
        fractions = torch.linspace(0, 1, 161, dtype=self.f.mean.dtype, device=self.f.mean.device)
        places = low + (high - low) * fractions.reshape(-1, *(1 for _ in self.f.mean.shape))
        t = self.width * torch.sinh(places)
        weights = torch.cosh(places) * self.log_weight(t).exp()
        weights = weights / weights.sum(0)
        variance = self.f.variance + self.spread * torch.exp(-t)  # [K, ..., N]

        def function(y: Tensor) -> tuple[Tensor, Tensor]:
            misfit = y - self.f.mean
            slope = (weights * _normal_log_prob(misfit, variance).exp()).sum(0)
            return (weights * ndtr(misfit / variance.sqrt())).sum(0), slope

        return function


def student_t_moments(likelihood: likelihoods.StudentTLikelihood) -> tuple[Tensor, Tensor]:
    """Mean and variance of Student-t noise: no mean for one degree of freedom or fewer, infinite variance for two or fewer."""
    nu = likelihood.deg_free
    mean = torch.where(nu > 1, torch.zeros_like(nu), torch.nan)
    return mean, likelihood.noise * torch.where(nu > 2, nu / (nu - 2), torch.inf)


class Laplace(ScaleMixture):
    """Laplace noise: its variance has an exponential distribution."""

    limits = -8.0, 80.0
    width = torch.ones(())

    @property
    def spread(self) -> Tensor:
        """:math:`w`."""
        return 2 * self.likelihood.noise

    def log_weight(self, t: Tensor) -> Tensor:
        """Log density of t."""
        return -t - torch.exp(-t)

    def noise(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        return torch.zeros_like(self.spread), self.spread


class VaryingNoise(ScaleMixture):
    """Gaussian noise whose log variance is the second of two functions."""

    limits = -40.0, 40.0

    def __init__(self, likelihood: Any, f: Marginals, *rest: Any) -> None:
        super().__init__(likelihood, Marginals(f.mean[..., 0], f.variance[..., 0]), *rest)
        self.log_noise = f.mean[..., 1], f.variance[..., 1].clamp_min(1e-12)

    @property
    def spread(self) -> Tensor:
        """:math:`w`."""
        return self.log_noise[0].exp()

    @property
    def width(self) -> Tensor:
        """How far t varies."""
        return self.log_noise[1].sqrt()

    def log_weight(self, t: Tensor) -> Tensor:
        """Log density of t, minus what g differs from its mean by."""
        return _normal_log_prob(t, self.log_noise[1])

    def sample(self) -> Tensor:
        """A draw of y for each entry of f."""
        mean, variance = self.log_noise
        f = self.f.place(torch.randn_like(self.f.mean))
        log_noise = mean + variance.sqrt() * torch.randn_like(f)
        return f + (0.5 * log_noise).exp() * torch.randn_like(f)

    def noise(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        mean, variance = self.log_noise
        return torch.zeros_like(mean), (mean + variance / 2).exp()


class Binary(OneFunction):
    """Two classes, any link."""

    has_classes = True

    def log_probs(self) -> Tensor:
        """Of the classes 0 and 1, ``... x 2``."""
        labels = torch.zeros_like(self.f.mean), torch.ones_like(self.f.mean)
        return torch.stack([OneFunction._log_prob(self, label) for label in labels], -1)

    def _log_prob(self, y: Tensor) -> Tensor:
        return self.log_probs().gather(-1, (y > 0).long().expand(self.f.mean.shape).unsqueeze(-1)).squeeze(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        probs = self.log_probs().exp()
        return probs[..., 1], probs.prod(-1)


class Probit(Binary):
    """Two classes with the probit link, in closed form."""

    def log_probs(self) -> Tensor:
        """Of the classes 0 and 1, ``... x 2``."""
        link = self.f.mean / (1 + self.f.variance).sqrt()
        return torch.stack([log_ndtr(-link), log_ndtr(link)], -1)


class Classes(Density):
    """Several classes, by draws of all functions of a point together."""

    has_classes = True

    def conditional(self, f: Tensor) -> Any:
        """p(y | f)."""
        if not isinstance(self.likelihood, likelihoods.SoftmaxLikelihood):
            return super().conditional(f)
        # GPyTorch takes as many points as there are functions for the functions: hand over one point at a time.
        return Categorical(logits=super().conditional(f.unsqueeze(-2)).logits.squeeze(-2))

    def log_probs(self) -> Tensor:
        """Of each class, ``... x N x C``."""
        conditional, weights = self.draws()
        return log_mean(conditional.logits, weights)

    def log_prob(self, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over what is observed there."""
        log_probs = self.log_probs()
        return log_probs.gather(-1, y.long().expand(log_probs.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Of the label as a vector of zeros and a one."""
        probs = self.log_probs().exp()
        return probs, probs * (1 - probs)


_CLOSED_FORMS: tuple[tuple[Any, type[Density]], ...] = (
    (likelihoods.BernoulliLikelihood, Probit),
    (likelihoods.LaplaceLikelihood, Laplace),
    (likelihoods.StudentTLikelihood, ScaleMixture),
    (likelihoods.SoftmaxLikelihood, Classes),
    (HeteroscedasticGaussianLikelihood, VaryingNoise),
)


def kind_of(likelihood: Any, f: Marginals, arguments: dict[str, Any]) -> type[Density]:
    """The class for a likelihood without Gaussian noise; one of your own is known by the distribution that ``forward`` returns.

    :param f: f at a point or more, in float64, to try ``forward`` on.
    :param arguments: Further arguments of ``forward`` for these points.
    """
    for base, kind in _CLOSED_FORMS:
        if type(likelihood).forward is base.forward:
            return kind
    if isinstance(likelihood, likelihoods.LikelihoodList):
        raise TypeError("A LikelihoodList is for several models; call this with each of them and its own likelihood.")
    base = entries(likelihood.forward(f.mean.unsqueeze(0), **arguments))
    if isinstance(base, Categorical):
        return Classes
    if f.is_several and not family(likelihood).has_one_function:
        return Density
    if isinstance(base, Bernoulli):
        return Binary
    return Count if base.support.is_discrete else OneFunction


def log_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Logarithm of a weighted mean over the first dimension."""
    return torch.logsumexp(values + weights.to(values).log().reshape(-1, *(1 for _ in values.shape[1:])), dim=0)


def _normal_log_prob(misfit: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (misfit.square() / variance + variance.log() + _LOG_2PI)


def _over_tasks(log_prob: Tensor, f: Marginals, observed: Tensor) -> Tensor:
    """Sum over the observed tasks, which are independent."""
    return torch.where(observed, log_prob, 0.0).sum(-1) if f.is_several else log_prob
