"""What ``fit`` does at its default settings: batches, the start, what it says, and what it is given."""

from __future__ import annotations

import logging
import math

import gpytorch
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.training.problems import Count, N, data, gplvm, parameters, problem
from tighter_gp import Recipe, fit
from tighter_gp.models import BinaryClassification, CountRegression, MultiClassification, Regression


def rows_of(n, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator) * 4 - 2
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(n, generator=generator)


def sizes_of_batches(n, batch_size):
    sizes = []

    class Seen(tighter_gp.TighterELBO):
        def forward(self, q, y, **kwargs):
            sizes.append(len(y))
            return super().forward(q, y, **kwargs)

    model, likelihood = problem()
    history = fit(model, likelihood, *data(n), objective=Seen, epochs=1, batch_size=batch_size)
    return history.steps, set(sizes)


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "batch_size", "steps"), [(53, 16, 4), (33, 32, 2), (32, 32, 1), (64, 32, 2), (7, 3, 3)])
def test_an_epoch_is_cut_into_batches_whose_sizes_differ_by_at_most_one(n, batch_size, steps):
    taken, sizes = sizes_of_batches(n, batch_size)
    assert taken == steps
    assert sizes <= {n // steps, -(-n // steps)}


@pytest.mark.parametrize("options", [{}, {"schedule": "cosine"}, {"natural": 0}])
def test_a_short_last_batch_of_a_loader_counts_by_its_share(options):
    """Of 65 rows the last is a batch of its own: parameters hardly move in its step."""
    x, y = rows_of(65)
    moves, before = [], []

    def moved(step):
        now = parameters(step.model.mean_module, step.model.covar_module)
        if before:
            moves.append((now - before[-1]).norm().item())
        before.append(now)

    model = Regression(x, 8)
    loader = DataLoader(TensorDataset(x, y), 32)
    fit(model, model.likelihood, loader, steps=12, callbacks=[moved], recipe=Recipe(**options))
    short, full = moves[1::3], moves[0::3]
    assert max(a / b for a, b in zip(short, full, strict=True)) < 0.1


# ---- the start ------------------------------------------------------------------------------------------------------


def rare_pixels(n=400, d=60):
    """Two classes, and inputs of which most are zero in nearly all rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator) * (torch.rand(n, d, generator=generator) < torch.linspace(0.002, 1, d))
    return x, (x[:, -1] + x[:, -2] > 1).long()


@pytest.mark.parametrize(
    "make", [Regression, BinaryClassification, CountRegression, lambda x, m: MultiClassification(2, x, m)]
)
def test_no_lengthscale_of_a_ready_made_model_starts_tiny(make):
    x, _ = rare_pixels()
    start = make(x, 10).covar_module.base_kernel.lengthscale
    spread = x.std(0, correction=0) * x.size(-1) ** 0.5
    distance = tighter_gp.inducing.median_lengthscale(x)
    assert (start >= 0.99 * torch.minimum(spread, distance / 4)).all()


def test_a_start_suits_inputs_in_any_units():
    x, _ = rows_of(200)
    units = torch.tensor([1e3, 1e-3])
    starts = [Regression(inputs, 20).covar_module.base_kernel.lengthscale.squeeze() for inputs in (x, x * units)]
    torch.testing.assert_close(starts[1] / units, starts[0], rtol=0.8, atol=0.0)


@pytest.mark.parametrize(
    "kernel",
    [
        gpytorch.kernels.RBFKernel(ard_num_dims=20),
        gpytorch.kernels.MaternKernel(2.5, ard_num_dims=20),
        gpytorch.kernels.RBFKernel(),
        gpytorch.kernels.RBFKernel(ard_num_dims=20) + gpytorch.kernels.LinearKernel(),
    ],
    ids=["rbf", "matern", "one lengthscale", "sum"],
)
def test_initialize_finds_a_start_that_learns_for_any_stationary_kernel(kernel, caplog):
    """At GPyTorch's own lengthscale of .69 all rows of twenty inputs are far apart."""
    x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1]
    model = Regression(x, 40, covar_module=gpytorch.kernels.ScaleKernel(kernel))
    with caplog.at_level(logging.INFO, "tighter_gp"):
        fit(model, model.likelihood, x[:500], y[:500], steps=150, batch_size=250, initialize=True)
    assert any("lengthscale" in record.getMessage() for record in caplog.records)
    assert "mean alone" not in caplog.text
    error = tighter_gp.predict_y(model, model.likelihood, x[500:]).mean - y[500:]
    assert error.square().mean().sqrt() < 0.7 * y[500:].std()


