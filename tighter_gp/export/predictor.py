"""A trained model as a plain module of tensors, for torch.export, TorchScript and ONNX."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from ..collapsed import CollapsedGP
from ..kernels import TighterInducingPointKernel
from ..likelihoods.properties import gaussian_noise
from ..maths.linalg import cholesky
from ..modes import chunks, temporary_mode
from ..predictions import predict
from ..strategies import SolveGPVariationalStrategy, TighterVariationalStrategy
from .plain_modules import PlainKernel, PlainMean, PlainResponse

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

    def __init__(
        self, kernel: PlainKernel, mean: PlainMean, response: PlainResponse, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.kernel, self.mean, self.response = kernel, mean, response
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and variance of f, mean and variance of y."""
        dtype = x.dtype
        x = x.reshape(*x.shape[:-1], self.points.size(-1))  # fails for another number of columns, which would broadcast
        if self.points.dtype == torch.float64:
            x = x.double()  # a module of this precision inside, whatever comes
        projection = self.kernel(x, self.points) @ self.inverse_root  # rows of A, B x M
        mean = self.mean(x) + projection @ self.q_mean
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
        kernel, points, jitter, data = _parts(model)
        mean = PlainMean(getattr(model, "mean_module", None))
        test = torch.cat([points, (points + points.roll(1, 0)) / 2])
        expected = predict(model, test.to(next(model.parameters()).dtype))  # also completes a q(u) never used
        # Exact as far as float64 goes; what is stored is rounded to the precision of the module.
        wide, z, mean = PlainKernel(kernel).double(), points.double(), mean.double()
        matrix = wide(z, z)
        matrix.diagonal().copy_(wide.variance(z) + jitter)  # distances of zero, which rounding does not know
        inverse = torch.linalg.solve_triangular(cholesky(matrix, name="K_ZZ"), torch.eye(len(z)).to(z), upper=False)
        if data is None:
            q = model.variational_strategy.variational_distribution
            covariance = getattr(q, "covariance_matrix", torch.zeros(len(z), len(z))).to(z)
            q_mean, data_jitter = q.mean.to(z), jitter
        else:
            q_mean, covariance, data_jitter = *_collapsed_q(wide, mean, z, inverse, *data), 0.0
    values, vectors = torch.linalg.eigh(covariance)
    tensors = {
        "points": z,
        "inverse_root": inverse.mT,
        "q_mean": q_mean,
        "q_root": vectors * values.clamp_min(0).sqrt(),
        "jitter": torch.tensor(data_jitter).to(z),
    }
    module = ExportedPredictor(wide, mean, PlainResponse(likelihood), tensors)
    module = module.requires_grad_(False).eval()
    f_mean, f_variance, *_ = module.double()(test.double())
    tolerance = 1e-6 if expected.mean.dtype == torch.float64 else 1e-2
    scale = float(wide.variance(z).amax().sqrt())
    for found, wanted, size in ((f_mean, expected.mean, scale), (f_variance, expected.variance, scale**2)):
        if not torch.allclose(found, wanted.double(), rtol=tolerance, atol=tolerance * size):
            raise TypeError(
                "The exported module and predict differ: forward of the model must return MultivariateNormal(mean_module(x), "
                "covar_module(x)), with nothing done to x before."
            )
    dtype = dtype or points.dtype
    rounded = copy.deepcopy(module).to(dtype)
    return rounded if _keeps(rounded(test.to(dtype)), f_mean, f_variance) else module


def _keeps(found: tuple[Tensor, ...], mean: Tensor, variance: Tensor) -> bool:
    """Whether a rounded module predicts the same, by the standard deviations of f."""
    f_mean, f_variance = (part.double() for part in found[:2])
    near_mean = (f_mean - mean).abs() <= _ROUNDING * variance.sqrt()
    near_variance = (f_variance - variance).abs() <= _ROUNDING * variance
    return bool((near_mean & near_variance).all())


def _parts(model: Any) -> tuple[Any, Tensor, float, tuple[Tensor, Tensor, Tensor] | None]:
    """Kernel, inducing points, jitter, and the data of a collapsed model."""
    strategy: Any = getattr(model, "variational_strategy", None)
    kernel = getattr(model, "covar_module", None)
    if isinstance(model, CollapsedGP):
        noise = gaussian_noise(model.likelihood, torch.Size(), model.train_y.shape)
        return kernel, model.inducing_points, model.jitter_val, (model.train_x, model.train_y, noise)
    if isinstance(model, ExactGP) and isinstance(kernel, TighterInducingPointKernel) and kernel.active_dims is None:
        (x,), y = model.train_inputs, model.train_targets
        noise = gaussian_noise(model.likelihood, torch.Size(), y.shape)
        return kernel.base_kernel, kernel.inducing_points, kernel.jitter_val, (x, y, noise)
    is_ours = type(strategy) in (SolveGPVariationalStrategy, TighterVariationalStrategy)
    if is_ours and strategy.inducing_points.dim() == 2:
        return kernel, strategy.all_points(), strategy.jitter_val, None
    if num_outputs := getattr(strategy, "num_tasks", None):
        raise TypeError(
            f"export_predictor takes a model of one output; {type(model).__name__} has {num_outputs}. Use predict_y, or a model "
            "per output."
        )
    raise TypeError(
        "export_predictor takes a model of one output on a strategy or an inducing-point kernel of this package, or a "
        f"CollapsedGP; got {type(model).__name__} with {type(strategy or kernel).__name__}."
    )


def _collapsed_q(
    kernel: PlainKernel, mean: PlainMean, z: Tensor, inverse: Tensor, x: Tensor, y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the optimal q(w), from the data in chunks."""
    precision, linear = torch.eye(len(z)).to(z), torch.zeros(len(z)).to(z)
    seen = ~torch.isnan(y)  # predict has refused missing targets where they mean nothing
    x, y, noise = x[seen], y[seen], noise.to(z).expand(len(y))[seen]
    for rows in chunks(len(y), 4096):
        inputs = x[rows].double()
        projection = inverse @ kernel(inputs, z).mT
        weighted = projection / noise[rows]
        precision, linear = precision + weighted @ projection.mT, linear + weighted @ (y[rows].double() - mean(inputs))
    covariance = torch.cholesky_inverse(cholesky(precision, name="precision of q(u)"))
    return covariance @ linear, covariance
