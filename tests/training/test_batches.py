"""Where batches come from: tensors, arrays, memory maps and DataLoaders."""

from __future__ import annotations

import itertools

import gpytorch
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import tighter_gp
from tests.training.problems import M, N, data, parameters, per_point, problem
from tighter_gp import fit
from tighter_gp.training.batches import ArrayBatches

LIKE = torch.zeros(())


def arrays(**kwargs):
    x, y = data()
    options = {"kwargs": {}, "likelihood": problem()[1], "batch_size": 10, "seed": 0, "like": LIKE, **kwargs}
    return ArrayBatches(x, y, **options)


def outcome(x, y=None, **options):
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, **{"steps": 5, "batch_size": 20, **options})
    return torch.cat([torch.tensor(history.loss), parameters(model, likelihood)])


def test_an_epoch_shows_every_point_once_and_the_next_in_another_order():
    batches = list(itertools.islice(arrays().iterate(0), 12))
    first, second = (torch.cat([batch.rows for batch in part]) for part in (batches[:6], batches[6:]))
    assert torch.equal(first.sort().values, torch.arange(N))
    assert torch.equal(second.sort().values, torch.arange(N))
    assert not torch.equal(first, second)
    assert {len(batch.rows) for batch in batches} == {8, 9}
    for start in (1, 5, 7):
        for batch, later in zip(batches[start:], arrays().iterate(start), strict=False):
            assert torch.equal(batch.x, later.x)


@pytest.mark.parametrize("kind", ["float64", "float32", "big-endian", "memory map", "tensor of float32"])
def test_arrays_of_any_kind_train_as_tensors_do(kind, tmp_path):
    x, y = (values.float().double() for values in data())
    np.save(tmp_path / "x.npy", x.numpy())
    given = {
        "float64": x.numpy(),
        "float32": x.float().numpy(),
        "big-endian": x.numpy().astype(">f8"),
        "memory map": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "tensor of float32": x.float(),
    }[kind]
    torch.testing.assert_close(outcome(given, y.numpy()), outcome(x, y), rtol=1e-9, atol=1e-10)


def test_per_point_arguments_follow_the_batch():
    x, y = data()
    noise = torch.rand(N)
    for batch in itertools.islice(arrays(kwargs={"noise": noise}).iterate(0), 6):
        assert torch.equal(batch.kwargs["noise"], noise[batch.rows])
        assert torch.equal(batch.y, y[batch.rows])
    model, _ = problem()
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    given = fit(model, fixed, x, y, steps=3, batch_size=20).loss
    model, _ = problem()
    by_loader = fit(model, fixed, DataLoader(TensorDataset(x, y, torch.arange(N)), N), steps=1).loss
    model, _ = problem()
    assert by_loader == pytest.approx(fit(model, fixed, x, y, steps=1, batch_size=None).loss)
    assert len(given) == 3


def test_scales_per_point_are_those_of_the_rows():
    model, likelihood, x, y, _ = per_point()
    before = model.variational_strategy.conditional.m.detach().clone()
    fit(model, likelihood, x, y, steps=1, batch_size=10)
    moved = model.variational_strategy.conditional.m.detach() != before
    batch = next(ArrayBatches(x, y, {}, likelihood, LIKE, 10, 0).iterate(0))
    assert torch.equal(moved.nonzero().squeeze(-1), batch.rows.sort().values)


def test_the_default_device_and_the_global_random_state_do_not_matter():
    expected = outcome(*data())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(outcome(*data()), expected)
    assert torch.equal(torch.get_rng_state(), before)


# -- DataLoaders ------------------------------------------------------------------------------------------------------


def loader(*more, batch_size=20, **kwargs):
    return DataLoader(TensorDataset(*data(), *more), batch_size, **kwargs)


def test_a_loader_trains_as_arrays_do():
    by_arrays = outcome(*data(), batch_size=None, steps=3)
    torch.testing.assert_close(outcome(loader(batch_size=N), steps=3), by_arrays, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kwargs", [{"shuffle": True}, {"shuffle": True, "generator": True}, {"sampler": True}])
def test_a_shuffled_loader_is_a_function_of_the_seed_and_resumes(kwargs, tmp_path):
    def make():
        options = dict(kwargs)
        if "generator" in options:
            options["generator"] = torch.Generator()
        if "sampler" in options:
            options["sampler"] = RandomSampler(TensorDataset(*data()))
        return loader(**options)

    whole = outcome(make(), steps=8)
    torch.rand(3)
    assert torch.equal(outcome(make(), steps=8), whole)
    assert not torch.equal(outcome(make(), steps=8, seed=1), whole)
    path = tmp_path / "run.pt"
    stop = lambda step: step.step == 4 and (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        outcome(make(), steps=8, checkpoint=path, callbacks=[stop])
    assert torch.equal(outcome(make(), steps=8, checkpoint=path, resume=True, callbacks=[stop]), whole)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        x, y = data()
        yield from zip(x, y, strict=True)


def test_a_dataset_without_a_length_needs_num_data():
    with pytest.raises(TypeError, match="num_data="):
        outcome(DataLoader(Endless(), 20))
    outcome(DataLoader(Endless(), 20), num_data=N, steps=7)


class Strange(Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.zeros(2), "must yield"),
        ((torch.zeros(2, dtype=torch.cfloat), torch.zeros(())), "x must hold real numbers"),
    ],
)
def test_a_loader_of_something_else_is_refused(item, message):
    with pytest.raises(TypeError, match=message):
        outcome(DataLoader(Strange(item), 3))


def test_what_needs_positions_says_so():
    model, likelihood, *_ = per_point()
    with pytest.raises(ValueError, match=r"yield \(x, y, index\)"):
        fit(model, likelihood, loader(), steps=1)
    fit(model, likelihood, loader(torch.arange(N)), steps=1)
    with pytest.raises(IndexError, match="index must lie in"):
        fit(model, likelihood, loader(torch.arange(N) + 1), steps=3)


def test_inducing_points_may_be_more_than_a_batch():
    assert len(fit(*problem(), *data(), steps=2, batch_size=M - 2).loss) == 2
    assert tighter_gp.models.Regression(data()[0], 8).variational_strategy.inducing_points.shape == (8, 2)
