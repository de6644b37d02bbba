"""Natural gradients of ``fit`` against GPyTorch's NGD, dense algebra and the collapsed bounds."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch import variational

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, randomize_q
from tighter_gp import Recipe, TighterELBO, fit

FULL = ["cholesky", "natural", "tril_natural"]


def model_of(p, form="cholesky", **kwargs):
    kwargs = {"jitter_val": 1e-10, **kwargs}
    return make_gp(p.z, make_kernel(p.kernel, p.variance, p.lengthscales), distribution=Q_FORMS[form], **kwargs)


def take(model, likelihood, x, y, size, steps=1, num_data=None, beta=1.0):
    """Natural steps alone, on all of some data that stand for ``num_data`` points."""
    objective = lambda likelihood, model, n: TighterELBO(likelihood, model, num_data or n, beta=beta)
    recipe = Recipe(lr=1e-300, other_lr=1e-300, natural=size, schedule="constant")
    return fit(model, likelihood, x, y, objective=objective, steps=steps, batch_size=None, recipe=recipe)


def moments_of(distribution):
    """Mean and covariance of a variational distribution, by GPyTorch."""
    q = distribution()
    return q.mean.detach().clone(), q.covariance_matrix.detach().clone()


def moments(model):
    return [
        m
        for module in model.modules()
        if hasattr(module, "distributions")
        for d in module.distributions
        for m in moments_of(d)
    ]


def natural_of(mean, covariance):
    precision = torch.linalg.inv(covariance)
    return precision @ mean, precision


def with_moments(model, form, mean, covariance):
    """A model whose q(u) has a mean and a covariance, in one of GPyTorch's forms."""
    h, precision = natural_of(mean, covariance)
    lower = torch.linalg.cholesky(precision.flip(0, 1)).mT.flip(0, 1)  # P = T'T
    values = {
        "cholesky": (mean, torch.linalg.cholesky(covariance)),
        "natural": (h, -0.5 * precision),
        "tril_natural": (h, lower),
    }
    strategy = model.variational_strategy
    for parameter, value in zip(strategy._variational_distribution.parameters(), values[form], strict=True):
        parameter.data.copy_(value)
    strategy.variational_params_initialized.fill_(1)
    return model


def whitened(p):
    """A of all points."""
    return torch.linalg.inv(torch.linalg.cholesky(p.Kuu + 1e-10 * torch.eye(len(p.Kuu)))) @ p.Kuf


def targets_of(p, name):
    if name == "gaussian":
        return make_noise(p.noise[0]), p.y, "optimal"
    if name == "bernoulli":
        return tighter_gp.likelihoods.BernoulliLogitLikelihood(), (p.y > 0).double(), "scalar"
    return tighter_gp.likelihoods.PoissonLikelihood(), p.y.abs().round(), "optimal"


def assert_close(found, wanted, rtol=1e-8, atol=1e-9):
    for mine, known in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, known, rtol=rtol, atol=atol)


def assert_stationary(model, mll, x, y, atol=1e-8):
    q = [p for m in model.modules() if hasattr(m, "distributions") for d in m.distributions for p in d.parameters()]
    for gradient in torch.autograd.grad(mll(model(x), y).sum(), q):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=atol)


# -- one output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("form", FULL)
def test_one_step_is_that_of_gpytorch_on_its_natural_form(name, form):
    p = dense.problem(seed=2)
    likelihood, y, conditional = targets_of(p, name)
    rows, n, rho = torch.arange(0, len(y), 2), len(y), 0.13
    theirs = randomize_q(model_of(p, "natural", conditional=conditional))
    start = moments(theirs)
    (-TighterELBO(likelihood, theirs, n)(theirs(p.x[rows]), y[rows])).backward()
    gpytorch.optim.NGD(theirs.variational_parameters(), num_data=n, lr=rho).step()
    ours = with_moments(model_of(p, form, conditional=conditional), form, *start)
    take(ours, likelihood, p.x[rows], y[rows], rho, num_data=n)
    assert_close(moments(ours), moments(theirs))


