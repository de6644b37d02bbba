"""One view on a trained sparse GP, uncollapsed or collapsed: its projector and its whitened q."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ApproximateGP, ExactGP
from torch import Tensor

from .checks import check_dims
from .collapsed import CollapsedGP, DataSums, data_sums, projected_batches
from .data import Rows
from .kernels import TighterInducingPointKernel
from .likelihoods.properties import gaussian_noise, is_gaussian, observed
from .maths.moments import Whitened, explained_variance, projected_mean
from .modes import chunks
from .prior import Projection, Projector
from .strategies import TighterStrategy, TighterVariationalStrategy


class TrainingData(NamedTuple):
    """What a collapsed model was trained on.

    :param x: Inputs, ``... x N x D``.
    :param observed: Which targets there are, shaped like the targets; None if all.
    :param noise: Noise variances, shaped like the targets.
    :param bound: Name of the bound.
    """

    x: Tensor
    observed: Tensor | None
    noise: Tensor
    bound: str


class Posterior(NamedTuple):
    """The prior and the whitened q of a model.

    :param projector: Turns inputs into (prior mean, A, d).
    :param q: q(w).
    :param jitter: What the model's own predictive variance has on top of the formula's.
    :param strategy: The strategy, of an uncollapsed model.
    :param training: The data, of a collapsed model.
    :param labels: The model's own blocks, if it has any.
    """

    projector: Projector
    q: Whitened
    jitter: float = 0.0
    strategy: TighterStrategy | None = None
    training: TrainingData | None = None
    labels: Tensor | None = None

    def f_at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at inputs ``... x B x D``."""
        like = (
            self.projector.points if self.training is None else self.training.x
        )  # a feature extractor may lie between
        check_dims(x.shape, like.size(-1))
        return self.moments(self.projector(x))

    def moments(self, points: Projection) -> tuple[Tensor, Tensor]:
        """Mean and variance of q(f) with SVGP's conditional."""
        q = self.q.to(points.matrix.dtype)
        mean = points.mean + projected_mean(points.matrix, q)
        return mean, explained_variance(points.matrix, q) + points.residual + self.jitter


def gathered(
    projector: Projector, x: Rows, y: Tensor, noise: Tensor, likelihood: Any, batch_size: int = 4096
) -> DataSums:
    """Sums over a data set whose missing targets count for nothing."""
    mask = observed(likelihood, y, y.shape[-1:])
    if mask is None and not bool(torch.isfinite(y).all()):
        count = int((~torch.isfinite(y)).sum())
        raise ValueError(f"{count} of {y.numel()} targets are NaN or infinite; drop them, or mark NaN as missing.")
    precision = noise.double().reciprocal()
    if mask is not None:
        precision, y = precision * mask, torch.where(mask, y, torch.zeros_like(y))
    projector.settle(x[rows] for rows in chunks(len(x), 65536))
    return data_sums(projected_batches(projector, x, y, precision, batch_size))


def exact_gp_projector(model: ExactGP, precision: torch.dtype | None = None) -> Projector:
    """The projector of an ExactGP with our kernel as its ``covar_module``."""
    kernel = getattr(model, "covar_module", None)
    if not isinstance(kernel, TighterInducingPointKernel):
        raise TypeError(
            "A collapsed model needs a TighterInducingPointKernel as its covar_module, not scaled or added to others; "
            f"got {type(kernel).__name__}. Put the other kernels inside, TighterInducingPointKernel(ScaleKernel(...))."
        )
    if kernel.likelihood is not model.likelihood:
        raise ValueError(
            "The kernel was built with another likelihood than the model, and its bound has that one's noise: build both with "
            "the same object."
        )
    y = model.train_targets
    noise = gaussian_noise(model.likelihood, y.shape[:-1], y.shape[-1:]).expand_as(y)

    def inputs(x: Tensor) -> tuple[Tensor, Tensor]:
        """The prior mean, and what the kernel sees: the inputs after any feature extractor and selection of dimensions."""
        with settings.lazily_evaluate_kernels(True):
            prior = model.forward(x)
        covar = prior.lazy_covariance_matrix
        if not isinstance(covar, LazyEvaluatedKernelTensor) or covar.kernel is not kernel:
            raise TypeError(
                "forward of a collapsed model must return the covariance of its covar_module as it is; "
                f"got {type(covar).__name__}."
            )
        return prior.mean, covar.x1

    projector = kernel.projector(noise, precision)
    projector.inputs = inputs
    return projector


def posterior_of(model: Any, precision: torch.dtype | None = None) -> Posterior:
    """The view that fits the model; call it in eval mode.

    :param precision: Of kernel and projection; default one that suffices.
    """
    if isinstance(model, CollapsedGP):
        projector, q = model.posterior(precision)
        return Posterior(projector, q, training=TrainingData(model.train_x, None, model.train_noise, model.bound_name))
    if isinstance(model, ExactGP):
        projector, kernel = exact_gp_projector(model, precision), model.covar_module
        (x,), y = model.train_inputs, model.train_targets
        noise = gaussian_noise(model.likelihood, y.shape[:-1], y.shape[-1:]).expand_as(y)
        q = gathered(projector, Rows(x, x, is_input=True), y, noise, model.likelihood).best_q()
        training = TrainingData(x, observed(model.likelihood, y, y.shape[-1:]), noise, kernel.bound)
        return Posterior(projector, q, training=training, labels=getattr(kernel.blocks, "labels", None))
    strategy = tighter_strategy(model)
    labels = getattr(strategy.conditional, "labels", None)
    return Posterior(strategy.projector(precision), strategy.whitened(), strategy.jitter_val, strategy, labels=labels)


def tighter_copy(model: ApproximateGP) -> ApproximateGP:
    """A copy of a model on GPyTorch's own VariationalStrategy with one of this package in its place, of the same q(u)."""
    model = copy.deepcopy(model)
    standard: Any = model.variational_strategy
    z, q = standard.inducing_points, standard._variational_distribution
    model.variational_strategy = TighterVariationalStrategy(model, z.detach(), q, jitter_val=standard.jitter_val)
    model.variational_strategy.variational_params_initialized.copy_(standard.variational_params_initialized)
    return model


def tighter_strategy(model: Any) -> TighterStrategy:
    """The strategy of a single-output model of this package, or a clear error."""
    strategy = getattr(model, "variational_strategy", None)
    if not isinstance(strategy, TighterStrategy):
        raise TypeError(
            "Expected an ApproximateGP whose variational_strategy is one of tighter_gp's, not wrapped for several "
            f"tasks; got {type(model).__name__} with {type(strategy).__name__}."
        )
    if has_own_call(model):
        raise TypeError(
            f"{type(model).__name__} has a __call__ of its own, which may change the inputs on their way to the strategy. Change "
            "them in forward, which is called with the inducing points too, or before the call."
        )
    return strategy


def has_own_call(model: Any) -> bool:
    """Whether a model may do something with its inputs before its strategy sees them."""
    return isinstance(model, ApproximateGP) and type(model).__call__ is not ApproximateGP.__call__


def require_gaussian(likelihood: Any, what: str, hint: str = "") -> None:
    """Raise unless the likelihood is Gaussian; ``hint`` says what to do then."""
    if not is_gaussian(likelihood):
        raise TypeError(f"{what} needs a Gaussian likelihood; got {type(likelihood).__name__}. {hint}".rstrip())
