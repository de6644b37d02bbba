"""Device discipline without a GPU: a training step runs on the meta device, and reads back one value on the CPU."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tighter_gp
from tests.accelerator.device import synchronisations
from tests.tools.factories import GP

V = gpytorch.variational


class OnlyOn(TorchDispatchMode):
    """Fails if any tensor with a dimension is on another device: ATen lets CPU tensors slip in beside meta ones."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                self.count += 1
                assert leaf.device.type == self.device, f"{function} has a tensor on {leaf.device}"
        return result


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in function.__name__ for word in ("_local_scalar_dense", "equal.default", "is_nonzero", "item")):
            self.reads.append(function.__name__)
        return function(*args, **(kwargs or {}))


def kernels():
    from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel

    return {
        "matern": ScaleKernel(MaternKernel(1.5, ard_num_dims=3)),
        "sum": ScaleKernel(RBFKernel(active_dims=[0, 1])) + LinearKernel(),
        "product": ScaleKernel(RQKernel() * MaternKernel(2.5)),
    }


def build(strategy="svgp", distribution=V.CholeskyVariationalDistribution, kernel="matern", batch=(), **kwargs):
    batch = torch.Size(batch)

    def make(model):
        if strategy == "svgp":
            return tighter_gp.TighterVariationalStrategy(
                model, torch.randn(5, 3), distribution(5, batch_shape=batch), **kwargs
            )
        return tighter_gp.SolveGPVariationalStrategy(
            model,
            torch.randn(5, 3),
            torch.randn(4, 3),
            distribution(5, batch_shape=batch),
            distribution(4, batch_shape=batch),
            **kwargs,
        )

    return GP(make, kernels()[kernel])


CASES = {
    "optimal": ({}, gpytorch.likelihoods.GaussianLikelihood),
    "solve-gp": ({"strategy": "solve"}, gpytorch.likelihoods.GaussianLikelihood),
    "mean-field": ({"distribution": V.MeanFieldVariationalDistribution}, gpytorch.likelihoods.GaussianLikelihood),
    "tril-natural": ({"distribution": V.TrilNaturalVariationalDistribution}, gpytorch.likelihoods.GaussianLikelihood),
    "sum": ({"kernel": "sum"}, gpytorch.likelihoods.GaussianLikelihood),
    "product": ({"kernel": "product"}, gpytorch.likelihoods.GaussianLikelihood),
    "batch": ({"batch": (2,)}, gpytorch.likelihoods.GaussianLikelihood),
    "beta": ({"conditional": "beta"}, gpytorch.likelihoods.GaussianLikelihood),
    "scalar": ({"conditional": "scalar"}, gpytorch.likelihoods.GaussianLikelihood),
    "bernoulli": ({"conditional": "beta"}, tighter_gp.likelihoods.BernoulliLogitLikelihood),
    "poisson": ({"conditional": "scalar"}, tighter_gp.likelihoods.PoissonLikelihood),
    "curvature": ({"conditional": "optimal"}, tighter_gp.likelihoods.BernoulliLogitLikelihood),
    "solve-gp bernoulli": (
        {"strategy": "solve", "conditional": "beta"},
        tighter_gp.likelihoods.BernoulliLogitLikelihood,
    ),
}


def step(model, likelihood, x, y, **kwargs):
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=100)
    (-mll(model(x, **kwargs), y)).sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_a_step_runs_on_the_meta_device_with_every_tensor_there(case):
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments).to("meta"), likelihood().to("meta")
    model.train()
    batch = arguments.get("batch", ())
    with OnlyOn("meta") as mode:
        step(model, likelihood, torch.empty(7, 3, device="meta"), torch.empty(*batch, 7, device="meta"))
    assert mode.count > 50
    gradients = [parameter.grad for parameter in [*model.parameters(), *likelihood.parameters()]]
    assert all(gradient is not None and gradient.is_meta for gradient in gradients)


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_back_one_value(case):
    """Success of the factorisation and finiteness of x. The targets are looked at where they are, on the host."""
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments), likelihood()
    model.train()
    x, y = torch.randn(7, 3), torch.ones(*arguments.get("batch", ()), 7)
    step(model, likelihood, x, y)  # the first call initialises q(u)
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=100)
    with HostReads() as reads:
        (-mll(model(x), y)).sum().backward()
    assert len(reads.reads) == 1, reads.reads


class Softmax(GP):
    """Three latent functions with one kernel, one set of inducing points and one label per point."""

    def __init__(self):
        def make(model):
            q = V.CholeskyVariationalDistribution(5, batch_shape=torch.Size([3]))
            inner = tighter_gp.TighterVariationalStrategy(model, torch.randn(5, 3), q, conditional="beta")
            return V.IndependentMultitaskVariationalStrategy(inner, num_tasks=3, task_dim=-1)

        super().__init__(make, kernels()["matern"])


