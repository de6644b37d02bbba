"""q(x) made from each row by a network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal
from torch.nn.functional import softplus

from .data import as_observed, check_columns, check_latent_dim
from .latent_variables import Latents
from .prior import LatentPrior


class EncodedLatents(Latents):
    r"""
    q(x) made from the row itself by a network: :math:`\mu_n, s_n = g(y_n)` (a back-constraint).

    The parameters are the network's, dense and as many for every :math:`N`, and a new row needs no optimisation:
    :meth:`encode` gives its q(x). Missing entries reach the network as their column's mean.

    :param targets: Training data, ``N x P``; NaN marks a missing entry. Kept in a buffer outside the state dict.
    :param latent_dim: :math:`Q`.
    :param encoder: Maps ``B x P`` (``B x 2P`` with ``encode_mask``) to ``B x 2Q``: means, then standard deviations
        before the softplus. Default: two hidden layers of 64 units.
    :param prior: Distribution of one row; default :math:`\mathcal N(0, I)`.
    :param mask: True where observed, ``N x P``.
    :param encode_mask: Whether the network also sees which entries are observed, as ones and zeros.

    Example:
        >>> latents = tighter_gp.gplvm.EncodedLatents(torch.randn(20, 5), latent_dim=2)
        >>> latents(torch.tensor([4, 0, 11]), num_samples=7).shape
        torch.Size([7, 3, 2])
        >>> latents.encode(torch.randn(4, 5)).mean.shape
        torch.Size([4, 2])
    """

    targets: Tensor
    column_mean: Tensor

    def __init__(
        self,
        targets: Tensor,
        latent_dim: int,
        encoder: torch.nn.Module | None = None,
        prior: Distribution | None = None,
        *,
        mask: Tensor | None = None,
        encode_mask: bool = False,
    ) -> None:
        super().__init__()
        targets, _ = as_observed(targets, mask)
        check_columns(targets)
        num_outputs = targets.size(-1)
        check_latent_dim(latent_dim, num_outputs)
        self.num_data, self.latent_dim, self.encode_mask = targets.size(0), latent_dim, encode_mask
        self.register_buffer("targets", targets, persistent=False)
        self.register_buffer("column_mean", targets.nanmean(0))
        if encoder is None:
            encoder = _default_encoder((1 + encode_mask) * num_outputs, 2 * latent_dim).to(targets)
        self.encoder = encoder
        self.prior = LatentPrior(prior, targets[:, :latent_dim])

    def encode(self, targets: Tensor, mask: Tensor | None = None) -> Normal:
        """q(x) of any rows, ``B x P`` to batch shape ``B x Q``."""
        targets, observed = as_observed(targets, mask, self.column_mean.numel())
        return self._encode(targets.to(self.column_mean.dtype), observed)

    def _encode(self, targets: Tensor, observed: Tensor | None) -> Normal:
        if observed is not None:
            targets = torch.where(observed, targets, self.column_mean)
        if self.encode_mask:
            seen = torch.ones_like(targets) if observed is None else observed.to(targets)
            targets = torch.cat([targets, seen], dim=-1)
        output = self.encoder(targets)
        if output.shape != (targets.size(0), 2 * self.latent_dim):
            raise ValueError(
                f"The encoder must return {targets.size(0)} x {2 * self.latent_dim} for latent_dim={self.latent_dim}: "
                f"means and standard deviations; got {tuple(output.shape)}."
            )
        mean, raw = output.chunk(2, dim=-1)
        floor = torch.finfo(raw.dtype).eps
        return Normal(mean, softplus(raw) + floor, validate_args=False)

    def q(self, index: Tensor | None = None) -> Normal:
        """The Gaussians of some rows, batch shape ``B x Q``; of all rows without ``index``."""
        if index is not None:
            self._check_index(index)
        targets = self.targets if index is None else self.targets[index]
        return self._encode(targets, ~torch.isnan(targets))


def _default_encoder(num_inputs: int, num_outputs: int, width: int = 64) -> torch.nn.Module:
    linear = torch.nn.Linear
    network = torch.nn.Sequential(
        linear(num_inputs, width), torch.nn.Tanh(), linear(width, width), torch.nn.Tanh(), linear(width, num_outputs)
    )
    # Narrow q(x) at the start, as in VariationalLatents: softplus(-2.25) is 0.1.
    with torch.no_grad():
        last = network[-1]
        assert isinstance(last, linear)
        last.bias[num_outputs // 2 :] = -2.25
    return network
