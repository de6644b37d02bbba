"""The strict bound with neighbours: between F4 and F8, its limits, its gradient."""

from __future__ import annotations

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_kernel, make_noise
from tighter_gp.collapsed import core
from tighter_gp.conditionals import Blocks

N = 17


def vecchia(D, noise, sets) -> torch.Tensor:
    """The price by inverses, from sets as lists of earlier points."""
    B = torch.eye(len(D)) + D / (noise.sqrt().unsqueeze(-1) * noise.sqrt())
    variances = [B[n, n] - B[n, c] @ torch.linalg.inv(B[c][:, c]) @ B[c, n] for n, c in enumerate(sets)]
    return 0.5 * torch.stack(variances).log().sum()


def filled(D, noise, sets) -> tuple[torch.Tensor, torch.Tensor]:
    """D and noise within sets of one size, each point last."""
    size = max(map(len, sets)) + 1
    covariance, variances = torch.zeros(len(D), size, size), torch.ones(len(D), size)
    for n, c in enumerate(sets):
        points = torch.tensor([*c, n])
        covariance[n, -len(points) :, -len(points) :] = D[points][:, points]
        variances[n, -len(points) :] = noise[points]
    return covariance, variances


def bound(p, name="neighbours", **kwargs) -> torch.Tensor:
    kernel = make_kernel(p.kernel, p.variance, p.lengthscales)
    return tighter_gp.collapsed_bound(kernel, p.z, p.x, p.y, p.noise, bound=name, **kwargs)


def test_price_is_vecchias_and_has_the_limits():
    p = dense.problem(3, hetero=True)
    price = lambda sets: tighter_gp.maths.bounds.neighbour_penalty(*filled(p.D, p.noise, sets))
    none, every = [[] for _ in range(N)], [list(range(n)) for n in range(N)]
    some = [[m for m in range(n) if (m * n) % 3] for n in range(N)]
    blocks = [[m for m in range(n) if m % 4 == n % 4] for n in range(N)]
    for sets in (none, some, blocks, every):
        torch.testing.assert_close(price(sets), vecchia(p.D, p.noise, sets))
    torch.testing.assert_close(price(none), tighter_gp.maths.bounds.log_penalty(p.d, p.noise))
    torch.testing.assert_close(price(every), tighter_gp.maths.bounds.full_penalty(p.D, p.noise))
    within = lambda rows: p.D[rows.unsqueeze(-1), rows.unsqueeze(-2)]
    covariance, rows = Blocks(torch.arange(N) % 4).residual_blocks(N, within)
    torch.testing.assert_close(price(blocks), tighter_gp.maths.bounds.block_penalty(covariance, p.noise[rows]))
    assert price(every) < price(some) < price(none)


@pytest.mark.parametrize("hetero", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_bounds_rise_with_neighbours_from_f4_to_f8(seed, hetero):
    p = dense.problem(seed, hetero=hetero)
    values = [bound(p, num_neighbours=k, seed=seed) for k in (0, 1, 2, 3, 5, 8, 12, N)]
    torch.testing.assert_close(values[0], dense.f4(p))
    torch.testing.assert_close(values[-1], dense.base(p) - tighter_gp.maths.bounds.full_penalty(p.D, p.noise))
    assert all(low <= high + 1e-9 for low, high in zip(values, [*values[1:], dense.evidence(p)], strict=True))
    assert values[1] > values[0]


@pytest.mark.parametrize("kept", [10**6, 0])
def test_gradient_is_that_of_the_dense_bound(kept, monkeypatch):
    monkeypatch.setattr(core, "_KEPT", kept)
    p = dense.problem(4)
    gp = tighter_gp.CollapsedGP(
        p.x, p.y, p.z, make_kernel(p.kernel, p.variance, p.lengthscales), make_noise(p.noise[0]), bound="neighbours",
        num_neighbours=3, chunk_size=5,
    )  # fmt: skip
    parameters = list(gp.parameters())
    found = torch.autograd.grad(gp.bound(), parameters)
    kernel, z = gp.covar_module, gp.inducing_points
    A = torch.linalg.solve_triangular(
        torch.linalg.cholesky(kernel(z).to_dense()), kernel(z, p.x).to_dense(), upper=False
    )
    noise = gp.likelihood.noise.expand(N)
    sets = [[m for m in row[:-1].tolist() if m >= 0] for row in gp.neighbours[gp.neighbours[:, -1].argsort()]]
    value = dense.log_normal(p.y, A.mT @ A + torch.diag(noise)) - vecchia(
        kernel(p.x).to_dense() - A.mT @ A, noise, sets
    )
    torch.testing.assert_close(gp.bound(), value)
    for mine, theirs in zip(found, torch.autograd.grad(value, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_model_trains_and_is_evaluated_and_diagnosed_with_it():
    x = torch.linspace(0, 6, 60).unsqueeze(-1)
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(60)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    gp = tighter_gp.CollapsedGP(
        x, y, x[::8], kernel, gpytorch.likelihoods.GaussianLikelihood(), bound="neighbours", num_neighbours=4
    )
    start = gp.bound().item()
    tighter_gp.fit(gp, gp.likelihood, x, y, steps=20, progress=False)
    assert gp.bound() > start
    gp.choose_neighbours()
    torch.testing.assert_close(tighter_gp.evaluate_bound(gp, gp.likelihood, x, y), gp.bound().detach())
    diagnosis = tighter_gp.diagnose(gp, gp.likelihood, x, y, num_neighbours=4)
    assert diagnosis.tighter <= diagnosis.neighbours <= diagnosis.full
    assert diagnosis.neighbours == pytest.approx(gp.bound().item())
