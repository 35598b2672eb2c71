"""``jp.minimize``: scipy's shape, pytrees, tolerances and bounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import F64, assert_close
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Gaussian, Orthonormal, Sphere
from jetplane.optim import Acceptance, Ending, Result
from jetplane.solvers import (
    AbsoluteCurvature,
    Cubic,
    Damped,
    JitteredInverse,
    NegativeSlope,
    SaddleFree,
    Solver,
    TrustRegion,
)

START = torch.tensor([-1.2, 1.0], dtype=F64)


def rosenbrock(x: Tensor) -> Tensor:
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


def bowl(x: Tensor) -> Tensor:
    return (x - 1).square().sum()


class Calls:
    """A function that counts its calls."""

    def __init__(self, fun: Callable[[Any], Tensor]) -> None:
        self.fun, self.count = fun, 0

    def __call__(self, x: Any) -> Tensor:
        self.count += 1
        return self.fun(x)


METHODS: dict[str, dict[str, Any]] = {
    "fgd": {"lr": 0.05, "maxiter": 2000},
    "fomoh": {},
    "fomoh-bp": {},
    "fomoh-kd": {"k": 3},
    "newton": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_find_the_minimum_of_a_bowl(method: str) -> None:
    fun, x0 = Calls(bowl), torch.tensor([3.0, -2.0, 0.5, 4.0], dtype=F64)
    result = jp.minimize(fun, x0, method, **METHODS[method])
    assert isinstance(result, Result)
    assert result.success and result.status == Ending.CONVERGED == 0, result
    assert_close(result.x, torch.ones(4, dtype=F64), 1e-4)
    assert result.fun == float(bowl(result.x)) == result.history[-1]
    assert result.nfev == fun.count and len(result.history) == result.nit + 1
    assert result.history[0] == float(bowl(x0))
    assert x0.tolist() == [3.0, -2.0, 0.5, 4.0] and not result.x.requires_grad


COMPOSITIONS = [
    {"directions": Orthonormal(2), "curvature": ExactHessian(), "solver": SaddleFree(), "accept": Acceptance(10)},
    {"directions": Sphere(2), "curvature": ExactHessian(), "solver": TrustRegion(0.5), "accept": Acceptance()},
    {"directions": Gaussian(2), "curvature": ExactHessian(), "solver": Damped(), "accept": Acceptance()},
    {"directions": Coordinate(), "curvature": ExactHessian(), "solver": Cubic(), "accept": Acceptance()},
    {"directions": Coordinate(), "curvature": ExactHessian(), "solver": JitteredInverse()},
]


@pytest.mark.parametrize("parts", COMPOSITIONS, ids=lambda parts: str(parts["solver"]))
def test_compositions_find_the_minimum_of_rosenbrock(parts: dict[str, Any]) -> None:
    result = jp.minimize(rosenbrock, START, "hyperplane", patience=50, **parts)
    assert result.success, result
    assert_close(result.x, torch.ones(2, dtype=F64), 1e-5)


def test_other_parts_for_the_named_methods() -> None:
    result = jp.minimize(rosenbrock, START, "fomoh-kd", k=2, solver=SaddleFree(), accept=Acceptance(20), tol=1e-10)
    assert result.success and result.fun < 1e-10
    assert all(b <= a for a, b in zip(result.history, result.history[1:], strict=False))


def test_pytrees() -> None:
    def fun(tree: dict[str, Any]) -> Tensor:
        a, (b, c) = tree["a"], tree["rest"]
        return (a - 1).square().sum() + (b + 2).square() + (c - a.sum()).square().sum()

    x0 = {"a": torch.zeros(2, 2, dtype=F64), "rest": [torch.tensor(0.0, dtype=F64), torch.zeros(1, dtype=F64)]}
    result = jp.minimize(fun, x0, "newton")
    assert_close(result.x["a"], torch.ones(2, 2, dtype=F64))
    assert_close(result.x["rest"][0], torch.tensor(-2.0, dtype=F64))
    assert_close(result.x["rest"][1], torch.tensor([4.0], dtype=F64))
    assert x0["a"].sum() == 0


def test_one_number() -> None:
    result = jp.minimize(lambda x: (x - 3) ** 2, torch.tensor(0.0))
    assert result.success and float(result.x) == 3.0 and result.x.shape == ()


def test_seeds() -> None:
    runs = [jp.minimize(rosenbrock, START, "fomoh", seed=seed, maxiter=20) for seed in (1, 1, 2)]
    assert runs[0].history == runs[1].history != runs[2].history


# -- when it ends ---------------------------------------------------------------------------------------------------


def test_max_iterations() -> None:
    result = jp.minimize(rosenbrock, START, "fomoh", maxiter=5)
    assert (result.nit, result.success, result.status) == (5, False, Ending.ITERATIONS)
    assert result.message == "the limit of 5 iterations is reached."
    nothing = jp.minimize(rosenbrock, START, maxiter=0)
    assert torch.equal(nothing.x, START) and (nothing.nit, nothing.nfev) == (0, 1)
    assert nothing.history == [nothing.fun] == [float(rosenbrock(START))]


@pytest.mark.parametrize("maxfev", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("options", [{}, {"samples": 2}, {"accept": Acceptance(5)}], ids=["plain", "samples", "accept"])
def test_max_evaluations_is_a_bound(maxfev: int, options: dict[str, Any]) -> None:
    fun = Calls(rosenbrock)
    result = jp.minimize(fun, START, "fomoh", maxfev=maxfev, **options)
    assert result.nfev == fun.count <= maxfev
    assert (result.success, result.status) == (False, Ending.EVALUATIONS)
    assert result.message == f"the limit of {maxfev} evaluations is reached."
    assert result.fun == float(rosenbrock(result.x))


def test_tolerance_on_the_slope_alone() -> None:
    result = jp.minimize(rosenbrock, START, "newton", ftol=0.0, gtol=1e-3)
    assert result.success and result.fun < 1e-6


def test_a_larger_tolerance_ends_earlier() -> None:
    runs = [jp.minimize(rosenbrock, START, "fomoh", tol=tol, maxiter=3000).nit for tol in (1e-2, 1e-6)]
    assert runs[0] < runs[1]


def test_a_stationary_start_has_converged() -> None:
    result = jp.minimize(bowl, torch.ones(2), "newton", patience=1)
    assert result.success and result.x.tolist() == [1.0, 1.0]


def test_stalled() -> None:
    result = jp.minimize(lambda x: bowl(x) * math.nan, torch.zeros(2), "fomoh", patience=4)
    assert (result.success, result.status, result.nit) == (False, Ending.STALLED, 4)
    assert result.message.startswith("4 steps in a row did not move the parameters, the last with status NONFINITE")
    assert result.x.tolist() == [0.0, 0.0] and math.isnan(result.fun)


def test_rejected_from_the_first_promise_of_little_on_has_converged() -> None:
    """There is less to gain than the tolerance, and noise in the loss, as that of rounding, which hides it."""

    def fun(x: Tensor) -> Tensor:
        return 1e-14 * (x - 1).square().sum() + (x.detach() != 0.5).double().sum()

    start = torch.tensor([0.5], dtype=F64)
    result = jp.minimize(fun, start, "newton", accept=Acceptance(), gtol=0.0)
    assert result.success and result.nit == 3 and result.x.tolist() == [0.5], result


@pytest.mark.parametrize("solver", [SaddleFree(), TrustRegion(1.0)], ids=repr)
def test_steps_that_promise_much_and_are_rejected_have_stalled(solver: Solver) -> None:
    """A wall around the start: whatever the model says, the loss is higher."""

    def fun(x: Tensor) -> Tensor:
        return (x - 1).square().sum() + 9 * (x.detach() != 0).double().sum()

    parts = {"directions": Coordinate(), "curvature": ExactHessian(), "accept": Acceptance()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = jp.minimize(fun, torch.zeros(1, dtype=F64), "hyperplane", solver=solver, patience=5, **parts)
    assert not result.success and result.status == Ending.STALLED and result.x.tolist() == [0.0]
    assert "status REJECTED: the step did not decrease the loss enough." in result.message


@pytest.mark.parametrize(
    ("solver", "start"),
    [
        (Cubic(1.0), torch.randn(20, generator=torch.Generator().manual_seed(0))),
        (TrustRegion(1.0), torch.tensor([-1.2, 1.0] * 10)),
        (Damped(), torch.randn(20, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["Cubic", "TrustRegion", "Damped"],
)
def test_the_history_of_solvers_that_reject_never_rises(solver: Solver, start: Tensor) -> None:
    """Where every step was taken they went up to 7.8e265, 1e27 and 4e17."""
    fun = Calls(rosenbrock)
    result = jp.minimize(fun, start.double(), k=20, solver=solver, maxiter=300)
    assert result.success and result.fun < 4 and result.nfev == fun.count  # 3.99 is a local minimum
    assert result.history == sorted(result.history, reverse=True)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_best_point_is_returned(maximize: bool) -> None:
    """Newton's step with lr 3.5 goes away from the minimum, by 2.5 times the distance each time."""
    sign = -1.0 if maximize else 1.0
    points: list[float] = []

    def fun(x: Tensor) -> Tensor:
        return sign * bowl(x)

    result = jp.minimize(
        fun,
        torch.tensor([1.5], dtype=F64),
        "newton",
        lr=3.5,
        maxiter=5,
        maximize=maximize,
        callback=lambda now: points.append(float(now.x)),
    )
    assert (
        result.fun == result.history[0] == sign * min(abs(loss) for loss in result.history) and float(result.x) == 1.5
    )
    assert_close(torch.tensor(points) - 1, 0.5 * (-2.5) ** torch.arange(5.0))  # a callback sees the point at hand


