r"""A training step as one compiled graph.

What GPyTorch and the optimizer do around it (the mean, features of a deep kernel, constraints of hyperparameters) stays
eager and small; kernel matrices, Cholesky factor, moments, bound and their backward pass become one graph without a
value read back to the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from gpytorch.settings import _linalg_dtype_cholesky
from torch import Tensor

from .bounds import (
    gaussian_expected_log_prob,
    optimal_scale,
    optimal_scale_penalty,
    scale_penalty,
    whitened_kl,
)
from .conditionals import BetaConditional, Conditional, OptimalConditional, ScalarConditional
from .kernels.lowering import LoweredKernel
from .likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from .likelihoods.bernoulli_logit_likelihood import logit_expected_log_prob
from .likelihoods.poisson_likelihood import poisson_expected_log_prob
from .likelihoods.properties import gaussian_noise, is_gaussian
from .mlls import TighterELBO
from .moments import Moments, Whitened, fused_moments, orthogonal_cholesky
from .strategies._tighter_strategy import _TighterStrategy, lower_lazy


class CannotCompile(TypeError):
    """The model has a part that cannot be captured; the message names it."""


class _Inputs(NamedTuple):
    r"""Everything the graph reads, as tensors.

    :param features: Inducing points then data, as the kernel sees them, ``... x (M + B) x D``.
    :param prior_mean: Prior mean at the data, ``... x B``.
    :param target: :math:`y`, ``... x B``.
    :param likelihood: What the likelihood brings: :math:`\sigma_n^2`, or nodes and weights of a quadrature.
    :param conditional: The parameter of the conditional, or nothing.
    :param values: Hyperparameters of the kernel.
    :param parts: The factors of q(w).
    """

    features: Tensor
    prior_mean: Tensor
    target: Tensor
    likelihood: tuple[Tensor, ...]
    conditional: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    parts: tuple[tuple[Tensor | None, ...], ...]


class _Plan(NamedTuple):
    """What the graph is made of besides tensors: plain numbers and functions of tensors."""

    covariance: Callable[..., Tensor]
    variance: Callable[..., Tensor]
    expected_log_prob: Callable[..., Tensor]
    scale_and_penalty: Callable[..., tuple[Tensor, Tensor]]
    num_inducing: int
    num_points: int
    jitter: float
    precision: torch.dtype
    wide: torch.dtype
    num_data: int
    beta: float
    is_scalar: tuple[bool, ...]
    is_scalar_choice: tuple[bool, ...]


def _pack(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors without a dimension get one: torch would read their values for its guards."""
    return tuple(tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors)


