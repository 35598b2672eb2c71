"""Directions that are given: coordinates, the gradient, fixed rows."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from jetplane.directions import (
    Coordinate,
    Fixed,
    Gradient,
    Plane,
)
from test_directions import all_rows, leaves, plane


def test_coordinates_are_the_identity() -> None:
    made = plane(leaves())
    assert Coordinate().count(made.leaves) == 23
    assert torch.equal(all_rows(Coordinate(), made), torch.eye(23, dtype=torch.float64))


def test_gradient_asks_once() -> None:
    x, calls = leaves(), []

    def gradient() -> list[Tensor]:
        calls.append(1)
        return [2 * leaf for leaf in x]

    drawn = Gradient().draw(Plane(0, 0, 0, x, gradient))
    for position, leaf in enumerate(x):
        for _ in range(2):
            assert torch.equal(drawn.rows(position, leaf, 0, 1), 2 * leaf[None])
    assert drawn.k == Gradient().count(x) == len(calls) == 1


def test_fixed_rows_are_given_back() -> None:
    made = plane(leaves())
    rows = [torch.randn(2, *leaf.shape, dtype=torch.float64) for leaf in made.leaves]
    assert Fixed(rows).count(made.leaves) == 2
    assert torch.equal(all_rows(Fixed(rows), made), torch.cat([row.reshape(2, -1) for row in rows], dim=1))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "the fixed directions are Tensor; expected a list of tensors (K, *S)"),
        (3, TypeError, "the fixed directions are int; expected a list of tensors (K, *S), one per parameter."),
        ([], ValueError, "the fixed directions are an empty list; expected one tensor (K, *S) per parameter."),
        ([[1.0]], TypeError, "the fixed directions for parameter 0 are list; expected a tensor."),
        ([torch.ones(())], ValueError, "parameter 0 have shape (); expected (K, *S) with K >= 1."),
        ([torch.ones(0, 3)], ValueError, "parameter 0 have shape (0, 3); expected (K, *S) with K >= 1."),
        ([torch.ones(2, 3), torch.ones(1)], ValueError, "parameter 1 have K = 1; expected 2 as for parameter 0."),
    ],
)
def test_bad_fixed_directions(rows: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Fixed(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2, 3)] * 2, "there are fixed directions for 2 parameters; expected 1."),
        ([torch.ones(2, 4)], "the fixed directions for parameter 0 have shape (2, 4); expected (2, 3)."),
        ([torch.ones(2, 3, dtype=torch.float64)], "have dtype torch.float64; expected torch.float32."),
        ([torch.ones(2, 3, device="meta")], "are on meta; expected cpu."),
    ],
)
def test_fixed_directions_that_do_not_fit(rows: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Fixed(rows).draw(plane([torch.zeros(3)]))
