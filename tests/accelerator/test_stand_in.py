"""The stand-in itself: what it refuses, what it reports, and that its numbers are those of the CPU."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.accelerator.device import DEVICES, waits

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here.mT,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here.add_(there),
        lambda here, there: torch.linalg.solve_triangular(here[:, :2], there[:, :2], upper=False),
        lambda here, there: torch.where(here > 0, here, there),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "dev:1"])
def test_tensors_of_two_devices_do_not_mix(mix, other):
    with pytest.raises(RuntimeError, match="two devices"):
        mix(torch.ones(2, 3, device="dev:0"), torch.ones(2, 3, device=other))


def test_scalars_of_the_cpu_mix_but_are_not_written_to():
    x = torch.ones(3, device="dev:1")
    assert (x * torch.tensor(2.0)).device == torch.device("dev:1")
    with pytest.raises(RuntimeError, match="device"):
        torch.tensor(1.0).add_(x.sum())


def test_a_generator_draws_on_its_own_device_only():
    own = torch.Generator("dev:1").manual_seed(5)
    expected = torch.randn(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.randn(4, generator=own, device="dev:1").cpu(), expected)
    for other in (torch.Generator(), torch.Generator("dev:0")):
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(4, generator=other, device="dev:1")
    with pytest.raises(RuntimeError, match="generator"):
        torch.randperm(4, generator=own)


def test_global_draws_follow_the_global_seed():
    torch.manual_seed(3)
    first = [torch.rand(2, device=device).cpu() for device in DEVICES]
    torch.manual_seed(3)
    assert all(torch.equal(value, torch.rand(2, device=d).cpu()) for value, d in zip(first, DEVICES, strict=True))


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda x: x.sum().item(), ["item"]),
        (lambda x: bool((x > 0).all()), ["item"]),
        (lambda x: x.cpu(), ["copy to the CPU"]),
        (lambda x: x.tolist(), ["copy to the CPU"]),
        (lambda x: x[x > 0], ["nonzero"]),
        (lambda x: torch.unique(x), ["_unique2"]),
        (lambda x: torch.equal(x, x + 1), ["equal"]),
        (lambda x: torch.tensor(1.0, device=x.device), ["copy to the device"]),
        (lambda x: torch.linalg.cholesky(x[:, None] * x + 5 * torch.eye(3, device=x.device)), ["item"]),
        (lambda x: x.masked_fill(x > 0, 0.0), []),
        (lambda x: x.new_full((3,), 2.0) + torch.eye(3, dtype=x.dtype, device=x.device), []),
        (lambda x: torch.linalg.cholesky_ex(torch.eye(3, device=x.device)), []),
        (lambda x: x.to("dev:0"), []),
    ],
)
def test_what_the_host_waits_for_is_reported_with_its_line(read, expected):
    x = torch.tensor([1.0, -1.0, 2.0], device="dev:1")
    with waits() as found:
        read(x)
    assert [wait.what for wait in found] == expected
    assert all(wait.file == "accelerator/test_stand_in.py" and wait.line > 0 for wait in found)


def test_nan_factorises_without_complaint_as_on_cuda():
    matrix = torch.eye(3, device="dev").repeat(2, 1, 1)
    matrix[1, 1, 1] = torch.nan
    factor, info = torch.linalg.cholesky_ex(matrix)
    assert not info.any()
    assert torch.equal(factor.isnan().flatten(1).any(-1).cpu(), torch.tensor([False, True]))
    factor, info = torch.linalg.cholesky_ex(-torch.eye(3, device="dev"))
    assert info.item() == 1


def test_gradients_dense_and_sparse_are_those_of_the_cpu():
    def gradients(device):
        table = torch.linspace(-1, 1, 12).view(4, 3).to(device).requires_grad_()
        rows = torch.tensor([2, 0, 2], device=device)
        chosen = torch.nn.functional.embedding(rows, table, sparse=True)
        (sparse,) = torch.autograd.grad(chosen.exp().sum(), table)
        (dense,) = torch.autograd.grad(torch.linalg.slogdet(table.mT @ table.exp())[1], table)
        assert sparse.is_sparse
        assert sparse.device == dense.device == torch.device(device)
        return sparse.coalesce().values().cpu(), sparse.to_dense().cpu(), dense.cpu()

    expected = gradients("cpu")
    for device in DEVICES:
        torch.testing.assert_close(gradients(device), expected, rtol=0, atol=0)


def test_tensors_and_optimizers_survive_copies_and_files():
    parameter = torch.nn.Parameter(torch.arange(3.0, device="dev:1"))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"value": parameter.detach(), "optimizer": optimizer.state_dict()}, file)
    for target in ("dev:1", "dev:0", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=target, weights_only=True)
        assert loaded["value"].device == torch.device(target)
        assert torch.equal(loaded["value"].cpu(), parameter.detach().cpu())
    assert copy.deepcopy(parameter).device == torch.device("dev:1")
