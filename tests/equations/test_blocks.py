"""Block-diagonal M: partitions, batches of whole blocks, and the bounds between F_4 and F_8."""

from __future__ import annotations

import itertools
import math

import gpytorch
import pytest
import torch

import tighter_gp
from tests.equations.test_wrappers import Latent, gaussian, inputs, lmc, make_model, task_noise
from tests.tools import dense
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tighter_gp.blocks import BlockBatchSampler, Blocks, block_chunks, partition
from tighter_gp.conditionals import block_table
from tighter_gp.maths import bounds

N = 17
LABELS = torch.tensor([0, 1, 2, 0, 1, 0, 3, 3, 3, 2, 2, 1, 0, 0, 0, 2, 1])  # sizes 6, 4, 4, 3
LABELS_LIST = LABELS.tolist()


def log_dets(p, labels):
    """log|I + D_bb / noise|, one value per block."""
    scaled = p.D / p.noise.sqrt().outer(p.noise.sqrt())
    values = []
    for label in labels.unique():
        rows = labels == label
        values.append(torch.linalg.slogdet(torch.eye(int(rows.sum())) + scaled[rows][:, rows]).logabsdet)
    return torch.stack(values)


def f_block(p, labels):
    return dense.base(p) - 0.5 * log_dets(p, labels).sum()


# ---- Partitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "max_size"), [(7, None), (7, 15), (7, 40), (1, None), (103, None), (10, 11)])
def test_partition_covers_all_points_in_blocks_of_bounded_size(num_blocks, max_size):
    x = torch.rand(103, 2)
    labels = partition(x, num_blocks, max_size=max_size)
    sizes = labels.bincount()
    assert labels.shape == (103,)
    assert len(sizes) <= num_blocks
    assert sizes.min() > 0
    assert sizes.max() <= (math.ceil(103 / num_blocks) if max_size is None else max_size)


def test_partition_puts_near_points_together():
    x = torch.rand(200, 2)
    labels = partition(x, 20)
    spread = lambda labels: sum((x[labels == b] - x[labels == b].mean(0)).square().sum() for b in range(20))
    assert spread(labels) < 0.2 * spread(labels[torch.randperm(200)])


@pytest.mark.parametrize("batch_size", [1, 6, 9, 17, 100])
def test_chunks_show_every_point_once_in_whole_blocks(batch_size):
    chunks = list(block_chunks(LABELS, batch_size))
    assert torch.equal(torch.cat(chunks).sort().values, torch.arange(N))
    for rows in chunks:
        present = LABELS[rows].unique()
        assert len(rows) == int(torch.isin(LABELS, present).sum())
        assert len(rows) <= batch_size or len(present) == 1
    with pytest.raises(ValueError, match="batch_size"):
        next(block_chunks(LABELS, 0))


# ---- Batches of whole blocks ------------------------------------------------------------------------------------------


def design(labels, k):
    """Every set of k blocks and the probability with which the sampler should draw it."""
    sizes = labels.bincount()
    for chosen in itertools.combinations(range(len(sizes)), k):
        rows = torch.isin(labels, torch.tensor(chosen)).nonzero().flatten()
        yield chosen, rows, len(rows) / len(labels) / math.comb(len(sizes) - 1, k - 1)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sampler_draws_sets_of_blocks_in_proportion_to_their_points(k):
    sampler = BlockBatchSampler(LABELS, k, generator=torch.Generator().manual_seed(0))
    sizes, draws, counts = LABELS.bincount().tolist(), 1500, {}
    for _ in range(draws):
        rows = sampler.draw().tolist()
        chosen = tuple(sorted({LABELS_LIST[row] for row in rows}))
        assert len(rows) == len(set(rows)) == sum(sizes[label] for label in chosen)
        counts[chosen] = counts.get(chosen, 0) + 1
    probabilities = {chosen: probability for chosen, _, probability in design(LABELS, k)}
    assert sum(probabilities.values()) == pytest.approx(1)
    for chosen, probability in probabilities.items():
        error = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts.get(chosen, 0) / draws - probability) <= 4 * error + 1e-12


