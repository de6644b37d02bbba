r"""Step sizes for natural gradients on q(u) with Adam on the rest, chosen by experiment, one setting for all.

q(u) is moved first. Its step size starts at 1, the optimum of the first batch, unless q(u) knows of data already. It falls as
:math:`1/t`, which makes q(u) the mean over batches, is constant while the other parameters move, and falls further as they
settle.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..likelihoods.properties import is_gaussian, is_sampled

__all__ = ["Recipe"]


class Recipe(NamedTuple):
    r"""Step sizes as functions of how far a run is.

    :param lr: Adam's learning rate for the hyperparameters.
    :param inducing_lr: The same for inducing points, in units of the inputs' standard deviation; it falls as a cosine over the
        whole run.
    :param natural: Size of the natural step while the learning rate is constant: 0.2 for Gaussian noise; see
        :meth:`for_likelihood`.
    :param natural_full: Size of the natural step where every batch has all data, so that there is no noise to average out.
    :param natural_end: Size of the natural step at the end, as a fraction of that.
    :param decay: Fraction of the run, at its end, over which the learning rate falls linearly to zero.
    :param ramp: Steps over which the learning rate rises at the start, while q(u) finds its place.

    Example:
        >>> recipe = tighter_gp.training.recipe.Recipe()
        >>> [round(recipe.lr_factor(step, total=100), 3) for step in (0, 4, 49, 75, 99)]
        [0.2, 1.0, 1.0, 0.5, 0.02]
        >>> sizes = [recipe.natural_size(s, 100) for s in (0, 1, 4, 49, 75, 99)]
        >>> [round(size, 3) for size in sizes]
        [1.0, 0.5, 0.2, 0.2, 0.125, 0.053]
    """

    lr: float = 0.2
    inducing_lr: float = 0.05
    natural: float = 0.2
    natural_full: float = 0.9
    natural_end: float = 0.25
    decay: float = 0.5
    ramp: int = 5

    @classmethod
    def for_likelihood(cls, likelihood: Any) -> Recipe:
        """The setting for a likelihood: smaller natural steps where slopes depend on q(u), smallest where they are sampled."""
        if is_gaussian(likelihood):
            return cls()
        return cls(natural=0.02 if is_sampled(likelihood) else 0.05, natural_full=0.5)

    def lr_factor(self, step: int, total: int) -> float:
        """Factor on Adam's learning rates at a step, counted from 0."""
        return self._schedule(step, total) * min(1.0, (step + 1) / self.ramp)

    def inducing_lr_factor(self, step: int, total: int) -> float:
        """The same factor for the learning rate of inducing points."""
        return min(self.lr_factor(step, total), 0.5 * (1 + math.cos(math.pi * step / total)))

    def natural_size(
        self,
        step: int,
        total: int,
        share: float = 1.0,
        full_batch: bool = False,
        is_warm: bool = False,
    ) -> float:
        """Size of the natural step.

        :param share: Size of this batch over that of the others; the last one of an epoch may be smaller.
        :param full_batch: Whether every batch has all data.
        :param is_warm: Whether q(u) knew of data at the start, which a first step of size 1 would throw away.
        """
        first = 0.0 if is_warm else 1 / (step + 1)
        if full_batch:
            return max(self.natural_full, first)
        factor = self._schedule(step, total)
        size = self.natural * (factor + self.natural_end * (1 - factor))
        return share * max(size, first)

    def _schedule(self, step: int, total: int) -> float:
        return min(1.0, (1 - step / total) / self.decay)
