"""Kernels and likelihoods as plain modules: tensors and operations that every exporter knows."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch import kernels, likelihoods
from torch import Tensor

from ..likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from ..maths.quadrature import normal_rule
from ..predictions.densities import student_t_moments

# From squared distances in lengthscales. The constants of Matérn kernels go with the lengthscale: in a graph a number may be
# rounded to float32.
_PROFILES: dict[str, Any] = {
    "rbf": lambda squared, alpha: torch.exp(-0.5 * squared),
    "rq": lambda squared, alpha: torch.exp(-alpha * torch.log1p(squared / (2 * alpha))),
    "matern0.5": lambda squared, alpha: torch.exp(-squared.sqrt()),
    "matern1.5": lambda squared, alpha: (1 + squared.sqrt()) * torch.exp(-squared.sqrt()),
    "matern2.5": lambda squared, alpha: (1 + squared.sqrt() + squared / 3) * torch.exp(-squared.sqrt()),
}
_KINDS = {
    kernels.RBFKernel: "rbf",
    kernels.RQKernel: "rq",
    kernels.MaternKernel: "matern",
    kernels.LinearKernel: "linear",
    kernels.ScaleKernel: "scale",
    kernels.AdditiveKernel: "sum",
    kernels.ProductKernel: "product",
}


class PlainKernel(torch.nn.Module):
    """A kernel as dense tensor operations.

    :param kernel: RBF, Matérn, rational quadratic or linear, scaled, added or multiplied.
    :param select: Whether this kernel selects its ``active_dims``; what a scale kernel holds leaves that to it.
    """

    parts: Any  # kernels inside this one
    dims: Tensor | None
    scale: Any
    alpha: Any

    def __init__(self, kernel: Any, select: bool = True) -> None:
        super().__init__()
        if type(kernel) not in _KINDS or len(kernel.batch_shape):
            raise TypeError(
                f"export_predictor does not know {type(kernel).__name__} of batch shape {tuple(kernel.batch_shape)}; it takes "
                "RBF, Matern, RQ, Linear, Scale kernels without one and their sums and products."
            )
        self.kind = _KINDS[type(kernel)]
        scale: Any = None
        alpha: Any = None
        inside = [kernel.base_kernel] if self.kind == "scale" else getattr(kernel, "kernels", [])
        self.parts = torch.nn.ModuleList(PlainKernel(part, select=self.kind != "scale") for part in inside)
        if self.kind == "scale":
            scale = kernel.outputscale
        elif self.kind == "linear":
            scale = kernel.variance.reshape(-1)
        elif not inside:
            scale, alpha = kernel.lengthscale.reshape(-1), getattr(kernel, "alpha", None)
        if self.kind == "matern":
            self.kind, scale = f"matern{kernel.nu}", scale / math.sqrt(2 * kernel.nu)
        for name, value in (("dims", kernel.active_dims if select else None), ("scale", scale), ("alpha", alpha)):
            self.register_buffer(name, None if value is None else value.detach().clone())

    def _selected(self, x: Tensor) -> Tensor:
        return x if self.dims is None else x.index_select(-1, self.dims)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Covariance, ``B x M``."""
        x, z = self._selected(x), self._selected(z)
        if self.parts:
            return self._combined([part(x, z) for part in self.parts])
        if self.kind == "linear":
            return (x * self.scale) @ z.transpose(-2, -1)  # older ONNX exporters know no .mT
        centre = z.mean(-2)
        x, z = (x - centre) / self.scale, (z - centre) / self.scale
        norms = x.square().sum(-1, keepdim=True) + z.square().sum(-1)
        return _PROFILES[self.kind]((norms - 2 * x @ z.transpose(-2, -1)).clamp_min(0.0), self.alpha)

    def variance(self, x: Tensor) -> Tensor:
        """Its diagonal, ``B``."""
        x = self._selected(x)
        if self.parts:
            return self._combined([part.variance(x) for part in self.parts])
        return (x.square() * self.scale).sum(-1) if self.kind == "linear" else torch.ones_like(x[..., 0])

    def _combined(self, values: list[Tensor]) -> Tensor:
        if self.kind == "scale":
            return self.scale * values[0]
        return functools.reduce(torch.add if self.kind == "sum" else torch.mul, values)


class PlainResponse(torch.nn.Module):
    """Mean and variance of y from those of f."""

    noise_mean: Tensor
    noise: Tensor
    nodes: Tensor
    weights: Tensor
    _LINKS = {
        likelihoods.GaussianLikelihood: "noise",
        likelihoods.LaplaceLikelihood: "noise",
        likelihoods.StudentTLikelihood: "noise",
        likelihoods.BernoulliLikelihood: "probit",
        BernoulliLogitLikelihood: "logit",
        PoissonLikelihood: "exp",
        likelihoods.PoissonLikelihood: "softplus",
    }

    def __init__(self, likelihood: Any) -> None:
        super().__init__()
        kind = type(likelihood)
        if kind not in self._LINKS:
            raise TypeError(
                f"export_predictor does not know {kind.__name__}; it takes Gaussian, Student-t, Laplace, Bernoulli and Poisson "
                "likelihoods of one output, with noise that needs no argument."
            )
        self.link = self._LINKS[kind]
        noise_mean, noise = torch.zeros(()), getattr(likelihood, "noise", torch.zeros(()))
        if kind is likelihoods.LaplaceLikelihood:
            noise = 2 * noise
        elif kind is likelihoods.StudentTLikelihood:
            noise_mean, noise = student_t_moments(likelihood)
        nodes, weights = normal_rule()
        keep = weights > 1e-30
        values = noise_mean.reshape(()), noise.reshape(()), nodes[keep], weights[keep]
        for name, value in zip(("noise_mean", "noise", "nodes", "weights"), values, strict=True):
            self.register_buffer(name, value.detach().clone())

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, ``B`` each."""
        if self.link == "noise":
            return mean + self.noise_mean, variance + self.noise
        if self.link == "probit":
            # In float32, since ONNX's runtime has no other erf.
            ratio = (mean / (1 + variance).sqrt()).float()
            probs = (0.5 * (1 + torch.erf(ratio / math.sqrt(2)))).to(mean.dtype)
            return probs, probs * (1 - probs)
        f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * self.nodes  # [B, K]
        if self.link == "logit":
            probs = torch.sigmoid(f) @ self.weights
            return probs, probs * (1 - probs)
        # ONNX's runtime has no softplus in float64.
        rates = torch.exp(f) if self.link == "exp" else f.clamp_min(0.0) + torch.log1p(torch.exp(-f.abs()))
        rate = rates @ self.weights
        return rate, rate + (rates - rate.unsqueeze(-1)).square() @ self.weights
