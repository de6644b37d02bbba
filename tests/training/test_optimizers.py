"""Adam, SparseAdam, natural gradients and L-BFGS."""

from __future__ import annotations

from types import SimpleNamespace

import gpytorch
import pytest
import torch
from gpytorch.variational import (
    DeltaVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)
from linear_operator.utils.errors import NotPSDError
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.training.problems import M, N, collapsed, data, per_point, problem, state
from tighter_gp.training import distributed, fit
from tighter_gp.training.lbfgs import FullBatchLBFGS
from tighter_gp.training.optimizers import Optimizers, can_fuse
from tighter_gp.training.steps import LBFGSState, LBFGSStep, joined_rows, read_together


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
    with pytest.raises(ValueError, match="mean nothing to Adam"):
        fit(model, likelihood, x, y, epochs=1, natural_gradients=False)
    noise = likelihood.noise.item()
    history = fit(model, likelihood, x, y, epochs=10, batch_size=16, natural_gradients=True)
    assert history.loss[-1] < history.loss[0]
    assert likelihood.noise.item() != noise
    point, likelihood = problem(distribution=DeltaVariationalDistribution)
    with pytest.raises(ValueError, match="DeltaVariationalDistribution, which has no natural parameters"):
        fit(point, likelihood, x, y, epochs=1, natural_gradients=0.5)
    assert fit(point, likelihood, x, y, epochs=1).steps == 1


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


@pytest.mark.parametrize("form", [NaturalVariationalDistribution, TrilNaturalVariationalDistribution])
def test_lbfgs_refuses_natural_parameters(form):
    model, likelihood = problem(distribution=form)
    with pytest.raises(ValueError, match=f"q\\(u\\) is a {form.__name__}, .* mean nothing to L-BFGS"):
        fit(model, likelihood, *data(), steps=1, optimizer="lbfgs")


@pytest.mark.parametrize("make", [problem, collapsed])
def test_lbfgs_refuses_natural_gradients(make):
    with pytest.raises(ValueError, match="natural_gradients go with Adam"):
        fit(*make(), *data(), steps=1, optimizer="lbfgs", natural_gradients=0.1)


def test_lbfgs_trains_tables_with_sparse_gradients():
    model, likelihood, x, y, options = per_point()
    before = state(model)
    history = fit(model, likelihood, x, y, steps=8, optimizer="lbfgs", **options)
    assert history.loss[-1] < history.loss[0]
    tables = [name for name in before if name.endswith("raw_m")]
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
    optimizers = Optimizers({"table": table}, {"table"}, {"table": "all"}, {"all": 0.1})
    table.grad = torch.sparse_coo_tensor(
        [[1, 3]], [[1e25], [-2e25]], (5, 1), dtype=torch.float32, check_invariants=True
    ).coalesce()
    optimizers.scale_down({"table": 2e25})
    optimizers.step(lambda kind: 1.0)
    torch.testing.assert_close(table.detach().flatten(), torch.tensor([0, -0.1, 0, 0.1, 0], dtype=torch.float32))


def test_only_gradients_that_overflow_are_scaled():
    narrow, wide = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    named = {"narrow": narrow, "wide": wide}
    optimizers = Optimizers(named, set(), dict.fromkeys(named, "all"), {"all": 0.1})
    for parameter in named.values():
        parameter.grad = torch.tensor([1e20, -2e20], dtype=parameter.dtype)
    optimizers.scale_down(dict.fromkeys(named, 2e20))
    assert narrow.grad.tolist() == pytest.approx([0.92e15, -1.84e15], rel=0.01)
    assert wide.grad.tolist() == [1e20, -2e20]


def test_adam_is_fused_where_all_parameters_are_on_cuda():
    class OnCuda:
        is_cuda = True

    assert can_fuse([OnCuda(), OnCuda()]) is True
    assert can_fuse([OnCuda(), torch.zeros(2)]) is None


@pytest.mark.parametrize("frozen", ["variational_mean", "chol_variational_covar"])
def test_a_distribution_frozen_in_part_is_trained_in_the_other(frozen):
    model, likelihood = problem()
    q = model.variational_strategy._variational_distribution
    getattr(q, frozen).requires_grad_(False)
    model(data()[0])  # sets q(u)
    before = {name: parameter.detach().clone() for name, parameter in q.named_parameters()}
    fit(model, likelihood, *data(), steps=20, batch_size=16)
    for name, parameter in q.named_parameters():
        assert torch.equal(parameter, before[name]) == (name == frozen), name


class Shrunk(tighter_gp.TighterELBO):
    """A bound with a term of its own in q(u)."""

    def forward(self, q, target, **kwargs):
        mean = self.model.variational_strategy._variational_distribution.variational_mean
        return super().forward(q, target, **kwargs) - 5 * mean.square().mean()


class Weighted(gpytorch.mlls.VariationalELBO):
    def _log_likelihood_term(self, q, target, **kwargs):
        return 0.1 * super()._log_likelihood_term(q, target, **kwargs)


