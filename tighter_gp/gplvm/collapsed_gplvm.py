"""The Bayesian GPLVM with q(u) integrated out, for full-batch optimisers."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import Module, settings
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor
from torch.nn import Parameter

from ..maths.bounds import check_bound
from ..mlls.priors import log_prior
from .bayesian_gplvm import BayesianGPLVM
from .collapsed import (
    LatentProblem,
    constant_scale_bound,
    gauss_hermite_nodes,
    sobol_nodes,
    statistics,
    tighter_bound,
    titsias_bound,
)
from .data import as_observed
from .latents import VariationalLatents

# Up to two latent dimensions a product grid of this order, good to 1e-4 relative in the price; beyond, Sobol points.
_GRID_ORDER = 20


class CollapsedBayesianGPLVM(Module):
    r"""
    The collapsed bounds as a model of all the data: ``model()`` is the bound per datum, a deterministic function that
    L-BFGS can maximise.

    q(u) is at its optimum throughout, which takes an RBF-ARD kernel, Gaussian noise and :math:`O(NM^2)` memory. The
    expectation in the tighter bound is a quadrature in up to two latent dimensions and a mean over fixed Sobol points in
    more. All is computed in float64, whatever the precision of the parameters; give them in float64 too for the line search of
    L-BFGS, which needs the digits. When trained, :meth:`uncollapsed` gives the same
    model with q(u) written out, for predictions and new rows.

    :param latents: q(x), with ``sparse=False``; the prior may be any with a closed-form KL divergence.
    :param inducing_points: :math:`Z`, ``M x Q``.
    :param targets: :math:`Y`, ``N x P``; NaN marks a missing entry.
    :param likelihood: Default :class:`~gpytorch.likelihoods.GaussianLikelihood`; with ``batch_shape=torch.Size([P])`` one
        noise per output.
    :param covar_module: Default ``ScaleKernel(RBFKernel(ard_num_dims=Q))``.
    :param mask: True where observed, ``N x P``.
    :param bound: ``"tighter"`` (TV-BGPLVM), ``"constant"`` (one scale per row) or ``"titsias"`` (V-BGPLVM).
    :param num_nodes: Sobol points.
    :param jitter_val: Added to :math:`K_{ZZ}`; default :class:`~gpytorch.settings.variational_cholesky_jitter`.
    :param seed: Seed of the Sobol points.

    Example:
        >>> Y = torch.randn(30, 4, dtype=torch.float64)
        >>> latents = tighter_gp.gplvm.VariationalLatents.from_pca(Y, 2, sparse=False)
        >>> model = tighter_gp.gplvm.CollapsedBayesianGPLVM(latents, latents.mean[:6].detach(), Y)
        >>> optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = -model()
        ...     loss.backward()
        ...     return loss
        >>> start, end = model().item(), optimizer.step(closure) is not None and model().item()
        >>> end > start
        True
    """

    targets: Tensor
    observed: Tensor | None
    nodes: Tensor
    weights: Tensor | None

    def __init__(
        self,
        latents: VariationalLatents,
        inducing_points: Tensor,
        targets: Tensor,
        likelihood: GaussianLikelihood | None = None,
        covar_module: ScaleKernel | None = None,
        *,
        mask: Tensor | None = None,
        bound: str = "tighter",
        num_nodes: int = 64,
        jitter_val: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_bound(bound, ("tighter", "constant", "titsias"))
        targets, observed = as_observed(targets, mask)
        if not latents.prior.has_closed_form:
            raise TypeError(
                f"{type(latents.prior.distribution).__name__} has no closed-form KL divergence, so the bound would be random; "
                "use a Gaussian prior here, or train BayesianGPLVM, which samples."
            )
        latent_dim = latents.latent_dim
        self.latents, self.bound = latents, bound
        default = settings.variational_cholesky_jitter.value(dtype=inducing_points.dtype)
        self.jitter_val = default if jitter_val is None else jitter_val
        self.likelihood = GaussianLikelihood() if likelihood is None else likelihood
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=latent_dim)) if covar_module is None else covar_module
        base: Any = getattr(self.covar_module, "base_kernel", None)
        if type(self.covar_module) is not ScaleKernel or type(base) is not RBFKernel or base.active_dims is not None:
            raise TypeError(
                "The collapsed bounds have closed forms for ScaleKernel(RBFKernel(ard_num_dims=Q)); got "
                f"{type(covar_module).__name__}. Train BayesianGPLVM with another kernel."
            )
        if type(self.likelihood) is not GaussianLikelihood:
            raise TypeError(f"The collapsed bounds need a GaussianLikelihood; got {type(likelihood).__name__}.")
        self.inducing_points = Parameter(inducing_points.detach().clone())
        if latent_dim <= 2:
            nodes, weights = gauss_hermite_nodes(_GRID_ORDER, latent_dim, targets.double())
        else:
            nodes, weights = sobol_nodes(num_nodes, latent_dim, targets.double(), seed), None
        for name, tensor in (("targets", targets), ("observed", observed), ("nodes", nodes), ("weights", weights)):
            self.register_buffer(name, tensor, persistent=False)
        self.to(inducing_points)

    def problem(self) -> LatentProblem:
        """The parameters and the data, for the functions of :mod:`~tighter_gp.gplvm.collapsed`."""
        q_x = self.latents.q()
        return LatentProblem(
            mean=q_x.mean,
            variance=q_x.variance,
            inducing_points=self.inducing_points,
            outputscale=self.covar_module.outputscale,
            lengthscale=self.covar_module.base_kernel.lengthscale.reshape(-1).expand(self.latents.latent_dim),
            noise=self.likelihood.noise.reshape(-1),
            targets=self.targets,
            observed=self.observed,
            jitter=self.jitter_val,
        )

    def forward(self) -> Tensor:
        """The bound per datum, nats per row summed over its outputs, and the log density of priors over their number."""
        problem, kl = self.problem(), self.latents.kl_divergence().sum()
        if self.bound == "tighter":
            value = tighter_bound(problem, self.nodes, self.weights, kl=kl)
        elif self.bound == "constant":
            value = constant_scale_bound(problem, kl=kl)
        else:
            value = titsias_bound(problem, kl=kl)
        return (value + log_prior(self)) / self.targets.size(0)

    @torch.no_grad()
    def uncollapsed(self, **kwargs: Any) -> BayesianGPLVM:
        r"""The same model with q(u) at its optimum, sharing this one's modules.

        .. math:: q(u_p) = \mathcal N\bigl(K_{ZZ} W_p^{-1} \Psi_1^\top y_p/\sigma_p^2,\; K_{ZZ} W_p^{-1} K_{ZZ}\bigr)

        :param kwargs: Passed to :class:`BayesianGPLVM`.
        """
        z, num_outputs = self.inducing_points.detach().clone(), self.targets.size(-1)
        kwargs = {"covar_module": self.covar_module, "jitter_val": self.jitter_val, **kwargs}
        model = BayesianGPLVM(self.latents, z, num_outputs, self.likelihood, **kwargs)
        sums = statistics(self.problem())
        strategy: Any = model.variational_strategy
        strategy.set_optimal(sums.gram.expand(num_outputs, -1, -1), sums.linear)
        return model
