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
    Traceable,
    TrustRegion,
)
from jetplane.solvers.traced import CODES

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


def test_line_solvers() -> None:
    model = quadratic([2.0, -3.0], [[4.0, 1.0], [1.0, -6.0]])
    assert torch.equal(NegativeSlope()(model).coefficients, -model.slope)
    expected = torch.tensor([-2 / (4 + 1e-5), 3 / (6 + 1e-5)], dtype=F64)
    torch.testing.assert_close(AbsoluteCurvature()(model).coefficients, expected)
    torch.testing.assert_close(AbsoluteCurvature(0.0)(model).coefficients, torch.tensor([-0.5, 0.5], dtype=F64))


def test_no_curvature_and_no_eps_is_flat() -> None:
    assert AbsoluteCurvature(0.0)(quadratic([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])).status is Status.FLAT


def test_spectral_solvers_take_absolute_values() -> None:
    axes = torch.linalg.qr(torch.randn(3, 3, dtype=F64)).Q
    values, slope = torch.tensor([-2.0, 0.5, 4.0], dtype=F64), torch.randn(3, dtype=F64)
    model = quadratic(slope, axes @ torch.diag(values) @ axes.T)
    torch.testing.assert_close(SaddleFree()(model).coefficients, -axes @ (axes.T @ slope / values.abs()))
    smooth = values / torch.tanh(3 * values)
    torch.testing.assert_close(SoftAbs(3.0)(model).coefficients, -axes @ (axes.T @ slope / smooth))


def test_saddle_free_floor_and_zero_plane() -> None:
    model = quadratic([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(SaddleFree(0.01)(model).coefficients, torch.tensor([-1.0, -100.0], dtype=F64))
    model = quadratic([1.0, -2.0], torch.zeros(2, 2))
    torch.testing.assert_close(SaddleFree()(model).coefficients, -model.slope)


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


def test_damping_is_raised_until_positive_definite() -> None:
    model = quadratic([1.0, 1.0], [[-5.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(Damped(0.1)(model).coefficients, -1 / torch.tensor([5.0, 11.0], dtype=F64))
    torch.testing.assert_close(Damped(8.0)(model).coefficients, -1 / torch.tensor([3.0, 9.0], dtype=F64))


# -- trust region and cubic model against a search --------------------------------------------------------------------

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


@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("name", PLANES)
def test_cubic_finds_the_least_value(name: str, sigma: float) -> None:
    model = quadratic(*PLANES[name])

    def objective(c: Tensor) -> Tensor:
        return value(model, c) + sigma * c.norm(dim=-1) ** 3 / 3

    step = Cubic(sigma)(model)
    assert step.status is Status.OK
    expected = search(objective, radius=25.0)
    torch.testing.assert_close(float(objective(step.coefficients)), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_trust_region_and_cubic_meet_their_conditions(k: int) -> None:
    for _ in range(20):
        curvature = torch.randn(k, k, dtype=F64)
        model = quadratic(torch.randn(k, dtype=F64), curvature + curvature.T)
        lowest = float(torch.linalg.eigvalsh(model.curvature)[0])
        for solver in (TrustRegion(0.3), Cubic(0.7)):
            c = solver(model).coefficients
            residual = model.curvature @ c + model.slope  # = -mu c
            shift = -float(residual @ c / (c @ c))
            torch.testing.assert_close(residual, -shift * c, rtol=1e-9, atol=1e-9)
            assert shift >= max(0.0, -lowest) - 1e-9
            size = float(c.norm())
            expected = 0.7 * size if isinstance(solver, Cubic) else shift * size / 0.3
            assert abs(shift - expected) < 1e-9


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


# -- solvers as programs that ask the host nothing ----------------------------------------------------------------

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
