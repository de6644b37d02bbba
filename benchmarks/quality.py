"""Quality against time: test NLPD and RMSE of several ways to train, as the seconds of training go by.

Every method starts from GPyTorch's own hyperparameters and the same k-means inducing points, and is evaluated after each
epoch with the clock stopped. Ours have several budgets; that with neighbours is T-SVGP and then NeighbourGP, scored once. GPflow
and GPJax run in environments of their own (``make peers``) and are left out where these are not there. Run it with nothing else
on the machine. GPBoost, by ``--methods "gpboost vecchia"`` or ``"gpboost vif"``, may take hours; its seconds are those of one
processor. ``python -m benchmarks report`` makes tables and pictures.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from torch import Tensor

import tighter_gp

from .data import Split, check_regression, check_sizes, load_split
from .errors import UserError
from .models import warm_up
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session

DEFAULTS: dict[str, Any] = {
    "methods": [
        "gpytorch tutorial",
        "gpytorch tuned",
        "gpytorch ngd",
        "gpytorch large batch",
        "gpflow ngd",
        "gpflow ngd float64",
        "gpjax ngd",
        "svgp",
        "t-svgp",
        "neighbours",
        "t-solve-gp",
        "t-sgpr",
    ],
    "datasets": ["kin40k", "protein"],
    "splits": [0],
    "num_inducing": [256],
    "epochs": 15,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE = {
    "datasets": ["toy"],
    "num_inducing": [8],
    "epochs": 2,
    "batch_size": 64,
    "methods": ["gpytorch tuned", "gpytorch ngd", "t-svgp", "t-sgpr"],
}

# Budgets as multiples of the epochs: the peers' recipes have one each, ours are tried with several.
_BUDGETS = {
    "gpytorch tutorial": (4,),
    "gpytorch tuned": (2,),
    "gpytorch large batch": (2,),
    "t-svgp": (1 / 3, 2 / 3, 1, 2),
    "neighbours": (1 / 5, 1),
}

# Peers with an environment, and thus a script, of their own.
_ELSEWHERE = ("gpflow", "gpjax", "gpboost")
_SLOW = ("gpboost vecchia", "gpboost vif")


class SparseGP(gpytorch.models.ApproximateGP):
    """A constant mean and a Matérn-3/2 kernel with one lengthscale per dimension."""

    def __init__(self, make_strategy: Callable[..., Any], num_dims: int) -> None:
        super().__init__(make_strategy(self))
        self.mean_module = gpytorch.means.ConstantMean()
        kernel = gpytorch.kernels.MaternKernel(1.5, ard_num_dims=num_dims)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Score(NamedTuple):
    """Test scores at a time of training."""

    seconds: float
    nlpd: float
    rmse: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument("--peers-dir", type=Path, default=Path(".venv-peers"), help="environments made by `make peers`")


def run(args: argparse.Namespace) -> None:
    """Train each method, each on the same points."""
    args = resolve(args, DEFAULTS, SMOKE, (*DEFAULTS["methods"], *_SLOW))
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    args.methods = [method for method in args.methods if _is_there(method, args)]
    session = Session("quality", args)
    warm_up()
    planned = session.plan_splits(args, partial(_budgets, args))
    for runs in planned:
        data = load_split(runs[0], args)
        points = tighter_gp.inducing.kmeans(data.train_x, runs[0]["num_inducing"], seed=runs[0]["seed"])
        for one in runs:
            session.run(one, partial(_one, one, data, points, args.peers_dir))


def _is_there(method: str, args: argparse.Namespace) -> bool:
    """Whether a peer can be run; one that was asked for by name must be there."""
    name = method.partition(" ")[0]
    if name not in _ELSEWHERE or (args.peers_dir / name / "bin" / "python").exists():
        return True
    if args.methods != DEFAULTS["methods"]:
        raise UserError(f"{name} is not installed in {args.peers_dir}: run `make peers`, or give --peers-dir.")
    print(f"{method} is left out: run `make peers` to have it.")
    return False


def _one(
    run: dict[str, Any], data: Split, points: Tensor, peers: Path, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """The last scores, and those on the way there."""
    method, config = run["method"], run["config"]
    if method.startswith(_ELSEWHERE):
        trace, bound = _elsewhere(method, data, points, config, peers), None
    else:
        trace, bound = _train(method, data, points, config, run["seed"])
    return {**trace[-1]._asdict(), "bound": bound, "trace": [list(score) for score in trace]}


def _budgets(args: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """The settings of a method, one per budget."""
    dtype = "float64" if method.endswith("float64") else args.dtype
    return [
        {"epochs": max(1, round(args.epochs * budget)), "batch_size": args.batch_size, "dtype": dtype}
        for budget in _BUDGETS.get(method, (1,))
    ]


def _elsewhere(method: str, data: Split, points: Tensor, config: dict[str, Any], peers: Path) -> list[Score]:
    """Scores of a peer in its own environment."""
    name = method.partition(" ")[0]
    script, trace = Path(__file__).parent / "peers" / f"{name}_quality.py", []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        arrays = {"points": points, **{key: getattr(data, key) for key in ("train_x", "train_y", "test_x", "test_y")}}
        np.savez(path, **{key: tensor.cpu().numpy() for key, tensor in arrays.items()})
        command = [
            peers / name / "bin" / "python",
            script,
            path,
            config["epochs"],
            config["batch_size"],
            config["dtype"],
            method.rpartition(" ")[2],
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("["):
            trace.append(Score(*json.loads(line)))
    if done.returncode or not trace:
        raise UserError(f"{name} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'no message'}")
    return trace


def _train(
    method: str, data: Split, points: Tensor, config: dict[str, Any], seed: int
) -> tuple[list[Score], float | None]:
    """Scores after each epoch, and the bound per datum at the end."""
    torch.manual_seed(seed)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(points)
    trace: list[Score] = []

    def evaluate(model: Any, seconds: float) -> None:
        y = tighter_gp.predict_y(model, likelihood, data.test_x)
        rmse = (y.mean - data.test_y).square().mean().sqrt().item()
        trace.append(Score(round(seconds, 3), -y.log_prob(data.test_y).mean().item(), rmse))

    if method.startswith("gpytorch"):
        model = _stock(method, points)
        for seconds in _loop(method, model, likelihood, data, config):
            evaluate(model, seconds)
        return trace, _bound(model, likelihood, data, gpytorch.mlls.VariationalELBO)
    if method == "t-sgpr":
        kernel = SparseGP(lambda owner: _ours("t-svgp", owner, points), points.size(-1)).covar_module
        mean = gpytorch.means.ConstantMean()
        model = tighter_gp.CollapsedGP(
            data.train_x, data.train_y, points, kernel.to(points), likelihood, mean.to(points)
        )
        every, options = 5, {"steps": 5 * config["epochs"]}
    else:
        model = SparseGP(lambda owner: _ours(method, owner, points), points.size(-1)).to(points)
        every, options = 0, {"epochs": config["epochs"], "batch_size": config["batch_size"]}
        if method == "svgp":
            options["objective"] = gpytorch.mlls.VariationalELBO

    def remember(state: tighter_gp.training.Step) -> None:
        if state.step % every == 0 if every else state.epoch_end:
            evaluate(state.model, state.history.seconds)

    if method == "neighbours":
        started = time.perf_counter()
        tighter_gp.fit(model, likelihood, data.train_x, data.train_y, seed=seed, **options)
        near = tighter_gp.NeighbourGP(model, likelihood, data.train_x, data.train_y)
        likelihood = near.likelihood
        evaluate(near, time.perf_counter() - started)
        return trace, None
    tighter_gp.fit(model, likelihood, data.train_x, data.train_y, seed=seed, callbacks=[remember], **options)
    return trace, _bound(model, likelihood, data, options.get("objective", tighter_gp.TighterELBO))


def _bound(model: Any, likelihood: Any, data: Split, objective: Any) -> float:
    options = {} if isinstance(model, tighter_gp.CollapsedGP) else {"objective": objective}
    return float(tighter_gp.evaluate_bound(model, likelihood, data.train_x, data.train_y, **options)) / len(
        data.train_y
    )


def _ours(method: str, owner: Any, points: Tensor) -> Any:
    q = gpytorch.variational.CholeskyVariationalDistribution
    if method != "t-solve-gp":
        return tighter_gp.TighterVariationalStrategy(owner, points.clone(), q(len(points)))
    first, second = tighter_gp.inducing.split_inducing_points(points)
    return tighter_gp.SolveGPVariationalStrategy(owner, first, second, q(len(first)), q(len(second)))


def _stock(method: str, points: Tensor) -> SparseGP:
    variational = gpytorch.variational
    form = variational.NaturalVariationalDistribution if method.endswith("ngd") else None
    q = (form or variational.CholeskyVariationalDistribution)(len(points))
    kind = variational.LargeBatchVariationalStrategy if method.endswith("batch") else variational.VariationalStrategy
    return SparseGP(lambda owner: kind(owner, points.clone(), q), points.size(-1)).to(points)


def _loop(method: str, model: Any, likelihood: Any, data: Split, config: dict[str, Any]) -> Iterator[float]:
    """GPyTorch's own loop; yields the seconds of training after each epoch."""
    num_data, size, epochs = len(data.train_y), config["batch_size"], config["epochs"]
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data)
    lr = 0.01 if method.endswith("tutorial") else 0.05
    hyper = list(model.hyperparameters()) if method.endswith("ngd") else list(model.parameters())
    optimizers: list[Any] = [torch.optim.Adam([*hyper, *likelihood.parameters()], lr=lr)]
    if method.endswith("ngd"):
        optimizers.append(gpytorch.optim.NGD(model.variational_parameters(), num_data=num_data, lr=0.1))
    total, done, seconds = epochs * -(-num_data // size), 0, 0.0
    for _ in range(epochs):
        model.train()
        likelihood.train()
        started = time.perf_counter()
        for rows in torch.randperm(num_data, device=data.train_x.device).split(size):
            for group in optimizers[0].param_groups:
                falls = not method.endswith("tutorial")
                group["lr"] = lr * (0.5 * (1 + math.cos(math.pi * done / total)) if falls else 1.0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = -mll(model(data.train_x[rows]), data.train_y[rows])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            done += 1
        seconds += time.perf_counter() - started
        model.eval()
        likelihood.eval()
        yield seconds
