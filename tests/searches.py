"""A small network with its batch and losses, and what tests of searches compare."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jetplane.curvature import GaussNewton
from jetplane.optim import HyperplaneSearch
from jetplane.solvers import LevenbergMarquardt

F64 = torch.float64


def network(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(dtype: torch.dtype = F64, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (count,), generator=generator)


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_memory(a: HyperplaneSearch, b: HyperplaneSearch, tolerance: float) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, kept in ours["state"].items():
        assert kept.keys() == theirs["state"][number].keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, theirs["state"][number][name], rtol=tolerance, atol=tolerance)
    for one, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert one == other


def search(model: nn.Module, directions: Any, **options: Any) -> HyperplaneSearch:
    parts = {"curvature": GaussNewton(), "solver": LevenbergMarquardt(), "lr": 1.0} | options
    return HyperplaneSearch(model.parameters(), directions=directions, **parts)


def steps(optimizer: HyperplaneSearch, model: nn.Module, count: int) -> None:
    x, y = batch(next(model.parameters()).dtype)
    for _ in range(count):
        optimizer.step(loss_of(model), x, y)
