"""Runs of ``fit`` for the tests: the same on every device, in one process or in two."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import gpytorch
import torch
import torch.distributed as dist
from gpytorch.likelihoods import GaussianLikelihood

import tighter_gp
from tests.accelerator.features import FEATURES, D, M, N, make_model

OPTIONS: dict[str, Any] = {"steps": 6, "batch_size": 7, "lr": 0.05, "seed": 2, "progress": False}


def problem(device: str, **kwargs: Any) -> tuple[Any, ...]:
    """Model, likelihood, inputs and targets, drawn on the CPU and moved."""
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.rand(N, D, generator=generator, device="cpu", dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(N, generator=generator, device="cpu", dtype=torch.float64)
    torch.manual_seed(0)
    model = make_model(**kwargs)
    model.variational_strategy.inducing_points.data = x[:M] + 0.1
    model.variational_strategy.variational_params_initialized.fill_(1)
    model.variational_strategy._variational_distribution.variational_mean.data = torch.linspace(-1, 1, M)
    return model.to(device), GaussianLikelihood().to(device), x.to(device), y.to(device)


def feature_run(feature: str, device: str, **options: Any) -> tighter_gp.training.History:
    """A run of ``fit`` on a feature's model, with targets of its kind for all ``N`` points."""
    torch.manual_seed(0)
    step = FEATURES[feature]()
    objective = getattr(step.module, "base_mll", step.module)
    model, likelihood = objective.model.to(device), objective.likelihood.to(device)
    x, y = torch.randn(N, D), step.data[1]
    y = y.repeat(-(-N // len(y)), *(1 for _ in y.shape[1:]))[:N]
    options = {**OPTIONS, **options}
    if "recipe" in options:
        del options["lr"]
    if feature.startswith("GPLVM"):
        return tighter_gp.fit(
            model, likelihood, None, y.to(device), objective=tighter_gp.gplvm.LatentVariableELBO, **options
        )
    if feature == "deep GP":
        elbo = lambda *args: gpytorch.mlls.DeepApproximateMLL(tighter_gp.TighterELBO(*args))
        options["objective"] = elbo
    if feature == "Blocks":
        options["batch_size"] = None
    return tighter_gp.fit(model, likelihood, x.to(device), y.to(device), **options)


def state(*modules: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, on the CPU."""
    return [tensor.detach().cpu() for module in modules for tensor in module.state_dict().values()]


def two_processes(rank: int, folder: str) -> None:
    """What one of two processes does, each on a device of its own."""
    from tests.accelerator import group

    torch.set_default_dtype(torch.float64)
    group.register()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(group.NAME, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    device = f"dev:{rank}"
    model, likelihood, x, y = problem(device, conditional=tighter_gp.PerPoint(N))
    path = f"{folder}/checkpoint"
    stop = lambda step: step.step == 3
    tighter_gp.fit(model, likelihood, x, y, checkpoint=path, callbacks=[stop], **OPTIONS)
    if rank == 0:
        saved = torch.load(path, weights_only=True)
        saved["history"]["stopped"], saved["finished"] = "", False
        torch.save(saved, path)
    dist.barrier()
    model, likelihood, x, y = problem(device, conditional=tighter_gp.PerPoint(N))
    history = tighter_gp.fit(model, likelihood, x, y, checkpoint=path, resume=True, **OPTIONS)
    torch.save((torch.tensor(history.loss), state(model, likelihood)), f"{folder}/result-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    two_processes(int(sys.argv[1]), sys.argv[2])
