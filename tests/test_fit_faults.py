"""What goes wrong around the steps of ``fit``: validation, loaders, undoing, interrupts, checkpoints and bad data."""

from __future__ import annotations

import copy
import math
import os

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihoodWithMissingObs
from gpytorch.variational import NaturalVariationalDistribution, TrilNaturalVariationalDistribution
from linear_operator.utils.errors import NotPSDError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tighter_gp
from tests.test_training import (
    Interrupted,
    M,
    N,
    collapsed,
    data,
    failing_objective,
    interrupt_at,
    make_noise,
    parameters,
    problem,
)
from tighter_gp.gplvm import BayesianGPLVM, LatentVariableELBO
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit, mean_nlpd
from tighter_gp.training import run
from tighter_gp.training.lbfgs import FullBatchLBFGS
from tighter_gp.training.loaders import LoaderBatches
from tighter_gp.training.optimizers import Optimizers
from tighter_gp.training.problem import Problem


def state(*modules):
    return {f"{i}.{name}": value.clone() for i, m in enumerate(modules) for name, value in m.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------------------------------------------------


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


def svgp():
    """A model whose score is computed in chunks of ``model(x)``."""
    x, _ = data()

    class SVGP(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M)
            super().__init__(gpytorch.variational.VariationalStrategy(self, x[:M].clone(), q))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return SVGP(), make_noise(0.2)


def test_a_label_a_point_fits_several_functions_but_not_several_gaussian_outputs():
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
    # As many points as outputs: targets would broadcast.
    gaussian = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)
    with pytest.raises(ValueError, match=r"must have shape \(3, 3\) to fit"):
        mean_nlpd(model, gaussian, x[:3], y[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y.unsqueeze(-1)), "squeeze a trailing dimension"),
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
# Loaders
# ---------------------------------------------------------------------------------------------------------------------


class EverySecond(Sampler):
    """Every second point of a dataset, as a user might write it."""

    def __init__(self, num_data):
        self.rows = range(0, num_data, 2)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


@pytest.mark.parametrize(
    ("options", "visited"),
    [
        ({"sampler": SubsetRandomSampler(range(20))}, 20),
        ({"sampler": EverySecond(N)}, 27),
        ({"batch_sampler": BatchSampler(SubsetRandomSampler(range(20)), 10, False)}, 20),
        ({"sampler": RandomSampler(range(20))}, 20),
        # Each epoch is a draw from all points, however long it is.
        ({"sampler": RandomSampler(range(N), num_samples=20)}, N),
        ({"sampler": RandomSampler(range(N), replacement=True, num_samples=200)}, N),
        ({"sampler": WeightedRandomSampler(torch.ones(N), 20)}, N),
        ({"shuffle": True}, N),
        ({}, N),
        ({"sampler": SubsetRandomSampler([*range(N), *range(N)])}, N),
        ({"batch_sampler": [[1, 2], [3, 4]]}, 4),
    ],
)
def test_the_training_points_of_a_loader_are_those_its_sampler_visits(options, visited):
    batches = {} if "batch_sampler" in options else {"batch_size": 10}
    loader = DataLoader(TensorDataset(*data()), **batches, **options)
    assert LoaderBatches(loader, 0, torch.zeros(())).num_data == visited
    seen = []

    def objective(likelihood, model, num_data):
        seen.append(num_data)
        return tighter_gp.TighterELBO(likelihood, model, num_data)

    fit(*problem(), loader, steps=1, objective=objective)
    assert seen == [visited]


def test_a_loader_over_a_part_of_a_dataset_trains_as_that_part_does():
    x, y = data()
    rows = torch.arange(3, 23)
    loader = DataLoader(TensorDataset(x, y), batch_size=20, sampler=SubsetRandomSampler(rows.tolist()))
    losses = [
        fit(*problem(q=(torch.zeros(M), torch.eye(M))), *arrays, steps=10, lr=0.05).loss
        for arrays in ((loader,), (x[rows], y[rows]))
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-9, atol=1e-9)


