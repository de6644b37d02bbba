"""What several test files share: the five forms of q(u), a problem in float64, a model against itself, sizes of tensors."""

from __future__ import annotations

import torch
from gpytorch import variational
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tools import dense

Q_FORMS = {
    "cholesky": variational.CholeskyVariationalDistribution,
    "mean_field": variational.MeanFieldVariationalDistribution,
    "delta": variational.DeltaVariationalDistribution,
    "natural": variational.NaturalVariationalDistribution,
    "tril_natural": variational.TrilNaturalVariationalDistribution,
}


def double_problem(*args, **kwargs) -> dense.Problem:
    """:func:`tests.tools.dense.problem` in float64, for use at the top of a file where no fixture has run."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return dense.problem(*args, **kwargs)
    finally:
        torch.set_default_dtype(dtype)


def randomize_q(model, seed: int = 0):
    """Give q(u) of any form random parameters, mark it initialised and return the model."""
    generator = torch.Generator().manual_seed(seed)
    strategy = model.variational_strategy
    for name, parameter in strategy._variational_distribution.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name == "natural_mat":
            value = -0.5 * (torch.eye(noise.size(-1)) + 0.1 * noise @ noise.mT)
        elif name in ("chol_variational_covar", "natural_tril_mat"):
            value = (0.2 * noise).tril(-1) + torch.diag_embed(0.5 + noise.diagonal(dim1=-1, dim2=-2).abs())
        elif name == "_variational_stddev":
            value = 0.3 + noise.abs()
        else:
            value = noise
        parameter.data.copy_(value)
    strategy.variational_params_initialized.fill_(1)
    return model


def for_last_term(last_term: str, **given) -> dict:
    """Arguments of ``predict`` that only a last term takes."""
    return {} if last_term == "drop" else given


def state(model) -> dict:
    """A copy of the state_dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_state(model, before: dict) -> None:
    """The model's state_dict is still what it was."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


class LargestOutput(TorchDispatchMode):
    """Size of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(value):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return out
