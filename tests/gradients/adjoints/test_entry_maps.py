"""Which entries of an argument are read: those that have a derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint_cases import aten
from exactness import normal
from jetplane.gradients.adjoints import adjoint as table

X = (3, 4, 5)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.tanh.default, ()),
    (aten.select.int, (1, -1)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.slice.Tensor, (2, 0, 9, 2)),
    (aten.transpose.int, (0, 2)),
    (aten.permute.default, ([2, 0, 1],)),
    (aten.view.default, ([12, 5],)),
    (aten.unsqueeze.default, (1,)),
    (aten._softmax.default, (1, False)),
    (aten.native_layer_norm.default, ([5], None, None, 1e-5)),
]


def read(func: Any, x: Tensor, settings: tuple[Any, ...], wanted: Tensor) -> Tensor:
    """Where the wanted entries of the result have a derivative by the argument, by autograd."""
    leaf = x.clone().requires_grad_()
    out = func(leaf, *settings)
    out = out[0] if isinstance(out, tuple) else out
    weights = torch.where(wanted, normal(*out.shape).abs() + 0.5, 0.0)
    (found,) = torch.autograd.grad((out * weights).sum(), leaf)
    return found != 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("func", "settings"), CASES, ids=[f"{f} {s}" for f, s in CASES])
def test_entries_with_a_derivative_are_read_and_no_others(func: Any, settings: tuple[Any, ...], whole: bool) -> None:
    x = normal(*X)
    out = func(x, *settings)
    made = (out[0] if isinstance(out, tuple) else out).shape
    wanted = torch.rand(made) < (2.0 if whole else 0.15)
    live = table.lookup(func).live
    found = live(wanted, made, x.shape, (0,), (x, *settings))
    assert torch.equal(found.expand(x.shape), read(func, x, settings, wanted))


def test_what_is_broadcast_may_be_read_anywhere() -> None:
    live = table.lookup(aten.mul.Tensor).live
    assert live(torch.ones(4, 3, dtype=torch.bool), torch.Size([4, 3]), torch.Size([3]), (1,), ()) is None
