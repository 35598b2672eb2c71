"""Tensors in a leaf's memory that were made before the pass: what backprop takes for a constant is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp

F64 = torch.float64


def _no_grad_view(w: Tensor) -> Tensor:
    with torch.no_grad():
        return w[:]


HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view of data": lambda w: w.data.t().t(),
    "without grad": _no_grad_view,
    "part": lambda w: w.detach()[:2],
    "view": lambda w: w.view(3, 3),  # which requires grad, and varies
}


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 3, dtype=F64))


def _uses(w: Tensor, held: Tensor) -> Tensor:
    """It as it is, as a view that is made now, and written to nothing of its own."""
    return ((w.t().sin() @ w)[: len(held)] * held.t()[:3].t().exp()).sum() + (held * held.t()[0, 0]).sum()


@pytest.mark.parametrize("name", HELD)
def test_what_was_detached_before_the_pass_is_a_constant(name: str) -> None:
    w = _weight()
    held = HELD[name](w)
    direction = torch.randn(2, 3, 3, dtype=F64)
    with jp.perturb([w], [direction]) as jets:
        plane = jets.quadratic(_uses(w, held))
    (gradient,) = torch.autograd.grad(_uses(w, held), w, create_graph=True)
    torch.testing.assert_close(plane.slope, torch.einsum("kij,ij->k", direction, gradient))
    rows = [torch.autograd.grad((gradient * d).sum(), w, retain_graph=True)[0] for d in direction]
    torch.testing.assert_close(plane.curvature, torch.einsum("kij,lij->kl", direction, torch.stack(rows)))


def test_of_a_leaf_that_does_not_require_grad_all_that_shares_its_memory_varies() -> None:
    w = torch.randn(3, dtype=F64)
    held = w.detach()
    with jp.perturb([w], [torch.eye(3, dtype=F64)]) as jets:
        plane = jets.quadratic((w * held).sum())
    torch.testing.assert_close(plane.slope, 2 * w)


def test_a_write_to_a_held_constant_moves_the_value_alone() -> None:
    w = _weight()
    held = w.detach()
    with jp.perturb([w], [torch.eye(9, dtype=F64).view(9, 3, 3)]) as jets:
        held.mul_(2)  # as an average of weights is kept
        plane = jets.quadratic((w * held.sin()).sum())
    torch.testing.assert_close(plane.slope.view(3, 3), w.detach().sin())


def _inner_gradient(w: Tensor) -> Tensor:
    with torch.enable_grad():
        x = torch.ones(3, dtype=F64, requires_grad=True)
        (slope,) = torch.autograd.grad((w.t() @ x).sin().sum(), x, create_graph=True)
    return slope.square().sum()


def _recurrent(w: Tensor) -> Tensor:
    h = torch.ones(1, 1, 3, dtype=F64)
    return torch.gru(h, h[0][None], [w.repeat(3, 1), w.repeat(3, 1)], False, 1, 0.0, False, False, False)[0].sum()


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "views of views": lambda w: (w.t()[1:].reshape(-1)[::2] * w.view(-1)[:3].unsqueeze(0).expand(2, 3)[1]).sum(),
    "split": lambda w: torch.stack([part.sin().sum() for part in w.unbind(1)]).prod(),
    "inside torch.func.grad": lambda w: torch.func.grad(lambda x: (w.t() @ x).sin().sum())(w[0].exp()).square().sum(),
    "inside vmap": lambda w: torch.func.vmap(lambda x: (w.t() @ x).sin().sum())(torch.eye(3, dtype=F64)).square().sum(),
    "a derivative inside": _inner_gradient,
    "a checkpoint": lambda w: torch.utils.checkpoint.checkpoint(
        lambda x: (x.t() @ x).sin(), w, use_reentrant=False
    ).sum(),
    "a recurrent layer": _recurrent,
    "written to a buffer": lambda w: torch.zeros(3, 3, dtype=F64).copy_(w.t()).sin_().sum(),
}


@pytest.mark.parametrize("name", READS)
def test_with_a_constant_in_its_memory_a_leaf_varies_as_ever(name: str) -> None:
    w = _weight()
    direction = torch.randn(2, 3, 3, dtype=F64)

    def plane() -> jp.Quadratic:
        with jp.perturb([w], [direction]) as jets:
            return jets.quadratic(READS[name](w))

    alone = plane()
    held = w.detach()
    shared = plane()
    assert held is not None
    assert alone.slope.abs().min() > 0
    torch.testing.assert_close(shared.slope, alone.slope)
    torch.testing.assert_close(shared.curvature, alone.curvature)
