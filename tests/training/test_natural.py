"""Natural gradients in closed form against GPyTorch's NGD, dense algebra and the collapsed bound."""

from __future__ import annotations

import logging
import math

import gpytorch
import pytest
import torch
from gpytorch import variational
from torch.fx.experimental.proxy_tensor import make_fx

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, randomize_q
from tighter_gp.maths import natural as closed_form
from tighter_gp.training import NaturalGradient, NaturalGradients, natural_forms
from tighter_gp.training.natural_entries import Entry

FULL = ["cholesky", "natural", "tril_natural"]


def model_of(p, form="cholesky", **kwargs):
    kwargs = {"jitter_val": 1e-10, **kwargs}
    return make_gp(p.z, make_kernel(p.kernel, p.variance, p.lengthscales), distribution=Q_FORMS[form], **kwargs)


def rest_of(mll, natural):
    known = {id(p) for p in natural.parameters}
    return [p for p in mll.parameters() if id(p) not in known]


def take(natural, mll, x, y, size, **kwargs):
    """Slopes and step at once, on the old q(u)."""
    with natural.recording() as records:
        loss = -mll(mll.model(x), y, **kwargs)
    natural.gradients(loss, records, [])
    return natural.step(size)


def moments_of(distribution):
    """Mean and covariance of a variational distribution, by GPyTorch."""
    q = distribution()
    return q.mean.detach().clone(), q.covariance_matrix.detach().clone()


def natural_of(mean, covariance):
    precision = torch.linalg.inv(covariance)
    return precision @ mean, precision


def targets_of(p, name):
    if name == "gaussian":
        return make_noise(p.noise[0]), p.y, "optimal"
    if name == "bernoulli":
        return tighter_gp.likelihoods.BernoulliLogitLikelihood(), (p.y > 0).double(), "beta"
    return tighter_gp.likelihoods.PoissonLikelihood(), p.y.abs().round(), "optimal"


# -- pure functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 64, 130, 260])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_lower_root_is_the_cholesky_factor_of_the_inverse(size, batch):
    matrix = torch.randn(*batch, size, size + 3)
    precision = torch.eye(size) + matrix @ matrix.mT
    root, ok = closed_form.lower_root(precision)
    assert bool(ok)
    torch.testing.assert_close(root, torch.linalg.cholesky(torch.linalg.inv(precision)), rtol=1e-8, atol=1e-10)
    assert torch.equal(root, root.tril())


def test_lower_root_says_when_there_is_none():
    assert not bool(closed_form.lower_root(-torch.eye(3))[1])
    assert not bool(closed_form.lower_root(torch.full((3, 3), torch.nan))[1])


