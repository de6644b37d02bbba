r"""A collapsed bound for Bernoulli-logit classification, with Jaakkola's quadratic minorant of the logistic function.

For :math:`y_n \in \{-1, 1\}`, any :math:`\xi_n` and :math:`\omega(\xi) = \tanh(\xi/2) / (2\xi)`,

.. math:: \log \sigma(y_n f_n) \ge \log \sigma(\xi_n) + \tfrac12 (y_n f_n - \xi_n)
          - \tfrac12 \omega_n (f_n^2 - \xi_n^2)

so that each label is an observation with Gaussian noise of variance :math:`1/\omega_n` (:math:`\omega_n` is also the mean
of a Pólya–Gamma variable). What holds for Gaussian noise then holds here: q(u) and the scales
:math:`m_n = 1 / (1 + \omega_n d_n)` have a closed form, and the bound on the log evidence is strict.
"""

from __future__ import annotations

import torch
from gpytorch import Module, settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from linear_operator.operators import DiagLinearOperator, MatmulLinearOperator, RootLinearOperator
from torch import Tensor

from ._checks import check_inputs, raise_if_not_finite
from .bounds import log_penalty, optimal_scale, trace_penalty
from .kernels.precision import Covariances, inducing_cholesky, sufficient_precision, unlowered_covariances
from .linalg import project, residual_variance
from .moments import (
    Whitened,
    add_identity_cholesky,
    explained_root,
    explained_variance,
    projected_mean,
    whitened_from_gram,
)

BOUNDS = ("tighter", "standard")

# A label is an observation with noise of variance 1/weight.
_LEAST_NOISE = 4.0


def jaakkola_weight(xi: Tensor) -> Tensor:
    r""":math:`\omega(\xi) = \tanh(\xi/2) / (2\xi)`, between 0 and its value 1/4 at :math:`\xi = 0`; any shape.

    Example:
        >>> tighter_gp.jaakkola.jaakkola_weight(torch.tensor([0.0, 2.0]))
        tensor([0.2500, 0.1904])
    """
    half = xi / 2
    small = half.abs() < 0.01
    square = half.square()
    series = 1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
    safe = torch.where(small, torch.ones_like(half), half)
    return torch.where(small, series, safe.tanh() / safe) / 4


def jaakkola_posterior(projection: Tensor, labels: Tensor, xi: Tensor, mean: Tensor | float = 0.0) -> Whitened:
    r"""The q(w) that maximises the bound at fixed :math:`\xi`, whatever the scales :math:`m_n`.

    .. math::

        B = I + A \,\mathrm{diag}(\omega) A^\top, \qquad b = A (y/2 - \omega \circ \mu), \qquad
        q(w) = \mathcal N(B^{-1} b, B^{-1})

    Parameters as in :func:`jaakkola_bound`.

    Example:
        >>> projection, labels = torch.tensor([[1.0, 0.5]]), torch.tensor([1.0, 1.0])
        >>> tighter_gp.jaakkola.jaakkola_posterior(projection, labels, torch.zeros(2)).mean
        tensor([0.5714])
    """
    return whitened_from_gram(*_sums(projection, labels, jaakkola_weight(xi), mean))


