"""What the directions of a plane gain for their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import F64
from jetplane.ad.algebra.jet import Quadratic
from jetplane.curvature import EmpiricalFisher, ExactHessian, GaussNewton, NoCurvature
from jetplane.optim.sizes import advantage, passes
from jetplane.solvers import LevenbergMarquardt, SaddleFree


@pytest.mark.parametrize(
    ("curvature", "costs"),
    [
        (ExactHessian(), (5, 22, 176)),
        (GaussNewton(), (3, 7, 21)),
        (NoCurvature(), (3, 7, 21)),
        (EmpiricalFisher(), (3, 7, 21)),
    ],
    ids=repr,
)
def test_what_a_plane_costs(curvature: Any, costs: tuple[int, ...]) -> None:
    assert tuple(passes(curvature, k) for k in (1, 3, 10)) == costs


def test_the_advantage_is_that_of_the_second_half() -> None:
    slope, zero = torch.tensor([1.0, 1.0, 2.0, 0.0], dtype=F64), torch.zeros((), dtype=F64)
    model = Quadratic(zero, slope, torch.eye(4, dtype=F64), torch.zeros(4, 4, dtype=F64))
    # gains: 3 of all, 1 of the first two; costs 9 and 5
    assert advantage(model, SaddleFree(), GaussNewton(), 2) == pytest.approx((3 - 1) / (9 - 5) / (3 / 9) - 1)
    assert advantage(model, LevenbergMarquardt(1.0), GaussNewton(), 2) == pytest.approx(0.5)
    still = Quadratic(zero, torch.zeros(4, dtype=F64), torch.eye(4, dtype=F64))
    assert advantage(still, SaddleFree(), GaussNewton(), 2) == 0.0
