r"""Dense linear algebra: one Cholesky factor, one projection, one residual. Torch only.

Notation: :math:`L = \mathrm{chol}(K_{ZZ})`, :math:`A = L^{-1} K_{ZX}`,
:math:`d_n = k_{nn} - \lVert a_n \rVert^2`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "cholesky",
    "project",
    "residual_variance",
    "solve_lower",
    "solve_lower_transposed",
    "triangular_inverse",
]

# Relative to the mean of the diagonal; each further try multiplies it by ten.
_FIRST_RETRY_JITTER = {torch.float64: 1e-8, torch.float32: 1e-6}
_MAX_TRIES = 7

# A backend whose products are of reduced precision, the name of its switch, its exact value, and the one to restore.
_Switch = tuple[Any, str, Any, Any]

# Below this size a triangular matrix is inverted at once.
_SMALL = 64


def cholesky(
    matrix: Tensor,
    name: str = "matrix",
    scale: Tensor | None = None,
    report: Callable[[str, str], None] | None = None,
) -> Tensor:
    r"""Lower Cholesky factor that retries with a jitter proportional to the matrix's own scale.

    A matrix that is positive definite is factorised as it is. One that is not gets
    :math:`\epsilon \cdot \mathrm{mean}(\mathrm{diag})` on its diagonal, :math:`\epsilon` growing tenfold
    from 1e-8 (float64) or 1e-6 (float32), with a warning; only the failing members of a batch are touched.

    :param matrix: Symmetric, shape ``... x M x M``.
    :param name: What to call the matrix in messages.
    :param scale: What its rounding errors are relative to, shape ``...``, if not the mean of its diagonal: for a small
        difference of large matrices, the mean of theirs.
    :param report: Called with the name and a message where jitter was added; default a warning.
    :return: Shape ``... x M x M``.
    :raises torch.linalg.LinAlgError: If the matrix holds NaN or inf, or stays indefinite.

    Example:
        >>> tighter_gp.maths.linalg.cholesky(torch.tensor([[4.0, 2.0], [2.0, 10.0]]))
        tensor([[2., 0.],
                [1., 3.]])
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if matrix.is_meta or not (info.any() | ~factor.diagonal(dim1=-1, dim2=-2).isfinite().all()):
        return factor
    num_bad = int((~torch.isfinite(matrix)).sum())
    if num_bad:
        raise torch.linalg.LinAlgError(f"{name} ({_describe(matrix)}) has {num_bad} NaN or infinite entries.")
    scale = mean_diagonal(matrix) if scale is None else scale
    jitter = _FIRST_RETRY_JITTER[matrix.dtype]
    added = torch.zeros_like(scale)
    for _ in range(_MAX_TRIES):
        added = torch.where(info > 0, jitter * scale, added)
        factor, info = torch.linalg.cholesky_ex(
            matrix + torch.diag_embed(added.unsqueeze(-1).expand(matrix.shape[:-1]))
        )
        if not info.any():
            message = f"{name} ({_describe(matrix)}) was not positive definite: a jitter of its own scale was added."
            (_warn if report is None else report)(name, message)
            return factor
        jitter *= 10
    raise torch.linalg.LinAlgError(
        f"{name} ({_describe(matrix)}) is not positive definite: its smallest eigenvalue is "
        f"{_smallest_eigenvalue(matrix):.3e} with a mean diagonal of {mean_diagonal(matrix).mean().item():.3e}, and "
        f"adding up to {added.max().item():.1e} did not help."
    )


