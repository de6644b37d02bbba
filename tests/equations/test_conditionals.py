"""Who chooses the scales: start values, formulas, setters, priors, sparse gradients, errors."""

from __future__ import annotations

import gpytorch
import pytest
import torch

from tighter_gp import PerPoint
from tighter_gp.conditionals import BetaConditional, Conditional, ScalarConditional, make_conditional
from tighter_gp.maths import bounds

N = 7
ROWS = torch.tensor([4, 0, 9])
LEARNED = {
    "beta": lambda shape=(): BetaConditional(torch.Size(shape)),
    "scalar": lambda shape=(): ScalarConditional(torch.Size(shape)),
    "per point": lambda shape=(): PerPoint(11, torch.Size(shape)),
}


def price(scale: torch.Tensor) -> torch.Tensor:
    return 0.5 * (scale - 1 - torch.log(scale))


@pytest.fixture
def residual() -> torch.Tensor:
    return 2 * torch.rand(N)


# ---- Start values and formulas ----------------------------------------------------------------------------------------


def test_per_point_looks_its_scales_up():
    conditional, values = PerPoint(11), 0.05 + 0.9 * torch.rand(11)
    conditional.m = values
    torch.testing.assert_close(conditional.m, values, rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.scale(torch.rand(3), index=ROWS), values[ROWS], rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.penalty(torch.rand(3), index=ROWS), price(values[ROWS]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("beta", [1e-12, 1e-3, 1e6])
def test_beta_is_kept_over_many_orders_of_magnitude(beta):
    conditional = BetaConditional()
    conditional.beta = beta
    assert conditional.beta.item() == pytest.approx(beta, rel=1e-9, abs=0)
    residual = torch.tensor([0.0, 1e-9, 1.0])
    penalty = conditional.penalty(residual)
    assert torch.isfinite(penalty).all()
    assert penalty[0] == 0
    assert conditional.scale(residual)[0] == 1


@pytest.mark.parametrize("name", ["beta", "scalar"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_batch_has_one_value_each(name, shape):
    conditional, values = LEARNED[name](shape), 0.05 + 0.9 * torch.rand(shape)
    attribute = "beta" if name == "beta" else "m"
    setattr(conditional, attribute, values)
    residual = torch.rand(*shape, N)
    scale, penalty = conditional.scale(residual).expand_as(residual), conditional.penalty(residual).expand_as(residual)
    flat = zip(values.flatten(), residual.reshape(-1, N), scale.reshape(-1, N), penalty.reshape(-1, N), strict=True)
    for value, d, m, p in flat:
        expected = value / (value + d) if name == "beta" else value.expand(N)
        torch.testing.assert_close(m, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(p, price(expected), rtol=1e-9, atol=1e-14)


# ---- Gradients --------------------------------------------------------------------------------------------------------


def test_gradient_in_log_beta_is_the_closed_form(residual):
    r"""Eq. (9) for a misfit that grows with the variance at rate lambda / 2."""
    conditional, rate = BetaConditional(), 2.5
    conditional.beta = 0.3
    beta = conditional.beta
    bound = -(0.5 * rate * conditional.scale(residual) * residual + conditional.penalty(residual)).sum()
    (gradient,) = torch.autograd.grad(bound, conditional.raw_beta, retain_graph=True)
    (slope,) = torch.autograd.grad(beta, conditional.raw_beta)
    m = 0.3 / (0.3 + residual)
    expected = 0.5 * ((1 - m) * ((1 - m) - rate * m * residual)).sum()
    torch.testing.assert_close(0.3 * gradient / slope, expected, rtol=1e-9, atol=1e-12)


# ---- Setters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: ScalarConditional(), lambda: PerPoint(3)])
@pytest.mark.parametrize(("raw", "expected"), [(-1e3, 0.0), (0.0, 0.5), (1e3, 1.0)])
def test_a_learned_scale_never_leaves_the_unit_interval(make, raw, expected):
    conditional = make()
    conditional.raw_m.data.fill_(raw)
    torch.testing.assert_close(conditional.m, torch.full_like(conditional.m, expected))


# ---- Constraints and priors -------------------------------------------------------------------------------------------


def test_constraint_bounds_beta():
    conditional = BetaConditional(beta_constraint=gpytorch.constraints.Interval(0.5, 3.0))
    assert conditional.beta.item() == pytest.approx(1.0, rel=1e-12)
    conditional.raw_beta.data.fill_(50.0)
    assert 2.99 < conditional.beta.item() <= 3.0
    with pytest.raises(RuntimeError, match="out of bounds"):
        conditional.beta = 4.0


def test_constraint_that_excludes_one_starts_inside_it():
    conditional = BetaConditional(beta_constraint=gpytorch.constraints.Interval(1e-4, 0.5))
    assert 1e-4 < conditional.beta.item() < 0.5


PRIORS = {
    "beta_prior": lambda shape=(): BetaConditional(torch.Size(shape), beta_prior=gpytorch.priors.GammaPrior(2.0, 3.0)),
    "scale_prior": lambda shape=(): ScalarConditional(
        torch.Size(shape), scale_prior=gpytorch.priors.UniformPrior(0.0, 1.0)
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_prior_is_found_and_evaluated_at_the_value(name):
    conditional = PRIORS[name]((3,))
    values = torch.tensor([0.2, 0.3, 0.4])
    attribute = "beta" if name == "beta_prior" else "m"
    setattr(conditional, attribute, values)
    model = gpytorch.Module()
    model.conditional = conditional
    ((found, module, prior, closure, _),) = model.named_priors()
    assert found == f"conditional.{name}"
    torch.testing.assert_close(closure(module), values, rtol=1e-12, atol=0)
    if name == "beta_prior":
        expected = torch.distributions.Gamma(torch.tensor(2.0), torch.tensor(3.0)).log_prob(values)
        torch.testing.assert_close(prior.log_prob(closure(module)), expected, rtol=1e-9, atol=0)


# ---- make_conditional -------------------------------------------------------------------------------------------------


def test_a_conditional_of_your_own_is_taken(residual):
    class Half(Conditional):
        def scale(self, residual, *, index=None):
            return torch.full_like(residual, 0.5)

        def penalty(self, residual, *, index=None):
            return bounds.scale_penalty(self.scale(residual))

    conditional = make_conditional(Half(), torch.Size([3]), torch.zeros(()))
    assert conditional.is_learned
    torch.testing.assert_close(conditional.penalty(residual), price(torch.full((N,), 0.5)), rtol=1e-12, atol=0)
