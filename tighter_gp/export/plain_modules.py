"""Kernels, means and likelihoods as plain modules: tensors and operations that every exporter knows."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch import kernels, likelihoods, means
from torch import Tensor

from ..likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from ..maths.quadrature import normal_rule
from ..predictions.densities import student_t_moments


class PlainKernel(torch.nn.Module):
    """A kernel as dense tensor operations."""

    parts: Any  # kernels inside this one
    dims: Tensor | None
    scale: Tensor
    alpha: Tensor
    _KINDS = {kernels.RBFKernel: "rbf", kernels.RQKernel: "rq", kernels.LinearKernel: "linear"}

    def __init__(self, kernel: Any, select: bool = True) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList()
        kind = type(kernel)
        self.register_buffer("dims", getattr(kernel, "active_dims", None) if select else None)
        if len(getattr(kernel, "batch_shape", torch.Size())):
            raise TypeError(f"export_predictor takes kernels without a batch shape; got {tuple(kernel.batch_shape)}.")
        if kind is kernels.ScaleKernel:
            self.kind = "scale"
            self.parts.append(PlainKernel(kernel.base_kernel, select=False))  # its dimensions are selected here
            self.register_buffer("scale", kernel.outputscale.detach().clone())
        elif kind in (kernels.AdditiveKernel, kernels.ProductKernel):
            self.kind = "sum" if kind is kernels.AdditiveKernel else "product"
            self.parts.extend(PlainKernel(part) for part in kernel.kernels)
        elif kind in self._KINDS or kind is kernels.MaternKernel:
            self.kind = self._KINDS.get(kind) or f"matern{int(2 * kernel.nu)}2"
            scale = kernel.variance if self.kind == "linear" else kernel.lengthscale
            # Matérn's constant goes with the lengthscale: in a graph a number may be rounded to float32.
            scale = scale.detach() / {"matern32": math.sqrt(3), "matern52": math.sqrt(5)}.get(self.kind, 1.0)
            self.register_buffer("scale", scale.clone().reshape(-1))
            if self.kind == "rq":
                self.register_buffer("alpha", kernel.alpha.detach().clone().reshape(()))
        else:
            raise TypeError(
                f"export_predictor does not know {kind.__name__}; it takes RBF, Matern, RQ, Linear, Scale kernels and their "
                "sums and products."
            )

    def _selected(self, x: Tensor) -> Tensor:
        return x if self.dims is None else x.index_select(-1, self.dims)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Covariance, ``B x M``."""
        x, z = self._selected(x), self._selected(z)
        if self.kind == "scale":
            return self.scale * self.parts[0](x, z)
        if self.kind in ("sum", "product"):
            return self._fold([part(x, z) for part in self.parts])
        if self.kind == "linear":
            return (x * self.scale) @ z.transpose(-2, -1)  # older ONNX exporters know no .mT
        centre = z.mean(-2)
        x, z = (x - centre) / self.scale, (z - centre) / self.scale
        norms = x.square().sum(-1, keepdim=True) + z.square().sum(-1)
        squared = (norms - 2 * x @ z.transpose(-2, -1)).clamp_min(0.0)
        if self.kind == "rbf":
            return torch.exp(-0.5 * squared)
        if self.kind == "rq":
            return torch.exp(-self.alpha * torch.log1p(squared / (2 * self.alpha)))
        distance = squared.sqrt()
        if self.kind == "matern12":
            return torch.exp(-distance)
        if self.kind == "matern32":
            return (1 + distance) * torch.exp(-distance)
        return (1 + distance + squared / 3) * torch.exp(-distance)

    def variance(self, x: Tensor) -> Tensor:
        """Its diagonal, ``B``."""
        x = self._selected(x)
        if self.kind == "scale":
            return self.scale * self.parts[0].variance(x)
        if self.kind in ("sum", "product"):
            return self._fold([part.variance(x) for part in self.parts])
        return (x.square() * self.scale).sum(-1) if self.kind == "linear" else torch.ones_like(x[..., 0])

    def _fold(self, values: list[Tensor]) -> Tensor:
        return functools.reduce(torch.add if self.kind == "sum" else torch.mul, values)


