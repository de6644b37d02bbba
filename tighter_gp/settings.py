"""Switches of this package, in the manner of :mod:`gpytorch.settings`."""

from __future__ import annotations

from gpytorch.settings import _feature_flag


class float32_factor(_feature_flag):
    r"""Factorise :math:`K_{ZZ}` of a float32 model in float32. Off by default.

    Consumer GPUs compute float64 at 1/32 or 1/64 of the rate of float32. Where the factorisation fails, or rounding
    exceeds the jitter, float64 is used as without this switch.

    Example:
        >>> with tighter_gp.settings.float32_factor():
        ...     loss = -tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y))(model(train_x), train_y)
    """

    _default = False