@pytest.mark.parametrize("form", [*FULL, "mean_field"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_init_reads_and_write_restores_every_form(form, batch):
    distribution = Q_FORMS[form](4, batch_shape=torch.Size(batch))
    model = torch.nn.Module()
    model.variational_strategy = torch.nn.Module()
    model.variational_strategy._variational_distribution = distribution
    model.variational_strategy.variational_params_initialized = torch.zeros(())
    randomize_q(model)
    before = moments_of(distribution)
    q = natural_forms.init_natural(distribution)
    assert q.precision.dtype == q.linear.dtype == torch.float64
    precision = torch.linalg.inv(before[1])
    expected = precision.diagonal(dim1=-1, dim2=-2) if form == "mean_field" else precision
    torch.testing.assert_close(q.precision, expected)
    torch.testing.assert_close(q.linear, (precision @ before[0].unsqueeze(-1)).squeeze(-1))
    for parameter in distribution.parameters():
        parameter.data.fill_(0.7)
    assert bool(Entry(distribution).write(q))
    for known, now in zip(before, moments_of(distribution), strict=True):
        torch.testing.assert_close(now, known)


def test_a_variance_of_zero_is_refused():
    distribution = variational.CholeskyVariationalDistribution(3)
    distribution.chol_variational_covar.data[1, 1] = 0.0
    with pytest.raises(ValueError, match="variance of zero"):
        natural_forms.init_natural(distribution)


# -- one step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("form", FULL)
def test_one_step_is_that_of_gpytorch_on_its_natural_form(name, form):
    p = dense.problem(seed=2)
    likelihood, y, conditional = targets_of(p, name)
    rows, n, rho = torch.arange(0, len(y), 2), len(y), 0.13
    theirs = randomize_q(model_of(p, "natural", conditional=conditional))
    mll = tighter_gp.TighterELBO(likelihood, theirs, n)
    start = moments_of(theirs.variational_strategy._variational_distribution)
    (-mll(theirs(p.x[rows]), y[rows])).backward()
    gpytorch.optim.NGD(theirs.variational_parameters(), num_data=n, lr=rho).step()

    ours = model_of(p, form, conditional=conditional)
    distribution = ours.variational_strategy._variational_distribution
    h, precision = natural_of(*start)
    assert bool(Entry(distribution).write(closed_form.NaturalParameters(precision, h)))
    ours.variational_strategy.variational_params_initialized.fill_(1)
    mll = tighter_gp.TighterELBO(likelihood, ours, n)
    assert take(NaturalGradients(ours, n), mll, p.x[rows], y[rows], rho) == rho
    for mine, known in zip(
        moments_of(distribution), moments_of(theirs.variational_strategy._variational_distribution), strict=True
    ):
        torch.testing.assert_close(mine, known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FULL)
@pytest.mark.parametrize("hetero", [False, True])
def test_one_full_step_lands_on_the_collapsed_bound(form, hetero):
    p = dense.problem(seed=1, hetero=hetero)
    model = randomize_q(model_of(p, form, jitter_val=0.0))
    mll = tighter_gp.TighterELBO(make_noise(p.noise if hetero else p.noise[0]), model, len(p.y))
    take(NaturalGradients(model, len(p.y)), mll, p.x, p.y, 1.0)
    torch.testing.assert_close(len(p.y) * mll(model(p.x), p.y), dense.f4(p), rtol=1e-8, atol=0)


@pytest.mark.parametrize("form", FULL)
def test_a_step_before_the_loss_is_the_step_after_it(form):
    """With Gaussian noise the slopes can be had without q(f), with the same numbers."""
    p = dense.problem(seed=5)
    results = []
    for way in ("gaussian", "replay", "two calls"):
        model, likelihood = randomize_q(model_of(p, form)), make_noise(p.noise[0])
        mll = tighter_gp.TighterELBO(likelihood, model, 40)
        natural = NaturalGradients(model, 40)
        rest = rest_of(mll, natural)
        if way == "two calls":
            take(natural, mll, p.x, p.y, 0.2)
            loss = -mll(model(p.x), p.y)
            gradients = torch.autograd.grad(loss, rest)
        else:
            gaussian = natural.gaussian_targets(mll, p.y) if way == "gaussian" else None
            assert (gaussian is None) == (way == "replay")
            loss, gradients, _ = natural.train_step(lambda: -mll(model(p.x), p.y), rest, 0.2, gaussian)  # noqa: B023
        results.append((loss, *gradients, *moments_of(model.variational_strategy._variational_distribution)))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


def test_beta_scales_the_divergence_not_the_step():
    p, beta, rho = dense.problem(seed=3), 2.5, 0.3
    model = randomize_q(model_of(p))
    distribution = model.variational_strategy._variational_distribution
    mean, covariance = moments_of(distribution)
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y), beta=beta)
    take(NaturalGradients(model, len(p.y), beta), mll, p.x, p.y, rho)
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu + 1e-10 * torch.eye(5))) @ p.Kuf
    h, precision = natural_of(mean, covariance)
    precision = (1 - rho) * precision + rho * (torch.eye(5) + a @ a.T / p.noise[0] / beta)
    h = (1 - rho) * h + rho * a @ p.y / p.noise[0] / beta
    new_mean, new_covariance = moments_of(distribution)
    torch.testing.assert_close(new_covariance, torch.linalg.inv(precision))
    torch.testing.assert_close(new_mean, torch.linalg.solve(precision, h))


def test_steps_of_beta_end_where_the_gradient_vanishes():
    p = dense.problem(seed=3)
    model = randomize_q(model_of(p))
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y), beta=0.4)
    take(NaturalGradients(model, len(p.y), 0.4), mll, p.x, p.y, 1.0)
    mll(model(p.x), p.y).backward()
    for parameter in model.variational_parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), atol=1e-9, rtol=0)


def test_negative_curvature_counts_as_none():
    """A Student-t far from its data asks for more variance; P stays above (1 - rho) P + rho I."""
    p = dense.problem(seed=3)
    model = model_of(p, q=(torch.zeros(5), 0.01 * torch.eye(5)), conditional="scalar")
    likelihood = gpytorch.likelihoods.StudentTLikelihood()
    likelihood.noise = 0.01
    mll = tighter_gp.TighterELBO(likelihood, model, len(p.y))
    natural = NaturalGradients(model, len(p.y))
    with natural.recording() as records:
        loss = -mll(model(p.x), p.y)
    (slope,) = torch.autograd.grad(loss, records[0].explained, retain_graph=True)
    assert (slope < 0).any()  # more variance lowers the loss
    natural.gradients(loss, records, [])
    assert natural.step(0.5) == 0.5
    precision = torch.linalg.inv(moments_of(model.variational_strategy._variational_distribution)[1])
    floor = 0.5 * 1e4 * torch.eye(5) + 0.5 * torch.eye(5)
    assert torch.linalg.eigvalsh(precision - floor).min() > -1e-6


# -- other models -----------------------------------------------------------------------------------------------------


