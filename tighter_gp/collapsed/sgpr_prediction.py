"""The covariance that inducing points explain, and GPyTorch's predictions from it, always of the current parameters."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import SGPRPredictionStrategy
from linear_operator import LinearOperator
from linear_operator.operators import (
    DiagLinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
)
from torch import Tensor

from ..checks import same_values


class WideRootLinearOperator(LowRankRootLinearOperator):
    """What the inducing points explain, in a narrow precision: with noise added, it is solved and factorised in float64."""

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return WideAddedDiagLinearOperator(self, other)
        return super().__add__(other)


class WideAddedDiagLinearOperator(LowRankRootAddedDiagLinearOperator):
    """See :class:`WideRootLinearOperator`."""

    def _wide(self) -> LinearOperator:
        root, noise = self._linear_op.root.to_dense(), self._diag_tensor.diagonal(dim1=-1, dim2=-2)
        return LowRankRootLinearOperator(root.double()) + DiagLinearOperator(noise.double())

    def _solve(self, rhs: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._wide()._solve(rhs.double()).to(rhs.dtype)

    def _logdet(self) -> Tensor:
        return self._wide()._logdet().to(self.dtype)


class CurrentPredictionStrategy(SGPRPredictionStrategy):
    """GPyTorch's predictions of SGPR, at the hyperparameters of the moment.

    :class:`~gpytorch.models.ExactGP` keeps what it computed at the first prediction until the mode changes. This one counts
    no training points, so that ExactGP slices none off and hands over the prior of training and test points together, as
    the model has it at each call. The posterior is computed again unless that prior, noise and targets are what they were.
    """

    num_train = 0
    _known: tuple[list[Tensor], SGPRPredictionStrategy] | None = None

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator, test_train_covar: LinearOperator | None = None
    ) -> tuple[Tensor, LinearOperator]:
        """Posterior mean and covariance of the test points.

        :param test_mean: Prior mean of training and test points, ``... x (N + B)``.
        :param test_test_covar: Their prior covariance, ``... x (N + B) x (N + B)``.
        :param test_train_covar: Empty.
        """
        covar, num_train = test_test_covar.evaluate_kernel(), self.train_shape.numel()
        train, test = (_at(covar, rows) for rows in (slice(num_train), slice(num_train, None)))
        cross = MatmulLinearOperator(_root(test), _root(train).mT)
        mean = test_mean[..., :num_train].unflatten(-1, self.train_shape)
        posterior = self._posterior(type(self.train_prior_dist)(mean, train))
        return posterior.exact_prediction(test_mean[..., num_train:], test, cross)

    def _posterior(self, prior: MultivariateNormal) -> SGPRPredictionStrategy:
        """GPyTorch's strategy, with what it has computed if it is for the same prior, noise and targets."""
        # ExactGP moves its data with the model and keeps this object, so the targets may be on another device.
        labels = self.train_labels.to(prior.mean.device)
        fresh = SGPRPredictionStrategy(self.train_inputs, prior, labels, self.likelihood)
        if torch.is_grad_enabled():
            return fresh
        covar = fresh.lik_train_train_covar
        noise = covar._diag_tensor.diagonal(dim1=-1, dim2=-2)
        current = [prior.mean, _root(covar), noise, labels]
        if self._known is None or not all(map(same_values, self._known[0], current)):
            self._known = [tensor.detach().clone() for tensor in current], fresh
        return self._known[1]


def explained_covariance(root: Tensor, dtype: torch.dtype) -> LinearOperator:
    """:math:`A^\\top A` in some precision, from the transpose of A in perhaps a wider one."""
    return LowRankRootLinearOperator(root) if root.dtype == dtype else WideRootLinearOperator(root.to(dtype))


def _root(covar: LinearOperator) -> Tensor:
    """Transpose of A of a covariance that the kernel made."""
    return (covar._linear_op if isinstance(covar, LowRankRootAddedDiagLinearOperator) else covar).root.to_dense()


def _at(covar: LinearOperator, rows: slice) -> LinearOperator:
    """Such a covariance at some of its points."""
    if not isinstance(covar, LowRankRootAddedDiagLinearOperator):
        return type(covar)(_root(covar)[..., rows, :])
    return _at(covar._linear_op, rows) + DiagLinearOperator(covar._diag_tensor.diagonal(dim1=-1, dim2=-2)[..., rows])
