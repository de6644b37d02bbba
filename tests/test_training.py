from __future__ import annotations

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import NaturalVariationalDistribution
from linear_operator.utils.errors import NotPSDError
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.factories import CollapsedGP, make_gp, make_kernel, make_noise
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit, mean_nlpd
from tighter_gp.training.batches import ArrayBatches
from tighter_gp.training import steps as training_steps
from tighter_gp.training.lbfgs import FullBatchLBFGS
from tighter_gp.training.optimizers import SCHEDULES

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


def parameters(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


class Interrupted(Exception):
    pass


def interrupt_at(step: int):
    def callback(state):
        if state.step == step:
            raise Interrupted

    return callback


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [tighter_gp.TighterELBO, VariationalELBO])
def test_full_batch_fit_is_the_loop_one_would_write(objective):
    x, y = data()
    model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
    mll = objective(likelihood, model, num_data=N)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.03)
    expected = []
    for _ in range(9):
        adam.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        adam.step()
        expected.append(loss.item())
    model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
    history = fit(model, likelihood, x, y, objective=objective, steps=9, batch_size=None, lr=0.03, schedule="constant")
    torch.testing.assert_close(torch.tensor(history.loss), torch.tensor(expected), rtol=1e-12, atol=1e-12)


def test_mini_batch_training_raises_the_bound_and_restores_modes():
    x, y = data()
    model, likelihood = problem()
    model.eval()
    before = tighter_gp.evaluate_bound(model.train(), likelihood, x, y)
    model.eval()
    history = fit(model, likelihood, x, y, epochs=30, batch_size=16, lr=0.05)
    assert tighter_gp.evaluate_bound(model, likelihood, x, y) > before + 10
    assert history.steps == 30 * math.ceil(N / 16)
    assert not model.training
    assert likelihood.training
    assert history.seconds > 0


