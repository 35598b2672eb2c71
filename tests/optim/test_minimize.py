"""``jp.minimize``: scipy's shape, pytrees, tolerances and bounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import scipy.optimize
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
        "method is 'adam'; expected one of 'fgd', 'fomoh', 'fomoh-bp', 'fomoh-kd', 'gauss-newton', 'newton', ",
    ),
    ("fun", lambda: jp.minimize(3, START), TypeError, "fun is int; expected a function"),
    ("x0-empty", lambda: jp.minimize(bowl, []), ValueError, "x0 holds no tensor; expected at least one to move"),
    ("x0-float", lambda: jp.minimize(bowl, "1.0"), TypeError, "x0 is str; expected a tensor"),
    ("x0-bool", lambda: jp.minimize(bowl, True), TypeError, "x0 is bool; expected a tensor"),
    ("x0-int", lambda: jp.minimize(bowl, torch.arange(3)), TypeError, "x0 has dtype torch.int64; only floating"),
    ("x0-part", lambda: jp.minimize(bowl, [START, 3]), TypeError, "tensor 1 of x0 is int; expected a tensor"),
    ("k-zero", lambda: jp.minimize(bowl, START, k=0), ValueError, "k is 0; expected at least one direction"),
    ("k-large", lambda: jp.minimize(bowl, START, k=3), ValueError, "k is 3, but the parameters have 2 entries"),
    (
        "k-not-taken",
        lambda: jp.minimize(bowl, START, "newton", k=2),
        TypeError,
        "method 'newton' takes no k; expected it for 'fgd', 'fomoh-kd', 'gauss-newton' only",
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
        "method 'fomoh' has its own directions and curvature; expected method='hyperplane' or 'fomoh-kd'",
    ),
    (
        "vector",
        lambda: jp.minimize(lambda x: x, START),
        ValueError,
        r"returned a tensor of shape \(2,\); expected a sc",
    ),
    (
        "args-as-method",
        lambda: jp.minimize(bowl, START, (1.0,)),
        ValueError,
        r"method is \(1.0,\); .* Further arguments of fun are args=\(...\)",
    ),
    (
        "option",
        lambda: jp.minimize(bowl, START, "newton", options={"xatol": 1e-3}),
        TypeError,
        "method 'newton' takes no 'xatol'; expected options among tol, ftol, gtol, maxiter, maxfev, disp, accept",
    ),
    (
        "solver",
        lambda: jp.minimize(bowl, START, solver="lbfgs"),
        ValueError,
        "solver is 'lbfgs'; expected a solver or one of 'negative-slope', 'absolute-curvature'",
    ),
    (
        "bounds",
        lambda: jp.minimize(bowl, START, bounds=[(0, 1), (0, 1)]),
        ValueError,
        "bounds are given, and a step in a plane does not keep to them; expected None",
    ),
    (
        "constraints",
        lambda: jp.minimize(bowl, START, constraints={"type": "eq", "fun": bowl}),
        ValueError,
        "constraints are given, and no method here keeps to them; expected none",
    ),
    ("none", lambda: jp.minimize(lambda x: None, START), TypeError, "returned None; expected the loss as a scalar"),
    ("float", lambda: jp.minimize(lambda x: 1.0, START), TypeError, "returned float 1.0; expected the loss"),
]


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_input(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert START.tolist() == [-1.2, 1.0]


# -- as scipy's users call it ---------------------------------------------------------------------------------------


def starts(entries: int) -> list[Tensor]:
    drawn = [torch.randn(entries, dtype=F64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    return [torch.zeros(entries, dtype=F64), torch.full((entries,), 3.0, dtype=F64), *drawn]


@pytest.mark.parametrize("start", starts(20), ids=["zeros", "threes", "random-0", "random-1", "random-2"])
def test_nothing_chosen_gets_through_rosenbrock_in_20_dimensions(start: Tensor) -> None:
    result = jp.minimize(rosenbrock, start)
    assert result.success and result.fun < 1e-12, result
    assert_close(result.x, torch.ones(20, dtype=F64), 1e-6)
    assert result.history == sorted(result.history, reverse=True)


def test_nothing_chosen_where_there_are_many_entries() -> None:
    """More entries than Newton's method is chosen for: a plane, with past steps in it."""
    scale, start = torch.linspace(1, 100, 201, dtype=F64), torch.zeros(201, dtype=F64)
    choices: list[dict[str, Any]] = [{}, {"k": 32}]
    runs = [jp.minimize(lambda x: (scale * (x - 1) ** 2).sum(), start, maxiter=60, **more) for more in choices]
    assert runs[0].jac is None and runs[0].fun < 0.8 * runs[1].fun < 0.01 * float(scale.sum())
    assert jp.minimize(bowl, torch.zeros(201), maxiter=1, jac=True).jac.shape == (201,)
    assert jp.minimize(bowl, torch.zeros(3), jac=False).jac is None


