r"""Partitions of the training points into blocks, and mini-batches made of whole blocks.

With a block-diagonal :math:`M` the tighter family may correlate points within a block; the bound rises from
:math:`F_4` (one point per block) to :math:`F_8` (one block) as blocks are merged. It pays to put near points together.
A partition is an integer tensor of labels, one per training point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..checks import passed
from ..data import move
from ..draws import permutation
from ..inducing import kmeans
from ..maths.collapsed import add_identity, add_identity_cholesky
from ..maths.linalg import mean_diagonal, triangular_inverse
from .base import ResidualBlocks, block_table, checked_index
from .optimal import OptimalConditional

__all__ = ["BlockBatchSampler", "Blocks", "partition"]


@torch.no_grad()
def partition(
    x: Tensor, num_blocks: int, *, max_size: int | None = None, seed: int = 0, chunk_size: int = 8192
) -> Tensor:
    r"""Partition points into k-means cells of bounded size.

    A cell that would grow beyond ``max_size`` keeps the points nearest to its centre; the others go to the nearest cell
    that has room. Takes ``chunk_size x num_blocks`` memory beyond the labels and distances.

    :param x: Training inputs, ``N x D``, scaled as the kernel sees them.
    :param num_blocks: Number of blocks :math:`K`.
    :param max_size: Most points per block; default :math:`\lceil N/K \rceil`, so that all blocks have nearly one size. The
        cost of a block grows with the cube of its size, so keep it at or below the number of inducing points.
    :param seed: Seed of k-means.
    :param chunk_size: Points per chunk.
    :return: Labels from 0 to at most ``num_blocks - 1``, one per point, without gaps.

    Example:
        >>> labels = tighter_gp.blocks.partition(torch.rand(100, 2), 7)
        >>> labels.bincount().max()
        tensor(15)
    """
    num_data = x.size(0)
    centres = kmeans(x, num_blocks, seed=seed)
    size = -(-num_data // num_blocks) if max_size is None else max_size
    if size * num_blocks < num_data:
        raise ValueError(
            f"{num_blocks} blocks of at most {size} points cannot hold {num_data} points; "
            f"use max_size >= {-(-num_data // num_blocks)} or more blocks."
        )
    labels = x.new_full((num_data,), -1, dtype=torch.long)
    room = labels.new_full((num_blocks,), size)
    waiting = torch.arange(num_data, device=x.device)
    while len(waiting):
        # Each round fills at least one block or places every point.
        choice, distance = _nearest_with_room(x, waiting, centres, room, chunk_size)
        order = torch.argsort(distance, stable=True)
        order = order[torch.argsort(choice[order], stable=True)]  # by block, near points first
        counts = torch.bincount(choice, minlength=num_blocks)
        rank = torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[choice[order]]
        placed = order[rank < room[choice[order]]]
        labels[waiting[placed]] = choice[placed]
        room -= torch.bincount(choice[placed], minlength=num_blocks)
        waiting = waiting[labels[waiting] < 0]
    return torch.unique(labels, return_inverse=True)[1]


def _nearest_with_room(
    x: Tensor, rows: Tensor, centres: Tensor, room: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """For each of some rows the nearest centre whose block has room, and the distance to it."""
    choices, distances = [], []
    for chunk in rows.split(chunk_size):
        distance = torch.cdist(x[chunk], centres).masked_fill(room == 0, torch.inf)
        nearest = distance.min(-1)
        choices.append(nearest.indices)
        distances.append(nearest.values)
    return torch.cat(choices), torch.cat(distances)


def block_chunks(labels: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Rows of whole blocks, block after block, in chunks of at most ``batch_size`` points or of one block.

    Every point comes exactly once: this walks over the training set to sum something up.

    :param labels: Label of each point, shape ``N``.
    :param batch_size: Most points per chunk, unless a single block has more.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    gathered: list[Tensor] = []
    for row in block_table(labels):
        row = row[row >= 0]
        if gathered and sum(map(len, gathered)) + len(row) > batch_size:
            yield torch.cat(gathered)
            gathered = []
        gathered.append(row)
    yield torch.cat(gathered)


class BlockBatchSampler(Sampler[list[int]]):
    r"""Draws mini-batches of whole blocks, so that the mean over a batch is an unbiased estimate of the mean over the data.

    The first block of a batch is drawn with probability proportional to its size, the others uniformly from the rest
    (Midzuno's scheme). A batch then comes with probability proportional to its number of points, and for any sums
    :math:`t_b` over blocks

    .. math:: \mathbb E\Bigl[\frac{\sum_{b \in B} t_b}{\sum_{b \in B} |b|}\Bigr] = \frac{\sum_b t_b}{N},

    also where blocks differ in size. Batches are independent, so an epoch of ``len(sampler)`` batches shows each point
    once on average, not exactly.

    :param labels: Label of each training point, shape ``N``.
    :param blocks_per_batch: Number of blocks in a batch.
    :param generator: Source of randomness, on any device; default the global one of the CPU.

    Example:
        >>> labels = tighter_gp.blocks.partition(torch.rand(100, 2), 10)
        >>> sampler = tighter_gp.blocks.BlockBatchSampler(labels, blocks_per_batch=3)
        >>> len(sampler), sorted(len(rows) for rows in sampler)
        (4, [30, 30, 30, 30])
    """

    def __init__(self, labels: Tensor, blocks_per_batch: int, *, generator: torch.Generator | None = None) -> None:
        self.table = block_table(labels).cpu()
        self.sizes = (self.table >= 0).sum(-1)
        if not 1 <= blocks_per_batch <= len(self.table):
            raise ValueError(
                f"blocks_per_batch must lie between 1 and the {len(self.table)} blocks; got {blocks_per_batch}."
            )
        self.blocks_per_batch = blocks_per_batch
        self.generator = generator

    def __len__(self) -> int:
        return -(-len(self.table) // self.blocks_per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield self.draw().tolist()

    def draw(self) -> Tensor:
        """The rows of one batch."""
        # By inversion: torch.multinomial takes at most 2**24 categories.
        where = "cpu" if self.generator is None else self.generator.device
        point = torch.randint(int(self.sizes.sum()), (), generator=self.generator, device=where).cpu()
        first = torch.searchsorted(self.sizes.cumsum(0), point, right=True)
        others = permutation(len(self.table) - 1, "cpu", self.generator)[: self.blocks_per_batch - 1]
        others = others + (others >= first)
        rows = self.table[torch.cat([first.view(1), others])].flatten()
        return rows[rows >= 0]


class Blocks(OptimalConditional):
    r"""The closed form for Gaussian noise with a block-diagonal :math:`M`, after Bui and Titsias (2025); no parameter.

    Points of one block may be correlated under q(f|u). The residual then costs
    :math:`\tfrac12 \sum_b \log|I + D_{bb}/\sigma^2|`, never more than the :math:`\tfrac12 \sum_n \log(1 + d_n/\sigma^2)`
    of ``"optimal"``, and less the larger the blocks and the nearer their points. A block of :math:`S` points takes
    :math:`O(S^2 (M + S))` time.

    In training a batch must hold whole blocks: draw it with :class:`~tighter_gp.blocks.BlockBatchSampler` and call
    ``model(x, index=rows)``. A batch of all training points in their order needs no index.

    :param labels: Block of each training point, integers of shape ``N``; see :func:`~tighter_gp.blocks.partition`.

    Example:
        >>> train_x, z = torch.rand(100, 2), torch.rand(20, 2)
        >>> conditional = tighter_gp.Blocks(tighter_gp.blocks.partition(train_x, 10))
        >>> conditional.num_data, conditional.num_blocks
        (100, 10)
    """

    is_strict = True
    is_gaussian_only = True
    needs_index = True
    needs_blocks = True
    needs_double = True

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        if labels.dtype not in (torch.int32, torch.int64) or labels.dim() != 1 or not len(labels):
            raise ValueError(
                "Blocks needs one integer label per training point, shape (N,); "
                f"got {str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}."
            )
        # Not saved: a checkpoint of any conditional without parameters loads into any other.
        self.register_buffer("labels", torch.unique(labels, return_inverse=True)[1], persistent=False)
        # Tables of batches are made on the host, wherever the model is.
        self._host_labels = [self.labels.cpu()]
        self.sizes = torch.bincount(self._host_labels[0])

    @property
    def num_data(self) -> int:
        """Number of training points."""
        return self.labels.size(0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.sizes.size(0)

    def residual_blocks(
        self, residual: Tensor, covariance: Callable[[Tensor], Tensor], *, index: Tensor | None = None
    ) -> ResidualBlocks:
        """See :meth:`Conditional.residual_blocks <tighter_gp.conditionals.Conditional.residual_blocks>`."""
        rows = move(block_table(self._labels_of(residual, index)), residual.device)
        is_point = rows >= 0
        blocks = covariance(rows)  # a place that is filled up has -1, which is a row as well
        is_diagonal = torch.eye(rows.size(-1), dtype=torch.bool, device=rows.device)
        blocks = torch.where(is_diagonal, blocks.clamp_min(0.0), blocks)
        return ResidualBlocks(blocks * (is_point.unsqueeze(-1) & is_point.unsqueeze(-2)), rows)

    def _labels_of(self, residual: Tensor, index: Tensor | None) -> Tensor:
        if index is None:
            if residual.size(-1) != self.num_data:
                raise ValueError(
                    f"Blocks knows {self.num_data} training points, the batch has {residual.size(-1)}: call "
                    "model(x, index=rows) in training, with rows from tighter_gp.blocks.BlockBatchSampler."
                )
            return self._host_labels[0]
        index = index.cpu()  # the one thing to wait for
        labels = self._host_labels[0][checked_index(index, residual.size(-1), self.num_data, "Blocks")]
        if len(index.unique()) < len(index):
            raise ValueError(
                f"A batch must hold each point once; index has {len(index) - len(index.unique())} repeats."
            )
        counts = torch.bincount(labels, minlength=self.num_blocks)
        wrong = ((counts > 0) & (counts != self.sizes)).nonzero().flatten()
        if len(wrong):
            block = int(wrong[0])
            raise ValueError(
                f"A batch must hold whole blocks: this one has {int(counts[block])} of the {int(self.sizes[block])} points "
                f"of block {block}, and cuts {len(wrong)} blocks. Draw batches with tighter_gp.blocks.BlockBatchSampler."
            )
        return labels

    def optimum(
        self, residual: Tensor, precision: Tensor, blocks: ResidualBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""See :meth:`Conditional.optimum <tighter_gp.conditionals.Conditional.optimum>`.

        With :math:`\tilde D = \Lambda^{1/2} D_{bb} \Lambda^{1/2}` the best block is :math:`M_b = (I + \tilde D)^{-1}`. It
        leaves the diagonal of :math:`(D_{bb}^{-1} + \Lambda)^{-1}`, which is :math:`(1 - [M_b]_{nn}) / \lambda_n`, and costs
        :math:`\tfrac12 (\mathrm{tr}\, M_b - |b| - \log |M_b|)`.
        """
        if blocks is None:
            raise ValueError(
                "Blocks needs the residual covariances within blocks; this strategy does not provide them."
            )
        precision = precision.expand_as(residual).to(blocks.covariance.dtype)
        is_seen = precision > 0
        precision = torch.where(is_seen, precision, torch.ones_like(precision))
        root = (precision.sqrt() * is_seen)[..., blocks.rows]  # a place that is filled up has -1, and no covariance
        scaled = root.unsqueeze(-1) * blocks.covariance * root.unsqueeze(-2)
        # Differences of covariances: what the inducing points explain wholly has the errors of what they do not.
        largest = mean_diagonal(scaled).amax(-1, keepdim=True)
        factor = _factor(scaled, largest.expand(scaled.shape[:-2]))
        block_scale = triangular_inverse(factor).square().sum(-2)  # the diagonal of M_b, ... x K x S
        penalty = 0.5 * (block_scale - 1) + factor.diagonal(dim1=-1, dim2=-2).log()
        explained_away, penalty = (
            _ungroup(values, blocks.rows, residual.size(-1)) for values in (1 - block_scale, penalty)
        )
        kept = torch.where(is_seen, explained_away / precision, residual)
        return kept.to(residual.dtype), penalty.to(residual.dtype)


def _factor(gram: Tensor, scale: Tensor) -> Tensor:
    """:func:`~tighter_gp.maths.collapsed.add_identity_cholesky`, at first without a look at how it went."""
    factor, info = torch.linalg.cholesky_ex(add_identity(gram))
    ok = (info == 0).all() & torch.isfinite(factor.diagonal(dim1=-1, dim2=-2)).all()
    return factor if passed(ok) else add_identity_cholesky(gram, scale)


def _ungroup(values: Tensor, rows: Tensor, num_points: int) -> Tensor:
    """From one value per place in a table of blocks, ``... x K x S``, to one per point, ``... x B``."""
    place = torch.argsort(rows.flatten())[-num_points:]  # what is filled up has -1 and comes first
    return values.flatten(-2)[..., place]
