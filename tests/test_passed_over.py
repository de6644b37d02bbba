"""What a user hands over or changes and was passed over silently, each with the case that showed it."""

from __future__ import annotations

import logging
import math
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator

import tighter_gp
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import double_problem, randomize_q
from tighter_gp import TighterELBO
from tighter_gp.gplvm import BayesianGPLVM, VariationalLatents
from tighter_gp.likelihoods.properties import is_log_concave

P = double_problem()
N, M = len(P.x), len(P.z)


def gp(**kwargs):
    return randomize_q(make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), **kwargs))


def price(m):
    return 0.5 * (m - 1 - math.log(m))


# -- likelihoods of a user's own -----------------------------------------------------------------------------------------


class Weighted(tighter_gp.likelihoods.BernoulliLogitLikelihood):
    def expected_log_prob(self, y, q, *args, weights=None, **kwargs):
        return weights * super().expected_log_prob(y, q, *args, **kwargs)


class Exposed(tighter_gp.likelihoods.PoissonLikelihood):
    def forward(self, f, *args, exposure=None, **kwargs):
        return torch.distributions.Poisson(exposure * f.exp())

    def expected_log_prob(self, y, q, *args, exposure=None, **kwargs):
        rate = exposure * (q.mean + q.variance / 2).exp()
        return y * (q.mean + exposure.log()) - rate - torch.lgamma(y + 1)


@pytest.mark.parametrize(("kind", "name"), [(Weighted, "weights"), (Exposed, "exposure")])
def test_a_density_derived_from_one_of_ours_is_the_one_that_is_trained(kind, name):
    model, y = gp(), (P.y > 0).double()
    values = []
    for value in (0.5, 1.0, 30.0):
        given = {name: torch.full((N,), value)}
        ours, standard = (
            3 * objective(kind(), model, N)(model(P.x), y, **given) for objective in (TighterELBO, VariationalELBO)
        )
        assert ours >= standard  # at the same q(u)
        values.append(standard.item())
        assert ours - standard < 0.2 * abs(standard)
    assert len({round(value, 3) for value in values}) == 3


class T10(gpytorch.likelihoods.GaussianLikelihood):
    def expected_log_prob(self, y, q, *args, **kwargs):
        return -torch.log1p((y - q.mean).square() + q.variance)


def test_a_density_derived_from_a_log_concave_one_is_not_known_to_be():
    assert is_log_concave(gpytorch.likelihoods.GaussianLikelihood())
    assert not is_log_concave(T10())
    with pytest.warns(UserWarning, match="not known to be log-concave"):
        TighterELBO(T10(), gp(), N)
    known = T10()
    known.is_log_concave = True
    assert is_log_concave(known)


class Hundredfold(gpytorch.likelihoods.noise_models.HomoskedasticNoise):
    def forward(self, *params, shape=None, **kwargs):
        return 100.0 * super().forward(*params, shape=shape, **kwargs)


def test_a_noise_model_of_the_users_own_is_the_noise():
    own, plain = make_noise(0.02), make_noise(2.0)
    own.noise_covar = Hundredfold(noise_constraint=gpytorch.constraints.Positive())
    own.noise = 0.02
    model = gp()
    values = [TighterELBO(likelihood, model, N)(model(P.x), P.y) for likelihood in (own, plain)]
    torch.testing.assert_close(*values)
    predicted = [tighter_gp.predict_y(model.eval(), likelihood.eval(), P.x).variance for likelihood in (own, plain)]
    torch.testing.assert_close(*predicted)


@pytest.mark.parametrize("tasks", [[0.0, 1.0, -1.0], [0.0, 1.0, 0.7], [0.0, 1.0, 2.0]])
def test_tasks_are_whole_numbers_among_those_there_are(tasks):
    likelihood = gpytorch.likelihoods.HadamardGaussianLikelihood(num_tasks=2)
    model = gp()
    with pytest.raises(ValueError, match=r"tasks= of HadamardGaussianLikelihood must be integers from 0 to 1; got"):
        TighterELBO(likelihood, model, N)(model(P.x[:3]), P.y[:3], tasks=torch.tensor(tasks))


