"""What is observed, and a first guess at the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..maths.linalg import full_precision

if TYPE_CHECKING:
    import numpy as np


def as_observed(
    targets: Tensor | np.ndarray, mask: Tensor | np.ndarray | None = None, num_outputs: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rows of data with NaN at every missing entry, and which entries are observed.

    :param targets: Data, ``N x P``; NaN marks a missing entry.
    :param mask: True where observed, ``N x P``; joins what NaN says.
    :param num_outputs: :math:`P`, if it is known.
    :return: The data, and the observed entries or None if none is missing.
    """
    targets, mask = _as_tensor(targets), None if mask is None else _as_tensor(mask)
    if targets.dim() != 2 or (num_outputs is not None and targets.size(-1) != num_outputs):
        wanted = "P" if num_outputs is None else num_outputs
        raise ValueError(f"Data must have shape N x {wanted}, one row per datum; got {tuple(targets.shape)}.")
    if not targets.is_floating_point():
        targets = targets.to(torch.get_default_dtype())
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != targets.shape:
            raise ValueError(
                f"mask must be boolean and shaped like the data, {tuple(targets.shape)}, True where observed."
            )
        targets = torch.where(mask, targets, torch.nan)
    observed = ~torch.isnan(targets)
    return targets, None if targets.is_cpu and bool(observed.all()) else observed


def _as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """Of an array a copy, since it may be read-only."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values.copy())


class PrincipalComponents(NamedTuple):
    """Scores of the data on its leading principal components.

    :param scores: Unit variance per column, ``N x Q``.
    :param fraction: Variance each component explains over that of the first, ``Q``.

    Example:
        >>> components = tighter_gp.gplvm.principal_components(torch.randn(20, 5), 2)
        >>> components.scores.shape, components.fraction[0].item()
        (torch.Size([20, 2]), 1.0)
    """

    scores: Tensor
    fraction: Tensor


def principal_components(
    targets: Tensor | np.ndarray, latent_dim: int, mask: Tensor | np.ndarray | None = None
) -> PrincipalComponents:
    r"""Unit-variance scores on the first principal components; missing entries count as their column's mean.

    :param targets: Data, ``N x P``; NaN marks a missing entry.
    :param latent_dim: :math:`Q \le \min(N, P)`.
    :param mask: True where observed, ``N x P``.

    Example:
        >>> scores, fraction = tighter_gp.gplvm.principal_components(torch.randn(20, 5), 2)
        >>> scores.shape
        torch.Size([20, 2])
    """
    targets, _ = as_observed(targets, mask)
    observed, (num_data, num_outputs) = ~torch.isnan(targets), targets.shape
    highest = torch.where(observed, targets, -torch.inf).amax(0)
    lowest = torch.where(observed, targets, torch.inf).amin(0)
    useless = (highest <= lowest).nonzero().flatten().tolist()  # their noise would shrink to zero
    if useless:
        raise ValueError(f"Columns {useless} of the data are constant, or have no observed entry; drop them.")
    if not 1 <= latent_dim <= min(num_data, num_outputs):
        raise ValueError(f"latent_dim must lie between 1 and {min(num_data, num_outputs)}; got {latent_dim}.")
    centred = (targets - targets.nanmean(0)).nan_to_num(nan=0.0)
    with full_precision(centred.device.type):
        # Eigenvectors of the P x P covariance: N may be large.
        values, vectors = torch.linalg.eigh(centred.mT @ centred / num_data)
        leading = values.flip(-1)[:latent_dim].clamp_min(torch.finfo(values.dtype).eps * values[-1])
        scores = centred @ vectors.flip(-1)[:, :latent_dim]
    return PrincipalComponents(scores / leading.sqrt(), leading / leading[0])
