"""What a natural step must not do: change its arguments, take memory it does not need, look at q(u) twice."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tighter_gp
from tests.training.problems import data, problem
from tighter_gp.maths.natural import NaturalParameters, Sums, natural_step
from tighter_gp.training import NaturalGradients

SIZE = 37


class Watch(TorchDispatchMode):
    """Names of the operations, and how many took memory of their own for a matrix in float64."""

    def __init__(self):
        super().__init__()
        self.names, self.num_matrices = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.__name__)
        if isinstance(result, torch.Tensor) and result.shape == (SIZE, SIZE) and result.dtype == torch.float64:
            known = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
            self.num_matrices += result.untyped_storage().data_ptr() not in known
        return result


def numbers(dtype):
    torch.manual_seed(0)
    root = torch.randn(SIZE, 2 * SIZE, dtype=torch.float64)
    gram = torch.randn(SIZE, 50, dtype=torch.float64)
    q = NaturalParameters(root @ root.mT, torch.randn(SIZE, dtype=torch.float64))
    sums = Sums((gram @ gram.mT).to(dtype), torch.randn(SIZE, dtype=torch.float64).to(dtype))
    return q, sums, torch.randn(SIZE, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.3, 1.0, torch.tensor([0.3], dtype=torch.float64)], ids=str)
def test_a_step_takes_memory_for_one_matrix_and_leaves_its_arguments_alone(dtype, size):
    arguments, known = numbers(dtype), numbers(dtype)
    with Watch() as watch:
        moved = natural_step(*arguments, size)
    assert watch.num_matrices == 1
    torch.testing.assert_close(arguments, known, rtol=0, atol=0)
    precision, linear, gram, slope, mean = (tensor.double() for tensor in (*known[0], *known[1], known[2]))
    expected = (1 - size) * precision + size * (torch.eye(SIZE, dtype=torch.float64) + gram)
    torch.testing.assert_close(moved.precision, expected, rtol=1e-14, atol=1e-13)
    torch.testing.assert_close(moved.linear, (1 - size) * linear + size * (slope + gram @ mean), rtol=1e-13, atol=1e-13)


def test_q_is_compared_with_what_was_written_once_per_step():
    x, y = data()
    model, likelihood = problem()
    mll = tighter_gp.TighterELBO(likelihood, model.train(), num_data=len(y))
    natural = NaturalGradients(model, num_data=len(y))
    inside = {id(parameter) for parameter in natural.parameters}
    rest = [parameter for parameter in mll.parameters() if id(parameter) not in inside]
    for _ in range(2):
        with Watch() as watch:
            natural.train_step(lambda: -mll(model(x), y), rest, 0.1, natural.gaussian_targets(mll, y))
    assert watch.names.count("equal.default") == 2  # the mean and the root
    assert watch.names.count("linalg_cholesky_ex.default") == 2  # of K_ZZ and of P
