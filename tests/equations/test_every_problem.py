"""What must hold for every problem, on problems that hypothesis draws.

Sizes from one point and one inducing point to fifty dimensions and more inducing points than data; inputs of scale 1e-3
to 1e3; lengthscales from a tenth of their range to a hundred times it; noise from 1e-6 to 1e2; duplicated points; inducing
points on the data, on some of the data, and on one another. References are dense, in float64, and share no code with the
package.

The normal run draws the same few examples every time. ``TIGHTER_GP_SOAK=1`` draws many, others each time.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tighter_gp
from tests.tools import dense
from tests.tools.factories import make_gp, make_kernel, make_noise
from tighter_gp.maths import bounds, linalg

COMMON = {"deadline": None, "database": None}
settings.register_profile("quick", max_examples=25, derandomize=True, **COMMON)
settings.register_profile(
    "soak", max_examples=int(os.environ.get("TIGHTER_GP_EXAMPLES", 1000)), print_blob=True, **COMMON
)
PROFILE = settings.get_profile("soak" if os.environ.get("TIGHTER_GP_SOAK") else "quick")

pytestmark = pytest.mark.filterwarnings("ignore:.*was not positive definite")

JITTER = 1e-6
PLACES = ("random", "data", "some data", "one place", "near")


class Case(NamedTuple):
    """A problem with a prior variance of one, in float64."""

    x: Tensor
    y: Tensor
    z: Tensor
    kernel: str
    lengthscales: Tensor
    noise: float
    seed: int

    def covariance(self, a: Tensor, b: Tensor) -> Tensor:
        return dense.KERNELS[self.kernel](a, b, 1.0, self.lengthscales)

    @property
    def evidence(self) -> Tensor:
        return dense.log_normal(self.y, self.covariance(self.x, self.x) + self.noise * torch.eye(len(self.y)))

    @property
    def slack(self) -> float:
        """What rounding may add to a bound: the residual is a difference of ones, and is divided by the noise."""
        return 1e-9 * len(self.y) * (1 + 1e-2 / self.noise)

    def make_kernel(self) -> gpytorch.kernels.Kernel:
        return make_kernel("rbf" if self.kernel == "rbf" else "matern", 1.0, self.lengthscales)

    def model(self, dtype: torch.dtype = torch.float64, **kwargs):
        options = {"jitter_val": JITTER, **kwargs}
        q = dense.random_q(len(self.z), self.seed) if "strategy" not in options else None
        model = make_gp(self.z, self.make_kernel(), q, **options).to(dtype)
        return model, make_noise(self.noise).to(dtype)


@st.composite
def cases(draw, places=PLACES, max_dim: int = 50) -> Case:
    n, m = draw(st.integers(1, 25)), draw(st.integers(1, 30))
    dim, place = draw(st.integers(1, 5) | st.integers(1, max_dim)), draw(st.sampled_from(places))
    scale, relative = 10 ** draw(st.floats(-3, 3)), 10 ** draw(st.floats(-1, 2))
    noise, kernel = 10 ** draw(st.floats(-6, 2)), draw(st.sampled_from(("rbf", "matern32")))
    duplicated, seed = draw(st.booleans()), draw(st.integers(0, 2**16))
    # Drawn in float64 whatever the default: hypothesis may call this outside a test's fixtures.
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    x = rand(n, dim)
    if duplicated:
        x[n // 2 :] = x[: n - n // 2].clone()
    z = {
        "random": lambda: rand(m, dim),
        "data": lambda: x.clone(),
        "some data": lambda: torch.cat([x[: (m + 1) // 2], rand(m // 2, dim)]),
        "one place": lambda: rand(1, dim).repeat(m, 1),
        "near": lambda: rand(1, dim) + 1e-3 * rand(m, dim),
    }[place]()
    lengthscales = relative * scale * (0.5 + rand(dim))
    case = Case(scale * x, torch.zeros(n, dtype=torch.float64), scale * z, kernel, lengthscales, noise, seed)
    covariance = case.covariance(case.x, case.x) + (noise + 1e-9) * torch.eye(n, dtype=torch.float64)
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    return case._replace(y=torch.linalg.cholesky(covariance) @ normal)


def on(strategy, **kwargs):
    """Run a test on drawn problems, as the chosen profile says."""
    return lambda test: settings(PROFILE)(given(case=strategy, **kwargs)(test))


# ---- Bounds -----------------------------------------------------------------------------------------------------------


@on(cases())
def test_collapsed_bounds_are_ordered_below_the_exact_evidence(case):
    Kzz = case.covariance(case.z, case.z) + JITTER * torch.eye(len(case.z))
    projection = linalg.project(linalg.cholesky(Kzz), case.covariance(case.z, case.x))
    residual = linalg.residual_variance(torch.ones(len(case.y)), projection)
    residual_covariance = case.covariance(case.x, case.x) - projection.mT @ projection
    arguments = projection, case.y, torch.tensor(case.noise)
    chain = [
        bounds.titsias_bound(*arguments, residual),
        bounds.spherical_bound(*arguments, residual),
        bounds.tighter_bound(*arguments, residual),
        bounds.full_bound(*arguments, residual_covariance),
        case.evidence,
    ]
    assert bool((residual >= 0).all())
    for lower, upper in itertools.pairwise(chain):
        assert lower <= upper + case.slack


@on(cases(), conditional=st.sampled_from(["optimal", "beta", "scalar"]))
def test_the_objective_is_ordered_below_the_exact_evidence_at_any_q(case, conditional):
    model, likelihood = case.model(conditional=conditional)
    num_data = len(case.y)
    tighter = num_data * tighter_gp.TighterELBO(likelihood, model, num_data)(model(case.x), case.y)
    assert tighter <= case.evidence + case.slack
    if conditional == "optimal":
        standard = num_data * VariationalELBO(likelihood, model, num_data)(model(case.x), case.y)
        assert standard <= tighter + case.slack


@on(cases())
def test_the_objective_at_the_optimal_q_is_the_collapsed_bound(case):
    model, likelihood = case.model()
    tighter_gp.set_optimal_q(model, likelihood, case.x, case.y)
    value = tighter_gp.evaluate_bound(model, likelihood, case.x, case.y)
    jitter = len(case.y) * JITTER / (2 * case.noise)  # GPyTorch's, on the data's diagonal
    chunked = tighter_gp.collapsed_bound(
        model.covar_module, case.z, case.x, case.y, torch.tensor(case.noise), jitter_val=JITTER, chunk_size=7
    )
    scale = 1e-6 * (1 + abs(chunked.item()))
    torch.testing.assert_close(value + jitter, chunked.detach(), rtol=0, atol=100 * case.slack + scale)


@on(cases(max_dim=8), num_orthogonal=st.integers(1, 6))
def test_solve_gp_is_ordered_below_the_exact_evidence(case, num_orthogonal):
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randint(len(case.x), (num_orthogonal,), generator=generator)
    orthogonal = case.x[rows] * (1 + 0.1 * torch.rand(num_orthogonal, 1, generator=generator))

    def strategy(model, z, q, **kwargs):
        other = gpytorch.variational.CholeskyVariationalDistribution(num_orthogonal)
        return tighter_gp.SolveGPVariationalStrategy(model, z, orthogonal, q, other, **kwargs)

    model, likelihood = case.model(strategy=strategy)
    num_data = len(case.y)
    values = [
        num_data * objective(likelihood, model, num_data)(model(case.x), case.y)
        for objective in (VariationalELBO, tighter_gp.TighterELBO)
    ]
    assert values[0] <= values[1] + case.slack
    assert values[1] <= case.evidence + case.slack


# ---- Finite, and not negative -----------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.float64])


@on(cases(), dtype=DTYPES, conditional=st.sampled_from(["optimal", "beta", "scalar"]))
def test_gradients_are_finite_and_variances_not_negative(case, dtype, conditional):
    model, likelihood = case.model(dtype, jitter_val=None, conditional=conditional)
    x, y = case.x.to(dtype), case.y.to(dtype)
    q = model(x)
    carrier = q.lazy_covariance_matrix
    assert bool((carrier.residual >= 0).all())
    assert bool((carrier.explained >= 0).all())
    scale = model.variational_strategy.conditional.scale(carrier.residual)
    assert bool(((scale >= 0) & (scale <= 1)).all())
    (-tighter_gp.TighterELBO(likelihood, model, len(y))(q, y)).backward()
    for name, parameter in [*model.named_parameters(), *likelihood.named_parameters()]:
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    with torch.no_grad():
        prediction = model.eval()(x)
    assert bool(torch.isfinite(prediction.mean).all())
    assert bool((prediction.variance >= 0).all())


# ---- Float32 against float64 ------------------------------------------------------------------------------------------


@on(cases(), optimal=st.booleans())
def test_float32_is_near_float64(case, optimal):
    """At the same q and jitter. The tolerance is what an error of 1e-5 in variances and means of one makes of the bound."""
    wide, likelihood = case.model(jitter_val=1e-4)
    if optimal:
        tighter_gp.set_optimal_q(wide, likelihood, case.x, case.y)
    expected = tighter_gp.evaluate_bound(wide, likelihood, case.x, case.y)
    narrow, likelihood = case.model(torch.float32, jitter_val=1e-4)
    narrow.load_state_dict(wide.state_dict())
    value = tighter_gp.evaluate_bound(narrow, likelihood, case.x.float(), case.y.float())
    assert value.dtype == torch.float32
    tolerance = 1e-3 * (len(case.y) * (1 + 1e-2 / case.noise) + abs(expected.item()))
    assert abs(value.double() - expected) <= tolerance


# ---- Batches of points and of models ----------------------------------------------------------------------------------


@on(cases(), shape=st.sampled_from([(1,), (3,), (2, 3)]), conditional=st.sampled_from(["optimal", "beta", "scalar"]))
def test_a_batch_of_models_is_a_loop_over_it(case, shape, conditional):
    shape, num_data, num_inducing = torch.Size(shape), len(case.y), len(case.z)
    generator = torch.Generator().manual_seed(case.seed)
    dim = case.x.size(-1)
    lengthscale = case.lengthscales * (0.5 + torch.rand(*shape, 1, dim, generator=generator))
    outputscale = 0.5 + torch.rand(shape, generator=generator)
    noise = case.noise * (0.5 + torch.rand(*shape, 1, generator=generator))
    y = case.y + 0.1 * torch.randn(*shape, num_data, generator=generator)
    choice = 0.2 + 0.6 * torch.rand(shape, generator=generator)
    q = [dense.random_q(num_inducing, case.seed + i) for i in range(shape.numel())]
    means, roots = (torch.stack(parts).reshape(*shape, *parts[0].shape) for parts in zip(*q, strict=True))

    def build(batch, index=()):
        kernel = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=dim, batch_shape=batch), batch_shape=batch
        )
        kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale[index], outputscale[index]
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_constraint=gpytorch.constraints.Positive(), batch_shape=batch
        )
        likelihood.noise = noise[index]
        model = make_gp(
            case.z, kernel, (means[index], roots[index]), batch_shape=batch, jitter_val=JITTER, conditional=conditional
        )
        if conditional != "optimal":
            setattr(model.variational_strategy.conditional, {"beta": "beta", "scalar": "m"}[conditional], choice[index])
        value = tighter_gp.TighterELBO(likelihood, model, num_data)(model(case.x), y[index])
        gradient = torch.autograd.grad(value.sum(), kernel.base_kernel.raw_lengthscale)[0]
        return value.detach(), gradient

    value, gradient = build(shape)
    assert value.shape == shape
    for flat in range(shape.numel()):
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
        single, single_gradient = build(torch.Size(), index)
        torch.testing.assert_close(value[index], single, rtol=1e-8, atol=case.slack)
        scale = float(single_gradient.abs().max())
        torch.testing.assert_close(gradient[index], single_gradient, rtol=1e-5, atol=1e-5 * scale + case.slack)
