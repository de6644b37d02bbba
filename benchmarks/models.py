"""The four methods: SVGP and SOLVE-GP, each with the standard and with the tighter bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, SoftmaxLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, IndependentMultitaskVariationalStrategy
from torch import Tensor
from torch.distributions import Categorical

import tighter_gp
from tighter_gp.conditionals import BetaConditional, Conditional, OptimalConditional
from tighter_gp.inducing import kmeans, median_lengthscale, split_inducing_points

from .data import Split

# How every method is trained: natural gradients for q(u) and Adam for the rest, with the step sizes that ``fit`` has.
RECIPE = "default"

# GPyTorch's own floor is 1e-4, which some of the sets reach.
NOISE_FLOOR = 1e-6

# Rows that k-means looks at.
_MAX_ROWS = 50_000


class Method(NamedTuple):
    """A method.

    :param label: For tables and figures.
    :param orthogonal: Whether half of the points are SOLVE-GP's orthogonal ones.
    :param tighter: Whether it is trained with the tighter bound.
    """

    label: str
    orthogonal: bool
    tighter: bool

    @property
    def bound(self) -> str:
        """The bound that it is trained with, by its name in result lines."""
        return "bound_tighter" if self.tighter else "bound_base"


METHODS = {
    "svgp": Method("SVGP", False, False),
    "t-svgp": Method("T-SVGP", False, True),
    "solve-gp": Method("SOLVE-GP", True, False),
    "t-solve-gp": Method("T-SOLVE-GP", True, True),
}


class SparseGP(gpytorch.models.ApproximateGP):
    """A GP on inducing points, or a batch of them that share points and kernel.

    :param points: All inducing points, ``M x D``.
    :param kernel: The kernel.
    :param orthogonal: Whether to split the points into inducing and orthogonal ones.
    :param conditional: Who chooses the scales.
    :param num_latents: Number of latent functions; None for a single output.
    """

    def __init__(
        self,
        points: Tensor,
        kernel: Any,
        orthogonal: bool,
        conditional: str = "optimal",
        num_latents: int | None = None,
    ) -> None:
        batch_shape = torch.Size([] if num_latents is None else [num_latents])
        q = lambda z: CholeskyVariationalDistribution(z.size(-2), batch_shape=batch_shape)
        if orthogonal:
            inducing, rest = split_inducing_points(points)
            strategy: Any = tighter_gp.SolveGPVariationalStrategy(
                self, inducing, rest, q(inducing), q(rest), conditional=conditional
            )
        else:
            strategy = tighter_gp.TighterVariationalStrategy(self, points.clone(), q(points), conditional=conditional)
        if num_latents is not None:
            strategy = IndependentMultitaskVariationalStrategy(strategy, num_tasks=num_latents)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class MarginalSoftmax(SoftmaxLikelihood):
    """A softmax that samples the latents of each point on their own, in training and in evaluation.

    The bound and the density of a label need no more, and GPyTorch's draws from the joint distribution of all points
    outside of training.
    """

    def _draw_likelihood_samples(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Categorical:
        mean, stddev = function_dist.mean, function_dist.variance.sqrt()
        noise = torch.randn(gpytorch.settings.num_likelihood_samples.value(), *mean.shape).to(mean)
        return Categorical(logits=mean + stddev * noise)


class PriorConditional(Conditional):
    """The prior's own q(f|u): with it the tighter objective is the standard one, whose slopes natural gradients know."""

    is_strict = True

    def scale(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        """Nothing is narrower."""
        return torch.ones_like(residual)

    def penalty(self, residual: Tensor, *, index: Tensor | None = None) -> Tensor:
        """It costs nothing."""
        return torch.zeros_like(residual)


class Start(NamedTuple):
    """What paired methods share at the start, besides GPyTorch's own hyperparameters.

    :param points: Inducing points, ``M x D``.
    :param lengthscale: Median distance of two rows, from which a classifier starts.
    """

    points: Tensor
    lengthscale: Tensor


def make_start(x: Tensor, num_inducing: int, seed: int) -> Start:
    """Centres of k-means, and the median distance."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(x), generator=generator)[:_MAX_ROWS].to(x.device)
    subset = x if len(x) <= _MAX_ROWS else x[rows]
    return Start(kmeans(subset, num_inducing, seed=seed), median_lengthscale(subset, seed=seed))


def make_regression(method: str, start: Start) -> tuple[SparseGP, GaussianLikelihood]:
    """A model with a Matérn-3/2 kernel, one lengthscale per dimension, and its likelihood, as GPyTorch sets them up."""
    dim = start.points.size(-1)
    kernel = ScaleKernel(MaternKernel(1.5, ard_num_dims=dim))
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(NOISE_FLOOR))
    model = SparseGP(start.points, kernel, METHODS[method].orthogonal).to(start.points)
    return model, likelihood.to(start.points)


def make_classification(
    method: str, start: Start, num_classes: int, conditional: str = "beta"
) -> tuple[SparseGP, MarginalSoftmax]:
    """One latent GP per class, with shared inducing points and RBF kernel, and a softmax.

    :param conditional: Who chooses the scales of a tighter method: ``"beta"`` or ``"optimal"``.
    """
    kernel = ScaleKernel(RBFKernel())
    chosen: Any = conditional if METHODS[method].tighter else PriorConditional()
    if chosen == "optimal":
        chosen = OptimalConditional(num_steps=2)  # more make no difference to the seventh digit of the bound
    elif chosen == "beta":
        chosen = BetaConditional(torch.Size([num_classes]))
        # At the start all classes are equally likely, and E[-d^2 log p(y|f) / df^2] is p (1 - p).
        chosen.beta = num_classes**2 / (num_classes - 1)
    model = SparseGP(start.points, kernel, METHODS[method].orthogonal, chosen, num_classes).to(start.points)
    likelihood = MarginalSoftmax(num_classes=num_classes, mixing_weights=False).to(start.points)
    kernel.outputscale, kernel.base_kernel.lengthscale = 5.0, 0.5 * start.lengthscale
    return model, likelihood


def train(
    run: dict[str, Any],
    model: SparseGP,
    likelihood: Likelihood,
    data: Split,
    trace: Any,
    checkpoint: Path,
    resume: bool,
) -> tighter_gp.training.History:
    """Train a method by the default recipe; the model is left in eval mode."""
    config = run["config"]
    history = tighter_gp.fit(
        model,
        likelihood,
        data.train_x,
        data.train_y,
        objective=objective(run["method"], likelihood),
        epochs=config["epochs"],
        batch_size=config["batch_size"],
        seed=run["seed"],
        checkpoint=checkpoint,
        resume=resume,
        callbacks=[trace],
    )
    model.eval()
    likelihood.eval()
    return history


def warm_up() -> None:
    """Let torch load what it loads at the first step, so that no run is charged for it."""
    x = torch.rand(4, 1, generator=torch.Generator().manual_seed(0))
    model, likelihood = make_regression("svgp", Start(x[:2], torch.ones(())))
    tighter_gp.fit(model, likelihood, x, x[:, 0], steps=1, progress=False)


def objective(method: str, likelihood: Likelihood) -> Any:
    """The bound a method is trained with. A classifier's conditional makes of the tighter one what the method needs."""
    is_tighter = METHODS[method].tighter or isinstance(likelihood, SoftmaxLikelihood)
    return tighter_gp.TighterELBO if is_tighter else VariationalELBO


def regression_bounds(model: SparseGP, likelihood: Likelihood, data: Split) -> dict[str, float]:
    """Both bounds at a regression model's own parameters, nats per training point."""
    value = lambda kind: (
        float(tighter_gp.evaluate_bound(model, likelihood, data.train_x, data.train_y, objective=kind))
        / len(data.train_y)
    )
    return {"bound_tighter": value(tighter_gp.TighterELBO), "bound_base": value(VariationalELBO)}


def regression_scores(model: Any, likelihood: Likelihood, data: Split) -> dict[str, float]:
    """RMSE and mean NLPD on the test set, in units of the training targets' standard deviation."""
    with torch.no_grad():
        q = tighter_gp.predict(model, data.test_x)
        error = (q.mean - data.test_y).double()
        density = likelihood.log_marginal(data.test_y, q)
    return {"rmse": float(error.square().mean().sqrt()), "nlpd": -float(density.double().mean())}