def test_the_same_seed_gives_the_same_curve_and_leaves_the_global_random_state_alone():
    x, y = data()
    curves = []
    for seed in (5, 5, 6):
        model, likelihood = problem()
        state = torch.get_rng_state()
        curves.append(fit(model, likelihood, x, y, epochs=3, batch_size=16, seed=seed).loss)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_an_epoch_shows_every_point_once_and_the_next_in_another_order():
    x, y = data()
    source = ArrayBatches(x, y, {}, 16, 0, x)
    batches = source.iterate(0)
    epochs = [[next(batches) for _ in range(source.steps_per_epoch)] for _ in range(2)]
    orders = [torch.cat([batch.rows for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(N))
    assert not torch.equal(*orders)
    assert [len(batch.y) for batch in epochs[0]] == [16, 16, 16, 5]
    for batch in epochs[1]:
        assert torch.equal(batch.x, x[batch.rows])
        assert torch.equal(batch.y, y[batch.rows])


def test_batches_from_step_k_are_those_an_uninterrupted_run_sees():
    x, y = data()
    source = ArrayBatches(x, y, {}, 16, 0, x)
    whole, late = source.iterate(0), source.iterate(6)
    rows = [next(whole).rows for _ in range(10)]
    for expected in rows[6:]:
        assert torch.equal(next(late).rows, expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [("constant", (1, 1, 1)), ("cosine", (1, 0.5, 0)), ("linear", (1, 0.5, 0)), ("exponential", (1, 0.1, 0.01))],
)
def test_schedules(name, values):
    for done, value in zip((0.0, 0.5, 1.0), values, strict=True):
        assert SCHEDULES[name](done) == pytest.approx(value, abs=1e-12)


def test_a_schedule_scales_the_first_step_of_adam():
    x, y = data()
    moved = []
    for factor in (1.0, 0.25):
        model, likelihood = problem(q=(torch.zeros(M), torch.eye(M)))
        before = parameters(likelihood)
        fit(model, likelihood, x, y, steps=1, lr=0.04, schedule=lambda done, factor=factor: factor)
        moved.append((parameters(likelihood) - before).abs())
    torch.testing.assert_close(moved[0], torch.full_like(moved[0], 0.04), rtol=1e-5, atol=0)
    torch.testing.assert_close(moved[1], 0.25 * moved[0], rtol=1e-5, atol=0)


def test_callbacks_see_every_step_and_can_end_the_run():
    x, y = data()
    model, likelihood = problem()
    seen = []

    def callback(state):
        seen.append((state.step, state.epoch, state.epoch_end))
        return state.step == 6

    history = fit(model, likelihood, x, y, epochs=9, batch_size=16, callbacks=[callback])
    assert seen == [(1, 0, False), (2, 0, False), (3, 0, False), (4, 1, True), (5, 1, False), (6, 1, False)]
    assert history.steps == 6
    assert "callback" in history.stopped


def test_progress_needs_no_tqdm_and_a_bar_no_terminal(monkeypatch, capsys):
    x, y = data()
    model, likelihood = problem()
    fit(model, likelihood, x, y, steps=2)
    assert capsys.readouterr().err == ""
    fit(model, likelihood, x, y, steps=2, progress=True)
    assert "step" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    fit(model, likelihood, x, y, steps=2)
    with pytest.raises(ImportError, match="pip install tqdm"):
        fit(model, likelihood, x, y, steps=2, progress=True)


# ---------------------------------------------------------------------------------------------------------------------
# Where data come from
# ---------------------------------------------------------------------------------------------------------------------


def test_memory_mapped_arrays_train_as_tensors_do(tmp_path):
    x, y = data()
    for name, values in {"x": x, "y": y}.items():
        np.save(tmp_path / f"{name}.npy", values.numpy().astype(np.float32))
    curves = []
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy"]
    for arrays in (mapped, (x.float().double(), y.float().double())):
        model, likelihood = problem()
        curves.append(fit(model, likelihood, *arrays, epochs=3, batch_size=16).loss)
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["uint8", "int32", ">f8", "float16"])
def test_arrays_of_any_kind_of_number_train_as_tensors_do(kind):
    """Pixels, for one, or what another machine wrote."""
    x, y = data()
    x = (100 * x).round().abs().clamp_max(200)
    curves = []
    for inputs in (x.numpy().astype(kind), x):
        model, likelihood = problem()
        history = fit(model, likelihood, inputs, y.numpy(), epochs=2, batch_size=16, validation=(inputs, y.numpy()))
        curves.append([*history.loss, *(score for _, score in history.validation)])
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-9, atol=1e-9)


def test_a_shuffling_data_loader_trains_and_is_repeatable():
    x, y = data()
    curves = []
    for generator in (None, None, torch.Generator()):
        loader = DataLoader(TensorDataset(x.float(), y.float()), batch_size=16, shuffle=True, generator=generator)
        model, likelihood = problem()
        curves.append(fit(model, likelihood, loader, epochs=5, lr=0.05).loss)
    assert curves[0] == curves[1]
    assert all(len(curve) == 20 and curve[-1] < curve[0] for curve in curves)


def test_per_point_scales_get_their_rows_and_sparse_adam_moves_no_others():
    x, y = data()
    model, likelihood = problem(conditional=tighter_gp.PerPoint(N))
    table = model.variational_strategy.conditional.raw_m
    before = table.detach().clone()
    fit(model, likelihood, x, y, steps=1, batch_size=10)
    moved = (table.detach() != before).any(-1)
    first = next(ArrayBatches(x, y, {}, 10, 0, x).iterate(0)).rows
    assert torch.equal(moved.nonzero().flatten(), first.sort().values)


def test_per_point_scales_need_positions_from_a_loader():
    x, y = data()
    model, likelihood = problem(conditional=tighter_gp.PerPoint(N))
    with pytest.raises(ValueError, match=r"\(x, y, index\)"):
        fit(model, likelihood, DataLoader(TensorDataset(x, y), batch_size=16), epochs=1)
    loader = DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=16)
    assert len(fit(model, likelihood, loader, epochs=2).loss) == 8