def several():
    """Steps that are not a model with one target per point: name, model, and a step at a device."""
    softmax = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)

    def label_step(model, device):
        step(model, softmax, torch.ones(7, 3, device=device), torch.ones(7, dtype=torch.int64, device=device))

    noise = {device: gpytorch.likelihoods.GaussianLikelihood().to(device) for device in ("cpu", "meta")}

    def row_step(model, device):
        x, y = torch.ones(7, 3, device=device), torch.ones(7, device=device)
        step(model, noise[device], x, y, index=rows(device))

    def rows(device):
        return torch.ones(7, dtype=torch.int64, device=device)

    def latent_step(model, device):
        elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=20)
        (-elbo(rows(device), torch.ones(7, 4, device=device))).backward()

    def gplvm(**kwargs):
        return tighter_gp.gplvm.BayesianGPLVM.from_data(torch.randn(20, 4), latent_dim=2, num_inducing=5, **kwargs)

    return {
        "softmax": (Softmax, label_step),
        "per-point": (lambda: build(conditional=tighter_gp.PerPoint(100)), row_step),
        "gplvm": (gplvm, latent_step),
        "gplvm beta": (lambda: gplvm(conditional="beta"), latent_step),
    }


@pytest.mark.parametrize("case", several())
def test_steps_of_other_kinds_run_on_the_meta_device(case):
    make, take_step = several()[case]
    model = make().train()
    take_step(model, "cpu")  # initialises q(u)
    model = model.to("meta")
    for parameter in model.parameters():
        parameter.grad = None
    with OnlyOn("meta") as mode:
        take_step(model, "meta")
    assert mode.count > 50
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("case", several())
def test_steps_of_other_kinds_read_back_one_value(case):
    make, take_step = several()[case]
    model = make().train()
    take_step(model, "cpu")
    with HostReads() as reads:
        take_step(model, "cpu")
    assert len(reads.reads) == 1, reads.reads


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_an_accelerator_waits_for_one_value_without_debug(case, accelerator):
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments).to(accelerator).train(), likelihood().to(accelerator)
    x, y = torch.randn(7, 3).to(accelerator), torch.ones(*arguments.get("batch", ()), 7).to(accelerator)
    step(model, likelihood, x, y)
    with gpytorch.settings.debug(False), synchronisations(accelerator) as found:
        step(model, likelihood, x, y)
    assert len(found) <= 1, found


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_an_accelerator_gives_the_numbers_of_the_cpu(case, accelerator):
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments), likelihood()
    x, y = torch.randn(7, 3), torch.ones(*arguments.get("batch", ()), 7)
    step(model, likelihood, x, y)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model, likelihood = model.to(accelerator), likelihood.to(accelerator)
    model.zero_grad()
    step(model, likelihood, x.to(accelerator), y.to(accelerator))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), expected[name], rtol=1e-6, atol=1e-8)


def test_autocast_does_not_reach_kernel_projection_and_residual():
    torch.set_default_dtype(torch.float32)
    model, likelihood = build(), gpytorch.likelihoods.GaussianLikelihood()
    x, y = torch.randn(64, 3), torch.randn(64)
    model.train()
    model(x)
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=64)
    plain = mll(model(x), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mll(model(x), y)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_reduced_matmul_precision_does_not_reach_kernel_projection_and_residual(monkeypatch):
    """TF32 is a global switch; inside the step it is off, and afterwards as it was."""
    seen = []
    original = torch.linalg.solve_triangular

    def spy(*args, **kwargs):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return original(*args, **kwargs)

    model, likelihood = build(), gpytorch.likelihoods.GaussianLikelihood()
    x, y = torch.randn(7, 3), torch.randn(7)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        step(model, likelihood, x, y)
        monkeypatch.setattr(torch.linalg, "solve_triangular", spy)
        step(model, likelihood, x, y)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert set(seen) == {"ieee"}
    assert len(seen) >= 4  # forward and backward


class Products(TorchDispatchMode):
    """In which precision float32 matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        return function(*args, **(kwargs or {}))


def collapsed(x, y):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
    return tighter_gp.CollapsedGP(x, y, x[:5], kernel, gpytorch.likelihoods.GaussianLikelihood())


REDUCED = {
    "fit": lambda x, y: tighter_gp.fit(
        build(), gpytorch.likelihoods.GaussianLikelihood(), x, y, steps=2, progress=False
    ),
    "fit, Bernoulli": lambda x, y: tighter_gp.fit(
        build(), tighter_gp.likelihoods.BernoulliLogitLikelihood(), x, (y > 0).float(), steps=2, progress=False
    ),
    "kmeans": lambda x, y: tighter_gp.inducing.kmeans(x, 4),
    "predict": lambda x, y: tighter_gp.predict(build(), x),
    "collapsed bound": lambda x, y: collapsed(x, y).bound().backward(),
    "collapsed prediction": lambda x, y: collapsed(x, y).predict(x),
    "optimal q": lambda x, y: tighter_gp.set_optimal_q(build(), gpytorch.likelihoods.GaussianLikelihood(), x, y),
}


@pytest.mark.parametrize("name", REDUCED)
def test_no_product_is_of_reduced_precision(name):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(20, 3), torch.randn(20)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with Products() as products:
            REDUCED[name](x, y)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert products.seen
    assert set(products.seen) == {"ieee"}