def test_fixed_noise_follows_the_index_of_a_loader():
    x, y = data()
    likelihood = make_noise(torch.linspace(0.05, 2.0, N))
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    shuffled = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=N, shuffle=True)
    losses = []
    for arrays in ((shuffled,), (x, y)):
        history = fit(copy.deepcopy(model), copy.deepcopy(likelihood), *arrays, steps=1)
        losses.append(history.loss[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    small = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=16, shuffle=True)
    assert fit(model, likelihood, small, epochs=2).steps == 8


def test_fixed_noise_without_an_index_is_refused():
    x, y = data()
    likelihood = make_noise(torch.linspace(0.05, 2.0, N))
    with pytest.raises(ValueError, match=r"let the DataLoader yield \(x, y, index\)"):
        fit(problem()[0], likelihood, DataLoader(TensorDataset(x, y), batch_size=N, shuffle=True), epochs=1)
    loader = DataLoader(TensorDataset(x, y, torch.arange(N) + 1), batch_size=N)
    with pytest.raises(IndexError, match=r"index must lie in 0\.\.52 for 53 noise variances"):
        fit(problem()[0], likelihood, loader, epochs=1)


class Once(IterableDataset):
    """Wraps an iterator, which a second epoch finds empty."""

    def __init__(self, num_rows):
        x, y = data()
        self.rows = iter(list(zip(x[:num_rows], y[:num_rows], strict=True)))

    def __iter__(self):
        return self.rows

    def __len__(self):
        return N


@pytest.mark.parametrize(("num_rows", "epoch"), [(0, 0), (N, 1)])
def test_an_epoch_without_a_batch_is_an_error(num_rows, epoch):
    with pytest.raises(ValueError, match=f"no batch in epoch {epoch} and promised 4; its dataset must start anew"):
        fit(*problem(), DataLoader(Once(num_rows), batch_size=16), epochs=3)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_generator_of_a_loader_is_left_as_it_was(interrupted):
    of_loader, of_sampler = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    before = of_loader.get_state(), of_sampler.get_state()
    sampler = RandomSampler(range(N), generator=of_sampler)
    loader = DataLoader(TensorDataset(*data()), batch_size=16, sampler=sampler, generator=of_loader)
    try:
        fit(*problem(), loader, epochs=2, callbacks=[interrupt_at(3)] if interrupted else [])
    except Interrupted:
        assert interrupted
    assert torch.equal(of_loader.get_state(), before[0])
    assert torch.equal(of_sampler.get_state(), before[1])


# ---------------------------------------------------------------------------------------------------------------------
# Undoing, interrupts, and runs in which nothing succeeds
# ---------------------------------------------------------------------------------------------------------------------


def per_point():
    return (*problem(conditional=tighter_gp.PerPoint(N)), *data(), {})


def gplvm():
    targets = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
    model = BayesianGPLVM.from_data(targets, latent_dim=2, num_inducing=7, generator=torch.Generator().manual_seed(0))
    return model, model.likelihood, None, targets, {"objective": LatentVariableELBO}


@pytest.fixture
def faults(monkeypatch):
    """Makes the losses of chosen calls fail; the first call sets q(u), the second is step 0."""

    def at(*calls):
        original, count = Problem.loss, iter(range(10**6))

        def loss(self, batch):
            if next(count) in calls:
                raise NotPSDError("injected")
            return original(self, batch)

        monkeypatch.setattr(Problem, "loss", loss)

    return at


@pytest.mark.parametrize("make", [per_point, gplvm])
def test_undoing_an_update_restores_the_rows_of_tables_with_sparse_gradients(make, faults):
    faults(4, 5)
    model, likelihood, x, y, options = make()
    states = []
    record = lambda step: states.append(state(model, likelihood))
    history = fit(model, likelihood, x, y, steps=7, batch_size=16, lr=0.1, callbacks=[record], **options)
    assert history.skipped[1] == (4, "injected The last update was undone.")
    changed = [name for name, value in states[1].items() if not torch.equal(value, states[2][name])]
    assert any("raw_m" in name or "latents" in name for name in changed)
    assert same(states[4], states[1])
    assert not same(states[5], states[4])


def test_a_last_update_is_undone_in_the_rows_of_a_table_too(faults):
    faults(4)  # the look at the bound after three steps
    model, likelihood, x, y, _ = per_point()
    states = []
    fit(
        model,
        likelihood,
        x,
        y,
        steps=3,
        batch_size=16,
        lr=0.1,
        callbacks=[lambda step: states.append(state(model, likelihood))],
    )
    assert same(state(model, likelihood), states[1])


def test_rows_to_restore_are_part_of_a_checkpoint(tmp_path, monkeypatch):
    """Interrupted between the two failures of which the second undoes the update before the first."""
    results, path = [], tmp_path / "run.pt"
    loss, seed_step, current = Problem.loss, Problem.seed_step, [0]

    def remember(self, step):
        current[0] = step
        seed_step(self, step)

    def fail(self, batch):
        if current[0] in {3, 4}:
            raise NotPSDError("injected")
        return loss(self, batch)

    monkeypatch.setattr(Problem, "seed_step", remember)
    monkeypatch.setattr(Problem, "loss", fail)
    for stop in (False, True):
        options = {"steps": 8, "batch_size": 16, "lr": 0.1}
        if stop:
            options |= {"checkpoint": path, "checkpoint_every": 1}
            with pytest.raises(Interrupted):
                fit(*per_point()[:4], callbacks=[interrupt_at(5)], **options)
            assert len(checkpoints.load(path, torch.device("cpu"))["history"]["loss"]) == 4
        model, likelihood, x, y, _ = per_point()
        history = fit(model, likelihood, x, y, resume=stop, **options)
        results.append((parameters(model, likelihood), history.skipped))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_line_search_that_is_interrupted_leaves_the_parameters_it_started_from(error):
    point = torch.nn.Parameter(torch.tensor([3.0, -1.0]))
    tried = []

    def evaluate():
        tried.append(point.detach().clone())
        if len(tried) == 2:
            raise error
        loss = point.square().square().sum()
        loss.backward()
        return loss

    lbfgs = FullBatchLBFGS([point], evaluate, (NotPSDError,))
    with pytest.raises(error):
        lbfgs.step()
    assert torch.equal(point.detach(), tried[0])
    assert not torch.equal(*tried)


def test_an_interrupted_run_of_lbfgs_leaves_an_accepted_point(monkeypatch):
    original, seen = Problem.loss, []

    def loss(self, batch):
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.append(original(self, batch))
        return seen[-1]

    monkeypatch.setattr(Problem, "loss", loss)
    model, likelihood = problem()
    accepted = []
    record = lambda step: accepted.append(parameters(model, likelihood))
    with pytest.raises(KeyboardInterrupt):
        fit(model, likelihood, *data(), steps=50, optimizer="lbfgs", callbacks=[record])
    assert torch.equal(parameters(model, likelihood), accepted[-1])


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_run_in_which_no_step_succeeds_raises_at_its_end(optimizer, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(RuntimeError, match=r"3 steps in a row failed, the last, step 2, with: K_ZZ is not") as caught:
        fit(
            *problem(),
            *data(),
            objective=failing_objective(set(range(99)), "raise"),
            steps=3,
            optimizer=optimizer,
            checkpoint=path,
        )
    assert isinstance(caught.value.__cause__, NotPSDError)
    assert not path.exists()


def test_a_run_whose_last_steps_fail_ends_as_usual():
    history = fit(*problem(), *data(), objective=failing_objective({1, 2}, "raise"), steps=3, batch_size=16)
    assert [math.isnan(loss) for loss in history.loss] == [False, True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [NaturalVariationalDistribution, TrilNaturalVariationalDistribution])
def test_lbfgs_refuses_natural_parameters(form):
    model, likelihood = problem(distribution=form)
    with pytest.raises(ValueError, match=f"q\\(u\\) is a {form.__name__}, .* mean nothing to L-BFGS"):
        fit(model, likelihood, *data(), steps=1, optimizer="lbfgs")


@pytest.mark.parametrize("make", [problem, collapsed])
def test_lbfgs_refuses_natural_gradients(make):
    with pytest.raises(ValueError, match="natural_gradients go with Adam"):
        fit(*make(), *data(), steps=1, optimizer="lbfgs", natural_gradients=0.1)


@pytest.mark.parametrize("make", [per_point, gplvm])
def test_lbfgs_trains_tables_with_sparse_gradients(make):
    model, likelihood, x, y, options = make()
    before = state(model)
    history = fit(model, likelihood, x, y, steps=8, optimizer="lbfgs", **options)
    assert history.loss[-1] < history.loss[0]
    tables = [name for name in before if name.endswith(("raw_m", "latents.mean"))]
    assert tables
    for name in tables:  # at an inducing point there is no residual to scale
        assert (state(model)[name] != before[name]).any(-1).sum() >= N - M


def test_gradients_whose_squares_overflow_do_not_freeze_adam():
    """Targets in the wrong unit: the gradient in the noise is 1e21, and its square no float32."""
    x, y = (values.float() for values in data())
    model, likelihood = (module.float() for module in problem())
    likelihood.noise = 1e-6
    start = likelihood.noise_covar.raw_noise.item()
    history = fit(model, likelihood, x, 1e8 * y, steps=20, lr=0.1, schedule="constant")
    assert history.skipped == []
    assert history.loss[0] > 1e20
    assert abs(likelihood.noise_covar.raw_noise.item() - start) == pytest.approx(2.0, rel=0.05)


def test_rows_with_gradients_whose_squares_overflow_are_not_frozen_either():
    table = torch.nn.Parameter(torch.zeros(5, 1, dtype=torch.float32))
    optimizers = Optimizers({"table": table}, {"table"}, set(), 0.1, False, 5)
    table.grad = torch.sparse_coo_tensor(
        [[1, 3]], [[1e25], [-2e25]], (5, 1), dtype=torch.float32, check_invariants=True
    ).coalesce()
    optimizers.scale_down({"table": 2e25})
    optimizers.step(1.0)
    torch.testing.assert_close(table.detach().flatten(), torch.tensor([0, -0.1, 0, 0.1, 0], dtype=torch.float32))


def test_only_gradients_that_overflow_are_scaled_and_natural_ones_never():
    narrow, wide, natural = (
        torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)
    )
    named = {"narrow": narrow, "wide": wide, "natural": natural}
    optimizers = Optimizers(named, set(), {id(natural)}, 0.1, 0.1, 5)
    for parameter in named.values():
        parameter.grad = torch.tensor([1e20, -2e20], dtype=parameter.dtype)
    optimizers.scale_down(dict.fromkeys(named, 2e20))
    assert narrow.grad.tolist() == pytest.approx([0.92e15, -1.84e15], rel=0.01)
    assert wide.grad.tolist() == [1e20, -2e20]
    assert natural.grad[1].item() == pytest.approx(-2e20)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    path.touch()
    with pytest.raises(ValueError, match=r"run\.pt is not a readable checkpoint \(EOFError: no data\)"):
        fit(*problem(), *data(), steps=2, checkpoint=path, resume=True)


def test_a_file_without_the_parts_of_a_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"config": {}, "model": {}})
    with pytest.raises(ValueError, match=r"not a checkpoint of fit: it has no finished, total, likelihood"):
        fit(*problem(), *data(), steps=2, checkpoint=path, resume=True)


