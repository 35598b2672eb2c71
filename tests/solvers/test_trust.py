"""The trust region."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import F64
from jetplane.solvers import (
    Status,
    TrustRegion,
)
from test_base import quadratic, value

PLANES = {
    "bowl": ([1.0, -2.0], [[3.0, 0.5], [0.5, 1.0]]),
    "saddle": ([1.0, -2.0], [[3.0, 0.5], [0.5, -1.0]]),
    "hill": ([1.0, -2.0], [[-3.0, 0.5], [0.5, -1.0]]),
    "valley": ([1.0, -2.0], [[1.0, 2.0], [2.0, 4.0]]),
    "plain": ([1.0, -2.0], [[0.0, 0.0], [0.0, 0.0]]),
    "hard": ([1.0, 0.0], [[2.0, 0.0], [0.0, -1.0]]),
    "hard, turned": ([1.0, 1.0], [[0.5, 1.5], [1.5, 0.5]]),
    "almost hard": ([1.0, 1e-9], [[2.0, 0.0], [0.0, -1.0]]),
    "hard, round": ([0.0, 1e-300], [[-2.0, 0.0], [0.0, -2.0]]),
}


def search(objective: Callable[[Tensor], Tensor], radius: float) -> float:
    """The least value in a disc: a polar grid, refined around its best points."""
    best = math.inf
    angles, lengths = (torch.linspace(a, b, 721, dtype=F64) for a, b in ((0, 2 * math.pi), (0, radius)))
    for _ in range(5):
        grid = torch.stack([lengths[:, None] * angles.cos(), lengths[:, None] * angles.sin()], dim=-1)
        values = objective(grid)
        row, column = divmod(int(values.argmin()), len(angles))
        best = min(best, float(values.min()))
        angle, length = float(angles[column]), float(lengths[row])
        turn, width = (4 * float(x[1] - x[0]) for x in (angles, lengths))
        angles = torch.linspace(angle - turn, angle + turn, 721, dtype=F64)
        lengths = torch.linspace(max(0.0, length - width), min(radius, length + width), 721, dtype=F64)
    return best


@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", PLANES)
def test_trust_region_finds_the_least_value_in_the_disc(name: str, radius: float) -> None:
    model = quadratic(*PLANES[name])
    step = TrustRegion(radius)(model)
    assert step.status is Status.OK and float(step.coefficients.norm()) <= radius * (1 + 1e-12)
    expected = search(lambda c: value(model, c), radius)
    torch.testing.assert_close(-float(step.predicted), expected, rtol=1e-9, atol=1e-9)
