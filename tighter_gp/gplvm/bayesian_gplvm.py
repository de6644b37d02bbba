"""The Bayesian Gaussian process latent variable model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean, ZeroMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy, _VariationalDistribution
from torch import Tensor
from torch.distributions import Distribution

from ..strategies import TighterVariationalStrategy
from .data import as_observed, principal_components
from .elbo import LatentVariableELBO
from .inference import infer_latents, log_density, reconstruct
from .latents import Latents, VariationalLatents

if TYPE_CHECKING:
    import numpy as np


class BayesianGPLVM(ApproximateGP):
    r"""
    Each column of the data is a GP of the same latent inputs, which are inferred too.

    .. math:: y_{np} = f_p(x_n) + \epsilon_{np}, \qquad f_p \sim \mathcal{GP}(0, k), \qquad x_n \sim \mathcal N(0, I)

    The :math:`P` outputs are a batch of latent GPs with one kernel and one set of inducing points between them, so that
    a step computes :math:`K_{ZZ}`, its Cholesky factor and the projection :math:`A` once. Train it with
    :class:`LatentVariableELBO`: with :class:`~tighter_gp.TighterVariationalStrategy` (default) this is the tighter
    TV-BGPLVM, with :class:`~gpytorch.variational.VariationalStrategy` the standard V-BGPLVM. Scale the data to zero mean
    and unit variance first. For another prior pass modules, or subclass and write :meth:`forward`.

    :param latents: q(x): :class:`VariationalLatents`, or :class:`Latents` of your own.
    :param inducing_points: :math:`Z`, shape ``M x Q``.
    :param num_outputs: :math:`P`.
    :param likelihood: Default :class:`~gpytorch.likelihoods.GaussianLikelihood` with one noise for all outputs; give it
        ``batch_shape=torch.Size([P])`` for one noise per output. Another likelihood needs ``conditional="beta"`` or
        ``"scalar"``.
    :param mean_module: Default :class:`~gpytorch.means.ZeroMean`.
    :param covar_module: Default RBF with one lengthscale per latent dimension and an output scale.
    :param variational_strategy: Class of the strategy.
    :param variational_distribution: Class of q(u).
    :param kwargs: Passed to the strategy: ``conditional=``, ``jitter_val=``, ``learn_inducing_locations=``.

    Example:
        >>> Y = torch.randn(40, 5)
        >>> model = tighter_gp.gplvm.BayesianGPLVM.from_data(Y, latent_dim=2, num_inducing=7)
        >>> elbo = tighter_gp.gplvm.LatentVariableELBO(model.likelihood, model, num_data=40)
        >>> dense, sparse = tighter_gp.gplvm.parameter_groups(model)
        >>> optimizers = [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam(sparse, lr=0.01)]
        >>> rows = torch.randint(40, (10,))
        >>> loss = -elbo(rows, Y[rows])
        >>> loss.backward()
        >>> for optimizer in optimizers:
        ...     optimizer.step()
        >>> bool(loss.isfinite())
        True
    """

    def __init__(
        self,
        latents: Latents,
        inducing_points: Tensor,
        num_outputs: int,
        likelihood: Likelihood | None = None,
        *,
        mean_module: Mean | None = None,
        covar_module: Kernel | None = None,
        variational_strategy: type[VariationalStrategy] = TighterVariationalStrategy,
        variational_distribution: type[_VariationalDistribution] = CholeskyVariationalDistribution,
        **kwargs: Any,
    ) -> None:
        batch_shape = torch.Size([num_outputs])
        q = variational_distribution(inducing_points.size(0), batch_shape=batch_shape)
        super().__init__(variational_strategy(self, inducing_points, q, **kwargs))
        self.num_outputs = num_outputs
        self.latents = latents
        self.likelihood = GaussianLikelihood() if likelihood is None else likelihood
        self.mean_module = ZeroMean() if mean_module is None else mean_module
        if covar_module is None:
            covar_module = ScaleKernel(RBFKernel(ard_num_dims=latents.latent_dim))
        self.covar_module = covar_module
        self.to(inducing_points)

    @classmethod
    def from_data(
        cls,
        targets: Tensor | np.ndarray,
        latent_dim: int,
        num_inducing: int,
        likelihood: Likelihood | None = None,
        *,
        mask: Tensor | np.ndarray | None = None,
        prior: Distribution | None = None,
        stddev: float = 0.1,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> BayesianGPLVM:
        r"""A model that starts from the principal components of the data.

        The means of q(x) are the unit-variance scores, the inducing points a random choice of them, and the lengthscales
        of the default kernel are one for the first component and longer for those that explain less.

        :param targets: Data, ``N x P``, a tensor or an array, whose precision the model takes; NaN marks a missing entry.
        :param latent_dim: :math:`Q \le P`.
        :param num_inducing: :math:`M \le N`.
        :param mask: True where observed, ``N x P``.
        :param prior: Distribution of one latent row; default :math:`\mathcal N(0, I)`.
        :param stddev: First standard deviation of q(x).
        :param generator: Source of randomness for the choice of inducing points, on any device.
        :param kwargs: Passed to the constructor.
        """
        data, _ = as_observed(targets, mask)
        if not 1 <= num_inducing <= data.size(0):
            raise ValueError(f"num_inducing must lie between 1 and the {data.size(0)} rows; got {num_inducing}.")
        scores, fraction = principal_components(data, latent_dim)
        device = "cpu" if generator is None else generator.device
        chosen = torch.randperm(data.size(0), generator=generator, device=device)[:num_inducing].to(data.device)
        latents = VariationalLatents(scores, prior, stddev)
        if "covar_module" not in kwargs:
            kernel = ScaleKernel(RBFKernel(ard_num_dims=latent_dim)).to(scores)
            kernel.base_kernel.lengthscale = fraction.rsqrt()
            kwargs["covar_module"] = kernel
        return cls(latents, scores[chosen].clone(), data.size(-1), likelihood, **kwargs)

    def forward(self, x: Tensor) -> MultivariateNormal:
        r"""The prior at latent inputs ``... x Q``, one for all outputs."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def objective(self, num_data: int, **kwargs: Any) -> LatentVariableELBO:
        """The objective to train this model with, of ``num_data`` rows; see :class:`LatentVariableELBO`."""
        return LatentVariableELBO(model=self, num_data=num_data, **{"likelihood": self.likelihood, **kwargs})

    # What the model says of new rows, with the model as their first argument.
    infer_latents = infer_latents
    reconstruct = reconstruct
    log_density = log_density
