"""What tests of captured and compiled programs share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from jetplane.ad import _torch

F64 = torch.float64


class Captures:
    """How many graphs were captured."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "jetplane")
        self._caplog = caplog

    @property
    def count(self) -> int:
        return sum(record.getMessage().startswith("captured graph") for record in self._caplog.records)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64, requires_grad=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def batches(model: str, count: int = 3, size: int = 4) -> tuple[Tensor, Tensor]:
    shape = (2, 12, 12) if model == "cnn" else (5,)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(count, size, *shape, dtype=F64, generator=made)
    return x, torch.randint(3, (count, size), generator=made)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def fallen_back(step: FunctionType, match: str) -> None:
    """Run it: there is one warning, with a line of the file that took the step."""
    with pytest.warns(UserWarning, match=match) as caught:
        step()
    (one,) = [w for w in caught if "is run as it is" in str(w.message)]
    assert one.filename == step.__code__.co_filename


def flat(result: Any) -> list[Tensor]:
    parts = (result.loss, result.slope, result.curvature) if isinstance(result, jp.Quadratic) else result
    return _torch.pytree.tree_leaves(list(parts) if isinstance(parts, tuple) else vars(parts))


either = pytest.mark.parametrize(
    "compiler", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["traced", "compiled"]
)