@pytest.mark.parametrize(("first", "second"), [("adam", "lbfgs"), ("lbfgs", "adam")])
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, first, second):
    options = {"steps": 2, "batch_size": None, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), *data(), optimizer=first, **options)
    with pytest.raises(ValueError, match=f"belongs to another run: optimizer was {first} and is {second}"):
        fit(*problem(), *data(), optimizer=second, resume=True, **{**options, "steps": 4})


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_checkpoint_that_does_not_name_its_optimizer_is_resumed(tmp_path, optimizer):
    path = tmp_path / "run.pt"
    options = {"batch_size": None, "optimizer": optimizer, "schedule": "constant"}
    whole = fit(*problem(), *data(), steps=5, **options)
    fit(*problem(), *data(), steps=3, checkpoint=path, **options)
    saved = torch.load(path, weights_only=True)
    del saved["config"]["optimizer"]
    saved["optimizer"].pop("rows", None)
    torch.save(saved, path)
    assert fit(*problem(), *data(), steps=5, checkpoint=path, resume=True, **options).loss == whole.loss


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["directory", "parent is a file", "read-only"])
def test_a_path_that_takes_no_checkpoint_is_refused_before_the_first_step(tmp_path, monkeypatch, kind, resume):
    path = tmp_path / "run.pt"
    if kind == "directory":
        path.mkdir()
    elif kind == "parent is a file":
        path.touch()
        path = path / "run.pt"
    else:  # whoever runs the tests may write anywhere

        def deny(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr("pathlib.Path.touch", deny)
    model, likelihood = problem()
    before, listing = state(model, likelihood), sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"No checkpoint can be written to .*; use another path"):
        fit(model, likelihood, *data(), steps=2, checkpoint=path, resume=resume)
    assert same(state(model, likelihood), before)
    assert sorted(tmp_path.rglob("*")) == listing