def test_fixed_noise_follows_the_batch():
    x, y = data()
    noise = 0.05 + torch.rand(N, generator=torch.Generator().manual_seed(0))
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    likelihood = make_noise(noise)
    history = fit(model, likelihood, x, y, steps=1, batch_size=10)
    rows = next(ArrayBatches(x, y, {}, 10, 0, x).iterate(0)).rows
    model, _ = problem(q=(torch.zeros(M), torch.eye(M)))
    expected = -tighter_gp.TighterELBO(likelihood, model, N)(model(x[rows]), y[rows], noise=noise[rows])
    assert history.loss[0] == pytest.approx(expected.item(), rel=1e-12)


def test_a_batch_of_models_trains_as_its_members_do():
    x, y = data()
    z, shape = x[:M].clone(), torch.Size([3])
    targets = torch.stack([y, -y, 2 * y])
    q = lambda batch: (torch.zeros(*batch, M), torch.eye(M).expand(*batch, M, M))

    def make(batch):
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch)
        model = make_gp(z, kernel, q(batch), batch_shape=batch)
        model.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        return model, likelihood

    # Inducing points are shared, so hold them fixed to keep the members apart.
    def train(batch, values):
        model, likelihood = make(batch)
        model.variational_strategy.inducing_points.requires_grad_(False)
        return fit(model, likelihood, x, values, epochs=3, batch_size=16).loss

    together = train(shape, targets)
    apart = sum(torch.tensor(train(torch.Size(), member)) for member in targets)
    torch.testing.assert_close(torch.tensor(together), apart, rtol=1e-9, atol=1e-9)


def test_a_latent_variable_model_is_given_rows_in_place_of_inputs():
    gplvm = pytest.importorskip("tighter_gp.gplvm")
    targets = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    model = gplvm.BayesianGPLVM.from_data(targets, latent_dim=2, num_inducing=7)
    history = fit(
        model, model.likelihood, None, targets, objective=gplvm.LatentVariableELBO, epochs=20, batch_size=16, lr=0.05
    )
    assert np.mean(history.loss[-3:]) < np.mean(history.loss[:3])


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------


def test_one_natural_step_of_size_one_lands_on_the_collapsed_bound():
    x, y = data()
    model, likelihood = problem(distribution=NaturalVariationalDistribution)
    for parameter in [*model.hyperparameters(), *likelihood.parameters()]:
        parameter.requires_grad_(False)
    fit(model, likelihood, x, y, steps=1, batch_size=None, natural_gradients=1.0)
    natural = tighter_gp.evaluate_bound(model, likelihood, x, y)
    best, _ = problem()
    tighter_gp.set_optimal_q(best, likelihood, x, y)
    torch.testing.assert_close(natural, tighter_gp.evaluate_bound(best, likelihood, x, y), rtol=1e-8, atol=1e-8)


def test_natural_gradients_go_with_adam_and_need_their_form_of_q():
    x, y = data()
    model, likelihood = problem(distribution=NaturalVariationalDistribution)
    with pytest.raises(ValueError, match="natural_gradients=True"):
        fit(model, likelihood, x, y, epochs=1)
    noise = likelihood.noise.item()
    history = fit(model, likelihood, x, y, epochs=10, batch_size=16, natural_gradients=True)
    assert history.loss[-1] < history.loss[0]
    assert likelihood.noise.item() != noise
    plain, likelihood = problem()
    with pytest.raises(ValueError, match="NaturalVariationalDistribution"):
        fit(plain, likelihood, x, y, epochs=1, natural_gradients=0.5)


def collapsed():
    x, y = data()
    likelihood = make_noise(0.5)
    return CollapsedGP(x, y, x[:M].clone(), make_kernel("rbf", 1.0, torch.ones(D)), likelihood), likelihood


def test_lbfgs_takes_a_collapsed_model_to_a_stationary_point():
    x, y = data()
    model, likelihood = collapsed()
    history = fit(model, likelihood, x, y, steps=400)
    assert history.stopped == "converged"
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    loss = -mll(model(x), y)
    assert loss.item() == pytest.approx(history.loss[-1], abs=1e-12)
    gradient = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert max(g.abs().max().item() for g in gradient if g is not None) < 1e-4
    assert all(later <= earlier + 1e-12 for earlier, later in zip(history.loss, history.loss[1:], strict=False))


