"""The hand-written derivatives against those of torch and of finite differences."""

from __future__ import annotations

import pytest
import torch

from tighter_gp.maths import derivatives

M, R = 4, 3


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("columns", [6, 11])  # by R'A, and by S A
@pytest.mark.parametrize("batches", [((), ()), ((), (2,)), ((2,), (2,)), ((2,), ()), ((2, 1), (3,))])
def test_mean_and_explained(columns, batches):
    torch.manual_seed(0)
    of_matrix, of_q = batches
    matrix, mean, root = leaf(*of_matrix, M, columns), leaf(*of_q, M), leaf(*of_q, M, R)
    found = derivatives.mean_and_explained(matrix, mean, root)
    expected = (matrix.mT @ mean.unsqueeze(-1)).squeeze(-1), (root.mT @ matrix).square().sum(-2)
    weights = [torch.randn_like(part) for part in expected]
    value = lambda parts: sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part, wanted)
    ours, theirs = (torch.autograd.grad(value(parts), (matrix, mean, root)) for parts in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("batches", [((), ()), ((2,), (2,)), ((), (2,))])
def test_whiten(batches):
    """Against a Cholesky factor with its graph."""
    torch.manual_seed(0)
    of_inducing, of_cross = batches
    root, cross = leaf(*of_inducing, M, M), leaf(*of_cross, M, 6)
    inducing = root @ root.mT + torch.eye(M)
    chol = torch.linalg.cholesky(inducing)
    expected = torch.linalg.solve_triangular(chol, cross, upper=False)
    through = derivatives.through_factor(inducing, chol.detach())
    matrix, norms = derivatives.whiten(through, chol.detach(), cross)
    again, _ = derivatives.whiten(through, chol.detach(), 2 * cross)  # two calls share the gradient of one factor
    torch.testing.assert_close(matrix, expected)
    torch.testing.assert_close(norms, expected.square().sum(-2))
    weight = torch.randn_like(expected)
    loss = (matrix * weight).sum() + norms.exp().sum() + again.sin().sum()
    ours = torch.autograd.grad(loss, (root, cross), retain_graph=True)
    value = (expected * weight).sum() + expected.square().sum(-2).exp().sum() + (2 * expected).sin().sum()
    theirs = torch.autograd.grad(value, (root, cross))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_they_cannot_be_differentiated_twice():
    matrix = leaf(M, 6)
    mean, _ = derivatives.mean_and_explained(matrix, leaf(M), leaf(M, R))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(mean.sum(), matrix, create_graph=True)


def test_nothing_is_computed_for_what_needs_no_gradient():
    matrix, mean, root = torch.randn(M, 6), leaf(M), leaf(M, R)
    found = sum(part.sum() for part in derivatives.mean_and_explained(matrix, mean, root))
    assert all(g is not None for g in torch.autograd.grad(found, (mean, root)))
