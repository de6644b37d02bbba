"""Something left on another device: the right numbers or an error that says what to move, and NaN that CUDA lets pass."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood

import tighter_gp
from tests.accelerator.device import DEVICES
from tests.accelerator.features import FEATURES, D, M, N, collapsed_gp, collapsed_kernel, kernel, make_model, simple
from tests.accelerator.table import step_of
from tighter_gp.checks import NUMERICAL_ERRORS

pytestmark = pytest.mark.accelerator

ONE_TASK = ["T-SVGP", "SOLVE-GP", "T-SVGP, beta", "natural q(u)"]
SEVERAL_KINDS = [*ONE_TASK, "Blocks", "PerPoint", "Bernoulli, optimal", "softmax, optimal", "multitask", "LMC"]
data = lambda device="dev:1": (torch.randn(N, D).to(device), torch.randn(N).to(device))


@pytest.mark.parametrize("feature", SEVERAL_KINDS)
def test_a_step_says_what_was_left_behind(feature):
    here, step = step_of(feature, "cpu"), step_of(feature, "dev:1")
    x, y, *index = step.data
    with pytest.raises(ValueError, match=r"(Inputs are|x is) on cpu, the model is on dev:1"):
        step.loss(here.data[0], y, *index)
    with pytest.raises(ValueError, match="Targets are on cpu, the model is on dev:1"):
        step.loss(x, here.data[1], *index)
    with pytest.raises(ValueError, match=r"(Inputs are|x is) on dev:0(,| and) the model( is)? on dev:1"):
        step.loss(x.to("dev:0"), y, *index)
    step.module.likelihood.cpu()
    if next(step.module.likelihood.parameters(), None) is None:
        torch.testing.assert_close(step.backward().cpu(), here.backward())
    else:
        with pytest.raises(ValueError, match="The likelihood is on cpu, the model is on dev:1"):
            step.loss(x, y, *index)


def test_an_index_left_behind_is_named_or_moved():
    step = step_of("PerPoint", "dev:1")
    with pytest.raises(ValueError, match="The index is on cpu"):
        step.loss(*step.data[:2], step.data[2].cpu())
    step = step_of("GPLVM", "dev:1")
    with pytest.raises(ValueError, match="The index is on cpu"):
        step.loss(step.data[0].cpu(), step.data[1])
    with pytest.raises(ValueError, match="Targets are on cpu"):
        step.loss(step.data[0], step.data[1].cpu())
    step = step_of("Blocks", "dev:1")
    expected = step.loss(*step.data)
    assert torch.equal(step.loss(*step.data[:2], step.data[2].cpu()), expected)


@pytest.mark.parametrize("feature", ONE_TASK)
def test_answers_say_what_was_left_behind(feature):
    step = step_of(feature, "dev:1")
    model, likelihood = step.module.model, step.module.likelihood
    x, y = data()
    for answer in (tighter_gp.evaluate_bound, tighter_gp.set_optimal_q, tighter_gp.diagnose):
        with pytest.raises(ValueError, match=r"(Inputs are|x is) on cpu, the model is on dev:1"):
            answer(model, likelihood, x.cpu(), y)
        with pytest.raises(ValueError, match=r"(Targets are|y is) on cpu, the model is on dev:1"):
            answer(model, likelihood, x, y.cpu())
    for predict in (tighter_gp.predict, lambda model, x: tighter_gp.predict_y(model, likelihood, x)):
        with pytest.raises(ValueError, match=r"(Inputs are|x is) on cpu, the model is on dev:1"):
            predict(model, x.cpu())
    likelihood.cpu()
    for answer in (tighter_gp.evaluate_bound, tighter_gp.set_optimal_q, tighter_gp.diagnose):
        with pytest.raises(ValueError, match="The likelihood is on cpu, the model is on dev:1"):
            answer(model, likelihood, x, y)
    with pytest.raises(ValueError, match="The likelihood is on cpu, the model is on dev:1"):
        tighter_gp.predict_y(model, likelihood, x)


def test_noise_left_behind_is_named():
    x, y = data()
    model = make_model().to("dev:1")
    likelihood = FixedNoiseGaussianLikelihood(torch.full((N,), 0.2))
    mll = tighter_gp.TighterELBO(likelihood, model, N)
    with pytest.raises(ValueError, match="Noise variances are on cpu, the model is on dev:1"):
        mll(model(x), y)


@pytest.mark.parametrize("noise", [torch.tensor(0.3), torch.full((N,), 0.3)], ids=["one", "per point"])
def test_a_collapsed_bound_takes_noise_from_anywhere(noise):
    x, y = data("cpu")
    z, covar = torch.randn(M, D), kernel()
    expected = tighter_gp.collapsed_bound(covar, z, x, y, noise)
    covar.to("dev:1")
    arguments = [tensor.to("dev:1") for tensor in (z, x, y)]
    actual = tighter_gp.collapsed_bound(covar, *arguments, noise)
    assert actual.device == torch.device("dev:1")
    torch.testing.assert_close(actual.cpu(), expected)
    for position in range(3):
        wrong = [t.cpu() if i == position else t for i, t in enumerate(arguments)]
        with pytest.raises((ValueError, RuntimeError), match=r" on (dev:1|cpu)|same device"):
            tighter_gp.collapsed_bound(covar, *wrong, noise)


@pytest.mark.parametrize("feature", ["T-SVGP", "SOLVE-GP", "natural q(u)", "delta q(u)", "softmax, optimal", "Blocks"])
def test_a_model_that_moves_after_predicting_predicts_the_same(feature):
    model = step_of(feature, "cpu").module.model.eval()
    x = torch.randn(7, D)
    with torch.no_grad():
        expected, unread = model(x), model(x)
        mean, covariance = expected.mean, expected.covariance_matrix
        for device in (*DEVICES, "cpu"):
            actual = model.to(device)(x.to(device))
            assert actual.mean.device == torch.device(device)
            torch.testing.assert_close(actual.mean.cpu(), mean)
            torch.testing.assert_close(actual.covariance_matrix.cpu(), covariance)
        model.to("dev:1")
        with pytest.raises(ValueError, match=r"q\(f\) was made on cpu, the model is on dev:1"):
            _ = unread.covariance_matrix


@pytest.mark.parametrize("make", [collapsed_gp, collapsed_kernel])
def test_a_collapsed_model_that_moves_after_predicting_predicts_the_same(make):
    module = make().module.eval()
    predict = lambda x: module.predict(x) if hasattr(module, "predict") else module.model(x)
    x = torch.randn(7, D)
    with torch.no_grad():
        expected = predict(x)
        for device in (*DEVICES, "cpu"):
            module.to(device)
            actual = predict(x.to(device))
            assert actual.mean.device == torch.device(device)
            torch.testing.assert_close(actual.mean.cpu(), expected.mean)
            torch.testing.assert_close(actual.variance.cpu(), expected.variance)


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("feature", FEATURES)
def test_nan_in_a_kernel_matrix_is_noticed_in_a_loop_of_ones_own(feature, debug):
    """On CUDA its factorisation reports success; the stand-in does the same."""
    step = step_of(feature, "dev:1")
    for name, parameter in step.module.named_parameters():
        if name.endswith("raw_lengthscale"):
            parameter.data.fill_(torch.nan)
    with gpytorch.settings.debug(debug), pytest.raises(NUMERICAL_ERRORS, match="NaN"):
        step.backward()


def test_predictions_leave_every_generator_as_it_was():
    step, (x, _) = simple().to("dev:1"), data()
    torch.manual_seed(4)
    states = lambda: [torch.get_rng_state(), *(torch.dev.get_rng_state(device) for device in DEVICES)]
    before = states()
    step.module.model.variational_strategy.variational_params_initialized.fill_(1)
    tighter_gp.predict_y(step.module.model, GaussianLikelihood().to("dev:1"), x)
    assert all(map(torch.equal, before, states()))
