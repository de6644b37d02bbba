"""Log density of the priors on hyperparameters, each counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def log_prior(root: Any, batch_shape: torch.Size = torch.Size()) -> Tensor | float:
    """Sum over the priors of a module, with one value per model of a batch.

    GPyTorch's ``named_priors`` has a prior as often as there are ways to its module: of a likelihood that is also an attribute
    of the model, twice.

    :param root: The module.
    :param batch_shape: Shape of the batch of models; a prior that has it counts for each of them alone.
    """
    total: Tensor | float = 0.0
    for prior, module, closure in _distinct(root):
        value = prior.log_prob(closure(module))
        kept = len(batch_shape) if value.shape[: len(batch_shape)] == batch_shape else 0
        total = total + (value.flatten(kept).sum(-1) if value.dim() > kept else value)
    return total


def counts_twice(root: Any) -> bool:
    """Whether ``named_priors`` has a prior more than once."""
    return sum(1 for _ in root.named_priors()) > sum(1 for _ in _distinct(root))


def _distinct(root: Any) -> Iterator[tuple[Any, Any, Any]]:
    seen: set[tuple[int, str]] = set()
    for name, module, prior, closure, _ in root.named_priors():
        key = id(module), name.rpartition(".")[2]
        if key not in seen:
            seen.add(key)
            yield prior, module, closure