def test_the_default_dtype_is_not_that_of_the_bound():
    model = make_gp(P.z.float(), make_kernel("rbf", 1.0, P.lengthscales).float()).float()
    labels = (P.y > 0).float()
    assert torch.get_default_dtype() == torch.float64
    value = TighterELBO(tighter_gp.likelihoods.BernoulliLogitLikelihood(), model, N)(model(P.x.float()), labels)
    assert value.dtype == torch.float32


# -- points that a call mixes --------------------------------------------------------------------------------------------


class Areal(GP):
    """Observes sums of f over neighbouring points."""

    def __call__(self, x, prior=False, **kwargs):
        q = super().__call__(x, prior=prior, **kwargs)
        if prior:
            return q
        sums = torch.ones(1, x.size(-2))
        operator = to_linear_operator(sums)
        return q.__class__(q.mean @ sums.mT, operator @ q.lazy_covariance_matrix @ operator.mT)


def test_sums_over_points_have_no_tighter_bound():
    make = lambda model: tighter_gp.TighterVariationalStrategy(
        model, torch.tensor([[100.0]]), gpytorch.variational.CholeskyVariationalDistribution(1, mean_init_std=0.0)
    )
    model, likelihood, y = Areal(make), make_noise(4.0), torch.zeros(1)
    x = torch.linspace(0, 0.1, 4).unsqueeze(-1)
    standard = VariationalELBO(likelihood, model, 1)(model(x), y)
    covariance = model.covar_module(x).to_dense().sum().reshape(1, 1) + 4
    evidence = torch.distributions.MultivariateNormal(torch.zeros(1), covariance).log_prob(y)
    assert standard < evidence
    with pytest.raises(TypeError, match=r"mixes points.*VariationalELBO"):
        TighterELBO(likelihood, model, 1)(model(x), y)


def test_scaled_points_are_not_mixed():
    model, likelihood = gp(), make_noise(0.3)
    q = model(P.x)
    scale = torch.linspace(0.5, 2, N)
    operator = DiagLinearOperator(scale)
    scaled = q.__class__(scale * q.mean, operator @ q.lazy_covariance_matrix @ operator)
    value = TighterELBO(likelihood, model, N)(scaled, P.y)
    residual, explained = q.lazy_covariance_matrix.residual, q.lazy_covariance_matrix.explained
    ratio = scale.square() * residual / 0.3
    misfit = ((P.y - scale * q.mean).square() + scale.square() * explained) / 0.3
    terms = -0.5 * (math.log(2 * math.pi * 0.3) + misfit + ratio.log1p()).sum()
    torch.testing.assert_close(N * value, terms - model.variational_strategy.kl_divergence())


# -- missing labels, permuted tasks --------------------------------------------------------------------------------------


def classes(wrap, num_classes=3, **kwargs):
    points = torch.full((num_classes, 1, 1), 50.0)
    batch_shape = torch.Size([num_classes])
    make = lambda model: wrap(
        tighter_gp.TighterVariationalStrategy(
            model, points, gpytorch.variational.CholeskyVariationalDistribution(1, batch_shape), **kwargs
        )
    )
    return GP(make)


@pytest.mark.parametrize("num_points", [3, 4])  # as many as classes, and not
def test_a_point_without_a_label_pays_for_none_of_its_functions(num_points):
    model = classes(lambda s: IndependentMultitaskVariationalStrategy(s, num_tasks=3), conditional="scalar")
    scales = torch.tensor([0.9, 0.001, 0.8])
    model.variational_strategy.base_variational_strategy.conditional.m = scales
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    mll = TighterELBO(likelihood, model, num_points, combine_terms=False)
    x = torch.arange(float(num_points)).unsqueeze(-1)
    labels = torch.arange(float(num_points)) % 3
    labels[1] = math.nan
    with gpytorch.settings.observation_nan_policy("fill"):
        paid = num_points * mll(model(x), labels).conditional
    expected = (num_points - 1) * sum(price(m) for m in scales.tolist())
    torch.testing.assert_close(paid, torch.tensor(expected))


