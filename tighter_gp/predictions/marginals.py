r"""From the distribution of f at a point to that of y: one class per kind of likelihood, in float64.

===========================  =====================================================================================
Gaussian of any kind         closed form, with the covariance of the tasks of a point
Laplace, Bernoulli (probit)  closed form
Student-t                    a mixture of Gaussians over its scale, by quadrature
any other of one function    quadrature over f, around the peak of the integrand
softmax, Dirichlet, others   draws of all functions of a point together: Sobol's points, or a product rule for two
===========================  =====================================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import torch
from gpytorch import likelihoods
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution
from torch.special import log_ndtr, ndtr

from ..likelihoods.properties import has_one_function
from ..maths.quadrature import log_expectation, log_integral, mirrored_rule, normal_draws, normal_rule
from .given_f import conditional_cdf, conditional_density, entries, support
from .pointwise import FunctionValues, takes_noise

_LOG_2PI = math.log(2 * math.pi)

# Value and slope of a distribution function.
DistributionFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


@contextmanager
def _unchecked_parameters() -> Iterator[None]:
    """Distributions are made without a look at their parameters, for the length of the block."""
    before, Distribution._validate_args = Distribution._validate_args, False
    try:
        yield
    finally:
        Distribution._validate_args = before


class Marginal(ABC):
    """The distribution of y at a point by itself, given that of f. Methods take f at some points, in float64, and y without
    its missing values.

    :param likelihood: The likelihood, in float64.
    :param arguments: Further arguments of its ``forward``, such as one value per point.
    :param num_draws: Of the functions, where there is no rule for their number.
    :param seed: Of the draws.
    :ivar bool is_discrete: Whether y is an integer.
    """

    is_discrete = False

    def __init__(
        self, likelihood: Any, arguments: dict[str, Any] | None = None, num_draws: int = 1024, seed: int = 0
    ) -> None:
        self.likelihood, self.arguments = likelihood, arguments or {}
        self.num_draws, self.seed = num_draws, seed

    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f), also where a link function over- or underflows: there densities are zero or NaN."""
        try:
            return self.likelihood.forward(f, **self.arguments)
        except ValueError:  # by torch's look at parameters, or by the likelihood, which then says it again
            with _unchecked_parameters():
                return self.likelihood.forward(f, **self.arguments)

    @abstractmethod
    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""

    @abstractmethod
    def log_prob(self, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """Log density per point, joint over what is observed there."""

    @abstractmethod
    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction | None:
        """Of each entry by itself, most accurate around its quantile ``p``; None if it must be sampled."""

    def around(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Where to look for quantiles: a place and a distance."""
        mean, variance = self.moments(f)
        return mean, variance.sqrt()

    def sample(self, f: FunctionValues) -> Tensor:
        """One draw of y."""
        return self.conditional(f.draw()).sample()


class GaussianMarginal(Marginal):
    """Gaussian y, whose moments are given."""

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Those of y, as given."""
        return f.mean, f.variance

    def log_prob(self, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """By a Cholesky factor of the covariance of the observed tasks where they are correlated."""
        if f.covariance is None:
            return _over_tasks(self.elementwise(f, y), f, observed)
        # A missing task becomes one of mean y and variance one that is independent of the others.
        both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
        covariance = torch.where(both, f.covariance, torch.diag_embed((~observed).to(f.mean.dtype)))
        difference = torch.where(observed, y - f.mean, 0.0)
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, difference.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = 2 * root.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return -0.5 * (white.square().sum(-1) + log_det + _LOG_2PI * observed.sum(-1))

    def elementwise(self, f: FunctionValues, y: Tensor) -> Tensor:
        """The normal density."""
        return -0.5 * ((y - f.mean).square() / f.variance + f.variance.log() + _LOG_2PI)

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction:
        """The normal one."""
        stddev = f.variance.sqrt()
        return lambda y: (ndtr((y - f.mean) / stddev), self.elementwise(f, y).exp())

    def sample(self, f: FunctionValues) -> Tensor:
        """Of all tasks of a point together."""
        return f.draw()


class OneFunctionMarginal(Marginal):
    """Any likelihood of one function per entry of y: quadrature over f."""

    def __init__(self, *args: Any, is_discrete: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_discrete = is_discrete

    def _mixture(self, f: FunctionValues, rule: tuple[Tensor, Tensor]) -> tuple[Distribution, Tensor]:
        """p(y | f) at the nodes of a rule, in a first dimension, and their weights."""
        nodes, weights = (part.to(f.mean).reshape(-1, *(1 for _ in f.mean.shape)) for part in rule)
        return self.conditional(f.mean + f.variance.clamp_min(0).sqrt() * nodes), weights

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """By quadrature."""
        conditional, weights = self._mixture(f, normal_rule())
        return _total_moments(conditional, weights)

    def log_prob(self, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """With draws of all functions of a point together where they are correlated."""
        if f.covariance is None:
            return _over_tasks(self.elementwise(f, y), f, observed)
        nodes, weights = normal_draws(self.num_draws, f.mean.size(-1), self.seed)
        samples = f.place(_in_front(nodes, f))
        log_prob = torch.where(observed, self.conditional(samples).log_prob(y), 0.0).sum(-1)
        return _log_mean(log_prob, weights)

    def elementwise(self, f: FunctionValues, y: Tensor) -> Tensor:
        """By quadrature around the peak of p(y|f) q(f)."""
        return log_expectation(lambda nodes: self.conditional(nodes).log_prob(y), f.mean, f.variance)

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction | None:
        """By quadrature, with nodes around the quantile of f, whether y rises or falls with it."""
        centre = NormalDist().inv_cdf(p)
        conditional, weights = self._mixture(f, mirrored_rule(centre, width=0.02, num_nodes=121, reach=9))
        cdf = conditional_cdf(conditional)
        if cdf is None:
            return None

        def function(y: Tensor) -> tuple[Tensor, Tensor]:
            value = (weights * cdf(y)).sum(0)
            return value, value if self.is_discrete else (weights * conditional_density(conditional, y)).sum(0)

        return function


class LaplaceMarginal(OneFunctionMarginal):
    """A Gaussian plus Laplace noise, in closed form."""

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Variances add."""
        return f.mean, f.variance + 2 * self.likelihood.noise

    def _tails(self, f: FunctionValues, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithms of the density's upper and lower half, up to a factor, and the standardised difference."""
        scale, stddev = self.likelihood.noise.sqrt(), f.variance.clamp_min(1e-20).sqrt()
        ratio, difference = stddev / scale, (y - f.mean) / stddev
        upper = 0.5 * ratio.square() - ratio * difference + log_ndtr(difference - ratio)
        lower = 0.5 * ratio.square() + ratio * difference + log_ndtr(-difference - ratio)
        return upper, lower, difference

    def elementwise(self, f: FunctionValues, y: Tensor) -> Tensor:
        """In closed form."""
        upper, lower, _ = self._tails(f, y)
        return torch.logaddexp(upper, lower) - (2 * self.likelihood.noise.sqrt()).log()

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction:
        """In closed form."""

        def function(y: Tensor) -> tuple[Tensor, Tensor]:
            upper, lower, difference = self._tails(f, y)
            return ndtr(difference) + 0.5 * (lower.exp() - upper.exp()), self.elementwise(f, y).exp()

        return function


def student_t_moments(likelihood: likelihoods.StudentTLikelihood) -> tuple[Tensor, Tensor]:
    """Mean and variance of Student-t noise: no mean for one degree of freedom or fewer, infinite variance for two or fewer."""
    nu = likelihood.deg_free
    mean = torch.where(nu > 1, torch.zeros_like(nu), torch.nan)
    return mean, likelihood.noise * torch.where(nu > 2, nu / (nu - 2), torch.inf)


class StudentTMarginal(OneFunctionMarginal):
    r"""A Gaussian plus Student-t noise: a mixture over :math:`t = \log g` of Gaussians with noise :math:`\sigma^2/g`,
    where :math:`g` has a gamma distribution of mean one.
    """

    _LOW, _HIGH = -80, 8

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Means and variances add."""
        mean, variance = student_t_moments(self.likelihood)
        return f.mean + mean, f.variance + variance

    def around(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """What has moments for every number of degrees of freedom."""
        return f.mean, (f.variance + self.likelihood.noise).sqrt()

    def _log_gamma(self, t: Tensor) -> Tensor:
        half = self.likelihood.deg_free / 2
        return half * half.log() - torch.lgamma(half) + half * (t - t.exp())

    def elementwise(self, f: FunctionValues, y: Tensor) -> Tensor:
        """By quadrature over the scale."""
        noise = self.likelihood.noise

        def integrand(t: Tensor) -> Tensor:
            variance = f.variance + noise * torch.exp(-t)
            return self._log_gamma(t) - 0.5 * ((y - f.mean).square() / variance + variance.log() + _LOG_2PI)

        low = torch.full_like(f.mean + y, self._LOW)
        return log_integral(integrand, low, torch.full_like(low, self._HIGH))

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction:
        """By quadrature over the scale."""
        width = (2 / self.likelihood.deg_free).sqrt().clamp_max(1)
        fractions = torch.linspace(0, 1, 161, dtype=f.mean.dtype, device=f.mean.device)
        first, last = torch.asinh(self._LOW / width), torch.asinh(self._HIGH / width)
        places = first + (last - first) * fractions.reshape(-1, *(1 for _ in f.mean.shape))
        t = width * torch.sinh(places)
        weights = torch.cosh(places) * self._log_gamma(t).exp()
        weights = weights / weights.sum(0)
        stddev = (f.variance + self.likelihood.noise * torch.exp(-t)).sqrt()

        def function(y: Tensor) -> tuple[Tensor, Tensor]:
            z = (y - f.mean) / stddev
            density = torch.exp(-0.5 * z.square()) / (stddev * math.sqrt(2 * math.pi))
            return (weights * ndtr(z)).sum(0), (weights * density).sum(0)

        return function


class BinaryMarginal(OneFunctionMarginal):
    """Two classes, any link: quadrature over f."""

    def log_probs(self, f: FunctionValues) -> Tensor:
        """Of the classes 0 and 1."""
        labels = torch.zeros_like(f.mean), torch.ones_like(f.mean)
        return torch.stack([OneFunctionMarginal.elementwise(self, f, label) for label in labels], -1)

    def elementwise(self, f: FunctionValues, y: Tensor) -> Tensor:
        """Log probability of each label."""
        return self.log_probs(f).gather(-1, (y > 0).long().expand(f.mean.shape).unsqueeze(-1)).squeeze(-1)

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Probability of class 1, and what follows from it."""
        probs = self.log_probs(f).exp()
        return probs[..., 1], probs.prod(-1)

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction:
        """Classes have none."""
        return _refuse_quantile(self.likelihood)


class ProbitMarginal(BinaryMarginal):
    """Two classes with the probit link, in closed form."""

    def log_probs(self, f: FunctionValues) -> Tensor:
        """In closed form."""
        link = f.mean / (1 + f.variance).sqrt()
        return torch.stack([log_ndtr(-link), log_ndtr(link)], -1)


class SeveralFunctionsMarginal(Marginal):
    """A likelihood of several functions at once, by draws of them."""

    def _draws(self, f: FunctionValues) -> tuple[Distribution, Tensor]:
        nodes, weights = normal_draws(self.num_draws, f.mean.size(-1), self.seed)
        return self.conditional(f.place(_in_front(nodes, f))), weights.to(f.mean)

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Over the draws."""
        conditional, weights = self._draws(f)
        return _total_moments(conditional, weights.reshape(-1, *(1 for _ in conditional.mean.shape[1:])))

    def log_prob(self, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """Over the draws; an observation that is missing in part counts as missing."""
        conditional, weights = self._draws(f)
        value = _log_mean(conditional.log_prob(y), weights)
        return value if observed.dim() == value.dim() else torch.where(observed.all(-1), value, torch.nan)

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction | None:
        """Over the draws."""
        conditional, weights = self._draws(f)
        cdf = conditional_cdf(conditional)
        if cdf is None:
            return None
        shaped = weights.reshape(-1, *(1 for _ in conditional.mean.shape[1:]))
        return lambda y: ((shaped * cdf(y)).sum(0), (shaped * conditional_density(conditional, y)).sum(0))


class ClassesMarginal(SeveralFunctionsMarginal):
    """Several classes, by draws of all functions of a point together."""

    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f)."""
        if isinstance(self.likelihood, likelihoods.DirichletClassificationLikelihood):
            return Categorical(logits=f)
        if isinstance(self.likelihood, likelihoods.SoftmaxLikelihood):
            # GPyTorch takes as many points as there are functions for the functions: hand over one point at a time.
            return Categorical(logits=self.likelihood.forward(f.unsqueeze(-2)).logits.squeeze(-2))
        return super().conditional(f)

    def log_probs(self, f: FunctionValues) -> Tensor:
        """Over the draws."""
        conditional, weights = self._draws(f)
        assert isinstance(conditional, Categorical)
        return _log_mean(conditional.logits, weights)

    def log_prob(self, f: FunctionValues, y: Tensor, observed: Tensor) -> Tensor:
        """Log probability of each label."""
        log_probs = self.log_probs(f)
        return log_probs.gather(-1, y.long().expand(log_probs.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def moments(self, f: FunctionValues) -> tuple[Tensor, Tensor]:
        """Of the label as a vector of zeros and a one."""
        probs = self.log_probs(f).exp()
        return probs, probs * (1 - probs)

    def distribution_function(self, f: FunctionValues, p: float) -> DistributionFunction:
        """Classes have none."""
        return _refuse_quantile(self.likelihood)


def make_marginal(
    likelihood: Any, f: FunctionValues, arguments: dict[str, Any] | None = None, num_draws: int = 1024, seed: int = 0
) -> Marginal:
    """The class that fits a likelihood; one of your own is known by the distribution that its ``forward`` returns.

    :param likelihood: The likelihood, in float64.
    :param f: f at one point or more, to try ``forward`` on.
    :param arguments: Further arguments of ``forward`` for these points.
    :param num_draws: Of the functions, where there is no rule for their number.
    :param seed: Of the draws.
    """
    given: Any = (likelihood, arguments, num_draws, seed)
    if takes_noise(likelihood):
        return GaussianMarginal(*given)
    if isinstance(likelihood, (likelihoods.SoftmaxLikelihood, likelihoods.DirichletClassificationLikelihood)):
        return ClassesMarginal(*given)
    for base, kind in _CLOSED_FORMS:
        if type(likelihood).forward is base.forward:
            return kind(*given)
    if isinstance(likelihood, likelihoods.LikelihoodList):
        raise TypeError("A LikelihoodList is for several models; call this with each of them and its own likelihood.")
    conditional = likelihood.forward(f.mean.unsqueeze(0), **(arguments or {}))
    if not isinstance(conditional, Distribution):
        raise TypeError(
            f"{type(likelihood).__name__}.forward must return a distribution; got {type(conditional).__name__}."
        )
    base = entries(conditional)
    if isinstance(base, Categorical):
        return ClassesMarginal(*given)
    if f.is_several and not has_one_function(likelihood):
        return SeveralFunctionsMarginal(*given)
    if isinstance(base, Bernoulli):
        return BinaryMarginal(*given)
    return OneFunctionMarginal(*given, is_discrete=support(conditional).is_discrete)


_CLOSED_FORMS: tuple[tuple[Any, Callable[..., Marginal]], ...] = (
    (likelihoods.BernoulliLikelihood, ProbitMarginal),
    (likelihoods.LaplaceLikelihood, LaplaceMarginal),
    (likelihoods.StudentTLikelihood, StudentTMarginal),
)


def _total_moments(conditional: Distribution, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * conditional.mean).sum(0)
    return mean, (weights * (conditional.variance + (conditional.mean - mean).square())).sum(0)


def _over_tasks(log_prob: Tensor, f: FunctionValues, observed: Tensor) -> Tensor:
    """Sum over the observed tasks, which are independent."""
    return torch.where(observed, log_prob, 0.0).sum(-1) if f.is_several else log_prob


def _in_front(nodes: Tensor, f: FunctionValues) -> Tensor:
    """Nodes, ``K x T``, to be broadcast with f, ``... x N x T``."""
    return nodes.to(f.mean).reshape(len(nodes), *(1 for _ in f.mean.shape[:-1]), -1)


def _log_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Logarithm of a weighted mean over the first dimension."""
    log_weights = weights.to(values).log().reshape(-1, *(1 for _ in values.shape[1:]))
    return torch.logsumexp(values + log_weights, dim=0)


def _refuse_quantile(likelihood: Any) -> DistributionFunction:
    raise TypeError(f"{type(likelihood).__name__} predicts classes, which have no quantiles or intervals; use probs.")
