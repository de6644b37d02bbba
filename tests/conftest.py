from __future__ import annotations

import pytest
import torch

from tests.accelerator import device as stand_in


@pytest.fixture(autouse=True)
def _double_and_seeded():
    """Dense references are in float64; a test of float32 says so itself."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(config, items):
    """Tests for an accelerator run on a GPU if there is one, else on the stand-in.

    It has to be there before the first backward pass, which starts the threads of all devices.
    """
    needs = lambda item: (
        item.get_closest_marker("accelerator") or (item.get_closest_marker("cuda") and not torch.cuda.is_available())
    )
    found = [item for item in items if needs(item)]
    if not found or config.option.collectonly:
        return
    reason = stand_in.missing()
    for item in found if reason is not None else ():
        item.add_marker(pytest.mark.skip(reason=reason))
    if reason is None:
        stand_in.load()


@pytest.fixture
def accelerator() -> str:
    """A device to test on: CUDA, or the stand-in for it."""
    return "cuda" if torch.cuda.is_available() else "dev"
