"""Slow oracles: the equations written out with inv and slogdet in float64, sharing no code with the package.

Names follow the paper: Kuu, Kuf, Kff, Q, D, d; q(w) = N(mw, Sw) in whitened coordinates u = L w.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def rbf(x1: Tensor, x2: Tensor, variance: float, lengthscales: Tensor) -> Tensor:
    difference = (x1.unsqueeze(-2) - x2.unsqueeze(-3)) / lengthscales
    return variance * torch.exp(-0.5 * difference.pow(2).sum(-1))


def matern32(x1: Tensor, x2: Tensor, variance: float, lengthscales: Tensor) -> Tensor:
    difference = (x1.unsqueeze(-2) - x2.unsqueeze(-3)) / lengthscales
    r = math.sqrt(3) * difference.pow(2).sum(-1).clamp_min(1e-300).sqrt()
    return variance * (1 + r) * torch.exp(-r)


KERNELS = {"rbf": rbf, "matern32": matern32}


class Problem(NamedTuple):
    """A regression problem with every matrix written out. Sizes differ so that no transpose hides."""

    x: Tensor
    y: Tensor
    z: Tensor
    noise: Tensor  # one variance per point
    Kuu: Tensor
    Kuf: Tensor
    Kff: Tensor
    Q: Tensor
    D: Tensor
    variance: float
    lengthscales: Tensor
    kernel: str

    @property
    def d(self) -> Tensor:
        return self.D.diagonal()


def problem(
    seed: int = 0, n: int = 17, m: int = 5, dim: int = 2, *, kernel: str = "rbf", hetero: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, dim, generator=generator)
    z = 3 * torch.rand(m, dim, generator=generator)
    lengthscales = 0.6 + torch.rand(dim, generator=generator)
    variance = 0.5 + float(torch.rand((), generator=generator))
    noise = 0.02 + 0.3 * torch.rand(n if hetero else 1, generator=generator).expand(n)
    k = KERNELS[kernel]
    Kff, Kuu, Kuf = (k(a, b, variance, lengthscales) for a, b in ((x, x), (z, z), (z, x)))
    y = torch.linalg.cholesky(Kff + torch.diag(noise)) @ torch.randn(n, generator=generator)
    Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
    return Problem(x, y, z, noise, Kuu, Kuf, Kff, Q, Kff - Q, variance, lengthscales, kernel)


def log_normal(y: Tensor, covariance: Tensor) -> Tensor:
    return -0.5 * (
        len(y) * math.log(2 * math.pi)
        + torch.linalg.slogdet(covariance).logabsdet
        + y @ torch.linalg.inv(covariance) @ y
    )


def evidence(p: Problem) -> Tensor:
    return log_normal(p.y, p.Kff + torch.diag(p.noise))


def base(p: Problem) -> Tensor:
    return log_normal(p.y, p.Q + torch.diag(p.noise))


def f1(p: Problem) -> Tensor:
    return base(p) - 0.5 * (p.d / p.noise).sum()


def f3(p: Problem, m: Tensor) -> Tensor:
    return base(p) - 0.5 * (m * p.d / p.noise - 1 - torch.log(m) + m).sum()


def f4(p: Problem) -> Tensor:
    return base(p) - 0.5 * torch.log(1 + p.d / p.noise).sum()


def f5(p: Problem) -> Tensor:
    return base(p) - 0.5 * len(p.y) * torch.log(1 + (p.d / p.noise).mean())


def f8(p: Problem) -> Tensor:
    return (
        base(p) - 0.5 * torch.linalg.slogdet(torch.eye(len(p.y)) + p.D / p.noise.sqrt().outer(p.noise.sqrt())).logabsdet
    )


def kl(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> Tensor:
    """KL divergence between two Gaussians."""
    inverse = torch.linalg.inv(cov2)
    return 0.5 * (
        torch.trace(inverse @ cov1)
        + (mean2 - mean1) @ inverse @ (mean2 - mean1)
        - len(mean1)
        + torch.linalg.slogdet(cov2).logabsdet
        - torch.linalg.slogdet(cov1).logabsdet
    )


def uncollapsed(p: Problem, mw: Tensor, Sw: Tensor, m: Tensor) -> Tensor:
    """F_2 with Gaussian noise at any whitened q and any scales, from the unwhitened definition."""
    L = torch.linalg.cholesky(p.Kuu)
    mu, Su, W = L @ mw, L @ Sw @ L.T, torch.linalg.inv(p.Kuu) @ p.Kuf
    mean, variance = W.T @ mu, (W.T @ Su @ W).diagonal() + m * p.d
    expected = -0.5 * (torch.log(2 * math.pi * p.noise) + ((p.y - mean) ** 2 + variance) / p.noise).sum()
    return expected - kl(mu, Su, torch.zeros_like(mu), p.Kuu) + 0.5 * (1 + torch.log(m) - m).sum()


def optimal_q(p: Problem) -> tuple[Tensor, Tensor]:
    """Whitened optimum of q, from the unwhitened posterior p(u) N(y; Kfu Kuu^-1 u, noise)."""
    L, inverse = torch.linalg.cholesky(p.Kuu), torch.linalg.inv(p.Kuu)
    precision = inverse + inverse @ p.Kuf @ torch.diag(1 / p.noise) @ p.Kuf.T @ inverse
    cov = torch.linalg.inv(precision)
    mean = cov @ inverse @ p.Kuf @ (p.y / p.noise)
    Linv = torch.linalg.inv(L)
    return Linv @ mean, Linv @ cov @ Linv.T


def random_q(m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random whitened mean and lower triangular root."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(m, m, generator=generator).tril(-1) * 0.3 + torch.diag(0.3 + torch.rand(m, generator=generator))
    return torch.randn(m, generator=generator), root
