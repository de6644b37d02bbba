from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _double_and_seeded():
    """Dense references are in float64; a test of float32 says so itself."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
