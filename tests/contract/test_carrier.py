"""linear_operator's own suite for operators, as it ships, run on ours."""

from __future__ import annotations

import unittest

import pytest
import torch
from linear_operator import settings, to_linear_operator
from linear_operator.operators import DiagLinearOperator, MatmulLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from tighter_gp.carrier import Carrier, HadamardLinearOperator, find_carriers, mixes_points, replace_variance

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
        fast = settings.fast_computations(True, True, True)  # which BoTorch turns off at import
        fast.__enter__()
        self.addCleanup(fast.__exit__, None, None, None)


class TestCarrier(Suite, unittest.TestCase):
    """In training: a diagonal covariance."""

    should_test_sample = True

    def create_linear_op(self):
        variance = (torch.rand(*self.batch, 5) + 0.5).requires_grad_()
        return Carrier(variance, variance, torch.zeros_like(variance))

    def evaluate_linear_op(self, linear_op):
        return torch.diag_embed(linear_op.variance)


class TestCarrierBatch(TestCarrier):
    batch = (3, 2)


class TestHadamard(Suite, unittest.TestCase):
    should_test_sample = True

    def create_linear_op(self):
        left, right = (to_linear_operator(positive_definite(seed=seed).requires_grad_()) for seed in (0, 1))
        return HadamardLinearOperator(left, right)

    def evaluate_linear_op(self, linear_op):
        return linear_op.left.to_dense() * linear_op.right.to_dense()


def test_parts_survive_the_wrappers_of_gpytorch():
    """Expanded, permuted and weighted, the explained part stays beside the residual, and its copies are known."""
    explained, residual = torch.rand(2, 5), torch.rand(2, 5)
    carrier = Carrier(explained + residual, explained, residual)
    (found,) = find_carriers(carrier.expand(3, 2, 5, 5).permute(1, 0, 2, 3))
    assert found.copied == (False, True)
    torch.testing.assert_close(found.explained, explained.unsqueeze(1).expand(2, 3, 5))
    weighted = carrier * to_linear_operator(torch.eye(5)) + to_linear_operator(torch.eye(5))
    replaced = replace_variance(weighted, 2 * residual)
    torch.testing.assert_close(replaced.diagonal(dim1=-1, dim2=-2), 2 * residual + 1)


def test_a_product_with_a_matrix_mixes_points():
    carrier = Carrier(torch.ones(5), torch.ones(5), torch.zeros(5))
    weights = to_linear_operator(torch.rand(2, 5))
    assert mixes_points(MatmulLinearOperator(MatmulLinearOperator(weights, carrier), weights.mT))
    assert not mixes_points(MatmulLinearOperator(carrier, DiagLinearOperator(torch.rand(5))))
    assert not mixes_points(carrier + to_linear_operator(torch.eye(5)))
