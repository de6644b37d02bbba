"""One view on a trained sparse GP, uncollapsed or collapsed: its prior and its whitened q."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import LinearOperator
from torch import Tensor

from .collapsed import CollapsedGP, DataSums, TighterInducingPointKernel, data_sums
from .data import Rows, input_rows
from .likelihoods.family import family, gaussian_noise, observed
from .maths.moments import Whitened, explained_moments
from .modes import chunks
from .prior import Prior, Projection
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

    :param prior: Turns inputs into (prior mean, A, d).
    :param q: q(w).
    :param points: The inducing points.
    :param jitter: What the model's own predictive variance has on top of the formula's.
    :param strategy: The strategy, of an uncollapsed model.
    :param training: The data, of a collapsed model.
    :param labels: The model's own blocks, if it has any.
    """

    prior: Prior
    q: Whitened
    points: Tensor
    jitter: float = 0.0
    strategy: TighterStrategy | None = None
    training: TrainingData | None = None
    labels: Tensor | None = None

    def f_at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at inputs ``... x B x D``."""
        wanted = (self.points if self.training is None else self.training.x).size(-1)  # a network may lie between
        if x.size(-1) != wanted:
            raise ValueError(f"Inputs must have shape ... x N x {wanted}, as in training; got {tuple(x.shape)}.")
        return self.moments(self.prior(x))

    def factorized(self, x: Tensor) -> Posterior:
        """The same with the factor of its inducing points, for several calls; ``x`` are some of the inputs."""
        return self if self.prior.factor is not None else self._replace(prior=self.prior.factorized(x))

    def moments(self, points: Projection) -> tuple[Tensor, Tensor]:
        """Mean and variance of q(f) with SVGP's conditional."""
        mean, explained = explained_moments(points.matrix, self.q.to(points.matrix.dtype))  # A'm and s  [..., B]
        return points.mean + mean, explained + points.residual + self.jitter


def noise_of(likelihood: Any, y: Tensor, **kwargs: Any) -> Tensor:
    """Noise variances of targets ``... x N``; ``kwargs`` are what the likelihood takes per point."""
    return gaussian_noise(likelihood, y.shape[:-1], y.shape[-1:], **kwargs).expand_as(y)


def with_target(likelihood: Any, y: Tensor) -> Tensor:
    """Which targets there are; raises where NaN does not mean a missing one."""
    seen = observed(likelihood, y, y.shape[-1:])
    if seen is not None:
        return seen.expand_as(y)
    finite = torch.isfinite(y)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise ValueError(f"{count} of {y.numel()} targets are NaN or infinite; drop them, or mark NaN as missing.")
    return finite


def gathered(
    prior: Prior, x: Rows, y: Tensor, noise: Tensor, likelihood: Any, batch_size: int = 4096
) -> tuple[Prior, DataSums]:
    """The prior with its factor, and sums over a data set whose missing targets count for nothing."""
    seen = with_target(likelihood, y)
    precision = noise.double().reciprocal() * seen  # 1 / sigma_n^2, zero where a target is missing  [..., N]
    y = torch.where(seen, y, torch.zeros_like(y))
    prior = prior if prior.factor is not None else prior.factorized(x[slice(batch_size)])
    return prior, data_sums((prior(x[rows]), y[..., rows], precision[..., rows]) for rows in chunks(len(x), batch_size))


def exact_gp_prior(model: ExactGP, dtype: torch.dtype | None = None) -> Prior:
    """The prior of an ExactGP with our kernel as its ``covar_module``."""
    kernel = getattr(model, "covar_module", None)
    if not isinstance(kernel, TighterInducingPointKernel):
        raise TypeError(
            "A collapsed model needs a TighterInducingPointKernel as its covar_module, with other kernels inside, as in "
            f"TighterInducingPointKernel(ScaleKernel(...)); got {type(kernel).__name__}."
        )
    if kernel.likelihood is not model.likelihood:
        raise ValueError("The kernel was built with another likelihood than the model: build both with the same one.")
    prior = kernel.prior(noise_of(model.likelihood, model.train_targets), dtype)

    def joint(x: Tensor) -> tuple[Tensor, LinearOperator]:
        """The prior mean at the inputs, and the covariance of what the kernel sees of them."""
        with settings.lazily_evaluate_kernels(True):
            data = model.forward(x)
        covar = data.lazy_covariance_matrix
        if not isinstance(covar, LazyEvaluatedKernelTensor) or covar.kernel is not kernel:
            raise TypeError(
                f"forward must return the covariance of its covar_module as it is; got {type(covar).__name__}."
            )
        return data.mean, prior.joint(covar.x1)[1]

    return Prior(joint, prior.num_inducing, prior.jitter, prior.noise, prior.dtype)


def posterior_of(model: Any, dtype: torch.dtype | None = None) -> Posterior:
    """The view that fits the model; call it in eval mode.

    :param dtype: Of kernel and projection; default one that suffices.
    """
    if isinstance(model, CollapsedGP):
        prior, q = model.posterior(dtype)
        training = TrainingData(model.train_x, None, model.train_noise, model.bound_name)
        return Posterior(prior, q, model.inducing_points, training=training)
    if isinstance(model, ExactGP):
        (x,), y, likelihood = model.train_inputs, model.train_targets, model.likelihood
        noise, prior = noise_of(likelihood, y), exact_gp_prior(model, dtype)
        prior, sums = gathered(prior, input_rows(x, x), y, noise, likelihood)
        kernel: Any = model.covar_module
        training = TrainingData(x, observed(likelihood, y, y.shape[-1:]), noise, kernel.bound)
        return Posterior(prior, sums.best_q(), kernel.inducing_points, training=training, labels=kernel.labels)
    strategy = tighter_strategy(model)
    strategy.start_from_prior()
    points, labels = strategy.all_points(), getattr(strategy.conditional, "labels", None)
    return Posterior(strategy.prior(dtype), strategy.whitened(), points, strategy.jitter_val, strategy, labels=labels)


def copied(model: Any, *others: Any) -> Any:
    """A deep copy of a model, and of others with it; what GPyTorch's strategies keep of the last step cannot be copied."""
    for part in model.modules():
        if isinstance(part, _VariationalStrategy):
            part._clear_cache()
    return copy.deepcopy((model, *others)) if others else copy.deepcopy(model)


def tighter_copy(model: ApproximateGP) -> ApproximateGP:
    """A copy of a model on GPyTorch's own VariationalStrategy with one of this package in its place, of the same q(u)."""
    model = copied(model)
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
            "Expected an ApproximateGP whose variational_strategy is one of tighter_gp's, not wrapped for several tasks; "
            f"got {type(model).__name__} with {type(strategy).__name__}. Of a module around a GP pass the GP and its inputs."
        )
    if has_own_call(model):
        raise TypeError(
            f"{type(model).__name__} has a __call__ of its own, which may change the inputs. Change them in forward, which "
            "sees the inducing points too, or before the call."
        )
    return strategy


def has_own_call(model: Any) -> bool:
    """Whether a model may do something with its inputs before its strategy sees them."""
    return isinstance(model, ApproximateGP) and type(model).__call__ is not ApproximateGP.__call__


def require_gaussian(likelihood: Any, what: str, hint: str = "") -> None:
    """Raise unless the likelihood is Gaussian; ``hint`` says what to do then."""
    if not family(likelihood).is_gaussian:
        raise TypeError(f"{what} needs a Gaussian likelihood; got {type(likelihood).__name__}. {hint}".rstrip())
