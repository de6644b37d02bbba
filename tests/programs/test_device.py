"""Device discipline without a GPU: a step runs on the meta device, reads back one value, and multiplies in full precision."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch.utils._python_dispatch import TorchDispatchMode

import tighter_gp
from tests.accelerator.device import synchronisations
from tests.tools.factories import GP
from tests.tools.support import Q_FORMS

V = gpytorch.variational
KERNELS = {
    "matern": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=3)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=[0, 1])) + LinearKernel(),
    "product": lambda: ScaleKernel(RQKernel() * MaternKernel(2.5)),
}


def build(kernel="matern", form="cholesky", batch=(), orthogonal=0, tasks=0, **kwargs):
    """A model of any kind on five inducing points."""
    batch = torch.Size([tasks] if tasks else batch)

    def make(model):
        parts = [torch.randn(5, 3), torch.randn(orthogonal, 3)][: 1 + bool(orthogonal)]
        q = [Q_FORMS[form](len(part), batch_shape=batch) for part in parts]
        kind = tighter_gp.SolveGPVariationalStrategy if orthogonal else tighter_gp.TighterVariationalStrategy
        strategy = kind(model, *parts, *q, **kwargs)
        return V.IndependentMultitaskVariationalStrategy(strategy, num_tasks=tasks) if tasks else strategy

    return GP(make, KERNELS[kernel]())


class Problem:
    """A model, its objective and one batch, on one device after another."""

    def __init__(self, likelihood=gpytorch.likelihoods.GaussianLikelihood, **kwargs):
        self.model, self.likelihood = build(**kwargs).train(), likelihood()
        self.mll = tighter_gp.TighterELBO(self.likelihood, self.model, num_data=100)
        self.x, self.y = torch.randn(7, 3), torch.ones(*kwargs.get("batch", ()), 7)
        self.index = torch.arange(7) if isinstance(kwargs.get("conditional"), tighter_gp.PerPoint) else None

    def to(self, device):
        for name in ("model", "likelihood", "mll", "x", "y", "index"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value.to(device))
        self.mll.zero_grad()
        return self

    def value(self):
        return self.mll(self.model(self.x, **({} if self.index is None else {"index": self.index})), self.y).sum()

    def step(self):
        (-self.value()).backward()
        return {name: parameter.grad for name, parameter in self.mll.named_parameters()}


class Latent(Problem):
    """Latent variables, whose rows are the input."""

    def __init__(self, **kwargs):
        self.model = tighter_gp.gplvm.BayesianGPLVM.from_data(
            torch.randn(20, 4), latent_dim=2, num_inducing=5, **kwargs
        )
        self.likelihood = self.model.likelihood
        self.mll = tighter_gp.gplvm.LatentVariableELBO(self.likelihood, self.model, num_data=20)
        self.x, self.y, self.index = torch.arange(7), torch.ones(7, 4), None

    def value(self):
        return self.mll(self.x, self.y)


LOGIT, POISSON = tighter_gp.likelihoods.BernoulliLogitLikelihood, tighter_gp.likelihoods.PoissonLikelihood
CASES = {
    "optimal": Problem,
    "solve-gp": lambda: Problem(orthogonal=4),
    "mean-field": lambda: Problem(form="mean_field"),
    "tril-natural": lambda: Problem(form="tril_natural"),
    "sum": lambda: Problem(kernel="sum"),
    "product": lambda: Problem(kernel="product"),
    "batch": lambda: Problem(batch=(2,)),
    "beta": lambda: Problem(conditional="beta"),
    "per-point": lambda: Problem(conditional=tighter_gp.PerPoint(100)),
    "bernoulli": lambda: Problem(LOGIT),
    "poisson, scalar": lambda: Problem(POISSON, conditional="scalar"),
    "solve-gp, bernoulli": lambda: Problem(LOGIT, orthogonal=4, conditional="beta"),
    "softmax": lambda: Problem(
        lambda: gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False), tasks=3, conditional="beta"
    ),
    "gplvm": Latent,
    "gplvm, beta": lambda: Latent(conditional="beta"),
}


class Watch(TorchDispatchMode):
    """Where tensors are, how often the host reads a value, and in which precision float32 matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.devices, self.reads, self.products = set(), [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # ATen lets CPU tensors slip in beside meta ones.
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        self.devices |= {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        if any(word in function.__name__ for word in ("_local_scalar_dense", "equal.default", "is_nonzero", "item")):
            self.reads.append(function.__name__)
        is_product = function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm")
        if is_product and tensors[0].dtype == torch.float32:
            self.products.add(torch.backends.cuda.matmul.fp32_precision)
        return result


@pytest.mark.parametrize("case", CASES)
def test_a_step_runs_on_the_meta_device_with_every_tensor_there(case):
    problem = CASES[case]()
    problem.step()  # sets q(u) up
    problem.to("meta")
    with Watch() as watch:
        gradients = problem.step()
    assert watch.devices == {"meta"}
    assert all(gradient is not None and gradient.is_meta for gradient in gradients.values())


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_back_one_value(case):
    """Success of the factorisation and finiteness of x. An objective looks at its targets once, where they are on the host."""
    problem = CASES[case]()
    problem.step()
    with Watch() as watch:
        problem.step()
    assert len(watch.reads) == 1 + ("gplvm" in case), watch.reads  # a GPLVM looks for missing entries on the host


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_an_accelerator_waits_for_one_value_and_has_the_numbers_of_the_cpu(case, accelerator):
    problem = CASES[case]()
    problem.step()
    problem.mll.zero_grad()
    torch.manual_seed(0)
    expected = problem.step()
    problem.to(accelerator).step()
    problem.mll.zero_grad()
    with gpytorch.settings.debug(False), synchronisations(accelerator) as found:
        gradients = problem.step()
    assert len(found) <= 1, found
    if case not in ("softmax", "gplvm", "gplvm, beta"):  # which draw samples
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-6, atol=1e-8)


def test_autocast_does_not_reach_kernel_projection_and_residual():
    torch.set_default_dtype(torch.float32)
    problem = Problem()
    problem.value()
    plain = problem.value()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = problem.value()
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def collapsed(x, y):
    kernel = ScaleKernel(MaternKernel(1.5))
    return tighter_gp.CollapsedGP(x, y, x[:5], kernel, gpytorch.likelihoods.GaussianLikelihood())


GAUSSIAN = gpytorch.likelihoods.GaussianLikelihood
REDUCED = {
    "step": lambda x, y: Problem().step(),
    "fit": lambda x, y: tighter_gp.fit(build(), GAUSSIAN(), x, y, steps=2),
    "fit, Bernoulli": lambda x, y: tighter_gp.fit(build(), LOGIT(), x, (y > 0).float(), steps=2),
    "kmeans": lambda x, y: tighter_gp.inducing.kmeans(x, 4),
    "predict": lambda x, y: tighter_gp.predict(build(), x),
    "collapsed bound": lambda x, y: collapsed(x, y).bound().backward(),
    "collapsed prediction": lambda x, y: collapsed(x, y).predict(x),
    "optimal q": lambda x, y: tighter_gp.set_optimal_q(build(), GAUSSIAN(), x, y),
}


@pytest.mark.parametrize("name", REDUCED)
def test_no_product_is_of_reduced_precision(name):
    """TF32 is a global switch; where numbers matter it is off, forward and backward, and afterwards as it was."""
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(20, 3), torch.randn(20)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with Watch() as watch:
            REDUCED[name](x, y)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert watch.products == {"ieee"}
