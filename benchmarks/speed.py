"""Time of a training step: ours against GPyTorch's, interleaved in one run."""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
from .runs import append_result, environment, peak_memory_mb, read_results, reset_peak_memory

GRID = ((64, 256), (256, 256), (256, 1024), (512, 1024), (1024, 1024), (1024, 4096))
LARGE = ((2048, 2048),)
SMOKE = ((16, 32), (32, 32))
NUM_DATA = 100_000
NUM_DIMS = 8

PEERS = ("gpflow", "gpjax")
PARTS = ("grid", "fit", "scaling", "prediction", "collapsed")

Step = Callable[[], Any]

_ALGEBRA = ("aten::linalg_solve_triangular", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


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


def gemm_rate(size: int, device: str) -> float:
    """The machine's own rate of multiplying float32 matrices, in GFLOP/s: the best of five."""
    a = torch.rand(size, size, device=device)
    best = math.inf
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _extra_memory(function: Callable[[], Any], device: str) -> float:
    """MB that the process, or a CUDA device, holds at most during a call, above what it held before."""
    where = torch.device(device)
    reset_peak_memory(where)
    before = peak_memory_mb(where) or math.nan
    function()
    return (peak_memory_mb(where) or math.nan) - before


def peak_memory(step: Step) -> float:
    """MiB that a step holds at once, above what was there before it (PyTorch's own allocations)."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events)) / 2**20


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
        "gemm_gflops": gemm_rate(min(1024, max(256, num_inducing)), args.device),
        "peak_memory_mib": {m: peak_memory(step) for m, step in steps.items()},
    }


def scaling(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory of a T-SVGP step as one size grows and the others stay."""
    sizes = {
        "num_inducing": [(m, 1024, NUM_DATA) for m in ((32, 64) if args.smoke else (128, 256, 512, 1024))],
        "batch_size": [(256, b, NUM_DATA) for b in ((64, 128) if args.smoke else (512, 1024, 2048, 4096))],
        "num_data": [(256, 1024, n) for n in ((2000, 4000) if args.smoke else (10_000, 100_000, 1_000_000))],
    }
    lines = []
    for position, (axis, points) in enumerate(sizes.items()):
        steps = {str((m, b, n)): make_step("t-svgp", m, b, args.device, n) for m, b, n in points}
        times = interleave(steps, max(3, args.repeats // 4), args.device)
        medians = [statistics.median(times[str(point)]) for point in points]
        memory = [peak_memory(step) for step in steps.values()]
        values = [point[position] for point in points]
        lines.append(
            {
                "experiment": "speed scaling",
                "axis": axis,
                "sizes": values,
                "milliseconds": medians,
                "peak_memory_mib": memory,
                "exponent": _exponent(values, medians),
                "memory_exponent": _exponent(values, memory),
            }
        )
    return lines


def _exponent(sizes: list[int], costs: list[float]) -> float:
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(c) for c in costs]).slope


def prediction(args: argparse.Namespace) -> dict[str, Any]:
    """Predicting many points: time, extra memory, and the share of the machine's GEMM rate that the algebra reaches."""
    num_inducing, num_points, chunk = (64, 2000, 500) if args.smoke else (1024, 1_000_000, 1024)
    make_strategy, _ = _strategies(num_inducing)["t-svgp"]
    model = _Model(make_strategy).to(args.device).eval()
    x = torch.rand(num_points, NUM_DIMS, device=args.device)
    tighter_gp.predict(model, x[:chunk], batch_size=chunk)
    start = time.perf_counter()
    extra = _extra_memory(lambda: tighter_gp.predict(model, x, batch_size=chunk), args.device)
    seconds = time.perf_counter() - start
    # A triangular solve and one product, timed within the same passes.
    some = x[: 32 * chunk]
    with torch.profiler.profile() as profile:
        tighter_gp.predict(model, some, batch_size=chunk)
    algebra = sum(e.self_cpu_time_total for e in profile.key_averages() if e.key in _ALGEBRA) * 1e-6
    rates = [3 * num_inducing**2 * len(some) / algebra / 1e9, gemm_rate(min(1024, num_inducing), args.device)]
    return {
        "experiment": "speed prediction",
        "num_inducing": num_inducing,
        "num_points": num_points,
        "seconds": seconds,
        "extra_memory_mb": extra,
        "gflops": rates[0],
        "gemm_gflops": rates[1],
        "share_of_gemm": rates[0] / rates[1],
        "share_of_gemm_whole": 3 * num_inducing**2 * num_points / seconds / 1e9 / rates[1],
    }


def collapsed(args: argparse.Namespace) -> dict[str, Any]:
    """The collapsed bound of many rows and its gradient: time and extra memory."""
    num_inducing, num_data = (32, 3000) if args.smoke else (512, 1_000_000)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_data, NUM_DIMS, generator=generator).to(args.device)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(num_data, generator=generator).to(args.device)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=NUM_DIMS)).to(args.device)
    points = x[:num_inducing].clone().requires_grad_()
    noise = torch.tensor(0.01, device=args.device, requires_grad=True)
    start = time.perf_counter()
    value = lambda: tighter_gp.collapsed_bound(kernel, points, x, y, noise, jitter_val=1e-4)
    extra = _extra_memory(lambda: value().backward(), args.device)
    return {
        "experiment": "speed collapsed",
        "num_inducing": num_inducing,
        "num_data": num_data,
        "seconds": time.perf_counter() - start,
        "extra_memory_mb": extra,
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
        "compiling": lambda: [fit_steps.compiling(*fit_steps.COMPILED_AT)],
        "scaling": lambda: scaling(args),
        "prediction": lambda: [prediction(args)],
        "collapsed": lambda: [collapsed(args)],
        "peers": lambda: peer_times(grid, args.peers_dir),
    }
    parts = [*args.parts, *(["peers"] if args.peers else [])]
    parts += ["compiling"] if "fit" in parts and args.compile and args.device == "cpu" else []
    replaced = {"speed" if part == "grid" else f"speed {part}" for part in parts}
    kept = [line for line in read_results(path) if line["experiment"] not in replaced] if path.exists() else []
    path.unlink(missing_ok=True)
    for line in kept:
        append_result(path, line)
    for part in parts:
        for line in makers[part]():
            append_result(path, {**line, "threads": torch.get_num_threads(), "environment": environment(args.device)})
            print(", ".join(f"{name} {value}" for name, value in line.items() if name != "fastest"), flush=True)