def solve_gp(p, forms=("cholesky", "cholesky")):
    q = [Q_FORMS[form](size) for form, size in zip(forms, (3, 2), strict=True)]
    make = lambda model: tighter_gp.SolveGPVariationalStrategy(model, p.z[:3], p.z[3:], *q, jitter_val=1e-10)
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
    model, likelihood, n = solve_gp(p, forms), make_noise(p.noise[0]), len(p.y)
    mll = tighter_gp.TighterELBO(likelihood, model, n)
    assert take(NaturalGradients(model, n), mll, p.x, p.y, 1.0) == 1.0
    torch.testing.assert_close(n * mll(model(p.x), p.y), solve_gp_bound(p), rtol=1e-8, atol=0)


def test_solve_gp_with_a_mean_field_part_still_converges():
    p = dense.problem(seed=4)
    model, n = solve_gp(p, ("mean_field", "cholesky")), len(p.y)
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, n)
    natural = NaturalGradients(model, n)
    for _ in range(400):
        take(natural, mll, p.x, p.y, 0.9)
    gradients = torch.autograd.grad(mll(model(p.x), p.y), natural.parameters)
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_solve_gp_converges_for_other_likelihoods(name):
    p = dense.problem(seed=2)
    likelihood, y, conditional = targets_of(p, name)
    q = [Q_FORMS["cholesky"](size) for size in (3, 2)]
    make = lambda owner: tighter_gp.SolveGPVariationalStrategy(
        owner, p.z[:3], p.z[3:], *q, jitter_val=1e-10, conditional=conditional
    )
    model = GP(make, make_kernel(p.kernel, p.variance, p.lengthscales))
    model(p.x)
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    natural = NaturalGradients(model, len(y))
    for _ in range(100):
        take(natural, mll, p.x, y, 0.5)
    gradients = torch.autograd.grad(mll(model(p.x), y), natural.parameters)
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8)


def test_solve_gp_takes_the_same_step_with_and_without_a_first_pass():
    p, results = dense.problem(seed=4), []
    for fast in (True, False):
        torch.manual_seed(0)
        model, likelihood = solve_gp(p), make_noise(p.noise[0])
        mll = tighter_gp.TighterELBO(likelihood, model, len(p.y))
        natural = NaturalGradients(model, len(p.y))
        gaussian = natural.gaussian_targets(mll, p.y) if fast else None
        for _ in range(3):
            natural.train_step(lambda: -mll(model(p.x), p.y), [], 0.3, gaussian) if fast else take(  # noqa: B023
                natural, mll, p.x, p.y, 0.3
            )
        results.append([m for d in model.variational_strategy.distributions for m in moments_of(d)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


def test_q_alone_can_be_trained():
    p = dense.problem(seed=1)
    model, likelihood = randomize_q(model_of(p, jitter_val=0.0)), make_noise(p.noise[0])
    for parameter in (*model.hyperparameters(), *likelihood.parameters()):
        parameter.requires_grad_(False)
    mll = tighter_gp.TighterELBO(likelihood, model, len(p.y))
    _, gradients, _ = NaturalGradients(model, len(p.y)).train_step(lambda: -mll(model(p.x), p.y), [], 1.0)
    assert gradients == []
    torch.testing.assert_close(len(p.y) * mll(model(p.x), p.y), dense.f4(p), rtol=1e-8, atol=0)


def test_a_point_mass_is_left_to_others():
    p = dense.problem(seed=4)
    model = solve_gp(p, ("cholesky", "delta"))
    natural = NaturalGradients(model, len(p.y))
    assert len(natural.parameters) == 2
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    before = model.variational_strategy.distributions[1].variational_mean.detach().clone()
    natural.train_step(lambda: -mll(model(p.x), p.y), rest_of(mll, natural), 0.3, natural.gaussian_targets(mll, p.y))
    assert torch.equal(model.variational_strategy.distributions[1].variational_mean, before)


def test_mean_field_precision_is_exact_and_its_mean_converges_at_full_steps():
    p = dense.problem(seed=6, n=40)
    model = randomize_q(model_of(p, "mean_field"))
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    natural = NaturalGradients(model, len(p.y))
    for _ in range(3000):
        take(natural, mll, p.x, p.y, 1.0)
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf
    full = torch.eye(5) + a @ a.T / p.noise[0]
    distribution = model.variational_strategy._variational_distribution
    torch.testing.assert_close(distribution.variational_stddev.detach(), full.diagonal().rsqrt(), rtol=1e-6, atol=0)
    best = torch.linalg.solve(full, a @ p.y / p.noise[0])
    torch.testing.assert_close(distribution.variational_mean.detach(), best, rtol=1e-3, atol=1e-4)


def test_a_small_mean_field_step_is_the_plain_natural_step():
    p, rho = dense.problem(seed=6), 1e-3
    model = randomize_q(model_of(p, "mean_field"))
    distribution = model.variational_strategy._variational_distribution
    mean, stddev = distribution.variational_mean.detach().clone(), distribution.variational_stddev.detach().clone()
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    take(NaturalGradients(model, len(p.y)), mll, p.x, p.y, rho)
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu + 1e-10 * torch.eye(5))) @ p.Kuf
    slope, weight = (p.y - a.T @ mean) / p.noise, 1 / p.noise
    precision = (1 - rho) * stddev**-2 + rho * (1 + (a**2 * weight).sum(-1))
    h = (1 - rho) * stddev**-2 * mean + rho * ((a * slope).sum(-1) + (a**2 * weight).sum(-1) * mean)
    torch.testing.assert_close(distribution.variational_stddev.detach(), precision.rsqrt())
    torch.testing.assert_close(distribution.variational_mean.detach(), h / precision)


