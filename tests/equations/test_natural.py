"""Natural gradient steps in closed form against dense sums."""

from __future__ import annotations

import pytest
import torch

from tighter_gp.maths import natural

M, B = 5, 17


@pytest.mark.parametrize("size", [0.3, torch.tensor(0.3, dtype=torch.float64), 1.0])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_step_is_its_equation(size, diagonal):
    A, slope, curvature, root = torch.randn(M, B), torch.randn(B), torch.rand(B), torch.randn(M, M)
    precision = root @ root.T + torch.eye(M)
    gram = A @ torch.diag(curvature) @ A.T
    expected = (1 - size) * precision + size * (torch.eye(M) + gram)
    if diagonal:
        precision, gram, expected = precision.diag(), gram.diag(), expected.diag()
    sums = natural.data_sums(A, slope, curvature, diagonal=diagonal)
    torch.testing.assert_close(sums, (gram, A @ slope))
    torch.testing.assert_close(natural.natural_step(precision, sums[0], size, diagonal), expected)


def test_factors_and_sums_of_a_batch():
    root = torch.randn(2, M, M)
    precision = root @ root.mT + torch.eye(M)
    factor, ok = natural.reversed_factor(precision)
    torch.testing.assert_close(factor.mT @ factor, precision)
    assert bool(ok)
    assert torch.equal(factor, factor.tril())
    assert not bool(natural.reversed_factor(-precision)[1])
    gram, vector = natural.data_sums(torch.randn(3, M, B), torch.randn(3, B), torch.rand(3, B))
    assert gram.shape == (M, M)  # a q(u) without a batch has the data of all
    assert vector.shape == (M,)
