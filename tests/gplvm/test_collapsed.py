"""Collapsed bounds of the Bayesian GPLVM: psi-statistics, golden values, dense transcriptions, the order of the bounds."""

from __future__ import annotations

import itertools
import math

import gpytorch
import pytest
import torch

from tests.gplvm.test_elbo import curve
from tests.tools import dense
from tests.tools.golden import VECTORS
from tighter_gp.gplvm import CollapsedBayesianGPLVM, LatentVariableELBO, VariationalLatents, collapsed, psi
from tighter_gp.maths import bounds

GOLDEN = next(case for case in VECTORS["gplvm"] if "psi1" in case["expected"])


def golden_problem():
    tensor = lambda key: torch.tensor(GOLDEN[key])
    kernel = GOLDEN["kernel"]
    return collapsed.LatentProblem(
        mean=tensor("q_x_mean"),
        variance=tensor("q_x_var"),
        inducing_points=tensor("Z"),
        outputscale=torch.tensor(kernel["variance"]),
        lengthscale=torch.tensor(kernel["lengthscales"]),
        noise=tensor("noise_variance"),
        targets=tensor("Y"),
    )


def random_problem(seed=0, num_data=9, num_inducing=4, latent_dim=2, num_outputs=3, per_output=False):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    return collapsed.LatentProblem(
        mean=randn(num_data, latent_dim),
        variance=0.02 + 0.4 * torch.rand(num_data, latent_dim, generator=generator),
        inducing_points=1.5 * randn(num_inducing, latent_dim),
        outputscale=torch.tensor(1.3),
        lengthscale=0.7 + torch.rand(latent_dim, generator=generator),
        noise=0.1 + torch.rand(num_outputs, generator=generator) if per_output else torch.tensor(0.3),
        targets=randn(num_data, num_outputs),
    )


def close(value, expected, rel=1e-9):
    torch.testing.assert_close(value, torch.as_tensor(expected).expand_as(value), rtol=rel, atol=1e-12)


def test_psi_statistics_are_golden():
    problem, expected = golden_problem(), GOLDEN["expected"]
    arguments = problem.mean, problem.variance, problem.inducing_points, problem.outputscale, problem.lengthscale
    close(psi.psi1(*arguments), torch.tensor(expected["psi1"]))
    close(psi.unpack_pairs(psi.psi2_pairs(*arguments).sum(0), 4), torch.tensor(expected["psi2_sum"]))
    sums = collapsed.statistics(problem)
    close(sums.mean_residual, torch.tensor(expected["mean_d"]))


def test_psi_statistics_are_expectations_of_the_kernel():
    p = random_problem(latent_dim=2)
    nodes, weights = collapsed.gauss_hermite_nodes(40, 2, p.mean)
    x = p.mean + p.variance.sqrt() * nodes  # S x N x Q
    k = torch.stack([dense.rbf(draw, p.inducing_points, 1.3, p.lengthscale) for draw in x])  # S x N x M
    arguments = p.mean, p.variance, p.inducing_points, p.outputscale, p.lengthscale
    close(psi.psi0(p.mean, p.outputscale), torch.full((9,), 1.3))
    close(psi.psi1(*arguments), torch.einsum("s,snm->nm", weights, k), 1e-8)
    second = torch.einsum("s,snm,snk->nmk", weights, k, k)
    close(psi.unpack_pairs(psi.psi2_pairs(*arguments), 4), second, 1e-7)


def test_psi_statistics_far_from_the_origin_keep_their_digits():
    p = random_problem()
    arguments = p.variance, p.inducing_points, p.outputscale, p.lengthscale
    shifted = p.variance, p.inducing_points + 1e4, p.outputscale, p.lengthscale
    close(psi.psi2_pairs(p.mean + 1e4, *shifted), psi.psi2_pairs(p.mean, *arguments), 1e-6)


def test_collapsed_bounds_are_golden():
    problem, expected = golden_problem(), GOLDEN["expected"]
    close(collapsed.latent_kl(problem), expected["kl_x"])
    close(collapsed.titsias_bound(problem), expected["collapsed_V_BGPLVM"])
    close(collapsed.constant_scale_bound(problem), expected["collapsed_T_constant_m"])
    nodes, weights = collapsed.gauss_hermite_nodes(80, 2, problem.mean)
    close(collapsed.tighter_bound(problem, nodes, weights), expected["collapsed_TV_BGPLVM"])
    residual = collapsed.residual_at(problem, collapsed.statistics(problem).chol, nodes)
    price = torch.tensordot(weights, torch.log1p(residual / problem.noise), dims=1)
    close(price, torch.tensor(expected["mean_log1p_d"]))


