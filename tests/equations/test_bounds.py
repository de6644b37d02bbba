"""Every bound and penalty against its equation written out with inv and slogdet; the order of the bounds."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from tests.tools import dense
from tighter_gp.maths import bounds, linalg, moments
from tighter_gp.maths.moments import Whitened

RTOL = 1e-9
BOUNDS = {
    "titsias": (bounds.titsias_bound, dense.f1),
    "spherical": (bounds.spherical_bound, dense.f5),
    "tighter": (bounds.tighter_bound, dense.f4),
}


def projection_of(p: dense.Problem) -> torch.Tensor:
    return linalg.project(linalg.cholesky(p.Kuu), p.Kuf)


def residual_of(p: dense.Problem) -> torch.Tensor:
    return linalg.residual_variance(p.Kff.diagonal(), projection_of(p))


def arguments(p: dense.Problem) -> tuple[torch.Tensor, ...]:
    """What the collapsed bounds take."""
    return projection_of(p), p.y, p.noise, residual_of(p)


def leaves_of(p: dense.Problem) -> tuple[list[torch.Tensor], dense.Problem]:
    """K_uu, K_uf, K_ff, y and noise as leaves, and a problem made of them."""
    Kuu, Kuf, Kff, y, noise = leaves = [t.clone().requires_grad_() for t in (p.Kuu, p.Kuf, p.Kff, p.y, p.noise)]
    Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
    return leaves, p._replace(Kuu=Kuu, Kuf=Kuf, Kff=Kff, y=y, noise=noise, Q=Q, D=Kff - Q)


def assert_same_gradients(actual: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    gradients = [torch.autograd.grad(value, leaves, materialize_grads=True) for value in (actual, expected)]
    for a, e in zip(*gradients, strict=True):
        if a.dim() == 2 and a.size(0) == a.size(1):  # only symmetric changes of a covariance mean anything
            a, e = a + a.T, e + e.T
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-7 * max(1.0, e.abs().max().item()))


# ---- Penalties --------------------------------------------------------------------------------------------------------


@pytest.fixture
def residual() -> torch.Tensor:
    return 3 * torch.rand(17)


@pytest.fixture
def noise() -> torch.Tensor:
    return 0.05 + torch.rand(17)


def test_full_penalty_is_the_least_price_of_a_free_conditional():
    """``KL[N(0, C) || N(0, D)] + tr(C / noise) / 2`` at its minimum, and more elsewhere."""
    p = dense.problem(n=9, m=3, kernel="matern32", hetero=True)
    zeros = torch.zeros(9)
    price = lambda C: dense.kl(zeros, C, zeros, p.D) + 0.5 * (C.diagonal() / p.noise).sum()
    best = torch.linalg.inv(torch.linalg.inv(p.D) + torch.diag(1 / p.noise))
    penalty = bounds.full_penalty(p.D, p.noise)
    torch.testing.assert_close(penalty, price(best), rtol=1e-8, atol=0)
    for _ in range(5):
        change = 0.05 * torch.randn(9, 9)
        other = (torch.eye(9) + change) @ best @ (torch.eye(9) + change).T
        assert price(other) > penalty


def test_scale_penalty_is_the_divergence_between_the_conditionals():
    residual, scale = 0.1 + torch.rand(5), torch.tensor([0.03, 0.5, 1.0, 1.7, 0.999])
    expected = [
        dense.kl(torch.zeros(1), m * d.view(1, 1), torch.zeros(1), d.view(1, 1))
        for d, m in zip(residual, scale, strict=True)
    ]
    torch.testing.assert_close(bounds.scale_penalty(scale), torch.stack(expected), rtol=RTOL, atol=1e-15)


def test_scale_penalty_is_the_divergence_for_every_square_root_of_the_residual_covariance():
    p = dense.problem(n=9, m=3, kernel="matern32")
    scale = 0.05 + 0.9 * torch.rand(9)
    values, vectors = torch.linalg.eigh(p.D)
    symmetric_root = vectors @ torch.diag(values.sqrt()) @ vectors.T
    for root in (symmetric_root, torch.linalg.cholesky(p.D)):
        expected = dense.kl(torch.zeros(9), root @ torch.diag(scale) @ root.T, torch.zeros(9), p.D)
        torch.testing.assert_close(bounds.scale_penalty(scale).sum(), expected, rtol=1e-7, atol=0)


def test_optimal_scale_is_where_the_price_is_least():
    residual, precision = torch.tensor([0.0, 0.01, 0.7, 30.0]), torch.tensor([2.0, 0.0, 5.0, 11.0])
    best = bounds.optimal_scale(residual, precision)
    price = lambda m: 0.5 * precision * m * residual + bounds.scale_penalty(m)
    m = best.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(price(m).sum(), m)
    torch.testing.assert_close(gradient, torch.zeros(4), rtol=0, atol=1e-11)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert (price(factor * best) > price(best)).all()


PENALTIES = {
    "trace": bounds.trace_penalty,
    "spherical": bounds.spherical_penalty,
    "log": bounds.log_penalty,
    "optimal scale": lambda d, s: bounds.optimal_scale(d, s.reciprocal()),
    "optimal scale penalty": lambda d, s: bounds.optimal_scale_penalty(d, s.reciprocal()),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_pass_gradcheck(name, residual, noise):
    assert torch.autograd.gradcheck(PENALTIES[name], (residual.requires_grad_(), noise.requires_grad_()))


def test_full_penalty_passes_gradcheck(noise):
    root = torch.randn(17, 4, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, s: bounds.full_penalty(r @ r.T, s), (root, noise.requires_grad_()))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("d", "s"), [(0.0, 0.3), (0.0, 1e-30), (1.0, 1e-30), (1e15, 1e-15), (1e-30, 1.0), (1e-3, 1e30)]
)
def test_penalties_and_gradients_are_finite_at_any_scale(name, dtype, d, s):
    residual = torch.full((3,), d, dtype=dtype, requires_grad=True)
    noise = torch.full((3,), s, dtype=dtype)
    value = PENALTIES[name](residual, noise)
    value.sum().backward()
    assert value.dtype == dtype
    assert torch.isfinite(value).all()
    assert torch.isfinite(residual.grad).all()


def test_small_ratios_lose_no_digits():
    """log(1 + x) would return x to 7 digits only."""
    residual, noise = torch.full((1,), 1e-9), torch.ones(1)
    expected = 0.5 * (1e-9 - 0.5e-18)
    for name in ("log", "spherical"):
        assert PENALTIES[name](residual, noise).item() == pytest.approx(expected, rel=1e-14, abs=0), name


# ---- Collapsed bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hetero", [False, True])
@pytest.mark.parametrize("name", [*BOUNDS, "scaled", "full", "evidence"])
def test_values_and_gradients_are_those_of_the_equations(name, hetero):
    leaves, p = leaves_of(dense.problem(hetero=hetero))
    scale = (0.05 + 0.9 * torch.rand(17)).requires_grad_()
    if name in BOUNDS:
        actual, expected = (BOUNDS[name][0](*arguments(p)), BOUNDS[name][1](p))
    elif name == "scaled":
        actual, expected, leaves = bounds.scaled_bound(*arguments(p), scale), dense.f3(p, scale), [*leaves, scale]
    elif name == "full":
        A = projection_of(p)
        actual, expected = bounds.full_bound(A, p.y, p.noise, p.Kff - A.mT @ A), dense.f8(p)
    else:
        actual, expected = bounds.exact_log_evidence(p.Kff, p.y, p.noise), dense.evidence(p)
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=0)
    assert_same_gradients(actual, expected, leaves)


@pytest.mark.parametrize("name", [*BOUNDS, "scaled", "full", "evidence"])
def test_bound_of_a_batch_is_that_of_its_members(name):
    problems = [dense.problem(seed, hetero=True) for seed in range(6)]
    scales = 0.1 + torch.rand(6, 17)
    inputs = []
    for p, scale in zip(problems, scales, strict=True):
        extra = {"scaled": (*arguments(p), scale), "full": (*arguments(p)[:3], p.D), "evidence": (p.Kff, p.y, p.noise)}
        inputs.append(extra.get(name, arguments(p)))
    function = {
        "scaled": bounds.scaled_bound,
        "full": bounds.full_bound,
        "evidence": bounds.exact_log_evidence,
        **{key: value[0] for key, value in BOUNDS.items()},
    }[name]
    stacked = [torch.stack(tensors).unflatten(0, (2, 3)) for tensors in zip(*inputs, strict=True)]
    actual = function(*stacked)
    assert actual.shape == (2, 3)
    torch.testing.assert_close(actual.flatten(), torch.stack([function(*args) for args in inputs]), rtol=RTOL, atol=0)


# ---- Order ------------------------------------------------------------------------------------------------------------


def test_tighter_bound_is_below_the_evidence_of_the_fitc_prior():
    for seed in range(20):
        p = dense.problem(seed, kernel=("matern32", "rbf")[seed % 2], hetero=seed % 3 == 0)
        fitc = dense.log_normal(p.y, p.Q + torch.diag(p.d + p.noise))
        assert bounds.tighter_bound(*arguments(p)) <= fitc + 1e-9 * fitc.abs()


@pytest.mark.parametrize("hetero", [False, True])
def test_scaled_bound_is_largest_at_the_optimal_scale(hetero):
    p = dense.problem(hetero=hetero)
    args = arguments(p)
    best = bounds.optimal_scale(args[3], p.noise.reciprocal())
    top = bounds.scaled_bound(*args, best)
    torch.testing.assert_close(top, bounds.tighter_bound(*args), rtol=RTOL, atol=0)

    scale = best.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(bounds.scaled_bound(*args, scale), scale)
    torch.testing.assert_close(gradient, torch.zeros(17), rtol=0, atol=1e-9)
    for n in range(17):
        for factor in (0.3, 0.97, 1.03, 3.0):
            other = best.clone()
            other[n] *= factor
            assert bounds.scaled_bound(*args, other) < top


# ---- Small noise ------------------------------------------------------------------------------------------------------


def exact_nystrom_log_prob(projection: torch.Tensor, targets: torch.Tensor, noise: float) -> float:
    """In 60 digits, from the very entries of the float64 tensors."""
    with mpmath.workdps(60):
        A, y = mpmath.matrix(projection.tolist()), mpmath.matrix(targets.tolist())
        covariance = A.T * A + mpmath.mpf(noise) * mpmath.eye(len(targets))
        factor = mpmath.cholesky(covariance)
        whitened = mpmath.lu_solve(factor, y)
        quadratic = mpmath.fsum(value**2 for value in whitened)
        log_det = 2 * mpmath.fsum(mpmath.log(factor[i, i]) for i in range(len(targets)))
        return float(-(len(targets) * mpmath.log(2 * mpmath.pi) + quadratic + log_det) / 2)


@pytest.mark.parametrize("noise", [1e-4, 1e-7, 1e-10])
def test_quadratic_form_keeps_its_digits_when_the_targets_lie_in_the_explained_space(noise):
    """Here ``y'y / noise`` is 1e10 times the quadratic form, and the difference of two such sums would be noise."""
    projection = torch.randn(5, 17)
    targets = projection.T @ torch.randn(5)
    expected = exact_nystrom_log_prob(projection, targets, noise)
    actual = bounds.nystrom_log_prob(projection, targets, torch.full((17,), noise)).item()
    assert actual == pytest.approx(expected, rel=1e-10)


