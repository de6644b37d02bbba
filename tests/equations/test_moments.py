"""Mean, explained and residual variance against the unwhitened formulas, and the optimal q(w)."""

from __future__ import annotations

import pytest
import torch

from tests.tools import dense
from tighter_gp.maths import linalg, moments
from tighter_gp.maths.moments import Whitened

RTOL = 1e-9


def forms(size: int, seed: int = 1) -> dict[str, tuple[Whitened, torch.Tensor]]:
    """Every form of q(w) with its covariance written out."""
    mean, root = dense.random_q(size, seed)
    wide = torch.randn(size, size + 3, generator=torch.Generator().manual_seed(seed))
    stddev = root.diagonal()
    return {
        "root": (Whitened(mean, root), root @ root.T),
        "wide root": (Whitened(mean, wide), wide @ wide.T),
        "stddev": (Whitened(mean, stddev=stddev), torch.diag(stddev**2)),
        "point mass": (Whitened(mean), torch.zeros(size, size)),
    }


FORMS = ("root", "wide root", "stddev", "point mass")


def projection_of(p: dense.Problem) -> torch.Tensor:
    return torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf


def dense_moments(Kuu, Kuf, prior_variance, mean, covariance):
    """From q(u) = N(L m, L S L') and p(f|u), with inverses."""
    L, W = torch.linalg.cholesky(Kuu), torch.linalg.inv(Kuu) @ Kuf
    return (W.T @ (L @ mean), (W.T @ (L @ covariance @ L.T) @ W).diagonal(), prior_variance - (Kuf.T @ W).diagonal())


@pytest.mark.parametrize("form", FORMS)
def test_svgp_moments_are_those_of_the_unwhitened_marginals(form):
    p = dense.problem()
    q, covariance = forms(5)[form]
    actual = moments.svgp_moments(torch.linalg.cholesky(p.Kuu), p.Kuf, p.Kff.diagonal(), q)
    expected = dense_moments(p.Kuu, p.Kuf, p.Kff.diagonal(), q.mean, covariance)
    for name, value in zip(("mean", "explained", "residual"), expected, strict=True):
        torch.testing.assert_close(
            getattr(actual, name), value, rtol=RTOL, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("form", ["root", "stddev"])
def test_svgp_moments_have_the_gradients_of_the_unwhitened_marginals(form):
    p = dense.problem()
    q, _ = forms(5)[form]
    weights = torch.randn(3, 17)
    spread = q.root if form == "root" else q.stddev
    leaves = [t.clone().requires_grad_() for t in (p.Kuu, p.Kuf, p.Kff.diagonal(), q.mean, spread)]
    Kuu, Kuf, prior_variance, mean, spread = leaves

    actual = moments.svgp_moments(linalg.cholesky(Kuu), Kuf, prior_variance, Whitened(mean, **{form: spread}))
    covariance = spread @ spread.T if form == "root" else torch.diag(spread**2)
    expected = dense_moments(Kuu, Kuf, prior_variance, mean, covariance)

    actual_grads, expected_grads = (
        torch.autograd.grad((weights * torch.stack(list(values)).sin()).sum(), leaves) for values in (actual, expected)
    )
    for actual_grad, expected_grad in zip(actual_grads[1:], expected_grads[1:], strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-8, atol=1e-9)
    # Only symmetric changes of K_ZZ mean anything.
    torch.testing.assert_close(
        actual_grads[0] + actual_grads[0].T, expected_grads[0] + expected_grads[0].T, rtol=1e-8, atol=1e-8
    )


# ---- The optimal q(w) -------------------------------------------------------------------------------------------------
