"""A trained model as a plain module of tensors, for torch.export, TorchScript and ONNX."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from ..draws import temporary_mode
from ..maths.linalg import cholesky
from ..maths.moments import explained_root
from ..posterior import posterior_of
from ..predictions import predict
from .plain_modules import PlainKernel, PlainResponse

# How far predictions of a module in a lower precision may be off, relative to the variance of f and its square root.
_ROUNDING = 0.05


class ExportedPredictor(torch.nn.Module):
    """Mean and variance of f and of y at test inputs, ``B x D``, as a tuple of four tensors of shape ``B``.

    Nothing but tensors, kernels and matrix products; made by :func:`~tighter_gp.export_predictor`.

    Example:
        >>> f_mean, f_variance, y_mean, y_variance = tighter_gp.export_predictor(model, likelihood)(test_x)
        >>> f_mean.shape == test_y.shape
        True
    """

    points: Tensor
    weights: Tensor
    constant: Tensor
    q_mean: Tensor

    def __init__(self, kernel: PlainKernel, response: PlainResponse, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.kernel, self.response = kernel, response
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and variance of f, mean and variance of y."""
        dtype = x.dtype
        x = x.reshape(*x.shape[:-1], self.points.size(-1))  # fails for another number of columns, which would broadcast
        if self.points.dtype == torch.float64:
            x = x.double()  # a module of this precision inside, whatever comes
        projection = self.kernel(x, self.points) @ self.inverse_root  # rows of A, B x M
        mean = x @ self.weights + self.constant + projection @ self.q_mean
        residual = (self.kernel.variance(x) - projection.square().sum(-1)).clamp_min(0.0)
        variance = (projection @ self.q_root).square().sum(-1) + residual + self.jitter
        y_mean, y_variance = self.response(mean, variance)
        return mean.to(dtype), variance.to(dtype), y_mean.to(dtype), y_variance.to(dtype)


@torch.no_grad()
def export_predictor(model: Any, likelihood: Any, *, dtype: torch.dtype | None = None) -> ExportedPredictor:
    r"""A module without GPyTorch in it that predicts what the model predicts, for deployment.

    It passes :func:`torch.export.export`, :func:`torch.jit.trace` and :func:`torch.onnx.export` with any number of rows::

        module = tighter_gp.export_predictor(model, likelihood)
        rows = torch.export.Dim("rows")
        torch.onnx.export(module, (x,), "model.onnx", dynamo=True, dynamic_shapes=({0: rows},))
        f_mean, f_variance, y_mean, y_variance = onnxruntime.InferenceSession("model.onnx").run(None, {"x": x.numpy()})

    Before it is returned it is compared with :func:`~tighter_gp.predict` at the inducing points and between them.

    :param model: One output: an SVGP or SOLVE-GP on a strategy of this package, an ``ExactGP`` with a
        :class:`~tighter_gp.TighterInducingPointKernel`, or a :class:`~tighter_gp.CollapsedGP`. Kernels RBF, Matérn, rational
        quadratic and linear, scaled, added and multiplied, with ARD and ``active_dims``; means zero, constant and linear,
        as ``covar_module`` and ``mean_module``. Anything else is a TypeError.
    :param likelihood: Gaussian, Student-t, Laplace, Bernoulli (probit or logit) or Poisson.
    :param dtype: Of inputs and outputs; default that of the model. Where float32 would not do, as beside small noise without
        jitter, the module is in float64 inside.

    Example:
        >>> module = tighter_gp.export_predictor(model, likelihood)
        >>> f_mean, f_variance, y_mean, y_variance = module(test_x)
        >>> bool(torch.allclose(f_mean, tighter_gp.predict(model, test_x).mean, atol=1e-4))
        True
    """
    with temporary_mode(model, False):
        posterior = posterior_of(model, torch.float64)
        own = model.covar_module.base_kernel if isinstance(model, ExactGP) else model.covar_module
        kernel, z, jitter = PlainKernel(own).double(), posterior.points.double(), posterior.prior.jitter
        test = torch.cat([z, (z + z.roll(1, 0)) / 2])
        expected = predict(model, test)
        # A zero, constant or linear mean is known from its values at zero and at unit vectors.
        ends = torch.cat([torch.zeros_like(z[:1]), torch.eye(z.size(-1)).to(z)])
        constant, *slopes = copy.deepcopy(model.mean_module).double()(ends)
    # Exact as far as float64 goes; what is stored is rounded to the precision of the module.
    matrix = kernel(z, z)
    matrix.diagonal().copy_(kernel.variance(z) + jitter)  # distances of zero, which rounding does not know
    identity = torch.eye(len(z)).to(z)
    inverse = torch.linalg.solve_triangular(cholesky(matrix, name="K_ZZ"), identity, upper=False)
    q = posterior.q.to(torch.float64)
    root = explained_root(identity, q)
    tensors = {
        "points": z,
        "inverse_root": inverse.mT,
        "q_mean": q.mean,
        "q_root": torch.zeros_like(z[:, :1]) if root is None else root.mT,
        "jitter": torch.tensor(posterior.jitter, dtype=torch.float64, device=z.device),
        "constant": constant,
        "weights": torch.stack(slopes) - constant,
    }
    module = ExportedPredictor(kernel, PlainResponse(likelihood), tensors).double().requires_grad_(False).eval()
    f_mean, f_variance, *_ = module(test)
    tolerance = 1e-6 if expected.mean.dtype == torch.float64 else 1e-2
    scale = float(kernel.variance(z).amax().sqrt())
    for found, wanted, size in ((f_mean, expected.mean, scale), (f_variance, expected.variance, scale**2)):
        if not torch.allclose(found, wanted.double(), rtol=tolerance, atol=tolerance * size):
            raise TypeError(
                "The exported module and predict differ: forward of the model must return MultivariateNormal(mean_module(x), "
                "covar_module(x)), with a zero, constant or linear mean and nothing done to x before."
            )
    dtype = dtype or posterior.points.dtype
    rounded = copy.deepcopy(module).to(dtype)
    return rounded if _keeps(rounded(test.to(dtype)), f_mean, f_variance) else module


def _keeps(found: tuple[Tensor, ...], mean: Tensor, variance: Tensor) -> bool:
    """Whether a rounded module predicts the same, by the standard deviations of f."""
    f_mean, f_variance = (part.double() for part in found[:2])
    near_mean = (f_mean - mean).abs() <= _ROUNDING * variance.sqrt()
    near_variance = (f_variance - variance).abs() <= _ROUNDING * variance
    return bool((near_mean & near_variance).all())
