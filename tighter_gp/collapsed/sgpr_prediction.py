"""GPyTorch's predictions of SGPR from what the inducing points explain, at the hyperparameters of the moment."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.models.exact_prediction_strategies import SGPRPredictionStrategy
from linear_operator import LinearOperator
from linear_operator.operators import (
    DiagLinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
)
from torch import Tensor


class WideRootLinearOperator(LowRankRootLinearOperator):
    """:math:`A^\\top A` in float32; with noise added, it is solved and factorised in float64."""

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return WideAddedDiagLinearOperator(self, other)
        return super().__add__(other)


class WideAddedDiagLinearOperator(LowRankRootAddedDiagLinearOperator):
    """:math:`A^\\top A + \\Sigma`; see :class:`WideRootLinearOperator`."""

    def _wide(self) -> LinearOperator:
        noise = self._diag_tensor.diagonal(dim1=-1, dim2=-2)
        return LowRankRootLinearOperator(_root(self).double()) + DiagLinearOperator(noise.double())

    def _solve(self, rhs: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._wide()._solve(rhs.double()).to(rhs.dtype)

    def _logdet(self) -> Tensor:
        return self._wide()._logdet().to(self.dtype)


class CurrentPredictionStrategy(SGPRPredictionStrategy):
    """Computes the posterior at each prediction, where GPyTorch keeps that of the first until the mode changes.

    It counts no training points, so that :class:`~gpytorch.models.ExactGP` slices none off and hands over the prior of
    training and test points together.
    """

    num_train = 0

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator, test_train_covar: LinearOperator | None = None
    ) -> tuple[Tensor, LinearOperator]:
        """Posterior mean and covariance of the test points.

        :param test_mean: Prior mean of training and test points, ``... x (N + B)``.
        :param test_test_covar: Their prior covariance, ``... x (N + B) x (N + B)``.
        :param test_train_covar: Empty.
        """
        covar, num_train = test_test_covar.evaluate_kernel(), self.train_shape.numel()
        train, test = _at(covar, slice(num_train)), _at(covar, slice(num_train, None))
        prior = type(self.train_prior_dist)(test_mean[..., :num_train].unflatten(-1, self.train_shape), train)
        labels = self.train_labels.to(test_mean.device)  # the model may have moved since the first prediction
        posterior = SGPRPredictionStrategy(self.train_inputs, prior, labels, self.likelihood)
        cross = MatmulLinearOperator(_root(test), _root(train).mT)
        mean = posterior.exact_predictive_mean(test_mean[..., num_train:], cross)
        return mean, posterior.exact_predictive_covar(test, cross)


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
