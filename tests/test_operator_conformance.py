"""linear_operator's own suite for operators, as it ships, run on ours."""

from __future__ import annotations

import unittest

import pytest
import torch
from linear_operator import settings, to_linear_operator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from tighter_gp.carrier import Carrier, HadamardLinearOperator, ImplicitLinearOperator, VarianceLinearOperator

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def positive_definite(*batch: int, size: int = 5, seed: int = 0) -> torch.Tensor:
    root = torch.randn(*batch, size, size, generator=torch.Generator().manual_seed(seed))
    return 0.1 * root @ root.mT + torch.eye(size)


class Suite(LinearOperatorTestCase):
    """In float32, from its seed."""

    seed = 0
    skip_slq_tests = True
    batch: tuple[int, ...] = ()

    def setUp(self):
        super().setUp()
        torch.set_default_dtype(torch.float32)
        self.enterContext(settings.fast_computations(True, True, True))  # which BoTorch turns off at import


class TestImplicit(Suite, unittest.TestCase):
    should_test_sample = True

    def create_linear_op(self):
        matrix = positive_definite(*self.batch).requires_grad_()
        return ImplicitLinearOperator(matrix.diagonal(dim1=-1, dim2=-2), lambda: matrix)

    def evaluate_linear_op(self, linear_op):
        return linear_op.dense()


class TestCarrier(TestImplicit):
    def create_linear_op(self):
        matrix = positive_definite(*self.batch).requires_grad_()
        variance = matrix.diagonal(dim1=-1, dim2=-2)
        return Carrier(variance, lambda: matrix, variance, torch.zeros_like(variance), None)


class TestCarrierBatch(TestCarrier):
    batch = (3, 2)


class TestHadamard(Suite, unittest.TestCase):
    should_test_sample = True

    def create_linear_op(self):
        left, right = (to_linear_operator(positive_definite(seed=seed).requires_grad_()) for seed in (0, 1))
        return HadamardLinearOperator(left, right)

    def evaluate_linear_op(self, linear_op):
        return linear_op.left.to_dense() * linear_op.right.to_dense()


class TestVariance(Suite, unittest.TestCase):
    should_test_sample = True

    def create_linear_op(self):
        return VarianceLinearOperator((torch.rand(5) + 0.5).requires_grad_())

    def evaluate_linear_op(self, linear_op):
        return torch.diag_embed(linear_op.variance)