# ---- what a run says ------------------------------------------------------------------------------------------------


def warnings_of(caplog, model, x, y, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tighter_gp"):
        fit(model, model.likelihood, x, y, **{"steps": 60, "batch_size": 100, **options})
    return caplog.text


def test_a_run_says_that_it_has_learnt_the_mean_alone(caplog):
    x = torch.randn(300, 30, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * x[:, 0])
    own = Regression(x, 20, covar_module=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
    assert "mean alone" in warnings_of(caplog, own, x, y)
    assert "mean alone" not in warnings_of(caplog, own, x, y, steps=10)
    classes = BinaryClassification(x, 20, covar_module=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
    assert "mean alone" in warnings_of(caplog, classes, x, (y > 0).long())


def test_a_run_that_learns_says_nothing(caplog):
    x, y = rows_of(300)
    for model, targets in {
        Regression(x, 20): y,
        Regression(x, 20, likelihood=gpytorch.likelihoods.StudentTLikelihood()): y,
        BinaryClassification(x, 20): (y > 0).long(),
        CountRegression(x, 20): y.exp().round(),
        MultiClassification(3, x, 20): (y > 0).long() + (y > 0.5).long(),
    }.items():
        assert not warnings_of(caplog, model, x, targets)


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_a_run_says_that_inputs_are_not_scaled(scale, caplog):
    x, y = rows_of(100)
    own = Regression(x * scale, 20, covar_module=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
    assert "inputs have a standard deviation" in warnings_of(caplog, own, x * scale, y, steps=2)


# ---- what is passed -------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_go_through_a_checkpoint(tmp_path):
    class Best(Count):
        def state_dict(self):
            return {"best": np.float64(1.5), "curve": np.arange(3.0), "steps": [np.int64(s) for s in self.steps]}

    options = {
        "lr": np.float64(0.1),
        "seed": np.int64(1),
        "batch_size": np.int32(20),
        "checkpoint": tmp_path / "run.pt",
    }
    model, likelihood = problem()
    fit(model, likelihood, *data(), steps=np.int64(3), callbacks=[Best()], **options)
    best = Best()
    model, likelihood = problem()
    history = fit(model, likelihood, *data(), steps=5, callbacks=[best], resume=True, **options)
    assert history.steps == 5
    assert best.steps == [1, 2, 3, 4, 5]


def test_ctrl_c_in_a_callback_loses_no_later_callback_of_its_step(tmp_path):
    later = Count()

    def interrupting(step):
        if step.step == 2 and not resumed:
            raise KeyboardInterrupt

    resumed = []
    options = {"steps": 4, "checkpoint": tmp_path / "run.pt", "callbacks": [interrupting, later]}
    model, likelihood = problem()
    with pytest.raises(KeyboardInterrupt):
        fit(model, likelihood, *data(), **options)
    resumed.append(True)
    fit(model, likelihood, *data(), resume=True, **options)
    assert later.steps == [1, 2, 3, 4]


@pytest.mark.parametrize("answer", [12, "text", {"a": 1}, 1.0])
def test_only_true_ends_a_run(answer):
    model, likelihood = problem()
    assert fit(model, likelihood, *data(), steps=3, callbacks=[lambda step: answer]).steps == 3
    for true in (True, np.bool_(True)):
        assert fit(model, likelihood, *data(), steps=3, callbacks=[lambda step, true=true: true]).steps == 1


@pytest.mark.parametrize("frozen", ["whole", "mean"])
@pytest.mark.parametrize(
    "make", [Regression, BinaryClassification, CountRegression, lambda x, m: MultiClassification(2, x, m)]
)
def test_a_frozen_q_stays_and_the_rest_is_trained(make, frozen):
    x, y = rows_of(60)
    model = make(x, 5)
    q = [p for name, p in model.named_parameters() if "_variational_distribution." in name]
    for parameter in q if frozen == "whole" else q[:1]:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in q]
    scale = model.covar_module.raw_outputscale.clone()
    targets = y if make is Regression else (y > 0).long()
    history = fit(model, model.likelihood, x, targets, steps=4, batch_size=20)
    assert not history.skipped
    assert torch.equal(q[0], before[0])
    assert torch.equal(q[1], before[1]) == (frozen == "whole")
    assert not torch.equal(model.covar_module.raw_outputscale, scale)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_a_schedule_that_is_no_factor_is_refused(value):
    model, likelihood = problem()
    with pytest.raises(ValueError, match="schedule"):
        fit(model, likelihood, *data(), steps=4, recipe=Recipe(schedule=lambda done: value))


def test_a_third_part_of_a_batch_is_an_index_only_where_one_is_asked_for():
    x, y = data()
    losses = []
    for third in ([], [torch.full((N,), 10**6)], [torch.rand(N)], [y > 0]):
        model, likelihood = problem()
        losses.append(fit(model, likelihood, DataLoader(TensorDataset(x, y, *third), 20), epochs=1).loss)
    assert all(loss == losses[0] for loss in losses)
    model, _ = problem()
    noise = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((N,), 0.1))
    with pytest.raises((TypeError, ValueError)):
        fit(model, noise, DataLoader(TensorDataset(x, y, y > 0), 20), epochs=1)


def test_a_latent_variable_model_has_an_objective_of_its_own():
    model, likelihood, x, rows, options = gplvm()
    chosen = fit(model, likelihood, x, rows, steps=3, batch_size=20)
    model, likelihood, x, rows, options = gplvm()
    given = fit(model, likelihood, x, rows, steps=3, batch_size=20, **options)
    assert chosen.loss == given.loss


def test_a_long_run_of_a_latent_variable_model_is_not_compiled():
    """Its latents are drawn in every step."""
    model, likelihood, _, rows, options = gplvm()
    history = fit(model, likelihood, None, rows, steps=200_000, batch_size=20, callbacks=[lambda step: True], **options)
    assert (history.steps, history.skipped) == (1, [])


def test_the_bar_and_the_log_show_the_loss_of_a_batch_before_its_step(caplog):
    x, y = rows_of(400)
    model = Regression(x, 64)
    with caplog.at_level(logging.INFO, "tighter_gp"):
        fit(model, model.likelihood, x, y, steps=40, batch_size=10, recipe=Recipe(natural=0.9))
    shown = [float(m.split("loss ")[1].split()[0]) for m in caplog.messages if "on a new batch" in m]
    bound = -float(tighter_gp.evaluate_bound(model, model.likelihood, x, y)) / len(y)
    assert len(shown) == 9
    assert shown[-1] > bound - 0.5  # with q(u) moved to ten rows it would be far below


def test_other_likelihoods_have_the_loss_before_the_step_in_their_history():
    x, y = rows_of(60)
    model = BinaryClassification(x, 8)
    labels = (y > 0).long()
    mll = tighter_gp.TighterELBO(model.likelihood, model, 60)
    seen = []
    fit(model, model.likelihood, x, labels, steps=1, batch_size=None)
    with torch.no_grad():
        expected = -mll(model.train()(x), labels).item()
    history = fit(model, model.likelihood, x, labels, steps=1, batch_size=None, callbacks=[seen.append])
    assert history.loss[0] == pytest.approx(expected, rel=1e-5)


def test_a_bar_of_progress(capsys):
    """With tqdm, in a terminal or where it is asked for."""
    x = torch.rand(40, 1)
    model = tighter_gp.models.Regression(x, num_inducing=4)
    tighter_gp.fit(model, model.likelihood, x, x[:, 0], steps=12, batch_size=20, validation=(x, x[:, 0]), progress=True)
    assert "step/s" in capsys.readouterr().err


def test_kmeans_of_a_model_reads_no_more_rows_of_a_memory_map_than_it_needs(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((100_000, 2), dtype=np.float32))
    model = Regression(np.load(tmp_path / "x.npy", mmap_mode="r"), 4)
    assert model.variational_strategy.inducing_points.shape == (4, 2)
