"""The jittered inverse."""

from __future__ import annotations

import pytest
import torch

from cases import F64
from jetplane.solvers import (
    JitteredInverse,
    Status,
)
from test_base import quadratic


@pytest.mark.parametrize(("solver", "extra"), [(JitteredInverse(), 1e-3), (JitteredInverse(jitter=0.5), 0.5)])
def test_jitter_is_added_to_singular_planes(solver: JitteredInverse, extra: float) -> None:
    for curvature in ([[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.1, 0.3], [0.3, 0.9]]):
        model = quadratic([1.0, 1.0], curvature)
        expected = -torch.linalg.solve(model.curvature + extra * torch.eye(2, dtype=F64), model.slope)
        torch.testing.assert_close(solver(model).coefficients, expected)


def test_jitter_grows_and_gives_up() -> None:
    model = quadratic([1.0, 1.0], [[-1e-3, 0.0], [0.0, 1.0]])  # not singular: the first try is without jitter
    assert JitteredInverse(tries=1)(model).status is Status.OK
    model = quadratic([1.0, 1.0], [[0.0, 0.0], [0.0, -1e-3]])  # singular, singular, then jitter 1e-2
    step = JitteredInverse()(model)
    torch.testing.assert_close(step.coefficients, -1 / torch.tensor([1e-2, 9e-3], dtype=F64))
    for tries in (1, 2):
        step = JitteredInverse(tries=tries)(model)
        assert step.status is Status.SINGULAR and not step.coefficients.any()