@pytest.mark.parametrize("place", ["save", "replace"])
def test_a_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch, place):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"value": torch.ones(3)})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(torch if place == "save" else os, place, fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(path, {"value": torch.zeros(3)})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]
    assert torch.equal(checkpoints.load(path, torch.device("cpu"))["value"], torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# Bad models and data
# ---------------------------------------------------------------------------------------------------------------------


def test_a_model_without_a_parameter_to_train_is_refused():
    model, likelihood = problem()
    for parameter in (*model.parameters(), *likelihood.parameters()):
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        fit(model, likelihood, *data(), steps=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    model, likelihood = (module.to(dtype) for module in problem())
    x, y = (values.to(dtype) for values in data())
    for arrays in ((x, y), (DataLoader(TensorDataset(x, y), batch_size=16),)):
        with pytest.raises(TypeError, match=f"float32 or float64; got {dtype}"):
            fit(model, likelihood, *arrays, steps=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("make", [problem, collapsed])
def test_values_that_are_not_finite_are_refused_before_q_is_set(bad, which, make):
    arrays = data()
    arrays[which][7] = bad
    model, likelihood = make()
    before = state(model, likelihood)
    with pytest.raises(ValueError, match=f"values of {'xy'[which]} are NaN or infinite; drop their rows"):
        fit(model, likelihood, *arrays, steps=20, batch_size=5)
    assert same(state(model, likelihood), before)


def test_arrays_are_looked_at_batch_by_batch():
    x, y = (values.numpy() for values in data())
    x[7] = np.nan
    seen = []
    with pytest.raises(ValueError, match="Inputs hold NaN or infinity in 1 of 5 rows"):
        fit(*problem(), x, y, epochs=1, batch_size=5, callbacks=[lambda step: seen.append(step.step)])
    assert seen