def lmc(p, tasks=3, latents=2):
    q = variational.CholeskyVariationalDistribution(5, batch_shape=torch.Size([latents]))
    model = GP(
        lambda model: variational.LMCVariationalStrategy(
            tighter_gp.TighterVariationalStrategy(model, p.z, q, jitter_val=1e-10),
            num_tasks=tasks,
            num_latents=latents,
            latent_dim=-1,
            jitter_val=0.0,
        ),
        make_kernel(p.kernel, p.variance, p.lengthscales),
    )
    model(p.x)
    return model


def independent(p, tasks=3):
    q = variational.CholeskyVariationalDistribution(5, batch_shape=torch.Size([tasks]))
    strategy = lambda model: variational.IndependentMultitaskVariationalStrategy(
        tighter_gp.TighterVariationalStrategy(model, p.z, q, jitter_val=1e-10), num_tasks=tasks
    )
    model = GP(strategy, make_kernel(p.kernel, p.variance, p.lengthscales))
    model(p.x)
    return model


def multitask(p, tasks=3):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=tasks, has_global_noise=False)
    likelihood.task_noises = torch.linspace(0.1, 0.4, tasks)
    y = torch.stack([p.y, p.y.cos(), p.y.sin()], -1)
    return likelihood, y


def test_independent_tasks_reach_their_collapsed_bounds_in_one_step():
    p = dense.problem(seed=7)
    model, (likelihood, y) = independent(p), multitask(p)
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    natural = NaturalGradients(model, len(y))
    assert natural.gaussian_targets(mll, y) is None
    take(natural, mll, p.x, y, 1.0)
    expected = sum(
        dense.f4(p._replace(y=y[:, i], noise=likelihood.task_noises[i].detach().expand(len(y)))) for i in range(3)
    )
    torch.testing.assert_close(len(y) * mll(model(p.x), y), expected, rtol=1e-7, atol=0)


def test_one_step_of_an_lmc_is_the_dense_one():
    p, rho = dense.problem(seed=7), 0.3
    model, (likelihood, y) = lmc(p), multitask(p)
    distribution = model.variational_strategy.base_variational_strategy._variational_distribution
    mean, covariance = moments_of(distribution)
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    take(NaturalGradients(model, len(y)), mll, p.x, y, rho)
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu + 1e-10 * torch.eye(5))) @ p.Kuf
    weights, noise = model.variational_strategy.lmc_coefficients.detach(), likelihood.task_noises.detach()  # K x T
    residual = y - (mean @ a).T @ weights  # N x T
    new_mean, new_covariance = moments_of(distribution)
    for k in range(2):
        slope, curvature = residual @ (weights[k] / noise), (weights[k] ** 2 / noise).sum()
        h, precision = natural_of(mean[k], covariance[k])
        precision = (1 - rho) * precision + rho * (torch.eye(5) + curvature * a @ a.T)
        h = (1 - rho) * h + rho * a @ (slope + curvature * (a.T @ mean[k]))
        torch.testing.assert_close(new_covariance[k], torch.linalg.inv(precision), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(new_mean[k], torch.linalg.solve(precision, h), rtol=1e-7, atol=1e-9)


def test_an_lmc_of_many_latent_functions_converges_at_full_steps():
    """Each latent function takes the others for fixed; undamped, twelve of them diverge."""
    p, rate = dense.problem(seed=7), 0.9
    model, (likelihood, y) = lmc(p, latents=12), multitask(p)
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    natural = NaturalGradients(model, len(y))
    values = []
    for _ in range(60):
        take(natural, mll, p.x, y, rate)
        values.append(mll(model(p.x), y).item())
    assert values[-1] > values[0]
    assert abs(values[-1] - values[-2]) < 1e-3 * abs(values[-1])


def test_a_batch_of_models_takes_the_steps_of_each():
    p, rho = dense.problem(seed=8), 0.4
    y = torch.stack([p.y, p.y.cos()])
    model = randomize_q(model_of(p, batch_shape=torch.Size([2])))
    distribution = model.variational_strategy._variational_distribution
    mean, root = distribution.variational_mean.detach().clone(), distribution.chol_variational_covar.detach().clone()
    likelihood = make_noise(p.noise[0])
    mll = tighter_gp.TighterELBO(likelihood, model, len(p.y))
    take(NaturalGradients(model, len(p.y)), mll, p.x, y, rho)
    both = moments_of(distribution)
    for i in range(2):
        one = model_of(p, q=(mean[i], root[i]))
        mll = tighter_gp.TighterELBO(likelihood, one, len(p.y))
        take(NaturalGradients(one, len(p.y)), mll, p.x, y[i], rho)
        for member, alone in zip(both, moments_of(one.variational_strategy._variational_distribution), strict=True):
            torch.testing.assert_close(member[i], alone)


def test_outputs_that_share_a_projection_have_sums_of_their_own():
    projection, slope, curvature = torch.randn(5, 11), torch.randn(3, 11), torch.rand(3, 11)
    sums = closed_form.data_sums(projection, slope, curvature, torch.Size([3]))
    for i in range(3):
        torch.testing.assert_close(sums.gram[i], projection @ torch.diag(curvature[i]) @ projection.T)
        torch.testing.assert_close(sums.slope[i], projection @ slope[i])
    shared = closed_form.data_sums(projection, slope, curvature)
    torch.testing.assert_close(shared.gram, sums.gram.sum(0))
    torch.testing.assert_close(shared.slope, sums.slope.sum(0))


def test_a_gplvm_is_at_the_optimum_of_its_samples_after_one_full_step():
    """Its latents are sampled within the objective, and its outputs share one projection."""
    y, rows = torch.randn(9, 3), torch.arange(9)
    model = tighter_gp.gplvm.BayesianGPLVM.from_data(y, latent_dim=2, num_inducing=4)
    elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=9)

    def loss():
        torch.manual_seed(3)
        return -elbo(rows, y, num_samples=2)

    loss()  # GPyTorch sets q(u) at the first call
    natural = NaturalGradients(model, 9)
    natural.train_step(loss, rest_of(elbo, natural), 1.0)
    loss().backward()
    for parameter in natural.parameters:
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), atol=1e-9, rtol=0)