def test_lbfgs_comes_back_from_a_trial_point_where_the_objective_fails():
    start = torch.nn.Parameter(torch.tensor([3.0]))
    failures = []

    def evaluate():
        if start.item() < 0.5:  # a wall before the minimum at 0
            failures.append(start.item())
            raise NotPSDError("wall")
        loss = 20 * start.square().sum()
        loss.backward()
        return loss

    lbfgs = FullBatchLBFGS([start], evaluate, (NotPSDError,))
    for _ in range(10):
        lbfgs.step()
    assert failures
    assert 0.5 <= start.item() < 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Early stopping
# ---------------------------------------------------------------------------------------------------------------------


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


def test_without_patience_validation_is_only_recorded():
    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=9, batch_size=16, validation=(x, y), validate_every=4)
    assert [step for step, _ in history.validation] == [4, 8, 9]
    assert mean_nlpd(model, likelihood, x, y) == pytest.approx(history.validation[-1][1], rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("how", ["raise", "nan", "gradient"])
def test_a_failed_step_changes_nothing_and_training_goes_on(how, caplog):
    x, y = data()
    model, likelihood = problem()
    seen = []
    record = lambda state: seen.append(parameters(state.model, state.likelihood))
    history = fit(
        model, likelihood, x, y, objective=failing_objective({3}, how), steps=8, batch_size=16, callbacks=[record]
    )
    assert torch.equal(seen[3], seen[2])
    assert not torch.equal(seen[4], seen[3])
    assert [step for step, _ in history.skipped] == [3]
    assert math.isnan(history.loss[3])
    assert all(math.isfinite(loss) for i, loss in enumerate(history.loss) if i != 3)
    assert bool(torch.isfinite(seen[-1]).all())
    assert "step 3 was skipped" in caplog.text


def test_too_many_failures_in_a_row_raise_and_leave_the_last_good_parameters():
    x, y = data()
    model, likelihood = problem()
    seen = []
    record = lambda state: seen.append(parameters(state.model, state.likelihood))
    objective = failing_objective({1, *range(3, 99)}, "raise")
    with pytest.raises(RuntimeError, match=r"4 steps in a row failed, the last, step 6, with: K_ZZ is not positive"):
        fit(model, likelihood, x, y, objective=objective, steps=50, batch_size=16, callbacks=[record], max_failures=4)
    # Step 2 succeeded, but what it led to did not: its update is undone.
    assert torch.equal(parameters(model, likelihood), seen[1])
    assert not torch.equal(seen[2], seen[1])


def test_a_mistake_in_the_call_is_raised_at_once():
    x, y = data()
    y[3] = math.nan
    model, likelihood = problem()
    with pytest.raises(ValueError, match="NaN"):
        fit(model, likelihood, x, y, epochs=1)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


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


CASES = {
    "adam": (problem, {}),
    "per point": (lambda: problem(conditional=tighter_gp.PerPoint(N)), {}),
    "natural": (lambda: problem(distribution=NaturalVariationalDistribution), {"natural_gradients": 0.2}),
    "early stopping": (problem, {"validation": data(19), "patience": 50, "lr": 0.3}),
    "lbfgs": (collapsed, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_numbers_of_an_uninterrupted_one(case, tmp_path):
    make, options = CASES[case]
    x, y = data()
    options = {"steps": 23, "batch_size": 16, "seed": 4, **options}
    model, likelihood = make()
    count = Count()
    whole = fit(model, likelihood, x, y, callbacks=[count], **options)
    expected = parameters(model, likelihood)

    path, resumed = tmp_path / "run.pt", Count()
    options |= {"checkpoint": path, "checkpoint_every": 6}
    model, likelihood = make()
    with pytest.raises(Interrupted):
        fit(model, likelihood, x, y, callbacks=[Count(), interrupt_at(15)], **options)
    model, likelihood = make()
    torch.rand(3)
    history = fit(model, likelihood, x, y, callbacks=[resumed], resume=True, **options)
    assert torch.equal(parameters(model, likelihood), expected)
    assert history.loss == whole.loss
    assert history.validation == whole.validation
    assert resumed.steps == count.steps


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_shuffling_data_loader_goes_on_where_it_was(tmp_path, own_generator):
    x, y = data()

    def loader():
        generator = torch.Generator().manual_seed(torch.seed()) if own_generator else None
        return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=generator)

    whole = fit(*problem(), loader(), steps=11)
    options = {"steps": 11, "checkpoint": tmp_path / "run.pt", "checkpoint_every": 3}
    with pytest.raises(Interrupted):
        fit(*problem(), loader(), callbacks=[interrupt_at(8)], **options)
    torch.rand(5)
    assert fit(*problem(), loader(), resume=True, **options).loss == whole.loss


def test_random_draws_of_the_objective_are_part_of_the_state(tmp_path):
    x, y = data()
    labels = (y > 0).long() + (y > 0.7).long()

    class Softmax(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([3]))
            base = tighter_gp.TighterVariationalStrategy(self, x[:M].clone(), q, conditional="beta")
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=3))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), make_kernel("rbf", 1.0, torch.ones(D))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def make():
        return Softmax(), gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)

    options = {"steps": 11, "batch_size": 16}
    whole = fit(*make(), x, labels, **options)
    # A callback that draws random numbers of its own does not change the run.
    path = tmp_path / "run.pt"
    options |= {"checkpoint": path, "checkpoint_every": 4}
    with pytest.raises(Interrupted):
        fit(*make(), x, labels, callbacks=[lambda state: torch.rand(1) > 2, interrupt_at(7)], **options)
    assert fit(*make(), x, labels, resume=True, **options).loss == whole.loss