@pytest.mark.parametrize("form", FULL)
@pytest.mark.parametrize("hetero", [False, True])
def test_one_full_step_lands_on_the_collapsed_bound(form, hetero):
    p = dense.problem(seed=1, hetero=hetero)
    model, likelihood = randomize_q(model_of(p, form, jitter_val=0.0)), make_noise(p.noise if hetero else p.noise[0])
    take(model, likelihood, p.x, p.y, 1.0)
    value = tighter_gp.evaluate_bound(model, likelihood, p.x, p.y)
    torch.testing.assert_close(value.double(), dense.f4(p), rtol=1e-8, atol=0)


@pytest.mark.parametrize("beta", [0.4, 2.5])
def test_beta_scales_the_divergence_not_the_step(beta):
    p, rho = dense.problem(seed=3), 0.3
    model, likelihood = randomize_q(model_of(p)), make_noise(p.noise[0])
    mean, covariance = moments(model)
    take(model, likelihood, p.x, p.y, rho, beta=beta)
    a = whitened(p)
    h, precision = natural_of(mean, covariance)
    precision = (1 - rho) * precision + rho * (torch.eye(5) + a @ a.T / p.noise[0] / beta)
    h = (1 - rho) * h + rho * a @ p.y / p.noise[0] / beta
    assert_close(moments(model), [torch.linalg.solve(precision, h), torch.linalg.inv(precision)])


def test_negative_curvature_counts_as_none():
    """A Student-t far from its data asks for more variance; P stays above (1 - rho) P + rho I."""
    p = dense.problem(seed=3)
    model = model_of(p, q=(torch.zeros(5), 0.01 * torch.eye(5)), conditional="scalar")
    likelihood = gpytorch.likelihoods.StudentTLikelihood()
    likelihood.noise = 0.01
    take(model, likelihood, p.x, p.y, 0.5)
    precision = torch.linalg.inv(moments(model)[1])
    assert torch.linalg.eigvalsh(precision - (0.5 * 1e4 + 0.5) * torch.eye(5)).min() > -1e-6


def test_a_variance_of_zero_has_no_natural_parameters():
    p = dense.problem(seed=3)
    model = model_of(p, q=(torch.zeros(5), torch.diag(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))))
    with pytest.raises((ValueError, RuntimeError)):
        take(model, make_noise(p.noise[0]), p.x, p.y, 0.5)


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_a_mean_field_step_has_the_mean_of_all_variables_together(rho):
    p = dense.problem(seed=6)
    model, likelihood = randomize_q(model_of(p, "mean_field")), make_noise(p.noise[0])
    distribution, a = model.variational_strategy._variational_distribution, whitened(p)
    mean, stddev = distribution.variational_mean.detach().clone(), distribution.variational_stddev.detach().clone()
    take(model, likelihood, p.x, p.y, rho)
    precision = (1 - rho) * torch.diag(stddev**-2) + rho * (torch.eye(5) + (a / p.noise) @ a.T)
    slope = a @ ((p.y - a.T @ mean) / p.noise) - mean
    assert_close([distribution.variational_stddev.detach()], [precision.diagonal().rsqrt()])
    assert_close([distribution.variational_mean.detach()], [mean + rho * torch.linalg.solve(precision, slope)])


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "student"])
@pytest.mark.filterwarnings("ignore:.*log-concave")
def test_steps_end_where_the_gradient_vanishes(name):
    p = dense.problem(seed=2)
    likelihood, y, conditional = targets_of(p, name)
    if name == "student":
        likelihood, y, conditional = gpytorch.likelihoods.StudentTLikelihood(), p.y, "scalar"
    model = randomize_q(model_of(p, conditional=conditional))
    take(model, likelihood, p.x, y, 0.5, steps=150)
    assert_stationary(model, TighterELBO(likelihood, model, len(y)), p.x, y)


@pytest.mark.parametrize("scale", [0.0, 4.0, 8.0])
def test_rates_do_not_explode(scale):
    """Counts far from the start: an undamped first step would move f by thousands."""
    p = dense.problem(seed=2, n=30)
    y = (torch.arange(30) % 5 == 0) * torch.tensor(scale).exp().round()
    model, likelihood = model_of(p), tighter_gp.likelihoods.PoissonLikelihood()
    history = take(model, likelihood, p.x, y, 1.0, steps=60)
    assert not history.skipped
    assert history.loss[-1] < history.loss[0]
    assert_stationary(model, TighterELBO(likelihood, model, len(y)), p.x, y, atol=1e-5)