def jaakkola_bound(
    projection: Tensor,
    residual: Tensor,
    labels: Tensor,
    xi: Tensor,
    mean: Tensor | float = 0.0,
    *,
    bound: str = "tighter",
) -> Tensor:
    r"""Strict lower bound on the log evidence of binary labels, for any :math:`\xi`.

    .. math::

        \sum_n \Bigl[ \log\sigma(\xi_n) - \tfrac12 \xi_n + \tfrac12 \omega_n (\xi_n^2 - \mu_n^2)
        + \tfrac12 y_n \mu_n \Bigr] + \tfrac12 b^\top B^{-1} b - \tfrac12 \log |B|
        - \tfrac12 \sum_n \log(1 + \omega_n d_n)

    with :math:`B` and :math:`b` of :func:`jaakkola_posterior`. The standard bound pays
    :math:`\tfrac12 \sum_n \omega_n d_n` in the last sum, which is never less.

    :param projection: :math:`A`, shape ``... x M x N``.
    :param residual: :math:`d_n`, shape ``... x N``.
    :param labels: :math:`y_n`, -1 or 1, shape ``... x N``.
    :param xi: :math:`\xi_n`, shape ``... x N``; its sign does not matter.
    :param mean: Prior mean :math:`\mu_n`, broadcastable to ``labels``.
    :param bound: ``"tighter"`` or ``"standard"``.
    :return: Sum over ``N``, shape ``...``.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5]]), torch.tensor([0.0, 0.75])
        >>> labels, xi = torch.tensor([1.0, -1.0]), torch.ones(2)
        >>> tighter_gp.jaakkola.jaakkola_bound(projection, residual, labels, xi)
        tensor(-1.5780)
        >>> tighter_gp.jaakkola.jaakkola_bound(projection, residual, labels, xi, bound="standard")
        tensor(-1.5847)
    """
    _check_bound(bound)
    weight = jaakkola_weight(xi)
    gram, linear = _sums(projection, labels, weight, mean)
    factor = add_identity_cholesky(gram)
    whitened = torch.linalg.solve_triangular(factor, linear.unsqueeze(-1), upper=False)
    gaussian = 0.5 * whitened.square().sum((-1, -2)) - factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    constant = torch.nn.functional.logsigmoid(xi) - xi / 2 + weight * xi.square() / 2
    at_mean = (labels * mean - weight * mean * mean) / 2
    penalty = log_penalty if bound == "tighter" else trace_penalty
    return (constant + at_mean).sum(-1) + gaussian - penalty(residual, weight.reciprocal())


def optimal_xi(
    projection: Tensor,
    residual: Tensor,
    labels: Tensor,
    xi: Tensor,
    mean: Tensor | float = 0.0,
    *,
    bound: str = "tighter",
) -> Tensor:
    r"""One step of coordinate ascent: the best :math:`\xi` for the q(w) and :math:`m_n` that the current one leads to.

    .. math:: \xi_n^2 = \mathbb E[f_n^2] = (\mu_n + a_n^\top B^{-1} b)^2 + a_n^\top B^{-1} a_n + m_n d_n

    Never lowers :func:`jaakkola_bound`, whose parameters it has; a fixed point is a stationary point of it.

    :return: :math:`\xi_n \ge 0`, shape ``... x N``.

    Example:
        >>> projection, residual = torch.tensor([[1.0, 0.5]]), torch.tensor([0.0, 0.75])
        >>> labels, xi = torch.tensor([1.0, -1.0]), torch.ones(2)
        >>> start = tighter_gp.jaakkola.jaakkola_bound(projection, residual, labels, xi)
        >>> xi = tighter_gp.jaakkola.optimal_xi(projection, residual, labels, xi)
        >>> bool(tighter_gp.jaakkola.jaakkola_bound(projection, residual, labels, xi) > start)
        True
    """
    _check_bound(bound)
    q = jaakkola_posterior(projection, labels, xi, mean)
    scale = optimal_scale(residual, jaakkola_weight(xi)) if bound == "tighter" else 1.0
    first = mean + projected_mean(projection, q)
    return (first.square() + explained_variance(projection, q) + scale * residual).sqrt()


def _sums(projection: Tensor, labels: Tensor, weight: Tensor, mean: Tensor | float) -> tuple[Tensor, Tensor]:
    """Gram matrix and linear term of the Gaussian that the minorant is in w."""
    gram = (projection * weight.unsqueeze(-2)) @ projection.mT
    return gram, (projection @ (labels / 2 - weight * mean).unsqueeze(-1)).squeeze(-1)


def _check_bound(bound: str) -> None:
    if bound not in BOUNDS:
        raise ValueError(f"Unknown bound {bound!r}; choose {' or '.join(map(repr, BOUNDS))}.")


