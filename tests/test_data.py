"""Rows of tensors, arrays and memory maps."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch

from tighter_gp.data import Rows, first_parameter, move, num_rows, reference, row_dim

LIKE = torch.zeros((), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<f2", "u1", ">u2", "<i4", "?", "<f16"])
def test_arrays_of_any_kind_give_what_a_tensor_gives(kind):
    values = np.arange(12).reshape(6, 2).astype(kind)
    values.setflags(write=False)
    rows, expected = Rows(values, LIKE, is_input=True), torch.tensor(values.astype(np.float32))
    assert len(rows) == 6
    for place in (slice(1, 4), torch.tensor([5, 0, 3])):
        assert torch.equal(rows[place], expected[place])
        assert rows[place].dtype == torch.float32


def test_targets_keep_their_kind():
    assert Rows(np.array([1, 2]), LIKE)[:].dtype == torch.int64
    assert Rows(np.array([1.0, 2.0]), LIKE)[:].dtype == torch.float32
    double = torch.ones(3, dtype=torch.float64)
    assert Rows(double, LIKE)[:].data_ptr() == double.data_ptr()


def test_which_dimension_counts_the_points():
    assert [row_dim(shape, 5) for shape in ((5,), (5, 2), (3, 5), (3, 5, 2), (4,), ())] == [0, 0, 1, 1, None, None]
    assert row_dim((5, 5), 5, is_batch=True) == 1
    assert num_rows(torch.zeros(4, 5, 2)) == 5


def test_a_fingerprint_tells_data_apart_but_not_their_container():
    x = torch.randn(9000, 2, generator=torch.Generator().manual_seed(0))
    same, other = Rows(x.numpy(), x, is_input=True), x.clone()
    other[2, 0] += 1e-3  # of the sample
    assert Rows(x, x, is_input=True).fingerprint() == same.fingerprint()
    assert Rows(other, x, is_input=True).fingerprint() != same.fingerprint()
    assert Rows(x[:-1], x, is_input=True).fingerprint() != same.fingerprint()


def test_batches_go_to_cuda_through_pinned_memory(monkeypatch):
    calls = []
    monkeypatch.setattr("tighter_gp.data._has_pinned_memory", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: calls.append((args, kwargs)) or self)
    move(torch.ones(2), torch.device("cuda", 0))
    assert calls == ["pin", ((torch.device("cuda", 0),), {"non_blocking": True})]
    calls.clear()
    move(torch.ones(2), torch.device("cpu"))
    assert calls == [((torch.device("cpu"),), {})]


def test_a_model_without_parameters_is_named():
    with pytest.raises(ValueError, match="no parameters"):
        first_parameter(torch.nn.ReLU())


@pytest.mark.parametrize("function", [first_parameter, reference])
def test_a_likelihood_comes_after_its_model(function):
    model, likelihood = torch.nn.Linear(2, 1), gpytorch.likelihoods.GaussianLikelihood()
    assert function(model, likelihood) is model.weight
    for wrong, got in (
        ((model, torch.ones(3)), "Linear and Tensor"),
        ((likelihood, model), "GaussianLikelihood and Linear"),
    ):
        with pytest.raises(TypeError, match=f"first argument is the model, the second its likelihood; got {got}"):
            function(*wrong)
