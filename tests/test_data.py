"""Rows of tensors, arrays and memory maps."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch

from tighter_gp.data import Rows, as_tensor, check_kind, first_parameter, move, num_rows, reference, row_dim

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


def test_a_memory_map_is_read_in_parts(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    rows = Rows(np.load(tmp_path / "x.npy", mmap_mode="r"), LIKE, is_input=True)
    assert torch.equal(rows[torch.tensor([9, 1])], torch.tensor([[18.0, 19.0], [2.0, 3.0]], dtype=torch.float32))


def test_inputs_of_one_dimension_are_a_column():
    for values in (torch.arange(5.0, dtype=torch.float32), np.arange(5)):
        rows = Rows(values, LIKE, is_input=True)
        assert len(rows) == 5
        assert rows[1:3].shape == (2, 1)


def test_targets_keep_their_kind():
    assert Rows(np.array([1, 2]), LIKE)[:].dtype == torch.int64
    assert Rows(np.array([1.0, 2.0]), LIKE)[:].dtype == torch.float32
    double = torch.ones(3, dtype=torch.float64)
    assert Rows(double, LIKE)[:].data_ptr() == double.data_ptr()


def test_what_is_no_array_of_numbers_is_refused():
    with pytest.raises(TypeError, match="x must be a tensor or a numpy array; got list"):
        Rows([1, 2], LIKE)
    with pytest.raises(TypeError, match="y must hold real numbers; got <U1"):
        Rows(np.array(["a"]), LIKE, name="y")
    with pytest.raises(ValueError, match="x is on meta, the model is on cpu"):
        Rows(torch.ones(3, device="meta"), LIKE)


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


class Frame:
    """As pandas has it."""

    shape = (3,)

    def to_numpy(self):
        return np.ones(3)


@pytest.mark.parametrize("check", [lambda x: Rows(x, LIKE), lambda x: as_tensor(x, LIKE, "x"), num_rows])
def test_a_data_frame_is_refused_with_the_way_out(check):
    with pytest.raises(TypeError, match=r"x must be a tensor or a numpy array; got Frame\. Pass x\.to_numpy\(\)\."):
        check(Frame())


@pytest.mark.parametrize("check", [lambda x: Rows(x, LIKE), lambda x: as_tensor(x, LIKE, "x"), num_rows])
@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()])
def test_complex_numbers_are_refused(check, convert):
    with pytest.raises(TypeError, match=r"x must hold real numbers; got (torch\.)?complex64\."):
        check(convert(torch.ones(3, dtype=torch.complex64)))


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


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()])
def test_noise_is_not_negative(convert):
    check_kind("noise", convert(torch.tensor([0.0, 1.0, torch.nan])))
    with pytest.raises(ValueError, match=r"noise= must hold variances; 2 of 3 values are negative"):
        check_kind("noise", convert(torch.tensor([-1.0, 1.0, -2.0])))