# ---- Uncollapsed terms ------------------------------------------------------------------------------------------------


def uncollapsed(p: dense.Problem, q: Whitened, scale: torch.Tensor) -> torch.Tensor:
    """F_2 put together from the package's terms."""
    f = moments.svgp_moments(linalg.cholesky(p.Kuu), p.Kuf, p.Kff.diagonal(), q)
    expected = bounds.gaussian_expected_log_prob(p.y, f.mean, f.explained + scale * f.residual, p.noise)
    return (expected - bounds.scale_penalty(scale)).sum(-1) - bounds.whitened_kl(q)


@pytest.mark.parametrize("hetero", [False, True])
def test_uncollapsed_terms_add_up_to_the_bound_at_any_q_and_any_scales(hetero):
    p = dense.problem(hetero=hetero)
    mean, root = dense.random_q(5)
    for scale in (torch.ones(17), 0.01 + 1.5 * torch.rand(17)):
        expected = dense.uncollapsed(p, mean, root @ root.T, scale)
        torch.testing.assert_close(uncollapsed(p, Whitened(mean, root), scale), expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("form", ["lower", "upper", "negative diagonal", "stddev"])
def test_whitened_kl_is_the_divergence_from_the_standard_normal(form):
    mean, root = dense.random_q(5)
    q, covariance = {
        "lower": (Whitened(mean, root), root @ root.T),
        "upper": (Whitened(mean, root.T), root.T @ root),
        "negative diagonal": (Whitened(mean, -root), root @ root.T),
        "stddev": (Whitened(mean, stddev=root.diagonal()), torch.diag(root.diagonal() ** 2)),
    }[form]
    expected = dense.kl(mean, covariance, torch.zeros(5), torch.eye(5))
    torch.testing.assert_close(bounds.whitened_kl(q), expected, rtol=RTOL, atol=0)


def test_whitened_kl_is_finite_where_a_standard_deviation_is_zero():
    stddev = torch.tensor([0.0, 1.0])
    expected = -0.5 - math.log(torch.finfo(stddev.dtype).tiny)
    for q in (Whitened(torch.zeros(2), stddev=stddev), Whitened(torch.zeros(2), root=torch.diag(stddev))):
        torch.testing.assert_close(bounds.whitened_kl(q), torch.tensor(expected))


def test_expected_log_prob_is_the_integral_of_the_log_density():
    targets, mean = torch.randn(2, 17)
    variance, noise = 0.1 + torch.rand(2, 17)
    # E[f] = mean and E[(f - mean)^2] = variance hold exactly for these two equally likely points.
    nodes = torch.stack([mean - variance.sqrt(), mean + variance.sqrt()])
    expected = torch.distributions.Normal(nodes, noise.sqrt()).log_prob(targets).mean(0)
    actual = bounds.gaussian_expected_log_prob(targets, mean, variance, noise)
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=1e-12)