@pytest.mark.parametrize("objective", [Shrunk, Weighted])
def test_an_objective_of_ones_own_is_the_one_that_q_is_trained_on(objective):
    model, likelihood = problem()
    for name, parameter in [*model.named_parameters(), *likelihood.named_parameters()]:
        parameter.requires_grad_("_variational_distribution" in name)
    x, y = data()
    fit(model, likelihood, x, y, steps=400, batch_size=None, objective=objective, lr=0.05)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(objective(likelihood, model, N)(model(x), y), parameters)
    assert max(gradient.abs().max() for gradient in gradients) < 1e-3
    with pytest.raises(ValueError, match=f"{objective.__name__} changes the bound"):
        fit(model, likelihood, x, y, steps=1, objective=objective, natural_gradients=True)


def test_sparse_gradients_of_the_batchs_rows_are_joined_with_a_flag_instead_of_a_wait():
    table, rows = torch.nn.Parameter(torch.randn(6, 2)), torch.tensor([4, 1, 3])
    picked = torch.nn.functional.embedding(torch.cat([rows, rows]), table, sparse=True)
    (torch.randn(6, 2) * picked).sum().backward()
    flags = []
    found, expected = joined_rows(table.grad, rows, flags), table.grad.coalesce()
    assert found.is_coalesced()
    assert torch.equal(found.indices(), expected.indices())
    torch.testing.assert_close(found.values(), expected.values())
    others = ([4, 1, 2], [4, 1, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2])  # the last: all below some of the gradient's
    for other in others:
        joined_rows(table.grad, torch.tensor(other), flags)
    assert list(map(bool, flags)) == [True, False, False, False, False]


def test_gradients_of_one_dtype_are_summed_in_one_message(monkeypatch):
    messages = []
    monkeypatch.setattr(distributed, "is_active", lambda: True)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: messages.append(tensor.numel()))
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (4,), ())]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    loss, failed = distributed.sum_gradients(parameters, torch.tensor(1.0))
    assert (float(loss), failed) == (1.0, 0)
    assert messages == [2 + 2 * len(parameters), 11]  # the loss with what is there, then all gradients


@pytest.mark.parametrize(
    ("flags", "expected"), [([], True), ([True, True], True), ([True, False], False), ([False, True], False)]
)
def test_loss_flags_and_gradients_are_read_together_and_told_apart(flags, expected):
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in "ab"}
    parameters["a"].grad, parameters["b"].grad = torch.tensor([0.0, -4.0, 1.0]), torch.tensor([2.0, 0.0, 0.0])
    loss, largest, ok = read_together(torch.tensor(7.0), parameters, [torch.tensor(flag) for flag in flags])
    assert (loss, largest, ok) == (7.0, {"a": 4.0, "b": 2.0}, expected)


def test_adam_continues_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path):
    def interrupt(step):
        if step.step == 3:
            raise KeyboardInterrupt

    options = {"steps": 6, "batch_size": 20, "natural_gradients": False}
    x, y = data()
    whole = fit(*problem(), x, y, **options).loss
    with pytest.raises(KeyboardInterrupt):
        fit(*problem(), x, y, checkpoint=tmp_path / "run.pt", callbacks=[interrupt], **options)
    assert fit(*problem(), x, y, checkpoint=tmp_path / "run.pt", resume=True, **options).loss == whole


@pytest.mark.parametrize(
    ("before", "after", "is_quiet"),
    [
        (1e6 + 5e-4, 1e6, True),  # relative to a large loss
        (1e6 + 5e-3, 1e6, False),
        (5e-10, 0.0, True),  # and as it is beside a small one
        (5e-9, 0.0, False),
    ],
)
def test_lbfgs_has_converged_after_three_iterations_that_change_nothing(before, after, is_quiet):
    lbfgs = SimpleNamespace(loss=before, error=None, step=lambda: (after, True))
    step, state, ends = LBFGSStep(None), LBFGSState(lbfgs), []
    for _ in range(3):
        state, info = step.step(state, None, None)
        ends.append(info.converged)
    assert ends == (["", "", "converged"] if is_quiet else ["", "", ""])


@pytest.mark.parametrize("make", [problem, collapsed])
@pytest.mark.parametrize("option", [{"lr": 0.1}, {"schedule": "constant"}, {"schedule": None}, {"batch_size": 7}])
def test_what_lbfgs_does_not_use_is_said(make, option, caplog):
    (name,) = option
    fit(*make(), *data(), steps=1, optimizer="lbfgs", batch_size=None)
    assert "is not used" not in caplog.text
    fit(*make(), *data(), steps=1, optimizer="lbfgs", **option)
    assert f"{name}= is for Adam" in caplog.text


def test_adam_on_a_collapsed_model_uses_all_but_the_size_of_batches(caplog):
    fit(*collapsed(), steps=1, optimizer="adam", batch_size=None, lr=0.1, schedule="linear")
    assert "is not used" not in caplog.text
    fit(*collapsed(), steps=1, optimizer="adam", batch_size=7)
    assert "batch_size= is for Adam on mini-batches, and is not used here" in caplog.text


def test_a_size_of_batches_beside_a_data_loader_is_said(caplog):
    loader = DataLoader(TensorDataset(*data()), batch_size=16)
    fit(*problem(), loader, steps=1, lr=0.1, schedule="linear")
    assert "is not used" not in caplog.text
    fit(*problem(), loader, steps=1, batch_size=7)
    assert "batch_size= is for arrays, where a DataLoader has its own, and is not used here" in caplog.text
