"""What a user hands over or changes and was passed over silently, each with the case that showed it."""

from __future__ import annotations

import logging
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import tighter_gp
from tests.tools.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import double_problem, randomize_q
from tighter_gp import TighterELBO
from tighter_gp.gplvm import BayesianGPLVM, VariationalLatents
from tighter_gp.likelihoods.properties import is_log_concave

P = double_problem()
N, M = len(P.x), len(P.z)


def gp(**kwargs):
    return randomize_q(make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), **kwargs))


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


# -- missing labels, permuted tasks --------------------------------------------------------------------------------------


# -- q(u), q(f) and the conditional, changed --------------------------------------------------------------------------------


def test_a_covariance_of_training_is_not_computed_from_other_hyperparameters():
    model = gp()
    q = model(P.x)
    with torch.no_grad():
        model.covar_module.raw_outputscale.add_(1.0)
    with pytest.raises(RuntimeError, match="have changed since this q"):
        _ = q.covariance_matrix


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