def _unpack(tensors: Sequence[Tensor], is_scalar: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(tensor.reshape(()) if scalar else tensor for tensor, scalar in zip(tensors, is_scalar, strict=True))


def _make_loss(plan: _Plan) -> Callable[[_Inputs], tuple[Tensor, Tensor]]:
    """The graph: from kernel inputs to the loss, and whether it is unusable."""

    def loss(inputs: _Inputs) -> tuple[Tensor, Tensor]:
        # As in the eager step: the precision of the factor where the jitter is small.
        features = inputs.features.to(plan.wide)
        z, data = features[..., : plan.num_points, :], features[..., plan.num_points :, :]
        inputs = inputs._replace(
            values=tuple(value.to(plan.wide) for value in _unpack(inputs.values, plan.is_scalar)),
            conditional=_unpack(inputs.conditional, plan.is_scalar_choice),
        )
        parts = [Whitened(*part) for part in inputs.parts]  # type: ignore[arg-type]
        inducing_covar = plan.covariance(inputs.values, z, z)
        matrix = inducing_covar.detach().to(plan.precision)
        matrix = matrix + plan.jitter * torch.eye(plan.num_points, dtype=matrix.dtype, device=matrix.device)
        failures = []

        def factorize(block: Tensor, name: str) -> Tensor:
            factor, info = torch.linalg.cholesky_ex(block)
            failures.append((info != 0).any())
            return factor

        if plan.num_inducing == plan.num_points:
            chol = factorize(matrix, "K_ZZ")
        else:
            chol = orthogonal_cholesky(matrix, plan.num_inducing, factorize)
        cross, prior_variance = plan.covariance(inputs.values, z, data), plan.variance(inputs.values, data)
        wide = [part.to(plan.wide) for part in parts]
        moments = fused_moments(inducing_covar, chol, cross, prior_variance, *wide)
        moments = Moments(*(moment.to(inputs.prior_mean.dtype) for moment in moments))
        scale, penalty = plan.scale_and_penalty(moments.residual, inputs, plan.beta)
        variance = moments.explained + plan.jitter + scale * moments.residual
        log_prob = plan.expected_log_prob(inputs.target, inputs.prior_mean + moments.mean, variance, *inputs.likelihood)
        kl_divergence = whitened_kl(parts[0])
        for part in parts[1:]:
            kl_divergence = kl_divergence + whitened_kl(part)
        value = plan.beta * kl_divergence / plan.num_data - (log_prob - plan.beta * penalty).mean(-1)
        return value, torch.stack([*failures, ~torch.isfinite(value).all()]).any()

    # torch counts compilations for each code object and stops at a few: give every step its own.
    return FunctionType(loss.__code__.replace(), loss.__globals__, loss.__name__, loss.__defaults__, loss.__closure__)


class CompiledStep:
    r"""
    One training step, compiled: ``loss = step(x, y)`` computes the loss, its gradients, and updates the parameters.

    Same numbers as ``-mll(model(x), y)`` and ``backward()``, to rounding. The first call with a batch of another shape
    compiles again, once for each shape, so keep the batch size fixed and let the last batch of an epoch be smaller.
    A step whose factorisation fails, or whose loss is not finite, leaves the parameters as they were; ``step.failed`` counts
    such steps on the device, and nothing is read back to the host if the optimizer is ``torch.optim.Adam(fused=True)``
    (other optimizers cost one reading a step).

    Captured are the kernels of :mod:`tighter_gp.kernels.lowering`, Gaussian noise, :class:`BernoulliLogitLikelihood` and
    :class:`PoissonLikelihood`, and the conditionals ``"optimal"``, ``"beta"`` and ``"scalar"`` of a single-output model
    or a batch of them. Anything else raises :class:`CannotCompile` when the step is built.

    :param mll: The objective, which has the model and the likelihood.
    :param optimizer: Updates the parameters; without one the gradients are left in ``.grad``.
    :param options: Passed to :func:`torch.compile`.
    :ivar torch.Tensor failed: Number of steps that were not taken, on the device of the model.

    Example:
        >>> optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01, fused=True)
        >>> step = tighter_gp.CompiledStep(mll, optimizer)  # doctest: +SKIP
        >>> loss = step(train_x, train_y)  # doctest: +SKIP
    """

    def __init__(self, mll: TighterELBO, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> None:
        self.mll, self.optimizer = mll, optimizer
        strategy = mll.model.variational_strategy
        if not isinstance(strategy, _TighterStrategy):
            raise CannotCompile(f"{type(strategy).__name__} around the strategy is not captured.")
        self.strategy = strategy
        if not strategy.conditional.is_learned and any(True for _ in mll.model.added_loss_terms()):
            raise CannotCompile("Added loss terms are not captured.")
        points = strategy._all_points(strategy.inducing_points)
        lowered = self._kernel(strategy.model.forward(points).lazy_covariance_matrix)
        plan = _Plan(
            lowered.covariance,
            lowered.variance,
            _expected_log_prob(mll.likelihood),
            _scale_and_penalty(strategy.conditional, is_gaussian(mll.likelihood)),
            strategy.inducing_points.size(-2),
            points.size(-2),
            strategy.jitter_val,
            _linalg_dtype_cholesky.value(),
            strategy._precision(points.dtype),
            mll.num_data,
            mll.beta,
            tuple(value.dim() == 0 for value in lowered.values),
            tuple(value.dim() == 0 for value in self._choice()),
        )
        self.failed = torch.zeros((), dtype=torch.int64, device=points.device)
        self._graph = torch.compile(_make_loss(plan), **{"fullgraph": True, "dynamic": False, **options})
        self._seen: set[torch.Size] = set()
        self._is_fused = bool(optimizer is not None and optimizer.defaults.get("fused"))

    @staticmethod
    def _kernel(covar: Any) -> LoweredKernel:
        lowered = lower_lazy(covar)
        if lowered is None:
            kernel = getattr(covar, "kernel", covar)
            raise CannotCompile(f"{type(kernel).__name__} is not one of the kernels that can be captured.")
        return lowered

    def __call__(self, x: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        """Take one step on a batch; returns the loss, :math:`-` the bound per datum, without a graph."""
        if not self.strategy.training or not self.strategy._is_initialized():
            # First-call work and checks of shapes are GPyTorch's and eager.
            with torch.no_grad():
                self.mll(self.mll.model.train()(x), target, **kwargs)
        inputs = self._inputs(x, target, **kwargs)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if x.shape in self._seen else warnings.catch_warnings():
            if x.shape not in self._seen:
                warnings.simplefilter("ignore")  # what torch says to itself while it traces
                self._seen.add(x.shape)
            loss, failed = self._graph(inputs)
            for _, module, prior, closure, _ in self.mll.named_priors():
                loss = loss - prior.log_prob(closure(module)).sum() / self.mll.num_data
            loss.sum().backward()
        if self.optimizer is not None:
            self._update(failed)
        self.failed += failed
        return loss.detach()

    def _choice(self) -> tuple[Tensor, ...]:
        """The parameter of the conditional, if it has one."""
        conditional = self.strategy.conditional
        names = {BetaConditional: ("beta",), ScalarConditional: ("m",)}.get(type(conditional), ())
        return tuple(getattr(conditional, name) for name in names)

    def _update(self, failed: Tensor) -> None:
        assert self.optimizer is not None
        if self._is_fused:
            # The fused kernels skip the update on the device where this flag is set.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = failed.to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bool(failed):
            self.optimizer.step()

    def _inputs(self, x: Tensor, target: Tensor, **kwargs: Any) -> _Inputs:
        strategy, inducing_points = self.strategy, self.strategy.inducing_points
        if inducing_points.shape[:-2] != x.shape[:-2]:
            x, inducing_points = strategy._expand_inputs(x, inducing_points)
        points = strategy._all_points(inducing_points)
        prior = strategy.model.forward(torch.cat([points, x], dim=-2))
        covar, prior_mean = prior.lazy_covariance_matrix, prior.mean[..., points.size(-2) :]
        return _Inputs(
            covar.x1,
            prior_mean,
            target,
            _likelihood_tensors(self.mll.likelihood, prior_mean, **kwargs),
            _pack(self._choice()),
            _pack(self._kernel(covar).values),
            tuple(tuple(part) for part in strategy._whitened_parts()),
        )


def _scale_and_penalty(
    conditional: Conditional, gaussian: bool
) -> Callable[[Tensor, _Inputs, float], tuple[Tensor, Tensor]]:
    """From the residual to scale and penalty."""

    def at_precision(residual: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        return optimal_scale(residual, precision), optimal_scale_penalty(residual, precision)

    kinds: dict[type, Callable[[Tensor, _Inputs, float], tuple[Tensor, Tensor]]] = {
        BetaConditional: lambda d, inputs, _: at_precision(d, inputs.conditional[0].reciprocal().unsqueeze(-1)),
        ScalarConditional: lambda d, inputs, _: (
            inputs.conditional[0].unsqueeze(-1),
            scale_penalty(inputs.conditional[0]).unsqueeze(-1),
        ),
    }
    if gaussian:
        kinds[OptimalConditional] = lambda d, inputs, beta: at_precision(d, (beta * inputs.likelihood[0]).reciprocal())
    if type(conditional) not in kinds:
        raise CannotCompile(f"{type(conditional).__name__} is not captured.")
    return kinds[type(conditional)]


def _expected_log_prob(likelihood: Any) -> Callable[..., Tensor]:
    """From the marginals of q(f) to the expected log likelihood of each point."""
    if is_gaussian(likelihood):
        return gaussian_expected_log_prob
    if type(likelihood) is BernoulliLogitLikelihood:
        return logit_expected_log_prob
    if type(likelihood) is PoissonLikelihood:
        return poisson_expected_log_prob
    raise CannotCompile(f"{type(likelihood).__name__} is not captured.")


def _likelihood_tensors(likelihood: Any, prior_mean: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    if is_gaussian(likelihood):
        return (gaussian_noise(likelihood, prior_mean.shape[:-1], prior_mean.shape[-1:], **kwargs),)
    if isinstance(likelihood, BernoulliLogitLikelihood):
        return likelihood.quadrature.locations.to(prior_mean), likelihood.quadrature.weights.to(prior_mean)
    return ()
