"""Solvers along lines."""

from __future__ import annotations

import torch

from cases import F64
from jetplane.solvers import (
    AbsoluteCurvature,
    NegativeSlope,
    Status,
)
from test_base import quadratic


def test_line_solvers() -> None:
    model = quadratic([2.0, -3.0], [[4.0, 1.0], [1.0, -6.0]])
    assert torch.equal(NegativeSlope()(model).coefficients, -model.slope)
    expected = torch.tensor([-2 / (4 + 1e-5), 3 / (6 + 1e-5)], dtype=F64)
    torch.testing.assert_close(AbsoluteCurvature()(model).coefficients, expected)
    torch.testing.assert_close(AbsoluteCurvature(0.0)(model).coefficients, torch.tensor([-0.5, 0.5], dtype=F64))


def test_no_curvature_and_no_eps_is_flat() -> None:
    assert AbsoluteCurvature(0.0)(quadratic([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])).status is Status.SINGULAR