class JaakkolaGPClassifier(Module):
    r"""
    Sparse binary classifier with the logistic link, trained on a strict bound in closed form over q(u).

    The hyperparameters and inducing points are trained by gradients of :meth:`bound` on the full data; q(u) and the
    scales :math:`m_n` are at their optimum by construction, and :math:`\xi` follows by closed-form updates, each of which
    can only raise the bound. A step takes :math:`O(NM^2)` time and :math:`O(NM)` memory. The bound is below the one that
    :class:`~tighter_gp.TighterELBO` reaches at the same q(u), since the minorant costs something.

    A batch of labels ``... x N`` trains that many classifiers, one against the rest for instance; give the kernel the
    same batch shape for hyperparameters of their own.

    :param train_x: Training inputs, ``N x D``.
    :param train_y: Labels, 0 and 1 or -1 and 1, ``... x N``.
    :param inducing_points: :math:`Z`, ``... x M x D``.
    :param covar_module: Kernel.
    :param mean_module: Prior mean; default zero.
    :param bound: ``"tighter"`` or ``"standard"``.
    :param learn_inducing_locations: Whether :math:`Z` is a parameter.
    :param jitter_val: Added to :math:`K_{ZZ}`; default :class:`~gpytorch.settings.variational_cholesky_jitter`.
    :ivar str bound_name: ``"tighter"`` or ``"standard"``.
    :ivar torch.Tensor xi: :math:`\xi_n \ge 0`, shape ``... x N``; part of the state, not a parameter.

    Example:
        >>> x = torch.rand(50, 2)
        >>> y = (x.sum(-1) > 1).double()
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> model = tighter_gp.JaakkolaGPClassifier(x, y, x[:10], kernel)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = -model.bound()
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> likelihood = tighter_gp.likelihoods.BernoulliLogitLikelihood()
        >>> likelihood(model.predict(torch.rand(7, 2))).probs.shape
        torch.Size([7])
    """

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        inducing_points: Tensor,
        covar_module: Kernel,
        mean_module: Mean | None = None,
        *,
        bound: str = "tighter",
        learn_inducing_locations: bool = True,
        jitter_val: float | None = None,
    ) -> None:
        super().__init__()
        _check_bound(bound)
        labels = _signs(train_x, train_y, inducing_points)
        self.bound_name = bound
        self._jitter_val = jitter_val
        self.covar_module = covar_module
        self.mean_module = ZeroMean() if mean_module is None else mean_module
        # The data move with the module and stay out of its state dict.
        self.register_buffer("train_x", train_x.detach(), persistent=False)
        self.register_buffer("labels", labels, persistent=False)
        if learn_inducing_locations:
            self.register_parameter("inducing_points", torch.nn.Parameter(inducing_points.detach().clone()))
        else:
            self.register_buffer("inducing_points", inducing_points.detach().clone())
        batch_shape = torch.broadcast_shapes(
            labels.shape[:-1], inducing_points.shape[:-2], covar_module.batch_shape, self.mean_module.batch_shape
        )
        self.register_buffer("xi", torch.ones(*batch_shape, labels.size(-1)).to(labels))

    @property
    def jitter_val(self) -> float:
        """What is added to the diagonal of :math:`K_{ZZ}`, there and nowhere else."""
        if self._jitter_val is None:
            return settings.variational_cholesky_jitter.value(dtype=self.inducing_points.dtype)
        return self._jitter_val

    def bound(self, num_updates: int = 1) -> Tensor:
        r"""Lower bound on the log evidence: a sum over the data, not divided by :math:`N`; priors are left out.

        :param num_updates: How often :math:`\xi` is updated first, at the current hyperparameters and without a graph;
            0 leaves it. For L-BFGS take about 10, so that :math:`\xi` keeps up with the line search.
        :return: Shape of the batch of models; its gradient is that at fixed :math:`\xi`, which is the gradient of the
            bound's maximum over :math:`\xi` once the updates have converged.
        """
        if num_updates:
            self.update_xi(num_updates, tol=0.0)
        projection, residual, labels, xi, mean = self._problem()
        return jaakkola_bound(projection, residual, labels, xi, mean, bound=self.bound_name).to(self.xi.dtype)

    @torch.no_grad()
    def update_xi(self, max_iter: int = 100, tol: float = 1e-6) -> JaakkolaGPClassifier:
        r"""Coordinate ascent in :math:`\xi` at fixed hyperparameters.

        :param max_iter: Most updates.
        :param tol: Stop when no :math:`\xi_n` moves by more than this.
        """
        projection, residual, labels, xi, mean = self._problem()
        for _ in range(max_iter):
            before, xi = xi, optimal_xi(projection, residual, labels, xi, mean, bound=self.bound_name)
            if tol > 0 and (xi - before).abs().max() <= tol:
                break
        self.xi.copy_(xi)
        return self

    def forward(self, x: Tensor) -> MultivariateNormal:
        r"""Latent q(f) at new inputs, with the full covariance evaluated when asked for.

        .. math:: \mathcal N\bigl(\mu_* + a_*^\top m_w,\; k_{**} - a_*^\top a_* + a_*^\top B^{-1} a_*\bigr)

        :param x: ``... x N x D``; gradients flow into it.
        """
        check_inputs(x, self.train_x.size(-1))
        raise_if_not_finite(x)
        projection, _, labels, xi, mean = self._problem()
        q = jaakkola_posterior(projection, labels, xi, mean)
        new, residual = self._projected(x)
        root = explained_root(new, q)
        assert root is not None
        mean, root, narrow = (tensor.to(x.dtype) for tensor in (projected_mean(new, q), root, new))
        left = self.covar_module(x) + MatmulLinearOperator(-narrow.mT, narrow)
        if residual.dtype != x.dtype:
            left = left + DiagLinearOperator(residual.to(x.dtype) - left.diagonal(dim1=-1, dim2=-2))
        return MultivariateNormal(self.mean_module(x) + mean, left + RootLinearOperator(root.mT))

    @torch.no_grad()
    def predict(self, x: Tensor) -> MultivariateNormal:
        """:meth:`forward` without a graph; ``BernoulliLogitLikelihood()(model.predict(x))`` has the probabilities.

        :param x: ``... x N x D``.
        """
        return self(x)

    def _problem(self) -> tuple[Tensor, ...]:
        """:math:`A`, :math:`d_n`, labels, :math:`\\xi` and the prior mean at the training inputs, in one precision."""
        projection, residual = self._projected(self.train_x)
        others = (self.labels, self.xi, self.mean_module(self.train_x))
        return projection, residual, *(tensor.to(projection.dtype) for tensor in others)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """:math:`A` and :math:`d_n`, in a precision that suffices for the noise that a label has at least."""
        z = self.inducing_points
        factor = inducing_cholesky(self._prior(torch.float64), z, self.jitter_val)
        prior = self._prior(sufficient_precision(factor, _LEAST_NOISE, x.dtype))
        projection = project(factor, prior.covariance(z, x))
        return projection, residual_variance(prior.variance(x), projection)

    def _prior(self, precision: torch.dtype) -> Covariances:
        return unlowered_covariances(self.covar_module, precision)


def _signs(train_x: Tensor, train_y: Tensor, inducing_points: Tensor) -> Tensor:
    """Labels as -1 and 1 in the dtype of the inputs, after a check of all shapes."""
    if train_x.dim() != 2 or train_y.size(-1) != len(train_x) or inducing_points.size(-1) != train_x.size(-1):
        raise ValueError(
            "Expected train_x N x D, train_y ... x N and inducing_points ... x M x D; got shapes "
            f"{tuple(train_x.shape)}, {tuple(train_y.shape)} and {tuple(inducing_points.shape)}."
        )
    if not bool(torch.isfinite(train_x).all()):
        raise ValueError("train_x holds NaN or infinity; drop or impute these rows.")
    values = set(train_y.unique().tolist())
    if not (values <= {0, 1} or values <= {-1, 1}):
        shown = ", ".join(f"{value:g}" for value in sorted(values)[:5])
        raise ValueError(f"Labels must be 0 and 1, or -1 and 1; got {shown}{', ...' if len(values) > 5 else ''}.")
    return torch.where(train_y > 0, 1.0, -1.0).to(train_x)
