"""q(x), one Gaussian per row of data, and its prior."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch import Module
from gpytorch.constraints import Positive
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, Transform, kl_divergence
from torch.nn import Parameter
from torch.nn.functional import embedding

from .data import principal_components


class LatentPrior(Module):
    r""":math:`p(x_n)`, the same for every row.

    :param distribution: Any torch distribution of one row: batch shape ``Q`` (or scalar) with independent coordinates,
        or event shape ``Q``. Default :math:`\mathcal N(0, I)`. It is copied.
    :param like: Start of the latents, ``N x Q``; gives the dimension, dtype and device.

    Example:
        >>> prior = tighter_gp.gplvm.LatentPrior(None, torch.zeros(20, 2))  # standard normal, for 20 rows
        >>> q = torch.distributions.Normal(torch.zeros(3, 2), torch.ones(3, 2))
        >>> prior.kl_divergence(q)
        tensor([0., 0., 0.])
    """

    def __init__(self, distribution: Distribution | None, like: Tensor) -> None:
        super().__init__()
        zeros = torch.zeros_like(like[0])
        distribution = Normal(zeros, zeros + 1, validate_args=False) if distribution is None else distribution
        shape = distribution.batch_shape + distribution.event_shape
        if shape not in ((), (1,), zeros.shape) or (distribution.event_shape and shape != zeros.shape):
            raise ValueError(f"The prior is that of one latent row, of shape {tuple(zeros.shape)}; got {tuple(shape)}.")
        self.distribution = copy.deepcopy(distribution)
        self.has_closed_form = self._closed_form(Normal(zeros[None], zeros[None] + 1)) is not None
        self._apply(lambda tensor: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LatentPrior:
        super()._apply(fn, recurse)
        _map_tensors(self.distribution, fn)  # a torch distribution is no module and would stay behind
        return self

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of rows, ``... x Q`` to ``...``."""
        value = self.distribution.log_prob(x)
        return value if self.distribution.event_shape else value.sum(-1)

    def kl_divergence(self, q: Normal, samples: Tensor | None = None) -> Tensor:
        r""":math:`\mathrm{KL}[q(x_n) \Vert p(x_n)]` of each row: in closed form where torch knows one.

        :param q: Batch shape ``B x Q``.
        :param samples: Draws from q, ``S x B x Q``, for an unbiased estimate where there is no closed form.
        :return: Shape ``B``.
        """
        if self.has_closed_form:
            return self._closed_form(q)  # type: ignore[return-value]
        samples = q.rsample(torch.Size([1])) if samples is None else samples
        return -q.entropy().sum(-1) - self.log_prob(samples).mean(0)  # E_q[log q - log p]: [B]

    def _closed_form(self, q: Normal) -> Tensor | None:
        try:
            if not self.distribution.event_shape:
                return kl_divergence(q, self.distribution).sum(-1)
            if isinstance(self.distribution, MultivariateNormal):
                joint = MultivariateNormal(q.mean, scale_tril=torch.diag_embed(q.stddev), validate_args=False)
                return kl_divergence(joint, self.distribution)
            return kl_divergence(Independent(q, 1), self.distribution)
        except NotImplementedError:
            return None

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a row, ``Q`` each; 0 and 1 for a prior that has none."""
        try:
            mean, stddev = self.distribution.mean.to(like), self.distribution.stddev.to(like)
        except NotImplementedError:
            return torch.zeros_like(like[0]), torch.ones_like(like[0])
        usable = torch.isfinite(mean) & torch.isfinite(stddev)
        return torch.where(usable, mean, 0.0), torch.where(usable, stddev, 1.0)


def _map_tensors(holder: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``fn`` to the tensors of a distribution and of the distributions and transforms inside it."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, Tensor):
            vars(holder)[name] = fn(value)
        elif name != "_inv":  # of a transform, which knows it too
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, (Distribution, Transform)):
                    _map_tensors(item, fn)


class Latents(Module, ABC):
    r"""Base of the latent modules: :math:`q(x_n) = \mathcal N(\mu_n, \mathrm{diag}\, s_n^2)` for rows asked for by index.

    A subclass of your own says how q is made, from the rows by a network for instance, and sets the three attributes; with a
    method ``encode(rows)`` to a :class:`~torch.distributions.Normal` new rows start there.

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
        self.num_data, self.latent_dim = start.shape
        self.sparse = sparse
        self.register_parameter("mean", Parameter(start.detach().clone()))
        self.register_parameter("raw_stddev", Parameter(torch.zeros_like(start)))
        self.register_constraint("raw_stddev", Positive().to(start.device))
        self.stddev = stddev
        self.prior = LatentPrior(prior, start)

    @classmethod
    def from_pca(
        cls, targets: Tensor, latent_dim: int, *args: Any, mask: Tensor | None = None, **kwargs: Any
    ) -> VariationalLatents:
        r"""Means at the unit-variance scores of the first principal components; other arguments as of the class.

        :param targets: Data, ``N x P``; NaN marks a missing entry.
        :param latent_dim: :math:`Q \le P`.
        :param mask: True where observed, ``N x P``.
        """
        return cls(principal_components(targets, latent_dim, mask).scores, *args, **kwargs)

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
        mean = embedding(index, self.mean, sparse=self.sparse)  # [B, Q], with a sparse gradient
        raw = embedding(index, self.raw_stddev, sparse=self.sparse)
        return Normal(mean, self.raw_stddev_constraint.transform(raw), validate_args=False)


class ParameterGroups(NamedTuple):
    """Parameters by the kind of gradient that they get.

    :param dense: For :class:`torch.optim.Adam` and the like.
    :param sparse: Tables whose gradients are sparse, for :class:`torch.optim.SparseAdam`.

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
    for child in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(child, VariationalLatents) and child.sparse:
            tables.update(id(table) for table in child.parameters(recurse=False))
    unique = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    sparse = [p for p in unique if id(p) in tables]
    return ParameterGroups([p for p in unique if id(p) not in tables], sparse)
