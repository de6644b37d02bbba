"""Which arguments somebody uses."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch import likelihoods

import tighter_gp
from tests.training.problems import N, collapsed, data, problem
from tighter_gp.arguments import argument_names, check_arguments


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("learning_rate", "lr"),
        ("num_epochs", "epochs"),
        ("epoch", "epochs"),
        ("verbose", "progress"),
        ("noises", "noise"),
        ("batchsize", "batch_size"),
        ("n_steps", "steps"),
        ("random_seed", "seed"),
    ],
)
def test_a_misspelt_argument_of_fit_is_named_with_the_nearest_real_one(name, nearest):
    model, likelihood = problem()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    value = torch.ones(N - 1) if name == "noises" else 1
    with pytest.raises(TypeError, match=rf"fit\(\) got an unknown argument '{name}'; did you mean '{nearest}'\?"):
        tighter_gp.fit(model, likelihood, *data(), steps=1, **{name: value})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_argument_without_a_like_is_refused_too():
    with pytest.raises(TypeError, match=r"unknown argument 'weight_decay'; known are model, .*, noise\. Gaussian"):
        tighter_gp.fit(*problem(), *data(), steps=1, weight_decay=0.1)


def test_noise_is_for_gaussian_likelihoods():
    x, y = data()
    noise = torch.full((N,), 0.3)
    assert tighter_gp.fit(*problem(), x, y, steps=1, noise=noise).steps == 1
    assert tighter_gp.fit(*problem(), x, y, steps=1, noise=noise.numpy()).steps == 1
    model, _ = problem(conditional="beta")
    with pytest.raises(TypeError, match=r"unknown argument 'noise'.* PoissonLikelihood takes per point: nothing"):
        tighter_gp.fit(model, tighter_gp.likelihoods.PoissonLikelihood(), x, y.abs().round(), steps=1, noise=noise)
    assert argument_names(likelihoods.MultitaskGaussianLikelihood(num_tasks=2)) == set()
    assert argument_names(likelihoods.HadamardGaussianLikelihood(num_tasks=2)) == {"tasks"}
    assert argument_names(likelihoods.FixedNoiseGaussianLikelihood(noise)) == {"noise"}


def test_noise_given_as_an_array_is_the_tensor():
    x, y = data()
    noise = torch.linspace(0.1, 1.0, N)
    losses = [tighter_gp.fit(*problem(), x, y, steps=4, batch_size=16, noise=n).loss for n in (noise, noise.numpy())]
    assert losses[0] == losses[1]


def test_a_collapsed_model_has_no_place_for_noise():
    with pytest.raises(TypeError, match=r"unknown argument 'noise'; .* A CollapsedGP takes per point: nothing\."):
        tighter_gp.fit(*collapsed(), *data(), steps=1, noise=torch.ones(N))


class Counted(likelihoods.GaussianLikelihood):
    is_log_concave = True

    def expected_log_prob(self, target, input, *params, **kwargs):
        weights = kwargs.get("weights", 1.0)
        return weights * super().expected_log_prob(target, input)


class Named(likelihoods.GaussianLikelihood):
    def forward(self, function_samples, *params, exposure=None, **kwargs):
        return super().forward(function_samples, *params, **kwargs)


class Declared(likelihoods.PoissonLikelihood):
    argument_names = ("exposure",)


class Handing(likelihoods.PoissonLikelihood):
    def forward(self, function_samples, *args, **kwargs):
        return super().forward(function_samples, *args, **kwargs)


@pytest.mark.parametrize(
    ("likelihood", "names"),
    [
        (Counted, {"noise", "weights"}),
        (Named, {"noise", "exposure"}),
        (Declared, {"exposure"}),
        (Handing, set()),
    ],
)
def test_a_likelihood_of_ones_own_says_what_it_takes(likelihood, names):
    assert argument_names(likelihood()) == names


def test_an_objective_of_ones_own_says_what_it_takes():
    class Weighted(tighter_gp.TighterELBO):
        def forward(self, q, target, weight=None, **kwargs):
            return super().forward(q, target, **kwargs)

    model, likelihood = problem()
    assert argument_names(likelihood, Weighted(likelihood, model, N)) == {"noise", "weight"}
    assert argument_names(likelihood, tighter_gp.TighterELBO(likelihood, model, N)) == {"noise"}
    assert argument_names(likelihood, gpytorch.mlls.VariationalELBO(likelihood, model, N)) == {"noise"}
    assert argument_names(likelihood, lambda q, y, *, weight: 0.0) == {"noise", "weight"}
    assert tighter_gp.fit(model, likelihood, *data(), objective=Weighted, steps=1, weight=torch.ones(N)).steps == 1


def test_a_mask_is_for_latent_variable_models():
    targets = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(30, 4, generator=torch.Generator().manual_seed(1)) > 0.2
    losses = []
    for y, options in ((targets, {"mask": mask}), (torch.where(mask, targets, torch.nan), {})):
        model = tighter_gp.gplvm.BayesianGPLVM.from_data(
            targets, latent_dim=2, num_inducing=7, generator=torch.Generator().manual_seed(0)
        )
        history = tighter_gp.fit(
            model,
            model.likelihood,
            None,
            y,
            objective=tighter_gp.gplvm.LatentVariableELBO,
            steps=5,
            batch_size=8,
            **options,
        )
        losses.append(history.loss)
    assert losses[0] == losses[1]


def test_the_function_that_was_called_is_named():
    def evaluate(model, x, batch_size=3, **kwargs): ...

    with pytest.raises(TypeError, match=r"evaluate\(\) got an unknown argument 'batchsize'; did you mean 'batch_size'"):
        check_arguments({"batchsize": 2}, likelihoods.GaussianLikelihood(), function=evaluate)


def test_noise_is_one_variance_per_point():
    with pytest.raises(TypeError, match="one variance per point; got float"):
        tighter_gp.fit(*problem(), *data(), steps=1, noise=0.1)
    with pytest.raises(TypeError, match="one variance per point; got float"):
        tighter_gp.fit(*problem(), *data(), steps=1, validation=(*data(19), {"noise": 0.1}))


def test_without_anything_near_it_says_what_there_is():
    with pytest.raises(
        TypeError, match=r"an objective got an unknown argument 'x'\. BernoulliLikelihood takes per point"
    ):
        check_arguments(["x"], likelihoods.BernoulliLikelihood())
    assert argument_names(likelihoods.BernoulliLikelihood(), dict) == set()


def test_an_objective_called_directly_refuses_what_nobody_uses():
    (x, y), (model, likelihood) = data(), problem()
    for name, value in (("nois", 0.1), ("noises", torch.ones(N)), ("wieght", 1.0)):
        with pytest.raises(TypeError, match=f"an objective got an unknown argument '{name}'.*takes per point: noise"):
            tighter_gp.TighterELBO(likelihood, model, N)(model(x), y, **{name: value})
    own = Counted()
    with pytest.raises(TypeError, match="unknown argument 'weight'; did you mean 'weights'"):
        tighter_gp.TighterELBO(own, model, N)(model(x), y, weight=2.0)
    likelihood = likelihoods.FixedNoiseGaussianLikelihood(torch.ones(3))
    value = tighter_gp.TighterELBO(likelihood, model, N)(model(x), y, noise=torch.ones(N))
    assert torch.isfinite(value)


@pytest.mark.parametrize("objective", [tighter_gp.TighterELBO, gpytorch.mlls.VariationalELBO])
def test_the_objective_of_a_latent_variable_model_refuses_what_nobody_uses(objective):
    targets = torch.randn(11, 3)
    model = tighter_gp.gplvm.BayesianGPLVM.from_data(targets, latent_dim=2, num_inducing=4)
    mll = model.objective(11, objective=objective)
    with pytest.raises(TypeError, match="unknown argument 'num_sample'"):
        mll(None, targets, num_sample=3)
