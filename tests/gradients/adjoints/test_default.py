"""What has no record is differentiated by itself: exact, counted by the guard, refused where it is strict."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from exactness import B, check_exact, normal
from jetplane.gradients.adjoints import adjoint as table
from jetplane.gradients.adjoints.default import vjp
from jetplane.gradients.program.done import Done

aten = torch.ops.aten


class Crossed(nn.Module):
    """A layer whose operation, a cross product, has a rule and no adjoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.turn = nn.Linear(4, 3), nn.Linear(3, 2), nn.Parameter(torch.randn(B, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.linalg.cross(self.a(x).tanh(), self.turn).sin()).square().sum(1)


def test_an_operation_without_a_record_is_differentiated_by_itself() -> None:
    torch.manual_seed(0)
    model = Crossed().double()
    assert table.lookup(aten.linalg_cross.default) is table.UNKNOWN
    assert len(check_exact(model, model, normal(B, 4))) == 2


def test_the_guard_counts_defaults() -> None:
    model, x = Crossed(), torch.randn(B, 4)
    with jp.forward_only() as outer:
        with jp.forward_only() as inner:
            jp.forward_gradient(model, model.parameters(), x)
        jp.forward_gradient(model, model.parameters(), x)
    name = "aten.linalg_cross.default"
    assert dict(inner.defaults) == {name: 1} and dict(outer.defaults) == {name: 2}
    assert str(outer) == f"differentiated by autograd, each by itself: {name} 2 times"
    with jp.forward_only() as none:
        jp.forward_gradient(lambda x: model.a(x).sum(1), model.a.parameters(), x)
    assert not none.defaults and str(none) == "no operation was differentiated by autograd"


REFUSED = (
    r"aten.linalg_cross.default.*has no adjoint, so autograd would differentiate it, by itself, inside "
    r"jetplane.forward_only\(strict=True\); expected jetplane.register.adjoint\(torch.ops.aten.linalg_cross.default"
)


def test_strict_refuses_defaults_whether_or_not_the_program_is_known() -> None:
    model, x = Crossed(), torch.randn(B, 4)
    estimate = jp.ForwardGradient(model.parameters())
    with jp.forward_only(strict=True), pytest.raises(jp.BackwardPass, match=REFUSED):
        estimate(model, x)
    assert all(p.grad is None for p in model.parameters())
    estimate(model, x)
    with jp.forward_only(strict=True), jp.forward_only(), pytest.raises(jp.BackwardPass, match=REFUSED):
        estimate(model, x)
    with pytest.raises(jp.BackwardPass, match=REFUSED):
        jp.forward_only(strict=True)(lambda: estimate(model, x))()
    with jp.forward_only(strict=True):
        jp.forward_gradient(lambda x: model.a(x).sum(1), model.a.parameters(), x)


def test_strict_holds_in_threads_that_are_made_inside() -> None:
    model, x, found = Crossed(), torch.randn(B, 4), []

    def work() -> None:
        try:
            jp.forward_gradient(model, model.parameters(), x)
        except jp.BackwardPass as error:
            found.append(str(error))

    with jp.forward_only(strict=True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 1 and "has no adjoint" in found[0]


def test_the_default_keeps_no_graph() -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(2, 3)
    found = vjp(torch.ones(2), Done(aten.mv.default, (x, w), {}, (x @ w).detach()), (1,))
    assert not found.requires_grad and w.grad is None and w.is_leaf
