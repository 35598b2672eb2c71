"""Solvers: the contract on hard planes, and closed forms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import jetplane as jp
from jetplane.solvers import (
    AbsoluteCurvature,
    Adaptive,
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

F64 = torch.float64
SOLVERS: list[Solver] = [
    NegativeSlope(),
    AbsoluteCurvature(),
    JitteredInverse(),
    SaddleFree(),
    SoftAbs(),
    Damped(),
    TrustRegion(),
    Cubic(),
    LevenbergMarquardt(),
]
DESCENDING = [solver for solver in SOLVERS if solver.descends]
EXTREME: list[Solver] = [
    TrustRegion(1e-9),
    TrustRegion(1e9),
    Cubic(1e-9),
    Cubic(1e9),
    Damped(1e-12),
    Damped(1e9),
    SaddleFree(1e-16),
    SoftAbs(1e9),
    LevenbergMarquardt(1e-9),
    LevenbergMarquardt(1e9),
]
ADAPTIVE: list[Adaptive] = [Damped(), TrustRegion(), Cubic(), LevenbergMarquardt(smallest=1e-9)]


def quadratic(slope: object, curvature: object, dtype: torch.dtype = F64) -> jp.Quadratic:
    g, h = (torch.as_tensor(part, dtype=dtype) for part in (slope, curvature))
    return jp.Quadratic(torch.zeros((), dtype=dtype), g, h)


def definite(k: int) -> jp.Quadratic:
    root = torch.randn(k, k, dtype=F64)
    return quadratic(torch.randn(k, dtype=F64), root @ root.T + 0.1 * torch.eye(k, dtype=F64))


def newton(model: jp.Quadratic) -> Tensor:
    return -torch.linalg.solve(model.curvature, model.slope)


def value(model: jp.Quadratic, c: Tensor) -> Tensor:
    """The model at c, or at each row of c."""
    return c @ model.slope + ((c @ model.curvature) * c).sum(-1) / 2


# -- the contract ---------------------------------------------------------------------------------------------------


@st.composite
def planes(draw: st.DrawFn, low: int = -12, high: int = 12) -> jp.Quadratic:
    """Indefinite, definite, singular and zero planes of all scales, with non-zero slopes."""
    k = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    powers = draw(st.lists(st.integers(low, high), min_size=k, max_size=k))
    signs = draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=k, max_size=k))
    values = torch.tensor([s * 10.0**p for s, p in zip(signs, powers, strict=True)], dtype=F64)
    axes = torch.linalg.qr(torch.randn(k, k, dtype=F64, generator=generator)).Q
    if draw(st.booleans()):
        axes = torch.eye(k, dtype=F64)
    scales = torch.tensor([10.0 ** draw(st.integers(low, high)) for _ in range(k)], dtype=F64)
    if draw(st.booleans()):  # directions of very different lengths
        axes = axes / scales.max().sqrt() * scales.sqrt()[:, None]
    slope = torch.randn(k, dtype=F64, generator=generator)
    kept = draw(st.lists(st.booleans(), min_size=k, max_size=k).filter(any))
    slope = slope * torch.tensor(kept) * 10.0 ** draw(st.integers(low, high))
    curvature = axes @ torch.diag(values) @ axes.T
    return quadratic(slope, (curvature + curvature.T) / 2)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(planes())
def test_descending_solvers_descend(model: jp.Quadratic) -> None:
    for solver in DESCENDING + EXTREME:
        step = solver(model)
        assert step.status is Status.OK, (solver, step)
        assert float(step.coefficients @ model.slope) < 0, (solver, step)
        assert bool(step.coefficients.isfinite().all())


@settings(derandomize=True, deadline=None, max_examples=200)
@given(planes(low=-6, high=6))
def test_descending_solvers_descend_in_float32(model: jp.Quadratic) -> None:
    model = quadratic(model.slope, model.curvature, torch.float32)
    for solver in DESCENDING + EXTREME:
        step = solver(model)
        if step.status is Status.NONFINITE:  # the step or its prediction is too large for float32
            wide = solver(quadratic(model.slope, model.curvature))
            assert max(float(wide.coefficients.abs().max()), float(wide.predicted.abs())) > 3e38
            continue
        assert step.status is Status.OK and step.coefficients.dtype == step.predicted.dtype == torch.float32
        assert float(step.coefficients @ model.slope) < 0, (solver, step)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(planes(), st.sampled_from([1e-6, 1.0, 1e6]))
def test_exact_minimisers_decrease_their_models(model: jp.Quadratic, size: float) -> None:
    def rounding(c: Tensor) -> float:
        return 1e-14 * float(model.curvature.norm() * c.norm() ** 2 + model.slope.norm() * c.norm())

    ball = TrustRegion(size)(model)
    assert float(ball.coefficients.norm()) <= size * (1 + 1e-9)
    assert float(ball.predicted) >= -rounding(ball.coefficients)
    c = Cubic(size)(model).coefficients
    assert float(value(model, c) + size * c.norm() ** 3 / 3) <= rounding(c)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(planes(low=-300, high=300))
def test_no_number_raises(model: jp.Quadratic) -> None:
    for solver in SOLVERS + EXTREME:
        for dtype in (F64, torch.float32, torch.float16):
            step = solver(quadratic(model.slope, model.curvature, dtype))
            assert bool(step.coefficients.isfinite().all()) and bool(step.predicted.isfinite())
            if step.status is not Status.OK:
                assert not step.coefficients.any() and float(step.predicted) == 0


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "slope", "curvature"])
def test_numbers_that_are_not_finite(solver: Solver, bad: float, where: str) -> None:
    loss, slope, curvature = torch.tensor(1.0), torch.ones(2), torch.eye(2)
    {"loss": loss, "slope": slope[1:], "curvature": curvature[0, 1:]}[where].fill_(bad)
    step = solver(jp.Quadratic(loss, slope, curvature))
    assert step.status is Status.NONFINITE
    assert torch.equal(step.coefficients, torch.zeros(2)) and float(step.predicted) == 0


def test_a_decrease_too_large_for_the_dtype_is_not_finite() -> None:
    model = quadratic([-293.5], [[-1.0]], torch.float16)  # 293.5^2 is more than float16 holds
    step = NegativeSlope(1.0)(model)
    assert step.status is Status.NONFINITE and not step.coefficients.any() and float(step.predicted) == 0


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_zero_slope_is_flat(solver: Solver) -> None:
    step = solver(quadratic([0.0, 0.0], [[1.0, 0.0], [0.0, -1.0]]))
    assert step.status is Status.FLAT and not step.coefficients.any()


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_record(solver: Solver, dtype: torch.dtype) -> None:
    """Shapes, dtypes, the predicted decrease; the model is detached and left as it is; the solver is frozen."""
    model = quadratic([1.0, -2.0], [[2.0, 0.5], [0.5, 1.0]], dtype)
    model.slope.requires_grad_()
    slope, curvature = model.slope.detach().clone(), model.curvature.clone()
    step = solver(model)
    assert step.status is Status.OK and step.coefficients.shape == (2,) and step.predicted.shape == ()
    assert step.coefficients.dtype == step.predicted.dtype == dtype and not step.coefficients.requires_grad
    assert torch.equal(model.slope, slope) and torch.equal(model.curvature, curvature)
    expected = -value(quadratic(slope, curvature), step.coefficients.double())
    torch.testing.assert_close(step.predicted.double(), expected, rtol=3 * torch.finfo(dtype).eps ** 0.5, atol=1e-2)
    assert isinstance(solver, Solver)
    with pytest.raises(FrozenInstanceError):
        solver.descends = False


def test_only_the_papers_solver_may_ascend() -> None:
    assert [type(solver) for solver in SOLVERS if not solver.descends] == [JitteredInverse]
    model = quadratic([2.0, 4.0], [[2.0, 0.0], [0.0, -4.0]])
    step = JitteredInverse()(model)
    assert step.status is Status.OK and float(step.coefficients @ model.slope) > 0 and float(step.predicted) < 0


def test_failed_factorisations_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    for solver in (SaddleFree(), SoftAbs(), Damped(), TrustRegion(), Cubic()):
        assert solver(quadratic([1.0], [[1.0]])).status is Status.SINGULAR


def test_rounding_does_not_turn_a_step_uphill() -> None:
    """A slope almost across a very flat axis: -g is taken where the exact step would be lost in rounding."""
    model = quadratic([1e-20, 1.0], [[-1.0, 0.0], [0.0, 1e12]], torch.float32)
    for solver in DESCENDING:
        step = solver(model)
        assert step.status is Status.OK and float(step.coefficients @ model.slope) < 0, solver
        if isinstance(solver, TrustRegion):
            assert float(step.coefficients.norm()) <= 1 + 1e-6


# -- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("solver", "tolerance"),
    [
        (JitteredInverse(), 1e-11),
        (SaddleFree(), 1e-11),
        (SoftAbs(sharpness=1e4), 1e-11),
        (Damped(damping=1e-12), 1e-9),
        (LevenbergMarquardt(damping=1e-12), 1e-9),
        (TrustRegion(radius=1e4), 1e-11),
        (Cubic(sigma=1e-12), 1e-9),
    ],
    ids=repr,
)
def test_positive_definite_planes_are_solved_in_one_step(solver: Solver, tolerance: float, k: int) -> None:
    model = definite(k)
    step = solver(model)
    expected = newton(model)
    torch.testing.assert_close(step.coefficients, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.predicted, -model.slope @ expected / 2, rtol=1e-8, atol=1e-9)


# -- adaptive solvers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_states_follow_the_agreement(solver: Adaptive) -> None:
    assert isinstance(solver, Adaptive)
    assert solver.at(0.5).state == 0.5 and type(solver.at(0.5)) is type(solver)
    cautious = {bad: solver.update(1.0, 1.0, bad) for bad in (0.1, 0.0, -5.0, math.nan, math.inf, -math.inf)}
    bold, same = solver.update(1.0, 1.0, 0.9), solver.update(1.0, torch.tensor(1.0), torch.tensor(0.5))
    assert isinstance(bold, float) and same == 1.0
    assert len(set(cautious.values())) == 1
    smaller = isinstance(solver, TrustRegion)
    assert all((state < 1) == smaller and state != 1 for state in cautious.values())
    assert (bold > 1) == smaller and bold != 1
    assert solver.update(1.0, 0.0, 1.0) == solver.update(1.0, -1.0, 1.0) == cautious[0.0]


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
@pytest.mark.parametrize("actual", [-1.0, 1.0])
def test_states_stay_within_bounds(solver: Adaptive, actual: float) -> None:
    state = solver.state
    for _ in range(2000):
        state = solver.update(state, 1.0, actual)
    assert math.isfinite(state) and state > 0
    solver.at(state)


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_adaptive_solvers_minimise_rosenbrock(solver: Adaptive) -> None:
    """Few lines are an optimizer: the state moves, steps that go up are not taken."""

    def rosenbrock(x: Tensor) -> Tensor:
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

    x, state = torch.tensor([-1.2, 1.0], dtype=F64), solver.state
    for _ in range(150):
        model = jp.quadratic(rosenbrock, x, torch.eye(2, dtype=F64))
        step = solver.at(state)(model)
        if step.status is Status.FLAT:
            break
        actual = model.loss - rosenbrock(x + step.coefficients)
        state = solver.update(state, step.predicted, actual)
        x = x + step.coefficients if actual > 0 else x
    assert float(rosenbrock(x)) < 1e-16


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AbsoluteCurvature(-1.0), "eps is -1.0; expected a finite number, zero or more."),
        (lambda: AbsoluteCurvature(math.nan), "eps is nan; expected a finite number, zero or more."),
        (lambda: JitteredInverse(jitter=0.0), "jitter is 0.0; expected a positive, finite number."),
        (lambda: JitteredInverse(factor=1.0), "factor is 1.0; expected a finite number above 1."),
        (lambda: JitteredInverse(tries=0), "tries is 0; expected at least one."),
        (lambda: SaddleFree(0.0), "floor is 0.0; expected a number above 0 and at most 1."),
        (lambda: SoftAbs(-2.0), "sharpness is -2.0; expected a positive, finite number."),
        (lambda: Damped(0.0), "damping is 0.0; expected a positive, finite number."),
        (lambda: Damped(smallest=-1.0), "smallest is -1.0; expected a positive, finite number."),
        (lambda: TrustRegion(math.inf), "radius is inf; expected a positive, finite number."),
        (lambda: TrustRegion(largest=0.0), "largest is 0.0; expected a positive, finite number."),
        (lambda: Cubic(math.nan), "sigma is nan; expected a positive, finite number."),
        (lambda: Cubic().at(-1.0), "sigma is -1.0; expected a positive, finite number."),
    ],
)
def test_bad_arguments(make: Callable[[], Solver], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
