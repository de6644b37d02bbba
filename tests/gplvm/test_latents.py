"""q(x): rows by index, sparse gradients, priors that move, principal components, encoders."""

from __future__ import annotations

import pytest
import torch
from gpytorch.priors import NormalPrior
from torch.distributions import (
    Categorical,
    Independent,
    Laplace,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    TransformedDistribution,
)
from torch.distributions.transforms import AffineTransform

from tighter_gp.gplvm import (
    BayesianGPLVM,
    LatentVariableELBO,
    VariationalLatents,
    parameter_groups,
    principal_components,
)


def close(value, expected, rel=1e-9):
    torch.testing.assert_close(value, torch.as_tensor(expected).expand_as(value), rtol=rel, atol=1e-12)


def mixture():
    means = torch.tensor([[-2.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
    return MixtureSameFamily(Categorical(torch.tensor([0.3, 0.7])), Independent(Normal(means, torch.ones(2, 3)), 1))


def test_gradients_are_sparse_and_equal_the_dense_ones():
    start = torch.randn(9, 3)
    rows = torch.tensor([7, 0, 7, 3])
    gradients = []
    for sparse in (True, False):
        latents = VariationalLatents(start, stddev=0.4, sparse=sparse)
        torch.manual_seed(1)
        (latents(rows).pow(3).sum() + latents.kl_divergence(rows).sum()).backward()
        gradients.append([p.grad for p in latents.parameters()])
    for table, full in zip(*gradients, strict=True):
        assert table.is_sparse
        assert not full.is_sparse
        assert sorted(table.coalesce().indices().squeeze(0).tolist()) == [0, 3, 7]
        close(table.to_dense(), full)


def test_parameter_groups_cover_every_parameter_once():
    model = BayesianGPLVM(VariationalLatents(torch.randn(9, 3)), torch.randn(5, 3), 4, conditional="beta")
    groups = parameter_groups(model, model.likelihood)
    sparse = {id(model.latents.mean), id(model.latents.raw_stddev)}
    assert {id(p) for p in groups.sparse} == sparse
    assert len(groups.dense) + len(groups.sparse) == len(list(model.parameters()))
    LatentVariableELBO(model.likelihood, model, 9)(torch.arange(4), torch.randn(4, 4)).backward()
    assert all(p.grad.is_sparse for p in groups.sparse)
    assert not any(p.grad.is_sparse for p in groups.dense)
    frozen = VariationalLatents(torch.randn(9, 3), sparse=False)
    frozen.mean.requires_grad_(False)
    assert parameter_groups(frozen) == ([frozen.raw_stddev], [])


@pytest.mark.parametrize(
    "prior",
    [
        Normal(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 1.0, 2.0])),
        Normal(0.5, 2.0),
        NormalPrior(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])),
        Independent(Normal(torch.ones(3), torch.tensor([0.5, 1.0, 2.0])), 1),
        MultivariateNormal(torch.ones(3), torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.5]])),
        Laplace(torch.zeros(3), torch.ones(3)),
        StudentT(torch.full((3,), 5.0)),
        mixture(),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_divergence_from_any_prior_is_right(prior):
    latents = VariationalLatents(torch.randn(4, 3), prior, stddev=0.7)
    q = latents.q()
    x = q.sample((40000,))
    log_p = prior.log_prob(x)
    log_p = log_p if prior.event_shape else log_p.sum(-1)
    difference = q.log_prob(x).sum(-1) - log_p
    torch.manual_seed(5)
    value = latents.prior.kl_divergence(q, q.rsample((40000,)))
    error = difference.std(0) / 200
    assert bool(((value - difference.mean(0)).abs() < 5 * error + 1e-9).all())
    value.sum().backward()
    assert bool(torch.isfinite(latents.mean.grad).all())


