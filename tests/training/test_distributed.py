"""Two processes on gloo against one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import gpytorch
import pytest
import torch
import torch.distributed as dist
from linear_operator.utils.errors import NotPSDError
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

import tighter_gp
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tighter_gp.training import distributed, fit
from tighter_gp.training.batches import ArrayBatches
from tighter_gp.training.loaders import LoaderBatches

ROOT = Path(__file__).resolve().parents[2]
N, M, D = 23, 5, 2
# Rows of the batches of two loaders, of which one gets more than the other.
PARTS = [
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13]],
    [[14, 15], [16, 17, 18], [19, 20, 21, 22]],
]
OPTIONS = {"steps": 12, "batch_size": 7, "lr": 0.05, "seed": 2}


def data():
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.rand(N, D, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(N, generator=generator)


def problem(initialised: bool = True, **kwargs):
    x, _ = data()
    q = (torch.linspace(-1, 1, M), 0.5 * torch.eye(M)) if initialised else None
    # Away from the data: at a data point the residual is zero, and rounding decides on which side of its clamp.
    return make_gp(x[:M] + 0.1, make_kernel("rbf", 1.0, torch.ones(D)), q, **kwargs), make_noise(0.2)


def named_parameters(model, likelihood):
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in {"model": model, "likelihood": likelihood}.items()
        for name, parameter in module.named_parameters()
    }


def values(model, likelihood):
    return {name: parameter.detach().clone() for name, parameter in named_parameters(model, likelihood).items()}


def gradients(batch_size: int) -> dict[str, torch.Tensor]:
    """Of the first batch, summed over the processes."""
    x, y = data()
    model, likelihood = problem(conditional=tighter_gp.PerPoint(N))
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    batch = next(ArrayBatches(x, y, {}, batch_size, 0, x).iterate(0))
    loss = -mll(model(batch.x, index=batch.rows), batch.y) * batch.weight
    loss.backward()
    parameters = named_parameters(model, likelihood)
    total, failed = distributed.sum_gradients(list(parameters.values()), loss.detach())
    assert failed == 0
    assert parameters["model.variational_strategy.conditional.raw_m"].grad.is_sparse
    found = {name: p.grad.to_dense() if p.grad.is_sparse else p.grad for name, p in parameters.items()}
    return {"loss": total, **found}


class Failing(tighter_gp.TighterELBO):
    """Fails in the second process at step 2."""

    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 4 and distributed.rank() == 1:
            raise NotPSDError("K_ZZ")
        return super().forward(*args, **kwargs)


class Loss(torch.nn.Module):
    """What a user hands to DistributedDataParallel: the objective with the call of the model inside."""

    def __init__(self, mll):
        super().__init__()
        self.mll = mll

    def forward(self, x, y):
        return -self.mll(self.mll.model(x), y)


def interrupted(path: Path) -> Path:
    """A checkpoint as a run leaves it that ends after 6 steps, half of what it was asked for."""
    model, likelihood = problem()
    fit(model, likelihood, *data(), checkpoint=path, callbacks=[lambda state: state.step == 6], **OPTIONS)
    if distributed.rank() == 0:
        state = torch.load(path, weights_only=True)
        state["history"]["stopped"], state["finished"] = "", False
        torch.save(state, path)
    distributed.barrier()
    return path


def resumed(path: Path) -> torch.Tensor:
    """The losses of the whole run, its second half after a checkpoint."""
    model, likelihood = problem()
    return torch.tensor(fit(model, likelihood, *data(), checkpoint=path, resume=True, **OPTIONS).loss)


def visited(rank: int) -> torch.Tensor:
    """Numbers of training points of loaders that divide all of them, or a part of them, among the processes."""
    dataset = TensorDataset(*data())
    samplers = (
        DistributedSampler(dataset),
        DistributedSampler(dataset, drop_last=True),
        SubsetRandomSampler(PARTS[rank][0]),
    )
    loaders = [DataLoader(dataset, batch_size=4, sampler=sampler) for sampler in samplers]
    return torch.tensor([LoaderBatches(loader, 0, torch.zeros(())).num_data for loader in loaders])


def refused(folder: str) -> str:
    """What a process says to a checkpoint that the first one cannot write."""
    try:
        fit(*problem(), *data(), steps=1, checkpoint=folder)
    except ValueError as error:
        return str(error)
    return ""


def at_once() -> dict[str, torch.Tensor]:
    """What trains on all data in each process: losses, then parameters."""
    x, y = data()
    model, likelihood = problem()
    found = {"lbfgs": (model, likelihood, fit(model, likelihood, x, y, optimizer="lbfgs", steps=4))}
    for optimizer in ("lbfgs", "adam"):
        likelihood = make_noise(0.3)
        model = CollapsedGP(x, y, x[:4].clone(), make_kernel("rbf", 1.0, torch.ones(x.size(-1))), likelihood)
        history = fit(model, likelihood, x, y, optimizer=optimizer, steps=4, lr=0.1 if optimizer == "adam" else None)
        found[f"collapsed {optimizer}"] = model, likelihood, history
    return {
        name: torch.cat(
            [torch.tensor(history.loss), *(p.detach().flatten() for p in (*m.parameters(), *n.parameters()))]
        )
        for name, (m, n, history) in found.items()
    }


def counts() -> dict[str, torch.Tensor]:
    """Counts so large that natural steps are taken back, by the loss of all processes."""
    x, _ = data()
    y = torch.arange(N) % 3 + 60.0 * (torch.arange(N) % 8 == 0)
    model, likelihood = problem()[0], tighter_gp.likelihoods.PoissonLikelihood()
    history = fit(model, likelihood, x, y, steps=8, batch_size=7, natural_gradients=1.0)
    return {"loss": torch.tensor(history.loss), **values(model, likelihood)}


def last_batch() -> dict[str, torch.Tensor]:
    """Batches of which the last has one point, for two processes."""
    model, likelihood = problem()
    history = fit(model, likelihood, *data(), steps=6, batch_size=11)
    return {"loss": torch.tensor(history.loss), **values(model, likelihood)}


def learned_beta() -> dict[str, torch.Tensor]:
    """A conditional whose start comes from the curvature of the first batch, of which each process has a part."""
    model, likelihood = problem(initialised=False, conditional="beta")[0], gpytorch.likelihoods.LaplaceLikelihood()
    history = fit(model, likelihood, *data(), steps=4, batch_size=7)
    return {"loss": torch.tensor(history.loss), **values(model, likelihood)}


def wrapper(rank: int) -> dict[str, torch.Tensor]:
    """Gradients by torch's own wrapper.

    It has to be gone before its process group is: as the group's last owner it waits, with Python's lock in its hands, for
    a thread that waits for the lock.
    """
    x, y = data()
    model, likelihood = problem()
    wrapped = DistributedDataParallel(Loss(tighter_gp.TighterELBO(likelihood, model, N)), find_unused_parameters=True)
    wrapped(x[rank:8:2], y[rank:8:2]).backward()
    return {name: p.grad for name, p in named_parameters(model, likelihood).items()}


def worker(rank: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if rank == 0:
        interrupted(Path(folder, "one.pt"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/sync", rank=rank, world_size=2)
    torch.manual_seed(rank)
    x, y = data()
    results = {f"gradients {size}": gradients(size) for size in (7, 1)}

    # Other random numbers and another noise in the second process: the first one's count.
    model, likelihood = problem(initialised=False, conditional=tighter_gp.PerPoint(N))
    likelihood.noise = 0.2 + 0.3 * rank
    history = fit(model, likelihood, x, y, **OPTIONS)
    results["fit"] = {"loss": torch.tensor(history.loss), **values(model, likelihood)}

    interrupted(Path(folder, "two.pt"))
    results["one by two"] = {"loss": resumed(Path(folder, "one.pt"))}
    results["two by two"] = {"loss": resumed(interrupted(Path(folder, "both.pt")))}
    results["none by two"] = {"loss": resumed(Path(folder, "none.pt"))}

    model, likelihood = problem()
    history = fit(model, likelihood, x, y, objective=Failing, **OPTIONS)
    assert [step for step, _ in history.skipped] == [2], history.skipped
    results["failing"] = {"loss": torch.tensor(history.loss), **values(model, likelihood)}

    model, likelihood = problem()
    history = fit(model, likelihood, DataLoader(TensorDataset(x, y), batch_sampler=PARTS[rank]), steps=6, lr=0.05)
    results["loader"] = {"loss": torch.tensor(history.loss)}
    results["visited"], results["refused"], results["at once"] = visited(rank), refused(folder), at_once()

    results |= {"counts": counts(), "last batch": last_batch(), "learned beta": learned_beta()}
    results["wrapper"] = wrapper(rank)
    torch.save(results, f"{folder}/results{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes got, and the folder they worked in."""
    folder = tmp_path_factory.mktemp("gloo")
    code = "import sys; from tests.training.test_distributed import worker; worker(int(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    processes = [subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT) for rank in range(2)]
    deadline = time.monotonic() + 300
    try:
        while any(process.poll() is None for process in processes):
            assert not any(process.poll() for process in processes), "a process failed"
            assert time.monotonic() < deadline, "the processes wait for each other"
            time.sleep(0.05)
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"results{rank}.pt", weights_only=True) for rank in range(2)], folder


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("batch_size", [7, 1])
def test_summed_gradients_are_those_of_the_joined_batch_with_the_kl_divergence_counted_once(two, batch_size):
    (first, second), _ = two
    assert_same(first[f"gradients {batch_size}"], gradients(batch_size))
    assert_same(first[f"gradients {batch_size}"], second[f"gradients {batch_size}"], 0)