# ---- Collapsed bound --------------------------------------------------------------------------------------------------


def projection_of(p):
    return torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf


def block_bound(p, labels):
    rows = block_table(labels)
    covariance = p.D[rows.clamp_min(0).unsqueeze(-1), rows.clamp_min(0).unsqueeze(-2)]
    covariance = covariance * ((rows >= 0).unsqueeze(-1) & (rows >= 0).unsqueeze(-2))
    return bounds.block_bound(projection_of(p), p.y, p.noise, covariance, rows)


@pytest.mark.parametrize("seed", range(25))
def test_blocks_lie_between_the_diagonal_and_the_full_bound_and_merging_never_lowers_them(seed):
    p = dense.problem(seed, hetero=bool(seed % 2), kernel="matern32" if seed % 3 else "rbf")
    generator = torch.Generator().manual_seed(seed)
    labels, previous = torch.arange(N), bounds.tighter_bound(projection_of(p), p.y, p.noise, p.d)
    torch.testing.assert_close(block_bound(p, labels), previous, rtol=1e-9, atol=0)
    while len(labels.unique()) > 1:
        first, second = labels.unique()[torch.randperm(len(labels.unique()), generator=generator)[:2]]
        labels = torch.where(labels == second, first, labels)
        value = block_bound(p, labels)
        assert value >= previous - 1e-9 * abs(previous)
        previous = value
    torch.testing.assert_close(previous, dense.f8(p), rtol=1e-9, atol=0)
    torch.testing.assert_close(previous, bounds.full_bound(projection_of(p), p.y, p.noise, p.D), rtol=1e-9, atol=0)
    assert dense.f4(p) < dense.f8(p) < dense.evidence(p) + 1e-9


def collapsed(p, hetero=False, **kwargs):
    likelihood = make_noise(p.noise if hetero else p.noise[0])
    kernel = make_kernel(p.kernel, p.variance, p.lengthscales)
    return CollapsedGP(p.x, p.y, p.z, kernel, likelihood, **kwargs), likelihood


@pytest.mark.parametrize("hetero", [False, True])
def test_collapsed_model_has_the_dense_bounds(hetero):
    p = dense.problem(5, hetero=hetero)
    cases = [
        ({"bound": "block", "blocks": LABELS}, f_block(p, LABELS)),
        ({"bound": "block", "blocks": torch.arange(N)}, dense.f4(p)),
        ({"bound": "block", "blocks": torch.zeros(N, dtype=torch.long)}, dense.f8(p)),
        ({"bound": "full"}, dense.f8(p)),
    ]
    for kwargs, expected in cases:
        model, likelihood = collapsed(p, hetero, **kwargs)
        actual = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


