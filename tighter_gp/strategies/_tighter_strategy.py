"""What the tighter strategies share: the conditional, the checks of inputs, and caches that cannot go stale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from gpytorch.distributions import Delta, Distribution, MultivariateNormal
from gpytorch.mlls import AddedLossTerm
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    VariationalStrategy,
    _VariationalDistribution,
)
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    DenseLinearOperator,
    DiagLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from .._checks import check_inputs, checks_are_deferred, passed, raise_if_not_finite, same_values
from ..bounds import whitened_kl
from ..conditionals import Conditional, make_conditional
from ..kernels.lowering import lower_lazy
from ..kernels.precision import covariance_block, covers_rounding, evaluate
from ..linalg import cholesky, full_precision, project, reuse_cholesky
from ..moments import Moments, Whitened, explained_root, fused_moments
from ..operators import ResidualLinearOperator


class ConditionalAddedLossTerm(AddedLossTerm):
    """Marks a model whose q(f) has scaled variances, so that an objective which forgets their price raises."""

    def __init__(self, conditional: str) -> None:
        self.conditional = conditional

    def loss(self, *params: Any) -> NoReturn:
        raise TypeError(
            f"This model's q(f) was narrowed by {self.conditional}, and only tighter_gp.TighterELBO subtracts what that "
            "costs; any other objective would overstate the bound. Use TighterELBO, or build the strategy with "
            "conditional='optimal' to train plain SVGP."
        )


class _TooNarrowError(Exception):
    """A prediction needs more precision than its inputs have."""


class PriorBlocks(NamedTuple):
    r"""The prior at the inducing points and the data, in blocks.

    :param mean: Prior mean at the data, ``... x B``.
    :param inducing_covar: :math:`K_{ZZ}` without jitter, ``... x M x M``.
    :param cross_covar: :math:`K_{ZX}`, ``... x M x B``.
    :param data_variance: :math:`k_{nn}`, ``... x B``.
    :param covar: The lazy covariance of inducing points and data together, ``... x (M + B) x (M + B)``.
    """

    mean: Tensor
    inducing_covar: Tensor
    cross_covar: Tensor
    data_variance: Tensor
    covar: LinearOperator

    @property
    def data_covar(self) -> LinearOperator:
        """:math:`K_{XX}`, lazy: a training step never needs it."""
        num_inducing = self.inducing_covar.size(-1)
        return self.covar[..., num_inducing:, num_inducing:]


def to_whitened(q: Distribution) -> Whitened:
    """The tensors of a whitened variational distribution."""
    if isinstance(q, Delta):
        return Whitened(q.mean)
    if not isinstance(q, MultivariateNormal):
        raise TypeError(f"q(u) must be a MultivariateNormal or a Delta; got {type(q).__name__}.")
    covar = q.lazy_covariance_matrix
    if isinstance(covar, DiagLinearOperator):
        return Whitened(q.mean, stddev=covar.diagonal(dim1=-1, dim2=-2).sqrt())
    if isinstance(covar, RootLinearOperator):
        return Whitened(q.mean, root=covar.root.to_dense())
    return Whitened(q.mean, root=covar.cholesky().to_dense())


def set_distribution(distribution: _VariationalDistribution, mean: Tensor, precision: Tensor) -> None:
    r"""Set a variational distribution to the best of its form around :math:`\mathcal N(m, P^{-1})`.

    A mean-field q keeps the diagonal of the precision, a point mass the mean alone: the optimum of the bound in
    either form.

    :param mean: :math:`m`, ``... x M``.
    :param precision: :math:`P`, ``... x M x M``.
    """
    if isinstance(distribution, MeanFieldVariationalDistribution):
        # Not through a distribution, which rounds small variances up.
        with torch.no_grad():
            distribution.variational_mean.copy_(mean)
            distribution._variational_stddev.copy_(precision.diagonal(dim1=-1, dim2=-2).rsqrt())
        return
    factor = cholesky(precision, name="precision of q(u)")
    covar = DenseLinearOperator(torch.cholesky_inverse(factor))
    noise_std, distribution.mean_init_std = distribution.mean_init_std, 0.0
    try:
        q = MultivariateNormal(mean, covar).expand(distribution.batch_shape)
        with torch.no_grad():
            distribution.initialize_variational_distribution(q)
    finally:
        distribution.mean_init_std = noise_std


class _TighterStrategy(VariationalStrategy):
    """Base of the strategies of this package. See :class:`TighterVariationalStrategy` for the parameters."""

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
        if self.conditional.is_learned:
            self.register_added_loss_term("conditional")
            self.update_added_loss_term("conditional", ConditionalAddedLossTerm(type(self.conditional).__name__))
        self._initialized_key: tuple = ()
        self._empty_caches()

    # -- caches -------------------------------------------------------------------------------------------------------
    # A cached value is used only for the very tensors it was computed from, compared by value in eval mode (GPyTorch's
    # setters write through `.data`, which no version counter sees) and by version between the two halves of a training
    # step. Nothing cached holds a graph, so a second backward pass, deepcopy and pickle all work.

    def _empty_caches(self) -> None:
        self._factor_cache: dict[str, tuple[Tensor, Tensor]] = {}
        self._q_cache: dict[str, tuple[tuple, Distribution]] = {}

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

    def _factor(self, matrix: Tensor, dtype: torch.dtype, maker: str) -> Tensor:
        """Cholesky factor of the jittered prior in GPyTorch's precision for it; cached by value in eval mode.

        :param dtype: The precision in which the matrix was evaluated. If it is not that of the factor and not enough, an
            error says so; otherwise jitter is added to a matrix that needs it.
        :param maker: Who evaluated it: the values of GPyTorch's kernels and of lowered ones differ by rounding.
        """
        matrix = matrix.type(_linalg_dtype_cholesky.value())
        is_narrow = dtype != matrix.dtype and not matrix.is_meta
        if is_narrow and not passed(self._covers_rounding(matrix, dtype)):
            raise _TooNarrowError
        factorize = self._factorize_once if is_narrow else self._checked_cholesky
        if self.training or matrix.is_meta:
            return factorize(matrix)
        known, factor = self._factor_cache.get(maker, (None, None))
        if known is None or factor is None or not same_values(known, matrix):
            factor = factorize(matrix.detach())
            self._factor_cache[maker] = (matrix.detach().clone(), factor)
        if torch.is_grad_enabled() and matrix.requires_grad:
            return reuse_cholesky(matrix, factor)
        return factor.clone() if factor.is_inference() and not torch.is_inference_mode_enabled() else factor

    def _checked_cholesky(self, matrix: Tensor) -> Tensor:
        return self._factorize(matrix, self._checked_block)

    def _checked_block(self, matrix: Tensor, name: str, scale: Tensor | None = None) -> Tensor:
        try:
            return cholesky(matrix, name, scale)
        except torch.linalg.LinAlgError as error:
            kind = NotPSDError if bool(torch.isfinite(matrix).all()) else NanError
            raise kind(
                f"{error} jitter_val was {self.jitter_val:g}. Hyperparameters: {describe_hyperparameters(self.model)}. "
                "Try a larger jitter_val, inputs and targets scaled to unit variance, a smaller learning rate, fewer or "
                "better spread inducing points, or float64."
            ) from error

    def _try_factorize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The factor, and whether it is one, which is for the caller to look at."""
        succeeded = []

        def factorize(block: Tensor, *_: Any) -> Tensor:
            factor, info = torch.linalg.cholesky_ex(block)
            succeeded.append((info == 0).all())
            return factor

        return self._factorize(matrix, factorize), torch.stack(succeeded).all()

    def _factorize_once(self, matrix: Tensor) -> Tensor:
        factor, succeeded = self._try_factorize(matrix)
        if not passed(succeeded, torch.isfinite(factor).all()):
            raise _TooNarrowError
        return factor

    def _cholesky_factor(self, induc_induc_covar: LinearOperator) -> TriangularLinearOperator:
        matrix = to_dense(induc_induc_covar)
        return TriangularLinearOperator(self._factor(matrix, matrix.dtype, maker="gpytorch"))

    @property
    def prior_distribution(self) -> MultivariateNormal:
        q = self._variational_distribution
        zeros = torch.zeros(q.shape(), dtype=q.dtype, device=q.device)
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    @property
    def variational_distribution(self) -> Distribution:
        return self._cached_q(self._variational_distribution, "u")

    def whitened(self) -> Whitened:
        """q(w) as tensors."""
        (q,) = self._whitened_parts()
        return q

    def _whitened(self, distribution: _VariationalDistribution, name: str) -> Whitened:
        """The tensors of one variational distribution; the two common ones need no detour through operators."""
        if type(distribution) is CholeskyVariationalDistribution:
            return Whitened(distribution.variational_mean, root=distribution.chol_variational_covar.tril())
        if type(distribution) is MeanFieldVariationalDistribution:
            return Whitened(distribution.variational_mean, stddev=distribution._variational_stddev.abs())
        return to_whitened(self._cached_q(distribution, name))

    def kl_divergence(self) -> Tensor:
        r"""KL divergence of q(u) from the prior; for a point mass GPyTorch's convention, minus the prior's log density."""
        parts = self._whitened_parts()
        if self.training:
            self._q_cache.clear()  # handed over once: a second backward pass gets a graph of its own
        first, *others = (
            whitened_kl(q) if q.root is not None or q.stddev is not None else _negative_log_density(q.mean)
            for q in parts
        )
        return sum(others, start=first)

    def _cached_q(self, distribution: _VariationalDistribution, name: str) -> Distribution:
        parameters = tuple(distribution.parameters())
        if self.training:
            key: tuple = (torch.is_grad_enabled(), *((p.data_ptr(), p._version) for p in parameters))
            same: Callable[[tuple], bool] = lambda known: known == key
        elif torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return distribution()
        else:
            key = parameters
            same = lambda known: all(map(same_values, known, parameters))
        # The two modes have keys of their own, and tensors made in inference mode are of no use outside it.
        name = f"{name}, training={self.training}, inference={torch.is_inference_mode_enabled()}"
        known, q = self._q_cache.get(name, (None, None))
        if known is None or q is None or not same(known):
            q = distribution()
            known = key if self.training else tuple(p.detach().clone() for p in parameters)
            self._q_cache[name] = (known, q)
        return q

    def _mark_initialized(self) -> None:
        """After q(u) was set by hand: GPyTorch must not overwrite it at the first call."""
        self.variational_params_initialized.fill_(1)
        self._clear_cache()

    def get_fantasy_model(self, inputs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._clear_cache()  # GPyTorch keeps the pseudo-points of the parameters it saw first
        return super().get_fantasy_model(inputs, targets, *args, **kwargs)

    # -- the inducing variables, which SOLVE-GP has two sets of -------------------------------------------------------

    def _all_points(self, inducing_points: Tensor) -> Tensor:
        """Where all inducing variables are, given the expanded inducing points."""
        return inducing_points

    def _whitened_parts(self) -> tuple[Whitened, ...]:
        """The independent factors of q(w), in the order of the points."""
        return (self._whitened(self._variational_distribution, "u"),)

    def _factorize(self, matrix: Tensor, factorize: Callable[..., Tensor]) -> Tensor:
        """The lower factor of the joint covariance, from a function of a block, its name and perhaps its scale."""
        return factorize(matrix, "K_ZZ")

    # -- the prior, and q(f) from the moments ---------------------------------------------------------------------------

    def _precision(self, dtype: torch.dtype) -> torch.dtype:
        """Precision of kernel, projection and moments: that of the factor where the jitter does not cover rounding.

        GPyTorch's default jitter for float32 does. A smaller one keeps directions in which float32 is all error.
        """
        needs_more = self.conditional.needs_double or self.jitter_val < 256 * torch.finfo(dtype).eps
        return _linalg_dtype_cholesky.value() if needs_more else dtype

    def _covers_rounding(self, inducing_covar: Tensor, dtype: torch.dtype) -> Tensor:
        """The same question for the values at hand: where a prior variance is in the hundreds, it does no longer."""
        return covers_rounding(self.jitter_val, inducing_covar.diagonal(dim1=-1, dim2=-2), dtype)

    def _prior_blocks(
        self, x: Tensor, inducing_points: Tensor, precision: torch.dtype | None = None, **kwargs: Any
    ) -> PriorBlocks:
        prior = self.model.forward(torch.cat([inducing_points, x], dim=-2), **kwargs)
        covar, num_inducing = prior.lazy_covariance_matrix, inducing_points.size(-2)
        lowered, wide = lower_lazy(covar), precision or self._precision(prior.mean.dtype)
        if lowered is None:
            parts = (slice(None, num_inducing), slice(num_inducing, None))
            corner, cross, data = (covar[..., parts[i], parts[j]] for i, j in ((0, 0), (0, 1), (1, 1)))
            blocks = (
                evaluate(corner, to_dense, wide),
                evaluate(cross, to_dense, wide),
                evaluate(data, lambda block: block.diagonal(dim1=-1, dim2=-2), wide),
            )
        else:
            # What the kernel sees: the inputs after any feature extractor and selection of dimensions.
            features, values = covar.x1.to(wide), [value.to(wide) for value in lowered.values]
            z, data = features[..., :num_inducing, :], features[..., num_inducing:, :]
            blocks = (
                lowered.covariance(values, z, z),
                lowered.covariance(values, z, data),
                lowered.variance(values, data),
            )
        return PriorBlocks(prior.mean[..., num_inducing:], *blocks, covar)

    def _jittered(self, inducing_covar: Tensor) -> Tensor:
        r""":math:`K_{ZZ} + \epsilon I` without a graph, in GPyTorch's precision for its factor."""
        matrix = inducing_covar.detach().to(_linalg_dtype_cholesky.value(), copy=True)
        matrix.diagonal(dim1=-1, dim2=-2).add_(self.jitter_val)
        return matrix

    def _factorized_prior(self, x: Tensor, inducing_points: Tensor, **kwargs: Any) -> tuple[PriorBlocks, Tensor]:
        r"""The prior and :math:`\mathrm{chol}(K_{ZZ} + \epsilon I)`, for training.

        Success and the finiteness of the inputs are read back together, once a step. If the factorisation fails, as
        rounding in float32 can make it, or rounding exceeds the jitter, the prior is evaluated again in the precision of
        the factor; if that fails too, :func:`~tighter_gp.linalg.cholesky` adds a jitter of the scale of the matrix.
        """
        prior = self._prior_blocks(x, inducing_points, **kwargs)
        matrix = self._jittered(prior.inducing_covar)
        factor, succeeded = self._try_factorize(matrix)
        flags = [torch.isfinite(x).all(), succeeded]
        if prior.inducing_covar.dtype != matrix.dtype and not checks_are_deferred():
            flags.append(self._covers_rounding(matrix, prior.inducing_covar.dtype))
        if passed(*flags):
            return prior, factor
        raise_if_not_finite(x)
        if prior.inducing_covar.dtype != matrix.dtype:
            prior = self._prior_blocks(x, inducing_points, matrix.dtype, **kwargs)
            matrix = self._jittered(prior.inducing_covar)
        return prior, self._checked_cholesky(matrix)

    def _cached_prior(
        self, x: Tensor, inducing_points: Tensor, precision: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[PriorBlocks, Tensor]:
        """The same for predictions, whose factors are cached; in one precision, or in one that suffices."""

        def attempt(precision: torch.dtype | None) -> tuple[PriorBlocks, Tensor]:
            prior = self._prior_blocks(x, inducing_points, precision, **kwargs)
            covar = prior.inducing_covar
            return prior, self._factor(self._jittered(covar), covar.dtype, maker="lowered")

        try:
            return attempt(precision)
        except _TooNarrowError:
            return attempt(_linalg_dtype_cholesky.value())

    def projected(
        self, x: Tensor, precision: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""The prior mean at ``x``, the projection :math:`A` and the prior variance :math:`k_{nn}`.

        :param precision: Of the last two; default one that suffices.
        """
        self._check_shapes(x)
        raise_if_not_finite(x)
        x, inducing_points = self._expand_inputs(x, self.inducing_points)
        prior, chol = self._cached_prior(x, self._all_points(inducing_points), precision, **kwargs)
        return prior.mean, project(chol, prior.cross_covar), prior.data_variance

    def forward(
        self,
        x: Tensor,
        inducing_points: Tensor,
        inducing_values: Tensor | None = None,
        variational_inducing_covar: LinearOperator | None = None,
        diag: bool = True,
        *,
        index: Tensor | None = None,
        **kwargs: Any,
    ) -> MultivariateNormal:
        points = self._all_points(inducing_points)
        if not self.training and self._precision(x.dtype) == x.dtype:
            # The other errors: GPyTorch decomposes matrices on the way to covariances that nobody may ask for.
            with suppress(_TooNarrowError, torch.linalg.LinAlgError, NotPSDError):
                return super().forward(x, points, inducing_values, variational_inducing_covar, diag=diag, **kwargs)
        make_prior = self._factorized_prior if self.training else self._cached_prior
        prior, chol = make_prior(x, points, **kwargs)
        parts = self._whitened_parts()
        wide = (q.to(prior.cross_covar.dtype) for q in parts)
        moments = fused_moments(prior.inducing_covar, chol, prior.cross_covar, prior.data_variance, *wide)
        moments = Moments(*(moment.to(prior.mean.dtype) for moment in moments))

        @functools.lru_cache(maxsize=1)
        def projection() -> Tensor:
            """A with a graph of its own, for what the moments do not say."""
            chol_with_graph = reuse_cholesky(prior.inducing_covar.to(chol.dtype), chol)
            return project(chol_with_graph, prior.cross_covar)

        def full_covar(scale: Tensor | None = None) -> LinearOperator:
            rounded = projection().to(prior.mean.dtype)
            root = explained_root(rounded, self.whitened())
            explained = ZeroLinearOperator(*prior.data_covar.shape) if root is None else RootLinearOperator(root.mT)
            residual = SumLinearOperator(prior.data_covar, MatmulLinearOperator(-rounded.mT, rounded))
            if scale is not None:
                # Positive semi-definite, with the right diagonal; exactly C = mD where m is one scalar.
                width = DiagLinearOperator(scale.sqrt())
                residual = MatmulLinearOperator(MatmulLinearOperator(width, residual), width)
            return (explained + residual).add_jitter(self.jitter_val)

        def residual_within(rows: Tensor) -> Tensor:
            """D within sets of points: from their positions, K x S, to ... x K x S x S."""
            # The sets come first, so that batches of the kernel still broadcast.
            batch = projection().shape[:-2]
            sets = x.expand(*batch, *x.shape[-2:])[..., rows, :].movedim(-3, 0)
            covar = self.model.forward(sets, **kwargs).lazy_covariance_matrix
            whole = slice(None)
            covariance = covariance_block(covar, whole, whole, prior.cross_covar.dtype).movedim(0, -3)
            columns = projection()[..., rows].movedim(-2, -3)
            return covariance - columns.mT @ columns

        if not self.training:
            explained, residual = moments.explained + self.jitter_val, moments.residual
            one, free = torch.ones_like(residual), torch.zeros_like(residual)
            covar = ResidualLinearOperator(full_covar(), explained, residual, one, free, strategy=self)
            return MultivariateNormal(prior.mean + moments.mean, covar)
        return self._training_distribution(prior.mean, moments, index, None if diag else full_covar, residual_within)

    def _training_distribution(
        self,
        prior_mean: Tensor,
        moments: Moments,
        index: Tensor | None,
        full_covar: Callable[[Tensor | None], LinearOperator] | None,
        residual_within: Callable[[Tensor], Tensor],
    ) -> MultivariateNormal:
        r"""q(f) with variance :math:`s_n + m_n d_n`, carrying the parts for :class:`TighterELBO`.

        GPyTorch adds the jitter to the data's diagonal too. It rides in :math:`s_n`, so that the tighter and the
        standard bound pay the same for it.

        :param full_covar: Makes the covariance from the scales if off-diagonal entries were asked for.
        :param residual_within: Makes the residual covariance within sets of points for a conditional that needs it.
        """
        mean, explained, residual = prior_mean + moments.mean, moments.explained + self.jitter_val, moments.residual
        shape = mean.shape
        if not (shape == explained.shape == residual.shape):
            shape = torch.broadcast_shapes(shape, explained.shape, residual.shape)
            mean, explained, residual = mean.expand(shape), explained.expand(shape), residual.expand(shape)
        scale = self.conditional.scale(residual, index=index).expand(shape)
        penalty = self.conditional.penalty(residual, index=index).expand(shape)
        if full_covar is None:
            covar: LinearOperator = DiagLinearOperator(explained + scale * residual)
        else:
            covar = full_covar(scale if self.conditional.is_learned else None)
        covar = covar.expand(*shape, shape[-1])
        blocks = self.conditional.residual_blocks(residual, residual_within, index=index)
        return MultivariateNormal(
            mean,
            ResidualLinearOperator(covar, explained, residual, scale, penalty, strategy=self, blocks=blocks),
        )

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any) -> MultivariateNormal:
        if prior:
            kwargs.pop("index", None)
            return super().__call__(x, prior=True, diag=diag, **kwargs)
        self._check_shapes(x)
        if self.training:
            self.conditional.check_index(kwargs.get("index"), x.size(-2))
        if not self.training:
            raise_if_not_finite(x)
            self._initialize()
            return super().__call__(x, diag=diag, **kwargs)
        with full_precision(x.device.type):
            if not self._is_initialized():
                raise_if_not_finite(x)
                self._initialize()
                q = super().__call__(x, diag=diag, **kwargs)
                self._is_initialized()
                return q
            self._clear_cache()
            inducing_points = self.inducing_points
            if inducing_points.shape[:-2] != x.shape[:-2]:
                x, inducing_points = self._expand_inputs(x, inducing_points)
            return self.forward(x, inducing_points, diag=diag, **kwargs)

    def _initialize(self) -> None:
        """First-call work beyond GPyTorch's own; it sees q(u) only."""

    def _is_initialized(self) -> bool:
        """Whether GPyTorch's first-call work is done. Reads the flags back only if they may have changed."""
        flags = (self.updated_strategy, self.variational_params_initialized)
        key = tuple((flag.data_ptr(), flag._version) for flag in flags)
        if flags[0].is_meta or key == self._initialized_key:
            return True
        if not all(bool(flag) for flag in flags):
            return False
        self._initialized_key = key
        return True

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


def describe_hyperparameters(*modules: Any) -> str:
    """The values of all hyperparameters, or their range, for messages; inducing points and q(u) are left out."""
    described = []
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if "_distribution." in name or name.endswith("_points") or not parameter.numel():
                continue
            value = (parameter if constraint is None else constraint.transform(parameter)).detach()
            low, high = value.min().item(), value.max().item()
            described.append(f"{name.replace('raw_', '')}={low:.3g}" + (f"..{high:.3g}" if high != low else ""))
    return ", ".join(described) or "none"


def _negative_log_density(mean: Tensor) -> Tensor:
    """Minus the log density of the whitened prior."""
    return 0.5 * (mean.square() + math.log(2 * math.pi)).sum(-1)
