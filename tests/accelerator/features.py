"""One small training step per feature of the package: what it trains, its data, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood, SoftmaxLikelihood
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from torch import Tensor

import tighter_gp
from tests.tools.factories import GP, CollapsedGP
from tighter_gp.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood

V = gpytorch.variational
N, B, M, D = 40, 12, 5, 3


class Step(NamedTuple):
    """One training step.

    :param module: Everything that has parameters; ``.to(device)`` moves it.
    :param data: The arguments of ``loss``, on the CPU.
    :param loss: From the data to a scalar.
    """

    module: torch.nn.Module
    data: tuple[Tensor, ...]
    loss: Callable[..., Tensor]

    def to(self, device: str) -> Step:
        self.module.to(device)
        return self._replace(data=tuple(tensor.to(device) for tensor in self.data))

    def gradients(self) -> dict[str, Tensor]:
        """Take the step without its update: the loss and all gradients, dense, on the CPU."""
        self.backward()
        found = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        dense = {name: (g.to_dense() if g.is_sparse else g).cpu() for name, g in found.items()}
        return dense

    def backward(self) -> Tensor:
        """The loss, and a gradient at every parameter."""
        for parameter in self.module.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        loss = self.loss(*self.data)
        loss.backward()
        return loss.detach()


def kernel(num_dims: int = D, batch: torch.Size = torch.Size()) -> ScaleKernel:
    return ScaleKernel(MaternKernel(1.5, ard_num_dims=num_dims, batch_shape=batch), batch_shape=batch)


def make_model(
    strategy: str = "svgp",
    distribution: Any = V.CholeskyVariationalDistribution,
    num_functions: int | None = None,
    wrap: Callable[[Any], Any] | None = None,
    num_inducing: int = M,
    covar_module: gpytorch.kernels.Kernel | None = None,
    **kwargs: Any,
) -> GP:
    shape = torch.Size(() if num_functions is None else (num_functions,))

    def make(model: Any) -> Any:
        q = distribution(num_inducing, batch_shape=shape)
        if strategy == "svgp":
            made = tighter_gp.TighterVariationalStrategy(model, torch.randn(num_inducing, D), q, **kwargs)
        else:
            second = distribution(num_inducing - 1, batch_shape=shape)
            made = tighter_gp.SolveGPVariationalStrategy(
                model, torch.randn(num_inducing, D), torch.randn(num_inducing - 1, D), q, second, **kwargs
            )
        return made if wrap is None else wrap(made)

    return GP(make, kernel(batch=shape) if covar_module is None else covar_module)


def simple(likelihood: Any = GaussianLikelihood, target: str = "real", index: bool = False, **kwargs: Any) -> Step:
    """A model of one strategy, perhaps wrapped, and TighterELBO."""
    model, likelihood = make_model(**kwargs), likelihood()
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=N)
    x = torch.randn(B, D)
    targets = {
        "real": lambda: torch.randn(B),
        "binary": lambda: (torch.randn(B) > 0).to(x),
        "count": lambda: torch.randint(5, (B,)).to(x),
        "class": lambda: torch.randint(3, (B,)),
        "tasks": lambda: torch.randn(B, 3),
        "binary tasks": lambda: (torch.randn(B, 3) > 0).to(x),
    }
    y = targets[target]()
    if index:
        return Step(mll.train(), (x, y, torch.arange(B)), lambda x, y, rows: -mll(model(x, index=rows), y))
    return Step(mll.train(), (x, y), lambda x, y: -mll(model(x), y))


def independent(base: Any) -> Any:
    return V.IndependentMultitaskVariationalStrategy(base, num_tasks=3)


def lmc(base: Any) -> Any:
    return V.LMCVariationalStrategy(base, num_tasks=3, num_latents=2)


def softmax_likelihood() -> SoftmaxLikelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def task_noise() -> MultitaskGaussianLikelihood:
    return MultitaskGaussianLikelihood(num_tasks=3)


def blocks() -> Step:
    labels = torch.arange(N) // 4
    return simple(conditional=tighter_gp.Blocks(labels), index=True)


def gplvm(**kwargs: Any) -> Step:
    y = torch.randn(N, 4)
    model = tighter_gp.gplvm.BayesianGPLVM.from_data(y, latent_dim=2, num_inducing=M, **kwargs)
    elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=N)
    return Step(elbo.train(), (torch.arange(B), y[:B]), lambda rows, y: -elbo(rows, y))


def collapsed_gplvm() -> Step:
    y = torch.randn(N, 4)
    latents = tighter_gp.gplvm.VariationalLatents.from_pca(y, 2, sparse=False)
    model = tighter_gp.gplvm.CollapsedBayesianGPLVM(latents, latents.mean[:M].detach(), y)
    return Step(model.train(), (), lambda: -model())


class Layer(DeepGPLayer):
    def __init__(self, num_inputs: int, num_outputs: int | None, conditional: str):
        shape = torch.Size(() if num_outputs is None else (num_outputs,))
        q = V.CholeskyVariationalDistribution(M, batch_shape=shape)
        points = torch.randn(M, num_inputs)
        strategy = tighter_gp.TighterVariationalStrategy(self, points, q, conditional=conditional)
        super().__init__(strategy, num_inputs, num_outputs)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel(num_inputs, shape)

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(D, 2, "scalar"), Layer(2, None, "optimal")

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def deep_gp() -> Step:
    model, likelihood = Deep(), GaussianLikelihood()
    mll = gpytorch.mlls.DeepApproximateMLL(tighter_gp.TighterELBO(likelihood, model, N))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with gpytorch.settings.num_likelihood_samples(3):
            return -mll(model(x), y)

    return Step(mll.train(), (torch.randn(B, D), torch.randn(B)), loss)


def collapsed_kernel() -> Step:
    x, y, likelihood = torch.randn(N, D), torch.randn(N), GaussianLikelihood()
    model = CollapsedGP(x, y, torch.randn(M, D), ScaleKernel(RBFKernel()), likelihood)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return Step(mll.train(), (x, y), lambda x, y: -mll(model(*model.train_inputs), model.train_targets))


def collapsed_gp() -> Step:
    x, y = torch.randn(N, D), torch.randn(N)
    model = tighter_gp.CollapsedGP(x, y, torch.randn(M, D), kernel(), GaussianLikelihood(), chunk_size=16)
    return Step(model.train(), (), lambda: -model.bound())


BERNOULLI = {"likelihood": BernoulliLogitLikelihood, "target": "binary"}

FEATURES: dict[str, Callable[[], Step]] = {
    "T-SVGP": simple,
    "T-SVGP, beta": lambda: simple(conditional="beta"),
    "T-SVGP, scalar": lambda: simple(conditional="scalar"),
    "T-SVGP, sum of kernels": lambda: simple(covar_module=kernel() + LinearKernel()),
    "T-SVGP, periodic kernel": lambda: simple(covar_module=ScaleKernel(PeriodicKernel())),
    "T-SVGP, product of kernels": lambda: simple(covar_module=ScaleKernel(RQKernel() * RBFKernel(active_dims=[0, 2]))),
    "PerPoint": lambda: simple(conditional=tighter_gp.PerPoint(N), index=True),
    "Blocks": blocks,
    "SOLVE-GP": lambda: simple(strategy="solve"),
    "Bernoulli, beta": lambda: simple(conditional="beta", **BERNOULLI),
    "Bernoulli, optimal": lambda: simple(**BERNOULLI),
    "SOLVE-GP, Bernoulli": lambda: simple(strategy="solve", **BERNOULLI),
    "Poisson, scalar": lambda: simple(PoissonLikelihood, "count", conditional="scalar"),
    "softmax, beta": lambda: simple(softmax_likelihood, "class", wrap=independent, num_functions=3, conditional="beta"),
    "softmax, optimal": lambda: simple(softmax_likelihood, "class", wrap=independent, num_functions=3),
    "multitask": lambda: simple(task_noise, "tasks", wrap=independent, num_functions=3),
    "LMC": lambda: simple(task_noise, "tasks", wrap=lmc, num_functions=2),
    "LMC, Bernoulli": lambda: simple(BernoulliLogitLikelihood, "binary tasks", wrap=lmc, num_functions=2),
    "GPLVM": gplvm,
    "GPLVM, beta": lambda: gplvm(conditional="beta"),
    "collapsed GPLVM": collapsed_gplvm,
    "deep GP": deep_gp,
    "mean-field q(u)": lambda: simple(distribution=V.MeanFieldVariationalDistribution),
    "delta q(u)": lambda: simple(distribution=V.DeltaVariationalDistribution),
    "natural q(u)": lambda: simple(distribution=V.NaturalVariationalDistribution),
    "tril-natural q(u)": lambda: simple(distribution=V.TrilNaturalVariationalDistribution),
    "collapsed kernel": collapsed_kernel,
    "CollapsedGP": collapsed_gp,
}
