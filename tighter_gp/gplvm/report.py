"""Which latent dimensions matter, and a picture of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from .inference import reconstruct

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Labels differ in more than colour.
_MARKERS = "o^sDvP"


class Relevance(NamedTuple):
    r"""How much each latent dimension matters, most relevant first.

    :param order: The dimensions, ``Q``.
    :param relevance: Spread over lengthscale, as a fraction of the largest, ``Q``; a dimension that the kernel ignores
        has a long lengthscale, one that q(x) leaves to the prior has no spread.
    :param lengthscale: :math:`\ell_q`, ``Q``.
    :param spread: Standard deviation of the means of q(x) over the rows, ``Q``.

    Example:
        >>> report = tighter_gp.gplvm.relevance(model)
        >>> report.relevance[0].item(), len(report.order) == model.latents.latent_dim
        (1.0, True)
    """

    order: Tensor
    relevance: Tensor
    lengthscale: Tensor
    spread: Tensor

    def __str__(self) -> str:
        lines = ["dimension  relevance  lengthscale  spread"]
        for row in zip(*(column.tolist() for column in self), strict=True):
            lines.append("{:9d}  {:9.3f}  {:11.3g}  {:6.3f}".format(*row))
        return "\n".join(lines)


@torch.no_grad()
def relevance(model: Any) -> Relevance:
    r"""The ARD report of a GPLVM; print it for a table.

    :param model: A :class:`BayesianGPLVM` or :class:`CollapsedBayesianGPLVM` whose kernel has one lengthscale per dimension.

    Example:
        >>> first, second = tighter_gp.gplvm.relevance(model).order[:2].tolist()
        >>> first != second
        True
    """
    latent_dim = model.latents.latent_dim
    scales = [
        module.lengthscale.reshape(-1)
        for module in model.covar_module.modules()
        if isinstance(module, Kernel) and module.has_lengthscale and module.lengthscale.numel() == latent_dim
    ]
    if len(scales) != 1:
        raise TypeError(
            f"relevance needs a kernel with one vector of {latent_dim} lengthscales (ard_num_dims={latent_dim}); "
            f"this one has {len(scales)}."
        )
    spread = model.latents.q().mean.std(0)
    value = spread / scales[0]
    order = value.argsort(descending=True)
    return Relevance(order, (value / value.max())[order], scales[0][order], spread[order])


@torch.no_grad()
def plot_latents(
    model: Any,
    labels: Tensor | Sequence[Any] | None = None,
    dims: tuple[int, int] | None = None,
    *,
    shade: bool = True,
    resolution: int = 60,
    ax: Axes | None = None,
) -> Axes:
    r"""The means of q(x) in two latent dimensions, with the inducing points.

    :param model: A :class:`BayesianGPLVM`.
    :param labels: One label per row, for the colours and the legend.
    :param dims: The two dimensions; default the most relevant two.
    :param shade: Whether to shade by the predictive variance (mean over the outputs), the other dimensions at the median
        of the data. Darker is less certain.
    :param resolution: Points per side of the shade.
    :param ax: Axes to draw on; default new ones.
    :return: The axes. Needs matplotlib.

    Example:
        >>> ax = tighter_gp.gplvm.plot_latents(model, labels, shade=False)
        >>> ax.get_xlabel()[:17]
        'latent dimension '
        >>> ax.figure.savefig("latents.png")
    """
    import matplotlib.pyplot as plt

    mean = model.latents.q().mean.detach()
    if mean.size(-1) < 2:
        raise ValueError("plot_latents draws two dimensions; this model has one.")
    if labels is None:
        labels = ["rows"] * len(mean)
    names = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    first, second = relevance(model).order[:2].tolist() if dims is None else dims
    chosen = [first, second]
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 4.5), layout="constrained")
    if shade:
        _shade(ax, model, mean, chosen, resolution)
    points = mean[:, chosen].cpu().numpy()
    for name, marker in zip(sorted(set(names)), itertools.cycle(_MARKERS), strict=False):
        rows = [label == name for label in names]
        ax.scatter(points[rows, 0], points[rows, 1], s=10, marker=marker, linewidths=0, label=str(name))
    inducing = model.variational_strategy.inducing_points.detach()[:, chosen].cpu().numpy()
    ax.scatter(inducing[:, 0], inducing[:, 1], marker="x", s=18, c="black", linewidths=0.8, label="inducing points")
    ax.set_xlabel(f"latent dimension {first}")
    ax.set_ylabel(f"latent dimension {second}")
    ax.legend(fontsize="small")
    return ax


def _shade(ax: Any, model: Any, mean: Tensor, chosen: list[int], resolution: int) -> None:
    low, high = mean[:, chosen].amin(0), mean[:, chosen].amax(0)
    margin = 0.08 * (high - low)
    steps = torch.linspace(0, 1, resolution, dtype=mean.dtype, device=mean.device).unsqueeze(-1)
    axis = (low - margin) + steps * (high - low + 2 * margin)  # resolution x 2
    grid = mean.median(0).values.repeat(resolution * resolution, 1)
    grid[:, chosen] = torch.cartesian_prod(axis[:, 1], axis[:, 0]).flip(-1)  # row by row, from the lowest
    variance = reconstruct(model, grid).variance.mean(-1).reshape(resolution, resolution)
    extent = axis[[0, -1]].mT.flatten().tolist()  # left, right, bottom, top
    ax.imshow(variance.cpu().numpy(), extent=extent, origin="lower", aspect="auto", cmap="Greys", alpha=0.6, zorder=0)