@pytest.mark.parametrize("wrap", ["independent", "lmc"])
def test_the_best_scales_of_a_point_without_a_label_cost_nothing(wrap):
    wrappers = {
        "independent": lambda s: IndependentMultitaskVariationalStrategy(s, num_tasks=3),
        "lmc": lambda s: LMCVariationalStrategy(s, num_tasks=3, num_latents=3),
    }
    model = classes(wrappers[wrap])
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    mll = TighterELBO(likelihood, model, 3, combine_terms=False)
    x, labels = torch.arange(3.0).unsqueeze(-1), torch.tensor([0.0, math.nan, 2.0])
    paid = []
    for rows in (slice(None), [0, 2]):
        torch.manual_seed(0)
        with gpytorch.settings.observation_nan_policy("fill"), gpytorch.settings.num_likelihood_samples(20000):
            paid.append(len(labels[rows]) * mll(model(x[rows]), labels[rows]).conditional)
    torch.testing.assert_close(*paid, rtol=0.05, atol=1e-3)


def test_learned_scales_follow_their_task_to_another_dimension():
    points = torch.linspace(0, 1, 3).view(1, 1, 3, 1).repeat(2, 2, 1, 1)
    make = lambda model: IndependentMultitaskVariationalStrategy(
        tighter_gp.TighterVariationalStrategy(
            model,
            points,
            gpytorch.variational.CholeskyVariationalDistribution(3, torch.Size([2, 2])),
            conditional="scalar",
        ),
        num_tasks=2,
        task_dim=-2,
    )
    model = GP(make)
    strategy = model.variational_strategy.base_variational_strategy
    strategy.conditional.m = torch.tensor([[0.9, 0.1], [0.9, 0.1]])  # task, model
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, batch_shape=torch.Size([2]))
    mll = TighterELBO(likelihood, model, 5, combine_terms=False)
    paid = mll(model(torch.rand(5, 1)), torch.randn(2, 5, 2)).conditional
    torch.testing.assert_close(paid, torch.tensor([2 * price(0.9), 2 * price(0.1)]))


# -- q(u), q(f) and the conditional, changed --------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [tighter_gp.evaluate_bound, tighter_gp.diagnose])
def test_a_q_that_was_set_by_hand_is_the_one_that_is_looked_at(look):
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales)), make_noise(0.3)
    mean = torch.linspace(-3, 3, M)
    distribution = model.variational_strategy._variational_distribution
    distribution.variational_mean.data.copy_(mean)
    look(model, likelihood, P.x, P.y)
    assert torch.equal(distribution.variational_mean, mean)


def test_a_frozen_part_of_q_stays_as_it_is():
    model, likelihood = make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales)), make_noise(0.3)
    distribution = model.variational_strategy._variational_distribution
    distribution.variational_mean.requires_grad_(False)
    tighter_gp.fit(model, likelihood, P.x, P.y, steps=2)
    assert torch.equal(distribution.variational_mean, torch.zeros(M))


def test_a_covariance_of_training_is_not_computed_from_other_hyperparameters():
    model = gp()
    q = model(P.x)
    with torch.no_grad():
        model.covar_module.raw_outputscale.add_(1.0)
    with pytest.raises(RuntimeError, match="have changed since this q"):
        _ = q.covariance_matrix


def test_a_conditional_that_is_put_in_later_has_its_price():
    model, likelihood = gp(), make_noise(0.3)
    VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    model.variational_strategy.conditional = tighter_gp.conditionals.ScalarConditional()
    with pytest.raises(TypeError, match=r"only tighter_gp\.TighterELBO subtracts"):
        VariationalELBO(likelihood, model, N)(model(P.x), P.y)
    model.variational_strategy.conditional = tighter_gp.conditionals.OptimalConditional()
    VariationalELBO(likelihood, model, N)(model(P.x), P.y)


# -- data ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["fit", "evaluate_bound"])
@pytest.mark.parametrize("kind", ["sgpr", "collapsed"])
def test_a_column_of_targets_is_refused_by_collapsed_models(look, kind):
    likelihood, kernel = make_noise(0.3), make_kernel("rbf", 1.0, torch.ones(P.x.size(-1)))
    y = P.y.unsqueeze(-1)
    if kind == "sgpr":
        model = CollapsedGP(P.x, y, P.z, kernel, likelihood)
    elif look == "fit":
        pytest.skip("its constructor refuses them")
    else:
        model = tighter_gp.CollapsedGP(P.x, P.y, P.z, kernel, likelihood)
    calls = {
        "fit": lambda: tighter_gp.fit(model, likelihood, steps=1),
        "evaluate_bound": lambda: tighter_gp.evaluate_bound(model, likelihood, P.x, y),
    }
    with pytest.raises(ValueError, match=r"got shape \(|got \(\d+, 1\)"):
        calls[look]()


