"""Small problems for the tests of training, and things that go wrong in them."""

from __future__ import annotations

import math

import gpytorch
import torch
from linear_operator.utils.errors import NotPSDError

import tighter_gp
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tighter_gp.gplvm import BayesianGPLVM, LatentVariableELBO

N, M, D = 53, 6, 2


def data(n: int = N):
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.rand(n, D, generator=generator)
    y = torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + 0.2 * torch.randn(n, generator=generator)
    return x, y


def problem(**kwargs):
    """A fresh model, always the same, and its likelihood."""
    x, _ = data()
    return make_gp(x[:M].clone(), make_kernel("rbf", 1.0, torch.tensor([0.9, 1.3])), **kwargs), make_noise(0.2)


def with_prior():
    model, likelihood = problem()
    model.covar_module.register_prior("scale", gpytorch.priors.GammaPrior(2.0, 1.0), "outputscale")
    return model, likelihood


def parameters(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


class Interrupted(Exception):
    pass


def collapsed():
    x, y = data()
    likelihood = make_noise(0.5)
    return CollapsedGP(x, y, x[:M].clone(), make_kernel("rbf", 1.0, torch.ones(D)), likelihood), likelihood


def failing_objective(bad_calls, how):
    """TighterELBO that goes wrong in some of its calls."""

    class Failing(tighter_gp.TighterELBO):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            value = super().forward(*args, **kwargs)
            if self.calls - 2 not in bad_calls:  # the first call sets q(u), the second is step 0
                return value
            if how == "raise":
                raise NotPSDError("K_ZZ is not positive definite.")
            if how == "nan":
                return value * math.nan
            return value + torch.sqrt(self.model.mean_module.constant * 0)  # finite, with an infinite gradient

    return Failing


class Count:
    """A callback with a state."""

    def __init__(self):
        self.steps = []

    def __call__(self, state):
        self.steps.append(state.step)

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def state(*modules):
    return {f"{i}.{name}": value.clone() for i, m in enumerate(modules) for name, value in m.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def per_point():
    return (*problem(conditional=tighter_gp.PerPoint(N)), *data(), {})


def gplvm():
    targets = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
    model = BayesianGPLVM.from_data(targets, latent_dim=2, num_inducing=7, generator=torch.Generator().manual_seed(0))
    return model, model.likelihood, None, targets, {"objective": LatentVariableELBO}
