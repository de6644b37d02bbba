"""New rows, reconstruction, held-out entries, the relevance report and the latent plot."""

from __future__ import annotations

import matplotlib as mpl
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from torch.distributions import Normal

from tests.gplvm.test_elbo import Toy, curve
from tests.tools.support import assert_state, state
from tighter_gp.gplvm import (
    BayesianGPLVM,
    CollapsedBayesianGPLVM,
    LatentVariableELBO,
    VariationalLatents,
    infer_latents,
    plot_latents,
    relevance,
)

mpl.use("agg")


def close(value, expected, rel=1e-9, absolute=1e-12):
    torch.testing.assert_close(value, torch.as_tensor(expected).expand_as(value), rtol=rel, atol=absolute)


@pytest.fixture(scope="module")
def trained():
    """A GPLVM of a closed curve, trained by L-BFGS, and its data; tests must not change it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        y = curve(90, 5)
        latents = VariationalLatents.from_pca(y, 3, stddev=0.3, sparse=False)
        collapsed = CollapsedBayesianGPLVM(latents, latents.mean[:15].detach(), y, num_nodes=8)
        collapsed.likelihood.noise = 0.05
        optimizer = torch.optim.LBFGS(collapsed.parameters(), max_iter=80, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = -collapsed()
            loss.backward()
            return loss

        optimizer.step(closure)
        model = collapsed.uncollapsed()
        torch.set_default_dtype(default)
    return model, y


def test_hidden_entries_of_new_rows_are_predicted(trained):
    model, _ = trained
    new = curve(40, 5, seed=3)
    observed = torch.rand(new.shape) > 0.25
    q_x = model.infer_latents(new, observed, num_steps=100)
    mean, variance = model.reconstruct(q_x)
    error = (mean - new)[~observed].square().mean().sqrt()
    assert error < 0.5 * new[~observed].square().mean().sqrt()
    density = model.log_density(new, q_x, ~observed)
    assert torch.equal(torch.isnan(density), observed)
    prior_guess = Normal(0.0, 1.0).log_prob(new[~observed]).mean()
    assert density[~observed].mean() > prior_guess
    assert bool((variance > model.likelihood.noise * 0.99).all())


def test_rows_do_not_influence_each_other_and_chunks_do_not_matter(trained):
    model, _ = trained
    new = curve(6, 5, seed=3)
    joint = model.infer_latents(new, num_steps=70, num_samples=16)
    alone = model.infer_latents(new[2:3], num_steps=70, num_samples=16)
    chunked = model.infer_latents(new, num_steps=70, num_samples=16, batch_size=4)
    tolerance = 0.5 * joint.stddev
    assert bool(((joint.mean[2:3] - alone.mean).abs() < tolerance[2:3]).all())
    assert bool(((joint.mean - chunked.mean).abs() < tolerance).all())


@pytest.mark.parametrize("training", [True, False])
def test_the_decoder_is_left_as_it_was(trained, training):
    model, _ = trained
    model.train(training)
    before = state(model)
    gradients = [p.grad for p in model.parameters()]
    q_x = infer_latents(model, curve(5, 5, seed=3), num_steps=3)
    model.reconstruct(q_x)
    model.log_density(curve(5, 5, seed=3), q_x)
    assert_state(model, before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(module.training == training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_inference_starts_at_the_training_row_nearest_in_observed_entries(trained):
    model, _ = trained
    reconstruction = model.reconstruct(model.latents.q().mean).mean
    rows = torch.tensor([3, 40, 77])
    new = reconstruction[rows].clone()
    observed = torch.ones_like(new, dtype=torch.bool)
    observed[:, 4] = False
    q_x = model.infer_latents(new, observed, num_steps=0)
    close(q_x.mean, model.latents.q().mean[rows].detach())
    close(q_x.stddev, model.latents.q().stddev[rows].detach())
    subset = model.infer_latents(new, observed, num_steps=0, num_candidates=1)
    assert len(torch.unique(subset.mean, dim=0)) == 1


@pytest.mark.parametrize("objective", [None, VariationalELBO])
def test_inference_maximises_the_bound_of_the_new_rows(trained, objective):
    model, _ = trained
    model.train()
    new = curve(8, 5, seed=3)
    elbo = LatentVariableELBO(model.likelihood, model, 8, objective=objective)
    values = []
    for steps in (0, 20, 120):
        q_x = model.infer_latents(new, num_steps=steps, objective=objective)
        with torch.no_grad():
            values.append(elbo.at(q_x.sample((200,)), q_x, new).bound)
    assert values[0] < values[1] < values[2] + 0.05


def test_no_rows_give_no_values(trained):
    model, y = trained
    for x in (torch.zeros(0, 3), model.latents.q(torch.arange(0))):
        mean, variance = model.reconstruct(x)
        assert mean.shape == variance.shape == model.log_density(y[:0], x).shape == (0, 5)


def test_uncertain_latents_are_averaged_over():
    toy = Toy()
    model = toy.model()
    q_x = Normal(toy.mean, toy.variance.sqrt())
    draws = toy.mean + toy.variance.sqrt() * torch.randn(6, 11, 2, generator=torch.Generator().manual_seed(7))
    means, variances = (torch.stack(parts) for parts in zip(*map(model.reconstruct, draws), strict=True))
    mean, variance = model.reconstruct(q_x, num_samples=6, seed=7)
    close(mean, means.mean(0))
    close(variance, variances.mean(0) + (means - mean).square().mean(0))
    density = torch.stack([model.log_density(toy.y, x) for x in draws]).exp().mean(0).log()
    close(model.log_density(toy.y, q_x, num_samples=6, seed=7), density)


def calls_that_draw(model, y):
    """Each of the calls that draw, as a function of its keywords that returns one tensor."""
    q_x = model.latents.q()
    return {
        "infer_latents": lambda **kwargs: model.infer_latents(y[:3], num_steps=2, **kwargs).mean,
        "reconstruct": lambda **kwargs: model.reconstruct(q_x, **kwargs).mean,
        "log_density": lambda **kwargs: model.log_density(y, q_x, **kwargs),
    }


@pytest.mark.parametrize("name", ["infer_latents", "reconstruct", "log_density"])
def test_draws_are_functions_of_the_seed_and_leave_the_global_state(trained, name):
    call = calls_that_draw(*trained)[name]
    before = torch.get_rng_state()
    first = call()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(call(), first)
    assert torch.equal(call(seed=0), first)
    assert not torch.equal(call(seed=1), first)


def test_relevance_orders_dimensions_by_spread_over_lengthscale():
    latents = VariationalLatents(torch.randn(50, 3) * torch.tensor([1.0, 0.1, 1.0]))
    model = BayesianGPLVM(latents, torch.randn(5, 3), 4)
    model.covar_module.base_kernel.lengthscale = torch.tensor([4.0, 1.0, 0.5])
    report = relevance(model)
    assert report.order.tolist() == [2, 0, 1]
    assert report.relevance[0] == 1
    close(report.lengthscale, torch.tensor([0.5, 4.0, 1.0]))
    close(report.relevance * report.spread[0] / 0.5, report.spread / report.lengthscale)
    assert str(report).splitlines()[1].split()[:2] == ["2", "1.000"]


def test_plot_shows_points_by_label_inducing_points_and_shade(trained):
    model, y = trained
    labels = torch.arange(len(y)) % 3
    ax = plot_latents(model, labels, resolution=7)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["0", "1", "2", "inducing points"]
    points = [collection.get_offsets() for collection in ax.collections]
    assert [len(p) for p in points] == [30, 30, 30, 15]
    first, second = relevance(model).order[:2].tolist()
    expected = model.latents.mean.detach()[labels == 1][:, [first, second]]
    close(torch.as_tensor(points[1].data), expected)
    (image,) = ax.images
    assert image.get_array().shape == (7, 7)
    assert ax.get_xlabel() == f"latent dimension {first}"
    mpl.pyplot.close(ax.figure)