def test_gradient_of_the_collapsed_block_bound_is_the_dense_one():
    p = dense.problem(6)
    model, likelihood = collapsed(p, bound="block", blocks=LABELS)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    kernel, z, noise = model.covar_module.base_kernel, model.covar_module.inducing_points, likelihood.noise
    k = lambda a, b: dense.rbf(a, b, kernel.outputscale, kernel.base_kernel.lengthscale[0])
    Kuu, Kuf, Kff = k(z, z), k(z, p.x), k(p.x, p.x)
    Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
    expected = f_block(p._replace(noise=noise.expand(N), Kuu=Kuu, Kuf=Kuf, Kff=Kff, Q=Q, D=Kff - Q), LABELS) / N
    parameters = [z, likelihood.raw_noise, kernel.raw_outputscale, kernel.base_kernel.raw_lengthscale]
    actual = mll(model(p.x), p.y)
    pairs = zip(torch.autograd.grad(actual, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)


# ---- Uncollapsed ------------------------------------------------------------------------------------------------------


def uncollapsed(p, q, labels, num_data=N):
    """Bound per datum for a batch: SVGP's without the residual, less the block penalty."""
    L, W = torch.linalg.cholesky(p.Kuu), torch.linalg.inv(p.Kuu) @ p.Kuf
    mean, root = L @ q[0], L @ q[1]
    s = (W.T @ root @ root.T @ W).diagonal()
    data = gaussian(p.y, W.T @ mean, s, p.noise).sum() - 0.5 * log_dets(p, labels).sum()
    return data / len(p.y) - dense.kl(mean, root @ root.T, torch.zeros(len(mean)), p.Kuu) / num_data


def uncollapsed_model(p, labels=LABELS, q=None, **kwargs):
    kernel = make_kernel(p.kernel, p.variance, p.lengthscales)
    return make_gp(p.z, kernel, q or dense.random_q(len(p.z)), conditional=Blocks(labels), **kwargs)


@pytest.mark.parametrize("hetero", [False, True])
@pytest.mark.parametrize("labels", [LABELS, torch.arange(N), torch.zeros(N, dtype=torch.long)])
def test_uncollapsed_bound_is_the_dense_one(hetero, labels):
    p, q = dense.problem(1, hetero=hetero), dense.random_q(5)
    model, likelihood = uncollapsed_model(p, labels), make_noise(p.noise if hetero else p.noise[0])
    actual = tighter_gp.TighterELBO(likelihood, model, 40)(model(p.x), p.y)
    torch.testing.assert_close(actual, uncollapsed(p, q, labels, 40), rtol=1e-9, atol=0)


def test_uncollapsed_bound_is_the_elbo_of_its_own_conditional():
    """From the definition: q(f|u) with covariance C built from the symmetric root of D and M = blocks."""
    p, q = dense.problem(1), dense.random_q(5)
    scaled = p.D / p.noise[0]
    M = torch.zeros(N, N)
    for label in range(4):
        rows = (label == LABELS).nonzero()
        M[rows, rows.T] = torch.linalg.inv(torch.eye(len(rows)) + scaled[rows, rows.T])
    values, vectors = torch.linalg.eigh(p.D)
    root = vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
    C, jitter = root @ M @ root, 1e-10 * torch.eye(N)
    price = dense.kl(torch.zeros(N), C + jitter, torch.zeros(N), p.D + jitter)
    ones = torch.ones(N)
    svgp = dense.uncollapsed(p, q[0], q[1] @ q[1].T, ones) + 0.5 * (p.d / p.noise).sum()
    expected = svgp - price - 0.5 * torch.trace(C) / p.noise[0]
    model = uncollapsed_model(p)
    actual = N * tighter_gp.TighterELBO(make_noise(p.noise[0]), model, N)(model(p.x), p.y)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", ["rbf", "unknown to the package"])
def test_gradient_of_the_uncollapsed_bound_is_the_dense_one(kernel):
    p = dense.problem(3)
    model, likelihood = uncollapsed_model(p), make_noise(p.noise[0])
    if kernel != "rbf":

        class Own(gpytorch.kernels.ScaleKernel):
            """Evaluated by GPyTorch, not by the package."""

        own = Own(model.covar_module.base_kernel)
        own.outputscale = p.variance
        model.covar_module = own
    strategy, k = model.variational_strategy, model.covar_module
    z, parameters = strategy.inducing_points, strategy._variational_distribution
    cov = lambda a, b: dense.rbf(a, b, k.outputscale, k.base_kernel.lengthscale[0])
    Kuu, Kuf, Kff = cov(z, z), cov(z, p.x), cov(p.x, p.x)
    Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
    same = p._replace(noise=likelihood.noise.expand(N), Kuu=Kuu, Kuf=Kuf, Kff=Kff, Q=Q, D=Kff - Q)
    expected = uncollapsed(same, (parameters.variational_mean, parameters.chol_variational_covar.tril()), LABELS)
    actual = tighter_gp.TighterELBO(likelihood, model, N)(model(p.x), p.y)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
    leaves = [z, likelihood.raw_noise, k.raw_outputscale, k.base_kernel.raw_lengthscale, *parameters.parameters()]
    pairs = zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("hetero", [False, True])
def test_batches_of_whole_blocks_are_unbiased(k, hetero):
    """The expectation over all sets of blocks, with the sampler's probabilities, is the full bound."""
    p = dense.problem(4, hetero=hetero)
    model, likelihood = uncollapsed_model(p), make_noise(p.noise if hetero else p.noise[0])
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    expectation = 0.0
    for _, rows, probability in design(LABELS, k):
        kwargs = {"noise": p.noise[rows]} if hetero else {}
        expectation = expectation + probability * mll(model(p.x[rows], index=rows), p.y[rows], **kwargs)
    torch.testing.assert_close(expectation, mll(model(p.x), p.y), rtol=1e-10, atol=0)


def test_whole_bound_is_gathered_block_by_block():
    p = dense.problem(4)
    model, likelihood = uncollapsed_model(p), make_noise(p.noise[0])
    expected = N * tighter_gp.TighterELBO(likelihood, model, N)(model(p.x), p.y)
    for batch_size in (5, 8, 100):
        actual = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y, batch_size=batch_size)
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=0)


