"""Mean, explained and residual variance against the unwhitened formulas, and the optimal q(w)."""

from __future__ import annotations

import pytest
import torch
from tighter_gp.maths.moments import Whitened

from tests.tools import dense
from tighter_gp.maths import linalg, moments
from tighter_gp.maths import collapsed

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
    return (
        W.T @ (L @ mean),
        (W.T @ (L @ covariance @ L.T) @ W).diagonal(),
        prior_variance - (Kuf.T @ W).diagonal(),
    )


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


def test_svgp_moments_of_a_batch_are_those_of_its_members():
    problems = [[dense.problem(3 * i + j) for j in range(3)] for i in range(2)]
    stack = lambda field: torch.stack([torch.stack([field(p) for p in row]) for row in problems])
    qs = [[forms(5, 3 * i + j)["root"][0] for j in range(3)] for i in range(2)]
    q = Whitened(*(torch.stack([torch.stack([getattr(q, f) for q in row]) for row in qs]) for f in ("mean", "root")))
    chol = torch.linalg.cholesky(stack(lambda p: p.Kuu))
    actual = moments.svgp_moments(chol, stack(lambda p: p.Kuf), stack(lambda p: p.Kff.diagonal()), q)
    for i in range(2):
        for j in range(3):
            p = problems[i][j]
            expected = moments.svgp_moments(torch.linalg.cholesky(p.Kuu), p.Kuf, p.Kff.diagonal(), qs[i][j])
            for a, e in zip(actual, expected, strict=True):
                assert a.shape == (2, 3, 17)
                torch.testing.assert_close(a[i, j], e, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_q_broadcasts_against_one_kernel(form):
    p = dense.problem()
    chol = torch.linalg.cholesky(p.Kuu)
    qs = [forms(5, seed)[form][0] for seed in (1, 2, 3)]
    stacked = Whitened(*(None if qs[0][k] is None else torch.stack([q[k] for q in qs]) for k in range(3)))
    actual = moments.svgp_moments(chol, p.Kuf, p.Kff.diagonal(), stacked)
    for i, q in enumerate(qs):
        expected = moments.svgp_moments(chol, p.Kuf, p.Kff.diagonal(), q)
        torch.testing.assert_close(actual.mean[i], expected.mean, rtol=RTOL, atol=1e-12)
        torch.testing.assert_close(actual.explained.expand(3, 17)[i], expected.explained, rtol=RTOL, atol=1e-12)
        torch.testing.assert_close(actual.residual.expand(3, 17)[i], expected.residual, rtol=RTOL, atol=1e-12)


def test_residual_does_not_depend_on_q():
    p = dense.problem()
    chol = torch.linalg.cholesky(p.Kuu)
    residuals = [moments.svgp_moments(chol, p.Kuf, p.Kff.diagonal(), q).residual for q, _ in forms(5).values()]
    for residual in residuals[1:]:
        assert torch.equal(residual, residuals[0])


@pytest.mark.parametrize("form", ["root", "wide root", "stddev"])
def test_squared_columns_of_the_explained_root_sum_to_the_explained_variance(form):
    q, covariance = forms(5)[form]
    projection = torch.randn(5, 17)
    root = moments.explained_root(projection, q)
    torch.testing.assert_close(root.mT @ root, projection.T @ covariance @ projection, rtol=RTOL, atol=1e-12)
    torch.testing.assert_close(
        moments.explained_variance(projection, q),
        (projection.T @ covariance @ projection).diagonal(),
        rtol=RTOL,
        atol=1e-12,
    )


def test_a_point_mass_explains_no_variance():
    q, projection = forms(5)["point mass"][0], torch.randn(2, 5, 17)
    assert moments.explained_root(projection, q) is None
    assert torch.equal(moments.explained_variance(projection, q), torch.zeros(2, 17))


def test_explained_variance_is_not_negative_for_a_tiny_covariance():
    projection = torch.randn(5, 17, dtype=torch.float32) * 1e3
    q = Whitened(torch.zeros(5, dtype=torch.float32), 1e-18 * torch.randn(5, 5, dtype=torch.float32).tril())
    explained = moments.explained_variance(projection, q)
    assert explained.dtype == torch.float32
    assert (explained > 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# The optimal q(w)
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hetero", [False, True])
def test_optimal_q_is_the_whitened_posterior_of_the_inducing_variables(hetero):
    p = dense.problem(hetero=hetero)
    q = moments.optimal_whitened(projection_of(p), p.y, p.noise)
    mean, covariance = dense.optimal_q(p)
    torch.testing.assert_close(q.mean, mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(q.root @ q.root.mT, covariance, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("hetero", [False, True])
def test_optimal_q_is_a_stationary_point_of_the_bound_whatever_the_scales(hetero):
    p = dense.problem(hetero=hetero)
    q = moments.optimal_whitened(projection_of(p), p.y, p.noise)
    mean, covariance = q.mean.clone().requires_grad_(), (q.root @ q.root.mT).requires_grad_()
    for scale in (torch.ones(17), 0.05 + 0.9 * torch.rand(17)):
        gradients = torch.autograd.grad(dense.uncollapsed(p, mean, covariance, scale), (mean, covariance))
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8)


def test_no_other_q_has_a_higher_bound():
    p = dense.problem(hetero=True)
    q, scale = moments.optimal_whitened(projection_of(p), p.y, p.noise), 0.05 + 0.9 * torch.rand(17)
    best = dense.uncollapsed(p, q.mean, q.root @ q.root.mT, scale)
    for size in (1e-3, 1e-1, 1.0):
        for _ in range(5):
            root = q.root + size * torch.randn(5, 5)
            assert dense.uncollapsed(p, q.mean + size * torch.randn(5), root @ root.mT, scale) < best


def test_root_of_the_optimal_q_is_triangular():
    p = dense.problem()
    root = moments.optimal_whitened(projection_of(p), p.y, p.noise).root
    assert torch.equal(root, root.triu())


def test_gradient_of_the_optimal_q_is_that_of_the_dense_posterior():
    p = dense.problem(hetero=True)
    leaves = [t.clone().requires_grad_() for t in (projection_of(p), p.y, p.noise.clone())]
    projection, y, noise = leaves
    weights_mean, weights_cov = torch.randn(5), torch.randn(5, 5)

    def functional(mean, covariance):
        return (weights_mean * mean).sum() + (weights_cov * covariance).sum()

    q = moments.optimal_whitened(projection, y, noise)
    covariance = torch.linalg.inv(torch.eye(5) + projection @ torch.diag(1 / noise) @ projection.T)
    dense_mean = covariance @ projection @ torch.diag(1 / noise) @ y
    actual = torch.autograd.grad(functional(q.mean, q.root @ q.root.mT), leaves)
    expected = torch.autograd.grad(functional(dense_mean, covariance), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "shape",
    [(1,), (2, 1), ()],
)
def test_optimal_q_takes_every_noise_that_broadcasts(shape):
    projection, y, noise = torch.randn(5, 17), torch.randn(17), 0.1 + torch.rand(shape)
    q = moments.optimal_whitened(projection, y, noise)
    assert q.mean.shape == (*shape[:-1], 5)
    for i, value in enumerate(noise.reshape(-1)):
        expected = moments.optimal_whitened(projection, y, value.expand(17))
        torch.testing.assert_close(q.mean.reshape(-1, 5)[i], expected.mean, rtol=RTOL, atol=1e-12)
        torch.testing.assert_close(q.root.reshape(-1, 5, 5)[i], expected.root, rtol=RTOL, atol=1e-12)


def test_optimal_q_of_a_batch_is_that_of_its_members():
    projection, y, noise = torch.randn(2, 3, 5, 17), torch.randn(2, 3, 17), 0.1 + torch.rand(2, 3, 17)
    actual = moments.optimal_whitened(projection, y, noise)
    for i in range(2):
        for j in range(3):
            expected = moments.optimal_whitened(projection[i, j], y[i, j], noise[i, j])
            torch.testing.assert_close(actual.mean[i, j], expected.mean, rtol=RTOL, atol=1e-12)
            torch.testing.assert_close(actual.root[i, j], expected.root, rtol=RTOL, atol=1e-12)


def test_optimal_q_can_be_gathered_in_chunks():
    p = dense.problem(hetero=True)
    A = projection_of(p)
    gram, linear = torch.zeros(5, 5), torch.zeros(5)
    for rows in (slice(0, 6), slice(6, 7), slice(7, 17)):
        weights = torch.diag(1 / p.noise[rows])
        gram += A[:, rows] @ weights @ A[:, rows].T
        linear += A[:, rows] @ weights @ p.y[rows]
    mean, covariance = dense.optimal_q(p)
    q = moments.whitened_from_gram(gram, linear)
    torch.testing.assert_close(q.mean, mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(q.root @ q.root.mT, covariance, rtol=1e-8, atol=1e-11)


def test_without_data_the_optimal_q_is_the_prior():
    q = moments.whitened_from_gram(torch.zeros(2, 5, 5), torch.zeros(2, 5))
    assert torch.equal(q.mean, torch.zeros(2, 5))
    assert torch.equal(q.root, torch.eye(5).expand(2, 5, 5))


def test_identity_is_added_to_every_member_of_a_batch():
    gram = torch.randn(2, 3, 5, 7)
    gram = gram @ gram.mT
    expected = gram + torch.diag_embed(torch.ones(2, 3, 5))
    assert torch.equal(collapsed.add_identity(gram), expected)
    torch.testing.assert_close(
        collapsed.add_identity_cholesky(gram), torch.linalg.cholesky(expected), rtol=RTOL, atol=1e-12
    )


@pytest.mark.parametrize("function", [moments.optimal_whitened, moments.svgp_moments])
def test_results_live_on_the_device_and_in_the_dtype_of_the_inputs(function):
    like = {"device": "meta", "dtype": torch.float32}
    if function is moments.optimal_whitened:
        results = function(torch.empty(5, 17, **like), torch.empty(17, **like), torch.empty(17, **like))[:2]
    else:
        q = Whitened(torch.empty(5, **like), torch.empty(5, 5, **like))
        results = function(torch.empty(5, 5, **like), torch.empty(5, 17, **like), torch.empty(17, **like), q)
    for result in results:
        assert result.device.type == "meta"
        assert result.dtype == torch.float32
