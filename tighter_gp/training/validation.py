"""The score of a model on held-out data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from ..data import Rows, check_array, check_kind, fingerprint, first_parameter, input_rows, num_rows, row_dim
from ..likelihoods.targets import check_arguments, check_targets
from ..modes import chunks
from ..predictions import predict_y


class HeldOut:
    """Held-out points.

    :param likelihood: The likelihood.
    :param like: Tensor whose dtype and device arrays take.
    :param x: Inputs, ``... x N x D`` or ``N``; tensors or arrays.
    :param y: Targets.
    :param kwargs: Per-point arguments of the likelihood.
    """

    def __init__(self, likelihood: Likelihood, like: Tensor, x: Any, y: Any, kwargs: Any = None) -> None:
        kwargs = kwargs or {}
        self.x = input_rows(x, like, "the held-out x")
        check_array("the held-out y", y)
        dim = row_dim(y.shape, num_rows(x), is_batch=x.ndim > 2)
        if dim is None:
            raise ValueError(f"There must be a held-out target per row of x, {num_rows(x)}; got {tuple(y.shape)}.")
        self.y = Rows(y, like, dim=dim, name="the held-out y")
        check_arguments(likelihood, kwargs)
        for name, value in kwargs.items():
            check_kind(name, value)
        is_fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
        if is_fixed and not isinstance(likelihood, DirichletClassificationLikelihood) and "noise" not in kwargs:
            raise ValueError(
                f"{type(likelihood).__name__} knows the noise of the training points only: pass that of the held-out points, "
                'validation=(x, y, {"noise": noise}).'
            )
        self.kwargs, self.likelihood = kwargs, likelihood
        for rows in chunks(len(self.x), 2**16):
            check_finite("the validation inputs", self.x[rows])
            check_targets(likelihood, self.y[rows], "values of the validation targets")

    def fingerprint(self) -> bytes:
        """A hash of all values."""
        return fingerprint(self.x, self.y)

    @torch.no_grad()
    def score(self, model: Any, rows: slice = slice(None)) -> float:
        """Mean negative log predictive density per point."""
        kwargs: dict[str, Any] = {
            n: v[..., rows] if isinstance(v, (Tensor, np.ndarray)) else v for n, v in self.kwargs.items()
        }
        y = predict_y(model, self.likelihood, self.x[rows], **kwargs)
        return -float(y.log_prob(self.y[rows]).double().nanmean())


def mean_nlpd(model: Any, likelihood: Likelihood, x: Any, y: Any, **kwargs: Any) -> float:
    """Mean negative log predictive density per held-out point, joint over the tasks of a point; lower is better.

    That is ``-predict_y(model, likelihood, x).log_prob(y).nanmean()``; a missing target counts nothing.

    :param model: A trained model.
    :param likelihood: Its likelihood.
    :param x: Inputs, ``... x N x D`` or ``N``; a tensor or a numpy array.
    :param y: Targets, ``N``, ``N x T`` or ``... x N``.
    :param kwargs: Per-point arguments of the likelihood, ``... x N``, such as ``noise=``.

    Example:
        >>> score = tighter_gp.training.mean_nlpd(model, likelihood, test_x, test_y)
        >>> math.isfinite(score)
        True
    """
    return HeldOut(likelihood, first_parameter(model, likelihood), x, y, kwargs).score(model)


def check_finite(name: str, values: Tensor) -> None:
    """Raise if a value is infinite or NaN."""
    count = int((~torch.isfinite(values)).sum())
    if count:
        raise ValueError(f"{count} of {values.numel()} values of {name} are NaN or infinite; drop their rows.")