def test_softmax_uses_the_mean_second_derivative():
    """The precision that a step makes is that of E[p (1 - p)] over the very samples of the objective."""
    p, rho, classes = dense.problem(seed=10, n=30), 0.2, 3
    q = variational.CholeskyVariationalDistribution(5, batch_shape=torch.Size([classes]))
    strategy = lambda model: variational.IndependentMultitaskVariationalStrategy(
        tighter_gp.TighterVariationalStrategy(model, p.z, q, jitter_val=1e-10, conditional="beta"), num_tasks=classes
    )
    model = GP(strategy, make_kernel(p.kernel, p.variance, p.lengthscales))
    model(p.x)
    y = torch.randint(classes, (30,))
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    mll = tighter_gp.TighterELBO(likelihood, model, len(y))
    mean, covariance = moments_of(q)
    torch.manual_seed(5)
    take(NaturalGradients(model, len(y)), mll, p.x, y, rho)
    a = torch.linalg.inv(torch.linalg.cholesky(p.Kuu + 1e-10 * torch.eye(5))) @ p.Kuf
    d = (p.Kff.diagonal() - (a * a).sum(0)).clamp_min(0)
    scale = 1 / (1 + d)  # beta starts at 1
    variance = torch.stack([(a * (covariance[k] @ a)).sum(0) for k in range(classes)], -1) + 1e-10
    variance = variance + (scale * d).unsqueeze(-1)
    torch.manual_seed(5)
    draws = torch.randn(gpytorch.settings.num_likelihood_samples.value(), 30, classes)
    f = (mean @ a).T + variance.sqrt() * draws
    probs = f.exp() / f.exp().sum(-1, keepdim=True)
    curvature = (probs * (1 - probs)).mean(0)
    slope = (torch.nn.functional.one_hot(y, classes) - probs).mean(0)
    new_mean, new_covariance = moments_of(q)
    for k in range(classes):
        h, precision = natural_of(mean[k], covariance[k])
        precision = (1 - rho) * precision + rho * (torch.eye(5) + a @ torch.diag(curvature[:, k]) @ a.T)
        h = (1 - rho) * h + rho * a @ (slope[:, k] + curvature[:, k] * (a.T @ mean[k]))
        torch.testing.assert_close(new_covariance[k], torch.linalg.inv(precision), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(new_mean[k], torch.linalg.solve(precision, h), rtol=1e-6, atol=1e-8)


# -- the state of a run -----------------------------------------------------------------------------------------------


def test_q_changed_outside_is_where_the_next_step_starts():
    p = dense.problem(seed=11)
    model = randomize_q(model_of(p))
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    natural = NaturalGradients(model, len(p.y))
    take(natural, mll, p.x, p.y, 0.5)
    distribution = model.variational_strategy._variational_distribution
    distribution.chol_variational_covar.data[3, 1] += 0.1  # as GPyTorch's setters do, unseen by version counters
    mean, root = distribution.variational_mean.detach().clone(), distribution.chol_variational_covar.detach().clone()
    take(natural, mll, p.x, p.y, 0.5)
    other = model_of(p, q=(mean, root))
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), other, len(p.y))
    take(NaturalGradients(other, len(p.y)), mll, p.x, p.y, 0.5)
    for known, now in zip(
        moments_of(other.variational_strategy._variational_distribution), moments_of(distribution), strict=True
    ):
        torch.testing.assert_close(now, known)


