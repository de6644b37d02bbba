"""Threads and worker processes. Two processes that train one model are in ``test_distributed``."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import gpytorch
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tighter_gp.training import fit

N, M, D = 37, 5, 2


def data(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(N, D, generator=generator)
    return x, torch.sin((2 + seed) * x[:, 0]) + 0.1 * torch.randn(N, generator=generator)


def problem(seed: int, **kwargs):
    x, _ = data(seed)
    return make_gp(x[:M] + 0.1, make_kernel("rbf", 1.0, torch.ones(D)), jitter_val=None, **kwargs), make_noise(0.2)


def outcome(model, likelihood, losses) -> torch.Tensor:
    parameters = [p.detach().flatten() for p in (*model.parameters(), *likelihood.parameters())]
    return torch.cat([torch.tensor(losses), *parameters])


class Sampled(tighter_gp.TighterELBO):
    """Draws random numbers in every step, slowly: another thread has time to come in between."""

    def forward(self, *args, **kwargs):
        noise = 0.0
        for _ in range(3):
            time.sleep(0.001)
            noise = noise + torch.randn(())
        return super().forward(*args, **kwargs) + 1e-3 * noise * self.model.mean_module.constant


def by_fit(seed: int) -> torch.Tensor:
    model, likelihood = problem(seed)
    history = fit(
        model, likelihood, *data(seed), objective=Sampled, steps=20, batch_size=11, lr=0.05, seed=seed, progress=False
    )
    return outcome(model, likelihood, history.loss)


def by_shuffling_loader(seed: int) -> torch.Tensor:
    model, likelihood = problem(seed)
    loader = DataLoader(TensorDataset(*data(seed)), batch_size=11, shuffle=True)
    history = fit(model, likelihood, loader, objective=Sampled, steps=20, lr=0.05, seed=seed, progress=False)
    return outcome(model, likelihood, history.loss)


def by_hand(seed: int) -> torch.Tensor:
    x, y = data(seed)
    model, likelihood = problem(seed, conditional="beta")
    model.variational_strategy.variational_params_initialized.fill_(1)  # no random start
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            with torch.no_grad():
                losses.append(model.eval()(x).variance.sum().item())
            model.train()
    return outcome(model, likelihood, losses)


def by_lbfgs(seed: int) -> torch.Tensor:
    model, likelihood = problem(seed)
    history = fit(model, likelihood, *data(seed), optimizer="lbfgs", steps=8, seed=seed, progress=False)
    return outcome(model, likelihood, history.loss)


@pytest.mark.parametrize("train", [by_fit, by_shuffling_loader, by_hand, by_lbfgs])
def test_two_models_trained_in_two_threads_have_the_numbers_of_one_after_the_other(train):
    expected = [train(seed) for seed in range(2)]
    found, errors, barrier = [None, None], [], threading.Barrier(2)

    def work(seed):
        try:
            barrier.wait()
            found[seed] = train(seed)
        except BaseException as error:
            errors.append(error)

    before, lazily = torch.get_rng_state(), gpytorch.settings.lazily_evaluate_kernels
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # GPyTorch switches this off while it evaluates a kernel in eval mode, for all threads, and two of them can leave it so.
    # Kernels are then evaluated in another way, which differs in rounding.
    lazily._set_state(True)
    assert not errors
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9 if train is by_hand else 0, atol=1e-11 if train is by_hand else 0)
    if train is not by_hand:
        assert torch.equal(torch.get_rng_state(), before), "the global random state was not left as it was"


def test_a_model_predicts_the_same_in_many_threads_at_once():
    """Of one model, whose caches the threads share."""
    x, _ = data(0)
    model, _ = problem(0)
    model.eval()
    queries = [x + 0.1 * i for i in range(8)]
    with torch.no_grad():
        expected = [tighter_gp.predict(model, query).variance for query in queries]
        model.variational_strategy._clear_cache()
    found, barrier = [None] * len(queries), threading.Barrier(len(queries))

    def work(i):
        barrier.wait()
        with torch.no_grad():
            for _ in range(5):
                found[i] = model(queries[i]).variance

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpytorch.settings.lazily_evaluate_kernels._set_state(True)  # as above
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class FromWorkers(Dataset):
    """Rows that say whether they were read in another process."""

    def __init__(self, x, y):
        self.x, self.y, self.parent = x, y, multiprocessing.current_process().name
        self.seen = torch.zeros(len(y)).share_memory_()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        self.seen[i] = float(multiprocessing.current_process().name != self.parent)
        return self.x[i], self.y[i], i


@pytest.mark.parametrize("conditional", ["optimal", "per point"])
def test_forked_workers_bring_the_batches_of_one_process(conditional):
    """After torch has run in the parent, which is when forking it goes wrong if it does."""
    x, y = data(0)
    results = []
    for workers in (0, 2):
        choice = tighter_gp.PerPoint(N) if conditional == "per point" else conditional
        model, likelihood = problem(0, conditional=choice)
        rows = FromWorkers(x, y)
        context = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(rows, batch_size=11, shuffle=True, num_workers=workers, **context)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # of a process that has threads
            history = fit(model, likelihood, loader, epochs=3, lr=0.05, progress=False)
        assert bool((rows.seen == float(workers > 0)).all())
        results.append(outcome(model, likelihood, history.loss))
    assert torch.equal(*results)


def train_in_child(seed: int, results) -> None:
    torch.set_default_dtype(torch.float64)
    results.put(by_hand(seed).tolist())


def fork_and_compare() -> None:
    torch.set_default_dtype(torch.float64)
    expected = by_hand(0)  # also: torch has run before the fork
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = context.Process(target=train_in_child, args=(0, results))
        process.start()
    found = results.get(timeout=120)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(found), expected)


def test_a_forked_process_trains_as_its_parent_does():
    """In a process without accelerators: their threads do not survive a fork, and other tests have loaded a stand-in."""
    code = f"from {__name__} import fork_and_compare; fork_and_compare()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