def test_arrays_in_and_out() -> None:
    x0 = numpy.array([-1.2, 1.0])
    ours, theirs = jp.minimize(rosenbrock, x0), scipy.optimize.minimize(scipy.optimize.rosen, x0, method="BFGS")
    assert type(ours.x) is type(ours.jac) is numpy.ndarray and ours.x.dtype == numpy.float64
    numpy.testing.assert_allclose(ours.x, theirs.x, atol=1e-4)
    numpy.testing.assert_allclose(ours.jac, scipy.optimize.rosen_der(ours.x), atol=1e-12)
    assert x0.tolist() == [-1.2, 1.0] and float(scipy.optimize.rosen(ours.x)) == ours.fun
    assert jp.minimize(bowl, numpy.float32([3, 4])).x.dtype == numpy.float32
    tree = jp.minimize(lambda tree: bowl(tree["a"]) + bowl(tree["b"]), {"a": numpy.zeros(2), "b": torch.zeros(1)})
    assert type(tree.x["a"]) is numpy.ndarray and type(tree.x["b"]) is Tensor


@pytest.mark.parametrize("x0", [[3, 4], (3.0, 4), [[3.0], [4.0]], 3.0, 3])
def test_lists_and_numbers_in_and_tensors_out(x0: Any) -> None:
    result = jp.minimize(bowl, x0)
    assert result.success and result.x.shape == torch.tensor(x0).shape and result.x.dtype == F64
    assert_close(result.x, torch.ones_like(result.x))


@pytest.mark.parametrize("point", [0.5, 1.5])
def test_the_gradient_in_the_result_is_that_at_the_best_point(point: float) -> None:
    """Newton's step with lr 3.5 goes away, so the best point is the first and not the last."""
    result = jp.minimize(bowl, torch.tensor([point], dtype=F64), "newton", lr=3.5, maxiter=3)
    assert float(result.x) == point and float(result.jac) == 2 * (point - 1)
    spent = jp.minimize(bowl, torch.tensor([point], dtype=F64), "newton", lr=3.5, maxfev=3)
    assert spent.nfev == 3 and spent.jac is None and float(spent.x) == point  # no call was left for it


def test_items_and_attributes() -> None:
    result = jp.minimize(bowl, START)
    assert result["x"] is result.x and result["fun"] == result.fun == dict(result)["fun"]
    assert "jac" in result and len(result) == len(list(result)) == 9
    with pytest.raises(KeyError, match="'hess_inv'; expected one of x, fun, jac, success"):
        result["hess_inv"]


def test_args_and_options() -> None:
    def fun(x: Tensor, target: float, scale: Tensor) -> Tensor:
        return (scale * (x - target) ** 2).sum()

    result = jp.minimize(fun, START, args=(2.0, torch.tensor([1.0, 5.0])), options={"maxiter": 50, "seed": 3})
    assert_close(result.x, torch.full((2,), 2.0, dtype=F64))
    one = jp.minimize(lambda x, target: ((x - target) ** 2).sum(), START, args=4.0)  # not a tuple, as scipy allows
    assert_close(one.x, torch.full((2,), 4.0, dtype=F64))
    assert jp.minimize(rosenbrock, START, options={"maxiter": 2}).nit == 2
    points = numpy.array([[1.0, 0.0], [0.0, 2.0]])
    fit = jp.minimize(
        lambda w, x, y: (x @ w - y).square().sum(), numpy.zeros(2), args=(points, numpy.array([1.0, 4.0]))
    )
    numpy.testing.assert_allclose(fit.x, [1.0, 2.0])


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    jp.minimize(lambda x: (x**2).sum(), START, "newton", options={"disp": True}, maxiter=1)
    assert (
        capsys.readouterr().out == "jetplane: the limit of 1 iterations is reached. fun = 0, 1 steps, 2 calls of fun.\n"
    )


