"""Constraints that are stated but not enforced are kept in training."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan

import tighter_gp
from tighter_gp.training.constraints import enforced_constraints

NOISE = "noise_covar.raw_noise"


def data(num_rows=200):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(num_rows, 1, dtype=torch.float64, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + 0.02 * torch.randn(num_rows, dtype=torch.float64, generator=generator)


def make(x, transform=None):
    options = {"transform": None} if transform is None else {}
    constraint = GreaterThan(1e-4, initial_value=0.1, **options)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint).double()
    likelihood.noise = 0.1
    torch.manual_seed(0)
    return tighter_gp.models.Regression(inducing_points=x[:24].clone(), likelihood=likelihood).double(), likelihood


@pytest.mark.parametrize("options", [{}, {"natural_gradients": False}, {"initialize": True}])
def test_training_is_that_of_an_enforced_constraint(options):
    x, y = data()
    ends = []
    for transform in (None, "softplus"):
        model, likelihood = make(x, transform)
        seen = []
        callbacks = [lambda step, seen=seen: seen.append(step.likelihood.noise.item())]
        tighter_gp.fit(model, likelihood, x, y, steps=30, batch_size=64, callbacks=callbacks, **options)
        assert min(seen) > 1e-4
        assert likelihood.noise.item() == pytest.approx(seen[-1], rel=1e-12)
        assert likelihood.noise_covar.raw_noise_constraint.enforced == (transform is not None)
        ends.append([*seen, tighter_gp.evaluate_bound(model, likelihood, x, y).item()])
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


def test_a_collapsed_model_too():
    x, y = data()
    bounds = []
    for transform in (None, "softplus"):
        _, likelihood = make(x, transform)
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
        model = tighter_gp.CollapsedGP(x, y, x[:12].clone(), kernel, likelihood).double()
        tighter_gp.fit(model, likelihood, steps=20)
        bounds.append(model.bound().item())
        assert likelihood.noise.item() > 1e-4
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)


def test_states_within_are_those_of_the_values():
    x, _ = data()
    model, likelihood = make(x)
    with enforced_constraints(model, likelihood):
        assert likelihood.noise_covar.raw_noise.item() == pytest.approx(torch.tensor(0.0999).expm1().log().item(), 1e-3)
        state = likelihood.state_dict()
        assert state[NOISE].item() == pytest.approx(0.1, rel=1e-12)
        assert model.state_dict()[f"likelihood.{NOISE}"].item() == pytest.approx(0.1, rel=1e-12)
        state[NOISE] = torch.tensor([0.3], dtype=torch.float64)
        likelihood.load_state_dict(state)
        assert state[NOISE].item() == 0.3
        assert likelihood.noise.item() == pytest.approx(0.3, rel=1e-12)
        for other in (copy.deepcopy(likelihood), pickle.loads(pickle.dumps(likelihood))):
            assert other.noise.item() == pytest.approx(0.3, rel=1e-12)
            assert other.state_dict()[NOISE].item() == pytest.approx(0.3, rel=1e-12)
    assert likelihood.noise.item() == likelihood.noise_covar.raw_noise.item() == pytest.approx(0.3, rel=1e-12)
    likelihood.load_state_dict({**likelihood.state_dict(), NOISE: torch.tensor([0.2])})
    assert likelihood.noise_covar.raw_noise.item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("constraint", "value", "nearest"),
    [
        (GreaterThan(1e-4, transform=None), 1e-4, 1e-4),
        (GreaterThan(1e-4, transform=None), -3.0, 1e-4),
        (gpytorch.constraints.Positive(transform=None), 0.0, 0.0),
        (LessThan(2.0, transform=None), 2.0, 2.0),
        (LessThan(2.0, transform=None), -7.0, -7.0),
        (Interval(0.0, 1.0, transform=None), 1.0, 1.0),
        (Interval(-1.0, 1.0, transform=None), 0.25, 0.25),
        (Interval(365.2, 365.3, transform=None), 365.2001, 365.2001),
        (GreaterThan(1e-4, transform=None), 1.0000001e-4, 1e-4),
    ],
)
def test_a_parameter_on_its_bound_starts_just_inside(constraint, value, nearest):
    module = gpytorch.Module()
    module.register_parameter("raw_size", torch.nn.Parameter(torch.tensor([value], dtype=torch.float64)))
    module.register_constraint("raw_size", constraint.double())
    with enforced_constraints(module):
        assert torch.isfinite(module.raw_size)
        size = module.raw_size_constraint.transform(module.raw_size)
        assert constraint.lower_bound < size < constraint.upper_bound
        is_inside = constraint.lower_bound < value < constraint.upper_bound
        assert size.item() == pytest.approx(nearest, rel=1e-9 if is_inside and value == nearest else 2e-3, abs=1e-8)
    assert module.raw_size.item() == size.item()


def test_what_is_frozen_enforced_or_unbounded_is_left():
    x, _ = data()
    model, likelihood = make(x)
    likelihood.noise_covar.raw_noise.requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    with enforced_constraints(model, likelihood):
        assert all(map(torch.equal, before, model.parameters()))
        assert not likelihood.noise_covar.raw_noise_constraint.enforced


def test_an_error_leaves_values_and_constraint():
    x, y = data()
    model, likelihood = make(x)

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tighter_gp.fit(model, likelihood, x, y, steps=3, callbacks=[stop])
    assert not likelihood.noise_covar.raw_noise_constraint.enforced
    assert 0.05 < likelihood.noise_covar.raw_noise.item() < 0.2
    assert likelihood.state_dict()[NOISE].item() == likelihood.noise.item()


def test_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path):
    x, y = data()
    whole, parts = make(x), make(x)
    tighter_gp.fit(*whole, x, y, steps=12)
    options = {"steps": 12, "checkpoint": tmp_path / "run.pt", "checkpoint_every": 6}

    def stop(step):
        if step.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tighter_gp.fit(*parts, x, y, callbacks=[stop], **options)
    again = make(x)
    tighter_gp.fit(*again, x, y, resume=True, **options)
    assert again[1].noise.item() == pytest.approx(whole[1].noise.item(), rel=1e-9)


def test_a_constraint_that_is_shared_stays_stated_for_the_others():
    stated = GreaterThan(1e-2, transform=None)
    kernels = [gpytorch.kernels.RBFKernel(lengthscale_constraint=stated) for _ in range(3)]
    for kernel in kernels:
        kernel.lengthscale = 0.05
    kernels[1].raw_lengthscale.requires_grad_(False)
    with enforced_constraints(kernels[0] * kernels[1]):  # the third is another model's
        assert [kernel.lengthscale.item() for kernel in kernels] == pytest.approx([0.05] * 3)
        assert [kernel.raw_lengthscale_constraint.enforced for kernel in kernels] == [True, False, False]
        kernels[0].lengthscale = 0.07
    assert all(kernel.raw_lengthscale_constraint is stated for kernel in kernels)
    assert all(kernel.constraint_for_parameter_name("raw_lengthscale") is stated for kernel in kernels)
    assert [kernel.lengthscale.item() for kernel in kernels] == pytest.approx([0.07, 0.05, 0.05])


@pytest.mark.parametrize("value", [0.3, 0.3002, 0.301])
def test_a_state_that_is_loaded_is_that_which_was_saved(value):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=Interval(0.3, 0.301, transform=None)).double()
    likelihood.noise = 0.3005
    with enforced_constraints(likelihood):
        likelihood.load_state_dict({**likelihood.state_dict(), NOISE: torch.tensor([value], dtype=torch.float64)})
        assert likelihood.noise.item() == pytest.approx(value, rel=1e-12)
        assert torch.isfinite(likelihood.noise_covar.raw_noise)