@pytest.mark.parametrize("form", [*FULL, "mean_field"])
def test_a_run_goes_on_from_its_state_to_the_last_bit(form):
    torch.set_default_dtype(torch.float32)
    p = dense.problem(seed=12)
    likelihood = make_noise(p.noise[0])

    def run(model, natural, steps):
        mll = tighter_gp.TighterELBO(likelihood, model, len(p.y))
        for _ in range(steps):
            take(natural, mll, p.x, p.y, 0.3)

    model = randomize_q(model_of(p, form, jitter_val=1e-4))
    natural = NaturalGradients(model, len(p.y))
    run(model, natural, 3)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, natural.state_dict()
    run(model, natural, 3)
    other = model_of(p, form, jitter_val=1e-4)
    other.load_state_dict(saved[0])
    again = NaturalGradients(other, len(p.y))
    again.load_state_dict(saved[1])
    run(other, again, 3)
    for first, second in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)


def test_sums_of_two_processes_make_one_step():
    p = dense.problem(seed=13)
    whole = randomize_q(model_of(p))
    likelihood, n = make_noise(p.noise[0]), len(p.y)
    take(NaturalGradients(whole, n), tighter_gp.TighterELBO(likelihood, whole, n), p.x, p.y, 0.3)
    parts = [slice(0, 6), slice(6, None)]
    sent: list[list] = []
    for rows in parts:  # what each process has to give
        model = randomize_q(model_of(p))
        natural = NaturalGradients(model, n, reduce=lambda tensors: sent.append([t.clone() for t in tensors]))
        with natural.recording() as records:
            loss = -tighter_gp.TighterELBO(likelihood, model, n)(model(p.x[rows]), p.y[rows])
        natural.gradients(loss, records, [], weight=len(p.y[rows]) / n)
        natural.step(0.3)
    model = randomize_q(model_of(p))

    def add(tensors):
        for tensor, *others in zip(tensors, *sent, strict=True):
            tensor.copy_(sum(others))

    take(NaturalGradients(model, n, reduce=add), tighter_gp.TighterELBO(likelihood, model, n), p.x, p.y, 0.3)
    for first, second in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_a_step_out_of_the_cone_is_halved_with_one_line(caplog):
    p = dense.problem(seed=14)
    model = randomize_q(model_of(p))
    distribution = model.variational_strategy._variational_distribution
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    natural = NaturalGradients(model, len(p.y))
    smallest = torch.linalg.eigvalsh(natural_forms.init_natural(distribution).precision).min()

    def spoil(sums):
        sums[0].copy_(-(1 + 3 * smallest) * torch.eye(5))

    natural.reduce = spoil
    with caplog.at_level(logging.WARNING, logger="tighter_gp"):
        used = take(natural, mll, p.x, p.y, 0.5)
    assert used < 0.5
    assert len(caplog.records) == 1
    before = moments_of(distribution)
    caplog.clear()
    natural.reduce = lambda sums: sums[0].fill_(torch.nan)
    with caplog.at_level(logging.WARNING, logger="tighter_gp"):
        assert take(natural, mll, p.x, p.y, 0.5) == 0.0
    assert len(caplog.records) == 1
    for known, now in zip(before, moments_of(distribution), strict=True):
        assert torch.equal(known, now)


def test_a_step_that_explodes_is_made_smaller(caplog):
    """Large counts from a prior of small rates: the full step of the mean would give rates beyond all numbers."""
    x = torch.linspace(-2, 2, 60).unsqueeze(-1)
    y = torch.poisson(torch.exp(5 + x.squeeze(-1)))
    model = make_gp(x[::10], jitter_val=1e-8, conditional="optimal")
    mll = tighter_gp.TighterELBO(tighter_gp.likelihoods.PoissonLikelihood(), model, len(y))
    model(x)
    natural = NaturalGradients(model, len(y))
    losses = []
    with caplog.at_level(logging.DEBUG, logger="tighter_gp"):
        for _ in range(40):
            loss, _, _ = natural.train_step(lambda: -mll(model(x), y), [], 0.5)
            losses.append(loss.item())
    assert "much worse" in caplog.text
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.5 * losses[0]
    assert abs(losses[-1] - losses[-2]) < 1e-6 * losses[-1]


def test_a_step_can_be_taken_back_once():
    p = dense.problem(seed=14)
    model = randomize_q(model_of(p))
    distribution = model.variational_strategy._variational_distribution
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    natural = NaturalGradients(model, len(p.y))
    take(natural, mll, p.x, p.y, 0.5)
    before = moments_of(distribution)
    take(natural, mll, p.x, p.y, 0.5)
    after = moments_of(distribution)
    for _ in range(2):
        natural.undo()
        for known, now in zip(before, moments_of(distribution), strict=True):
            assert torch.equal(known, now)
    take(natural, mll, p.x, p.y, 0.5)
    for known, now in zip(after, moments_of(distribution), strict=True):
        torch.testing.assert_close(known, now, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [*FULL, "mean_field"])
