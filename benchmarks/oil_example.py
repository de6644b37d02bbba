"""The oil flow by the protocol of GPyTorch's own GPLVM example: its strategy and objective, and ours in their two lines.

The 1,000 training rows in their own units, as many latent dimensions as columns, inducing points and q(u) for each column of
its own, everything drawn at random at the start, Adam on everything, one draw of X per step. The loss is minus the sum over
columns of the bound per row. Both methods start from the same draws, and see the same batches and the same draws of X.
``bound`` is minus the mean of the last 500 losses, as the example shows them; ``bound_tighter`` and ``bound_base`` are both
bounds on all rows at a run's own parameters. The time per step is the processor's.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models.gplvm.bayesian_gplvm import BayesianGPLVM
from gpytorch.models.gplvm.latent_variable import VariationalLatentVariable
from gpytorch.priors import NormalPrior
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

import tighter_gp

from .data import load_oil_flow
from .errors import UserError
from .gplvm.rows import DATASETS, make_phases
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe

# The two lines in which the methods differ.
METHODS: dict[str, tuple[Any, Any]] = {
    "v-bgplvm": (VariationalStrategy, VariationalELBO),
    "tv-bgplvm": (tighter_gp.TighterVariationalStrategy, tighter_gp.TighterELBO),
}
DEFAULTS: dict[str, Any] = {
    "methods": list(METHODS),
    "datasets": ["oil"],
    "num_inducing": [25],
    "batch_size": 100,
    "lr": 0.01,
    "dtype": "float32",
    "seed": [0, 1, 2],
    "steps": 30_000,
}
SMOKE: dict[str, Any] = {"datasets": ["phases"], "num_inducing": [5], "batch_size": 50, "seed": [0], "steps": 30}

# Losses that are averaged at the end, points of a trace, and draws of X for the bounds on all rows.
_LAST, _TRACE_POINTS, _DRAWS = 500, 60, 50


class ExampleGPLVM(BayesianGPLVM):
    """A latent variable model with inducing points and q(u) for each column.

    :param strategy: Class of the variational strategy.
    :param num_rows: Rows of the data.
    :param num_columns: Columns of the data, and dimensions of the latent space.
    :param num_inducing: Inducing points for each column.
    """

    def __init__(self, strategy: Any, num_rows: int, num_columns: int, num_inducing: int) -> None:
        points = torch.randn(num_columns, num_inducing, num_columns)
        q = CholeskyVariationalDistribution(num_inducing, batch_shape=torch.Size([num_columns]))
        start = torch.randn(num_rows, num_columns)
        prior = NormalPrior(torch.zeros_like(start), torch.ones_like(start))
        latents = VariationalLatentVariable(num_rows, num_columns, num_columns, start, prior)
        super().__init__(latents, strategy(self, points, q))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=num_columns))

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument("--steps", type=int, metavar="X", help=f"steps of Adam (default: {DEFAULTS['steps']})")


def run(args: argparse.Namespace) -> None:
    """Train each method from each seed."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(METHODS), DATASETS)
    if args.steps < 1:
        raise UserError(f"--steps must be positive; got {args.steps}.")
    loaded = {name: _load(name, args) for name in args.datasets}
    for name, rows in loaded.items():
        if args.batch_size > len(rows):
            raise UserError(f"--batch-size {args.batch_size} is more than the {len(rows)} rows of {name}.")
    session = Session("oil_example", args)
    config = {"steps": args.steps, "batch_size": args.batch_size, "lr": args.lr, "dtype": args.dtype}
    planned = [describe(*point, config) for point in product(args.datasets, args.num_inducing, args.seed, args.methods)]
    session.plan(planned)
    for one in planned:
        session.run(one, partial(train, one, loaded[one["dataset"]]))


def _load(name: str, args: argparse.Namespace) -> Tensor:
    """The training rows, not standardised."""
    rows = load_oil_flow(args.data_dir)["train"][0] if name == "oil" else make_phases(150, seed=0)[0]
    return rows.to(device=args.device, dtype=args.dtype)


class Training:
    """A run.

    :param run: What tells it from others.
    :param rows: The data, ``N x D``.
    """

    def __init__(self, run: dict[str, Any], rows: Tensor) -> None:
        strategy, objective = METHODS[run["method"]]
        self.rows, self.batch_size = rows, run["config"]["batch_size"]
        torch.manual_seed(run["seed"])
        self.model = ExampleGPLVM(strategy, *rows.shape, run["num_inducing"]).to(rows)
        self.likelihood = GaussianLikelihood(batch_shape=torch.Size([rows.size(-1)])).to(rows)
        self.objective = objective(self.likelihood, self.model, num_data=len(rows))
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=run["config"]["lr"])
        self.losses: list[float] = []
        self.seconds = 0.0
        self.model(self.model.sample_latent_variable()[:1])  # draws the start of q(u)
        torch.manual_seed(run["seed"] + 1)

    def step(self) -> None:
        """One step on one batch."""
        self.optimizer.zero_grad()
        batch = torch.randperm(len(self.rows))[: self.batch_size].to(self.rows.device)
        q = self.model(self.model.sample_latent_variable()[batch])
        loss = -self.objective(q, self.rows[batch].T).sum()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def train(run: dict[str, Any], rows: Tensor, checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Train one method."""
    training, steps = Training(run, rows), run["config"]["steps"]
    started = time.process_time()
    for _ in range(steps):
        training.step()
    training.seconds = time.process_time() - started
    losses = training.losses
    last = losses[-_LAST:]
    noise = training.likelihood.noise.detach().flatten()
    return {
        "bound": -sum(last) / len(last),
        **full_bounds(training),
        "noise": float(noise.mean()),
        "noises": noise.tolist(),
        "outputscale": training.model.covar_module.outputscale.item(),
        "lengthscales": training.model.covar_module.base_kernel.lengthscale.detach().flatten().tolist(),
        "num_train": len(rows),
        "num_inputs": rows.size(-1),
        "steps": steps,
        "milliseconds": round(1000 * training.seconds / steps, 3),
        "flags": [],
        "trace": trace(losses),
    }


def trace(losses: list[float]) -> list[dict[str, float]]:
    """Mean bounds over equal parts of training, each at its last step."""
    width = max(1, len(losses) // _TRACE_POINTS)
    parts = [losses[end - width : end] for end in range(width, len(losses) + 1, width)]
    return [{"step": width * (i + 1), "bound": -sum(part) / width} for i, part in enumerate(parts)]


@torch.no_grad()
def full_bounds(training: Training) -> dict[str, float]:
    """Both bounds on all rows at a run's own parameters, with the same draws of X."""
    rows, model = training.rows, training.model
    strategy, _ = METHODS["tv-bgplvm"]
    num_inducing = model.variational_strategy.inducing_points.size(-2)
    copy = ExampleGPLVM(strategy, *rows.shape, num_inducing).to(rows)
    copy.load_state_dict(model.state_dict())
    objectives = {
        "bound_tighter": tighter_gp.TighterELBO(training.likelihood, copy, num_data=len(rows)),
        "bound_base": VariationalELBO(training.likelihood, copy, num_data=len(rows)),
    }
    sums = dict.fromkeys(objectives, 0.0)
    torch.manual_seed(0)
    for _ in range(_DRAWS):
        q = copy(copy.sample_latent_variable())
        for name, objective in objectives.items():
            sums[name] += float(objective(q, rows.T).sum())
    return {name: total / _DRAWS for name, total in sums.items()}
