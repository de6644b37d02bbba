"""Kernels that turn an ExactGP into a collapsed sparse GP."""

from .tighter_inducing_point_kernel import TighterInducingPointKernel

__all__ = ["TighterInducingPointKernel"]
