"""Natural gradients for a Cholesky q(u) as an optimizer, for hand-written loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..maths.linalg import triangular_inverse
from ..maths.natural import NaturalParameters, lower_root

__all__ = ["NaturalGradient", "covariance_gradient"]

log = logging.getLogger("tighter_gp")

_MAX_HALVINGS = 6


def covariance_gradient(root: Tensor, gradient: Tensor, inverse: Tensor) -> Tensor:
    r"""Derivative in :math:`S = C C^\top` from the derivative in :math:`C`.

    .. math:: \bar S = \tfrac12 C^{-\top} \bigl(\Phi(C^\top \bar C) + \Phi(C^\top \bar C)^\top\bigr) C^{-1}

    with :math:`\Phi` the lower triangle with half its diagonal.

    :param root: :math:`C`, lower triangular, ``... x M x M``.
    :param gradient: :math:`\bar C`, lower triangular, ``... x M x M``.
    :param inverse: :math:`C^{-1}`.

    Example:
        >>> root, gradient = torch.tensor([[2.0]]), torch.tensor([[4.0]])  # of C^2 at C = 2
        >>> tighter_gp.training.natural_optimizer.covariance_gradient(root, gradient, 1 / root)
        tensor([[1.]])
    """
    inner = (root.mT @ gradient).tril()
    inner.diagonal(dim1=-1, dim2=-2).mul_(0.5)
    return 0.5 * inverse.mT @ (inner + inner.mT) @ inverse


class NaturalGradient(torch.optim.Optimizer):
    r"""
    Natural gradients for q(u) with its mean and Cholesky factor as parameters, in the place of
    :class:`gpytorch.optim.NGD`.

    It works from ``.grad`` alone, so every objective and every strategy will do, GPyTorch's
    :class:`~gpytorch.variational.VariationalStrategy` with a
    :class:`~gpytorch.variational.CholeskyVariationalDistribution` too. The objective must be deterministic given the
    batch: where a likelihood samples, as a softmax does, its gradients are no curvature, and a step may be halved often.
    :func:`tighter_gp.fit` needs neither the gradients of q(u) nor this class.

    :param params: ``model.variational_parameters()`` or ``model.named_variational_parameters()``: a mean and a Cholesky
        factor for each distribution, in turn.
    :param num_data: The total number of training points, as the objective divides by it.
    :param lr: Size of the step, from 0 to 1.

    Example:
        >>> natural = tighter_gp.training.NaturalGradient(model.variational_parameters(), num_data=len(train_y), lr=0.1)
        >>> adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.05)
        >>> mll = tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y))
        >>> for _ in range(2):
        ...     natural.zero_grad()
        ...     adam.zero_grad()
        ...     (-mll(model(train_x), train_y)).backward()
        ...     natural.step()
        ...     adam.step()
    """

    def __init__(self, params: Iterable[Any], num_data: int, lr: float = 0.1) -> None:
        if num_data < 1:
            raise ValueError(f"num_data is the number of training points; got {num_data}.")
        self.num_data = num_data
        super().__init__([_without_names(group) for group in _groups(params)], defaults={"lr": lr})
        for group in self.param_groups:
            _pairs(group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move q(u). As in GPyTorch, ``closure`` is there for the convention alone."""
        for group in self.param_groups:
            for mean, root in _pairs(group["params"]):
                if mean.grad is not None and root.grad is not None:
                    self._step(mean, root, group["lr"])

    def _step(self, mean: Tensor, root: Tensor, lr: float) -> None:
        q, inverse = self._current(mean, root)
        wide = mean.double()
        by_mean = -self.num_data * mean.grad.double()  # type: ignore[union-attr]
        chol, gradient = root.tril().double(), -self.num_data * root.grad.tril().double()  # type: ignore[union-attr]
        by_covariance = covariance_gradient(chol, gradient, inverse)
        by_linear = by_mean - 2 * (by_covariance @ wide.unsqueeze(-1)).squeeze(-1)
        size = lr
        for _ in range(_MAX_HALVINGS + 1):
            moved = NaturalParameters(q.precision - 2 * size * by_covariance, q.linear + size * by_linear)
            new_root, ok = lower_root(moved.precision)
            if bool(ok & torch.isfinite(moved.linear).all()):
                mean.copy_((new_root @ (new_root.mT @ moved.linear.unsqueeze(-1))).squeeze(-1))
                root.copy_(new_root)
                self.state[root] = {
                    "precision": moved.precision,
                    "linear": moved.linear,
                    "written_mean": mean.detach().clone(),
                    "written_root": root.detach().clone(),
                }
                if size < lr:
                    log.warning(
                        "a natural step of size %g would leave the positive definite matrices; taken: %g", lr, size
                    )
                return
            size /= 2
        log.warning("a natural step of size %g was not taken: no smaller one gave a positive definite precision", lr)

    def _current(self, mean: Tensor, root: Tensor) -> tuple[NaturalParameters, Tensor]:
        """Natural parameters, from the last step unless q(u) was changed since, and the inverse of the root."""
        state = self.state[root]
        inverse = triangular_inverse(root.tril().double())
        if state and torch.equal(state["written_mean"], mean) and torch.equal(state["written_root"], root):
            return NaturalParameters(state["precision"], state["linear"]), inverse
        precision = inverse.mT @ inverse
        return NaturalParameters(precision, (precision @ mean.double().unsqueeze(-1)).squeeze(-1)), inverse

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, in float64 as it was; torch would round it to the parameters' dtype."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name in ("precision", "linear"):
                self.state[parameter][name] = saved[name].to(parameter.device).clone()


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if given and all(isinstance(group, dict) for group in given):
        return given
    return [{"params": given}]


def _without_names(group: dict[str, Any]) -> dict[str, Any]:
    """A group of tensors from one of tensors or of names and tensors, which tell a natural form from a Cholesky one."""
    tensors = []
    for item in group["params"]:
        name, tensor = item if isinstance(item, tuple) else ("", item)
        if "natural_" in name:
            raise ValueError(f"{name} belongs to a natural form of q(u): use gpytorch.optim.NGD for it.")
        tensors.append(tensor)
    return {**group, "params": tensors}


def _pairs(params: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Means and Cholesky factors, or a clear error if the parameters are not these."""
    if len(params) % 2:
        raise ValueError(
            f"NaturalGradient needs a mean and a Cholesky factor per distribution; got {len(params)} parameters."
        )
    pairs = list(zip(params[::2], params[1::2], strict=True))
    for mean, root in pairs:
        if root.shape != (*mean.shape, mean.size(-1)):
            raise ValueError(
                "NaturalGradient needs a mean (... x M) and a Cholesky factor (... x M x M) per distribution, in turn; got "
                f"{tuple(mean.shape)} and {tuple(root.shape)}. A mean-field q(u) or a point mass goes with Adam."
            )
        if bool((root.detach().diagonal(dim1=-1, dim2=-2) < 0).all()):
            raise ValueError(
                "The matrix of q(u) has a negative diagonal, as in natural form: use gpytorch.optim.NGD for it."
            )
    return pairs
