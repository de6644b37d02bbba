"""Time of a training step: ours against GPyTorch's, interleaved in one run."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gpytorch
import torch

import tighter_gp

from . import fit_steps
from .errors import UserError
from .options import writable_folder
from .runs import append_result, environment, read_results

GRID = ((64, 256), (256, 256), (256, 1024), (512, 1024), (1024, 1024), (1024, 4096))
LARGE = ((2048, 2048),)
SMOKE = ((16, 32), (32, 32))
NUM_DATA = 100_000
NUM_DIMS = 8

PEERS = ("gpflow", "gpjax")
PARTS = ("grid", "fit")

Step = Callable[[], Any]


class _Model(gpytorch.models.ApproximateGP):
    def __init__(self, make_strategy: Callable[[Any], Any]) -> None:
        super().__init__(make_strategy(self))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=NUM_DIMS))

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _distribution(num_inducing: int) -> Any:
    return gpytorch.variational.CholeskyVariationalDistribution(num_inducing)


def _strategies(num_inducing: int) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Each method: a maker of its strategy, and its objective."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(num_inducing, NUM_DIMS, generator=generator)
    half = num_inducing // 2

    def stock(model: Any) -> Any:
        return gpytorch.variational.VariationalStrategy(model, points, _distribution(num_inducing))

    def ours(model: Any) -> Any:
        return tighter_gp.TighterVariationalStrategy(model, points, _distribution(num_inducing))

    def solve(model: Any) -> Any:
        return tighter_gp.SolveGPVariationalStrategy(
            model, points[:half], points[half:], _distribution(half), _distribution(num_inducing - half)
        )

    return {
        "gpytorch svgp": (stock, gpytorch.mlls.VariationalELBO),
        "svgp": (ours, gpytorch.mlls.VariationalELBO),
        "t-svgp": (ours, tighter_gp.TighterELBO),
        "t-solve-gp": (solve, tighter_gp.TighterELBO),
    }


def make_step(method: str, num_inducing: int, batch_size: int, device: str, num_data: int = NUM_DATA) -> Step:
    """A closure that draws a batch and takes one step: learned inducing points, Adam, Gaussian noise, float32."""
    make_strategy, objective = _strategies(num_inducing)[method]
    model, likelihood = _Model(make_strategy).to(device), gpytorch.likelihoods.GaussianLikelihood().to(device)
    mll = objective(likelihood, model, num_data)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    all_x = torch.rand(num_data, NUM_DIMS, generator=generator).to(device)
    all_y = torch.randn(num_data, generator=generator).to(device)
    model.train()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(num_data, (batch_size,), device=device)
        return all_x[rows], all_y[rows]

    def step() -> None:
        optimizer.zero_grad()
        x, y = batch()
        (-mll(model(x), y)).backward()
        optimizer.step()

    return step


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def interleave(steps: dict[str, Step], repeats: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each step, one of each in turn, so that the noise of the machine falls on all alike."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def time_grid_point(num_inducing: int, batch_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    steps = {method: make_step(method, num_inducing, batch_size, args.device) for method in _strategies(num_inducing)}
    repeats = max(
        3 if args.smoke else 11, min(args.repeats, int(args.repeats * (512 / num_inducing) ** 2 * 1024 / batch_size))
    )
    times = interleave(steps, repeats, args.device)
    medians = {method: statistics.median(values) for method, values in times.items()}
    return {
        "experiment": "speed",
        "num_inducing": num_inducing,
        "batch_size": batch_size,
        "repeats": repeats,
        "milliseconds": medians,
        "fastest": {method: min(values) for method, values in times.items()},
    }


def _peer(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        raise UserError(f"{name} is not installed in {folder}: run `make peers`, or give --peers-dir.")
    return python


def peer_times(grid: tuple[tuple[int, int], ...], folder: Path) -> list[dict[str, Any]]:
    """Steps of GPflow and GPJax, each in an environment of its own (``make peers``)."""
    lines = []
    for name in PEERS:
        python = _peer(name, folder)
        script = Path(__file__).parent / "peers" / f"{name}_step.py"
        run = subprocess.run([str(python), str(script), json.dumps(grid)], capture_output=True, text=True, check=False)
        if run.returncode:
            raise UserError(f"{name} failed: {run.stderr.strip().splitlines()[-1] if run.stderr else 'no message'}")
        for line in run.stdout.splitlines():
            if line.startswith("{"):
                lines.append({"experiment": "speed peers", "method": name, **json.loads(line)})
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=40, help="steps of each method at (512, 1024)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure anew (default: all)")
    parser.add_argument("--large", action="store_true", help="add M = 2048")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="the compiled steps too, which take seconds to compile (default: yes, but not with --smoke)",
    )
    parser.add_argument("--peers", action="store_true", help="add GPflow and GPJax (see `make peers`)")
    parser.add_argument("--peers-dir", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed"))


def run(args: argparse.Namespace) -> None:
    """Measure the parts asked for, and put their lines in the place of those that the file has."""
    path = writable_folder(args.out) / "speed.jsonl"
    if args.peers:
        for name in PEERS:
            _peer(name, args.peers_dir)
    grid = SMOKE if args.smoke else (*GRID, *(LARGE if args.large else ()))
    args.compile = not args.smoke if args.compile is None else args.compile
    args.repeats = 3 if args.smoke else args.repeats
    makers: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "grid": lambda: (time_grid_point(*point, args) for point in grid),
        "fit": lambda: (fit_steps.measure(*point, args) for point in grid),
        "peers": lambda: peer_times(grid, args.peers_dir),
    }
    parts = [*args.parts, *(["peers"] if args.peers else [])]
    replaced = {"speed" if part == "grid" else f"speed {part}" for part in parts}
    kept = [line for line in read_results(path) if line["experiment"] not in replaced] if path.exists() else []
    path.unlink(missing_ok=True)
    for line in kept:
        append_result(path, line)
    for part in parts:
        for line in makers[part]():
            append_result(path, {**line, "threads": torch.get_num_threads(), "environment": environment(args.device)})
            print(", ".join(f"{name} {value}" for name, value in line.items() if name != "fastest"), flush=True)
