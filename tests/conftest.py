"""Fixtures shared by all tests. The default dtype stays float32: tests say float64 where they mean it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """No test may leave a mode active behind it."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
