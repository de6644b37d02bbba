"""Training rows near points, in the metric of a model's kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import kernels
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import GP
from torch import Tensor

from .collapsed import CollapsedGP
from .data import check_array, from_array
from .modes import chunks
from .prior import Prior
from .prior.projection import diagonal

_SEARCH_ALL = 100_000  # up to so many rows each is compared with each point; beyond, cells are searched
_CELLS = 16  # of the nearest inducing points, or a sixteenth of them if that is more
_STATIONARY = (kernels.RBFKernel, kernels.MaternKernel, kernels.RQKernel, kernels.PiecewisePolynomialKernel)


class RowSearch(GP):
    """A model with training rows, and the search for those near a point.

    Rows are near by the distance of inputs in lengthscales if the kernel is stationary, else by prior correlation. Beyond
    100,000 of them they lie in the cells of the inducing points, and those of the nearest few cells are compared: an
    inverted file. Memory is that of a block of distances, 128 numbers per column of a chunk.

    :ivar model: The sparse GP.
    :ivar x: Inputs, ``N x D``, in the order of the targets ``y``.
    :ivar chunk_size: Columns of A in memory at a time.
    :ivar num_neighbours: Rows to find for each point.
    """

    model: Any
    x: Tensor
    y: Tensor
    chunk_size: int
    num_neighbours: int

    @property
    def prior(self) -> Prior:
        """The prior of the sparse GP, which turns inputs into (prior mean, A, d)."""
        return getattr(self.model, "variational_strategy", self.model).prior()

    def rows(self, rows: Tensor | slice) -> Tensor:
        """Inputs of training rows."""
        return self.x[rows].to(self.y)

    @torch.no_grad()
    def nearest(
        self, x: Tensor, own: Tensor | None = None, num_cells: int | None = None, num_neighbours: int | None = None
    ) -> Tensor:
        """Positions of the nearest training rows, ``B x k``, in the metric of the kernel.

        :param x: Points, ``B x D``.
        :param own: Positions of these points among the rows, which are left out, ``B``.
        :param num_cells: How many cells of inducing points to search, where there are more than 100,000 rows.
        :param num_neighbours: How many rows; default that of the model.
        """
        wanted = self.num_neighbours if num_neighbours is None else num_neighbours
        if not wanted:
            return torch.zeros(len(x), 0, dtype=torch.long, device=x.device)
        count = min(wanted + (own is not None), len(self.y))
        metric, points = self._metric(), self._features(x)  # [B, D]
        visits = self._visits(points, metric, count, num_cells)  # [B, cells]
        # The nearest so far, and their positions  [B, k].
        distance = points.new_full((len(x), count), torch.inf)
        found = torch.zeros(len(x), count, dtype=torch.long, device=x.device)
        for cell, rows in enumerate(self.cells):
            visitors = visits[:, cell].nonzero().squeeze(-1)
            if not len(visitors):
                continue
            features = self._features(self.rows(rows))
            for part in visitors.split(max(1, 128 * self.chunk_size // (1 + len(rows)))):
                # The nearest of this cell, then of those with what was found before.
                values, place = metric(points[part], features).topk(min(count, len(rows)), largest=False)
                values, order = torch.cat([distance[part], values], -1).topk(count, largest=False)
                distance[part] = values
                found[part] = torch.cat([found[part], rows[place]], -1).gather(-1, order)
        if own is None:
            return found
        is_own = (found == own.unsqueeze(-1)).int()  # at most one per point, which goes last
        return found.gather(-1, is_own.argsort(dim=-1, stable=True))[:, : min(wanted, len(self.y) - 1)]

    def _visits(
        self, points: Tensor, metric: Callable[[Tensor, Tensor], Tensor], count: int, num_cells: int | None
    ) -> Tensor:
        """Which cells to search for which points: the nearest few, and more if these have too few rows."""
        if len(self.cells) == 1:
            return torch.ones(len(points), 1, dtype=torch.bool, device=points.device)
        order = metric(points, self._features(self._points)).argsort(-1)  # [B, M]
        sizes = torch.tensor([len(rows) for rows in self.cells], device=points.device)[order]  # [B, M]
        wanted = sizes.cumsum(-1) - sizes < count
        wanted[:, : num_cells or max(_CELLS, len(self.cells) // 16)] = True
        return torch.zeros_like(wanted).scatter(-1, order, wanted)

    @torch.no_grad()
    def sort_rows(self) -> None:
        """Rows by their nearest inducing point, where they are too many to look at them all."""
        self.cells = [torch.arange(len(self.y), device=self.y.device)]
        if len(self.y) > _SEARCH_ALL:
            metric, points = self._metric(), self._features(self._points)
            parts = chunks(len(self.y), max(1, self.chunk_size // 4))
            cells = [metric(self._features(self.rows(part)), points).argmin(-1) for part in parts]
            sizes = torch.cat(cells).bincount(minlength=len(points))
            self.cells = list(torch.cat(cells).argsort().split(sizes.tolist()))

    @property
    def _points(self) -> Tensor:
        """The inducing points."""
        is_collapsed = isinstance(self.model, CollapsedGP)
        return self.model.inducing_points if is_collapsed else self.model.variational_strategy.all_points()

    def _kernel_at(self, x: Tensor) -> tuple[Any, Tensor]:
        """The kernel within scaled ones, and what it sees of inputs; None where the covariance is not that of one kernel."""
        prior = self.prior
        covar = prior.joint(x)[1]
        if not isinstance(covar, LazyEvaluatedKernelTensor):
            return None, x
        kernel = covar.kernel
        while isinstance(kernel, kernels.ScaleKernel):
            kernel = kernel.base_kernel
        return kernel, covar.x1[..., prior.num_inducing :, :]

    def _features(self, x: Tensor) -> Tensor:
        """Inputs in lengthscales for a stationary kernel; for others as they are."""
        kernel, seen = self._kernel_at(x)
        return seen / kernel.lengthscale if isinstance(kernel, _STATIONARY) else x

    def _metric(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The distance of points from rows, by their features: squared, or minus squared correlation; up to a constant."""
        first, prior = self.rows(slice(0, 1)), self.prior
        is_stationary = isinstance(self._kernel_at(first)[0], _STATIONARY)
        centre = self._features(first)  # where products lose few digits

        def distances(points: Tensor, rows: Tensor) -> Tensor:
            rows = rows - centre
            return torch.addmm(rows.square().sum(-1), points - centre, rows.mT, alpha=-2)

        def correlations(points: Tensor, rows: Tensor) -> Tensor:
            covar = prior.joint(rows)[1]
            variance = diagonal(covar, slice(prior.num_inducing, None), rows.dtype).clamp_min(1e-30)
            return -prior.covariance(points, rows, rows.dtype).square() / variance

        return distances if is_stationary else correlations


def as_rows(name: str, values: Any) -> Tensor:
    """A tensor that shares its memory with the values where it can."""
    check_array(name, values)
    if isinstance(values, Tensor):
        return values.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a memory map that must not be written to, and is not
        try:
            return torch.from_numpy(values)
        except (TypeError, ValueError):
            return from_array(values)
