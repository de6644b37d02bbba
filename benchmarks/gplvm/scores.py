"""What a trained GPLVM is judged by."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.mlls import VariationalELBO

from tighter_gp import gplvm

from .rows import Data

HIDDEN = 0.25  # share of the entries of a test row


def separation(model: gplvm.BayesianGPLVM, data: Data) -> dict[str, Any]:
    """How often the nearest other row in the two most relevant latents is of another phase."""
    report = gplvm.relevance(model)
    latents = model.latents.q().mean.detach()[:, report.order[:2]].cpu()
    distance = torch.cdist(latents, latents).fill_diagonal_(torch.inf)
    error = (data.labels[distance.argmin(-1)] != data.labels).double().mean().item()
    return {
        "error": error,
        "relevance": [round(value, 4) for value in report.relevance.tolist()],
        "relevant": report.order[:2].tolist(),
    }


def hidden_entries(model: gplvm.BayesianGPLVM, data: Data, tighter: bool, seed: int, steps: int) -> dict[str, Any]:
    """Errors on entries of the test rows that the inference of their latents did not see."""
    generator = torch.Generator().manual_seed(1000 + seed)
    observed = (torch.rand(data.test.shape, generator=generator) >= HIDDEN).to(data.test.device)
    torch.manual_seed(seed)
    objective = None if tighter else VariationalELBO
    q_x = model.infer_latents(data.test, observed, num_steps=steps, objective=objective)
    error = (model.reconstruct(q_x).mean - data.test)[~observed]
    density = model.log_density(data.test, q_x, ~observed)[~observed]
    rmse, column_mean = error.square().mean().sqrt().item(), data.test[~observed].square().mean().sqrt().item()
    return {
        "rmse": rmse,
        "rmse_column_mean": column_mean,
        "nlpd": -density.mean().item(),
        "flags": ["rmse above half the column mean's"] if rmse >= 0.5 * column_mean else [],
    }
