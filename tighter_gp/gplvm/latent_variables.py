"""q(x): one Gaussian per row of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from gpytorch import Module
from gpytorch.constraints import Positive
from torch import Tensor
from torch.distributions import Distribution, Normal
from torch.nn import Parameter
from torch.nn.functional import embedding

from ..checks import check_device, check_range
from ..conditionals import PerPoint
from .data import principal_components
from .prior import LatentPrior


class Latents(Module, ABC):
    r"""Base of the latent modules: :math:`q(x_n) = \mathcal N(\mu_n, \mathrm{diag}\, s_n^2)` for rows asked for by index.

    Subclasses say how q is made; sampling and the KL divergence follow.

    :ivar int num_data: Number of rows :math:`N`.
    :ivar int latent_dim: :math:`Q`.
    :ivar LatentPrior prior: :math:`p(x_n)`.

    Example:
        >>> latents = tighter_gp.gplvm.VariationalLatents(torch.randn(20, 3))
        >>> isinstance(latents, tighter_gp.gplvm.Latents), latents.num_data, latents.latent_dim
        (True, 20, 3)
    """

    num_data: int
    latent_dim: int
    prior: LatentPrior

    @abstractmethod
    def q(self, index: Tensor | None = None) -> Normal:
        """The Gaussians of some rows, batch shape ``B x Q``; of all rows without ``index``."""

    def forward(self, index: Tensor | None = None, num_samples: int = 1) -> Tensor:
        """Draws of some rows that carry gradients, ``num_samples x B x Q``; of all rows without ``index``."""
        return self.q(index).rsample(torch.Size([num_samples]))

    def kl_divergence(self, index: Tensor | None = None) -> Tensor:
        r""":math:`\mathrm{KL}[q(x_n) \Vert p(x_n)]` of each row, shape ``B``; a sum over coordinates, not divided."""
        return self.prior.kl_divergence(self.q(index))

    def _check_index(self, index: Tensor) -> None:
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "index must be a vector of integers, the rows of the data in this batch; got "
                f"{str(index.dtype).removeprefix('torch.')} of shape {tuple(index.shape)}."
            )
        check_range(index, self.num_data, f"{self.num_data} rows")


class VariationalLatents(Latents):
    r"""
    Free mean and standard deviation for each row.

    A call with ``index`` touches those rows only and leaves sparse gradients on the two tables, so that a step costs
    the same whatever :math:`N`: give them to an optimizer that takes sparse gradients, see :func:`parameter_groups`.

    :param start: First means, ``N x Q``; see :meth:`from_pca`.
    :param prior: Distribution of one row; default :math:`\mathcal N(0, I)`.
    :param stddev: First standard deviation, a number or a tensor that broadcasts to ``N x Q``.
    :param sparse: Whether gradients of indexed rows are sparse. Turn it off for optimizers such as L-BFGS.
    :ivar torch.Tensor mean: :math:`\mu`, ``N x Q``.

    Example:
        >>> latents = tighter_gp.gplvm.VariationalLatents(torch.randn(20, 3))
        >>> rows = torch.tensor([4, 0, 11])
        >>> latents(rows).shape, latents.kl_divergence(rows).shape
        (torch.Size([1, 3, 3]), torch.Size([3]))
    """

    def __init__(
        self,
        start: Tensor,
        prior: Distribution | None = None,
        stddev: Tensor | float = 0.1,
        *,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        if start.dim() != 2 or not start.is_floating_point() or not bool(torch.isfinite(start).all()):
            raise ValueError(
                "start must be a finite floating point table N x Q, one row per datum; got "
                f"{str(start.dtype).removeprefix('torch.')} of shape {tuple(start.shape)}."
            )
        self.num_data, self.latent_dim = start.shape
        self.sparse = sparse
        self.register_parameter("mean", Parameter(start.detach().clone()))
        self.register_parameter("raw_stddev", Parameter(torch.zeros_like(start)))
        self.register_constraint("raw_stddev", Positive().to(start.device))
        self.stddev = torch.as_tensor(stddev)
        self.prior = LatentPrior(prior, start)

    @classmethod
    def from_pca(
        cls,
        targets: Tensor,
        latent_dim: int,
        prior: Distribution | None = None,
        stddev: Tensor | float = 0.1,
        *,
        mask: Tensor | None = None,
        sparse: bool = True,
    ) -> VariationalLatents:
        r"""Means at the unit-variance scores of the first principal components.

        :param targets: Data, ``N x P``; NaN marks a missing entry.
        :param latent_dim: :math:`Q \le P`.
        :param mask: True where observed, ``N x P``.
        """
        return cls(principal_components(targets, latent_dim, mask).scores, prior, stddev, sparse=sparse)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations, ``N x Q``."""
        return self.raw_stddev_constraint.transform(self.raw_stddev)

    @stddev.setter
    def stddev(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_stddev)
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ValueError("Standard deviations of q(x) must be positive and finite.")
        self.initialize(raw_stddev=self.raw_stddev_constraint.inverse_transform(value))

    def q(self, index: Tensor | None = None) -> Normal:
        """The Gaussians of some rows, batch shape ``B x Q``; of all rows without ``index``."""
        if index is None:
            return Normal(self.mean, self.stddev, validate_args=False)
        self._check_index(index)
        check_device(index, self.mean.device, "The index is")
        mean = embedding(index, self.mean, sparse=self.sparse)
        raw = embedding(index, self.raw_stddev, sparse=self.sparse)
        return Normal(mean, self.raw_stddev_constraint.transform(raw), validate_args=False)


class ParameterGroups(NamedTuple):
    """Parameters by the kind of gradient that they get.

    :param dense: For :class:`torch.optim.Adam` and the like.
    :param sparse: Tables whose gradients are sparse, for :class:`torch.optim.SparseAdam`; empty with an encoder.

    Example:
        >>> latents = tighter_gp.gplvm.VariationalLatents(torch.randn(20, 3))
        >>> groups = tighter_gp.gplvm.parameter_groups(latents)
        >>> len(groups.dense), [table.shape for table in groups.sparse]
        (0, [torch.Size([20, 3]), torch.Size([20, 3])])
    """

    dense: list[Parameter]
    sparse: list[Parameter]


def parameter_groups(*modules: torch.nn.Module) -> ParameterGroups:
    r"""Sort the parameters of models and likelihoods for two optimizers.

    Dense Adam would update all :math:`N` rows of the latent tables at each step; with these groups a step costs the
    same for every :math:`N`.

    Example:
        >>> dense, sparse = tighter_gp.gplvm.parameter_groups(model)
        >>> optimizers = [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam(sparse, lr=0.01)]
        >>> len(sparse)  # the means and the standard deviations of q(x)
        2
    """
    tables: set[int] = set()
    for module in modules:
        for child in module.modules():
            if isinstance(child, VariationalLatents) and child.sparse:
                tables |= {id(child.mean), id(child.raw_stddev)}
            elif isinstance(child, PerPoint):
                tables.add(id(child.raw_m))
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return ParameterGroups(
        dense=[p for key, p in parameters.items() if key not in tables],
        sparse=[p for key, p in parameters.items() if key in tables],
    )
