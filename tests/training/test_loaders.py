"""Batches from DataLoaders."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tighter_gp
from tests.tools.factories import make_noise
from tests.training.problems import Interrupted, M, N, data, interrupt_at, problem
from tighter_gp.training import fit, loaders
from tighter_gp.training.loaders import LoaderBatches


def test_a_shuffling_data_loader_trains_and_is_repeatable():
    x, y = data()
    curves = []
    for generator in (None, None, torch.Generator()):
        loader = DataLoader(TensorDataset(x.float(), y.float()), batch_size=16, shuffle=True, generator=generator)
        model, likelihood = problem()
        curves.append(fit(model, likelihood, loader, epochs=5, lr=0.05).loss)
    assert curves[0] == curves[1]
    assert all(len(curve) == 20 and curve[-1] < curve[0] for curve in curves)


def test_per_point_scales_need_positions_from_a_loader():
    x, y = data()
    model, likelihood = problem(conditional=tighter_gp.PerPoint(N))
    with pytest.raises(ValueError, match=r"\(x, y, index\)"):
        fit(model, likelihood, DataLoader(TensorDataset(x, y), batch_size=16), epochs=1)
    loader = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=16)
    assert len(fit(model, likelihood, loader, epochs=2).loss) == 8


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_shuffling_data_loader_goes_on_where_it_was(tmp_path, own_generator):
    x, y = data()

    def loader():
        generator = torch.Generator().manual_seed(torch.seed()) if own_generator else None
        return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=generator)

    whole = fit(*problem(), loader(), steps=11)
    options = {"steps": 11, "checkpoint": tmp_path / "run.pt", "checkpoint_every": 3}
    with pytest.raises(Interrupted):
        fit(*problem(), loader(), callbacks=[interrupt_at(8)], **options)
    torch.rand(5)
    assert fit(*problem(), loader(), resume=True, **options).loss == whole.loss


class EverySecond(Sampler):
    """Every second point of a dataset, as a user might write it."""

    def __init__(self, num_data):
        self.rows = range(0, num_data, 2)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


@pytest.mark.parametrize(
    ("options", "visited"),
    [
        ({"sampler": SubsetRandomSampler(range(20))}, 20),
        ({"sampler": EverySecond(N)}, 27),
        ({"batch_sampler": BatchSampler(SubsetRandomSampler(range(20)), 10, False)}, 20),
        ({"sampler": RandomSampler(range(20))}, 20),
        # Each epoch is a draw from all points, however long it is.
        ({"sampler": RandomSampler(range(N), num_samples=20)}, N),
        ({"sampler": RandomSampler(range(N), replacement=True, num_samples=200)}, N),
        ({"sampler": WeightedRandomSampler(torch.ones(N), 20)}, N),
        ({"shuffle": True}, N),
        ({}, N),
        ({"drop_last": True}, N - N % 10),  # always the same rows
        ({"drop_last": True, "shuffle": True}, N),
        ({"sampler": SubsetRandomSampler([*range(N), *range(N)])}, N),
        ({"batch_sampler": [[1, 2], [3, 4]]}, 4),
        ({"sampler": BatchSampler(SubsetRandomSampler(range(20)), 10, False), "batch_size": None}, 20),
        ({"sampler": WeightedRandomSampler([1.0] * 15 + [0.0] * (N - 15), 20)}, 15),
    ],
)
def test_the_training_points_of_a_loader_are_those_its_sampler_visits(options, visited):
    batches = {} if "batch_sampler" in options else {"batch_size": 10}
    loader = DataLoader(TensorDataset(*data()), **{**batches, **options})
    assert LoaderBatches(loader, 0, torch.zeros(())).num_data == visited
    seen = []

    def objective(likelihood, model, num_data):
        seen.append(num_data)
        return tighter_gp.TighterELBO(likelihood, model, num_data)

    fit(*problem(), loader, steps=1, objective=objective)
    assert seen == [visited]


def test_a_loader_over_a_part_of_a_dataset_trains_as_that_part_does():
    x, y = data()
    rows = torch.arange(3, 23)
    loader = DataLoader(TensorDataset(x, y), batch_size=20, sampler=SubsetRandomSampler(rows.tolist()))
    losses = [
        fit(*problem(q=(torch.zeros(M), torch.eye(M))), *arrays, steps=10, lr=0.05).loss
        for arrays in ((loader,), (x[rows], y[rows]))
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=1e-9)


def test_fixed_noise_follows_the_index_of_a_loader():
    x, y = data()
    likelihood = make_noise(torch.linspace(0.05, 2.0, N))
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    shuffled = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=N, shuffle=True)
    losses = []
    for arrays in ((shuffled,), (x, y)):
        history = fit(copy.deepcopy(model), copy.deepcopy(likelihood), *arrays, steps=1)
        losses.append(history.loss[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    small = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=16, shuffle=True)
    assert fit(model, likelihood, small, epochs=2).steps == 8


def test_fixed_noise_without_an_index_is_refused():
    x, y = data()
    likelihood = make_noise(torch.linspace(0.05, 2.0, N))
    with pytest.raises(ValueError, match=r"let the DataLoader yield \(x, y, index\)"):
        fit(problem()[0], likelihood, DataLoader(TensorDataset(x, y), batch_size=N, shuffle=True), epochs=1)
    loader = DataLoader(TensorDataset(x, y, torch.arange(N) + 1), batch_size=N)
    with pytest.raises(IndexError, match=r"index must lie in 0\.\.52 for 53 noise variances"):
        fit(problem()[0], likelihood, loader, epochs=1)


class Once(IterableDataset):
    """Wraps an iterator, which a second epoch finds empty."""

    def __init__(self, num_rows):
        x, y = data()
        self.rows = iter(list(zip(x[:num_rows], y[:num_rows], strict=True)))

    def __iter__(self):
        return self.rows

    def __len__(self):
        return N


@pytest.mark.parametrize(("num_rows", "epoch"), [(0, 0), (N, 1)])
def test_an_epoch_without_a_batch_is_an_error(num_rows, epoch):
    with pytest.raises(ValueError, match=f"no batch in epoch {epoch} and promised 4; its dataset must start anew"):
        fit(*problem(), DataLoader(Once(num_rows), batch_size=16), epochs=3)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_generator_of_a_loader_is_left_as_it_was(interrupted):
    of_loader, of_sampler = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    before = of_loader.get_state(), of_sampler.get_state()
    sampler = RandomSampler(range(N), generator=of_sampler)
    loader = DataLoader(TensorDataset(*data()), batch_size=16, sampler=sampler, generator=of_loader)
    try:
        fit(*problem(), loader, epochs=2, callbacks=[interrupt_at(3)] if interrupted else [])
    except Interrupted:
        assert interrupted
    assert torch.equal(of_loader.get_state(), before[0])
    assert torch.equal(of_sampler.get_state(), before[1])


class Drawn(Sampler):
    """Batches drawn anew in each epoch, from a part of the points or from all."""

    def __init__(self, rows, generator=None):
        self.rows, self.generator = torch.tensor(rows), generator

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(len(self.rows), generator=self.generator)
        return iter([part.tolist() for part in self.rows[order].chunk(4)])


def test_batches_that_are_listed_have_as_many_points_as_different_rows():
    loader = lambda batches: DataLoader(TensorDataset(*data()), batch_sampler=batches)
    for batches, visited in (([[0, 1], [1, 2]], 3), (((5, 6), (7,)), 3), ([list(range(N))], N)):
        assert LoaderBatches(loader(batches), 0, torch.zeros(())).num_data == visited
    repeated = DataLoader(TensorDataset(*data()), batch_size=2, sampler=SubsetRandomSampler([1, 1, 2, 2]))
    assert LoaderBatches(repeated, 0, torch.zeros(())).num_data == 2
    blocks = tighter_gp.blocks.BlockBatchSampler(torch.arange(N) // 4, 3)
    assert LoaderBatches(loader(blocks), 0, torch.zeros(())).num_data == N


def test_a_listed_part_of_a_dataset_trains_as_that_part_does():
    x, y = data()
    rows = list(range(3, 23))
    loader = DataLoader(TensorDataset(x, y), batch_sampler=[rows])
    losses = [
        fit(*problem(q=(torch.zeros(M), torch.eye(M))), *arrays, steps=5, lr=0.05).loss
        for arrays in ((loader,), (x[rows], y[rows]))
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=1e-9)


def test_a_batch_sampler_that_cannot_tell_its_points_needs_their_number():
    dataset = TensorDataset(*data())
    generator = torch.Generator().manual_seed(3)
    before, everything = generator.get_state(), Drawn(range(N), generator)
    assert LoaderBatches(DataLoader(dataset, batch_sampler=everything), 0, torch.zeros(())).num_data == N
    assert torch.equal(generator.get_state(), before)
    part = DataLoader(dataset, batch_sampler=Drawn(range(20)))
    with pytest.raises(ValueError, match=r"Drawn\) does not say which of the 53 points .* fit\(\.\.\., num_data=\)"):
        fit(*problem(), part, steps=1)
    seen = []

    def objective(likelihood, model, num_data):
        seen.append(num_data)
        return tighter_gp.TighterELBO(likelihood, model, num_data)

    fit(*problem(), part, steps=1, num_data=20, objective=objective)
    assert seen == [20]
    with pytest.raises(ValueError, match="num_data= is for a DataLoader"):
        fit(*problem(), *data(), steps=1, num_data=20)


def test_a_loader_of_ready_batches_needs_the_number_of_points():
    x, y = data()
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    loader = DataLoader(batches, batch_size=None)
    with pytest.raises(ValueError, match=r"batch_size=None does not say how many points .* fit\(\.\.\., num_data=\)"):
        fit(*problem(), loader, steps=1)
    assert len(fit(*problem(), loader, steps=2, num_data=N).loss) == 2


def test_a_batch_sampler_with_a_generator_is_seeded_and_left_as_it_was():
    losses = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        sampler = Drawn(range(N), generator)
        losses.append(fit(*problem(), DataLoader(TensorDataset(*data()), batch_sampler=sampler), steps=6).loss)
        assert torch.equal(generator.get_state(), before)
    assert losses[0] == losses[1]


def test_a_loader_of_one_dimensional_inputs_gives_columns():
    x, y = data()
    loader = DataLoader(TensorDataset(x[:, 0], y), batch_size=N)
    batch = next(LoaderBatches(loader, 0, x[0, 0]).iterate(0))
    assert batch.x.shape == (N, 1)


def test_per_point_arguments_do_not_go_with_a_loader():
    loader = DataLoader(TensorDataset(*data()), batch_size=16)
    with pytest.raises(TypeError, match="unknown argument 'noise'"):
        fit(*problem(), loader, steps=1, noise=torch.ones(N))


def test_the_generator_of_the_device_is_seeded_for_each_batch(monkeypatch):
    seeds = []
    monkeypatch.setattr(loaders, "seed_generators", lambda seed, device: seeds.append((seed, device)))
    x, y = data()
    source = LoaderBatches(DataLoader(TensorDataset(x, y), batch_size=30), 7, x)
    batches = source.iterate(0)
    for _ in range(3):
        next(batches)
    assert (
        len({seed for seed, _ in seeds}) == 4
    )  # of two epochs, after the first batch, and at the end of the first epoch
    assert {device for _, device in seeds} == {x.device}


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, num_rows=N):
        x, y = data()
        self.rows = list(zip(x[:num_rows], y[:num_rows], strict=True))

    def __iter__(self):
        return iter(self.rows)


def test_a_loader_without_a_length_trains_as_one_with_it():
    losses = []
    for loader in (DataLoader(Stream(), batch_size=16), DataLoader(TensorDataset(*data()), batch_size=16)):
        losses.append(fit(*problem(q=(torch.zeros(M), torch.eye(M))), loader, epochs=2, num_data=N).loss)
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]


@pytest.mark.parametrize("num_rows", [N, 20])
def test_a_loader_without_a_length_goes_on_where_it_was(tmp_path, num_rows):
    # Of 20 rows it has fewer batches than num_data says.
    loader = DataLoader(Stream(num_rows), batch_size=16)
    whole = fit(*problem(), loader, steps=11, num_data=N)
    options = {"steps": 11, "num_data": N, "checkpoint": tmp_path / "run.pt", "checkpoint_every": 3}
    with pytest.raises(Interrupted):
        fit(*problem(), loader, callbacks=[interrupt_at(8)], **options)
    assert fit(*problem(), loader, resume=True, **options).loss == whole.loss


def test_a_loader_without_a_length_says_what_is_missing():
    with pytest.raises(TypeError, match=r"number of training points: pass num_data=, "):
        fit(*problem(), DataLoader(Stream(), batch_size=16), steps=1)
    with pytest.raises(TypeError, match=r"neither a length nor a batch_size, .* give its dataset a length"):
        fit(*problem(), DataLoader(Stream(), batch_size=None), steps=1, num_data=N)


class Jittered(torch.utils.data.Dataset):
    """Rows with noise that is drawn when they are read."""

    def __init__(self, seen):
        self.x, self.y = data()
        self.seen = seen

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        noise = 0.1 * torch.randn(())
        self.seen.append(noise.item())
        return self.x[row] + noise, self.y[row]


def test_a_dataset_that_draws_draws_other_numbers_in_each_step(tmp_path):
    seen, again = [], []
    options = {"steps": 9, "lr": 0.05, "seed": 3}
    whole = fit(*problem(), DataLoader(Jittered(seen), batch_size=16, shuffle=True), **options).loss
    assert len(set(seen[16:])) == len(seen[16:])  # the first batch is read twice, to set q(u)
    torch.rand(5)  # whatever the global random state
    assert fit(*problem(), DataLoader(Jittered(again), batch_size=16, shuffle=True), **options).loss == whole
    assert seen == again
    options |= {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 2}
    loader = DataLoader(Jittered([]), batch_size=16, shuffle=True)
    with pytest.raises(Interrupted):
        fit(*problem(), loader, callbacks=[interrupt_at(6)], **options)
    assert fit(*problem(), loader, resume=True, **options).loss == whole


def test_items_of_several_rows_are_not_counted_as_points():
    x, y = data()
    items = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 50, 5)]
    collate = lambda batch: tuple(torch.cat(parts) for parts in zip(*batch, strict=True))
    loader = DataLoader(items, batch_size=4, collate_fn=collate)
    with pytest.raises(ValueError, match=r"A batch of 4 items has 20 rows.*num_data="):
        fit(*problem(), loader, steps=1)
    fit(*problem(), loader, steps=1, num_data=50)
