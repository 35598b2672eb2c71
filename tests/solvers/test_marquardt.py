"""Levenberg-Marquardt steps: closed forms, zero and collinear columns, noise, and training that does not diverge."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad import _torch
from jetplane.curvature import ExactHessian, GaussNewton
from jetplane.directions import Gaussian, Mixed, Momentum, Orthonormal, PreviousStep
from jetplane.optim import Acceptance, FoMoHKD, GaussNewtonSearch, HyperplaneSearch
from jetplane.optim import compiled_step as compiled_steps
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
    TraceableAdaptive,
    TrustRegion,
)
from jetplane.solvers.traced import CODES
from jetplane_lab.data import load
from searches import assert_same_memory, batch, loss_of, network, saved
from tracing import trace_only

F64 = torch.float64

SOLVERS: list[Solver] = [
    NegativeSlope(),
    AbsoluteCurvature(),
    AbsoluteCurvature(eps=0.0),
    JitteredInverse(),
    SaddleFree(),
    SoftAbs(),
    Damped(),
    TrustRegion(),
    Cubic(),
    LevenbergMarquardt(),
    LevenbergMarquardt(damping=1e-6, smallest=1e-6),
]


def quadratic(slope: Tensor, curvature: Tensor, noise: Tensor | None = None) -> jp.Quadratic:
    return jp.Quadratic(torch.zeros((), dtype=slope.dtype), slope, curvature, noise)


def random(k: int, seed: int, *, rank: int | None = None, noise: bool = False) -> jp.Quadratic:
    """A positive semi-definite plane, as Gauss-Newton's are."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(k, rank or k + 2, dtype=F64, generator=generator)
    slope = root @ torch.randn(root.shape[1], dtype=F64, generator=generator)
    spread = torch.randn(k, k + 1, dtype=F64, generator=generator)
    return quadratic(slope, root @ root.T, spread @ spread.T / 10 if noise else None)


def damped(model: jp.Quadratic, damping: float) -> Tensor:
    return model.curvature + damping * torch.diag(model.curvature.diagonal().abs())