def test_a_finished_run_is_not_run_again_but_can_be_prolonged(tmp_path):
    x, y = data()
    path = tmp_path / "run.pt"
    model, likelihood = problem()
    fit(model, likelihood, x, y, steps=5, checkpoint=path)
    again, other = problem()
    count = Count()
    history = fit(again, other, x, y, steps=5, checkpoint=path, resume=True, callbacks=[count])
    assert count.steps == []
    assert history.steps == 5
    assert torch.equal(parameters(again, other), parameters(model, likelihood))
    fit(again, other, x, y, steps=8, checkpoint=path, resume=True, callbacks=[count])
    assert count.steps == [6, 7, 8]


def test_resume_without_a_file_starts_anew(tmp_path):
    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=3, checkpoint=tmp_path / "folder" / "run.pt", resume=True)
    assert history.steps == 3
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 1}, "seed was 0 and is 1"), ({"batch_size": 20}, "batch_size was 16 and is 20")],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    x, y = data()
    options = {"steps": 3, "batch_size": 16, "checkpoint": tmp_path / "run.pt"}
    fit(*problem(), x, y, **options)
    with pytest.raises(ValueError, match=message):
        fit(*problem(), x, y, resume=True, **{**options, **change})
    model = make_gp(x[: M + 1].clone(), make_kernel("rbf", 1.0, torch.ones(D)))
    with pytest.raises(ValueError, match="other names or shapes"):
        fit(model, make_noise(0.2), x, y, resume=True, **options)


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"value": torch.ones(3)})

    def cut_off(state, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(path, {"value": torch.zeros(3)})
    monkeypatch.undo()
    assert torch.equal(checkpoints.load(path, torch.device("cpu"))["value"], torch.ones(3))
    checkpoints.save(path, {"value": torch.zeros(3)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


class Malicious:
    def __reduce__(self):
        return (os.mkdir, (os.environ["TIGHTER_GP_TEST_TARGET"],))


@pytest.mark.parametrize("kind", ["garbage", "truncated", "code", "other"])
def test_a_file_that_is_no_checkpoint_is_refused_without_executing_it(tmp_path, monkeypatch, kind):
    path, target = tmp_path / "run.pt", tmp_path / "made"
    monkeypatch.setenv("TIGHTER_GP_TEST_TARGET", str(target))
    if kind == "garbage":
        path.write_bytes(b"garbage")
    elif kind == "truncated":
        checkpoints.save(path, {"value": torch.ones(300)})
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "code":
        path.write_bytes(pickle.dumps(Malicious(), protocol=2))
    else:
        torch.save({"format": 99}, path)
    with pytest.raises(ValueError, match=r"run\.pt is not a"):
        checkpoints.load(path, torch.device("cpu"))
    assert not target.exists()


KILLED = """
import sys, torch
torch.set_default_dtype(torch.float64)
from tests.test_training import data, problem, parameters
from tighter_gp.training import fit
x, y = data()
model, likelihood = problem()
slow = lambda state: __import__("time").sleep(0.01) if "slow" in sys.argv else None
history = fit(model, likelihood, x, y, steps=400, batch_size=16, checkpoint=sys.argv[1], checkpoint_every=3, resume=True,
              callbacks=[slow])
print(history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(tmp_path):
    path = tmp_path / "run.pt"
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(path)]
    process = subprocess.Popen([*command, "slow"], cwd=root)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.15)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = len(checkpoints.load(path, torch.device("cpu"))["history"]["loss"])
    assert 0 < done < 400
    resumed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()

    x, y = data()
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, steps=400, batch_size=16)
    assert resumed == [history.loss[-1].hex(), parameters(model, likelihood).sum().item().hex()]


# ---------------------------------------------------------------------------------------------------------------------
# Bad calls
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2, "steps": 3}, "epochs or steps"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive and finite; got inf"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 1; got -1"),
        ({"validate_every": 0}, "validate_every must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"schedule": "sometimes"}, "Unknown schedule 'sometimes'"),
        ({"optimizer": "sgd"}, "Unknown optimizer 'sgd'"),
        ({"resume": True}, "needs a checkpoint"),
        ({"patience": 3}, "validation="),
        ({"noise": torch.ones(N - 1)}, r"noise= must have one value per training point"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    x, y = data()
    with pytest.raises(ValueError, match=message):
        fit(*problem(), x, y, **{"epochs": 1, **options} if "steps" not in options else options)


def test_data_that_do_not_fit_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match="53 points, and y of shape"):
        fit(*problem(), x, y[:-1])
    with pytest.raises(ValueError, match="no rows"):
        fit(*problem(), x[:0], y[:0])
    with pytest.raises(TypeError, match="y must be a tensor"):
        fit(*problem(), x)
    with pytest.raises(TypeError, match="DataLoader; got list"):
        fit(*problem(), [1, 2], y)
    with pytest.raises(ValueError, match="float32 and the model"):
        fit(*problem(), x.float(), y)
    with pytest.raises(ValueError, match="x is on meta and the model on cpu"):
        fit(*problem(), x.to("meta"), y)
    with pytest.raises(ValueError, match="brings its own targets"):
        fit(*problem(), DataLoader(TensorDataset(x, y)), y)


def test_compiled_steps_train_as_eager_ones_do(monkeypatch):
    """With torch's own interpreter in place of a compiler; a short last batch is part of every epoch."""
    captured = functools.partial(tighter_gp.CompiledStep, backend="eager")
    monkeypatch.setattr(training_steps, "CompiledStep", captured)
    x, y = data()
    options = {"epochs": 2, "batch_size": 40, "lr": 0.05}
    model, likelihood = problem()
    history = fit(model, likelihood, x, y, compile=True, **options)
    eager_model, eager_likelihood = problem()
    eager = fit(eager_model, eager_likelihood, x, y, **options)
    assert len(x) % 40
    torch.testing.assert_close(torch.tensor(history.loss), torch.tensor(eager.loss), rtol=1e-8, atol=1e-8)
    for ours, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_compiling_a_collapsed_model_is_an_error():
    x, y = data()
    with pytest.raises(ValueError, match="compile=True is for Adam"):
        fit(*problem(), x, y, optimizer="lbfgs", compile=True)
