"""Every public name has an example in its docstring, and every example is true: a run for each module."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import pkgutil
from types import ModuleType

import gpytorch
import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import tighter_gp
from tests.tools.factories import make_gp

WITH_EXTRAS = {"tighter_gp.botorch": "botorch", "tighter_gp.estimators": "sklearn"}


def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(tighter_gp.__path__, "tighter_gp.")]
    return [tighter_gp, *(importlib.import_module(name) for name in names)]


def documented(module: ModuleType) -> list[tuple[str, object]]:
    """What a module itself defines and does not hide, and has an example."""
    own = [(name, value) for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [(name, value) for name, value in own if "Example:\n" in (inspect.getdoc(value) or "")]


MODULES = {module.__name__: documented(module) for module in modules() if documented(module)}


def regression() -> dict[str, object]:
    """What an example may take for granted: a small model with its data."""
    x = torch.linspace(0, 1, 50).unsqueeze(-1)
    y = torch.sin(12 * x[:, 0]) + 0.1 * torch.randn(50)
    is_test = torch.arange(50) % 5 == 2
    model = make_gp(torch.linspace(0, 1, 5).unsqueeze(-1), jitter_val=None)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model.covar_module.base_kernel.lengthscale, likelihood.noise = 0.1, 0.05
    return {
        "model": model,
        "likelihood": likelihood,
        "mll": tighter_gp.TighterELBO(likelihood, model, num_data=40),
        "train_x": x[~is_test],
        "train_y": y[~is_test],
        "test_x": x[is_test],
        "test_y": y[is_test],
    }


def latent_variables() -> dict[str, object]:
    """The same for the examples of the GPLVM."""
    rows = torch.randn(36, 2) @ torch.randn(2, 4) + 0.1 * torch.randn(36, 4)
    data, new = (rows - rows.mean(0)).split([30, 6])
    new = torch.where(torch.eye(6, 4, dtype=torch.bool), torch.nan, new)
    return {
        "model": tighter_gp.gplvm.BayesianGPLVM.from_data(data, latent_dim=2, num_inducing=5),
        "Y": data,
        "Y_new": new,
        "observed": torch.arange(24).reshape(6, 4) % 5 != 1,  # entries held out, others than the missing ones
        "rows": torch.arange(10),
        "labels": ["a", "b"] * 15,
        "problem": tighter_gp.gplvm.collapsed.LatentProblem(
            mean=torch.randn(8, 1),
            variance=torch.full((8, 1), 0.1),
            inducing_points=torch.tensor([[-1.0], [0.0], [1.0]]),
            outputscale=torch.tensor(1.0),
            lengthscale=torch.ones(1),
            noise=torch.tensor(0.1),
            targets=torch.randn(8, 2),
        ),
    }


def test_everything_public_has_an_example():
    for name in tighter_gp.__all__:
        value = getattr(tighter_gp, name)
        if not inspect.ismodule(value):
            assert "Example:\n" in (inspect.getdoc(value) or ""), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module, dtype, monkeypatch, tmp_path):
    if module in WITH_EXTRAS:
        pytest.importorskip(WITH_EXTRAS[module])
    monkeypatch.chdir(tmp_path)  # an example may write a file
    matplotlib.use("Agg")
    torch.set_default_dtype(dtype)
    for name, value in MODULES[module]:
        torch.manual_seed(0)
        common = {"gpytorch": gpytorch, "math": math, "tighter_gp": tighter_gp, "torch": torch}
        names = common | (latent_variables() if ".gplvm" in module else regression())
        examples = doctest.DocTestParser().get_doctest(inspect.getdoc(value), names, name, module, 0)
        assert examples.examples, name
        report: list[str] = []
        failed = doctest.DocTestRunner().run(examples, out=report.append).failed
        plt.close("all")
        assert not failed, "".join(report)
