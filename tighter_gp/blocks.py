r"""Partitions of the training points into blocks, and mini-batches made of whole blocks.

With a block-diagonal :math:`M` the tighter family may correlate points within a block; the bound rises from
:math:`F_4` (one point per block) to :math:`F_8` (one block) as blocks are merged. It pays to put near points together.
A partition is an integer tensor of labels, one per training point.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .conditionals.blocks import Blocks, block_table
from .inducing import kmeans

__all__ = ["BlockBatchSampler", "Blocks", "block_table", "partition"]


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
    room = labels.new_full((num_blocks,), size)  # how many points each block still takes
    waiting = torch.arange(num_data, device=x.device)
    while len(waiting):
        # Each round fills at least one block or places every point, at the nearest centre whose block has room.
        nearest = []
        for rows in waiting.split(chunk_size):
            nearest.append(torch.cdist(x[rows], centres).masked_fill(room == 0, torch.inf).min(-1))
        distance, choice = (torch.cat(parts) for parts in zip(*nearest, strict=True))
        order = torch.argsort(distance, stable=True)
        order = order[torch.argsort(choice[order], stable=True)]  # by block, near points first
        counts = torch.bincount(choice, minlength=num_blocks)  # [K]
        rank = torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[choice[order]]
        # Within its block each point has a rank, by its distance.
        placed = order[rank < room[choice[order]]]
        labels[waiting[placed]] = choice[placed]
        room -= torch.bincount(choice[placed], minlength=num_blocks)
        waiting = waiting[labels[waiting] < 0]
    return torch.unique(labels, return_inverse=True)[1]


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
        others = torch.randperm(len(self.table) - 1, generator=self.generator, device=where).cpu()
        others = others[: self.blocks_per_batch - 1]
        others = others + (others >= first)
        rows = self.table[torch.cat([first.view(1), others])].flatten()
        return rows[rows >= 0]
