"""Operations over rows: the lift that the families use, against the loop over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import assert_close, assert_quadratic, randn
from jetplane.ad.algebra.row_lifts import looped, over_rows
from jetplane.testing.oracle import double_backward

AT = torch.tensor([0, 2])
DIRECTIONS = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "program",
    [
        lambda s: torch.zeros(3, dtype=s.dtype).index_fill(0, AT, s * s),
        lambda s: torch.zeros(3, dtype=s.dtype).index_fill_(0, AT, s * s),
        lambda s: (torch.ones(3, dtype=s.dtype) * s).index_fill(0, AT, s * s),
        lambda s: (s * s).roll(1),
        lambda s: (s * s).flip(0),
        lambda s: (s * s).index_select(0, torch.tensor([0])),
        lambda s: torch.as_strided_copy(s * s, (2,), (0,), 0),
        lambda s: torch.zeros(3, dtype=s.dtype).index_copy(0, torch.tensor(1), s * s),
    ],
    ids=["index_fill", "index_fill_", "tracked self", "roll", "flip", "index_select", "as_strided", "index_copy"],
)
def test_rows_of_a_number_stay_in_their_order(program: Callable[[Tensor], Tensor]) -> None:
    s = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    with jp.perturb([s], [DIRECTIONS]) as jets:
        loss = program(s).sum()
    model = jets.quadratic(loss)
    (slope,) = torch.autograd.grad(program(s).sum(), s, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, s)
    assert_close(model.slope, slope.detach() * DIRECTIONS)
    assert_close(model.curvature, curvature * torch.outer(DIRECTIONS, DIRECTIONS))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_a_lift_is_the_loop(count: int, shape: tuple[int, ...]) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.roll(1) * b, a + b

    rows = randn(count, *shape), randn(count, *shape)
    for ours, theirs in zip(over_rows(function, *rows), looped(function, *rows), strict=True):
        assert_close(ours, theirs)


def test_a_slice_that_ends_behind_the_last_entry() -> None:
    x, v = randn(2, 1).requires_grad_(), randn(3, 2, 1)

    def program() -> Tensor:
        return (torch.slice_scatter(torch.zeros_like(x), x * x, 0, 0, 20) ** 2).sum()

    with jp.perturb([x], [v]) as jets:
        loss = program()
    assert_quadratic(jets.quadratic(loss), double_backward(program, [x], [v]))
