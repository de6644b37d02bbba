"""Each number of a diagnosis against its dense definition, and what it tells the user."""

from __future__ import annotations

import dataclasses

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools import dense
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.solve_gp import make_solve_gp
from tighter_gp.blocks import Blocks, partition
from tighter_gp.diagnostics import diagnose

BOUNDS = {"titsias": dense.f1, "spherical": dense.f5, "tighter": dense.f4, "full": dense.f8, "evidence": dense.evidence}
KINDS = ["uncollapsed", "collapsed"]


def kernel_of(p: dense.Problem) -> gpytorch.kernels.Kernel:
    return make_kernel(p.kernel, p.variance, p.lengthscales)


def likelihood_of(p: dense.Problem):
    return make_noise(p.noise if (p.noise != p.noise[0]).any() else p.noise[0])


def model_of(p: dense.Problem, likelihood, kind: str = "uncollapsed", mean: float = 0.0, **kwargs):
    if kind == "collapsed":
        return CollapsedGP(p.x, p.y + mean, p.z, kernel_of(p), likelihood, mean, **kwargs)
    return make_gp(p.z, kernel_of(p), dense.random_q(len(p.z)), mean=mean, **kwargs)


def diagnosis_of(p: dense.Problem, kind: str = "uncollapsed", mean: float = 0.0, **kwargs):
    likelihood = likelihood_of(p)
    return diagnose(model_of(p, likelihood, kind, mean), likelihood, p.x, p.y + mean, **kwargs)


def block_bound(p: dense.Problem, labels: torch.Tensor) -> torch.Tensor:
    same = (labels.unsqueeze(0) == labels.unsqueeze(1)).double()
    return dense.f8(p._replace(D=p.D * same))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hetero", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1.7])
