"""q(x): rows by index, sparse gradients, priors that move, principal components, encoders."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gpytorch.priors import NormalPrior
from torch.distributions import (
    Categorical,
    Independent,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    TransformedDistribution,
)
from torch.distributions.transforms import AffineTransform

import tighter_gp
from tighter_gp.gplvm import (
    BayesianGPLVM,
    EncodedLatents,
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


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def test_rows_are_those_asked_for():
    start, stddev = torch.randn(9, 3), 0.1 + torch.rand(9, 3)
    latents = VariationalLatents(start, stddev=stddev)
    rows = torch.tensor([7, 0, 7, 3])
    close(latents.q(rows).mean, start[rows])
    close(latents.q(rows).stddev, stddev[rows])
    assert latents(rows, num_samples=5).shape == (5, 4, 3)
    expected = 0.5 * (stddev**2 + start**2 - 1 - torch.log(stddev**2)).sum(-1)
    close(latents.kl_divergence(rows), expected[rows])
    close(latents.kl_divergence(), expected)


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


def test_a_sparse_step_leaves_the_other_rows_alone():
    latents = VariationalLatents(torch.randn(9, 3))
    before = latents.mean.detach().clone()
    optimizer = torch.optim.SparseAdam(latents.parameters(), lr=0.1)
    rows = torch.tensor([2, 5])
    latents.kl_divergence(rows).sum().backward()
    optimizer.step()
    changed = (latents.mean != before).any(-1).nonzero().flatten()
    assert changed.tolist() == [2, 5]


def test_parameter_groups_cover_every_parameter_once():
    per_point = tighter_gp.PerPoint(9, batch_shape=torch.Size([4]))
    model = BayesianGPLVM(VariationalLatents(torch.randn(9, 3)), torch.randn(5, 3), 4, conditional=per_point)
    groups = parameter_groups(model, model.likelihood)
    sparse = {id(model.latents.mean), id(model.latents.raw_stddev), id(per_point.raw_m)}
    assert {id(p) for p in groups.sparse} == sparse
    assert len(groups.dense) + len(groups.sparse) == len(list(model.parameters()))
    LatentVariableELBO(model.likelihood, model, 9)(torch.arange(4), torch.randn(4, 4)).backward()
    assert all(p.grad.is_sparse for p in groups.sparse)
    assert not any(p.grad.is_sparse for p in groups.dense)
    frozen = VariationalLatents(torch.randn(9, 3), sparse=False)
    frozen.mean.requires_grad_(False)
    assert parameter_groups(frozen) == ([frozen.raw_stddev], [])


@pytest.mark.parametrize("index", [torch.tensor([0, 9]), torch.tensor([-1])])
def test_index_out_of_range_is_an_error(index):
    for latents in (VariationalLatents(torch.randn(9, 3)), EncodedLatents(torch.randn(9, 4), 3)):
        with pytest.raises(IndexError, match=r"0\.\.8 for 9 rows"):
            latents(index)


def test_bad_starts_are_errors():
    with pytest.raises(ValueError, match="table N x Q"):
        VariationalLatents(torch.randn(9))
    with pytest.raises(ValueError, match="int64"):
        VariationalLatents(torch.ones(9, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="finite"):
        VariationalLatents(torch.full((9, 3), torch.nan))
    with pytest.raises(ValueError, match="positive"):
        VariationalLatents(torch.randn(9, 3), stddev=-1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Priors
# ---------------------------------------------------------------------------------------------------------------------


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


def test_divergence_from_a_normal_prior_is_exact():
    prior = MultivariateNormal(torch.ones(3), torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.5]]))
    latents = VariationalLatents(torch.randn(4, 3), prior, stddev=0.7)
    q = MultivariateNormal(latents.mean, torch.diag_embed(latents.stddev**2))
    close(latents.kl_divergence(), torch.distributions.kl_divergence(q, prior))


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


def test_prior_moves_to_another_device():
    latents = VariationalLatents(torch.randn(4, 3)).to("meta")
    q = latents.q()
    assert latents.prior.kl_divergence(q).device.type == "meta"


def test_the_users_prior_is_not_changed():
    prior = Normal(torch.zeros(3), torch.ones(3))
    VariationalLatents(torch.randn(4, 3), prior).to(torch.float32)
    assert prior.loc.dtype == torch.float64


def test_bad_priors_are_errors():
    with pytest.raises(ValueError, match=r"one latent row, of shape \(3,\)"):
        VariationalLatents(torch.randn(4, 3), Normal(torch.zeros(4, 3), torch.ones(4, 3)))
    with pytest.raises(ValueError, match="one latent row"):
        VariationalLatents(torch.randn(4, 3), MultivariateNormal(torch.zeros(2), torch.eye(2)))
    with pytest.raises(TypeError, match="torch distribution"):
        VariationalLatents(torch.randn(4, 3), "normal")


def test_prior_moments_are_its_own():
    latents = VariationalLatents(torch.randn(4, 3), LogNormal(torch.zeros(3), torch.ones(3)))
    mean, stddev = latents.prior.moments(latents.mean)
    close(mean, torch.full((3,), 0.5).exp())
    assert stddev.shape == (3,)


# ---------------------------------------------------------------------------------------------------------------------
# Principal components
# ---------------------------------------------------------------------------------------------------------------------


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


def test_bad_data_are_errors():
    y = torch.randn(30, 5)
    constant, empty = y.clone(), y.clone()
    constant[:, 3], empty[:, 1] = 2.0, torch.nan
    with pytest.raises(ValueError, match=r"Columns \[3\] of the data are constant"):
        VariationalLatents.from_pca(constant, 2)
    with pytest.raises(ValueError, match=r"Columns \[1\] of the data have no observed entry"):
        VariationalLatents.from_pca(empty, 2)
    with pytest.raises(ValueError, match="between 1 and 5, the number of columns of the data; got 6"):
        VariationalLatents.from_pca(y, 6)
    with pytest.raises(ValueError, match="at least as many rows"):
        principal_components(y[:2], 3)
    with pytest.raises(ValueError, match=r"shaped like the data, \(30, 5\)"):
        VariationalLatents.from_pca(y, 2, mask=torch.ones(30, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="5 entries of the data are infinite"):
        principal_components(torch.cat([y, torch.full((1, 5), torch.inf)]), 2)
    for build in (BayesianGPLVM.from_data, lambda data, dim, _, **mask: EncodedLatents(data, dim, **mask)):
        with pytest.raises(ValueError, match="constant"):
            build(constant, 2, 4)
        with pytest.raises(ValueError, match="no observed entry"):
            build(empty, 2, 4)
        with pytest.raises(ValueError, match="got 6"):
            build(y, 6, 4)
        with pytest.raises(ValueError, match="shaped like the data"):
            build(y, 2, 4, mask=torch.ones(29, 5, dtype=torch.bool))
        # A column that only the mask leaves empty or constant.
        for value, message in ((torch.arange(30) < 0, "no observed entry"), (torch.arange(30) < 1, "constant")):
            mask = torch.ones(30, 5, dtype=torch.bool)
            mask[:, 4] = value
            with pytest.raises(ValueError, match=message):
                build(y, 2, 4, mask=mask)
    with pytest.raises(ValueError, match="num_inducing must lie between 1 and the 30 rows"):
        BayesianGPLVM.from_data(y, 2, 31)


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


# ---------------------------------------------------------------------------------------------------------------------
# Encoders
# ---------------------------------------------------------------------------------------------------------------------


def test_encoded_rows_are_the_encoders_answer():
    y = torch.randn(9, 4)
    encoder = torch.nn.Linear(4, 6).double()
    latents = EncodedLatents(y, 3, encoder)
    rows = torch.tensor([5, 0, 8])
    output = encoder(y[rows])
    close(latents.q(rows).mean, output[:, :3])
    close(latents.q(rows).stddev, torch.nn.functional.softplus(output[:, 3:]))
    close(latents.encode(y[rows]).mean, output[:, :3])
    assert latents(rows, num_samples=2).shape == (2, 3, 3)
    assert latents.kl_divergence(rows).shape == (3,)
    assert latents.kl_divergence().shape == (9,)


@pytest.mark.parametrize("encode_mask", [False, True])
def test_missing_entries_reach_the_encoder_as_means(encode_mask):
    y = torch.randn(9, 4)
    observed = torch.rand(9, 4) > 0.3
    seen = {}

    class Encoder(torch.nn.Module):
        def forward(self, inputs):
            seen["inputs"] = inputs
            return inputs[:, :1].expand(-1, 4)

    latents = EncodedLatents(y, 2, Encoder(), mask=observed, encode_mask=encode_mask)
    latents.q()
    mean = torch.where(observed, y, torch.nan).nanmean(0)
    expected = torch.where(observed, y, mean)
    close(seen["inputs"][:, :4], expected)
    if encode_mask:
        close(seen["inputs"][:, 4:], observed.double())


def test_encoded_latents_move_copy_and_keep_data_out_of_their_state():
    latents = EncodedLatents(torch.randn(9, 4), 2)
    assert "targets" not in latents.state_dict()
    for other in (copy.deepcopy(latents), pickle.loads(pickle.dumps(latents))):
        close(other.q().mean, latents.q().mean)
    latents.float()
    assert latents(torch.tensor([1])).dtype == torch.float32


def test_an_encoder_of_the_wrong_width_is_an_error():
    latents = EncodedLatents(torch.randn(9, 4), 3, torch.nn.Linear(4, 3).double())
    with pytest.raises(ValueError, match="9 x 6 for latent_dim=3"):
        latents.q()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_model_starts_from_an_array_as_from_a_tensor(dtype):
    Y = np.random.default_rng(0).normal(size=(30, 4)).astype(dtype)
    mask = np.random.default_rng(1).random((30, 4)) > 0.1
    models = [
        BayesianGPLVM.from_data(
            data, latent_dim=2, num_inducing=5, mask=seen, generator=torch.Generator().manual_seed(0)
        )
        for data, seen in ((Y, mask), (torch.tensor(Y), torch.tensor(mask)))
    ]
    found, wanted = (model.state_dict() for model in models)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert models[0].latents.mean.dtype == torch.tensor(Y).dtype
    q_x = models[0].infer_latents(Y[:3], mask[:3], num_steps=2)
    assert models[0].log_density(Y[:3], q_x).shape == (3, 4)
    with pytest.raises(TypeError, match="targets must be a tensor or a numpy array; got list"):
        BayesianGPLVM.from_data(Y.tolist(), latent_dim=2, num_inducing=5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
def test_data_of_any_kind_of_number(dtype):
    rows = (torch.rand(20, 4, generator=torch.Generator().manual_seed(0)) > 0.5).to(dtype)
    wanted = rows.to(torch.get_default_dtype())
    found, expected = (tighter_gp.gplvm.principal_components(data, 2).scores for data in (rows, wanted))
    torch.testing.assert_close(found, expected)
    latents = tighter_gp.gplvm.EncodedLatents(rows, 2)
    torch.testing.assert_close(latents.encode(rows.double()).mean, latents.encode(wanted).mean)
    tighter_gp.gplvm.CollapsedBayesianGPLVM(
        tighter_gp.gplvm.VariationalLatents.from_pca(rows, 2), expected[:5].clone(), rows
    )()