def dense_bound(p, observed, price):
    """Equation (33) output by output, with inverses; ``price(mean_d, noise)`` of the rows observed in each."""
    k = lambda a, b: dense.rbf(a, b, p.outputscale, p.lengthscale)
    Kuu, S, l2 = k(p.inducing_points, p.inducing_points), p.variance, p.lengthscale**2
    z, N, M = p.inducing_points, len(p.mean), len(p.inducing_points)
    psi1, psi2 = torch.zeros(N, M), torch.zeros(N, M, M)
    for n in range(N):
        for i in range(M):
            psi1[n, i] = p.outputscale * torch.prod(
                (1 + S[n] / l2) ** -0.5 * torch.exp(-0.5 * (p.mean[n] - z[i]) ** 2 / (l2 + S[n]))
            )
            for j in range(M):
                middle = (z[i] + z[j]) / 2
                psi2[n, i, j] = p.outputscale**2 * torch.prod(
                    (1 + 2 * S[n] / l2) ** -0.5
                    * torch.exp(-((z[i] - z[j]) ** 2) / (4 * l2) - (p.mean[n] - middle) ** 2 / (l2 + 2 * S[n]))
                )
    mean_d = p.outputscale - torch.einsum("ij,nij->n", torch.linalg.inv(Kuu), psi2)
    total = -0.5 * (S + p.mean**2 - 1 - torch.log(S)).sum()
    for column in range(p.targets.shape[1]):
        rows = torch.ones(N, dtype=torch.bool) if observed is None else observed[:, column]
        y, noise = p.targets[rows, column], p.noise.expand(p.targets.shape[1])[column]
        W = Kuu + psi2[rows].sum(0) / noise
        quadratic = y @ psi1[rows] @ torch.linalg.inv(W) @ psi1[rows].T @ y
        total = total + (
            -0.5 * len(y) * torch.log(2 * math.pi * noise)
            + 0.5 * torch.linalg.slogdet(Kuu).logabsdet
            - 0.5 * torch.linalg.slogdet(W).logabsdet
            - 0.5 * y @ y / noise
            + 0.5 * quadratic / noise**2
            - 0.5 * price(mean_d[rows], noise).sum()
        )
    return total


@pytest.mark.parametrize("per_output", [False, True], ids=["shared noise", "noise per output"])
@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
def test_closed_forms_are_the_dense_ones(per_output, missing):
    p = random_problem(per_output=per_output)
    observed = torch.rand(p.targets.shape) > 0.35 if missing else None
    if missing:
        p = p._replace(observed=observed, targets=torch.where(observed, p.targets, torch.nan))
    close(collapsed.titsias_bound(p), dense_bound(p, observed, lambda d, noise: d / noise))
    close(collapsed.constant_scale_bound(p), dense_bound(p, observed, lambda d, noise: torch.log(1 + d / noise)))


@pytest.mark.parametrize("per_output", [False, True])
def test_tighter_bound_with_missing_entries_drops_their_price(per_output):
    p = random_problem(per_output=per_output)
    observed = torch.rand(p.targets.shape) > 0.35
    p = p._replace(observed=observed)
    nodes, weights = collapsed.gauss_hermite_nodes(12, 2, p.mean)
    x = p.mean + p.variance.sqrt() * nodes
    Kuu = dense.rbf(p.inducing_points, p.inducing_points, 1.3, p.lengthscale)
    d = []
    for draw in x:
        Kuf = dense.rbf(p.inducing_points, draw, 1.3, p.lengthscale)
        d.append(1.3 - (Kuf * (torch.linalg.inv(Kuu) @ Kuf)).sum(0))
    expected = dense_bound(p, observed, lambda d, noise: torch.zeros_like(d))
    for column in range(3):
        noise = p.noise.expand(3)[column]
        price = torch.tensordot(weights, torch.log(1 + torch.stack(d) / noise), dims=1)
        expected = expected - 0.5 * price[observed[:, column]].sum()
    close(collapsed.tighter_bound(p, nodes, weights), expected)


@pytest.mark.parametrize("bound", ["titsias", "constant", "tighter"])
@pytest.mark.parametrize("missing", [False, True])
def test_gradients_are_right(bound, missing):
    p = random_problem(num_data=4, num_inducing=3, per_output=True)
    nodes, weights = collapsed.gauss_hermite_nodes(4, 2, p.mean)
    observed = torch.rand(p.targets.shape) > 0.35 if missing else None

    def value(mean, variance, z, outputscale, lengthscale, noise):
        problem = collapsed.LatentProblem(mean, variance, z, outputscale, lengthscale, noise, p.targets, observed)
        if bound == "titsias":
            return collapsed.titsias_bound(problem)
        if bound == "constant":
            return collapsed.constant_scale_bound(problem)
        return collapsed.tighter_bound(problem, nodes, weights)

    inputs = (p.mean, p.variance, p.inducing_points, p.outputscale, p.lengthscale, p.noise)
    assert torch.autograd.gradcheck(value, tuple(tensor.clone().requires_grad_() for tensor in inputs), atol=1e-6)