def test_a_step_can_be_part_of_a_graph(form):
    """The pure functions read nothing back to the host."""
    size = 70  # large enough for the inverse by halves
    projection, slope, curvature, mean = torch.randn(size, 90), torch.randn(90), torch.rand(90), torch.randn(size)
    diagonal = form == "mean_field"
    precision = torch.ones(size) if diagonal else torch.eye(size)

    def step(precision, linear, projection, slope, curvature, mean):
        sums = closed_form.data_sums(projection, slope, curvature, diagonal=diagonal)
        moved = closed_form.natural_step(closed_form.NaturalParameters(precision, linear), sums, mean, 0.3)
        return (*moved, *natural_forms.parameter_values(Q_FORMS[form], moved))

    arguments = (precision, torch.zeros(size), projection, slope, curvature, mean)
    graph = make_fx(step)(*arguments)
    for traced, eager in zip(graph(*arguments), step(*arguments), strict=True):
        torch.testing.assert_close(traced, eager)


def test_parameters_require_gradients_again_after_a_failure():
    p = dense.problem()
    model = model_of(p)
    natural = NaturalGradients(model, len(p.y))
    seen = []

    def evaluate():
        seen.extend(q.requires_grad for q in natural.parameters)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        natural.train_step(evaluate, [], 0.1)
    assert seen == [False, False]
    assert all(q.requires_grad for q in natural.parameters)


# -- the optimizer ----------------------------------------------------------------------------------------------------


class StockGP(gpytorch.models.ApproximateGP):
    def __init__(self, p, distribution):
        strategy = variational.VariationalStrategy(self, p.z, distribution, jitter_val=1e-8)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = make_kernel(p.kernel, p.variance, p.lengthscales)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_optimizer_takes_the_steps_of_ngd_on_a_stock_strategy(named, steps):
    p, n, results = dense.problem(seed=15), 17, []
    for form in ("natural", "cholesky"):
        model = StockGP(p, Q_FORMS[form](5))
        model.train()
        distribution = model.variational_strategy._variational_distribution
        Entry(distribution).write(closed_form.NaturalParameters(2 * torch.eye(5), torch.arange(5.0)))
        model.variational_strategy.variational_params_initialized.fill_(1)
        mll = gpytorch.mlls.VariationalELBO(make_noise(p.noise[0]), model, n)
        if form == "natural":
            optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=n, lr=0.2)
        else:
            params = model.named_variational_parameters() if named else model.variational_parameters()
            optimizer = NaturalGradient(params, num_data=n, lr=0.2)
        for _ in range(steps):
            optimizer.zero_grad()
            (-mll(model(p.x), p.y)).backward()
            optimizer.step()
        results.append(moments_of(distribution))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_optimizer_takes_the_step_of_the_closed_form_on_our_strategy():
    p, results = dense.problem(seed=16), []
    for own in (True, False):
        model = randomize_q(model_of(p))
        mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
        if own:
            take(NaturalGradients(model, len(p.y)), mll, p.x, p.y, 0.3)
        else:
            (-mll(model(p.x), p.y)).backward()
            NaturalGradient(model.variational_parameters(), len(p.y), lr=0.3).step()
        results.append(moments_of(model.variational_strategy._variational_distribution))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


def test_the_optimizer_keeps_float64_through_its_state_dict():
    torch.set_default_dtype(torch.float32)
    p = dense.problem(seed=17)
    model = randomize_q(model_of(p, jitter_val=1e-4))
    mll = tighter_gp.TighterELBO(make_noise(p.noise[0]), model, len(p.y))
    optimizer = NaturalGradient(model.variational_parameters(), len(p.y))
    (-mll(model(p.x), p.y)).backward()
    optimizer.step()
    other = NaturalGradient(model.variational_parameters(), len(p.y))
    other.load_state_dict(optimizer.state_dict())
    root = model.variational_strategy._variational_distribution.chol_variational_covar
    assert other.state[root]["precision"].dtype == torch.float64
    assert torch.equal(other.state[root]["precision"], optimizer.state[root]["precision"])


def test_the_optimizer_refuses_what_it_cannot_train():
    p = dense.problem()
    with pytest.raises(ValueError, match="mean-field"):
        NaturalGradient(model_of(p, "mean_field").variational_parameters(), 10)
    with pytest.raises(ValueError, match="NGD"):
        NaturalGradient(model_of(p, "natural").variational_parameters(), 10)
    with pytest.raises(ValueError, match="NGD"):
        NaturalGradient(model_of(p, "tril_natural").named_variational_parameters(), 10)
    with pytest.raises(ValueError, match="got 1 parameters"):
        NaturalGradient(model_of(p, "delta").variational_parameters(), 10)
    with pytest.raises(ValueError, match="num_data"):
        NaturalGradient(model_of(p).variational_parameters(), 0)


