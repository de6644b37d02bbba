"""Batches drawn by index from tensors and arrays."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.training.problems import M, N, data, problem
from tighter_gp.training import distributed, fit
from tighter_gp.training.batches import ArrayBatches


def test_an_epoch_shows_every_point_once_and_the_next_in_another_order():
    x, y = data()
    source = ArrayBatches(x, y, {}, 16, 0, x)
    batches = source.iterate(0)
    epochs = [[next(batches) for _ in range(source.steps_per_epoch)] for _ in range(2)]
    orders = [torch.cat([batch.rows for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(N))
    assert not torch.equal(*orders)
    assert [len(batch.y) for batch in epochs[0]] == [14, 13, 13, 13]
    for batch in epochs[1]:
        assert torch.equal(batch.x, x[batch.rows])
        assert torch.equal(batch.y, y[batch.rows])


def test_batches_from_step_k_are_those_an_uninterrupted_run_sees():
    x, y = data()
    source = ArrayBatches(x, y, {}, 16, 0, x)
    whole, late = source.iterate(0), source.iterate(6)
    rows = [next(whole).rows for _ in range(10)]
    for expected in rows[6:]:
        assert torch.equal(next(late).rows, expected)


def test_memory_mapped_arrays_train_as_tensors_do(tmp_path):
    x, y = data()
    for name, values in {"x": x, "y": y}.items():
        np.save(tmp_path / f"{name}.npy", values.numpy().astype(np.float32))
    curves = []
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy"]
    for arrays in (mapped, (x.float().double(), y.float().double())):
        model, likelihood = problem()
        curves.append(fit(model, likelihood, *arrays, epochs=3, batch_size=16).loss)
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["uint8", "int32", ">f8", "float16"])
def test_arrays_of_any_kind_of_number_train_as_tensors_do(kind):
    """Pixels, for one, or what another machine wrote."""
    x, y = data()
    x = (100 * x).round().abs().clamp_max(200)
    curves = []
    for inputs in (x.numpy().astype(kind), x):
        model, likelihood = problem()
        history = fit(model, likelihood, inputs, y.numpy(), epochs=2, batch_size=16, validation=(inputs, y.numpy()))
        curves.append([*history.loss, *(score for _, score in history.validation)])
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-9, atol=1e-9)


def test_per_point_scales_get_their_rows_and_sparse_adam_moves_no_others():
    x, y = data()
    model, likelihood = problem(conditional=tighter_gp.PerPoint(N))
    table = model.variational_strategy.conditional.raw_m
    before = table.detach().clone()
    fit(model, likelihood, x, y, steps=1, batch_size=10)
    moved = (table.detach() != before).any(-1)
    first = next(ArrayBatches(x, y, {}, 10, 0, x).iterate(0)).rows
    assert torch.equal(moved.nonzero().flatten(), first.sort().values)


def test_fixed_noise_follows_the_batch():
    x, y = data()
    noise = 0.05 + torch.rand(N, generator=torch.Generator().manual_seed(0))
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    likelihood = make_noise(noise)
    history = fit(model, likelihood, x, y, steps=1, batch_size=10, natural_gradients=False)
    rows = next(ArrayBatches(x, y, {}, 10, 0, x).iterate(0)).rows
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    expected = -tighter_gp.TighterELBO(likelihood, model, N)(model(x[rows]), y[rows], noise=noise[rows])
    assert history.loss[0] == pytest.approx(expected.item(), rel=1e-12)


def test_a_batch_of_models_trains_as_its_members_do():
    x, y = data()
    z, shape = x[:M].clone(), torch.Size([3])
    targets = torch.stack([y, -y, 2 * y])
    q = lambda batch: (torch.zeros(*batch, M), torch.eye(M).expand(*batch, M, M))

    def make(batch):
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch)
        model = make_gp(z, kernel, q(batch), batch_shape=batch)
        model.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        return model, likelihood

    # Inducing points are shared, so hold them fixed to keep the members apart.
    def train(batch, values):
        model, likelihood = make(batch)
        model.variational_strategy.inducing_points.requires_grad_(False)
        return fit(model, likelihood, x, values, epochs=3, batch_size=16).loss

    together = train(shape, targets)
    apart = sum(torch.tensor(train(torch.Size(), member)) for member in targets)
    torch.testing.assert_close(torch.tensor(together), apart, rtol=1e-9, atol=1e-9)


def test_a_latent_variable_model_is_given_rows_in_place_of_inputs():
    gplvm = pytest.importorskip("tighter_gp.gplvm")
    targets = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    model = gplvm.BayesianGPLVM.from_data(targets, latent_dim=2, num_inducing=7)
    history = fit(
        model, model.likelihood, None, targets, objective=gplvm.LatentVariableELBO, epochs=20, batch_size=16, lr=0.05
    )
    assert np.mean(history.loss[-3:]) < np.mean(history.loss[:3])


def test_arrays_are_looked_at_batch_by_batch():
    x, y = (values.numpy() for values in data())
    x[7] = np.nan
    seen = []
    with pytest.raises(ValueError, match="Inputs hold NaN or infinity in 1 of 5 rows"):
        fit(*problem(), x, y, epochs=1, batch_size=5, callbacks=[lambda step: seen.append(step.step)])
    assert seen


def test_a_default_device_does_not_break_the_batches():
    """On this device nothing has values: what is drawn there cannot be an order."""
    x, y = data()
    expected = next(ArrayBatches(x, y, {}, 16, 0, x).iterate(0)).rows
    with torch.device("meta"):
        source = ArrayBatches(x, y, {}, 16, 0, x)
        assert torch.equal(next(source.iterate(0)).rows, expected)
        whole = next(ArrayBatches(x, y, {}, None, 0, x).iterate(0))
        assert whole.rows.device.type == "cpu"
        assert source.fingerprint() == ArrayBatches(x.numpy(), y.numpy(), {}, 16, 0, x).fingerprint()


def test_a_default_device_does_not_change_a_run():
    options = {"steps": 5, "batch_size": 16, "validation": data(19)}
    expected = fit(*problem(), *data(), **options)
    model, likelihood = problem()
    x, y = data()
    with torch.device("meta"):
        history = fit(model, likelihood, x, y, **options)
    assert history.loss == expected.loss
    assert history.validation == expected.validation


def test_inputs_of_one_dimension_and_whole_numbers_train():
    x, y = data()
    column = (10 * x[:, :1]).round()
    losses = []
    for inputs in (column, column[:, 0], column[:, 0].long(), column[:, 0].int().numpy()):
        model = make_gp(torch.linspace(0, 30, M).unsqueeze(-1), make_kernel("rbf", 1.0, torch.tensor([5.0])))
        losses.append(fit(model, make_noise(0.2), inputs, y, steps=4, batch_size=16).loss)
    for loss in losses[1:]:
        torch.testing.assert_close(torch.tensor(loss), torch.tensor(losses[0]), rtol=1e-12, atol=1e-12)


def test_targets_of_a_batch_of_models_with_tasks_are_cut_along_their_points():
    x = torch.randn(3, 10, 2)
    source = ArrayBatches(x, torch.randn(3, 10, 4), {}, 6, 0, x)
    batch = next(source.iterate(0))
    assert (batch.x.shape, batch.y.shape) == ((3, 5, 2), (3, 5, 4))


@pytest.mark.parametrize("where", ["noise", "likelihood"])
def test_what_is_on_another_device_than_the_model_is_named(where):
    x, y = data()
    model, likelihood = problem()
    options = {}
    if where == "noise":
        options["noise"] = torch.ones(N, device="meta")
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to("meta")
    with pytest.raises(ValueError, match=f"{where} is on meta, the model is on cpu"):
        fit(model, likelihood, x, y, steps=1, **options)


@pytest.mark.parametrize("is_split", [True, False])
def test_processes_share_a_batch_or_each_has_the_whole_of_it(monkeypatch, is_split):
    x, y = data()
    first = next(ArrayBatches(x, y, {}, 16, 0, x).iterate(0)).rows
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        batch = next(ArrayBatches(x, y, {}, 16, 0, x, is_split).iterate(0))
        assert torch.equal(batch.rows, first[rank::2] if is_split else first)
        assert batch.weight == 0.5


@pytest.mark.parametrize("shape", [(N, 3), (3, N), (N,)])
def test_arguments_are_cut_along_their_points(shape):
    x, _ = data()
    y = torch.randn(N, 3)
    noise = torch.arange(float(np.prod(shape))).reshape(shape)
    batch = next(ArrayBatches(x, y, {"noise": noise}, 16, 0, x).iterate(0))
    expected = noise[batch.rows] if shape == (N, 3) else noise[..., batch.rows]
    assert torch.equal(batch.kwargs["noise"], expected)


@pytest.mark.parametrize("is_array", [False, True])
def test_rows_are_drawn_where_they_are_read_and_end_beside_the_model(is_array):
    like = torch.empty(0, device="meta")
    x, y = data()
    x, y = (x.numpy(), y.numpy()) if is_array else (x.to("meta"), y.to("meta"))
    source = ArrayBatches(x, y, {}, 16, 0, like)
    assert source._order(0).device.type == ("cpu" if is_array else "meta")
    batch = next(source.iterate(0))
    assert {tensor.device.type for tensor in (batch.x, batch.y, batch.rows)} == {"meta"}
