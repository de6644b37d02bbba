"""Quality against time: test NLPD and RMSE of several ways to train, as the seconds of training go by.

Every method starts from GPyTorch's own hyperparameters and the same k-means inducing points, and is evaluated after each
epoch with the clock stopped. Run it with nothing else on the machine. The last table says in which fraction of a peer's
time ours reach its final NLPD.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import torch
from torch import Tensor

import tighter_gp

from .data import Split, check_regression, check_sizes, load_regression
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
        "svgp",
        "t-svgp",
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

# Epochs of the peers' recipes, over those of ours.
_LONGER = {"gpytorch tutorial": 4, "gpytorch tuned": 2, "gpytorch large batch": 2}


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


def run(args: argparse.Namespace) -> None:
    """Train each method, and print the table."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(DEFAULTS["methods"]))
    check_regression(args.datasets, args.splits, args.data_dir)
    check_sizes(args.datasets, max(args.num_inducing), args.data_dir)
    session = Session("quality", args)
    warm_up()
    planned = [
        (dataset, split, number, seed)
        for dataset in args.datasets
        for number in args.num_inducing
        for split in args.splits
        for seed in args.seed
    ]
    session.plan([_describe(args, *point, method) for point in planned for method in args.methods])
    for dataset, split, number, seed in planned:
        data = load_regression(dataset, split, data_dir=args.data_dir, dtype=args.dtype, device=args.device)
        points = tighter_gp.inducing.kmeans(data.train_x, number, seed=seed)
        found: dict[str, list[Score]] = {}
        for method in args.methods:
            one = _describe(args, dataset, split, number, seed, method)
            session.run(one, partial(_one, one, data, points, found))
        if found:
            print(table(found))


def _one(
    run: dict[str, Any], data: Split, points: Tensor, found: dict[str, list[Score]], checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """A line of results; the trace goes to the table too."""
    trace = found[run["method"]] = _train(run["method"], data, points, run["config"], run["seed"])
    return {**trace[-1]._asdict(), "trace": [list(score) for score in trace]}


def _describe(
    args: argparse.Namespace, dataset: str, split: int, number: int, seed: int, method: str
) -> dict[str, Any]:
    epochs = args.epochs * _LONGER.get(method, 1)
    config = {"epochs": epochs, "batch_size": args.batch_size, "dtype": str(args.dtype).removeprefix("torch.")}
    return {
        "dataset": dataset,
        "split": split,
        "seed": seed,
        "method": method,
        "num_inducing": number,
        "config": config,
    }


def _train(method: str, data: Split, points: Tensor, config: dict[str, Any], seed: int) -> list[Score]:
    """Scores after each epoch."""
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
        return trace
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

    tighter_gp.fit(model, likelihood, data.train_x, data.train_y, seed=seed, callbacks=[remember], **options)
    return trace


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


def table(found: dict[str, list[Score]]) -> str:
    """Final scores, and when ours reach those of each peer, as a fraction of the peer's time."""
    ours = [method for method in found if not method.startswith("gpytorch")]
    lines = ["| method | seconds | NLPD | RMSE | " + " | ".join(f"{o}: time to this NLPD" for o in ours) + " |"]
    lines.append("|" + " --- |" * (4 + len(ours)))
    for method, trace in found.items():
        last = trace[-1]
        fractions = []
        for other in ours:
            reached = next((score.seconds for score in found[other] if score.nlpd <= last.nlpd), None)
            fractions.append("" if other == method else "never" if reached is None else f"{reached / last.seconds:.2f}")
        cells = [method, f"{last.seconds:.1f}", f"{last.nlpd:.4f}", f"{last.rmse:.4f}", *fractions]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