def test_every_bound_is_below_the_evidence_by_brute_force():
    p = random_problem(3, num_data=3, num_inducing=2, latent_dim=1, num_outputs=2)
    grid, grid_weights = collapsed.gauss_hermite_nodes(24, 3, p.mean)  # one coordinate per row
    x = grid.squeeze(1).unsqueeze(-1)  # S x 3 x 1

    def at(points):
        """Sum over outputs of F_4 and of the exact log density, at each draw of all rows."""
        k = lambda a, b: 1.3 * torch.exp(-0.5 * ((a - b.mT) / p.lengthscale) ** 2)
        chol = torch.linalg.cholesky(k(p.inducing_points, p.inducing_points))
        A = torch.linalg.solve_triangular(chol, k(p.inducing_points, points), upper=False)
        d = 1.3 - A.square().sum(-2)
        pairs = [(p.targets[:, c].expand(len(points), 3), p.noise) for c in range(2)]
        f4 = sum(bounds.tighter_bound(A, y, noise, d) for y, noise in pairs)
        exact = sum(bounds.exact_log_evidence(k(points, points), y, noise) for y, noise in pairs)
        return f4, exact

    per_sample = torch.tensordot(grid_weights, at(p.mean + p.variance.sqrt() * x)[0], dims=1) - collapsed.latent_kl(p)
    evidence = torch.logsumexp(at(x)[1] + grid_weights.log(), 0)
    nodes, weights = collapsed.gauss_hermite_nodes(60, 1, p.mean)
    chain = [
        collapsed.titsias_bound(p),
        collapsed.constant_scale_bound(p),
        collapsed.tighter_bound(p, nodes, weights),
        per_sample,
        evidence,
    ]
    assert all(low < high for low, high in itertools.pairwise(chain)), chain


def make_model(y, bound="tighter", likelihood=None, **kwargs):
    latents = VariationalLatents.from_pca(y, 2, stddev=0.3, sparse=False)
    return CollapsedBayesianGPLVM(latents, latents.mean[:7].detach(), y, likelihood, bound=bound, **kwargs)


@pytest.mark.parametrize("bound", ["titsias", "constant", "tighter"])
def test_model_is_the_pure_bound_per_datum(bound):
    model = make_model(curve(), bound)
    function = {"titsias": collapsed.titsias_bound, "constant": collapsed.constant_scale_bound}.get(bound)
    problem = model.problem()
    value = collapsed.tighter_bound(problem, model.nodes, model.weights) if function is None else function(problem)
    close(model() * 60, value.detach())
    assert problem.noise.shape == (1,)


@pytest.mark.parametrize("missing", [False, True])
def test_uncollapsed_model_has_the_collapsed_bound(missing):
    y = curve()
    if missing:
        y[torch.rand(y.shape) < 0.3] = torch.nan
    collapsed_model = make_model(y, jitter_val=0.0)
    collapsed_model.latents.stddev = 0.1
    collapsed_model.nodes, collapsed_model.weights = collapsed.gauss_hermite_nodes(8, 2, y)
    model = collapsed_model.uncollapsed()
    assert model.latents is collapsed_model.latents
    q_x = model.latents.q()
    x = q_x.mean + q_x.stddev * collapsed_model.nodes  # S x N x Q
    for objective, value in (
        (None, collapsed_model()),
        (gpytorch.mlls.VariationalELBO, collapsed.titsias_bound(collapsed_model.problem()) / len(y)),
    ):
        elbo = LatentVariableELBO(model.likelihood, model, len(y), objective=objective)
        at_nodes = torch.stack([elbo.at(points.unsqueeze(0), q_x, y).bound for points in x])
        close((collapsed_model.weights * at_nodes).sum(), value.detach(), 1e-5)


@pytest.mark.parametrize("bound", ["tighter", "constant", "titsias"])
@pytest.mark.parametrize(("noise", "lengthscale"), [(0.01, 1.0), (0.1, 3.0)])
def test_float32_parameters_have_the_value_and_gradient_of_float64(bound, noise, lengthscale):
    """Where float32 would not: K_ZZ is nearly singular, and the bound a small difference of large sums."""
    X = torch.randn(200, 2).float()
    Y = (torch.sin(X @ torch.randn(2, 12).float()) + 0.1 * torch.randn(200, 12)).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        latents = VariationalLatents(X.to(dtype), stddev=0.1, sparse=False)
        model = CollapsedBayesianGPLVM(latents, X[:20].to(dtype), Y.to(dtype), bound=bound, jitter_val=1e-4)
        model.covar_module.base_kernel.lengthscale, model.likelihood.noise = lengthscale, noise
        value = model()
        value.backward()
        found.append((value.detach().double(), model.inducing_points.grad.double()))
    (narrow, gradient), (wide, wanted) = found
    assert abs(narrow - wide) < 1e-5 * abs(wide)
    assert (gradient - wanted).norm() < 1e-3 * wanted.norm()


def test_bad_models_are_errors():
    latents, Y = VariationalLatents(torch.randn(8, 2), sparse=False), torch.randn(8, 3)
    make = lambda latents=latents, **kwargs: CollapsedBayesianGPLVM(latents, torch.randn(4, 2), Y, **kwargs)
    with pytest.raises(TypeError, match="closed forms for ScaleKernel"):
        make(covar_module=gpytorch.kernels.RBFKernel())
    with pytest.raises(TypeError, match="need a GaussianLikelihood; got"):
        make(likelihood=gpytorch.likelihoods.StudentTLikelihood())
    with pytest.raises(TypeError, match="no closed-form KL"):
        make(VariationalLatents(torch.randn(8, 2), torch.distributions.StudentT(3.0), sparse=False))
