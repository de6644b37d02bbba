"""The methods that are compared start from the same place."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import tighter_gp
from benchmarks import data, models


def test_the_base_method_trains_as_gpytorchs_own_strategy_does():
    split = data.load_regression("toy")
    start = models.make_start(split.train_x, 7, 0)
    model, likelihood = models.make_regression("svgp", start)
    options = {
        "objective": VariationalELBO,
        "epochs": 5,
        "batch_size": 48,
        "recipe": tighter_gp.Recipe(natural=0, lr=0.05),
    }
    ours = tighter_gp.fit(model, likelihood, split.train_x, split.train_y, **options)

    class Stock(gpytorch.models.ApproximateGP):
        def __init__(self, points, kernel):
            q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    reference, other = models.make_regression("svgp", start)
    stock = Stock(start.points.clone(), reference.covar_module)
    theirs = tighter_gp.fit(stock, other, split.train_x, split.train_y, **options)
    torch.testing.assert_close(torch.tensor(ours.loss), torch.tensor(theirs.loss), rtol=1e-7, atol=1e-7)


def test_paired_methods_start_from_the_same_points_and_hyperparameters():
    split = data.load_regression("toy")
    start = models.make_start(split.train_x, 8, 3)
    assert torch.equal(start.points, models.make_start(split.train_x, 8, 3).points)
    made = {method: models.make_regression(method, start) for method in models.METHODS}
    for method, (model, likelihood) in made.items():
        strategy = model.variational_strategy
        points = [strategy.inducing_points]
        if models.METHODS[method].orthogonal:
            points.append(strategy.orthogonal_points)
        assert torch.equal(torch.cat(points), start.points)
        assert likelihood.noise.item() == made["svgp"][1].noise.item()
        assert likelihood.noise_covar.raw_noise_constraint.lower_bound.item() == pytest.approx(1e-6)
        assert torch.equal(
            model.covar_module.base_kernel.lengthscale, made["svgp"][0].covar_module.base_kernel.lengthscale
        )


def test_a_softmax_that_samples_marginals_agrees_with_gpytorchs_in_training():
    q = gpytorch.distributions.MultitaskMultivariateNormal(torch.randn(7, 3), torch.eye(21))
    labels = torch.arange(7) % 3
    with gpytorch.settings.num_likelihood_samples(20000):
        values = [
            kind(num_classes=3, mixing_weights=False).expected_log_prob(labels, q)
            for kind in (gpytorch.likelihoods.SoftmaxLikelihood, models.MarginalSoftmax)
        ]
    torch.testing.assert_close(*values, rtol=0.02, atol=0.02)