@pytest.mark.parametrize("look", ["fit", "evaluate_bound"])
def test_the_standard_bound_of_several_outputs_with_a_likelihood_of_one_is_refused(look):
    torch.manual_seed(0)
    x = 4 * torch.rand(40, 2)
    y = (torch.stack([torch.sin(2 * x[:, 0]), x[:, 1] - 2], 1) > 0).double()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    model = tighter_gp.models.MultiOutputRegression(2, x, num_inducing=5, likelihood=likelihood)
    options = {"steps": 1} if look == "fit" else {}
    with pytest.raises(ValueError, match=r"must have one value; got shape .* need TighterELBO"):
        getattr(tighter_gp, look)(model, likelihood, x, y, objective=VariationalELBO, **options)


@pytest.mark.parametrize(("name", "value"), [("steps", 3.5), ("epochs", "3"), ("batch_size", 64.0)])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a whole number; got {value!r}"):
        tighter_gp.fit(gp(), make_noise(0.3), P.x, P.y, **{name: value})


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(context):
    with context(), pytest.raises(RuntimeError, match=r"outside of torch\.no_grad"):
        tighter_gp.fit(gp(), make_noise(0.3), P.x, P.y, steps=1)


def test_inducing_points_of_a_kernel_do_not_share_memory_with_the_inputs():
    x = P.x.clone()
    model = CollapsedGP(x, P.y, x[:M], make_kernel("rbf", 1.0, torch.ones(x.size(-1))), make_noise(0.3))
    model.covar_module.inducing_points.data.add_(1.0)
    assert torch.equal(x, P.x)


def test_masked_values_of_an_array_are_not_read():
    masked = np.ma.array(P.y.numpy(), mask=np.arange(N) == 2)
    with pytest.raises(TypeError, match=r"y is a masked array, and 1 of its values.*filled\(numpy.nan\)"):
        tighter_gp.fit(gp(), make_noise(0.3), P.x.numpy(), masked, steps=1)
    tighter_gp.fit(gp(), make_noise(0.3), P.x.numpy(), np.ma.array(P.y.numpy()), steps=1)


def test_negative_noise_of_test_points_is_refused():
    likelihood = make_noise(torch.ones(N))
    with pytest.raises(ValueError, match="noise= must hold variances; 3 of 3"):
        tighter_gp.predict_y(gp().eval(), likelihood, P.x[:3], noise=-torch.ones(3))


