r"""Where to put inducing points, and a lengthscale to start from.

Everything is seeded with its own generator, leaves the global one alone, stays on the device and in the dtype of ``x``
and walks over the data in chunks: with :math:`N` points no array is larger than :math:`N` (``"kmeans"``, ``"random"``) or
:math:`N \times M` (``"greedy"``). Inputs are tensors or numpy arrays, perhaps memory-mapped, ``N x D`` or ``N``. Of an array
only a chunk is in memory at a time, in the default dtype of torch, or that of the kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from .data import Rows, check_array, reference
from .maths.linalg import full_precision
from .modes import chunks

Inputs = Tensor | np.ndarray

# The floor of starting lengthscales as a fraction of the median distance, and the rows looked at for it.
_FLOOR, _MOST_ROWS = 0.25, 1000

METHODS = ("kmeans", "greedy", "random")


@torch.no_grad()
def allocate(
    x: Inputs,
    num_points: int,
    method: Any = "kmeans",
    *,
    kernel: Kernel | None = None,
    seed: int = 0,
    chunk_size: int = 8192,
) -> Tensor:
    r"""Inducing points by any method of this module, or by an allocator of BoTorch.

    :param x: Training inputs, ``N x D``.
    :param num_points: :math:`M`.
    :param method: ``"kmeans"`` (:func:`kmeans`), ``"greedy"`` (:func:`greedy_variance`), ``"random"``
        (:func:`random_subset`), or an object with BoTorch's ``allocate_inducing_points``, such as its
        ``GreedyImprovementReduction``. BoTorch's allocators take the whole :math:`N \times N` kernel matrix.
    :param kernel: The kernel with its starting values; needed by ``"greedy"`` and by BoTorch's allocators.
    :param seed: Seed of the random choices; BoTorch's allocators have none.
    :param chunk_size: Points per chunk.
    :return: ``M x D``, distinct rows. Those of an allocator may be fewer, where the kernel leaves next to no variance.

    Example:
        >>> x = torch.rand(100, 2)
        >>> tighter_gp.inducing.allocate(x, 10).shape
        torch.Size([10, 2])
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> tighter_gp.inducing.allocate(x, 10, "greedy", kernel=kernel).shape
        torch.Size([10, 2])
    """
    if method == "kmeans":
        return kmeans(x, num_points, seed=seed, chunk_size=chunk_size)
    if method == "random":
        return random_subset(x, num_points, seed=seed)
    is_allocator = hasattr(method, "allocate_inducing_points")
    if method != "greedy" and not is_allocator:
        raise ValueError(
            f"Unknown method {method!r}; choose {', '.join(map(repr, METHODS))} or pass BoTorch's allocator."
        )
    if kernel is None:
        raise ValueError(f"Placement by {method!r} depends on the kernel: pass kernel=.")
    if method == "greedy":
        return greedy_variance(x, num_points, kernel, seed=seed, chunk_size=chunk_size)
    inputs = _checked(x, num_points, kernel)[:]  # [N, D]
    given = {"inputs": inputs, "covar_module": kernel, "input_batch_shape": torch.Size()}
    return method.allocate_inducing_points(num_inducing=num_points, **given).detach().clone()


# ---------------------------------------------------------------------------------------------------------------------
# Methods
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def random_subset(x: Inputs, num_points: int, *, seed: int = 0) -> Tensor:
    """Distinct rows of ``x``, drawn at random.

    :param x: Training inputs, ``N x D``.
    :param num_points: :math:`M`.
    :param seed: Seed of the draw.
    :return: ``M x D``.

    Example:
        >>> tighter_gp.inducing.random_subset(torch.rand(100, 2), 10).shape
        torch.Size([10, 2])
    """
    rows = _checked(x, num_points)
    return _distinct_rows(rows, _permutation(rows, seed), num_points)


@torch.no_grad()
def kmeans(
    x: Inputs, num_points: int, *, seed: int = 0, chunk_size: int = 8192, max_iter: int = 50, tol: float = 1e-4
) -> Tensor:
    r"""Centres of k-means cells: k-means++ seeding, then Lloyd's iterations.

    A cell that loses all its points is seeded again at the point farthest from every centre. An iteration takes
    :math:`O(NMD)` time and ``chunk_size x M`` memory.

    :param x: Training inputs, ``N x D``, scaled as the kernel sees them: distances are Euclidean.
    :param num_points: :math:`M`.
    :param seed: Seed of the first centres.
    :param chunk_size: Points per chunk; the result depends on it by rounding only.
    :param max_iter: Most iterations; 0 returns the k-means++ seeds, which are rows of ``x``.
    :param tol: Stop when no centre moves by more than this times the root mean squared distance of ``x`` from its mean.
    :return: ``M x D``. The first centres are far apart, so the first half of them alone covers the data too.

    Example:
        >>> tighter_gp.inducing.kmeans(torch.rand(1000, 3), 20, seed=1).shape
        torch.Size([20, 3])
    """
    rows = _checked(x, num_points)
    return _lloyd(rows, _plus_plus(rows, num_points, seed, chunk_size), chunk_size, max_iter, tol)


@torch.no_grad()
def nearest(x: Inputs, points: Tensor, *, chunk_size: int = 8192) -> Tensor:
    """The row of ``points`` nearest to each row of ``x``, such as its k-means cell.

    :param x: ``N x D``.
    :param points: ``M x D``.
    :param chunk_size: Points per chunk; memory is ``chunk_size x M``.
    :return: Integers from 0 to ``M - 1``, shape ``N``.

    Example:
        >>> points = torch.tensor([[0.0], [1.0]])
        >>> tighter_gp.inducing.nearest(torch.tensor([[0.1], [0.9], [0.2]]), points)
        tensor([0, 1, 0])
    """
    return _nearest(Rows(x, points, is_input=True), points, chunk_size)


@torch.no_grad()
def greedy_variance(x: Inputs, num_points: int, kernel: Kernel, *, seed: int = 0, chunk_size: int = 65536) -> Tensor:
    r"""The training inputs where the inducing points before them leave the most variance.

    .. math:: z_{j+1} = \operatorname*{argmax}_{x_n} d_n, \qquad d_n = k_{nn} - k_{nZ} K_{ZZ}^{-1} k_{Zn}

    A pivoted Cholesky factorisation (Burt et al., 2020) in :math:`O(NM^2)` time and :math:`O(NM)` memory. At fixed
    hyperparameters adding the next of these points never lowers the tighter bound :math:`F_4`, which does not hold for
    other locations. For less memory give a random part of the data; the claim then holds for that part.

    If rounding is all that is left before ``num_points`` are found, the others are drawn at random, with a warning.

    :param x: Training inputs, ``N x D``.
    :param num_points: :math:`M`.
    :param kernel: The kernel with its starting values, without a batch shape.
    :param seed: Seed of the choice between equals, which all first points are to a stationary kernel.
    :param chunk_size: Points per chunk when the kernel is evaluated.
    :return: ``M x D`` in the order chosen, distinct rows of ``x``.

    Example:
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> tighter_gp.inducing.greedy_variance(torch.rand(100, 2), 10, kernel).shape
        torch.Size([10, 2])
    """
    rows = _checked(x, num_points, kernel)
    residual = torch.cat([kernel(chunk, diag=True) for chunk in _parts(rows, chunk_size)], -1)  # d_n  [N]
    if residual.dim() != 1:
        raise ValueError(f"greedy_variance takes one kernel; got one of batch shape {tuple(residual.shape[:-1])}.")
    rounding = 10 * torch.finfo(residual.dtype).eps * residual.max()
    ties = (residual == residual.max()).nonzero().squeeze(-1)
    pivot = ties[torch.randint(len(ties), (), generator=_generator(rows, seed), device=residual.device)]
    chosen: list[Tensor] = []
    factor = residual.new_empty(num_points, len(rows))  # the rows of A given the points so far  [M, N]
    while len(chosen) < num_points and residual[pivot] > rounding:
        known = factor[: len(chosen)]
        point = rows[pivot.unsqueeze(0)]
        column = torch.cat([kernel(chunk, point).to_dense().squeeze(-1) for chunk in _parts(rows, chunk_size)])
        with full_precision(known.device.type):
            row = (column - known[:, pivot] @ known) / residual[pivot].sqrt()  # [N]
        factor[len(chosen)] = row
        chosen.append(pivot)
        residual = (residual - row.square()).clamp_min(0.0)
        residual[pivot] = 0.0
        pivot = residual.argmax()
    points = _distinct_rows(rows, torch.cat([torch.stack(chosen), _permutation(rows, seed)]), num_points)
    if len(chosen) < num_points:
        warnings.warn(
            f"{len(chosen)} inducing points explain all of x up to rounding in {_name(residual.dtype)}; the other "
            f"{num_points - len(chosen)} were drawn at random. Fewer would do for this kernel.",
            UserWarning,
            stacklevel=2,
        )
    return points


# ---------------------------------------------------------------------------------------------------------------------
# Beside the points
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def median_lengthscale(x: Inputs, *, seed: int = 0, max_points: int = 1000) -> Tensor:
    """The median distance between inputs, a lengthscale to start from.

    :param x: Training inputs, ``N x D``, each dimension scaled alike.
    :param seed: Seed of the subset.
    :param max_points: The distances are those within this many points drawn at random.
    :return: A scalar tensor; pairs of equal points do not count.

    Example:
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> kernel.lengthscale = tighter_gp.inducing.median_lengthscale(torch.tensor([[0.0], [1.0], [3.0]]))
        >>> kernel.lengthscale.item()
        2.0
    """
    rows = _checked(x, 1)
    distances = _distances(rows[_permutation(rows, seed)[:max_points]])
    if not len(distances):
        raise ValueError(f"All {min(len(rows), max_points)} inputs looked at are equal: there is no distance.")
    return distances.median()


def _distances(rows: Tensor) -> Tensor:
    """The distances of different rows."""
    distances = torch.nn.functional.pdist(rows)
    return distances[distances > 0]


@torch.no_grad()
def start_lengthscales(rows: Tensor, centres: Tensor) -> Tensor:
    r"""One lengthscale per input, which suits inputs in any units and cannot be tiny.

    .. math:: \ell_j = \max\bigl(\sqrt D \operatorname{std}(z_j),\ \min(r / 4, \sqrt D \operatorname{std}(x_j))\bigr)

    with :math:`r` the median distance of rows. Centres of k-means hardly differ in an input that few rows have, such as a
    pixel at the border: the second term is for these.

    :param rows: Training inputs, ``N x D``.
    :param centres: Inducing points, ``M x D``.
    :return: Shape ``D``.

    Example:
        >>> tighter_gp.inducing.start_lengthscales(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
        tensor([0.5000, 0.5000])
    """
    some = rows[:: -(-len(rows) // _MOST_ROWS)]
    distances = _distances(some)
    floor = _FLOOR * (distances.median() if len(distances) else distances.new_tensor(4.0))
    root = rows.size(-1) ** 0.5
    spread = root * some.std(-2, correction=0)
    lowest = torch.where(spread > 0, torch.minimum(spread, floor), floor)  # a constant input has no say
    return torch.maximum(root * centres.std(-2, correction=0), lowest)


def split_inducing_points(points: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the points for each of the two sets of SOLVE-GP; the first set has the odd one.

    Points of :func:`kmeans` and :func:`greedy_variance` come in an order in which the first half alone covers the data.

    :param points: ``... x M x D``, :math:`M \\ge 2`.
    :return: ``... x ceil(M / 2) x D`` and ``... x floor(M / 2) x D``.

    Example:
        >>> first, second = tighter_gp.inducing.split_inducing_points(torch.rand(7, 2))
        >>> first.shape, second.shape
        (torch.Size([4, 2]), torch.Size([3, 2]))
    """
    if points.dim() < 2 or points.size(-2) < 2:
        raise ValueError(f"Two sets need at least two points, ... x M x D; got shape {tuple(points.shape)}.")
    half = (points.size(-2) + 1) // 2
    return points[..., :half, :].clone(), points[..., half:, :].clone()


# ---------------------------------------------------------------------------------------------------------------------
# Steps of k-means
# ---------------------------------------------------------------------------------------------------------------------


def _plus_plus(x: Rows, num_points: int, seed: int, chunk_size: int) -> Tensor:
    """k-means++ seeds: each row drawn with probability proportional to its squared distance from those before."""
    generator = _generator(x, seed)
    rows = max(1, chunk_size * num_points // x.shape[-1])  # as many numbers per chunk as in an iteration
    device = x.like.device
    chosen = [x[torch.randint(len(x), (1,), generator=generator, device=device)][0]]
    distance = chosen[0].new_full((len(x),), torch.inf)  # squared, to the nearest seed
    while len(chosen) < num_points:
        _lower(distance, x, chosen[-1], rows)
        mass = distance.cumsum(0, dtype=torch.float64)
        if not mass[-1] > 0:
            raise _too_few(len(chosen), num_points)
        draw = mass[-1] * torch.rand((), generator=generator, device=device, dtype=torch.float64)
        index = torch.searchsorted(mass, draw, right=True).clamp_max(len(x) - 1)
        chosen.append(x[index.unsqueeze(0)][0])
    return torch.stack(chosen)


def _lower(distance: Tensor, x: Rows, point: Tensor, rows: int) -> None:
    """Take one more point into the squared distances, in place; exactly zero at equal rows."""
    for chunk, part in zip(_parts(x, rows), distance.split(rows), strict=True):
        torch.minimum(part, (chunk - point).square_().sum(-1), out=part)


def _cells(x: Tensor, points: Tensor) -> Tensor:
    """Index of the nearest point; |x|^2 is the same for all and left out."""
    with full_precision(x.device.type):
        return torch.addmm(points.square().sum(-1), x, points.mT, alpha=-2).argmin(-1)


def _lloyd(x: Rows, points: Tensor, chunk_size: int, max_iter: int, tol: float) -> Tensor:
    """Move each point to the mean of its cell until they rest. Centred, so that squares do not cancel."""
    centre, variance = _moments(x, chunk_size)
    smallest_move = tol**2 * variance.sum()
    for _ in range(max_iter):
        sums, counts = torch.zeros_like(points), torch.zeros_like(points[:, 0])
        for part in _parts(x, chunk_size):
            chunk = part - centre
            cells = _cells(chunk, points - centre)
            sums.index_add_(0, cells, chunk)
            counts.index_add_(0, cells, torch.ones_like(chunk[:, 0]))
        moved = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None] + centre, points)
        if bool((counts == 0).any()):
            _reseed(moved, counts == 0, x, chunk_size)
        largest_move, points = (moved - points).square().sum(-1).max(), moved
        if largest_move <= smallest_move:
            break
    return points


