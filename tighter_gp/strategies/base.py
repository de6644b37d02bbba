"""What the tighter strategies share: from a projection and q(u) to q(f), and caches that cannot go stale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import Distribution, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy, _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import TriangularLinearOperator
from torch import Tensor

from ..carrier import Carrier
from ..checks import (
    check_device,
    check_inputs,
    describe_hyperparameters,
    host_values,
    raise_if_not_finite,
    same_values,
)
from ..conditionals import Conditional, make_conditional
from ..conditionals.base import ConditionalAddedLossTerm
from ..likelihoods.properties import has_gaussian_noise
from ..maths.collapsed import add_identity, collapse
from ..maths.fused import fused_kl, fused_moments
from ..maths.linalg import cholesky, full_precision, project
from ..maths.moments import Whitened, explained_root, projected_moments
from ..modes import spans
from ..prior.projector import FactorCache, PriorBlocks, Projector, one_block
from ..recording import announce, earlier_prior, record
from .distributions import (
    is_untouched,
    parameters_of,
    set_distribution,
    set_to_prior,
    standard_normal,
    to_whitened,
    whiten,
)
from .fantasies import FantasyGP, make_fantasy_gp
from .paths import register_paths


class TighterStrategy(VariationalStrategy):
    """Base of the strategies of this package. See :class:`TighterVariationalStrategy` for the parameters.

    Example:
        >>> isinstance(model.variational_strategy, tighter_gp.strategies.TighterStrategy)
        True
        >>> model.variational_strategy.projector()(train_x).residual.shape == train_y.shape
        True
    """

    def __init__(
        self,
        model: Any,
        inducing_points: Tensor,
        variational_distribution: _VariationalDistribution,
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
        *,
        conditional: str | Conditional = "optimal",
    ) -> None:
        super().__init__(model, inducing_points, variational_distribution, learn_inducing_locations, jitter_val)
        self.conditional = make_conditional(conditional, variational_distribution.batch_shape, self.inducing_points)
        self._initialized_key: tuple = ()
        self._warned: set[str] = set()
        self._empty_caches()
        register_paths(TighterStrategy)  # again in train: BoTorch may be loaded later

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "conditional":  # at any time: an objective must know that there is a price
            self._added_loss_terms.pop(name, None)
            if value.is_learned:
                self.register_added_loss_term(name)
                self.update_added_loss_term(name, ConditionalAddedLossTerm(self))

    def train(self, mode: bool = True) -> TighterStrategy:
        register_paths(TighterStrategy)
        return super().train(mode)

    # -- caches -------------------------------------------------------------------------------------------------------
    # A cached value is used only for the very tensors it was computed from, compared by value (GPyTorch's setters write
    # through `.data`, which no version counter sees); between the two halves of a training step by version alone where
    # a look at values would be a wait. Nothing cached holds a graph, so a second backward pass, deepcopy and pickle all work.

    def _empty_caches(self) -> None:
        self._factor_cache = FactorCache()
        self._q_cache: dict[str, tuple[Any, Any]] = {}

    def _clear_cache(self) -> None:
        super()._clear_cache()
        self._empty_caches()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_memoize_cache", "_factor_cache", "_q_cache"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._empty_caches()

    # -- q(u) ---------------------------------------------------------------------------------------------------------

    @property
    def distributions(self) -> tuple[_VariationalDistribution, ...]:
        """The independent factors of q(u), in the order of the rows of A."""
        return (self._variational_distribution,)

    @property
    def prior_distribution(self) -> MultivariateNormal:
        return standard_normal(*self.distributions)

    @property
    def variational_distribution(self) -> Distribution:
        return self._cached_q(0)

    def whitened_parts(self) -> tuple[Whitened, ...]:
        """The independent factors of q(w) as tensors."""
        return tuple(self._whitened_part(part) for part in range(len(self.distributions)))

    def _whitened_part(self, part: int) -> Whitened:
        distribution, name = self.distributions[part], f"{part}, whitened"
        known, q = self._q_cache.get(name, (None, None))
        if q is None or not self.training or not known.is_current(distribution):
            q = parameters_of(distribution)
            q = to_whitened(self._cached_q(part)) if q is None else q
            if self.training:
                self._q_cache[name] = (_FirstHalf(distribution), q)
        return q

    def whitened(self) -> Whitened:
        """q(w) of all whitened variables together, as tensors."""
        return self.joined(*self.whitened_parts())

    @staticmethod
    def joined(*parts: Whitened) -> Whitened:
        """Independent factors as one q(w)."""
        (q,) = parts
        return q

    def kl_divergence(self) -> Tensor:
        r"""KL divergence of q(u) from the prior; for a point mass GPyTorch's convention, minus the prior's log density."""
        parts = self.whitened_parts()
        if self.training:
            self._q_cache.clear()  # handed over once: a second backward pass gets a graph of its own
        first, *others = (
            fused_kl(q) if q.root is not None or q.stddev is not None else _negative_log_density(q.mean) for q in parts
        )
        return sum(others, start=first)

    def _cached_q(self, part: int) -> Distribution:
        distribution = self.distributions[part]
        parameters = tuple(distribution.parameters())
        if not self.training and torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return distribution()
        # The two modes have keys of their own, and tensors made in inference mode are of no use outside it.
        name = f"{part}, training={self.training}, inference={torch.is_inference_mode_enabled()}"
        known, q = self._q_cache.get(name, (None, None))
        if self.training:
            is_same = known is not None and known.is_current(distribution)
        else:
            is_same = known is not None and all(map(same_values, known, parameters))
        if not is_same:
            q = distribution()
            known = _FirstHalf(distribution) if self.training else tuple(p.clone() for p in parameters)
            self._q_cache[name] = (known, q)
        return q

    def mark_initialized(self) -> None:
        """After q(u) was set by hand: GPyTorch must not overwrite it at the first call."""
        self.variational_params_initialized.fill_(1)
        self._clear_cache()

    def set_optimal(self, gram: Tensor, linear: Tensor) -> None:
        r"""Put q(u) at its optimum for Gaussian noise, from sums over the training data.

        The mean is that of all whitened variables together, the covariance of each factor of q(u) that of its own.

        :param gram: :math:`\sum_n a_n a_n^\top / \sigma_n^2`, ``... x M x M``.
        :param linear: :math:`\sum_n a_n (y_n - \mu(x_n)) / \sigma_n^2`, ``... x M``.
        """
        checked = lambda block, _, *scale: cholesky(block, "I + A A'/noise", *scale)
        mean = collapse(gram, linear, lambda gram: self.factorize(add_identity(gram), checked)).weights
        parts = spans(distribution.num_inducing_points for distribution in self.distributions)
        for distribution, part in zip(self.distributions, parts, strict=True):
            set_distribution(distribution, mean[..., part], add_identity(gram[..., part, part]))
        self.mark_initialized()

    def _initialize(self, x: Tensor) -> None:
        """GPyTorch's first-call work, without its inverse of the identity; reads flags back if they may have changed."""
        flags = (self.updated_strategy, self.variational_params_initialized)
        key = tuple((flag.data_ptr(), flag._version) for flag in flags)
        if flags[0].is_meta or key == self._initialized_key:
            return
        raise_if_not_finite(x)
        if not bool(flags[1]):
            for distribution in self.distributions:
                if is_untouched(distribution):
                    set_to_prior(distribution)
            self.mark_initialized()
        if not bool(flags[0]):
            projector = self.projector(torch.float64)
            prior, chol = projector.factorized(self.inducing_points)
            whiten(self._variational_distribution, prior.mean, chol)
            self.updated_strategy.fill_(True)
            self._clear_cache()
        self._initialized_key = tuple((flag.data_ptr(), flag._version) for flag in flags)

    # -- the projection -----------------------------------------------------------------------------------------------

    def all_points(self) -> Tensor:
        """Where all inducing variables are."""
        return self.inducing_points

    def factorize(self, matrix: Tensor, factorize: Callable[..., Tensor]) -> Tensor:
        """The lower factor of the joint covariance, from a function of a block, its name and perhaps its scale."""
        return one_block(matrix, factorize)

    def projector(self, precision: torch.dtype | None = None, *, lower: bool = True) -> Projector:
        """What turns inputs into (prior mean, A, d).

        :param precision: Of kernel and projection; default one that suffices.
        :param lower: Whether common kernels are evaluated by their lowered form, which is once differentiable.
        """
        wide = self.conditional.needs_double and self.training
        return Projector(
            self.model.forward,
            self.all_points(),
            jitter=self.jitter_val,
            precision=precision or (torch.float64 if wide else None),
            factorize=self.factorize,
            lower=lower,
            cache=None if self.training or torch.jit.is_tracing() else self._factor_cache,
            owner=lambda: describe_hyperparameters(self.model),
            warned=self._warned,
        )

    def _cholesky_factor(self, induc_induc_covar: LinearOperator) -> TriangularLinearOperator:
        """For GPyTorch and BoTorch, which pass the prior of the inducing variables without its jitter."""
        matrix = to_dense(induc_induc_covar)
        matrix = matrix.double() + self.jitter_val * torch.eye(
            matrix.size(-1), dtype=torch.float64, device=matrix.device
        )
        return TriangularLinearOperator(self.factorize(matrix, self.projector()._checked))

    # -- q(f) ---------------------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any) -> MultivariateNormal:
        if prior:
            kwargs.pop("index", None)
            return super().__call__(x, prior=True, diag=diag, **kwargs)
        self._check_shapes(x)
        if self.training:
            self.conditional.check_index(kwargs.get("index"), x.size(-2))
            self._clear_cache()
        self._initialize(x)
        with full_precision(x.device.type):
            return self.forward(x, diag=diag, **kwargs)

    def forward(
        self, x: Tensor, *, diag: bool = True, index: Tensor | None = None, **kwargs: Any
    ) -> MultivariateNormal:
        """q(f) at some inputs; its covariance carries :math:`(s, d)`, and is computed when somebody asks for it."""
        # Another pass on the same inputs, with another q(u), has the projection of the one before.
        (projector, prior, chol), matrix = (earlier_prior(self) if self.training else None) or (
            self._project(x, **kwargs)
        )
        if self.training:
            announce(self, prior.mean, matrix)
        parts = [q.to(prior.cross_covar.dtype) for q in self.whitened_parts()]
        if projector.lower:
            blocks = (prior.inducing_covar, chol, prior.cross_covar, prior.data_variance)
            moments = fused_moments(*blocks, *parts, projection=matrix)
        else:
            moments = projected_moments(projector.project(prior), prior.data_variance, *parts)
        if self.training:
            record(self, matrix, moments.mean, moments.explained, (projector, prior, chol))
        mean, explained, residual = (moment.to(prior.mean.dtype) for moment in moments)
        # GPyTorch adds the jitter to the data's diagonal too. It rides in s, so that all bounds pay the same for it.
        mean, explained = prior.mean + mean, explained + self.jitter_val
        shape = torch.broadcast_shapes(mean.shape, explained.shape, residual.shape)
        mean, explained, residual = (
            tensor if tensor.shape == shape else tensor.expand(shape) for tensor in (mean, explained, residual)
        )
        return MultivariateNormal(mean, self._carrier(projector, prior, parts, explained, residual, index))

    def _project(self, x: Tensor, **kwargs: Any) -> tuple[tuple[Projector, PriorBlocks, Tensor], Tensor]:
        """The prior at ``x`` in blocks, and A without a graph."""
        is_once = (self.training or not torch.is_grad_enabled()) and not torch.jit.is_tracing()
        projector = self.projector(lower=is_once)
        prior, chol = projector.factorized(x, **kwargs)
        with torch.no_grad():
            matrix = project(chol, prior.cross_covar)
        return (projector, prior, chol), matrix

    def _carrier(
        self,
        projector: Projector,
        prior: PriorBlocks,
        parts: list[Whitened],
        explained: Tensor,
        residual: Tensor,
        index: Tensor | None,
    ) -> Carrier:
        conditional, scale, chosen = self.conditional, None, None
        if self.training and conditional.is_learned:
            scale = conditional.scale(residual, index=index).expand_as(residual)
            chosen = scale, conditional.penalty(residual, index=index).expand_as(residual)
        blocks = None
        if conditional.needs_blocks and (
            self.training or index is not None or residual.size(-1) == conditional.num_data
        ):
            matrix = projector.project(prior)
            within = lambda sets: projector.residual_within(prior, matrix, sets)
            blocks = conditional.residual_blocks(residual, within, index=index)

        # What the kernel is evaluated with when somebody asks.
        jitter = self.jitter_val
        # By value, as for caches; in training by version alone, where a copy per step would cost.
        versions = [(p.data_ptr(), p._version) for p in self._hyperparameters()] if self.training else []
        known = None if self.training else [parameter.detach().clone() for parameter in self._hyperparameters()]

        def dense() -> Tensor:
            check_device(residual, self.inducing_points.device, "This q(f) was made")
            current = list(self._hyperparameters())
            if known is None:
                is_same = versions == [(p.data_ptr(), p._version) for p in current]
            else:
                is_same = all(map(same_values, known, current))
            if not is_same:
                raise RuntimeError(
                    "The hyperparameters of the model have changed since this q(f) was made, and its covariance is computed when "
                    "it is asked for: call the model again, or ask before you change them."
                )
            matrix = projector.project(prior)
            dtype = matrix.dtype
            covar = projector.data_covariance(prior) - matrix.mT @ matrix
            if scale is not None:
                # Positive semi-definite, with the right diagonal; exactly C = mD where m is one scalar.
                width = scale.sqrt().to(dtype)
                covar = width.unsqueeze(-1) * covar * width.unsqueeze(-2)
            root = explained_root(matrix, self.joined(*parts).to(dtype))
            covar = covar if root is None else covar + root.mT @ root
            covar = covar + jitter * torch.eye(covar.size(-1), dtype=dtype, device=covar.device)
            return covar.to(residual.dtype)

        variance = explained + (residual if scale is None else scale * residual)
        return Carrier(variance, dense, explained, residual, self, index, blocks, chosen=chosen)

    def _hyperparameters(self) -> Iterator[Tensor]:
        """The parameters of the prior."""
        yield from self.model.parameters(recurse=False)
        for child in self.model.children():
            if not isinstance(child, _VariationalStrategy):
                yield from child.parameters()

    # -- pseudo-data, for fantasies ---------------------------------------------------------------------------------------

    @property
    def pseudo_points(self) -> tuple[Tensor, Tensor]:
        """As in GPyTorch, at the parameters of the moment; for another q(u) than a Cholesky factor there are none."""
        self._check_pseudo_points(AttributeError)  # which hasattr and torch.jit.trace understand
        self._clear_cache()  # GPyTorch keeps those of the parameters it saw first
        return super().pseudo_points

    def amortized_exact_gp(self, mean_module: Any = None, covar_module: Any = None) -> FantasyGP:
        """An exact GP with the same q(f), at the parameters of the moment."""
        self._check_pseudo_points(NotImplementedError)
        likelihood = getattr(self.model, "likelihood", None)
        if not (isinstance(likelihood, GaussianLikelihood) and has_gaussian_noise(likelihood)):
            got = "none" if likelihood is None else type(likelihood).__name__
            raise NotImplementedError(f"Fantasy models need a GaussianLikelihood as model.likelihood; got {got}.")
        modules = {"mean_module": mean_module, "covar_module": covar_module}
        for name, module in modules.items():
            modules[name] = getattr(self.model, name, None) if module is None else module
            if modules[name] is None:
                raise ModuleNotFoundError(f"A fantasy model needs the model's {name}: pass {name}=, or name it so.")
        self._initialize(self.inducing_points)
        is_same_prior = mean_module is None and covar_module is None
        return make_fantasy_gp(self, likelihood=likelihood, is_same_prior=is_same_prior, **modules)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, mean_module: Any = None, covar_module: Any = None, **kwargs: Any
    ) -> FantasyGP:
        """As in GPyTorch, an exact GP that knows what q(u) knows, and the new observations."""
        return self.amortized_exact_gp(mean_module, covar_module).get_fantasy_model(inputs, targets, **kwargs)

    def _check_pseudo_points(self, kind: type[Exception]) -> None:
        for distribution in self.distributions:
            if not isinstance(distribution, CholeskyVariationalDistribution):
                raise kind(f"Fantasy models need a CholeskyVariationalDistribution; got {type(distribution).__name__}.")

    def _check_shapes(self, x: Tensor) -> None:
        inducing, q_shape = self.inducing_points, self._variational_distribution.batch_shape
        check_inputs(x, inducing.size(-1))
        if x.dim() == inducing.dim() == 2:
            return
        try:
            torch.broadcast_shapes(x.shape[:-2], inducing.shape[:-2], q_shape)
        except RuntimeError:
            raise ValueError(
                f"Batch shapes do not broadcast: inputs {tuple(x.shape[:-2])}, inducing points "
                f"{tuple(inducing.shape[:-2])}, variational distribution {tuple(q_shape)}."
            ) from None


class _FirstHalf:
    """The parameters of q(u) in the first half of a training step, for the second to ask whether they still are those.

    By version, and by value where it costs no wait for a device and the step does not look at its flags later.
    """

    def __init__(self, distribution: _VariationalDistribution) -> None:
        parameters = list(distribution.parameters())
        self.versions = _versions(parameters)
        self.values = [None if value is None else value.copy() for value in map(_seen, parameters)]

    def is_current(self, distribution: _VariationalDistribution) -> bool:
        """Whether the parameters are what they were."""
        parameters = list(distribution.parameters())
        if self.versions != _versions(parameters):
            return False
        pairs = zip(self.values, map(_seen, parameters), strict=True)
        return all(known is None or value is None or np.array_equal(known, value) for known, value in pairs)


def _seen(parameter: Tensor) -> np.ndarray | None:
    return host_values(parameter) if parameter.device.type == "cpu" else None


def _versions(parameters: list[Tensor]) -> tuple:
    return (torch.is_grad_enabled(), *((p.data_ptr(), p._version, p.requires_grad) for p in parameters))


def _negative_log_density(mean: Tensor) -> Tensor:
    """Minus the log density of the whitened prior."""
    return 0.5 * (mean.square() + math.log(2 * math.pi)).sum(-1)
