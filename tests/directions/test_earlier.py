"""Families of directions written for version 0.1.0 work as they did, or are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.ad.run.directions import Directions, Given
from jetplane.directions import (
    Family,
    Gaussian,
    Grown,
    Mixed,
    PerLayer,
    Plane,
    PreviousStep,
    Remembering,
    Resizable,
    Taken,
)
from jetplane.directions.earlier import Earlier, adopted
from jetplane.optim import HyperplaneSearch
from jetplane.solvers import SaddleFree


@dataclass(frozen=True)
class Plain:
    """As Gaussian(2)."""

    def count(self, leaves: Sequence[Tensor]) -> int:
        return 2

    def draw(self, plane: Plane) -> Directions:
        return Gaussian(2).draw(plane)


@dataclass(frozen=True)
class Last:
    """As PreviousStep, by slots and remember."""

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"previous": ()}

    def count(self, leaves: Sequence[Tensor]) -> int:
        return 1

    def draw(self, plane: Plane) -> Directions:
        flat = torch.cat([tensor.flatten() for tensor in plane.memory["previous"]])
        scale = len(flat) ** 0.5 / flat.norm() if flat.any() else 0.0
        return Given([(tensor * scale).unsqueeze(0) for tensor in plane.memory["previous"]])

    def remember(self, memory: Any, deltas: Sequence[Tensor], taken: Taken) -> None:
        assert taken.coefficients.shape == taken.gains.shape
        for tensor, delta in zip(memory["previous"], deltas, strict=True):
            tensor.copy_(delta)


@dataclass(frozen=True)
class Sized:
    """As Grown(Gaussian, start=2, most=4, patience=1), by size, at, half and resized."""

    grown: Grown = Grown(Gaussian, start=2, most=4, patience=1.0)  # noqa: RUF009

    size = (2, 0.0)
    largest = Gaussian(4)

    def count(self, leaves: Sequence[Tensor]) -> int:
        return 2

    def draw(self, plane: Plane) -> Directions:
        return Gaussian(2).draw(plane)

    def at(self, size: tuple[int, float]) -> Family:
        return Gaussian(size[0])

    def half(self, size: tuple[int, float]) -> Family:
        return Gaussian(size[0] // 2)

    def resized(self, size: tuple[int, float], advantage: float) -> tuple[int, float]:
        return self.grown.resized(size, advantage)


def walked(directions: Any) -> tuple[Tensor, dict[str, Any]]:
    """Where a search with these directions is after ten steps, and its state."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
    y = torch.linspace(1, 2, 4, dtype=torch.float64).reshape(2, 2).requires_grad_()
    search = HyperplaneSearch([x, y], 0.7, directions, "exact", SaddleFree())
    for _ in range(10):
        search.step(lambda: (x.exp() - x).sum() + (y.square() * (2 + x[:4].reshape(2, 2).cos())).sum())
    return torch.cat([x.detach(), y.detach().flatten()]), search.state_dict()


@pytest.mark.parametrize(
    ("earlier", "today"),
    [
        (Plain(), Gaussian(2)),
        ([Plain(), Plain()], [Gaussian(2), Gaussian(2)]),
        (PerLayer(Plain()), PerLayer(Gaussian(2))),
        ([Last(), Gaussian(2)], [PreviousStep(), Gaussian(2)]),
        ([PerLayer(Last()), Plain()], [PerLayer(PreviousStep()), Gaussian(2)]),
        (Sized(), Sized().grown),
        ([Last(), Sized()], [PreviousStep(), Sized().grown]),
    ],
    ids=["plain", "mixed", "per-layer", "remembering", "split", "sized", "both"],
)
def test_families_of_0_1_0_are_those_of_today(earlier: Any, today: Any) -> None:
    (one, state), (other, expected) = walked(earlier), walked(today)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert state["param_groups"] == expected["param_groups"]
    assert {n: list(kept) for n, kept in state["state"].items()} == {n: list(k) for n, k in expected["state"].items()}


def test_their_protocols_are_still_known() -> None:
    assert isinstance(Last(), Remembering) and isinstance(Sized(), Resizable)
    assert adopted(Plain()) == Earlier(Plain()) and adopted(Mixed([Plain()])) == Mixed([Plain()])
    assert adopted(Last()).fresh([torch.zeros(3)]) == 0 and adopted(Sized()).fresh([torch.zeros(9)]) == 4


def test_a_subclass_with_a_draw_of_0_1_0_is_used() -> None:
    class Twice(Gaussian):
        def draw(self, plane: Plane) -> Directions:  # type: ignore[override]
            return Gaussian(self.k).draw(plane._replace(step=0))

    leaves = [torch.zeros(5)]
    rows = [adopted(Twice(2)).draw(Plane(1, step, 0, leaves, list)).rows(0, leaves[0], 0, 2) for step in (0, 7)]
    assert torch.equal(*rows)


def test_a_mixture_of_both_protocols_is_refused() -> None:
    class Noting(PreviousStep):
        def remember(self, memory: Any, deltas: Any, taken: Any) -> None: ...

    class Drawing(PreviousStep):
        def draw(self, plane: Plane) -> Directions:  # type: ignore[override]
            return Gaussian(1).draw(plane)

    for kind in (Noting, Drawing):
        message = (
            f"{kind.__name__} has init as well as the draw(plane) or remember of version 0.1.0; expected "
            "draw(plane, learnt) and update(learnt, taken)."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            HyperplaneSearch([torch.zeros(3, requires_grad=True)], 1.0, kind(), "exact", SaddleFree())
