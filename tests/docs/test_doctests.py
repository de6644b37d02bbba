"""Every public name has an example in its docstring, and every example is true, in float32 and in float64."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
from collections.abc import Iterator
from types import ModuleType

import gpytorch
import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import tighter_gp

# Where GPyTorch users look for a base class or a result type; their names are not all at the top.
SUBPACKAGES = ("kernels", "mlls", "strategies")


def names_of(module: ModuleType) -> list[str]:
    """What ``__all__`` says; without it, what the module defines and does not hide."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = lambda value: getattr(value, "__module__", None) == module.__name__
    return [name for name, value in vars(module).items() if not name.startswith("_") and own(value)]


def public(module: ModuleType, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Dotted name and object of all that is public in a module and in the modules that it lists, each once."""
    for name in names_of(module):
        value = getattr(module, name)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.ismodule(value):
            yield from public(value, seen)
        else:
            yield f"{module.__name__}.{name}", value


# Compiling takes seconds, and does not depend on the precision.
ONCE = {("tighter_gp.CompiledStep", "float64")}

SEEN: set[int] = set()
PUBLIC = dict(public(tighter_gp, SEEN))
for subpackage in SUBPACKAGES:
    PUBLIC |= public(importlib.import_module(f"tighter_gp.{subpackage}"), SEEN)


class MyGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        q = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        super().__init__(tighter_gp.TighterVariationalStrategy(self, inducing_points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def regression() -> dict[str, object]:
    """What an example may take for granted: a small model with its data."""
    x = torch.linspace(0, 1, 50).unsqueeze(-1)
    y = torch.sin(12 * x[:, 0]) + 0.1 * torch.randn(50)
    is_test = torch.arange(50) % 5 == 2
    model, likelihood = MyGP(torch.linspace(0, 1, 5).unsqueeze(-1)), gpytorch.likelihoods.GaussianLikelihood()
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


def namespace(name: str) -> dict[str, object]:
    common = {"gpytorch": gpytorch, "math": math, "tighter_gp": tighter_gp, "torch": torch}
    return common | (latent_variables() if name.startswith("tighter_gp.gplvm.") else regression())


def run(name: str, docstring: str) -> tuple[int, str]:
    """Number of failures among the examples of a docstring, and what was reported of them."""
    examples = doctest.DocTestParser().get_doctest(docstring, namespace(name), name, name, 0)
    report: list[str] = []
    return doctest.DocTestRunner().run(examples, out=report.append).failed, "".join(report)


def test_public_names_are_found():
    assert {"tighter_gp.fit", "tighter_gp.maths.bounds.log_penalty", "tighter_gp.gplvm.psi.psi1"} <= set(PUBLIC)
    assert {"tighter_gp.mlls.ELBOTerms", "tighter_gp.training.distributed.start"} <= set(PUBLIC)


@pytest.mark.parametrize(
    "module", [tighter_gp, *filter(inspect.ismodule, vars(tighter_gp).values())], ids=lambda m: m.__name__
)
def test_modules_list_names_that_exist(module):
    assert [name for name in names_of(module) if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_an_example_that_is_run(name):
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert "Example:\n" in docstring, f"{name} has no example"
    examples = doctest.DocTestParser().get_examples(docstring.partition("Example:\n")[2])
    assert examples
    assert not any(example.options.get(doctest.SKIP) for example in examples)


RUNS = [(name, dtype) for name in PUBLIC for dtype in ("float32", "float64") if (name, dtype) not in ONCE]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_example_is_true(name, dtype, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    matplotlib.use("Agg")
    torch.set_default_dtype(getattr(torch, dtype))
    failed, report = run(name, inspect.getdoc(PUBLIC[name]) or "")
    plt.close("all")
    assert not failed, report


def test_false_example_fails():
    failed, report = run("false", "Example:\n    >>> 1 + 1\n    3\n")
    assert failed == 1
    assert "Got:\n    2" in report