# -- several distributions --------------------------------------------------------------------------------------------


def solve_gp(p, forms=("cholesky", "cholesky"), **kwargs):
    q = [Q_FORMS[form](size) for form, size in zip(forms, (3, 2), strict=True)]
    make = lambda model: tighter_gp.SolveGPVariationalStrategy(model, p.z[:3], p.z[3:], *q, jitter_val=1e-10, **kwargs)
    model = GP(make, make_kernel(p.kernel, p.variance, p.lengthscales))
    model(p.x)
    return model


def solve_gp_bound(p):
    """The collapsed bound of tighter SOLVE-GP, by dense algebra."""
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf
    gram = a @ a.T / p.noise[0]
    blocks = [torch.linalg.slogdet(torch.eye(k) + gram[i:j, i:j]).logabsdet for k, i, j in ((3, 0, 3), (2, 3, 5))]
    joint = torch.linalg.slogdet(torch.eye(5) + gram).logabsdet
    return dense.f4(p) + 0.5 * joint - 0.5 * sum(blocks)


@pytest.mark.parametrize("forms", [("cholesky", "cholesky"), ("natural", "tril_natural")])
def test_solve_gp_reaches_its_joint_optimum_in_one_full_step(forms):
    p = dense.problem(seed=4)
    model, likelihood = solve_gp(p, forms), make_noise(p.noise[0])
    take(model, likelihood, p.x, p.y, 1.0)
    mll = TighterELBO(likelihood, model, len(p.y))
    torch.testing.assert_close(len(p.y) * mll(model(p.x), p.y), solve_gp_bound(p), rtol=1e-8, atol=0)


def test_solve_gp_with_a_mean_field_part_still_converges():
    p = dense.problem(seed=4)
    model, likelihood = solve_gp(p, ("mean_field", "cholesky")), make_noise(p.noise[0])
    take(model, likelihood, p.x, p.y, 0.9, steps=400)
    assert_stationary(model, TighterELBO(likelihood, model, len(p.y)), p.x, p.y)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_solve_gp_converges_for_other_likelihoods(name):
    p = dense.problem(seed=2)
    likelihood, y, conditional = targets_of(p, name)
    model = solve_gp(p, conditional=conditional)
    take(model, likelihood, p.x, y, 0.5, steps=100)
    assert_stationary(model, TighterELBO(likelihood, model, len(y)), p.x, y, atol=1e-6)


def test_a_point_mass_is_left_to_adam():
    p = dense.problem(seed=4)
    model = solve_gp(p, ("cholesky", "delta"))
    first, second = (d.variational_mean.detach().clone() for d in model.variational_strategy.distributions)
    take(model, make_noise(p.noise[0]), p.x, p.y, 0.3)
    now = [d.variational_mean.detach() for d in model.variational_strategy.distributions]
    assert torch.equal(now[1], second)
    assert not torch.equal(now[0], first)


# -- several outputs --------------------------------------------------------------------------------------------------


def tasks_of(p, wrapper, latents, **kwargs):
    """Three tasks around as many latent functions."""
    model = model_of(p, batch_shape=torch.Size([latents]))
    model.variational_strategy = wrapper(model.variational_strategy, num_tasks=3, **kwargs)
    model(p.x)
    return model


def lmc(p, latents=2):
    return tasks_of(p, variational.LMCVariationalStrategy, latents, num_latents=latents, jitter_val=0.0)


def multitask(p):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3, has_global_noise=False)
    likelihood.task_noises = torch.linspace(0.1, 0.4, 3)
    return likelihood, torch.stack([p.y, p.y.cos(), p.y.sin()], -1)


