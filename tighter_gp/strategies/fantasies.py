r"""Fantasies: an exact GP that knows what q(u) knows, to be conditioned on new observations.

Rows of its data stand for q(u): at :math:`Z`, with :math:`C = L (I - S)^{-1} L^\top` in place of a covariance with noise, and
targets :math:`\mu + L (I - S)^{-1} m` for :math:`q(w) = \mathcal N(m, S)`. Conditioned on them, the prior is q(f).
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.settings import skip_posterior_variances
from gpytorch.variational import CholeskyVariationalDistribution
from gpytorch.variational._variational_strategy import _BaseExactGP
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

# Least part of the prior's variance that rows tell, in units of rounding: as good as none, and still invertible.
_LEAST = 1e3


class FantasyStrategy(DefaultPredictionStrategy):
    """Predictions where the covariance of the first rows is given, and no noise is added to it.

    GPyTorch's takes the noise of the likelihood for all rows once there are new ones.
    """

    known: Tensor
    lik_train_train_covar: LinearOperator

    def with_known(self, known: Tensor) -> FantasyStrategy:
        """Set the covariance of the first rows, ``... x M x M``."""
        covar = to_dense(self.lik_train_train_covar).clone()
        covar[..., : known.size(-1), : known.size(-1)] = known
        self.known, self._chol = known, psd_safe_cholesky(covar)
        self.lik_train_train_covar = CholLinearOperator(TriangularLinearOperator(self._chol))
        offset = self.train_labels - self.train_prior_dist.mean  # y - mu  [..., M + N]
        self._weights = self.lik_train_train_covar.solve(offset.unsqueeze(-1)).squeeze(-1)
        return self

    @property
    def mean_cache(self) -> Tensor:
        return self._weights

    def exact_predictive_covar(
        self, test_test_covar: Tensor | LinearOperator, test_train_covar: Tensor | LinearOperator
    ) -> LinearOperator:
        if skip_posterior_variances.on():
            return super().exact_predictive_covar(test_test_covar, test_train_covar)
        half = torch.linalg.solve_triangular(self._chol, to_dense(test_train_covar).mT, upper=False)  # [..., M + N, T]
        return to_linear_operator(to_dense(test_test_covar) - half.mT @ half)

    def get_fantasy_strategy(self, *args: Any, **kwargs: Any) -> FantasyStrategy:
        return super().get_fantasy_strategy(*args, **kwargs).with_known(self.known)


class FantasyGP(_BaseExactGP):
    """An exact GP whose first rows stand for q(u).

    :param points: :math:`Z`, ``... x M x D``.
    :param targets: ``... x M``.
    :param known: :math:`C`, ``... x M x M``.
    """

    prediction_strategy: DefaultPredictionStrategy | None

    def __init__(
        self, points: Tensor, targets: Tensor, known: Tensor, mean_module: Any, covar_module: Any, likelihood: Any
    ) -> None:
        super().__init__(points, targets, likelihood, mean_module, covar_module)
        self.register_buffer("known", known)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training and self.prediction_strategy is None and self.train_inputs:
            inputs = list(self.train_inputs)
            made = FantasyStrategy(inputs, self.forward(*inputs), self.train_targets, self.likelihood)
            self.prediction_strategy = made.with_known(self.known)
        return super().__call__(*args, **kwargs)

    def get_fantasy_model(self, inputs: Tensor, targets: Tensor, **kwargs: Any) -> FantasyGP:
        """As of any exact GP; the noise is the likelihood's."""
        if kwargs:
            raise TypeError(
                f"get_fantasy_model takes no {', '.join(f'{name}=' for name in kwargs)}: new observations have the noise of "
                "model.likelihood, which can be set before."
            )
        return super().get_fantasy_model(inputs, targets)


@torch.no_grad()
def fantasy_gp(strategy: Any, mean_module: Any, covar_module: Any) -> FantasyGP:
    """The exact GP with the q(f) of a strategy, ready for new observations.

    :param mean_module: Default the model's ``mean_module``, and likewise ``covar_module``; with others q(u) is told to another
        prior.
    """
    _check(strategy)
    is_same_prior = mean_module is None and covar_module is None
    model, likelihood = strategy.model, copy.deepcopy(strategy.model.likelihood)
    modules = {"mean_module": mean_module, "covar_module": covar_module}
    for name, given in modules.items():
        modules[name] = copy.deepcopy(getattr(model, name, None) if given is None else given)
        if modules[name] is None:
            raise ModuleNotFoundError(f"A fantasy model needs the model's {name}: pass {name}=, or name it so.")
    mean_module, covar_module = modules.values()
    points, q = strategy.all_points().detach(), strategy.whitened()
    inducing, chol, *_ = strategy.prior(torch.float64).factorized(points).factor
    prior_mean = model.forward(points).mean
    values, vectors = torch.linalg.eigh((q.root @ q.root.mT).to(chol.dtype))  # of S  [..., M]
    told = 1 - values  # of I - S
    if bool((told < -1e-3).any()):
        warnings.warn(
            "q(u) is wider than the prior in some directions, as before training; the fantasy model has the prior's variance "
            "there.",
            NumericalWarning,
            stacklevel=3,
        )
    told = told.clamp_min(_LEAST * torch.finfo(points.dtype).eps)
    root = chol @ vectors  # L V  [..., M, M]
    known = (root / told.unsqueeze(-2)) @ root.mT  # C = L (I - S)^-1 L'
    shift = (root @ ((vectors.mT @ q.mean.to(chol.dtype).unsqueeze(-1)) / told.unsqueeze(-1))).squeeze(-1)
    points = points.expand(*known.shape[:-2], *points.shape[-2:])
    mean, covar = mean_module(points), to_dense(covar_module(points))
    scale = float(inducing.diagonal(dim1=-1, dim2=-2).amax())
    is_same = _close(mean, prior_mean, scale**0.5) and _close(covar, inducing, scale)
    if is_same_prior and not is_same:
        raise NotImplementedError(
            "Fantasies need a forward that returns MultivariateNormal(mean_module(x), covar_module(x)), with nothing done to x "
            "before."
        )
    if not is_same:
        known = known + (covar - inducing)
    gp = FantasyGP(points, mean + shift.to(mean.dtype), known.to(mean.dtype), mean_module, covar_module, likelihood)
    gp.eval()(points[..., :1, :])  # makes what new observations are added to
    return gp


def _check(strategy: Any) -> None:
    """Raise unless q(u) and the likelihood are Gaussian."""
    if not all(isinstance(q, CholeskyVariationalDistribution) for q in strategy.distributions):
        raise NotImplementedError("Fantasy models need a q(u) that is a CholeskyVariationalDistribution.")
    likelihood = getattr(strategy.model, "likelihood", None)
    if not isinstance(likelihood, GaussianLikelihood):
        got = "none" if likelihood is None else type(likelihood).__name__
        raise NotImplementedError(f"Fantasy models need a GaussianLikelihood as model.likelihood; got {got}.")


def _close(found: Tensor, wanted: Tensor, scale: float) -> bool:
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=1e-4, atol=1e-4 * scale)
