"""Models that have their data: an ExactGP on the inducing-point kernel, and a CollapsedGP."""

from __future__ import annotations

import gpytorch
import pytest
import torch

import tighter_gp
from tests.tools.factories import make_kernel, make_noise
from tests.training.problems import D, M, N, collapsed, data, problem
from tighter_gp.training import fit, mean_nlpd


def chunked(bound: str = "tighter", noise=0.5):
    x, y = data()
    likelihood = make_noise(noise)
    kernel = make_kernel("rbf", 1.0, torch.ones(D))
    gp = tighter_gp.CollapsedGP(x, y, x[:M].clone(), kernel, likelihood, gpytorch.means.ConstantMean(), bound=bound)
    return gp, likelihood


@pytest.mark.parametrize("bound", ["tighter", "titsias"])
def test_lbfgs_maximises_the_bound_of_a_collapsed_gp(bound):
    x, y = data()
    model, likelihood = chunked(bound)
    history = fit(model, likelihood, x, y, steps=400)
    assert history.stopped == "converged"
    value = model.bound() / N
    assert value.item() == pytest.approx(-history.loss[-1], rel=1e-10)
    gradients = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
    assert max(g.abs().max().item() for g in gradients) < 1e-4


def test_both_collapsed_models_have_the_same_curve():
    losses = []
    for make in (collapsed, chunked):
        model, likelihood = make()
        losses.append(torch.tensor(fit(model, likelihood, steps=10).loss))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [collapsed, chunked])
def test_data_may_be_left_out_or_must_be_the_models_own(make):
    x, y = data()
    curves = [fit(*make(), *arrays, steps=3).loss for arrays in ((), (x, y), (x.numpy(), y.numpy()), (None, y))]
    assert all(curve == curves[0] for curve in curves)
    with pytest.raises(ValueError, match="y is not what the model was built with"):
        fit(*make(), x, y + 1, steps=1)
    with pytest.raises(ValueError, match="x is not what the model was built with"):
        fit(*make(), x[:-1], y[:-1], steps=1)
    with pytest.raises(ValueError, match="not the one that the model was built with"):
        fit(make()[0], make_noise(0.5), x, y, steps=1)


def test_a_kernel_built_with_another_likelihood_is_refused():
    x, y = data()
    model, likelihood = collapsed()
    model.covar_module.likelihood = make_noise(0.5)
    for call in (fit, tighter_gp.evaluate_bound):
        with pytest.raises(ValueError, match="built with another likelihood than the model"):
            call(model, likelihood, x, y)


def test_priors_count_as_they_do_for_an_exact_gp():
    losses = []
    for make in (collapsed, chunked):
        model, likelihood = make()
        kernel = model.covar_module.base_kernel if make is collapsed else model.covar_module
        kernel.base_kernel.register_prior("lengthscale_prior", gpytorch.priors.GammaPrior(3.0, 6.0), "lengthscale")
        losses.append(fit(model, likelihood, steps=1).loss[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_collapsed_gp_is_validated_resumed_and_trained_by_adam(tmp_path):
    options = {"steps": 4, "validation": data(19), "checkpoint": tmp_path / "run.pt"}
    model, likelihood = chunked()
    history = fit(model, likelihood, **options)
    assert history.validation[-1][1] == mean_nlpd(model, likelihood, *data(19))
    again, other = chunked()
    assert fit(again, other, resume=True, **options).loss == history.loss
    assert torch.equal(again.inducing_points, model.inducing_points)
    losses = fit(*chunked(), optimizer="adam", lr=0.1, steps=10).loss
    assert losses[-1] < losses[0]


def test_a_collapsed_gp_has_an_objective_of_its_own():
    with pytest.raises(ValueError, match="trained on its own bound"):
        fit(*chunked(), steps=1, objective=gpytorch.mlls.VariationalELBO)
    with pytest.raises(ValueError, match="compile=True is for Adam"):
        fit(*chunked(), steps=1, compile=True)
    with pytest.raises(TypeError, match="y must be a tensor"):
        fit(*problem(), steps=1)
