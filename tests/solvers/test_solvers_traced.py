"""Traced solvers are the eager ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jetplane as jp
from cases import F64
from jetplane.solvers import (
    AbsoluteCurvature,
    JitteredInverse,
    NegativeSlope,
    Solver,
    Traceable,
)
from jetplane.solvers.traced import CODES
from test_base import SOLVERS

TRACEABLE = [NegativeSlope(0.5), AbsoluteCurvature(), AbsoluteCurvature(eps=0.0), JitteredInverse()]


def same_step(solver: Solver, model: jp.Quadratic) -> None:
    expected, actual = solver(model), solver.traced(model)
    assert CODES[int(actual.code)] is expected.status
    size = float(expected.coefficients.abs().max())
    torch.testing.assert_close(actual.coefficients, expected.coefficients, rtol=1e-6, atol=1e-9 * size)
    torch.testing.assert_close(actual.predicted, expected.predicted, rtol=1e-6, atol=1e-9 * abs(expected.predicted))


@pytest.mark.parametrize("solver", TRACEABLE, ids=repr)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(k=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_traced_solvers_take_the_same_step(solver: Solver, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(k, k, generator=generator, dtype=F64)
    slope = torch.randn(k, generator=generator, dtype=F64)
    same_step(solver, jp.Quadratic(torch.tensor(1.0, dtype=F64), slope, half + half.T))


@pytest.mark.parametrize("solver", TRACEABLE, ids=repr)
@pytest.mark.parametrize(
    ("slope", "curvature"),
    [
        ([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]]),
        ([1.0, 2.0], [[0.0, 0.0], [0.0, 0.0]]),
        ([1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]),
        ([1.0, math.nan], [[1.0, 0.0], [0.0, 1.0]]),
        ([1.0, 2.0], [[math.inf, 0.0], [0.0, 1.0]]),
        ([1.0, 2.0], [[0.0, 3.0], [3.0, 0.0]]),
        ([1e-300, 1e-300], [[1e300, 0.0], [0.0, 1e300]]),
        ([1.0, 1.0], [[1e-320, 0.0], [0.0, 1.0]]),
    ],
)
def test_traced_solvers_report_the_same_status(
    solver: Solver, slope: list[float], curvature: list[list[float]]
) -> None:
    loss = torch.tensor(1.0, dtype=F64)
    same_step(solver, jp.Quadratic(loss, torch.tensor(slope, dtype=F64), torch.tensor(curvature, dtype=F64)))


def test_which_solvers_can_be_traced() -> None:
    assert {type(s).__name__ for s in SOLVERS if isinstance(s, Traceable)} == {
        "NegativeSlope",
        "AbsoluteCurvature",
        "JitteredInverse",
        "LevenbergMarquardt",
    }
