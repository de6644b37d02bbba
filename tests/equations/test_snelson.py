"""The values printed in the paper for the Snelson data, through the drop-in kernel."""

from __future__ import annotations

import os
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from tests.tools.factories import CollapsedGP, make_kernel, make_noise

DATA = Path(os.environ.get("TIGHTER_GP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "snelson.csv"

# bound per datum, kernel variance, lengthscale, noise variance
PRINTED = {"titsias": (-0.5589, 0.0868, 0.4345, 0.1263), "tighter": (-0.5253, 0.1073, 0.4304, 0.1155)}


@pytest.mark.skipif(not DATA.exists(), reason="no snelson.csv: set TIGHTER_GP_DATA to the folder that has it")
@pytest.mark.parametrize("bound", PRINTED)
def test_training_ends_at_the_papers_values(bound):
    x, y = torch.from_numpy(np.loadtxt(DATA, delimiter=",")).T
    rows = np.random.RandomState(42).permutation(200)[:5]
    kernel = make_kernel("rbf", 1.0, torch.ones(1))
    model = CollapsedGP(x.unsqueeze(-1), y, x[rows].unsqueeze(-1), kernel, make_noise(1.0), bound=bound)
    model.mean_module = gpytorch.means.ZeroMean()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    reached = -closure(), kernel.outputscale, kernel.base_kernel.lengthscale, model.likelihood.noise
    assert [round(value.item(), 6) for value in reached] == pytest.approx(PRINTED[bound], abs=5e-4)