def _reseed(points: Tensor, empty: Tensor, x: Rows, chunk_size: int) -> None:
    """Put the points of empty cells, in place, at the rows farthest from all others."""
    kept = points[~empty]
    cells = _nearest(x, kept, chunk_size).split(chunk_size)
    pairs = zip(_parts(x, chunk_size), cells, strict=True)
    distance = torch.cat([(chunk - kept[own]).square_().sum(-1) for chunk, own in pairs])  # squared  [N]
    for index in empty.nonzero().squeeze(-1):
        points[index] = x[distance.argmax().unsqueeze(0)][0]
        _lower(distance, x, points[index], chunk_size)


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def _checked(x: Inputs, num_points: int, kernel: Kernel | None = None) -> Rows:
    """Inputs that points can be chosen from, looked at a chunk at a time."""
    check_array("x", x)
    if x.ndim not in (1, 2) or (isinstance(x, Tensor) and not x.is_floating_point()):
        raise ValueError(f"x must be floating point, N x D or N; got {_name(x.dtype)} of shape {tuple(x.shape)}.")
    like = x if isinstance(x, Tensor) else torch.empty(0) if kernel is None else reference(kernel)
    rows = Rows(x, like, is_input=True)
    if not 1 <= num_points <= len(rows):
        raise ValueError(f"num_points must lie between 1 and the {len(rows)} rows of x; got {num_points}.")
    bad = sum(int((~torch.isfinite(chunk)).any(-1).sum()) for chunk in _parts(rows, 2**16))
    if bad:
        raise ValueError(f"x holds NaN or infinity in {bad} of {len(rows)} rows; drop or impute them.")
    return rows


