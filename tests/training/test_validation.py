"""Scores on held-out data, and early stopping."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihoodWithMissingObs
from gpytorch.models.deep_gps import DeepGP
from linear_operator.utils.errors import NotPSDError

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.training.problems import D, M, N, collapsed, data, parameters, problem, svgp
from tighter_gp.training import fit, mean_nlpd, run, validation


def test_mean_nlpd_is_the_mean_of_gaussian_log_densities_whatever_the_chunk():
    x, y = data()
    model, likelihood = problem(q=(torch.randn(M), 0.5 * torch.eye(M)))
    model.eval()
    q = likelihood(model(x))
    expected = 0.5 * (torch.log(2 * math.pi * q.variance) + (y - q.mean).square() / q.variance).mean()
    model.train()
    for batch_size in (7, 1000):
        assert mean_nlpd(model, likelihood, x, y, batch_size) == pytest.approx(expected.item(), rel=1e-9)
    assert model.training


def test_mean_nlpd_of_several_tasks_is_chunked_alike():
    x, y = data()
    targets = torch.stack([y, -y, 2 * y], -1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)

    class Multitask(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([3]))
            base = tighter_gp.TighterVariationalStrategy(self, x[:M].clone(), q)
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=3))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), make_kernel("rbf", 1.0, torch.ones(D))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Multitask()
    fit(model, likelihood, x, targets, epochs=3, batch_size=16)
    values = [mean_nlpd(model, likelihood, x, targets, size) for size in (9, 100)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_early_stopping_keeps_the_best_parameters():
    x, y = data()
    held = (x[40:], y[40:])
    model, likelihood = problem()
    kept = {}

    def callback(state):
        kept[state.step] = parameters(state.model, state.likelihood)

    # So large a rate that validation scores go up and down.
    history = fit(
        model,
        likelihood,
        x[:40],
        y[:40],
        epochs=200,
        batch_size=10,
        lr=0.5,
        schedule="constant",
        validation=held,
        patience=5,
        callbacks=[callback],
    )
    best_step, best = min(history.validation, key=lambda entry: entry[1])
    assert history.steps < 800
    assert "validation" in history.stopped
    assert history.best_step == best_step
    assert len(history.validation) == history.validation.index((best_step, best)) + 6
    assert torch.equal(parameters(model, likelihood), kept[best_step])
    assert mean_nlpd(model, likelihood, *held) == pytest.approx(best, rel=1e-12)


@pytest.fixture
def scores(monkeypatch):
    """Replaces the scores of the validations: a number each, or an error to raise."""

    def use(*values):
        remaining = iter(values)

        def score(*args, **kwargs):
            value = next(remaining)
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(run, "score", score)

    return use


def test_the_learning_rate_falls_before_patience_ends_a_run(scores, caplog):
    scores(3.0, 2.0, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5)
    factors = []
    schedule = lambda done: factors.append(done) or 1 - done
    with caplog.at_level("INFO", logger="tighter_gp"):
        history = fit(
            *problem(),
            *data(),
            steps=100,
            batch_size=None,
            schedule=schedule,
            natural_gradients=False,
            validation=data(19),
            validate_every=3,
            patience=2,
        )
    # No better score at steps 9 and 12, so that the run has 24 steps; 18 is counted from the best one at 15.
    assert [step for step, _ in history.validation] == [3, 6, 9, 12, 15, 18, 21]
    assert (history.best_step, history.stopped) == (15, "no better validation in 2")
    assert {0.11, 12 / 24, 20 / 24} <= set(factors)
    assert "the learning rate falls from here on, until step 24" in caplog.text


def test_a_run_that_patience_has_shortened_ends_there_and_stays_ended(scores, tmp_path):
    scores(2.0, 3.0, 1.0, 0.5, 0.4)
    path, options = tmp_path / "run.pt", {"validation": data(19), "validate_every": 2, "patience": 1}
    ends = lambda step: step.step == 6
    history = fit(*problem(), *data(), steps=40, checkpoint=path, **options, callbacks=[ends])
    state = torch.load(path, weights_only=True)
    assert (history.steps, state["shortened"]) == (6, 8)
    state["history"]["stopped"], state["finished"] = "", False  # as Ctrl-C leaves it
    torch.save(state, path)
    history = fit(*problem(), *data(), steps=40, checkpoint=path, resume=True, **options)
    assert (history.steps, history.stopped, history.best_step) == (8, "no better validation in 1", 8)
    assert fit(*problem(), *data(), steps=90, checkpoint=path, resume=True, **options).steps == 8


@pytest.mark.parametrize(("steps", "every"), [(30, 3), (150, 3), (400, 8)])
def test_validation_is_once_per_epoch_and_at_most_fifty_times(steps, every):
    history = fit(*problem(), *data(), steps=steps, batch_size=20, validation=data(19))
    assert [step for step, _ in history.validation][:2] == [every, 2 * every]


def test_without_patience_validation_is_only_recorded():
    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=9, batch_size=16, validation=(x, y), validate_every=4)
    assert [step for step, _ in history.validation] == [4, 8, 9]
    assert mean_nlpd(model, likelihood, x, y) == pytest.approx(history.validation[-1][1], rel=1e-12)


def test_a_validation_that_fails_numerically_is_nan_in_the_history_and_training_goes_on(scores, caplog):
    scores(1.0, NotPSDError("K_ZZ is not positive definite"), 0.5)
    history = fit(*problem(), *data(), steps=6, validation=data(19), validate_every=2)
    assert history.steps == 6
    assert [step for step, _ in history.validation] == [2, 4, 6]
    assert [math.isnan(score) for _, score in history.validation] == [False, True, False]
    assert "the validation after 4 steps failed: K_ZZ is not positive definite" in caplog.text


def test_a_score_of_nan_is_never_the_best(scores):
    scores(math.nan, 2.0, 1.0, math.nan, -math.inf, 3.0)
    kept = {}
    record = lambda step: kept.update({step.step: parameters(step.model, step.likelihood)})
    model, likelihood = problem()
    history = fit(
        model, likelihood, *data(), steps=6, validation=data(19), validate_every=1, patience=9, callbacks=[record]
    )
    assert history.best_step == 3
    assert torch.equal(parameters(model, likelihood), kept[3])


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ((math.nan,) * 9, 3),
        ((math.nan, 1.0, math.nan, math.nan, 2.0, 0.0), 5),
        ((math.nan, math.nan, 1.0, 0.5, 0.4), 5),
    ],
)
def test_scores_of_nan_count_towards_patience(scores, values, steps):
    scores(*values)
    history = fit(*problem(), *data(), steps=5, validation=data(19), validate_every=1, patience=3)
    assert history.steps == steps
    assert bool(history.stopped) == (values[4:5] != (0.4,))


@pytest.mark.parametrize("strategy", ["tighter", "wrapped"])
def test_targets_that_would_broadcast_are_refused_by_the_score(strategy):
    x, y = data()
    model, likelihood = problem() if strategy == "tighter" else svgp()
    assert math.isfinite(mean_nlpd(model, likelihood, x, y))
    with pytest.raises(ValueError, match=r"must have shape \(53,\) to fit q\(f\) with N = 53; got \(53, 1\)"):
        mean_nlpd(model, likelihood, x, y.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"must have shape \(53,\) to fit q\(f\) with N = 53; got \(1, 53\)"):
        mean_nlpd(model, likelihood, x, y.unsqueeze(0))
    with pytest.raises(ValueError, match=r"a held-out target for each of the 53 rows of x; got \(1,\)"):
        mean_nlpd(model, likelihood, x, y[:1])
    with pytest.raises(ValueError, match=r"noise= must have one value per held-out point, ... x 53; got \(52,\)"):
        mean_nlpd(model, likelihood, x, y, noise=torch.ones(52))


def test_a_label_per_point_fits_several_functions_but_not_several_gaussian_outputs():
    x, y = data(4)

    class Three(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(2, batch_shape=torch.Size([3]))
            base = tighter_gp.TighterVariationalStrategy(self, x[:2].clone(), q, conditional="beta")
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=3))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Three()
    softmax = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    assert math.isfinite(mean_nlpd(model, softmax, x, torch.tensor([0, 1, 2, 0])))
    with pytest.raises(ValueError, match=r"must have shape \(4,\) .*; got \(4, 3\)\. .* pass y\.argmax\(-1\)"):
        mean_nlpd(model, softmax, x, torch.eye(3)[torch.tensor([0, 1, 2, 0])])
    # As many points as outputs: targets would broadcast.
    gaussian = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)
    with pytest.raises(ValueError, match=r"must have shape \(3, 3\) to fit"):
        mean_nlpd(model, gaussian, x[:3], y[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y.unsqueeze(-1)), r"shape \(19,\) .* N = 19; got \(19, 1\)\..* squeeze a trailing dimension"),
        (lambda x, y: (x, y, {"noise": -torch.ones(19)}), "noise= must hold variances; 19 of 19 values are negative"),
        (lambda x, y: (x, y[:-1]), "a held-out target for each of the 19 rows"),
        (lambda x, y: (x[:0], y[:0]), "a held-out target for each of the 0 rows"),
        (lambda x, y: (torch.where(x > 2.5, math.inf, x), y), "values of the validation inputs are NaN or infinite"),
        (lambda x, y: (x, torch.where(y > 0.5, math.nan, y)), "values of the validation targets are NaN or infinite"),
        (lambda x, y: (x, y, {"noise": torch.ones(18)}), "one value per held-out point, ... x 19"),
        (lambda x, y: (x[:, :1], y), "Inputs must have shape"),
    ],
)
def test_held_out_data_that_do_not_fit_are_refused_before_the_first_step(change, message):
    model, likelihood = problem()
    seen = []
    with pytest.raises(ValueError, match=message):
        fit(
            model,
            likelihood,
            *data(),
            steps=2,
            validation=change(*data(19)),
            validate_every=2,
            callbacks=[seen.append],
        )
    assert seen == []


@pytest.mark.parametrize("held", [data(19)[0], data(19)[:1], (data(19)[0].tolist(), data(19)[1]), (*data(19), 0.1)])
def test_held_out_data_must_be_tensors_or_arrays(held):
    with pytest.raises(TypeError, match="validation must be"):
        fit(*problem(), *data(), steps=2, validation=held)


def test_fixed_noise_needs_the_noise_of_held_out_points_and_uses_it():
    x, y = data()
    held_x, held_y = data(19)
    model, _ = problem()
    likelihood = make_noise(torch.linspace(0.05, 2.0, N))
    with pytest.raises(ValueError, match=r'validation=\(x, y, \{"noise": noise\}\)'):
        fit(model, likelihood, x, y, steps=1, validation=(held_x, held_y))
    noise = torch.linspace(0.5, 0.1, 19)
    history = fit(model, likelihood, x, y, steps=3, validation=(held_x, held_y, {"noise": noise}))
    q = tighter_gp.predict(model, held_x)
    expected = -torch.distributions.Normal(q.mean, (q.variance + noise).sqrt()).log_prob(held_y).mean()
    assert history.validation[-1][1] == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs is replaced:DeprecationWarning")
def test_nan_stays_a_missing_observation_in_training_and_validation():
    x, y = data()
    missing = torch.where(torch.arange(N) % 4 == 0, math.nan, y)
    held_x, held_y = data(19)
    held_y[3] = math.nan
    curves = []
    for policy in ("ignore", "fill", "mask"):
        model, likelihood = problem()
        if policy == "ignore":
            likelihood = GaussianLikelihoodWithMissingObs(noise_constraint=gpytorch.constraints.Positive())
            likelihood.noise = 0.2
        with gpytorch.settings.observation_nan_policy(policy):
            history = fit(model, likelihood, x, missing, steps=4, batch_size=16, validation=(held_x, held_y))
            assert math.isfinite(history.validation[-1][1])
            curves.append(torch.tensor(history.loss))
            with pytest.raises(ValueError, match="1 of 53 values of y are NaN or infinite"):
                fit(model, likelihood, x, torch.where(torch.arange(N) == 5, math.inf, missing), steps=1)
    torch.testing.assert_close(curves[0], curves[1])
    torch.testing.assert_close(curves[0], curves[2])


def test_a_collapsed_model_is_validated_too():
    history = fit(*collapsed(), *data(), steps=4, validation=data(19), validate_every=1)
    assert all(math.isfinite(score) for _, score in history.validation)
    with pytest.raises(ValueError, match="squeeze a trailing dimension"):
        fit(*collapsed(), *data(), steps=1, validation=(data(19)[0], data(19)[1].unsqueeze(-1)))


# ---------------------------------------------------------------------------------------------------------------------
# Right for every likelihood
# ---------------------------------------------------------------------------------------------------------------------


def test_learned_noise_is_part_of_the_score_and_given_noise_counts_once():
    x, y = data()
    held_x, held_y = data(19)
    model, _ = problem()
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((N,), 0.4), learn_additional_noise=True)
    likelihood.second_noise = 0.6
    noise = torch.linspace(0.5, 0.1, 19)
    history = fit(model, likelihood, x, y, steps=2, validation=(held_x, held_y, {"noise": noise.numpy()}))
    q = tighter_gp.predict(model, held_x)
    total = q.variance + noise + likelihood.second_noise
    expected = 0.5 * (torch.log(2 * math.pi * total) + (held_y - q.mean).square() / total).mean()
    assert history.validation[-1][1] == pytest.approx(expected.item(), rel=1e-10)


def multitask(num_tasks, wrap, conditional="optimal"):
    x, _ = data()

    class Multitask(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([2]))
            base = tighter_gp.TighterVariationalStrategy(self, x[:M].clone(), q, conditional=conditional)
            super().__init__(wrap(base, num_tasks))
            shape = torch.Size([2])
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel(batch_shape=shape), batch_shape=shape
            )

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Multitask()
    model.variational_strategy.base_variational_strategy._variational_distribution.variational_mean.data.normal_()
    model.variational_strategy.base_variational_strategy.variational_params_initialized.fill_(1)
    return model


def lmc(base, num_tasks):
    return gpytorch.variational.LMCVariationalStrategy(base, num_tasks=num_tasks, num_latents=2, latent_dim=-1)


def independent(base, num_tasks):
    return gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=num_tasks)


def test_the_score_of_a_softmax_does_not_depend_on_the_number_of_points():
    """Equal points, as many as classes or not, alone and in the last chunk."""
    x, _ = data()
    model = multitask(2, independent, "beta")
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=2, num_classes=2, mixing_weights=False)
    point = x[7:8] + 0.05
    scores = [
        mean_nlpd(model, likelihood, point.expand(n, -1), torch.ones(n, dtype=torch.long), batch_size)
        for n, batch_size in ((1, 9), (2, 9), (3, 9), (6, 4), (7, 5))
    ]
    assert scores == pytest.approx([scores[0]] * 5, rel=1e-9)


@pytest.mark.parametrize("policy", ["fill", "mask"])
@pytest.mark.parametrize("wrap", [independent, lmc])
def test_missing_tasks_are_left_out_and_the_mean_is_over_points_with_anything_observed(wrap, policy):
    num_tasks = 2 if wrap is independent else 3
    x, _ = data(11)
    model = multitask(num_tasks, wrap)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=num_tasks)
    y = torch.randn(11, num_tasks, generator=torch.Generator().manual_seed(2))
    y[2, 0] = y[5, 1] = math.nan
    y[7] = math.nan
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for n in range(11):  # one point at a time: a dense covariance of its tasks
            seen = ~torch.isnan(y[n])
            if not bool(seen.any()):
                continue
            q = likelihood(model(x[n : n + 1]))
            covariance = q.covariance_matrix[seen][:, seen]
            normal = torch.distributions.MultivariateNormal(q.mean[0, seen], covariance)
            total, count = total - normal.log_prob(y[n, seen]).item(), count + 1
    with gpytorch.settings.observation_nan_policy(policy):
        for batch_size in (4, 100):
            found = mean_nlpd(model, likelihood, x, y, batch_size)
            assert found == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("wrap", [independent, lmc])
def test_the_score_of_several_tasks_is_the_mean_of_the_predictions_densities(wrap):
    num_tasks = 2 if wrap is independent else 3
    x, _ = data(11)
    model, likelihood = (
        multitask(num_tasks, wrap),
        gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=num_tasks),
    )
    y = torch.randn(11, num_tasks, generator=torch.Generator().manual_seed(2))
    density = tighter_gp.predict_y(model, likelihood, x).log_prob
    assert mean_nlpd(model, likelihood, x, y, 4) == pytest.approx(-density(y).mean().item(), rel=1e-6)
    y[2, 0] = y[7] = math.nan
    with gpytorch.settings.observation_nan_policy("fill"):
        assert mean_nlpd(model, likelihood, x, y, 4) == pytest.approx(-density(y).nanmean().item(), rel=1e-6)


def test_a_density_of_ones_own_for_each_task_is_summed_over_them():
    class PerTask(gpytorch.likelihoods.MultitaskGaussianLikelihood):
        def log_marginal(self, y, q, **kwargs):
            return torch.distributions.Normal(q.mean, 0.7, validate_args=False).log_prob(y)

    x, _ = data(11)
    model = multitask(2, independent)
    y = torch.randn(11, 2, generator=torch.Generator().manual_seed(2))
    y[2, 0] = y[7] = math.nan
    density = torch.distributions.Normal(tighter_gp.predict(model, x).mean, 0.7, validate_args=False).log_prob(y)
    with gpytorch.settings.observation_nan_policy("fill"):
        found = mean_nlpd(model, PerTask(num_tasks=2), x, y, 4)
    assert found == pytest.approx(-density.nansum().item() / 10, rel=1e-6)


def test_a_density_that_is_no_number_is_a_score_that_is_none(monkeypatch):
    model, likelihood = problem()
    monkeypatch.setattr(validation, "log_density", lambda likelihood, q, y: torch.full_like(y, math.nan))
    assert math.isnan(mean_nlpd(model, likelihood, *data()))


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs is replaced:DeprecationWarning")
@pytest.mark.parametrize("policy", ["ignore", "fill", "mask"])
def test_missing_targets_of_one_output_are_left_out_of_the_mean(policy):
    x, y = data()
    model, likelihood = problem(q=(torch.randn(M), 0.5 * torch.eye(M)))
    missing = torch.arange(N) % 3 == 0
    expected = mean_nlpd(model, likelihood, x[~missing], y[~missing])
    if policy == "ignore":
        likelihood = GaussianLikelihoodWithMissingObs(noise_constraint=gpytorch.constraints.Positive())
        likelihood.noise = 0.2
    with gpytorch.settings.observation_nan_policy(policy):
        found = mean_nlpd(model, likelihood, x, torch.where(missing, math.nan, y), 10)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["fill", "mask"])
@pytest.mark.parametrize(
    "kind", [tighter_gp.likelihoods.BernoulliLogitLikelihood, gpytorch.likelihoods.BernoulliLikelihood]
)
def test_a_missing_label_is_no_class(kind, policy):
    x, y = data()
    model, _ = problem(q=(torch.randn(M), 0.5 * torch.eye(M)), conditional="beta")
    labels, missing = (y > 0).double(), torch.arange(N) % 3 == 0
    expected = mean_nlpd(model, kind(), x[~missing], labels[~missing])
    with gpytorch.settings.observation_nan_policy(policy):
        found = mean_nlpd(model, kind(), x, torch.where(missing, math.nan, labels))
    assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="are NaN or infinite"):
        mean_nlpd(model, kind(), x, torch.where(missing, math.nan, labels))


def test_held_out_arrays_are_scored_as_tensors():
    x, y = data()
    model, likelihood = problem()
    assert mean_nlpd(model, likelihood, x.numpy(), y.numpy()) == mean_nlpd(model, likelihood, x, y)


def test_a_batch_of_models_has_the_mean_of_its_scores():
    x, y = data()
    shape = torch.Size([3])
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=shape), batch_shape=shape)
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    q = (torch.randn(3, M), torch.eye(M).expand(3, M, M))
    model, likelihood = make_gp(x[:M].clone(), kernel, q, batch_shape=shape), make_noise(0.2)
    targets = torch.stack([y, -y, 2 * y])
    with torch.no_grad():
        q_y = likelihood(model.eval()(x))
    density = torch.distributions.Normal(q_y.mean, q_y.variance.sqrt()).log_prob
    assert mean_nlpd(model, likelihood, x, targets) == pytest.approx(-density(targets).mean().item(), rel=1e-8)
    assert mean_nlpd(model, likelihood, x, y) == pytest.approx(-density(y).mean().item(), rel=1e-8)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_held_out_data_on_another_device_are_named(place):
    held = [*data(19), torch.ones(19)]
    held[place] = held[place].to("meta")
    with pytest.raises(ValueError, match=rf"the held-out {('x', 'y', 'noise')[place]} is on meta, the model is on cpu"):
        fit(*problem(), *data(), steps=1, validation=(held[0], held[1], {"noise": held[2]}))


def test_an_unknown_argument_of_the_held_out_points_is_refused():
    with pytest.raises(TypeError, match="unknown argument 'noises'"):
        fit(*problem(), *data(), steps=1, validation=(*data(19), {"noises": torch.ones(19)}))


def test_the_density_of_a_deep_gp_is_the_mean_over_its_samples():
    x, y = data()
    means = torch.randn(4, N)

    class Deep(DeepGP):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            rows = (x[:, None] == data()[0][None]).all(-1).long().argmax(-1)
            return gpytorch.distributions.MultivariateNormal(means[:, rows], 0.3 * torch.eye(len(x)).expand(4, -1, -1))

    density = torch.distributions.Normal(means, math.sqrt(0.3 + 0.2)).log_prob(y).exp().mean(0).log()
    assert mean_nlpd(Deep(), make_noise(0.2), x, y, 20) == pytest.approx(-density.mean().item(), rel=1e-9)


def test_a_collapsed_model_passes_over_its_data_once_per_score(monkeypatch):
    calls = []
    monkeypatch.setattr(
        validation, "predict", lambda *args, **kwargs: calls.append(0) or tighter_gp.predict(*args, **kwargs)
    )
    model, likelihood = collapsed()
    mean_nlpd(model, likelihood, *data(19), batch_size=4)
    assert len(calls) == 1


def test_values_in_a_graph_are_looked_at_without_a_warning():
    validation.check_finite("x", 1 * torch.ones(3, requires_grad=True))
