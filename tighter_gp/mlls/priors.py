"""Log density of the priors on hyperparameters, each counted once."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.means import LinearMean
from torch import Tensor


def log_prior(root: Any, batch_shape: torch.Size = torch.Size()) -> Tensor | float:
    """Sum over the priors of a module, with one value per model of a batch.

    GPyTorch's ``named_priors`` has a prior as often as there are ways to its module: of a likelihood that is also an attribute
    of the model, twice.

    :param root: The module.
    :param batch_shape: Shape of the batch of models. A prior on a module of that batch shape counts for each model alone,
        any other for all of them in full.
    """
    total: Tensor | float = 0.0
    seen: set[tuple[int, str]] = set()
    for name, module, prior, closure, _ in root.named_priors():
        key = id(module), name.rpartition(".")[2]
        if key in seen:
            continue
        seen.add(key)
        value = prior.log_prob(closure(module))
        own = getattr(module, "batch_shape", None)
        if own is None:  # noise is ... x 1, the weights of a linear mean are ... x D x 1
            own = value.shape[: -2 if isinstance(module, LinearMean) else -1]
        kept = len(batch_shape) if own == batch_shape and value.shape[: len(batch_shape)] == batch_shape else 0
        total = total + (value.flatten(kept).sum(-1) if value.dim() > kept else value)
    return total


def counts_twice(root: Any) -> bool:
    """Whether GPyTorch's ``named_priors`` has a prior more than once."""
    found = [(id(module), name.rpartition(".")[2]) for name, module, *_ in root.named_priors()]
    return len(found) > len(set(found))