def _parts(x: Rows, chunk_size: int) -> Iterator[Tensor]:
    return (x[rows] for rows in chunks(len(x), chunk_size))


def _moments(x: Rows, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each dimension, ``D``; of one point the variance is zero."""
    first = x[:1]
    total = torch.zeros_like(first[0], dtype=torch.float64)
    for part in _parts(x, chunk_size):
        total += part.double().sum(-2)
    mean, squares = total / len(x), torch.zeros_like(total)
    for part in _parts(x, chunk_size):
        squares += (part.double() - mean).square().sum(-2)
    return mean.to(first.dtype), (squares / max(1, len(x) - 1)).to(first.dtype)


def _nearest(x: Rows, points: Tensor, chunk_size: int) -> Tensor:
    centre = points.mean(-2)
    return torch.cat([_cells(part - centre, points - centre) for part in _parts(x, chunk_size)])


def _generator(x: Rows, seed: int) -> torch.Generator:
    return torch.Generator(device=x.like.device).manual_seed(seed)


def _permutation(x: Rows, seed: int) -> Tensor:
    return torch.randperm(len(x), generator=_generator(x, seed), device=x.like.device)


def _distinct_rows(x: Rows, order: Tensor, num_points: int) -> Tensor:
    """The first ``num_points`` different rows of ``x`` met in this order."""
    looked_at = num_points
    while True:
        rows = x[order[:looked_at]]
        different, inverse = torch.unique(rows, dim=0, return_inverse=True)
        if len(different) >= num_points:
            break
        if looked_at >= len(order):
            raise _too_few(len(different), num_points)
        looked_at *= 2
    position = torch.arange(len(rows), device=rows.device)
    first = position.new_full((len(different),), len(rows)).scatter_reduce_(0, inverse, position, "amin")
    return rows[first.sort().values[:num_points]]


def _too_few(distinct: int, num_points: int) -> ValueError:
    return ValueError(
        f"x has {distinct} distinct rows, too few for {num_points} inducing points; ask for at most {distinct}."
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