def test_an_exported_module_takes_as_many_columns_as_the_model():
    module = tighter_gp.export_predictor(gp(), make_noise(0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        traced = torch.jit.trace(module, P.x[:4])
    for predictor in (module, traced):
        assert predictor(P.x)[0].shape == (N,)
        with pytest.raises(RuntimeError):
            predictor(P.x[:, :1])


# -- collapsed bounds: derivatives ------------------------------------------------------------------------------------------


def dense_bound(kernel, z, x, y, mean, noise):
    factor = torch.linalg.cholesky(kernel(z).to_dense())
    a = torch.linalg.solve_triangular(factor, kernel(z, x).to_dense(), upper=False)
    residual = kernel(x).to_dense().diagonal() - a.square().sum(0)
    q = torch.distributions.MultivariateNormal(mean, a.mT @ a + noise * torch.eye(len(y)))
    return q.log_prob(y) - 0.5 * torch.log1p(residual / noise).sum()


class Features(gpytorch.kernels.Kernel):
    def __init__(self, net):
        super().__init__()
        self.net, self.base = net, gpytorch.kernels.RBFKernel()

    def forward(self, a, b, diag=False, **kwargs):
        return self.base(self.net(a), self.net(b), diag=diag, **kwargs)


class FeatureMean(gpytorch.means.Mean):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, a):
        return self.net(a).sum(-1)


def toy():
    torch.manual_seed(0)
    return 3 * torch.rand(20, 2), torch.randn(20), torch.tensor(0.1)


def test_a_network_that_mean_and_kernel_share_has_its_gradient_once():
    x, y, noise = toy()
    net = torch.nn.Linear(2, 2)
    model = tighter_gp.CollapsedGP(x, y, x[::5], Features(net), make_noise(noise), FeatureMean(net))
    expected = dense_bound(model.covar_module, model.inducing_points, x, y, model.mean_module(x), noise)
    found, wanted = (torch.autograd.grad(value, net.weight)[0] for value in (model.bound(), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [7, 100])
def test_inducing_points_may_depend_on_the_inputs(chunk_size):
    raw, y, noise = toy()
    weight = torch.randn(2, 2, requires_grad=True)
    kernel = gpytorch.kernels.RBFKernel()
    x = raw @ weight
    found = tighter_gp.collapsed_bound(kernel, x[::5], x, y, noise, chunk_size=chunk_size)
    expected = dense_bound(kernel, x[::5], x, y, torch.zeros(20), noise)
    torch.testing.assert_close(found, expected)
    leaves = [weight, *kernel.parameters()]
    for one, other in zip(
        *(torch.autograd.grad(value, leaves, retain_graph=True) for value in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_hyperparameter_that_is_no_parameter_is_refused():
    x, y, noise = toy()
    kernel = gpytorch.kernels.RBFKernel()
    value = torch.tensor([[0.3]], requires_grad=True)
    del kernel.raw_lengthscale
    kernel.raw_lengthscale = 1.0 * value
    with pytest.raises(TypeError, match="raw_lengthscale of RBFKernel is a tensor with a gradient and no parameter"):
        tighter_gp.collapsed_bound(kernel, x[::5], x, y, noise)
    with torch.no_grad():
        tighter_gp.collapsed_bound(kernel, x[::5], x, y, noise)


def test_a_collapsed_bound_is_not_differentiated_twice():
    x, y, _ = toy()
    raw = torch.tensor(-1.0, requires_grad=True)
    value = tighter_gp.collapsed_bound(gpytorch.kernels.RBFKernel(), x[::5], x, y, torch.nn.functional.softplus(raw))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(value, raw, create_graph=True)


# -- latent variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["StudentTLikelihood", "LaplaceLikelihood"])
def test_densities_and_reconstructions_of_a_gplvm_are_those_of_its_likelihood(kind):
    torch.manual_seed(0)
    likelihood = getattr(gpytorch.likelihoods, kind)()
    likelihood.noise = 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BayesianGPLVM(VariationalLatents(torch.randn(7, 2)), torch.randn(4, 2), 3, likelihood)
    model = model.eval()
    x, y = torch.randn(7, 2), torch.randn(7, 3)
    f = tighter_gp.predict(model, x)
    expected = tighter_gp.log_density(likelihood, f, y.mT).mT
    torch.testing.assert_close(model.log_density(y, x), expected)
    torch.testing.assert_close(model.reconstruct(x).mean, f.mean.mT)


# -- jitter -----------------------------------------------------------------------------------------------------------------


def test_a_noise_near_the_jitter_is_said(caplog):
    likelihood = make_noise(2e-4)
    model = gp(jitter_val=1e-4)
    with caplog.at_level(logging.WARNING, "tighter_gp"):
        tighter_gp.fit(model, likelihood, P.x, P.y, steps=1, lr=1e-9)
        assert "is near the jitter, 0.0001" in caplog.text
        caplog.clear()
        tighter_gp.fit(gp(jitter_val=1e-6), make_noise(0.3), P.x, P.y, steps=1)
        assert "jitter" not in caplog.text


def test_what_the_jitter_costs_is_not_put_down_to_q():
    likelihood = make_noise(1e-3)
    model = gp(jitter_val=1e-3)
    tighter_gp.set_optimal_q(model, likelihood, P.x, P.y)
    found = tighter_gp.diagnose(model, likelihood, P.x, P.y)
    assert found.jitter == pytest.approx(0.5 * N * 1e-3 / 1e-3)
    assert found.current == pytest.approx(found.tighter - found.jitter, rel=1e-6)
    assert "gives away" not in found.advice
    assert "The jitter costs 0.50 nats per point" in found.advice