# -- closed forms -----------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(k=st.integers(1, 12), seed=st.integers(0, 2**31), damping=st.sampled_from([1e-6, 0.1, 1.0, 30.0]))
def test_the_step_solves_the_damped_equation(k: int, seed: int, damping: float) -> None:
    model = random(k, seed)
    step = LevenbergMarquardt(damping)(model)
    assert step.status is Status.OK
    residual = damped(model, damping) @ step.coefficients + model.slope
    assert float(residual.norm()) < 1e-8 * float(model.slope.norm())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    k=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    powers=st.lists(st.integers(-12, 12), min_size=8, max_size=8),
    noisy=st.booleans(),
    indefinite=st.booleans(),
)
def test_the_lengths_of_the_directions_do_not_matter(
    k: int, seed: int, powers: list[int], noisy: bool, indefinite: bool
) -> None:
    model = random(k, seed, noise=noisy)
    if indefinite:
        model = quadratic(model.slope, model.curvature - 2 * torch.diag(model.curvature.diagonal()), model.noise)
    scales = 10.0 ** torch.tensor(powers[:k], dtype=F64)
    square = scales[:, None] * scales
    noise = None if model.noise is None else model.noise * square
    stretched = quadratic(model.slope * scales, model.curvature * square, noise)
    one, other = LevenbergMarquardt()(model), LevenbergMarquardt()(stretched)
    torch.testing.assert_close(other.coefficients * scales, one.coefficients, rtol=1e-7, atol=1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(k=st.integers(1, 10), seed=st.integers(0, 2**31), damping=st.sampled_from([1e-6, 1.0]))
def test_damping_is_raised_where_the_curvature_is_indefinite(k: int, seed: int, damping: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(k, k, dtype=F64, generator=generator)
    model = quadratic(torch.randn(k, dtype=F64, generator=generator), half + half.T)
    step = LevenbergMarquardt(damping)(model)
    assert step.status is Status.OK and float(step.coefficients @ model.slope) < 0
    # in units of the curvature's diagonal: (H + d I) c = -g for one d, which makes it positive definite
    units = model.curvature.diagonal().abs().rsqrt()
    c, h, g = step.coefficients / units, model.curvature * units[:, None] * units, model.slope * units
    extra = -float((h @ c + g) @ c / (c @ c))
    torch.testing.assert_close(h @ c + g, -extra * c, rtol=1e-6, atol=1e-6 * float(g.norm()))
    lowest = float(torch.linalg.eigvalsh(h)[0])
    assert extra > max(damping * (1 - 1e-6), -lowest)
    if lowest > 0:
        assert abs(extra - damping) < 1e-5 * max(1.0, float(h.abs().max()))


# -- zero and collinear columns: every solver's business --------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(k=st.integers(1, 6), zeros=st.integers(1, 3), seed=st.integers(0, 2**31), size=st.sampled_from([1e-9, 1.0, 1e9]))
def test_a_zero_column_takes_no_part(solver: Solver, k: int, zeros: int, seed: int, size: float) -> None:
    """Its coefficient is zero, and the others are what they are without it."""
    small = random(k, seed)
    small = quadratic(small.slope * size, small.curvature * size)
    place = torch.randperm(k + zeros, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    slope, curvature = torch.zeros(k + zeros, dtype=F64), torch.zeros(k + zeros, k + zeros, dtype=F64)
    slope[place] = small.slope
    curvature[place[:, None], place] = small.curvature
    model = quadratic(slope, curvature)
    expected, step = solver(small), solver(model)
    assert step.status is expected.status is Status.OK
    others = torch.ones(k + zeros, dtype=torch.bool)
    others[place] = False
    assert not step.coefficients[others].any()
    torch.testing.assert_close(step.coefficients[place], expected.coefficients, rtol=1e-6, atol=1e-12)
    if isinstance(solver, LevenbergMarquardt):
        traced = solver.traced(model, torch.tensor(solver.damping, dtype=F64))
    elif hasattr(solver, "traced"):
        traced = solver.traced(model)
    else:
        return
    assert CODES[int(traced.code)] is Status.OK
    torch.testing.assert_close(traced.coefficients, step.coefficients, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(k=st.integers(1, 5), seed=st.integers(0, 2**31), factor=st.sampled_from([-1.0, 1.0, 0.01, 3.0]))
def test_a_collinear_column_leaves_a_finite_step_that_goes_down(
    solver: Solver, dtype: torch.dtype, k: int, seed: int, factor: float
) -> None:
    plane = random(k, seed)
    columns = torch.cat([torch.eye(k, dtype=F64), factor * torch.eye(k, dtype=F64)[:1]])  # the first one twice
    model = quadratic((columns @ plane.slope).to(dtype), (columns @ plane.curvature @ columns.T).to(dtype))
    step = solver(model)
    assert step.status is Status.OK and bool(step.coefficients.isfinite().all())
    moved = columns.T @ step.coefficients.double()  # in the plane without the duplicate
    assert float(moved @ plane.slope) < 0
    if isinstance(solver, SaddleFree):  # Newton's step, however often a direction is there
        torch.testing.assert_close(moved, -torch.linalg.solve(plane.curvature, plane.slope), rtol=1e-2, atol=1e-3)
    if isinstance(solver, LevenbergMarquardt | SaddleFree | JitteredInverse | Damped | TrustRegion | Cubic):
        assert float(step.predicted) > 0


def test_slope_without_curvature_is_measured_by_the_others() -> None:
    """As the slope of a loss that is linear in the output: the step along it is finite."""
    model = quadratic(torch.tensor([1.0, 1.0], dtype=F64), torch.diag(torch.tensor([4.0, 0.0], dtype=F64)))
    step = LevenbergMarquardt(damping=1.0)(model)
    torch.testing.assert_close(step.coefficients, torch.tensor([-1 / 8, -1 / 2], dtype=F64))
    flat = quadratic(torch.tensor([1.0, -3.0], dtype=F64), torch.zeros(2, 2, dtype=F64))
    torch.testing.assert_close(LevenbergMarquardt(damping=2.0)(flat).coefficients, -flat.slope / 2)


# -- noise ------------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(k=st.integers(1, 8), seed=st.integers(0, 2**31), size=st.sampled_from([1e-3, 0.1, 10.0]))
def test_noise_damps(k: int, seed: int, size: float) -> None:
    """c = -(M + N / s)^-1 g, by the formulas of the docstring."""
    model = random(k, seed, noise=True)
    assert model.noise is not None
    model = quadratic(model.slope, model.curvature, model.noise * size)
    metric = damped(model, 1.0)
    inverse = torch.linalg.inv(metric)
    square, power = model.slope @ inverse @ model.slope, (inverse @ model.noise).trace()
    strength = torch.maximum(square - power, 0.1 * square) / (inverse @ model.curvature).trace()
    expected = -torch.linalg.solve(metric + model.noise / strength, model.slope)
    step = LevenbergMarquardt()(model)
    torch.testing.assert_close(step.coefficients, expected, rtol=1e-7, atol=1e-10)
    assert float(step.coefficients @ model.slope) < 0
    without = LevenbergMarquardt(shrink=False)(model).coefficients
    torch.testing.assert_close(without, -torch.linalg.solve(metric, model.slope), rtol=1e-7, atol=1e-10)
    assert float(step.coefficients @ metric @ step.coefficients) < float(without @ metric @ without)


@pytest.mark.parametrize("noise", [False, True])
def test_relaxation_goes_a_part_of_the_way(noise: bool) -> None:
    model = random(5, 0, noise=noise)
    whole, part = LevenbergMarquardt()(model), LevenbergMarquardt(relaxation=0.25)(model)
    torch.testing.assert_close(part.coefficients, whole.coefficients / 4, rtol=1e-12, atol=0.0)
    c = part.coefficients
    torch.testing.assert_close(part.predicted, -(model.slope @ c + c @ model.curvature @ c / 2))
    traced = LevenbergMarquardt(relaxation=0.25).traced(model, torch.tensor(1.0, dtype=F64))
    torch.testing.assert_close(traced.coefficients, c, rtol=1e-12, atol=0.0)


def test_without_noise_nothing_is_shrunk() -> None:
    model = random(5, 0)
    nothing = quadratic(model.slope, model.curvature, torch.zeros(5, 5, dtype=F64))
    assert torch.equal(LevenbergMarquardt()(nothing).coefficients, LevenbergMarquardt()(model).coefficients)


@pytest.mark.parametrize("level", [0.3, 1.0, 3.0])
def test_shrunk_steps_decrease_the_true_loss_more(level: float) -> None:
    """Over many noisy slopes of one bowl; with much noise the bare step ascends in the mean."""
    generator = torch.Generator().manual_seed(0)
    model = random(16, 1)
    root = torch.linalg.cholesky(model.curvature)
    signal = model.slope @ torch.linalg.solve(model.curvature, model.slope)
    noise = model.curvature * float(signal) / 16 * level  # as a well fitted model's: like the curvature

    def decrease(solver: LevenbergMarquardt) -> float:
        total = 0.0
        for _ in range(200):
            wrong = root @ torch.randn(16, dtype=F64, generator=generator) * math.sqrt(float(signal) / 16 * level)
            c = solver(quadratic(model.slope + wrong, model.curvature, noise)).coefficients
            total -= float(model.slope @ c + c @ model.curvature @ c / 2)
        return total / 200

    bare, shrunk = (decrease(LevenbergMarquardt(1e-3, 1e-3, shrink=shrink)) for shrink in (False, True))
    assert shrunk > bare + 0.05 * float(signal) * level and shrunk > 0
    assert level < 2 or bare < 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_noise_that_is_not_finite_is_said(bad: float) -> None:
    model = quadratic(torch.ones(2), torch.eye(2), torch.full((2, 2), bad))
    assert LevenbergMarquardt()(model).status is Status.NONFINITE
    assert CODES[int(LevenbergMarquardt().traced(model, torch.tensor(1.0, dtype=F64)).code)] is Status.NONFINITE


def test_losses_of_the_samples_make_the_noise() -> None:
    model, (x, y) = network(), batch()
    steps = []
    for reduction in ("mean", "none"):
        twin = copy.deepcopy(model)
        optimizer = GaussNewtonSearch(twin.parameters(), k=6, solver=LevenbergMarquardt())
        optimizer.step(lambda x, y: F.cross_entropy(twin(x), y, reduction=reduction), x, y)  # noqa: B023
        steps.append(optimizer.report)
    torch.testing.assert_close(steps[0].loss, steps[1].loss)
    assert float(steps[1].predicted) < float(steps[0].predicted)


# -- the damping follows ----------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    state=st.floats(1e-6, 1e6),
    predicted=st.sampled_from([1.0, 0.0, -1.0, math.nan, math.inf, 1e-30]),
    actual=st.one_of(st.floats(-2, 2), st.sampled_from([math.nan, math.inf, -math.inf])),
)
def test_the_traced_damping_follows_as_the_other(state: float, predicted: float, actual: float) -> None:
    solver = LevenbergMarquardt(smallest=0.01)
    numbers = [torch.tensor(number, dtype=F64) for number in (state, predicted, actual)]
    assert float(solver.traced_update(*numbers)) == solver.update(state, predicted, actual)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(k=st.integers(1, 8), seed=st.integers(0, 2**31), noisy=st.booleans(), damping=st.sampled_from([1e-6, 1.0, 40.0]))
def test_the_traced_step_is_the_other(k: int, seed: int, noisy: bool, damping: float) -> None:
    model = random(k, seed, rank=max(1, k // 2), noise=noisy)
    expected = LevenbergMarquardt().at(damping)(model)
    step = LevenbergMarquardt().traced(model, torch.tensor(damping, dtype=F64))
    assert CODES[int(step.code)] is expected.status
    torch.testing.assert_close(step.coefficients, expected.coefficients, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(step.predicted, expected.predicted, rtol=1e-9, atol=1e-12)


def test_it_is_adaptive() -> None:
    assert isinstance(LevenbergMarquardt(), Adaptive) and isinstance(LevenbergMarquardt(), TraceableAdaptive)
    solver = LevenbergMarquardt()
    assert solver.update(1.0, 1.0, 0.9) == 1.0  # not below its smallest
    assert solver.update(9.0, 1.0, 0.9) == 3.0 and solver.update(1.0, 1.0, 0.1) == 4.0


def test_it_finds_the_minimum_of_a_bowl_and_of_a_valley() -> None:
    x = torch.tensor([-1.2, 1.0], dtype=F64, requires_grad=True)
    solver = LevenbergMarquardt(smallest=1e-9)
    optimizer = FoMoHKD([x], directions=Orthonormal(2), solver=solver, accept=Acceptance(), patience=None)
    for _ in range(150):
        optimizer.step(lambda: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)
    torch.testing.assert_close(x.detach(), torch.ones(2, dtype=F64))


# -- training does not diverge ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """The embedded digits, 7 x 7."""
    train = load("digits").train
    pooled = F.avg_pool2d(train.images.float().unsqueeze(1) / 255, 4).flatten(1)
    return (pooled - 0.13) / 0.3, train.labels.long()


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "logistic regression": nn.Linear(49, 10),
        "network": nn.Sequential(nn.Linear(49, 24), nn.ReLU(), nn.Linear(24, 10)),
    }


def train(
    optimizer: HyperplaneSearch, model: nn.Module, data: tuple[Tensor, Tensor], reduction: str, steps: int
) -> list[float]:
    x, y = data
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (100,), generator=generator)
        loss = optimizer.step(lambda x, y: F.cross_entropy(model(x), y, reduction=reduction), x[chosen], y[chosen])
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("k", [2, 8, 32, 128])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["logistic regression", "network"])
def test_gauss_newton_does_not_diverge(name: str, reduction: str, k: int, digits: tuple[Tensor, Tensor]) -> None:
    """Small batches, default settings: the loss of no batch is above that at the start, and it falls."""
    model = models()[name]
    optimizer = GaussNewtonSearch(model.parameters(), k=k)
    losses = train(optimizer, model, digits, reduction, 20 if k == 128 else 40)
    assert max(losses) < 1.1 * losses[0]
    assert sum(losses[-5:]) / 5 < {2: 0.97, 8: 0.75, 32: 0.5, 128: 0.5}[k] * losses[0]


@pytest.mark.parametrize("k", [32, 128])
def test_undamped_it_does(k: int, digits: tuple[Tensor, Tensor]) -> None:
    model = models()["network"]
    parts = [PreviousStep(), Gaussian(k - 1)], GaussNewton(), JitteredInverse()
    optimizer = HyperplaneSearch(model.parameters(), 1.0, *parts, patience=None)
    losses = train(optimizer, model, digits, "mean", 8)
    assert not max(losses) < 2 * losses[0]


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is traced, and the trace is run."""
    monkeypatch.setattr(_torch, "compiled", trace_only)
    monkeypatch.setattr(compiled_steps, "_SHARED", OrderedDict())


def captured(optimizer: HyperplaneSearch) -> bool:
    assert optimizer._compiled is not None
    return all(program is not None for program in optimizer._compiled._programs._captured.values())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "follows down and up": {"solver": LevenbergMarquardt(damping=1e-3, smallest=1e-9)},
    "rejected": {"accept": Acceptance(fraction=0.9), "lr": 1.7, "patience": None},
    "clipped": {"clip": 0.01},
    "maximised": {"maximize": True},
    "decayed": {"weight_decay": 0.1},
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_steps_are_the_eager_ones(case: str, reduction: str) -> None:
    x, y = batch()
    sign = -1.0 if CASES[case].get("maximize") else 1.0
    made = []
    for compile in (False, True):
        model = network()
        optimizer = GaussNewtonSearch(model.parameters(), **{"k": 4, "compile": compile} | CASES[case])
        history = []
        for _ in range(8):
            optimizer.step(lambda x, y: sign * F.cross_entropy(model(x), y, reduction=reduction), x, y)  # noqa: B023
            report = optimizer.report
            history.append([float(report.loss), float(report.predicted), float(report.actual), report.status])
        made.append((model, optimizer, history))
    (eager, one, expected), (compiled, other, actual) = made
    assert captured(other)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], rel=1e-7, abs=1e-10) and ours[-1] is theirs[-1]
    if case == "rejected":
        assert {entry[-1] for entry in expected} == {Status.REJECTED, Status.OK}
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert_same_memory(one, other, 1e-8)  # the damping, too


def dampings(count: int) -> list[float]:
    """Those of eager steps, from the start on."""
    model, (x, y) = network(), batch()
    optimizer = GaussNewtonSearch(model.parameters(), k=4, solver=FREE)
    found = [FREE.damping]
    for _ in range(count):
        optimizer.step(loss_of(model), x, y)
        found.append(optimizer.param_groups[0]["solver_state"])
    assert found[-1] < found[1] < found[0]
    return found


FREE = LevenbergMarquardt(smallest=1e-9)


@pytest.mark.usefixtures("traced")
def test_the_damping_of_compiled_steps_is_saved_loaded_and_kept() -> None:
    expected = dampings(9)
    x, y = batch()
    xs, ys = x.expand(4, *x.shape), y.expand(4, *y.shape)
    model = network()
    optimizer = GaussNewtonSearch(model.parameters(), k=4, solver=FREE, compile=True)
    reports = optimizer.steps(loss_of(model), xs, ys)
    assert reports.actual is not None and bool((reports.actual > 0).all())
    state, start = saved(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert state["param_groups"][0]["solver_state"] == expected[4]
    assert copy.deepcopy(optimizer).param_groups[0]["solver_state"] == expected[4]
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["solver_state"] == expected[4]
    optimizer.steps(loss_of(model), xs, ys)
    assert optimizer.state_dict()["param_groups"][0]["solver_state"] == expected[8]
    optimizer.load_state_dict(copy.deepcopy(state))  # the device is further by now
    model.load_state_dict(start)
    optimizer.steps(loss_of(model), xs, ys)
    optimizer.clip = 100.0  # everything is compiled anew
    optimizer.step(loss_of(model), x, y)
    assert optimizer.state_dict()["param_groups"][0]["solver_state"] == expected[9]
    optimizer.param_groups[0]["solver_state"] = 1000.0
    optimizer.step(loss_of(model), x, y)
    assert optimizer.state_dict()["param_groups"][0]["solver_state"] == pytest.approx(1000 / 3)


@pytest.mark.usefixtures("traced")
def test_a_step_that_falls_back_goes_on_with_the_damping_of_the_compiled_ones() -> None:
    expected = dampings(4)
    model, (x, y) = network(), batch()
    optimizer = GaussNewtonSearch(model.parameters(), k=4, solver=FREE, compile=True)
    loss = loss_of(model)
    for _ in range(2):
        optimizer.step(loss, x, y)
    with pytest.warns(UserWarning, match="cannot be compiled and is run as it is"):
        optimizer.step(lambda x, y: loss(x, y) if x.sum() != 0 else x.sum(), x, y)
    assert optimizer.param_groups[0]["solver_state"] == expected[3]
    optimizer.step(loss, x, y)
    assert optimizer.state_dict()["param_groups"][0]["solver_state"] == expected[4]


@pytest.mark.usefixtures("traced")
def test_random_numbers_would_differ_at_the_end_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = batch(torch.float32)
    optimizer = GaussNewtonSearch(model.parameters(), k=4, compile=True)
    with pytest.warns(UserWarning, match="would not be the same where the loss is evaluated at the end of the step"):
        optimizer.step(loss_of(model), x, y)


@pytest.mark.usefixtures("traced")
def test_buffers_are_updated_once() -> None:
    x, y = batch()
    made = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer = GaussNewtonSearch(model.parameters(), k=4, compile=compile)
        for _ in range(3):
            optimizer.step(loss_of(model), x, y)
        made.append(model)
    eager, compiled = made
    assert int(compiled[1].num_batches_tracked) == int(eager[1].num_batches_tracked) == 3
    for a, b in zip(eager.state_dict().values(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_through_the_compiler() -> None:
    x, y = batch()
    made = []
    for compile in (False, True):
        model = network()
        optimizer = GaussNewtonSearch(model.parameters(), k=6, compile=compile)
        for _ in range(3):
            optimizer.step(loss_of(model), x, y)
        made.append((model, optimizer))
    (eager, one), (compiled, other) = made
    assert captured(other)
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert_same_memory(one, other, 1e-8)


# -- the named optimizer ----------------------------------------------------------------------------------------------


def test_the_named_search_only_composes() -> None:
    model = network()
    optimizer = GaussNewtonSearch(model.parameters(), k=10)
    assert optimizer.directions == Mixed([Momentum([0.0, 0.9, 0.99, 0.997]), Gaussian(6)])
    assert optimizer.curvature == GaussNewton()
    assert optimizer.solver == LevenbergMarquardt(0.1, 0.1, shrink=False, relaxation=0.5)
    assert optimizer.accept == Acceptance() and optimizer.param_groups[0]["lr"] == 1.0
    assert GaussNewtonSearch(model.parameters(), accept=None).accept is None
    named = FoMoHKD(model.parameters(), directions=[PreviousStep(), Gaussian(2)], curvature="ggn")
    assert named.curvature == GaussNewton() and named.directions == Mixed([PreviousStep(), Gaussian(2)])


@pytest.mark.parametrize(("k", "relaxation"), [(1, 1.0), (2, 1.0), (8, 0.625), (32, 5 / 32), (64, 0.15), (108, 1.0)])
def test_the_more_directions_the_shorter_the_step_unless_they_span_the_space(k: int, relaxation: float) -> None:
    leaf = torch.zeros(108, requires_grad=True)
    solver = GaussNewtonSearch([leaf], k=k).solver
    assert isinstance(solver, LevenbergMarquardt) and solver.relaxation == relaxation


@pytest.mark.parametrize("k", [0, -3])
def test_a_search_needs_directions(k: int) -> None:
    with pytest.raises(ValueError, match=f"^k is {k}; expected at least one direction.$"):
        GaussNewtonSearch([torch.zeros(9, requires_grad=True)], k=k)


@pytest.mark.parametrize(("k", "horizons"), [(2, (0.0,)), (3, (0.0,)), (4, (0.0, 0.9)), (8, (0.0, 0.9, 0.99, 0.997))])
def test_at_most_half_of_the_directions_remember(k: int, horizons: tuple[float, ...]) -> None:
    optimizer = GaussNewtonSearch([torch.zeros(100, requires_grad=True)], k=k)
    assert optimizer.directions == Mixed([Momentum(horizons), Gaussian(k - len(horizons))])
    assert GaussNewtonSearch([torch.zeros(100, requires_grad=True)], k=1).directions == Gaussian(1)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (lambda: network().parameters(), 32),
        (lambda: network().named_parameters(), 32),
        (lambda: nn.Linear(2, 1).parameters(), 3),
        (lambda: nn.Linear(2, 1).named_parameters(), 3),
        (lambda: [{"params": nn.Linear(2, 1).parameters()}, {"params": torch.zeros(2, requires_grad=True)}], 5),
        (lambda: [{"params": list(nn.Linear(2, 1).named_parameters())}], 3),
        (lambda: [torch.zeros(1, requires_grad=True)], 1),
        (lambda: [torch.zeros(1, requires_grad=True), torch.zeros(7)], 1),
    ],
)
def test_as_many_directions_as_there_is_room_for(params: Callable[[], Any], count: int) -> None:
    optimizer = GaussNewtonSearch(params())
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.requires_grad]
    assert optimizer.directions.count(leaves) == count


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LevenbergMarquardt(0.0), "damping is 0.0; expected a positive, finite number."),
        (lambda: LevenbergMarquardt(smallest=-1.0), "smallest is -1.0; expected a positive, finite number."),
        (lambda: LevenbergMarquardt(up=0.5), "up is 0.5; expected a finite number from 1."),
        (lambda: LevenbergMarquardt(down=math.inf), "down is inf; expected a finite number from 1."),
        (lambda: LevenbergMarquardt(least=0.0), "least is 0.0; expected a number above 0 and at most 1."),
        (lambda: LevenbergMarquardt(relaxation=0.0), "relaxation is 0.0; expected a number above 0 and at most 1."),
        (lambda: LevenbergMarquardt(relaxation=1.5), "relaxation is 1.5; expected a number above 0 and at most 1."),
        (
            lambda: FoMoHKD([torch.zeros(3, requires_grad=True)], solver=Damped(), compile=True),
            "the solver Damped asks the host; expected one with a method traced with compile=True.",
        ),
        (
            lambda: FoMoHKD([torch.zeros(3, requires_grad=True)], accept=Acceptance(backtracks=2), compile=True),
            "the acceptance has 2 backtracks; expected 0 with compile=True.",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_the_exact_hessian_goes_down_too() -> None:
    """At the start of training it is indefinite."""
    model, (x, y) = network(), batch()
    optimizer = HyperplaneSearch(model.parameters(), 1.0, Gaussian(8), ExactHessian(), LevenbergMarquardt())
    losses = [float(optimizer.step(loss_of(model), x, y)) for _ in range(20)]
    assert losses == sorted(losses, reverse=True)
