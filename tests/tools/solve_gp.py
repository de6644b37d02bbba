"""Problems of SOLVE-GP with two sets of inducing variables, and their equations written out. Sizes: N=17, M_u=5, M_v=3, D=2."""

from __future__ import annotations

import math

import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

from tests.tools import dense
from tests.tools.factories import GP, make_gp, make_kernel
from tests.tools.support import Q_FORMS
from tighter_gp import SolveGPVariationalStrategy

DISTRIBUTIONS = tuple(Q_FORMS.values())
MU, MV = 5, 3


def make_solve_gp(
    z,
    o,
    kernel=None,
    q_u=None,
    q_v=None,
    *,
    distributions=(CholeskyVariationalDistribution, CholeskyVariationalDistribution),
    jitter_val: float | None = 0.0,
    mean: float = 0.0,
    batch_shape: torch.Size = torch.Size(),
    **kwargs,
) -> GP:
    """With ``q_u = (mean, root)`` and ``q_v`` likewise, the whitened distributions are set to these."""
    first, second = (
        kind(points.size(-2), batch_shape=batch_shape) for kind, points in zip(distributions, (z, o), strict=True)
    )
    make = lambda model: SolveGPVariationalStrategy(model, z, o, first, second, jitter_val=jitter_val, **kwargs)
    model = GP(make, kernel, mean)
    if q_u is not None:
        set_cholesky(first, q_u)
        set_cholesky(second, q_v)
        model.variational_strategy.variational_params_initialized.fill_(1)
    return model


def set_cholesky(distribution, q) -> None:
    distribution.variational_mean.data.copy_(q[0])
    distribution.chol_variational_covar.data.copy_(q[1])


def joint_svgp(z, o, kernel, q_u, q_v, jitter_val, mean=0.0) -> GP:
    """GPyTorch's own SVGP on both sets of points, with a block-diagonal whitened covariance."""
    q = torch.cat([q_u[0], q_v[0]]), torch.block_diag(q_u[1], q_v[1])
    return make_gp(torch.cat([z, o]), kernel, q, strategy=VariationalStrategy, jitter_val=jitter_val, mean=mean)


class Joint:
    """A problem of tests.tools.dense with its inducing points cut in two, every matrix written out."""

    def __init__(self, seed: int = 0, hetero: bool = False, kernel: str = "rbf"):
        p = dense.problem(seed, m=MU + MV, hetero=hetero, kernel=kernel)
        self.p, self.z, self.o = p, p.z[:MU], p.z[MU:]
        u, v = slice(MU), slice(MU, None)
        inverse = torch.linalg.inv(p.Kuu[u, u])
        self.Kuu, self.Kuf, self.Kuv = p.Kuu[u, u], p.Kuf[u], p.Kuu[u, v]
        self.Cvv = p.Kuu[v, v] - self.Kuv.T @ inverse @ self.Kuv
        self.cvf = p.Kuf[v] - self.Kuv.T @ inverse @ self.Kuf
        self.only_u = p._replace(z=self.z, Kuu=self.Kuu, Kuf=self.Kuf)
        Q = self.Kuf.T @ inverse @ self.Kuf
        self.only_u = self.only_u._replace(Q=Q, D=p.Kff - Q)

    @property
    def kernel(self):
        return make_kernel(self.p.kernel, self.p.variance, self.p.lengthscales)

    def projection(self):
        """H = [A; B] by the definitions."""
        A = torch.linalg.inv(torch.linalg.cholesky(self.Kuu)) @ self.Kuf
        B = torch.linalg.inv(torch.linalg.cholesky(self.Cvv)) @ self.cvf
        return torch.cat([A, B])

    def uncollapsed(self, q_u, q_v, m):
        """The bound at any q and scales, from unwhitened q(u) = N(mu, Su) and q(v) = N(mv, Sv) over N(0, Kuu), N(0, Cvv)."""
        p = self.p
        Lu, Lv = torch.linalg.cholesky(self.Kuu), torch.linalg.cholesky(self.Cvv)
        mu, Su = Lu @ q_u[0], Lu @ q_u[1] @ q_u[1].T @ Lu.T
        mv, Sv = Lv @ q_v[0], Lv @ q_v[1] @ q_v[1].T @ Lv.T
        Wu, Wv = torch.linalg.inv(self.Kuu) @ self.Kuf, torch.linalg.inv(self.Cvv) @ self.cvf
        d = (p.Kff - self.Kuf.T @ Wu - self.cvf.T @ Wv).diagonal()
        mean = Wu.T @ mu + Wv.T @ mv
        m = 1 / (1 + d / p.noise) if m is None else m
        variance = (Wu.T @ Su @ Wu + Wv.T @ Sv @ Wv).diagonal() + m * d
        expected = -0.5 * (torch.log(2 * math.pi * p.noise) + ((p.y - mean) ** 2 + variance) / p.noise).sum()
        kl_u, kl_v = dense.kl(mu, Su, 0 * mu, self.Kuu), dense.kl(mv, Sv, 0 * mv, self.Cvv)
        return expected - kl_u - kl_v + 0.5 * (1 + torch.log(m) - m).sum()

    def collapsed(self, penalty):
        """The bound at the best q, with explicit inverses and determinants."""
        p, H = self.p, self.projection()
        P_u, P_v = (torch.eye(len(X)) + X / p.noise @ X.T for X in (H[:MU], H[MU:]))
        quadratic = p.y @ torch.linalg.inv(H.T @ H + torch.diag(p.noise)) @ p.y
        logdets = torch.linalg.slogdet(P_u).logabsdet + torch.linalg.slogdet(P_v).logabsdet
        d = p.Kff.diagonal() - H.square().sum(0)
        return -0.5 * (torch.log(2 * math.pi * p.noise).sum() + quadratic + logdets) - penalty(d / p.noise)


def trace(ratio):
    return 0.5 * ratio.sum()


def logarithm(ratio):
    return 0.5 * torch.log(1 + ratio).sum()


def random_parts(seed: int = 0):
    return dense.random_q(MU, seed), dense.random_q(MV, seed + 100)