def test_missing_targets_leave_their_points_out_of_the_blocks():
    p, rows = dense.problem(4), torch.arange(N) % 5 != 2
    model, likelihood = uncollapsed_model(p), make_noise(p.noise[0])
    with gpytorch.settings.observation_nan_policy("fill"):
        y = torch.where(rows, p.y, torch.nan)
        actual = N * tighter_gp.TighterELBO(likelihood, model, N)(model(p.x), y)
    few = p._replace(
        y=p.y[rows], noise=p.noise[rows], Kuf=p.Kuf[:, rows], D=p.D[rows][:, rows], x=p.x[rows], Q=p.Q[rows][:, rows]
    )
    expected = len(few.y) * uncollapsed(few, dense.random_q(5), LABELS[rows], len(few.y))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
    actual.backward()
    assert all(torch.isfinite(q.grad).all() for q in model.parameters() if q.grad is not None)


# ---- With other strategies --------------------------------------------------------------------------------------------

BATCH = torch.tensor([0, 0, 1, 2, 1, 1, 0, 2, 1, 2, 0])  # blocks of the 11 points of make_model's batch


def residual_blocks(model, member, x, weights):
    """log|I + w D_bb| per block for one latent function, D from the dense kernel."""
    base = model.variational_strategy.base_variational_strategy
    kernel, z = model.covar_module, base.inducing_points
    k = lambda a, b: dense.rbf(a, b, kernel.outputscale[member], kernel.base_kernel.lengthscale[member][0])
    D = k(x, x) - k(x, z) @ torch.linalg.inv(k(z, z) + base.jitter_val * torch.eye(len(z))) @ k(z, x)
    total = 0.0
    for label in range(3):
        rows = label == BATCH
        total = total + torch.linalg.slogdet(torch.eye(int(rows.sum())) + weights * D[rows][:, rows]).logabsdet
    return total


def test_blocks_of_an_lmc():
    model, (x, y) = make_model(lmc(), (2,), conditional=Blocks(BATCH)), inputs()
    (likelihood, noise), W = task_noise(), model.variational_strategy.lmc_coefficients
    actual = tighter_gp.TighterELBO(likelihood, model, len(x))(model(x), y)
    mean, variance, expected = 0.0, 1e-7, 0.0
    for k in range(2):
        f = Latent(model, (k,), x)
        mean, variance = mean + f.mean.unsqueeze(-1) * W[k], variance + f.s.unsqueeze(-1) * W[k] ** 2
        expected = expected - 0.5 * residual_blocks(model, (k,), x, (W[k] ** 2 / noise).sum()) - f.kl
    expected = (expected + gaussian(y, mean, variance, noise).sum()) / len(x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