def test_two_processes_train_as_one_does(two):
    (first, second), _ = two
    x, y = data()
    model, likelihood = problem(initialised=False, conditional=tighter_gp.PerPoint(N))
    history = fit(model, likelihood, x, y, **OPTIONS)
    assert_same(first["fit"], {"loss": torch.tensor(history.loss), **values(model, likelihood)}, 1e-8)
    assert_same(first["fit"], second["fit"], 0)


def test_what_takes_all_data_at_once_does_so_in_each_process(two):
    (first, second), _ = two
    alone = at_once()
    for name, expected in alone.items():
        torch.testing.assert_close(first["at once"][name], expected, rtol=1e-9, atol=1e-9, msg=name)
        torch.testing.assert_close(second["at once"][name], first["at once"][name], rtol=0, atol=0, msg=name)


def test_a_checkpoint_is_resumed_by_another_number_of_processes(two):
    (first, second), folder = two
    whole = torch.tensor(fit(*problem(), *data(), **OPTIONS).loss)
    found = [process[name]["loss"] for process in (first, second) for name in process if " by " in name]
    assert len(found) == 6
    for losses in (*found, resumed(folder / "two.pt")):
        torch.testing.assert_close(losses, whole, rtol=1e-9, atol=1e-9)


def test_a_failure_in_one_process_skips_the_step_in_all(two):
    (first, second), _ = two
    loss = first["failing"].pop("loss")
    assert bool(loss[2].isnan())
    assert bool(loss[3:].isfinite().all())
    second["failing"].pop("loss")
    assert_same(first["failing"], second["failing"], 0)


