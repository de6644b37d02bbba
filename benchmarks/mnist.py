"""Classification of digits: ten latent GPs and a softmax on MNIST (the paper's Section 5.4).

The ten functions share inducing points and an RBF kernel. The scales of the tighter methods are the best for each point
and class (``--conditional optimal``), or follow from one learned beta per class, as in the paper (``beta``). Bounds are
evaluated on the whole training set at each run's own parameters, with the same draws for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import gpytorch
import torch

import tighter_gp
from tighter_gp.training import Step

from . import models
from .data import Split, load_digits, load_mnist
from .errors import UserError
from .options import add_arguments as add_common
from .options import resolve
from .runs import Session, describe
from .traces import Trace, at_epochs, place

DEFAULTS: dict[str, Any] = {
    "methods": list(models.METHODS),
    "datasets": ["mnist"],
    "num_inducing": [256],
    "epochs": 20,
    "batch_size": 1024,
    "dtype": "float32",
    "seed": [0],
}
SMOKE = {"datasets": ["digits"], "num_inducing": [16], "epochs": 2, "batch_size": 256}

NUM_CLASSES = 10
CONDITIONALS = ("optimal", "beta")
DATASETS = {"mnist": load_mnist, "digits": lambda data_dir, **kwargs: load_digits(**kwargs)}

# Draws of the latents per point: in training, and for the reported numbers.
_TRAIN_SAMPLES, _TEST_SAMPLES = 10, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the experiment."""
    add_common(parser, DEFAULTS)
    parser.add_argument(
        "--conditional", default=CONDITIONALS[0], choices=CONDITIONALS, help="scales of the tighter methods (optimal)"
    )
    parser.add_argument(
        "--traces", type=int, default=5, metavar="N", help="times to score the test set in training (5)"
    )


def run(args: argparse.Namespace) -> None:
    """Train and evaluate each method."""
    args = resolve(args, DEFAULTS, SMOKE, tuple(models.METHODS), DATASETS)
    loaded = {
        name: DATASETS[name](data_dir=args.data_dir, dtype=args.dtype, device=args.device) for name in args.datasets
    }
    for name, data in loaded.items():
        if max(args.num_inducing) > len(data.train_y):
            raise UserError(
                f"{max(args.num_inducing)} inducing points are more than the {len(data.train_y)} training points of {name}."
            )
    session = Session("mnist", args)
    config = {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "recipe": models.RECIPE,
        "dtype": args.dtype,
        "kernel": "rbf",
        "conditional": args.conditional,
    }
    planned = [
        [describe(*point, method, config) for method in args.methods]
        for point in product(args.datasets, args.num_inducing, args.seed)
    ]
    session.plan(list(chain(*planned)))
    models.warm_up()
    for runs in planned:
        if session.all_done(runs):
            continue
        data = loaded[runs[0]["dataset"]]
        start = models.make_start(data.train_x, runs[0]["num_inducing"], runs[0]["seed"])
        for one in runs:
            session.run(one, partial(train, one, data, start, args.traces))


def measure(data: Split, state: Step) -> dict[str, Any]:
    """The test scores in training, and the mean of the last epoch's estimates of the bound."""
    recent = state.history.loss[-state.step // state.epoch :]
    return {**place(state), "bound": -sum(recent) / len(recent), **scores(state.model, state.likelihood, data)}


def train(
    run: dict[str, Any], data: Split, start: models.Start, traces: int, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train one method and evaluate it."""
    method, config = run["method"], run["config"]
    tighter = models.METHODS[method].tighter
    model, likelihood = models.make_classification(method, start, NUM_CLASSES, config["conditional"])
    trace = Trace(partial(measure, data), at_epochs(config["epochs"], traces))
    with gpytorch.settings.num_likelihood_samples(_TRAIN_SAMPLES):
        history = models.train(run, model, likelihood, data, trace, checkpoint, resume)
    test_scores = scores(model, likelihood, data)
    values = bounds(method, model, likelihood, data, start)
    result = {
        "bound": values[models.METHODS[method].bound],
        **values,
        **test_scores,
        "outputscale": model.covar_module.outputscale.item(),
        "lengthscale": model.covar_module.base_kernel.lengthscale.item(),
        "num_train": len(data.train_y),
        "num_test": len(data.test_y),
        "num_inputs": data.train_x.size(-1),
        "seconds": round(history.seconds, 3),
        "steps": history.steps,
        "skipped": len(history.skipped),
        "flags": [],
        "trace": trace.points,
    }
    if tighter and config["conditional"] == "beta":
        result["beta"] = _conditional(model).beta.tolist()
    return result


def _conditional(model: Any) -> Any:
    return model.variational_strategy.base_variational_strategy.conditional


def bounds(method: str, model: Any, likelihood: Any, data: Split, start: models.Start) -> dict[str, float]:
    """Both bounds at a model's own q(u), inducing points and hyperparameters.

    A tighter method has its own scales; for a method trained with the standard bound they are the best for each point.
    """
    partner = method.removeprefix("t-") if models.METHODS[method].tighter else f"t-{method}"
    other, _ = models.make_classification(partner, start, NUM_CLASSES, "optimal")
    own = model.state_dict()
    other.load_state_dict({name: own[name] for name in other.state_dict()})
    tighter, base = (model, other) if models.METHODS[method].tighter else (other, model)
    return {
        "bound_tighter": _bound(tighter, likelihood, data),
        "bound_base": _bound(base, likelihood, data),
    }


@contextmanager
def _test_draws() -> Iterator[None]:
    """The draws of the reported numbers, the same for every method."""
    with torch.random.fork_rng(devices=[]), gpytorch.settings.num_likelihood_samples(_TEST_SAMPLES):
        torch.manual_seed(0)
        yield


def _bound(model: Any, likelihood: Any, data: Split) -> float:
    """A bound per training point; the draws are the same for every model."""
    with _test_draws():
        bound = tighter_gp.evaluate_bound(model, likelihood, data.train_x, data.train_y)
        return float(bound) / len(data.train_y)


@torch.no_grad()
def scores(model: Any, likelihood: Any, data: Split) -> dict[str, float]:
    """Error rate and mean NLPD on the test set."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    wrong, density = 0, 0.0
    with _test_draws():
        for x, y in zip(data.test_x.split(1024), data.test_y.split(1024), strict=True):
            probabilities = likelihood(model(x)).probs.mean(0)
            wrong += int((probabilities.argmax(-1) != y).sum())
            density += float(probabilities.gather(-1, y.unsqueeze(-1)).clamp_min(1e-12).log().sum())
    for module, training in modes:
        module.training = training
    return {"error": wrong / len(data.test_y), "nlpd": -density / len(data.test_y)}
