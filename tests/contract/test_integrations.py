"""Programs that others wrote: GPyTorch's TorchScript notebook, skorch's estimators."""

from __future__ import annotations

import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.variational import CholeskyVariationalDistribution, IndependentMultitaskVariationalStrategy

import tighter_gp
from tests.tools.factories import GP, make_gp
from tests.tools.solve_gp import make_solve_gp

N, M = 60, 8


def data(dtype=torch.float32):
    x = torch.linspace(0, 1, N, dtype=dtype).unsqueeze(-1)
    return x, torch.sin(6 * x[:, 0])


# -- GPyTorch's notebook TorchScript_Variational_Models -----------------------------------------------------------------


class MeanVarModelWrapper(torch.nn.Module):
    def __init__(self, gp):
        super().__init__()
        self.gp = gp

    def forward(self, x):
        output_dist = self.gp(x)
        return output_dist.mean, output_dist.variance


def svgp(z):
    return make_gp(z, jitter_val=None)


def solve_gp(z):
    return make_solve_gp(z[::2], z[1::2], jitter_val=None)


def two_tasks(z):
    q = CholeskyVariationalDistribution(len(z), batch_shape=torch.Size([2]))
    return GP(
        lambda model: IndependentMultitaskVariationalStrategy(
            tighter_gp.TighterVariationalStrategy(model, z, q), num_tasks=2
        )
    )


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [svgp, solve_gp, two_tasks])
def test_model_is_traced_saved_and_loaded(make, dtype, tmp_path):
    torch.set_default_dtype(dtype)
    x, y = data(dtype)
    model = make(x[:: N // M])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    if make is two_tasks:
        likelihood, y = gpytorch.likelihoods.MultitaskGaussianLikelihood(2), torch.stack([y, -y], -1)
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    model.eval()
    test_x = torch.linspace(0, 1, 21, dtype=dtype).unsqueeze(-1)
    with torch.no_grad(), gpytorch.settings.trace_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(test_x)  # precomputation
        traced_model = torch.jit.trace(MeanVarModelWrapper(model), test_x)
    traced_model.save(str(tmp_path / "traced_model.pt"))
    loaded = torch.jit.load(str(tmp_path / "traced_model.pt"))
    expected = tighter_gp.predict(model, test_x)
    with torch.no_grad():
        mean, variance = loaded(test_x)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-3, atol=1e-5)


# -- skorch -------------------------------------------------------------------------------------------------------------


class Regression(GP):
    def __init__(self, inducing_points):
        q = CholeskyVariationalDistribution(len(inducing_points))
        super().__init__(lambda model: tighter_gp.TighterVariationalStrategy(model, inducing_points, q))


def skorch_arguments(x):
    return {
        "module": Regression,
        "module__inducing_points": x[:: N // M],
        "criterion": tighter_gp.TighterELBO,
        "criterion__num_data": N,
        "optimizer": torch.optim.Adam,
        "lr": 0.05,
        "max_epochs": 40,
        "batch_size": 20,
        "verbose": 0,
    }


def test_gp_regressor_of_skorch():
    probabilistic = pytest.importorskip("skorch.probabilistic", reason="needs skorch")
    torch.set_default_dtype(torch.float32)
    x, y = data()
    estimator = probabilistic.GPRegressor(likelihood=gpytorch.likelihoods.GaussianLikelihood, **skorch_arguments(x))
    estimator.fit(x.numpy(), y.numpy())
    mean, deviation = estimator.predict(x.numpy(), return_std=True)
    assert np.abs(mean - y.numpy()).mean() < 0.3
    assert (deviation > 0).all()


def test_gp_binary_classifier_of_skorch():
    probabilistic = pytest.importorskip("skorch.probabilistic", reason="needs skorch")
    torch.set_default_dtype(torch.float32)
    x, y = data()
    labels = (y > 0).long().numpy()
    estimator = probabilistic.GPBinaryClassifier(
        likelihood=gpytorch.likelihoods.BernoulliLikelihood, **skorch_arguments(x)
    )
    estimator.fit(x.numpy(), labels)  # scores its validation set in eval mode
    assert (estimator.predict(x.numpy()) == labels).mean() > 0.9