def test_the_bounds_are_the_dense_ones(kind, hetero, mean):
    p = dense.problem(3, hetero=hetero)
    diagnosis = diagnosis_of(p, kind, mean)
    for name, reference in BOUNDS.items():
        assert getattr(diagnosis, name) == pytest.approx(reference(p).item(), rel=1e-9), name
    assert diagnosis.nystrom == pytest.approx(dense.base(p).item(), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistics_of_residual_and_scale_are_those_of_the_points(kind):
    p = dense.problem(5, n=41, hetero=True)
    diagnosis = diagnosis_of(p, kind)
    ratio = p.d / p.noise
    scale = p.noise / (p.noise + p.d)
    assert diagnosis.mean_ratio == pytest.approx(ratio.mean().item())
    assert diagnosis.noise == pytest.approx(p.noise.mean().item())
    places = [2, 10, 20, 30, 38]  # 5, 25, 50, 75 and 95% of 40
    assert diagnosis.ratio_quantiles == pytest.approx(ratio.sort().values[places].tolist())
    assert diagnosis.scale_quantiles == pytest.approx(scale.sort().values[places].tolist())
    expected = [((scale >= i / 10) & (scale < (i + 1) / 10)).sum().item() for i in range(10)]
    assert diagnosis.scale_histogram == expected
    assert sum(expected) == diagnosis.num_data == 41
    assert diagnosis.num_inducing == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_bound_is_the_dense_one(kind):
    p, labels = dense.problem(2, hetero=True), torch.tensor([3, 0, 7] * 5 + [0, 1])
    diagnosis = diagnosis_of(p, kind, blocks=labels)
    assert diagnosis.block == pytest.approx(block_bound(p, labels).item(), rel=1e-9)


def test_the_blocks_of_the_model_are_the_default():
    p = dense.problem(4)
    labels, likelihood = partition(p.x, 4), likelihood_of(p)
    expected = pytest.approx(block_bound(p, labels).item(), rel=1e-9)
    uncollapsed = model_of(p, likelihood, conditional=Blocks(labels))
    collapsed = model_of(p, likelihood, "collapsed", bound="block", blocks=labels)
    assert diagnose(uncollapsed, likelihood, p.x, p.y).block == expected
    assert diagnose(collapsed, likelihood, p.x, p.y).block == expected
    assert diagnosis_of(p).block is None


@pytest.mark.parametrize("seed", range(20))
def test_all_bounds_are_in_order_up_to_the_upper_one(seed):
    p = dense.problem(seed, n=23, m=4 + seed % 5, kernel=("rbf", "matern32")[seed % 2], hetero=seed % 3 == 0)
    d = diagnosis_of(p, blocks=5)
    chain = [d.titsias, d.spherical, d.tighter, d.block, d.full, d.evidence, d.upper]
    assert chain == sorted(chain)
    assert d.current < d.tighter


def test_the_upper_bound_is_the_dense_one_and_tight_where_all_is_explained():
    p = dense.problem(6, hetero=True)
    t = (p.d / p.noise).sum()
    inverse = torch.linalg.inv(p.Q + (1 + t) * torch.diag(p.noise))
    gap = p.y @ (torch.linalg.inv(p.Q + torch.diag(p.noise)) - inverse) @ p.y / 2
    assert diagnosis_of(p).upper == pytest.approx((dense.base(p) + gap).item(), rel=1e-9)
    explained = diagnosis_of(p._replace(z=p.x, Q=p.Kff, D=0 * p.D), "collapsed")
    assert explained.upper == pytest.approx(explained.evidence, abs=1e-5)


def test_current_is_the_objective_at_the_current_q_and_reaches_tighter_at_the_best():
    p = dense.problem(3)
    likelihood = likelihood_of(p)
    model = model_of(p, likelihood)
    mw, root = dense.random_q(5)
    expected = dense.uncollapsed(p, mw, root @ root.T, p.noise / (p.noise + p.d))
    assert diagnose(model, likelihood, p.x, p.y).current == pytest.approx(expected.item(), rel=1e-9)
    tighter_gp.set_optimal_q(model, likelihood, p.x, p.y)
    best = diagnose(model, likelihood, p.x, p.y)
    assert best.current == pytest.approx(best.tighter, rel=1e-9)
    assert diagnosis_of(p, "collapsed").current is None


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_not_change_the_result(kind):
    p = dense.problem(1, n=31)
    whole, parts = (dataclasses.astuple(diagnosis_of(p, kind, batch_size=size)) for size in (100, 7))
    for one, other in zip(whole, parts, strict=True):
        assert one == pytest.approx(other, rel=1e-12) if one is not None else other is None


def test_solve_gp_has_the_bounds_of_both_sets_together():
    p = dense.problem(2, m=7)
    likelihood = likelihood_of(p)
    diagnosis = diagnose(make_solve_gp(p.z[:4], p.z[4:], kernel_of(p)), likelihood, p.x, p.y)
    for name, reference in BOUNDS.items():
        assert getattr(diagnosis, name) == pytest.approx(reference(p).item(), rel=1e-8), name
    assert diagnosis.current < diagnosis.tighter


def test_the_table_shows_every_bound_that_there_is():
    p = dense.problem()
    diagnosis = diagnosis_of(p, blocks=3)
    text = str(diagnosis)
    for name in ("current", "titsias", "spherical", "tighter", "block", "full", "evidence", "upper"):
        assert f"{getattr(diagnosis, name):.3f} " in text, name
    assert text.count("#") > 10
    assert "17 points, 5 inducing points" in text
    short = str(diagnosis_of(p, "collapsed", max_exact=3))
    assert not any(name in short for name in ("current", "blocks, FB", "full, F8", "log evidence  "))


def test_the_shares_of_the_gap_are_those_of_the_bounds():
    d = diagnosis_of(dense.problem(0))
    gap = d.evidence - d.titsias
    shares = [f"{step / gap:.0%}" for step in (d.tighter - d.titsias, d.full - d.tighter, d.evidence - d.full)]
    assert f"Of the {gap / 17:.2f} nats per point" in d.advice
    assert f"closes {shares[0]}, blocks can close at most {shares[1]} more, and the other {shares[2]}" in d.advice


@pytest.mark.parametrize("num_inducing", [5, 20, 40])
def test_a_model_that_knows_a_few_targets_by_heart_has_learnt_the_mean(num_inducing):
    """The lengthscale never moved: each inducing point reaches the point it lies on and no other."""
    x = 1000 * torch.rand(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    y = torch.sin(x[:, 0] / 20)
    model = tighter_gp.CollapsedGP(x, y, x[:num_inducing], kernel, make_noise(0.5))
    diagnosis = diagnose(model, model.likelihood, x, y)
    assert diagnosis.advice.startswith("The model has learnt the mean and no more")
    kernel.base_kernel.lengthscale = 20.0
    assert "learnt the mean" not in diagnose(model, model.likelihood, x, y).advice


def test_a_model_of_gpytorchs_own_is_diagnosed_and_what_two_lines_gain():
    p, standard = dense.problem(3), gpytorch.variational.VariationalStrategy
    likelihood = likelihood_of(p)
    model, ours = model_of(p, likelihood, strategy=standard), model_of(p, likelihood)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found, wanted = (diagnose(m, likelihood, p.x, p.y) for m in (model, ours))
    for name in BOUNDS:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-12), name
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, len(p.y))
    assert found.current == pytest.approx(len(p.y) * elbo(model.train()(p.x), p.y).item(), rel=1e-9)
    assert "change two lines: TighterVariationalStrategy for VariationalStrategy" in found.advice
    assert f"gives away {(found.titsias - found.current) / 17:.2f} nats per point" in found.advice
    assert "two lines" not in wanted.advice
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_advice_follows_the_numbers():
    d = dataclasses.replace(diagnosis_of(dense.problem(0)), current=None, tighter=-60.0, full=-50.0)
    assert dataclasses.replace(d, evidence=-45.0).advice.endswith("Next: blocks.")
    assert dataclasses.replace(d, evidence=-30.0).advice.endswith("Next: more inducing points.")
    assert "Next" not in dataclasses.replace(d, full=-60.0, evidence=-60.0).advice
    p = dense.problem()
    short = diagnosis_of(p, max_exact=16, blocks=3)
    assert short.full is short.evidence is None
    gain, paid = (dense.f4(p) - dense.f1(p)) / 17, (dense.base(p) - dense.f4(p)) / 17
    assert f"gains {gain:.2f} nats per point over the standard one and still pays {paid:.2f}" in short.advice
    assert f"These blocks gain {(short.block - short.tighter) / 17:.2f} nats per point" in short.advice
    assert f"gives away {(short.tighter - short.current) / 17:.2f} nats per point" in short.advice
    explained = diagnosis_of(p._replace(z=p.x), "collapsed", blocks=3)
    assert explained.advice.startswith("The inducing points explain nearly all")
    assert "blocks gain" not in explained.advice
    costly = dataclasses.replace(short, jitter=1.7, current=short.tighter - 1.7)
    assert "The jitter costs 0.10 nats" in costly.advice
    assert "gives away" not in costly.advice


BAD = {
    "likelihood": (lambda p: {"likelihood": gpytorch.likelihoods.BernoulliLikelihood()}, TypeError, "got Bernoulli"),
    "y": (lambda p: {"y": p.y.unsqueeze(-1)}, ValueError, r"one single-output model: .* got \(17, 2\) and \(17, 1\)"),
    "nan": (lambda p: {"y": p.y / 0}, ValueError, "17 of 17 targets are NaN"),
    "blocks": (
        lambda p: {"blocks": torch.zeros(16).long()},
        ValueError,
        r"one label per point, shape \(17,\); got \(16",
    ),
    "batch": (lambda p: {"model": make_gp(p.z, batch_shape=torch.Size([2]))}, ValueError, "one model at a time"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_does_not_diagnose(name):
    p, (make, error, message) = dense.problem(), BAD[name]
    given = {"model": model_of(p, likelihood_of(p)), "likelihood": likelihood_of(p), "x": p.x, "y": p.y, **make(p)}
    with pytest.raises(error, match=message):
        diagnose(**given)