def test_steps_that_come_to_rest_above_the_best_point_are_no_success() -> None:
    himmelblau = lambda x: (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2  # noqa: E731
    result = jp.minimize(himmelblau, [0.0, 0.0], "newton")  # the paper's solver goes to the maximum at (-0.27, -0.92)
    assert (result.success, result.status, result.x.tolist(), result.fun) == (False, Ending.ELSEWHERE, [0, 0], 170)
    assert "came to rest where fun is 181.617, and x, the best point seen, was on the way" in result.message
    assert jp.minimize(lambda x: -himmelblau(x), [0.0, 0.0], "newton").success  # where that is a minimum


SOLVERS = ["saddle-free", "soft-abs", "damped", "trust-region", "cubic", "jittered-inverse", "levenberg-marquardt"]


@pytest.mark.parametrize("solver", [*SOLVERS, "Trust_Region", "absolute-curvature"])
def test_solvers_by_name(solver: str) -> None:
    k = 1 if solver == "absolute-curvature" else None
    assert jp.minimize(bowl, START, k=k, solver=solver, maxiter=2000).fun < 1e-6


@pytest.mark.parametrize("method", [*METHODS, "FoMoH_KD", "gauss-newton"])
def test_a_custom_method_of_scipy(method: str) -> None:
    def fun(x: Tensor, offset: float) -> Tensor:
        return torch.nn.functional.mse_loss(x, torch.ones_like(x), reduction="sum") + offset

    lr = {"lr": 0.05} if method == "fgd" else {}
    options = {"method": method, "maxiter": 3000, **lr}
    theirs = scipy.optimize.minimize(fun, [3.0, -2.0], args=(2.0,), method=jp.minimize, tol=1e-10, options=options)
    assert isinstance(theirs, Result) and theirs.success, theirs
    numpy.testing.assert_allclose(theirs.x, [1.0, 1.0], atol=1e-3)


def test_scipy_with_nothing_chosen_and_a_callback() -> None:
    seen: list[Result] = []
    x0 = numpy.tile([1.3, 0.7], 5)
    ours = scipy.optimize.minimize(rosenbrock, x0, method=jp.minimize, callback=seen.append)
    theirs = scipy.optimize.minimize(scipy.optimize.rosen, x0, jac=scipy.optimize.rosen_der)
    numpy.testing.assert_allclose(ours.x, theirs.x, atol=1e-4)
    assert len(seen) == ours.nit and ours.fun <= theirs.fun


def test_a_callback_of_the_point_as_scipys_users_write_it() -> None:
    seen: list[numpy.ndarray] = []

    def callback(xk: numpy.ndarray) -> None:
        seen.append(xk.copy())

    ours = scipy.optimize.minimize(rosenbrock, START.numpy(), method=jp.minimize, callback=callback)
    assert len(seen) == ours.nit and all(isinstance(x, numpy.ndarray) for x in seen)
    numpy.testing.assert_allclose(seen[-1], ours.x, atol=1e-6)


def test_derivatives_that_are_given_are_not_used_and_bounds_are_refused() -> None:
    with pytest.warns(RuntimeWarning, match="jac and hess given, and not used"):
        result = scipy.optimize.minimize(
            rosenbrock, START.numpy(), jac=scipy.optimize.rosen_der, hess=scipy.optimize.rosen_hess, method=jp.minimize
        )
    assert result.success
    with pytest.raises(ValueError, match="bounds are given"):
        scipy.optimize.minimize(rosenbrock, START.numpy(), bounds=[(0, 1)] * 2, method=jp.minimize)


def test_a_function_of_numpy_is_refused_in_words() -> None:
    with pytest.raises(jp.UnsupportedProgram, match="fun computes with numpy; expected a program of torch's functions"):
        jp.minimize(scipy.optimize.rosen, START.numpy())


def test_inside_a_compiled_function() -> None:
    torch.compiler.reset()

    def found(x: Tensor) -> Tensor:
        return jp.minimize(bowl, 2 * x, k=2).x + 1

    assert torch.equal(torch.compile(found, backend="eager")(torch.zeros(3)), found(torch.zeros(3)))
