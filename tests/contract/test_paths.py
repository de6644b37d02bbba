"""Function samples through BoTorch's Matheron paths: their moments are those of q(f), for all strategies and precisions."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

import pytest
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    VariationalStrategy,
)

import tighter_gp
from tests.tools.factories import GP

pytest.importorskip("botorch", reason="needs BoTorch, in the test extra")
pytest.importorskip("tighter_gp.botorch", reason="the samplers are registered there")

from botorch.models import SingleTaskVariationalGP
from botorch.models.approximate_gp import ApproximateGPyTorchModel
from botorch.models.transforms import Normalize
from botorch.sampling.pathwise import draw_matheron_paths

import tighter_gp.botorch  # tells BoTorch's paths about the strategies

M, D, ROUNDS, PATHS = 6, 2, 20, 150
TIGHTER, SOLVE = tighter_gp.TighterVariationalStrategy, tighter_gp.SolveGPVariationalStrategy


def points(count, seed=1):
    return torch.rand(count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shaken(model):
    """q(u) set up by a first call, and then somewhere else."""
    base = getattr(model, "model", model)
    base.train()
    base(points(3).to(next(model.parameters()).dtype))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in base.named_parameters():
        if "_distribution" in name or "constant" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_((0.4 * (noise.tril() if "chol" in name else noise)).to(parameter.dtype))
    return model.eval()


def botorch_model(dtype=torch.float64, strategy=TIGHTER, **kwargs):
    x = points(20).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.sin(5 * x[:, :1])
        model = SingleTaskVariationalGP(x, y, inducing_points=M, variational_strategy=strategy, **kwargs)
    return shaken(model)


def solve_gp(dtype=torch.float64, forms=(CholeskyVariationalDistribution,) * 2, wrapped=False):
    q = [form(count) for form, count in zip(forms, (M, 4), strict=True)]
    z, o = points(M, 3), points(4, 4)
    model = GP(lambda model: SOLVE(model, z, o, *q), mean=0.4)
    model.covar_module.base_kernel.lengthscale = 0.4
    model = shaken(model.to(dtype))
    if wrapped:
        wrapper = ApproximateGPyTorchModel(model).eval()
        wrapper.train_inputs = (z.to(dtype),)  # where BoTorch looks for the number of inputs
        return wrapper
    return model


MODELS = {
    "BoTorch's": botorch_model,
    "BoTorch's with an input transform": lambda dtype: botorch_model(dtype, input_transform=Normalize(D)),
    "BoTorch's on GPyTorch's strategy": lambda dtype: botorch_model(dtype, VariationalStrategy),
    "BoTorch's, mean-field": lambda dtype: botorch_model(
        dtype, variational_distribution=MeanFieldVariationalDistribution(M)
    ),
    "BoTorch's on SOLVE-GP": lambda dtype: botorch_model(
        dtype,
        functools.partial(
            SOLVE, orthogonal_points=points(4, 4).to(dtype), orthogonal_distribution=CholeskyVariationalDistribution(4)
        ),
    ),
    "SOLVE-GP": solve_gp,
    "SOLVE-GP in BoTorch's wrapper": lambda dtype: solve_gp(dtype, wrapped=True),
    "SOLVE-GP, mean-field and a point mass": lambda dtype: solve_gp(
        dtype, (MeanFieldVariationalDistribution, DeltaVariationalDistribution)
    ),
}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float64) for kind in MODELS), ("SOLVE-GP", torch.float32)])
def test_moments_of_ten_thousand_paths_are_those_of_the_model(kind, dtype):
    torch.set_default_dtype(dtype)
    model, x = MODELS[kind](dtype), points(5, 7).to(dtype)
    q = tighter_gp.predict(model, x)
    torch.manual_seed(2)
    with torch.no_grad():
        # Features of the prior are drawn anew in each round, so that their error is part of the spread.
        values = torch.stack([draw_matheron_paths(model, torch.Size([PATHS]))(x) for _ in range(ROUNDS)]).double()
    values = values.reshape(ROUNDS, PATHS, len(x))
    for statistic, expected in ((values.mean(1), q.mean), ((values - q.mean.double()).square().mean(1), q.variance)):
        error = statistic.std(0) / ROUNDS**0.5
        assert ((statistic.mean(0) - expected.double()).abs() < 3 * error).all()


def test_paths_are_functions():
    model, x = solve_gp(), points(5, 7)
    path = draw_matheron_paths(model, torch.Size([3]))
    assert torch.equal(path(x), path(x))
    torch.testing.assert_close(path(x)[:, 1:3], path(x[1:3]))
    assert not torch.allclose(path(x)[0], path(x)[1])


def test_given_values_are_reached():
    model = solve_gp()
    strategy = model.variational_strategy
    for distribution in strategy.distributions:  # a q(u) that is nearly sure
        distribution.chol_variational_covar.data.mul_(1e-6)
    paths = draw_matheron_paths(model, torch.Size([40]))
    z = strategy.inducing_points
    with torch.no_grad():
        spread = paths(z).std(0)
    assert spread.max() < 0.05  # the jitter's


def test_stock_models_are_drawn_by_botorch_itself():
    model = botorch_model(strategy=VariationalStrategy)
    paths = draw_matheron_paths(model, torch.Size([2]))
    assert paths["update_paths"].weight.shape == (2, M)


@pytest.mark.slow
def test_nothing_of_botorch_is_imported_by_the_package():
    program = (
        "import sys, torch, gpytorch, tighter_gp\n"
        "from tests.tools.factories import make_gp\n"
        "make_gp(torch.rand(5, 1)).eval()\n"
        "assert not any(name.startswith('botorch') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