def test_the_optimizer_halves_a_step_out_of_the_cone(caplog):
    p = dense.problem()
    model = randomize_q(model_of(p))
    mean, root = model.variational_parameters()
    mean.grad, root.grad = torch.zeros_like(mean), torch.zeros_like(root)
    inverse = torch.linalg.inv(root.detach())
    smallest = torch.linalg.eigvalsh(inverse.T @ inverse).min()
    root.grad.copy_(-2 * 3 * smallest / 2 / 10 * root.detach())  # dL/dS = -3/2 smallest/N I, so P loses 3 lr smallest
    with caplog.at_level(logging.WARNING, logger="tighter_gp"):
        NaturalGradient([mean, root], num_data=10, lr=0.5).step()
    assert len(caplog.records) == 1
    assert "taken: 0.25" in caplog.text


class Shifted(GP):
    """A trend outside of the GP, which its strategy does not see."""

    def __call__(self, x, prior=False, **kwargs):
        q = super().__call__(x, prior=prior, **kwargs)
        return q if prior else q.__class__(q.mean + 3.0, q.lazy_covariance_matrix)


def test_what_a_call_of_the_models_own_adds_is_part_of_the_slopes():
    torch.manual_seed(0)
    x = 4 * torch.rand(60, 1) - 2
    y = torch.sin(3 * x[:, 0]) + 3 + 0.2 * torch.randn(60)
    make = lambda model: tighter_gp.TighterVariationalStrategy(
        model, x[::10].clone(), variational.CholeskyVariationalDistribution(6)
    )
    models = [Shifted(make), GP(make)]
    likelihood = make_noise(0.1)
    for model, targets in zip(models, (y, y - 3), strict=True):
        for parameter in (*model.parameters(), *likelihood.parameters()):
            parameter.requires_grad_(False)
        for parameter in model.variational_strategy._variational_distribution.parameters():
            parameter.requires_grad_(True)
        tighter_gp.fit(model, likelihood, x, targets, steps=1, batch_size=None, natural_gradients=1.0)
    found, expected = (moments_of(m.variational_strategy._variational_distribution) for m in models)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", ["cholesky", "natural", "mean_field"])
def test_a_run_that_starts_from_a_trained_q_does_not_throw_it_away(form):
    torch.manual_seed(0)
    x = 4 * torch.rand(400, 1)
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(400)
    model, likelihood = make_gp(x[::40].clone(), distribution=Q_FORMS[form]), make_noise(0.05)
    bound = lambda: float(tighter_gp.evaluate_bound(model, likelihood, x, y)) / 400
    tighter_gp.fit(model, likelihood, x, y, steps=100, batch_size=32)
    trained = bound()
    tighter_gp.fit(model, likelihood, x, y, steps=1, batch_size=32, lr=1e-9)
    assert bound() > trained - 0.1


def test_the_prior_knows_no_data_and_any_other_q_does():
    entry = Entry(variational.CholeskyVariationalDistribution(5, batch_shape=torch.Size([2])))
    assert not entry.knows_data()
    entry.distributions[0].variational_mean.data.normal_(std=1e-3)
    assert not entry.knows_data()
    entry.distributions[0].variational_mean.data[1, 2] = 0.1
    assert entry.knows_data()
    wide = Entry(variational.MeanFieldVariationalDistribution(5))
    assert not wide.knows_data()
    wide.distributions[0]._variational_stddev.data[0] = 0.9
    assert wide.knows_data()


def test_inducing_points_move_where_each_batch_has_one_row():
    torch.manual_seed(0)
    x = torch.rand(30, 1)
    model = make_gp(x[:4].clone())
    before = model.variational_strategy.inducing_points.detach().clone()
    tighter_gp.fit(model, make_noise(0.1), x, torch.sin(6 * x[:, 0]), steps=10, batch_size=1)
    assert (model.variational_strategy.inducing_points - before).abs().max() > 1e-3


@pytest.mark.parametrize("shared", ["inputs", "kernel"])
def test_models_of_a_batch_that_share_a_q_are_refused(shared):
    """Each pays the KL divergence of q(u), which a natural step takes once."""
    x = torch.linspace(0.0, 4.0, 12).unsqueeze(-1)
    y = torch.stack([x[:, 0].sin(), x[:, 0].cos()])
    kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2] if shared == "kernel" else []))
    inputs = x.expand(2, 12, 1) if shared == "inputs" else x
    run = lambda model, **kwargs: tighter_gp.fit(model, make_noise(0.1), inputs, y, steps=2, batch_size=None, **kwargs)
    with pytest.raises(
        ValueError, match=r"A batch of 2 models shares one q\(u\), .* batch_shape=\(2,\), or pass natural"
    ):
        run(make_gp(x[:4].clone(), kernel))
    assert len(run(make_gp(x[:4].clone(), kernel), natural_gradients=False).loss) == 2
