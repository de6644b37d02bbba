"""BoTorch's variational GP, unmodified, on a tighter strategy; other objectives and Pyro."""

from __future__ import annotations

import functools

import pytest
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.objective import LinearMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import VariationalStrategy

import tighter_gp
from tests.tools import dense

pytest.importorskip("botorch", reason="needs BoTorch, in the test extra")
N, M, D = 19, 6, 2
TIGHTER = tighter_gp.TighterVariationalStrategy
# L-BFGS stops here by design; BoTorch would say so and try again.
FEW = {"optimizer_kwargs": {"options": {"maxiter": 30}, "timeout_sec": None}}


def data(num_outputs=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, D, generator=generator)
    y = torch.stack([torch.sin(6 * x[:, 0]) + x[:, 1], torch.cos(4 * x[:, 1]) - x[:, 0]], -1)[:, :num_outputs]
    y = y + 0.05 * torch.randn(N, num_outputs, generator=generator)
    return x, (y - y.mean(0)) / y.std(0)


def make(num_outputs=1):
    x, y = data(num_outputs)
    torch.manual_seed(0)
    return SingleTaskVariationalGP(x, y, inducing_points=M, variational_strategy=TIGHTER)


@functools.cache
def fitted(num_outputs=1):
    model = make(num_outputs)
    fit_gpytorch_mll(tighter_gp.TighterELBO(model.likelihood, model.model, num_data=N), **FEW)
    return model


def evaluate(model, objective):
    x, y = data(model.num_outputs)
    model.train()
    value = objective(model.likelihood, model.model, num_data=N)(model.model(x), y if y.size(-1) > 1 else y.squeeze(-1))
    model.eval()
    return value.item()


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning")
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_fitting_raises_the_bound_which_is_above_the_standard_one(num_outputs):
    before, model = evaluate(make(num_outputs), tighter_gp.TighterELBO), fitted(num_outputs)
    tighter, standard = evaluate(model, tighter_gp.TighterELBO), evaluate(model, VariationalELBO)
    assert tighter > before + 0.1
    assert tighter > standard + 1e-4


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_value_in_botorch_is_that_of_the_same_model_in_gpytorch(num_outputs):
    x, y = data(num_outputs)
    model = SingleTaskVariationalGP(x, y, inducing_points=M, variational_strategy=TIGHTER)
    mll = tighter_gp.TighterELBO(model.likelihood, model.model, N, combine_terms=False)
    terms = mll(model.model(x), y if num_outputs > 1 else y.squeeze(-1))
    base = getattr(model.model.variational_strategy, "base_variational_strategy", model.model.variational_strategy)
    likelihood, total = model.likelihood, 0.0
    noise = likelihood.noise.expand(1) if num_outputs == 1 else likelihood.task_noises + likelihood.noise
    for p in range(num_outputs):
        member = (p,) if num_outputs > 1 else ()
        q, z = base._variational_distribution, base.inducing_points
        lengthscale = model.model.covar_module.lengthscale[member][0]
        k = lambda a, b, lengthscale=lengthscale: dense.rbf(a, b, 1.0, lengthscale)
        Kuu, Kuf, Kff = k(z, z) + base.jitter_val * torch.eye(M), k(z, x), k(x, x)
        Q, variances = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf, noise[p].expand(N)
        problem = dense.Problem(x, y[:, p], z, variances, Kuu, Kuf, Kff, Q, Kff - Q, 1.0, lengthscale, "rbf")
        mean, root = q.variational_mean[member], q.chol_variational_covar[member].tril()
        value = dense.uncollapsed(problem, mean, root @ root.T, variances / (variances + problem.d))
        # GPyTorch's jitter on the data's diagonal is part of the explained variance.
        total = total + value - 0.5 * N * base.jitter_val / noise[p]
    actual = N * (terms.log_likelihood - terms.kl_divergence - terms.conditional)
    torch.testing.assert_close(actual, total, rtol=1e-8, atol=0)


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning")
def test_acquisition_function_of_two_outputs_is_optimised():
    model = fitted(2)
    objective = LinearMCObjective(torch.tensor([1.0, 0.5]))
    acquisition = qLogExpectedImprovement(model.eval(), best_f=0.5, objective=objective)
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    torch.manual_seed(0)
    candidates, value = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
    assert candidates.shape == (2, D)
    with torch.no_grad():
        assert value >= acquisition(torch.rand(100, 2, D)).max() - 1e-2


def test_posterior_is_that_of_the_standard_strategy():
    x, y = data()
    models = []
    for strategy in (TIGHTER, VariationalStrategy):
        torch.manual_seed(0)
        model = SingleTaskVariationalGP(x, y, inducing_points=M, variational_strategy=strategy)
        model.model(x)  # the first call sets q(u) at random
        models.append(model)
    models[0].model.load_state_dict(models[1].model.state_dict())
    left, right = (model.posterior(torch.linspace(0, 1, 8).view(4, D)) for model in models)
    torch.testing.assert_close(left.mean, right.mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(left.variance, right.variance, rtol=1e-8, atol=0)
