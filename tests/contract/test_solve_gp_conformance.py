"""GPyTorch's own conformance suite for variational strategies, run on SOLVE-GP."""

from __future__ import annotations

import functools
import unittest

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)

from tighter_gp import SolveGPVariationalStrategy, TighterELBO


def split_strategy(model, points, distribution, learn_inducing_locations=True):
    """Nine of the sixteen points for u, seven for v."""
    first, second = (type(distribution)(size, batch_shape=distribution.batch_shape) for size in (9, 7))
    return SolveGPVariationalStrategy(
        model, points[..., :9, :], points[..., 9:, :], first, second, learn_inducing_locations
    )


class Conformance(VariationalTestCase):
    """GPyTorch's tests; both Cholesky factors once per training pass and once in eval mode."""

    distribution_cls = CholeskyVariationalDistribution
    mll_cls = TighterELBO
    batch_shape = torch.Size([])
    factors_of_q = 0

    @property
    def strategy_cls(self):
        return split_strategy

    def setUp(self):
        torch.set_default_dtype(torch.float32)
        super().setUp()

    def _counts(self, mocks, cholesky):
        cg, cholesky_mock, ciq = mocks
        assert not cg.called
        assert not ciq.called
        sizes = [call.args[0].size(-1) for call in cholesky_mock.call_args_list]
        assert max(sizes) < 16
        assert len(sizes) == cholesky + self.factors_of_q

    def test_training_iteration(self, *args, **kwargs):
        mocks = super().test_training_iteration(*args, **kwargs)
        if self.factors_of_q == 0:
            self._counts(mocks, 4)

    def test_eval_iteration(self, *args, **kwargs):
        mocks = super().test_eval_iteration(*args, **kwargs)
        self._counts(mocks, 2)

    def test_fantasy_call(self, *args, **kwargs):
        if self.distribution_cls is CholeskyVariationalDistribution:
            super().test_fantasy_call(*args, **kwargs)
            return
        with pytest.raises(NotImplementedError):
            super().test_fantasy_call(*args, **kwargs)


class TestConformance(Conformance, unittest.TestCase):
    pass


class TestConformanceBase(Conformance, unittest.TestCase):
    mll_cls = VariationalELBO


class TestConformanceMeanField(Conformance, unittest.TestCase):
    distribution_cls = MeanFieldVariationalDistribution


class TestConformanceDelta(Conformance, unittest.TestCase):
    distribution_cls = DeltaVariationalDistribution


class TestConformanceTrilNatural(Conformance, unittest.TestCase):
    distribution_cls = TrilNaturalVariationalDistribution


class TestConformanceNatural(Conformance, unittest.TestCase):
    distribution_cls = NaturalVariationalDistribution
    factors_of_q = 4  # two for each natural distribution


class TestConformanceMultitask(Conformance, unittest.TestCase):
    """Inside a batch of two outputs."""

    batch_shape = torch.Size([2])

    @property
    def event_shape(self):
        return torch.Size([32, 2])

    @property
    def likelihood_cls(self):
        return functools.partial(gpytorch.likelihoods.MultitaskGaussianLikelihood, num_tasks=2)

    @property
    def strategy_cls(self):
        def make(*args, **kwargs):
            return gpytorch.variational.IndependentMultitaskVariationalStrategy(
                split_strategy(*args, **kwargs), num_tasks=2
            )

        return make

    def test_training_iteration(self, *args, **kwargs):
        kwargs["expected_batch_shape"] = kwargs.get("expected_batch_shape", self.batch_shape)[:-1]
        VariationalTestCase.test_training_iteration(self, *args, **kwargs)

    def test_eval_iteration(self, *args, **kwargs):
        kwargs["expected_batch_shape"] = kwargs.get("expected_batch_shape", self.batch_shape)[:-1]
        VariationalTestCase.test_eval_iteration(self, *args, **kwargs)

    def test_fantasy_call(self, *args, **kwargs):
        with pytest.raises(NotImplementedError):
            VariationalTestCase.test_fantasy_call(self, *args, **kwargs)
