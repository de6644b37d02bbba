"""Natural gradient steps in closed form against dense sums, and where they end."""

from __future__ import annotations

import pytest
import torch

from tests.tools import dense
from tighter_gp.maths import natural

M, B = 5, 17


@pytest.mark.parametrize("size", [0.3, torch.tensor(0.3), 1.0])
@pytest.mark.parametrize("mean_size", [None, 0.1])
def test_a_step_is_its_equation(size, mean_size):
    A, slope, curvature, mean = torch.randn(M, B), torch.randn(B), torch.rand(B), torch.randn(M)
    root = torch.randn(M, M)
    precision = root @ root.T + torch.eye(M)
    sums = natural.data_sums(A, slope, curvature)
    gram, gradient = A @ torch.diag(curvature) @ A.T, A @ slope
    torch.testing.assert_close(sums.gram, gram)
    torch.testing.assert_close(sums.slope, gradient)
    found = natural.natural_step(natural.NaturalParameters(precision, precision @ mean), sums, mean, size, mean_size)
    linear = (1 - size) * precision @ mean + size * (gradient + gram @ mean)
    linear = linear + ((size if mean_size is None else mean_size) - size) * (gradient - mean)
    torch.testing.assert_close(found.precision, (1 - size) * precision + size * (torch.eye(M) + gram))
    torch.testing.assert_close(found.linear, linear)


@pytest.mark.parametrize("mean_size", [None, 0.1])
def test_a_mean_field_step_is_its_equation(mean_size):
    A, slope, curvature, mean = torch.randn(M, B), torch.randn(B), torch.rand(B), torch.randn(M)
    precision, size = 1 + torch.rand(M), 0.3
    sums = natural.data_sums(A, slope, curvature, diagonal=True)
    gram = (A * A * curvature).sum(-1)
    torch.testing.assert_close(sums.gram, gram)
    found = natural.natural_step(natural.NaturalParameters(precision, precision * mean), sums, mean, size, mean_size)
    expected = (1 - size) * precision + size * (1 + gram)
    moved = mean + (mean_size or size) * (A @ slope - mean) / expected
    torch.testing.assert_close(found.precision, expected)
    torch.testing.assert_close(found.linear, expected * moved)


def test_a_whole_step_lands_on_the_best_q_for_gaussian_noise():
    p = dense.problem(hetero=True)
    A = torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf
    mean = torch.randn(len(p.z))
    sums = natural.data_sums(A, (p.y - A.T @ mean) / p.noise, 1 / p.noise)
    start = natural.NaturalParameters(torch.eye(len(p.z)), mean)
    found = natural.natural_step(start, sums, mean, 1.0)
    best, covariance = dense.optimal_q(p)
    torch.testing.assert_close(torch.linalg.inv(found.precision), covariance)
    torch.testing.assert_close(torch.linalg.solve(found.precision, found.linear), best)


def test_factors_and_sums_of_a_batch():
    root = torch.randn(2, M, M)
    precision = root @ root.mT + torch.eye(M)
    factor, ok = natural.reversed_factor(precision)
    lower, _ = natural.lower_root(precision)
    torch.testing.assert_close(factor.mT @ factor, precision)
    torch.testing.assert_close(lower @ lower.mT, torch.linalg.inv(precision))
    assert bool(ok)
    assert torch.equal(lower, lower.tril())
    assert not bool(natural.reversed_factor(-precision)[1])
    sums = natural.data_sums(torch.randn(3, M, B), torch.randn(3, B), torch.rand(3, B))
    assert sums.gram.shape == (M, M)  # a q(u) without a batch has the data of all
    assert sums.slope.shape == (M,)
