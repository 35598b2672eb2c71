"""Planes of every size: the contract of solvers from 1e-300 to 1e300, and the same step in other units."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jetplane as jp
from jetplane.solvers import (
    AbsoluteCurvature,
    Cubic,
    Damped,
    JitteredInverse,
    LevenbergMarquardt,
    NegativeSlope,
    SaddleFree,
    SoftAbs,
    Solver,
    Status,
    TrustRegion,
)
from jetplane.solvers.units import OWN, Units, is_ordinary, shifted_by, units_of
from test_base import EXTREME, F64, SOLVERS, planes, quadratic

# each solver for curvatures multiplied by 2^h and steps by 2^s, with its own numbers in those units
SCALED: dict[str, Callable[[int, int], Solver]] = {
    "NegativeSlope": lambda h, s: NegativeSlope(math.ldexp(1.0, -h)),
    "AbsoluteCurvature": lambda h, s: AbsoluteCurvature(math.ldexp(1e-5, h)),
    "JitteredInverse": lambda h, s: JitteredInverse(math.ldexp(1e-3, h)),
    "SaddleFree": lambda h, s: SaddleFree(),
    "SoftAbs": lambda h, s: SoftAbs(math.ldexp(1e3, -h)),
    "Damped": lambda h, s: Damped(math.ldexp(0.1, h)),
    "TrustRegion": lambda h, s: TrustRegion(math.ldexp(0.5, s)),
    "Cubic": lambda h, s: Cubic(math.ldexp(2.0, h - s)),
    "LevenbergMarquardt": lambda h, s: LevenbergMarquardt(0.1),
}


@pytest.mark.parametrize("name", SCALED)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(planes(low=-2, high=2), st.integers(-900, 900), st.integers(-900, 900))
def test_a_step_is_the_same_in_other_units(name: str, model: jp.Quadratic, h: int, s: int) -> None:
    """The slope times 2^(h + s), the curvature times 2^h: the step times 2^s, and the decrease times 2^(h + 2 s)."""
    assume(abs(h + s) < 900 and abs(h - s) < 900 and bool(model.curvature.any()))  # without curvature -g is the step
    make = SCALED[name]
    here = make(0, 0)(model)
    there = make(h, s)(quadratic(shifted_by(model.slope, h + s), shifted_by(model.curvature, h)))
    if h + 2 * s > 950:
        assert there.status in (Status.NONFINITE, here.status)  # the decrease is, or may be, no number
        return
    assert there.status is here.status
    expected = shifted_by(here.coefficients, s)
    close = 1e-9 * float(expected.abs().max())
    torch.testing.assert_close(there.coefficients, expected, rtol=1e-6, atol=close)
    decrease = shifted_by(here.predicted, h + 2 * s)
    torch.testing.assert_close(there.predicted, decrease, rtol=1e-6, atol=1e-9 * abs(float(decrease)) + 1e-300)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(planes(low=-300, high=300))
def test_the_contract_holds_at_every_size(dtype: torch.dtype, model: jp.Quadratic) -> None:
    size = 300.0 if dtype == F64 else 30.0  # powers of ten
    model = quadratic(*(part.sign() * part.abs() ** (size / 300) for part in (model.slope, model.curvature)), dtype)
    assume(bool(model.slope.isfinite().all() and model.curvature.isfinite().all()) and bool(model.slope.any()))
    slope, curvature = ([*map(Fraction, part.flatten().tolist())] for part in (model.slope, model.curvature))
    k = len(slope)
    for solver in SOLVERS + EXTREME:
        step = solver(model)
        if step.status is not Status.OK:
            assert not step.coefficients.any() and float(step.predicted) == 0
            continue
        c = [*map(Fraction, step.coefficients.tolist())]  # exact
        falls = sum(a * b for a, b in zip(slope, c, strict=True))
        assert any(c) and bool(step.predicted.isfinite())
        assert not solver.descends or falls < 0, (solver, step)
        if isinstance(solver, TrustRegion):
            assert sum(a * a for a in c) <= (Fraction(solver.radius) * Fraction(1 + 1e-6)) ** 2, (solver, step)
        if dtype == F64:
            terms = [c[i] * curvature[i * k + j] * c[j] for i in range(k) for j in range(k)]
            error = abs(-falls - sum(terms) / 2 - Fraction(float(step.predicted)))
            # a step is short of digits where it is below the numbers that have all of theirs
            assert error <= Fraction(1e-9) * max(map(abs, [falls, *terms])) + Fraction(1, 10**300), (solver, step)


@pytest.mark.parametrize("solver", [SaddleFree(), TrustRegion(1e-9), Cubic(), Damped(1e-320), LevenbergMarquardt()])
@pytest.mark.parametrize(("g", "h"), [(1e-300, 1e-300), (1e-300, 1.0), (1e-200, 1e-250), (1.0, 1e-300)])
def test_finite_planes_with_a_finite_step_are_solved(solver: Solver, g: float, h: float) -> None:
    step = solver(quadratic([g, -g], [[h, 0.0], [0.0, h]]))
    assert step.status is Status.OK and step.coefficients[0] < 0 < step.coefficients[1]


def test_a_step_too_small_for_any_number_is_flat() -> None:
    for dtype, size in ((F64, 1e300), (torch.float32, 1e30)):
        model = quadratic([1 / size, 1 / size], [[size, 0.0], [0.0, size]], dtype)
        for solver in (SaddleFree(), JitteredInverse(), AbsoluteCurvature(), Damped(), LevenbergMarquardt()):
            step = solver(model)
            assert step.status is Status.FLAT and not step.coefficients.any(), solver


def test_ordinary_planes_keep_their_units() -> None:
    assert is_ordinary(0.0, -math.inf) and is_ordinary(-200, 200) and not is_ordinary(201.0, 0.0)
    model = quadratic([1.0], [[2.0]])
    assert OWN.model(model) is model and OWN.length(0.3) == OWN.curvature(0.3) == OWN.cubic(0.3) == 0.3


def test_units_make_the_larger_one_of_order_one() -> None:
    units = units_of(-1993.0, -997.0, 996.0)
    model = units.model(quadratic([2.0**-997], [[2.0**996]]))
    assert units == Units(-1993, 2990) and float(model.slope) == float(model.curvature) == 1.0
    assert units.length(2.0**-900) == 2.0**1000  # the most that a number is in other units
    assert shifted_by(torch.tensor([2.0**1000], dtype=F64), -2000).item() == 2.0**-1000
