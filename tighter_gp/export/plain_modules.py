"""Kernels and likelihoods as plain modules: tensors and operations that every exporter knows."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch import kernels, likelihoods
from torch import Tensor

from ..likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from ..likelihoods.family import of_gpytorch
from ..maths.quadrature import normal_rule
from ..predictions.densities import student_t_moments

# From squared distances in lengthscales, by kind or smoothness. The constants of Matérn kernels go with the lengthscale: in a
# graph a number may be rounded to float32.
_PROFILES: dict[Any, Any] = {
    kernels.RBFKernel: lambda squared, alpha: torch.exp(-0.5 * squared),
    kernels.RQKernel: lambda squared, alpha: torch.exp(-alpha * torch.log1p(squared / (2 * alpha))),
    0.5: lambda squared, alpha: torch.exp(-squared.sqrt()),
    1.5: lambda squared, alpha: (1 + squared.sqrt()) * torch.exp(-squared.sqrt()),
    2.5: lambda squared, alpha: (1 + squared.sqrt() + squared / 3) * torch.exp(-squared.sqrt()),
}
_COMBINED: dict[Any, Any] = {kernels.AdditiveKernel: torch.add, kernels.ProductKernel: torch.mul}
_KERNELS = {*_PROFILES, *_COMBINED, kernels.MaternKernel, kernels.LinearKernel, kernels.ScaleKernel}


class PlainKernel(torch.nn.Module):
    """A kernel as dense tensor operations.

    :param kernel: RBF, Matérn, rational quadratic or linear, scaled, added or multiplied.
    :param select: Whether this kernel selects its ``active_dims``; what a scale kernel holds leaves that to it.
    """

    dims: Tensor | None
    scale: Tensor
    alpha: Tensor | None

    def __init__(self, kernel: Any, select: bool = True) -> None:
        super().__init__()
        kind, nu = type(kernel), getattr(kernel, "nu", None)
        if len(kernel.batch_shape) or kind not in _KERNELS:
            raise TypeError(
                f"export_predictor does not know {kind.__name__} of batch shape {tuple(kernel.batch_shape)}; it takes RBF, "
                "Matern, RQ, Linear, Scale kernels without one and their sums and products."
            )
        is_scale = kind is kernels.ScaleKernel
        parts, scale = getattr(kernel, "kernels", []), torch.ones(())
        if is_scale:
            parts, scale = [kernel.base_kernel], kernel.outputscale
        elif kind is kernels.LinearKernel:
            scale = kernel.variance.reshape(-1)
        elif not parts:
            scale = kernel.lengthscale.reshape(-1) / (math.sqrt(2 * nu) if nu else 1)
        self.parts = torch.nn.ModuleList(PlainKernel(part, select=not is_scale) for part in parts)
        self.kind = nu or kind
        dims, alpha = kernel.active_dims if select else None, getattr(kernel, "alpha", None)
        for name, value in (("dims", dims), ("scale", scale), ("alpha", alpha)):
            self.register_buffer(name, None if value is None else value.detach().clone())

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Covariance, ``... x B x M``."""
        if self.dims is not None:
            x, z = x.index_select(-1, self.dims), z.index_select(-1, self.dims)
        if self.parts:
            combine = _COMBINED.get(self.kind, torch.mul)
            return self.scale * functools.reduce(combine, [part(x, z) for part in self.parts])
        if self.kind is kernels.LinearKernel:
            return (x * self.scale) @ z.transpose(-2, -1)  # older ONNX exporters know no .mT
        centre = z.mean(-2, keepdim=True)
        x, z = (x - centre) / self.scale, (z - centre) / self.scale
        norms = x.square().sum(-1, keepdim=True) + z.square().sum(-1).unsqueeze(-2)
        return _PROFILES[self.kind]((norms - 2 * x @ z.transpose(-2, -1)).clamp_min(0.0), self.alpha)

    def variance(self, x: Tensor) -> Tensor:
        """Its diagonal, ``B``: each point with itself, at a distance of exactly zero."""
        x = x.unsqueeze(-2)
        return self(x, x).reshape(-1)


def _probit(f: Tensor) -> Tensor:
    return (0.5 * (1 + torch.erf(f.float() / math.sqrt(2)))).to(f.dtype)  # ONNX's runtime has no erf in float64


def _softplus(f: Tensor) -> Tensor:
    return f.clamp_min(0.0) + torch.log1p(torch.exp(-f.abs()))  # nor a softplus


_LINKS: dict[type, Any] = {
    likelihoods.BernoulliLikelihood: _probit,
    BernoulliLogitLikelihood: torch.sigmoid,
    PoissonLikelihood: torch.exp,
    **dict.fromkeys(of_gpytorch("PoissonLikelihood"), _softplus),
}
_NOISY = (likelihoods.GaussianLikelihood, likelihoods.LaplaceLikelihood, likelihoods.StudentTLikelihood)


class PlainResponse(torch.nn.Module):
    """Mean and variance of y from those of f: f with noise, or a link by quadrature."""

    noise_mean: Tensor
    noise: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, likelihood: Any) -> None:
        super().__init__()
        kind = type(likelihood)
        if kind not in (*_NOISY, *_LINKS):
            raise TypeError(
                f"export_predictor does not know {kind.__name__}; it takes Gaussian, Student-t, Laplace, Bernoulli and Poisson "
                "likelihoods of one output, with noise that needs no argument."
            )
        self.link = _LINKS.get(kind)
        noise_mean, noise = torch.zeros(()), getattr(likelihood, "noise", torch.zeros(()))
        if kind is likelihoods.LaplaceLikelihood:
            noise = 2 * noise
        elif kind is likelihoods.StudentTLikelihood:
            noise_mean, noise = student_t_moments(likelihood)
        nodes, weights = normal_rule()
        if self.link is _probit:  # has a closed form
            nodes, weights = torch.zeros(1), torch.ones(1)
        keep = weights > 1e-30
        values = noise_mean.reshape(()), noise.reshape(()), nodes[keep], weights[keep]
        for name, value in zip(("noise_mean", "noise", "nodes", "weights"), values, strict=True):
            self.register_buffer(name, value.detach().clone())

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, ``B`` each."""
        if self.link is None:
            return mean + self.noise_mean, variance + self.noise
        if self.link is _probit:
            mean = mean / (1 + variance).sqrt()
        values = self.link(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * self.nodes)  # E[y | f]: [B, K]
        within = values * (1 - values) if self.link in (_probit, torch.sigmoid) else values  # Var[y | f]
        y_mean = values @ self.weights
        return y_mean, (within + (values - y_mean.unsqueeze(-1)).square()) @ self.weights