class PlainMean(torch.nn.Module):
    """A zero, constant or linear mean."""

    constant: Tensor
    weights: Tensor | None

    def __init__(self, mean: Any) -> None:
        super().__init__()
        kind = type(mean)
        is_known = kind in (means.ZeroMean, means.ConstantMean, means.LinearMean)
        if not is_known or len(getattr(mean, "batch_shape", torch.Size())):
            raise TypeError(
                f"export_predictor takes a zero, constant or linear mean of one output; got {kind.__name__}."
            )
        constant = getattr(mean, "bias" if kind is means.LinearMean else "constant", None)
        self.register_buffer("constant", torch.zeros(()) if constant is None else constant.detach().clone().reshape(()))
        self.register_buffer("weights", mean.weights.detach().clone() if kind is means.LinearMean else None)

    def forward(self, x: Tensor) -> Tensor:
        """The mean, ``B``."""
        if self.weights is None:
            return self.constant + torch.zeros_like(x[..., 0])
        return (x @ self.weights).squeeze(-1) + self.constant


class PlainResponse(torch.nn.Module):
    """Mean and variance of y from those of f."""

    noise_mean: Tensor
    noise: Tensor
    nodes: Tensor
    weights: Tensor
    _LINKS = {
        likelihoods.BernoulliLikelihood: "probit",
        BernoulliLogitLikelihood: "logit",
        PoissonLikelihood: "exp",
        likelihoods.PoissonLikelihood: "softplus",
    }

    def __init__(self, likelihood: Any) -> None:
        super().__init__()
        kind = type(likelihood)
        noise_mean, noise = torch.zeros(()), torch.zeros(())
        if kind in (likelihoods.GaussianLikelihood, likelihoods.LaplaceLikelihood, likelihoods.StudentTLikelihood):
            noise = likelihood.noise.detach().reshape(())
            if kind is likelihoods.LaplaceLikelihood:
                noise = 2 * noise
            elif kind is likelihoods.StudentTLikelihood:
                noise_mean, noise = (value.detach().reshape(()) for value in student_t_moments(likelihood))
        elif kind not in self._LINKS:
            raise TypeError(
                f"export_predictor does not know {kind.__name__}; it takes Gaussian, Student-t, Laplace, Bernoulli and Poisson "
                "likelihoods of one output, with noise that needs no argument."
            )
        self.link = self._LINKS.get(kind, "noise")
        nodes, weights = normal_rule()
        keep = weights > 1e-30
        found = {"noise_mean": noise_mean, "noise": noise, "nodes": nodes[keep], "weights": weights[keep]}
        for name, value in found.items():
            self.register_buffer(name, value.clone())

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, ``B`` each."""
        if self.link == "noise":
            return mean + self.noise_mean, variance + self.noise
        if self.link == "probit":
            # In float32, since ONNX's runtime has no other erf.
            ratio = (mean / (1 + variance).sqrt()).float()
            probs = (0.5 * (1 + torch.erf(ratio / math.sqrt(2)))).to(mean.dtype)
            return probs, probs * (1 - probs)
        if self.link == "exp":
            rate = torch.exp(mean + variance / 2)
            return rate, rate + rate.square() * torch.expm1(variance)
        nodes = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * self.nodes
        if self.link == "logit":
            probs = torch.sigmoid(nodes) @ self.weights
            return probs, probs * (1 - probs)
        rates = nodes.clamp_min(0.0) + torch.log1p(torch.exp(-nodes.abs()))  # ONNX's runtime has no softplus in float64
        rate = rates @ self.weights
        return rate, rate + (rates - rate.unsqueeze(-1)).square() @ self.weights