def _warn(name: str, message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def mean_diagonal(matrix: Tensor) -> Tensor:
    """The scale of a covariance matrix, without a graph, shape ``...``."""
    return matrix.detach().diagonal(dim1=-1, dim2=-2).mean(-1).abs()


def _smallest_eigenvalue(matrix: Tensor) -> float:
    """For messages: NaN where the algorithm does not converge."""
    try:
        return torch.linalg.eigvalsh(matrix.double()).min().item()
    except torch.linalg.LinAlgError:
        return math.nan


def full_precision(device_type: str) -> AbstractContextManager[None]:
    """No autocast and no reduced-precision matrix products: the residual is a small difference of large numbers.

    Works with both of torch's TF32 switches, the older and the newer, and leaves them as they were.
    """
    has_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    backends: Any = torch.backends
    switches: list[_Switch] = []
    if hasattr(backends, "fp32_precision"):
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul):
            value = backend.fp32_precision
            if value not in ("ieee", "none"):
                before = "none" if value == backends.fp32_precision else value  # "none" is inherited
                switches.append((backend, "fp32_precision", "ieee", before))
    elif backends.cuda.matmul.allow_tf32:  # older versions of torch have one switch
        switches = [(backends.cuda.matmul, "allow_tf32", False, True)]
    return _switched(device_type, switches) if has_autocast or switches else nullcontext()


@contextmanager
def _switched(device_type: str, switches: list[_Switch]) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False):
        for backend, switch, exact, _ in switches:
            setattr(backend, switch, exact)
        try:
            yield
        finally:
            for backend, switch, _, before in switches:
                setattr(backend, switch, before)


def _describe(matrix: Tensor) -> str:
    return f"{'x'.join(str(n) for n in matrix.shape)}, {str(matrix.dtype).removeprefix('torch.')}"


def triangular_inverse(lower: Tensor) -> Tensor:
    r"""Inverse of a lower triangular matrix, by halves: less work than solving for the identity.

    Example:
        >>> tighter_gp.maths.linalg.triangular_inverse(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
        tensor([[ 0.5000,  0.0000],
                [-0.5000,  1.0000]])
    """
    size = lower.size(-1)
    half = size // 2
    if size <= _SMALL or size % 2:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    first, second = triangular_inverse(torch.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    inverse = torch.zeros_like(lower)
    inverse[..., :half, :half], inverse[..., half:, half:] = first, second
    inverse[..., half:, :half] = -(second @ (lower[..., half:, :half] @ first))  # -C^-1 B A^-1 of [[A, 0], [B, C]]
    return inverse


def solve_lower(chol: Tensor, rhs: Tensor) -> Tensor:
    r""":math:`L^{-1} B`, by a solve from the right: for rows stored in order it needs no copies and is twice as fast.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.maths.linalg.solve_lower(chol, torch.tensor([[2.0], [5.0]]))
        tensor([[1.],
                [1.]])
    """
    return torch.linalg.solve_triangular(chol.mT, rhs.mT, upper=True, left=False).mT


def solve_lower_transposed(chol: Tensor, rhs: Tensor) -> Tensor:
    r""":math:`L^{-\top} B`, as :func:`solve_lower`.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.maths.linalg.solve_lower_transposed(chol, torch.tensor([[3.0], [4.0]]))
        tensor([[1.],
                [1.]])
    """
    return torch.linalg.solve_triangular(chol, rhs.mT, upper=False, left=False).mT


def project(chol: Tensor, cross: Tensor) -> Tensor:
    r"""Whitened cross-covariance :math:`A = L^{-1} K_{ZX}`, in the dtype of ``cross``.

    :param chol: :math:`L`, shape ``... x M x M``.
    :param cross: :math:`K_{ZX}`, shape ``... x M x B``.
    :return: Shape ``... x M x B``.

    Example:
        >>> chol = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> tighter_gp.maths.linalg.project(chol, torch.tensor([[2.0, 0.0], [5.0, 2.0]]))
        tensor([[1.0000, 0.0000],
                [1.0000, 0.5000]])
    """
    return solve_lower(chol.to(cross.dtype), cross)


def residual_variance(prior_variance: Tensor, projection: Tensor) -> Tensor:
    r"""What the inducing variables leave unexplained, :math:`d_n = \max(0, k_{nn} - \lVert a_n \rVert^2)`.

    :param prior_variance: :math:`k_{nn}`, shape ``... x B``.
    :param projection: :math:`A`, shape ``... x M x B``.
    :return: Shape ``... x B``.

    Example:
        >>> projection = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]])
        >>> tighter_gp.maths.linalg.residual_variance(torch.ones(3), projection)
        tensor([0.0000, 0.5000, 1.0000])
    """
    return (prior_variance - projection.square().sum(-2)).clamp_min(0.0)
