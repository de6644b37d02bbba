"""What the tighter strategies share: the conditional, the checks of inputs, and caches that cannot go stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from gpytorch.distributions import Delta, Distribution, MultivariateNormal
from gpytorch.mlls import AddedLossTerm
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import MeanFieldVariationalDistribution, VariationalStrategy, _VariationalDistribution
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
)
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from ..conditionals import Conditional, make_conditional
from ..linalg import cholesky, reuse_cholesky
from ..moments import Moments, Whitened
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


class PriorBlocks(NamedTuple):
    """The prior at the inducing points and the data, in blocks.

    :param mean: Prior mean at the data, ``... x B``.
    :param inducing_covar: :math:`K_{ZZ} + \\epsilon I`, lazy, ``... x M x M``.
    :param cross_covar: :math:`K_{ZX}`, dense, ``... x M x B``.
    :param data_covar: :math:`K_{XX}`, lazy, ``... x B x B``; a training step takes its diagonal only.
    """

    mean: Tensor
    inducing_covar: LinearOperator
    cross_covar: Tensor
    data_covar: LinearOperator


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
        covar: LinearOperator = DiagLinearOperator(precision.diagonal(dim1=-1, dim2=-2).reciprocal())
    else:
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

    def _factor(self, covar: LinearOperator | Tensor, name: str) -> Tensor:
        """Cholesky factor in GPyTorch's precision for it; cached by value in eval mode."""
        matrix = to_dense(covar).type(_linalg_dtype_cholesky.value())
        if self.training or matrix.is_meta:
            return self._checked_cholesky(matrix, name)
        known, factor = self._factor_cache.get(name, (None, None))
        if known is None or factor is None or not _same(known, matrix):
            factor = self._checked_cholesky(matrix.detach(), name)
            self._factor_cache[name] = (matrix.detach().clone(), factor)
        if torch.is_grad_enabled() and matrix.requires_grad:
            return reuse_cholesky(matrix, factor)
        return factor.clone() if factor.is_inference() and not torch.is_inference_mode_enabled() else factor

    def _checked_cholesky(self, matrix: Tensor, name: str) -> Tensor:
        try:
            return cholesky(matrix, name=name)
        except torch.linalg.LinAlgError as error:
            kind = NotPSDError if bool(torch.isfinite(matrix).all()) else NanError
            raise kind(
                f"{error} jitter_val was {self.jitter_val:g}. Hyperparameters: {self._describe_hyperparameters()}. "
                "Try a larger jitter_val, inputs and targets scaled to unit variance, a smaller learning rate, fewer or "
                "better spread inducing points, or float64."
            ) from error

    def _describe_hyperparameters(self) -> str:
        described = []
        for name, parameter, constraint in self.model.named_parameters_and_constraints():
            if "variational_distribution" in name or name.endswith("inducing_points"):
                continue
            value = (parameter if constraint is None else constraint.transform(parameter)).detach()
            low, high = value.min().item(), value.max().item()
            described.append(f"{name.replace('raw_', '')}={low:.3g}" + (f"..{high:.3g}" if high != low else ""))
        return ", ".join(described) or "none"

    def _cholesky_factor(self, induc_induc_covar: LinearOperator) -> TriangularLinearOperator:
        return TriangularLinearOperator(self._factor(induc_induc_covar, "K_ZZ"))

    @property
    def prior_distribution(self) -> MultivariateNormal:
        q = self._variational_distribution
        zeros = torch.zeros(q.shape(), dtype=q.dtype, device=q.device)
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    @property
    def variational_distribution(self) -> Distribution:
        return self._cached_q(self._variational_distribution, "u")

    def _cached_q(self, distribution: _VariationalDistribution, name: str) -> Distribution:
        parameters = tuple(distribution.parameters())
        if self.training:
            key: tuple = (torch.is_grad_enabled(), *((p.data_ptr(), p._version) for p in parameters))
            same: Callable[[tuple], bool] = lambda known: known == key
        elif torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return distribution()
        else:
            key = parameters
            same = lambda known: all(map(_same, known, parameters))
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

    # -- the prior, and q(f) from the moments ---------------------------------------------------------------------------

    def _prior_blocks(self, x: Tensor, inducing_points: Tensor, **kwargs: Any) -> PriorBlocks:
        prior = self.model.forward(torch.cat([inducing_points, x], dim=-2), **kwargs)
        covar, num_inducing = prior.lazy_covariance_matrix, inducing_points.size(-2)
        return PriorBlocks(
            prior.mean[..., num_inducing:],
            covar[..., :num_inducing, :num_inducing].add_jitter(self.jitter_val),
            covar[..., :num_inducing, num_inducing:].to_dense(),
            covar[..., num_inducing:, num_inducing:],
        )

    def _training_distribution(
        self,
        prior_mean: Tensor,
        moments: Moments,
        index: Tensor | None,
        full_covar: Callable[[Tensor], LinearOperator] | None,
    ) -> MultivariateNormal:
        r"""q(f) with variance :math:`s_n + m_n d_n`, carrying the parts for :class:`TighterELBO`.

        GPyTorch adds the jitter to the data's diagonal too. It rides in :math:`s_n`, so that the tighter and the
        standard bound pay the same for it.

        :param full_covar: Makes the covariance from the scales if off-diagonal entries were asked for.
        """
        mean, explained = prior_mean + moments.mean, moments.explained + self.jitter_val
        shape = torch.broadcast_shapes(mean.shape, explained.shape, moments.residual.shape)
        mean, explained, residual = mean.expand(shape), explained.expand(shape), moments.residual.expand(shape)
        scale = self.conditional.scale(residual, index=index).expand(shape)
        penalty = self.conditional.penalty(residual, index=index).expand(shape)
        covar = DiagLinearOperator(explained + scale * residual) if full_covar is None else full_covar(scale)
        covar = covar.expand(*shape, shape[-1])
        return MultivariateNormal(
            mean, ResidualLinearOperator(covar, explained, residual, scale, penalty, strategy=self)
        )

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any) -> MultivariateNormal:
        if prior:
            kwargs.pop("index", None)
        else:
            self._check_inputs(x)
        return super().__call__(x, prior=prior, diag=diag, **kwargs)

    def _check_inputs(self, x: Tensor) -> None:
        if not torch.is_tensor(x) or not x.is_floating_point():
            raise TypeError(f"Inputs must be a floating point tensor; got {getattr(x, 'dtype', type(x).__name__)}.")
        inducing = self.inducing_points
        if x.dim() < 2 or x.size(-1) != inducing.size(-1):
            raise ValueError(
                f"Inputs must have shape ... x N x {inducing.size(-1)} like the inducing points; got {tuple(x.shape)}."
            )
        try:
            torch.broadcast_shapes(x.shape[:-2], inducing.shape[:-2], self._variational_distribution.batch_shape)
        except RuntimeError:
            raise ValueError(
                f"Batch shapes do not broadcast: inputs {tuple(x.shape[:-2])}, inducing points "
                f"{tuple(inducing.shape[:-2])}, variational distribution "
                f"{tuple(self._variational_distribution.batch_shape)}."
            ) from None
        if not x.is_meta and not bool(torch.isfinite(x).all()):
            rows = (~torch.isfinite(x)).any(-1).sum().item()
            raise ValueError(
                f"Inputs hold NaN or infinity in {rows} of {x.shape[:-1].numel()} rows; drop or impute them."
            )


def _same(known: Tensor, current: Tensor) -> bool:
    return (
        known.shape == current.shape
        and known.dtype == current.dtype
        and known.device == current.device
        and not current.is_meta
        and torch.equal(known, current)
    )
