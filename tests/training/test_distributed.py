"""Two processes on gloo against one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gpytorch
import pytest
import torch
import torch.distributed as dist
from linear_operator.utils.errors import NotPSDError
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS
from tighter_gp import Recipe, fit
from tighter_gp.training import distributed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
N, M, D = 23, 5, 2
# Rows of the batches of two loaders, of which one gets more than the other.
PARTS = [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13]], [[14, 15], [16, 17, 18], [19, 20, 21, 22]]]


def data():
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.rand(N, D, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(N, generator=generator)


def problem(**kwargs):
    x, _ = data()
    # Away from the data: at a data point the residual is zero, and rounding decides on which side of its clamp.
    return make_gp(x[:M] + 0.1, make_kernel("rbf", 1.0, torch.ones(D)), **kwargs), make_noise(0.2)


def outcome(model, likelihood, history):
    values = [p.detach().flatten() for module in (model, likelihood) for p in module.parameters()]
    return torch.cat([torch.tensor(history.loss), *values])


def run(model, likelihood, x=None, y=None, **options):
    options = {"steps": 8, "batch_size": 7, "seed": 2, **options}
    return outcome(model, likelihood, fit(model, likelihood, *(data() if x is None else (x, y)), **options))


def counts():
    x, _ = data()
    y = torch.arange(N) % 3 + 60.0 * (torch.arange(N) % 8 == 0)
    recipe = Recipe(natural=1.0)
    return run(problem()[0], tighter_gp.likelihoods.PoissonLikelihood(), x, y, recipe=recipe)


def collapsed():
    x, y = data()
    likelihood = make_noise(0.3)
    model = tighter_gp.CollapsedGP(x, y, x[:4].clone(), make_kernel("rbf", 1.0, torch.ones(D)), likelihood)
    return outcome(model, likelihood, fit(model, likelihood, steps=4))


CASES = {
    "natural": lambda: run(*problem()),
    "adam": lambda: run(*problem(), recipe=Recipe(natural=0, lr=0.05)),
    "per point": lambda: run(*problem(conditional=tighter_gp.PerPoint(N))),
    "mean field": lambda: run(*problem(distribution=Q_FORMS["mean_field"])),
    "one row per process": lambda: run(*problem(), batch_size=1),
    "a short last batch": lambda: run(*problem(), batch_size=11),
    "exploding rates": counts,
    "learned scale": lambda: run(problem(conditional="beta")[0], gpytorch.likelihoods.LaplaceLikelihood()),
    "collapsed": collapsed,
}


class Failing(tighter_gp.TighterELBO):
    """Fails in the second process in one call."""

    calls, bad = 0, 4

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.bad and distributed.rank() == 1:
            raise NotPSDError("K_ZZ")
        return super().forward(*args, **kwargs)


class FailingFirst(Failing):
    """Fails before the sums of the natural step."""

    bad = 5


def interrupted(path: Path) -> None:
    """A checkpoint of a run that was interrupted after 6 of 12 steps."""

    def stop(step):
        if step.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), *data(), checkpoint=path, callbacks=[stop], steps=12, batch_size=7)


def resumed(path: Path) -> torch.Tensor:
    model, likelihood = problem()
    return outcome(
        model, likelihood, fit(model, likelihood, *data(), checkpoint=path, resume=True, steps=12, batch_size=7)
    )


def loaded(parts) -> torch.Tensor:
    loader = DataLoader(TensorDataset(*data()), batch_sampler=parts)
    model, likelihood = problem()
    return outcome(model, likelihood, fit(model, likelihood, loader, steps=6, recipe=Recipe(natural=0, lr=0.05)))


def worker(rank: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if rank == 0:
        interrupted(Path(folder, "one.pt"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/sync", rank=rank, world_size=2)
    torch.manual_seed(rank)
    results = {name: make() for name, make in CASES.items()}
    model, likelihood = problem()
    with torch.no_grad():
        likelihood.noise = 0.2 + 0.3 * rank  # the first one's counts
    results["first one's"] = run(model, likelihood)
    results["one by two"] = resumed(Path(folder, "one.pt"))
    interrupted(Path(folder, "two.pt"))
    for objective, natural in ((Failing, 0), (FailingFirst, None)):
        model, likelihood = problem(distribution=Q_FORMS["cholesky"])
        lik = tighter_gp.likelihoods.BernoulliLogitLikelihood() if natural is None else likelihood
        y = (data()[1] > 0).double() if natural is None else data()[1]
        recipe = Recipe(natural=natural)
        history = fit(
            model, lik, data()[0], y, objective=objective, steps=8, batch_size=7, recipe=recipe, progress=False
        )
        results[f"failing {natural}"] = outcome(model, lik, history)
    results["loader"] = loaded(PARTS[rank])
    for name, call in {
        "path": lambda: fit(*problem(), *data(), steps=1, checkpoint=folder),
        "data": lambda: fit(*problem(), data()[0] + rank, data()[1], steps=1),
    }.items():
        try:
            call()
        except ValueError as error:
            results[name] = str(error)
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
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"results{rank}.pt", weights_only=True) for rank in range(2)], folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(two, case):
    (first, second), _ = two
    torch.testing.assert_close(first[case], CASES[case](), rtol=1e-7, atol=1e-8, equal_nan=True)
    assert torch.equal(first[case], second[case])


def test_the_first_process_gives_the_start(two):
    (first, second), _ = two
    torch.testing.assert_close(first["first one's"], CASES["natural"](), rtol=1e-8, atol=1e-8)
    assert torch.equal(first["first one's"], second["first one's"])


def test_a_checkpoint_is_resumed_by_another_number_of_processes(two):
    (first, _), folder = two
    model, likelihood = problem()
    whole = outcome(model, likelihood, fit(model, likelihood, *data(), steps=12, batch_size=7))
    torch.testing.assert_close(first["one by two"], whole, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(resumed(folder / "two.pt"), whole, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["failing 0", "failing None"])
def test_a_failure_in_one_process_skips_the_step_in_all(two, name):
    (first, second), _ = two
    losses = first[name][:8]
    assert int(losses.isnan().sum()) == 1
    torch.testing.assert_close(first[name], second[name], rtol=0, atol=0, equal_nan=True)


def test_uneven_batches_of_two_data_loaders_are_weighted(two):
    (first, _), _ = two
    whole = [[*first_part, *second_part] for first_part, second_part in zip(*PARTS, strict=True)]
    torch.testing.assert_close(first["loader"], loaded(whole), rtol=1e-9, atol=1e-9)


def test_what_is_refused_is_refused_in_every_process(two):
    results, folder = two
    for process in results:
        assert process["path"].startswith(f"No checkpoint can be written to {folder} (it is a directory)")
        assert process["data"].startswith("The training data of process 1 differ from those of process 0")


def test_torchrun_needs_no_more_than_fit(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "torch.set_default_dtype(torch.float64)\n"
        "from tests.training.test_distributed import run, problem\n"
        "from tighter_gp.training import distributed\n"
        "found = run(*problem())\n"
        "torch.save(found, sys.argv[1] + __import__('os').environ['RANK'])\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), str(tmp_path / "out")]
    environment = {**__import__("os").environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", *launch], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"out{rank}", weights_only=True)
        torch.testing.assert_close(found, CASES["natural"](), rtol=1e-8, atol=1e-8)
