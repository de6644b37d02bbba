r"""Blocks of points that q(f|u) may correlate: the closed form for Gaussian noise with a block-diagonal :math:`M`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..maths.collapsed import add_identity_cholesky
from ..maths.linalg import mean_diagonal, triangular_inverse
from .base import Within
from .optimal import OptimalConditional


def block_table(labels: Tensor) -> Tensor:
    r"""The positions of the points of each block.

    :param labels: Label of each point, shape ``N``.
    :return: ``K x S``, a row for each label that occurs, in increasing order; filled up with -1.

    Example:
        >>> tighter_gp.conditionals.block_table(torch.tensor([2, 0, 2]))
        tensor([[ 1, -1],
                [ 0,  2]])
    """
    _, block, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    order = torch.argsort(block, stable=True)  # points, block by block  [N]
    column = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[block[order]]
    table = order.new_full((len(counts), int(counts.max())), -1)  # [K, S]
    table[block[order], column] = order
    return table


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
    needs_double = True

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        if labels.is_floating_point() or labels.dim() != 1 or not len(labels):
            raise ValueError(
                "Blocks needs one integer label per training point, shape (N,); "
                f"got {str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}."
            )
        # Not saved: a checkpoint of any conditional without parameters loads into any other.
        self.register_buffer("labels", torch.unique(labels, return_inverse=True)[1], persistent=False)
        self._host_labels = self.labels.cpu()  # tables of batches are made on the host, wherever the model is
        self.sizes = torch.bincount(self._host_labels)

    @property
    def num_data(self) -> int:
        """Number of training points."""
        return self.labels.size(0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.sizes.size(0)

    def residual_blocks(self, num_points: int, within: Within, *, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Residual covariances within the blocks of a batch.

        :param num_points: Points in the batch.
        :param within: :math:`D` within sets of points of the batch.
        :param index: Positions of the batch in the training set.
        :return: :math:`D_{bb}`, ``... x K x S x S``, zero where a block is filled up, and the positions of its points in the
            batch, ``K x S``, -1 there.
        """
        rows = block_table(self._labels_of(num_points, index)).to(self.labels.device)  # [K, S]
        is_point = rows >= 0  # [K, S]
        covariance = within(rows)  # a place that is filled up has -1, which is a row as well
        is_diagonal = torch.eye(rows.size(-1), dtype=torch.bool, device=rows.device)
        covariance = torch.where(is_diagonal, covariance.clamp_min(0), covariance)
        return covariance * (is_point.unsqueeze(-1) & is_point.unsqueeze(-2)), rows

    def _labels_of(self, num_points: int, index: Tensor | None) -> Tensor:
        """The labels of a batch, which must hold whole blocks, each point once."""
        if index is None and num_points != self.num_data:
            raise ValueError(
                f"Blocks knows {self.num_data} training points, the batch has {num_points}: call "
                "model(x, index=rows) in training, with rows from tighter_gp.blocks.BlockBatchSampler."
            )
        if index is None:
            return self._host_labels
        index = index.cpu()  # the one thing to wait for
        labels = self._host_labels[index]
        counts = torch.bincount(labels, minlength=self.num_blocks)
        if bool(((counts > 0) & (counts != self.sizes)).any()) or len(index.unique()) < len(index):
            raise ValueError(
                "A batch must hold whole blocks, each point once; this one cuts some. Draw batches with "
                "tighter_gp.blocks.BlockBatchSampler."
            )
        return labels

    def optimum(
        self, residual: Tensor, precision: Tensor, within: Within | None = None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""See :meth:`OptimalConditional.optimum <tighter_gp.conditionals.OptimalConditional.optimum>`.

        With :math:`\tilde D = \Lambda^{1/2} D_{bb} \Lambda^{1/2}` the best block is :math:`M_b = (I + \tilde D)^{-1}`. It
        leaves the diagonal of :math:`(D_{bb}^{-1} + \Lambda)^{-1}`, which is :math:`(1 - [M_b]_{nn}) / \lambda_n`, and costs
        :math:`\tfrac12 (\mathrm{tr}\, M_b - |b| - \log |M_b|)`.
        """
        assert within is not None
        covariance, rows = self.residual_blocks(residual.size(-1), within, index=index)
        precision = precision.expand_as(residual).to(covariance.dtype)
        is_seen = precision > 0
        precision = torch.where(is_seen, precision, torch.ones_like(precision))
        root = (precision.sqrt() * is_seen)[..., rows]  # a place that is filled up has -1, and no covariance
        scaled = root.unsqueeze(-1) * covariance * root.unsqueeze(-2)  # Lambda^1/2 D_bb Lambda^1/2  [..., K, S, S]
        # Differences of covariances: what the inducing points explain wholly has the errors of what they do not.
        largest = mean_diagonal(scaled).amax(-1, keepdim=True)
        factor = add_identity_cholesky(scaled, largest.expand(scaled.shape[:-2]))  # of M_b^-1  [..., K, S, S]
        block_scale = triangular_inverse(factor).square().sum(-2)  # the diagonal of M_b  [..., K, S]
        penalty = 0.5 * (block_scale - 1) + factor.diagonal(dim1=-1, dim2=-2).log()
        place = torch.argsort(rows.flatten())[-residual.size(-1) :]  # what is filled up has -1 and comes first
        explained_away, penalty = (values.flatten(-2)[..., place] for values in (1 - block_scale, penalty))
        kept = torch.where(is_seen, explained_away / precision, residual)
        return kept.to(residual.dtype), penalty.to(residual.dtype)