@pytest.mark.parametrize("case", [counts, last_batch, learned_beta])
def test_processes_decide_by_the_whole_batch(two, case, caplog):
    (first, second), _ = two
    name = case.__name__.replace("_", " ")
    with caplog.at_level("DEBUG", "tighter_gp"):
        alone = case()
    assert ("made the loss much worse" in caplog.text) == (case is counts)
    assert_same(first[name], alone, 1e-7)
    assert_same(first[name], second[name], 0)


def test_uneven_batches_of_two_data_loaders_are_weighted(two):
    (first, _), _ = two
    x, y = data()
    joined = [[*first_part, *second_part] for first_part, second_part in zip(*PARTS, strict=True)]
    model, likelihood = problem()
    history = fit(model, likelihood, DataLoader(TensorDataset(x, y), batch_sampler=joined), steps=6, lr=0.05)
    torch.testing.assert_close(first["loader"]["loss"], torch.tensor(history.loss), rtol=1e-10, atol=1e-10)


def test_the_training_points_of_two_data_loaders_are_those_that_both_visit(two):
    """With a sampler that pads 23 points to 24, one that drops one each epoch, and parts of 5 and 2."""
    for process in two[0]:
        assert process["visited"].tolist() == [N, N, 7]


def test_a_path_that_takes_no_checkpoint_is_refused_in_every_process(two):
    results, folder = two
    for process in results:
        assert process["refused"].startswith(f"No checkpoint can be written to {folder} (it is a directory)")


def test_pytorchs_own_wrapper_averages_to_the_joined_gradient(two):
    (first, _), _ = two
    x, y = data()
    model, likelihood = problem()
    Loss(tighter_gp.TighterELBO(likelihood, model, N))(x[:8], y[:8]).backward()
    assert_same(first["wrapper"], {name: p.grad for name, p in named_parameters(model, likelihood).items()})


def test_torchrun_runs_a_benchmark_in_two_processes_and_writes_each_run_once(tmp_path):
    arguments = ["-m", "benchmarks", "uci", "--smoke", "--methods", "t-svgp", "--dtype", "float64", "--out"]
    single = [sys.executable, "-W", "ignore", *arguments, str(tmp_path / "one")]
    double = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results = []
    for name, command in {"one": single, "two": [*double, *arguments, str(tmp_path / "two")]}.items():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "smoke" / "uci.jsonl").read_text().splitlines()
        assert len(lines) == 1
        results.append(json.loads(lines[0]))
    assert [result["processes"] for result in results] == [1, 2]
    for name in ("bound", "rmse", "nlpd", "noise"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-8)
