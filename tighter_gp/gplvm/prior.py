"""The prior of a latent row, as a module that moves with its model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import Module
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, Transform


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
        self.latent_dim = latent_dim = like.size(-1)
        if distribution is None:
            zeros = torch.zeros(latent_dim, dtype=like.dtype, device=like.device)
            distribution = Normal(zeros, torch.ones_like(zeros), validate_args=False)
        if not isinstance(distribution, Distribution):
            raise TypeError(f"prior must be a torch distribution; got {type(distribution).__name__}.")
        shape, event_shape = distribution.batch_shape + distribution.event_shape, distribution.event_shape
        if shape not in ((), (1,), (latent_dim,)) or (event_shape and event_shape != (latent_dim,)):
            raise ValueError(
                f"The prior is that of one latent row, of shape ({latent_dim},); got batch_shape "
                f"{tuple(distribution.batch_shape)} and event_shape {tuple(event_shape)}."
            )
        self.distribution = copy.deepcopy(distribution)
        self._apply(lambda tensor: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LatentPrior:
        # A torch distribution is no module; its tensors would stay behind when the model moves.
        super()._apply(fn, recurse)
        if not isinstance(self.distribution, torch.nn.Module):
            _map_tensors(self.distribution, fn)
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
        closed = _closed_form(q, self.distribution)
        if closed is not None:
            return closed
        if samples is None:
            samples = q.rsample(torch.Size([1]))
        return -q.entropy().sum(-1) - self.log_prob(samples).mean(0)

    @property
    def has_closed_form(self) -> bool:
        """Whether :meth:`kl_divergence` is in closed form, not an estimate from draws."""
        like = self.log_prob(self.distribution.sample(torch.Size([1])))
        rows = torch.zeros(1, self.latent_dim, dtype=like.dtype, device=like.device)
        return _closed_form(Normal(rows, torch.ones_like(rows), validate_args=False), self.distribution) is not None

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a row, ``Q`` each; 0 and 1 for a prior that has none."""
        zeros = torch.zeros(like.size(-1), dtype=like.dtype, device=like.device)
        try:
            mean, stddev = self.distribution.mean, self.distribution.stddev
        except NotImplementedError:
            return zeros, torch.ones_like(zeros)
        usable = torch.isfinite(mean) & torch.isfinite(stddev)
        return torch.where(usable, mean, zeros), torch.where(usable, stddev, torch.ones_like(zeros))


def _closed_form(q: Normal, p: Distribution) -> Tensor | None:
    if not p.event_shape:
        candidates: tuple[Callable[[], Distribution], ...] = (lambda: q,)
    else:
        candidates = (
            lambda: Independent(q, 1),
            lambda: MultivariateNormal(q.mean, scale_tril=torch.diag_embed(q.stddev), validate_args=False),
        )
    for make in candidates:
        try:
            value = torch.distributions.kl_divergence(make(), p)
        except NotImplementedError:
            continue
        return value if p.event_shape else value.sum(-1)
    return None


def _map_tensors(holder: Any, fn: Callable[[Tensor], Tensor], seen: set[int] | None = None) -> None:
    """Apply ``fn`` to the tensors of a distribution and of the distributions and transforms inside it."""
    seen = set() if seen is None else seen
    if id(holder) in seen:  # a transform and its inverse know each other
        return
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, Tensor):
            vars(holder)[name] = fn(value)
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, (Distribution, Transform)):
                _map_tensors(item, fn, seen)