def test_independent_tasks_reach_their_collapsed_bounds_in_one_step():
    p = dense.problem(seed=7)
    model, (likelihood, y) = tasks_of(p, variational.IndependentMultitaskVariationalStrategy, 3), multitask(p)
    take(model, likelihood, p.x, y, 1.0)
    noises = likelihood.task_noises.detach()
    expected = sum(dense.f4(p._replace(y=y[:, i], noise=noises[i].expand(len(y)))) for i in range(3))
    mll = TighterELBO(likelihood, model, len(y))
    torch.testing.assert_close(len(y) * mll(model(p.x), y), expected, rtol=1e-7, atol=0)


def test_one_step_of_an_lmc_is_the_dense_one():
    p, rho = dense.problem(seed=7), 0.3
    model, (likelihood, y) = lmc(p), multitask(p)
    distribution = model.variational_strategy.base_variational_strategy._variational_distribution
    mean, covariance = moments_of(distribution)
    take(model, likelihood, p.x, y, rho)
    a = whitened(p)
    weights, noise = model.variational_strategy.lmc_coefficients.detach(), likelihood.task_noises.detach()  # K x T
    residual = y - (mean @ a).T @ weights  # N x T
    new_mean, new_covariance = moments_of(distribution)
    for k in range(2):
        slope, curvature = residual @ (weights[k] / noise), (weights[k] ** 2 / noise).sum()
        h, precision = natural_of(mean[k], covariance[k])
        precision = (1 - rho) * precision + rho * (torch.eye(5) + curvature * a @ a.T)
        h = (1 - rho) * h + rho * a @ (slope + curvature * (a.T @ mean[k]))
        assert_close([new_covariance[k]], [torch.linalg.inv(precision)], rtol=1e-7)
        assert_close([new_mean[k]], [torch.linalg.solve(precision, h)], rtol=1e-7)


def test_an_lmc_of_many_latent_functions_converges_at_full_steps():
    """Each latent function takes the others for fixed; undamped, twelve of them diverge."""
    p = dense.problem(seed=7)
    model, (likelihood, y) = lmc(p, latents=12), multitask(p)
    losses = torch.tensor(take(model, likelihood, p.x, y, 0.9, steps=60).loss)
    assert (losses.diff() < 1e-9).all()


def test_members_of_a_batch_of_models_are_trained_as_alone():
    p = dense.problem(seed=3)
    noise = make_noise(p.noise[0])
    alone = [model_of(p), model_of(p)]
    ys = torch.stack([p.y, p.y.cos()])
    for model, y in zip(alone, ys, strict=True):
        take(model, noise, p.x, y, 0.4, steps=2)
    q = variational.CholeskyVariationalDistribution(5, batch_shape=torch.Size([2]))
    make = lambda model: tighter_gp.TighterVariationalStrategy(model, p.z.expand(2, *p.z.shape), q, jitter_val=1e-10)
    both = GP(make, make_kernel(p.kernel, p.variance, p.lengthscales))
    take(both, noise, p.x.expand(2, *p.x.shape), ys, 0.4, steps=2)
    for name in ("variational_mean", "chol_variational_covar"):
        found = getattr(both.variational_strategy._variational_distribution, name).detach()
        wanted = [getattr(m.variational_strategy._variational_distribution, name).detach() for m in alone]
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-3, atol=1e-3)


class Sum(gpytorch.models.GP):
    """A sum of two GPs."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x):
        first, second = (part(x) for part in self.parts)
        return first + second

    @property
    def variational_strategy(self):
        return self

    def kl_divergence(self):
        return sum(part.variational_strategy.kl_divergence() for part in self.parts)


def test_parts_of_a_sum_take_each_other_for_fixed():
    p = dense.problem(seed=3)
    wide = make_gp(p.z, make_kernel(p.kernel, 2.0, 3 * torch.as_tensor(p.lengthscales)), jitter_val=1e-10)
    model, likelihood = Sum(model_of(p), wide), make_noise(p.noise[0])
    objective = gpytorch.mlls.VariationalELBO
    recipe = Recipe(lr=1e-300, other_lr=1e-300, natural=0.9, schedule="constant")
    losses = fit(model, likelihood, p.x, p.y, objective=objective, steps=300, batch_size=None, recipe=recipe).loss
    assert (torch.tensor(losses).diff() < 1e-9).all()
    assert_stationary(model, objective(likelihood, model, len(p.y)), p.x, p.y, atol=1e-2)
