"""Device discipline without a GPU: a training step runs on the meta device, and reads back one value on the CPU."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tighter_gp
from tests.factories import GP

V = gpytorch.variational
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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
}


def step(model, likelihood, x, y):
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=100)
    (-mll(model(x), y)).sum().backward()


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
def test_model_and_objective_read_back_one_value_each(case):
    """The model: success of the factorisation and finiteness of x. The objective: finiteness of y."""
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments), likelihood()
    model.train()
    x, y = torch.randn(7, 3), torch.ones(*arguments.get("batch", ()), 7)
    step(model, likelihood, x, y)  # the first call initialises q(u)
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=100)
    with HostReads() as reads:
        q = model(x)
    assert len(reads.reads) == 1, reads.reads
    with HostReads() as reads:
        loss = -mll(q, y).sum()
    assert len(reads.reads) <= 1, reads.reads
    with HostReads() as reads:
        loss.backward()
    assert reads.reads == []


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_cuda_gives_the_numbers_of_the_cpu(case):
    arguments, likelihood = CASES[case]
    model, likelihood = build(**arguments), likelihood()
    x, y = torch.randn(7, 3), torch.ones(*arguments.get("batch", ()), 7)
    step(model, likelihood, x, y)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model, likelihood = model.cuda(), likelihood.cuda()
    model.zero_grad()
    step(model, likelihood, x.cuda(), y.cuda())
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
        seen.append(torch.get_float32_matmul_precision())
        return original(*args, **kwargs)

    model, likelihood = build(), gpytorch.likelihoods.GaussianLikelihood()
    x, y = torch.randn(7, 3), torch.randn(7)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        step(model, likelihood, x, y)
        monkeypatch.setattr(torch.linalg, "solve_triangular", spy)
        step(model, likelihood, x, y)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
    assert len(seen) >= 4  # forward and backward