@pytest.mark.parametrize(
    "prior",
    [
        None,
        Normal(torch.zeros(3), torch.ones(3)),
        NormalPrior(torch.zeros(3), torch.ones(3)),
        MultivariateNormal(torch.zeros(3), torch.eye(3)),
        mixture(),
        TransformedDistribution(
            Normal(torch.zeros(3), torch.ones(3)), [AffineTransform(torch.ones(3), 2 * torch.ones(3))]
        ),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_prior_moves_with_its_module_after_construction(prior):
    latents = VariationalLatents(torch.randn(4, 3), prior)
    before = latents.prior.log_prob(torch.zeros(2, 3))
    latents.to(torch.float32)
    q = latents.q()
    assert latents.prior.kl_divergence(q, q.rsample((2,))).dtype == torch.float32
    after = latents.prior.log_prob(torch.zeros(2, 3, dtype=torch.float32))
    assert after.dtype == torch.float32
    close(after.double(), before, 1e-5)


def test_scores_are_those_of_the_singular_vectors():
    y = torch.randn(30, 5) @ torch.randn(5, 5) + 3
    scores, fraction = principal_components(y, 3)
    U, S, _ = torch.linalg.svd(y - y.mean(0), full_matrices=False)
    close(scores.abs(), (U[:, :3] * 30**0.5).abs())
    close(fraction, (S[:3] / S[0]) ** 2)
    latents = VariationalLatents.from_pca(y, 3, stddev=0.2)
    close(latents.mean.detach(), scores)
    close(latents.stddev.detach(), torch.full((30, 3), 0.2))


def test_missing_entries_count_as_their_columns_mean():
    y = torch.randn(30, 5)
    observed = torch.rand(30, 5) > 0.2
    filled = torch.where(observed, y, torch.where(observed, y, torch.nan).nanmean(0))
    expected = principal_components(filled, 2)
    for value in (
        principal_components(torch.where(observed, y, torch.nan), 2),
        principal_components(torch.where(observed, y, 1e5), 2, observed),
    ):
        close(value.scores, expected.scores)


def test_from_data_is_seeded_and_takes_dtype_and_kernel_from_its_arguments():
    y = torch.randn(30, 5)
    points = [
        BayesianGPLVM.from_data(
            y, 2, 6, generator=torch.Generator().manual_seed(seed)
        ).variational_strategy.inducing_points
        for seed in (1, 1, 2)
    ]
    assert torch.equal(points[0], points[1])
    assert not torch.equal(points[0], points[2])
    assert {p.dtype for p in BayesianGPLVM.from_data(y.float(), 2, 6).parameters()} == {torch.float32}


BAD = {
    "shape": (lambda: principal_components(torch.randn(5), 1), "must have shape N x P"),
    "columns": (lambda: principal_components(torch.ones(5, 3), 1), r"Columns \[0, 1, 2\] of the data are constant"),
    "empty": (lambda: principal_components(torch.tensor([[1.0, torch.nan], [2.0, torch.nan]]), 1), "no observed entry"),
    "dimension": (lambda: principal_components(torch.randn(5, 3), 4), "latent_dim must lie between 1 and 3"),
    "mask": (lambda: principal_components(torch.randn(5, 3), 1, torch.ones(5, 3)), "mask must be boolean"),
    "prior": (
        lambda: VariationalLatents(torch.randn(5, 2), Normal(torch.zeros(3), 1.0)),
        r"of shape \(2,\); got \(3,\)",
    ),
    "stddev": (lambda: VariationalLatents(torch.randn(5, 2), stddev=0.0), "positive and finite"),
    "inducing": (lambda: BayesianGPLVM.from_data(torch.randn(5, 3), 1, 6), "num_inducing must lie between 1 and the 5"),
    "rows": (
        lambda: LatentVariableELBO(*_with_likelihood(), num_data=8)(torch.arange(4), torch.randn(4, 4)),
        "num_data=8, but the model has latents for 9 rows",
    ),
    "target": (
        lambda: LatentVariableELBO(*_with_likelihood(), num_data=9)(torch.arange(4), torch.randn(9, 4)),
        "9 rows for 4 latents",
    ),
}


def _with_likelihood():
    model = BayesianGPLVM(VariationalLatents(torch.randn(9, 3)), torch.randn(5, 3), 4)
    return model.likelihood, model


@pytest.mark.parametrize("name", BAD)
def test_bad_data_are_errors(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