def test_the_last_finite_point_is_returned() -> None:
    parts = {"directions": Coordinate(), "curvature": NoCurvature(), "solver": NegativeSlope()}
    result = jp.minimize(lambda x: x.log().sum(), torch.tensor([1.0]), "hyperplane", lr=2.0, **parts)
    assert not result.success and result.x.tolist() == [1.0] and result.fun == 0.0


def test_callback() -> None:
    seen: list[Result] = []

    def callback(intermediate_result: Result) -> None:
        seen.append(intermediate_result)
        if len(seen) == 4:
            raise StopIteration

    result = jp.minimize(rosenbrock, START, "fomoh", callback=callback)
    assert (result.nit, result.status, result.success) == (4, 99, False)
    assert result.message == "`callback` raised `StopIteration`."
    assert [r.nit for r in seen] == [1, 2, 3, 4] and [r.nfev for r in seen] == [1, 2, 3, 4]
    for r in seen:
        assert r.fun == float(rosenbrock(r.x)) and not r.success
    assert torch.equal(seen[0].x, START)


# -- bad input ------------------------------------------------------------------------------------------------------

ROWS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "method",
        lambda: jp.minimize(bowl, START, "adam"),
        ValueError,
        "method is 'adam'; expected one of 'fgd', 'fomoh', 'fomoh-bp', 'fomoh-kd', 'newton', 'hyperplane'",
    ),
    ("fun", lambda: jp.minimize(3, START), TypeError, "fun is int; expected a function"),
    ("x0-empty", lambda: jp.minimize(bowl, []), ValueError, "x0 holds no tensor; expected at least one to move"),
    ("x0-float", lambda: jp.minimize(bowl, 1.0), TypeError, "x0 is float; expected a tensor"),
    ("x0-int", lambda: jp.minimize(bowl, torch.arange(3)), TypeError, "x0 has dtype torch.int64; only floating"),
    ("x0-part", lambda: jp.minimize(bowl, [START, 3]), TypeError, "tensor 1 of x0 is int; expected a tensor"),
    ("k-zero", lambda: jp.minimize(bowl, START, k=0), ValueError, "k is 0; expected at least one direction"),
    ("k-large", lambda: jp.minimize(bowl, START, k=3), ValueError, "k is 3, but the parameters have 2 entries"),
    (
        "k-not-taken",
        lambda: jp.minimize(bowl, START, "newton", k=2),
        TypeError,
        "method 'newton' takes no k; expected it for 'fgd' and 'fomoh-kd' only",
    ),
    ("lr", lambda: jp.minimize(bowl, START, lr=-1.0), ValueError, "lr is -1.0; expected a finite number"),
    ("ftol", lambda: jp.minimize(bowl, START, ftol=-1.0), ValueError, "ftol is -1.0; expected a number that is not"),
    ("tol-nan", lambda: jp.minimize(bowl, START, tol=math.nan), ValueError, "ftol is nan; expected a number"),
    ("maxiter", lambda: jp.minimize(bowl, START, maxiter=-1), ValueError, "maxiter is -1; expected a whole number"),
    ("maxfev", lambda: jp.minimize(bowl, START, maxfev=0), ValueError, "maxfev is 0; expected a positive whole number"),
    (
        "parts-missing",
        lambda: jp.minimize(bowl, START, "hyperplane", solver=AbsoluteCurvature()),
        TypeError,
        "method 'hyperplane' lacks directions, curvature; expected all of directions, curvature, solver",
    ),
    (
        "parts-of-named",
        lambda: jp.minimize(bowl, START, "fomoh", directions=Sphere(1)),
        TypeError,
        "method 'fomoh' has its own directions and curvature; expected method='hyperplane'",
    ),
    (
        "vector",
        lambda: jp.minimize(lambda x: x, START),
        ValueError,
        r"returned a tensor of shape \(2,\); expected a sc",
    ),
    ("none", lambda: jp.minimize(lambda x: None, START), TypeError, "returned None; expected the loss as a scalar"),
    ("float", lambda: jp.minimize(lambda x: 1.0, START), TypeError, "returned float 1.0; expected the loss"),
]


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_input(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert START.tolist() == [-1.2, 1.0]


def test_inside_a_compiled_function() -> None:
    torch.compiler.reset()

    def found(x: Tensor) -> Tensor:
        return jp.minimize(bowl, 2 * x, k=2).x + 1

    assert torch.equal(torch.compile(found, backend="eager")(torch.zeros(3)), found(torch.zeros(3)))
