"""Minimisation of a function, shaped like scipy's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import solvers
from ..ad import _torch
from ..ad.run.passes import check_leaf
from ..ad.run.transforms import gradient
from ..directions import Gaussian, Momentum
from ..errors import OptimizationStalled, UnsupportedProgram
from ..solvers import Status, adaptive
from .acceptance import Acceptance
from .arrays import StartPoint, as_tensors
from .named import FGD, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, Newton, Options
from .result import Ending, Result
from .search import HyperplaneSearch
from .stalling import explain

__all__ = ["METHODS", "minimize"]

METHODS: dict[str, type[HyperplaneSearch]] = {
    "fgd": FGD,
    "fomoh": FoMoH,
    "fomoh-bp": FoMoHBP,
    "fomoh-kd": FoMoHKD,
    "gauss-newton": GaussNewtonSearch,
    "newton": Newton,
    "hyperplane": HyperplaneSearch,
}
_WITH_K = ("fgd", "fomoh-kd", "gauss-newton")
_FEWEST = {"fgd": 1, "fomoh-kd": 2}  # directions, where k is not given
_QUIET = 3  # iterations in a row: one random plane may lie along a level line by chance
_SMALL = 200  # entries up to which all coordinates at once are cheap: a default Newton, and the gradient in the result
_HORIZONS, _FRESH = (0.0, 0.9, 0.99), 29  # beyond that a default plane: averages of past steps, and random directions
_BACKTRACKS = 20


@_torch.apart_from_graphs
def minimize(
    fun: Callable[..., Any],
    x0: Any,
    method: str | None = None,
    *,
    args: Any = (),
    jac: Any = None,
    hess: Any = None,
    hessp: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    k: int | None = None,
    lr: float | None = None,
    tol: float | None = None,
    ftol: float = 1e-12,
    gtol: float = 1e-8,
    maxiter: int = 1000,
    maxfev: int | None = None,
    seed: int = 0,
    disp: bool = False,
    callback: Callable[[Any], Any] | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Result:
    """Minimise a scalar function of a tensor, or of a pytree of tensors, without backward passes.

    ``fun(x, *args)`` is a PyTorch program; numpy arrays among ``args`` become tensors. ``x0`` is a tensor, a pytree of
    tensors, a numpy array (``fun`` is given a tensor, and the result holds arrays), a number, or a list of numbers
    (float64 tensors); it is not changed.

    ``method`` is "fgd", "fomoh", "fomoh-bp", "fomoh-kd", "gauss-newton", "newton", or "hyperplane" with ``directions``,
    ``curvature`` and ``solver`` for any composition. With none, it is Newton's method where x0 has at most 200 entries,
    and else "fomoh-kd" with k directions, or without k with averages of past steps and random directions, 32 in all;
    both with a solver that descends, "saddle-free", and steps that are halved until the loss does not rise. ``solver``
    may be a name. All other names, as keywords or in the dictionary ``options``, go to the optimizer.

    Converged means that in three iterations in a row the loss changed by at most ``ftol * max(|loss|, 1)``, or the
    norm of the slope along the directions was at most ``gtol``; ``tol`` sets both. Steps that came to rest above the
    best point that they had seen are no success: the paper's solver may go to a saddle or a maximum. ``fun`` is called
    at most ``maxfev`` times. ``callback(intermediate_result)`` follows each iteration with a Result, or
    ``callback(xk)``, by that name or as ``x``, with its point; it may raise StopIteration. ``disp`` prints the end.

    x of the result is the best point that was seen, and jac the gradient there, from a forward pass: by default where
    x0 has at most 200 entries, with ``jac=True`` always, with ``jac=False`` never. Steps that are rejected count as
    converged where they promised less than ``ftol`` allows; ``patience`` others in a row end the search as stalled.

    ``scipy.optimize.minimize(fun, x0, method=jetplane.minimize)`` takes it as a method of its own; ``options`` hold the
    name of ours. Derivatives given as functions are not used; bounds and constraints are refused.

    Example:
        >>> def rosenbrock(x):
        ...     return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()
        >>> result = minimize(rosenbrock, [-1.2, 1.0])
        >>> result.success, result.message
        (True, 'the tolerances are met.')
        >>> torch.testing.assert_close(result.x, torch.ones(2, dtype=torch.float64))
        >>> plane = minimize(rosenbrock, [-1.2, 1.0], "fomoh-kd", k=2)  # the paper's solver
        >>> plane.success and plane.nfev == plane.nit + 1  # one pass for each step, and the value at the end
        True
    """
    if not callable(fun):
        raise TypeError(f"fun is {type(fun).__name__}; expected a function.")
    _check_scipy(jac, hess, hessp, bounds, constraints)
    given: dict[str, Any] = {
        "k": k,
        "lr": lr,
        "tol": tol,
        "ftol": ftol,
        "gtol": gtol,
        "maxiter": maxiter,
        "maxfev": maxfev,
    }
    given |= {"seed": seed, "disp": disp, **more, **(options or {})}
    rules = _Rules.of(given)
    point = _Point(fun, x0, args, math.inf if rules.maxfev is None else rules.maxfev)
    optimizer = _optimizer(method, point.leaves, given.pop("k"), given.pop("lr"), given)
    search = _Search(point, optimizer, rules, point.entries <= _SMALL if callable(jac) or jac is None else bool(jac))
    result = search.result(*search.run(callback))
    if rules.disp:
        print(f"jetplane: {result.message} fun = {result.fun:.6g}, {result.nit} steps, {result.nfev} calls of fun.")
    return result


def _check_scipy(jac: Any, hess: Any, hessp: Any, bounds: Any, constraints: Any) -> None:
    """Refuse what would change the problem, and warn of what is not used, as scipy does."""
    if bounds is not None:
        raise ValueError(
            "bounds are given, and a step in a plane does not keep to them; expected None. A function of z with "
            "x = low + (high - low) * z.sigmoid() keeps x between low and high."
        )
    if constraints is not None and (not isinstance(constraints, list | tuple) or len(constraints) > 0):
        raise ValueError("constraints are given, and no method here keeps to them; expected none.")
    used = [name for name, one in (("jac", jac), ("hess", hess), ("hessp", hessp)) if callable(one)]
    if used:
        names = " and ".join(used)
        warnings.warn(f"{names} given, and not used: derivatives come from forward passes of fun.", RuntimeWarning, 3)


@dataclass(frozen=True)
class _Rules:
    """When the iterations end."""

    ftol: float
    gtol: float
    maxiter: int
    maxfev: int | None
    disp: bool

    @classmethod
    def of(cls, given: dict[str, Any]) -> _Rules:
        """Take the rules out of all that was given."""
        tol = given.pop("tol")
        ftol, gtol = given.pop("ftol"), given.pop("gtol")
        if tol is not None:
            ftol = gtol = tol
        rules = cls(ftol, gtol, given.pop("maxiter"), given.pop("maxfev"), given.pop("disp"))
        _check_limits(rules.ftol, rules.gtol, rules.maxiter, rules.maxfev)
        return rules


def _stops(callback: Callable[[Any], Any], result: Result) -> bool:
    """Whether the callback ends the iterations."""
    try:
        callback(result.x if _wants_point(callback) else result)
    except StopIteration:
        return True
    return False


def _wants_point(callback: Callable[[Any], Any]) -> bool:
    """Whether it is one of scipy's older kind, ``callback(xk)``."""
    try:
        names = list(inspect.signature(callback).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return names[:1] in (["xk"], ["x"])


class _Spent(Exception):
    """The next call of fun would be one too many."""


class _Point:
    """The point that moves, and the function there, with its calls counted."""

    def __init__(self, fun: Callable[..., Any], x0: Any, args: Any, most: float) -> None:
        self._start = StartPoint(x0)
        given = self._start.leaves
        if not given:
            raise ValueError("x0 holds no tensor; expected at least one to move.")
        for position, leaf in enumerate(given):
            check_leaf(leaf, "x0" if len(given) == 1 else f"tensor {position} of x0")
        self.leaves: list[Tensor] = [leaf.detach().clone().requires_grad_() for leaf in given]
        self.entries = sum(leaf.numel() for leaf in self.leaves)
        self._fun = fun
        self._args = as_tensors(args)
        self._most = most
        self.calls = 0

    def copy(self) -> list[Tensor]:
        """A copy of the point."""
        return [leaf.detach().clone() for leaf in self.leaves]

    def result(self, tensors: list[Tensor]) -> Any:
        """Tensors as the user gave x0."""
        return self._start.back([tensor.clone() for tensor in tensors])

    def __call__(self, reserve: int = 1) -> Any:
        """The value at the point, unless only ``reserve`` calls are left: one is kept for the value at the end."""
        if self.calls + reserve >= self._most:
            raise _Spent
        return self._value(self.leaves)

    def gradient(self, tensors: list[Tensor]) -> tuple[list[Tensor], float] | None:
        """Gradient and value at a point, from one call, if one is left."""
        if self.calls >= self._most:
            return None

        def twice(tensors: list[Tensor]) -> tuple[Any, Any]:
            value = self._value(tensors)
            return value, value

        slope, value = gradient(twice, tensors, has_aux=True)
        return slope, float(value)

    def _value(self, tensors: list[Tensor]) -> Any:
        self.calls += 1
        try:
            value = self._fun(self._start.tree(tensors), *self._args)
        except UnsupportedProgram as error:
            if "__array__" not in str(error):
                raise
            raise UnsupportedProgram(
                f"fun computes with numpy; expected a program of torch's functions. {error}"
            ) from None
        if isinstance(value, Tensor) and value.numel() != 1:  # an optimizer would take it for losses of samples
            raise ValueError(f"fun returned a tensor of shape {tuple(value.shape)}; expected a scalar.")
        return value.reshape(()) if isinstance(value, Tensor) else value


class _Search:
    """The iterations, and what is known of them."""

    def __init__(self, point: _Point, optimizer: HyperplaneSearch, rules: _Rules, jac: bool) -> None:
        self._point = point
        self._optimizer = optimizer
        self._rules = rules
        self._wants_jac = jac
        self._jac: list[Tensor] | None = None
        self._quiet = 0
        self._moved = False  # the last step was taken
        self._last = self._best = point.copy(), math.nan  # of the points with a finite value, with that value
        self._rejected, self._promised = 0, False  # steps in a row, and whether one of them promised much
        self._history: list[float] = []

    def run(self, callback: Callable[[Any], Any] | None) -> tuple[Ending, str]:
        """All iterations, and why they ended."""
        ending, message = self._iterate(callback)
        self._finish()
        last, best = self._last[1], self._best[1]
        if ending is Ending.CONVERGED and abs(last - best) > self._little(best):
            return Ending.ELSEWHERE, (
                f"the steps came to rest where fun is {last:.6g}, and x, the best point seen, was on the way; expected "
                "a solver that does not ascend: 'trust-region', 'cubic', 'saddle-free' with a smaller lr."
            )
        return ending, message

    def _little(self, value: float) -> float:
        """What counts as no change of a value."""
        return self._rules.ftol * max(abs(value), 1.0)

    def _iterate(self, callback: Callable[[Any], Any] | None) -> tuple[Ending, str]:
        for _ in range(self._rules.maxiter):
            try:
                quiet = self.step()
            except _Spent:
                return Ending.EVALUATIONS, f"the limit of {self._rules.maxfev} evaluations is reached."
            except OptimizationStalled as error:
                return Ending.STALLED, str(error)
            if callback is not None and _stops(callback, self.result(Ending.RUNNING, "running.")):
                return Ending.CALLBACK, "`callback` raised `StopIteration`."
            if quiet:
                return Ending.CONVERGED, "the tolerances are met."
        return Ending.ITERATIONS, f"the limit of {self._rules.maxiter} iterations is reached."

    def step(self) -> bool:
        """One step; whether the tolerances are met."""
        here = self._point.copy()
        stalled: OptimizationStalled | None = None
        try:
            self._optimizer.step(self._point)
        except OptimizationStalled as error:
            stalled = error
        report = self._optimizer.report
        loss = float(report.loss)
        promises_little = float(report.predicted) <= self._little(loss)
        in_vain = self._is_in_vain(report.status, promises_little)
        quiet = in_vain or self._is_flat(loss, report.slope) or self._is_still(loss)
        self._quiet = self._quiet + 1 if quiet else 0
        self._moved = report.status is Status.OK
        self._record(here, loss)
        if stalled is not None:
            raise stalled
        if self._quiet < _QUIET and not in_vain:
            self._check_rejected(promises_little)
        return self._quiet >= _QUIET

    def _is_flat(self, loss: float, slope: Tensor) -> bool:
        """Whether the slopes of a step are as small as asked for."""
        return math.isfinite(loss) and float(slope.double().norm()) <= self._rules.gtol

    def _is_still(self, loss: float) -> bool:
        """Whether the last step was taken, and the loss is what it was before it."""
        return self._moved and abs(loss - self._history[-1]) <= self._little(loss)

    def _is_in_vain(self, status: Status, promises_little: bool) -> bool:
        """Whether a step was rejected where there is only little to gain, and was from the first one on."""
        if status is not Status.REJECTED:
            self._rejected, self._promised = 0, False
            return False
        self._rejected, self._promised = self._rejected + 1, self._promised or not promises_little
        return not self._promised

    def _check_rejected(self, promises_little: bool) -> None:
        """Raise if too many steps were rejected; a solver with a state has to have come to short ones first."""
        patience, waits = self._optimizer.patience, adaptive(self._optimizer.solver) and not promises_little
        if patience is not None and self._rejected >= patience and not waits:
            raise OptimizationStalled(explain(self._rejected, Status.REJECTED))

    def _finish(self) -> None:
        """Find the value after the last step, and the gradient at the best point."""
        last = self._point.copy()
        found = self._point.gradient(last) if self._wants_jac else None
        if found is None:
            with torch.no_grad():
                self._record(last, float(self._point(reserve=0)))
            return
        self._record(last, found[1])
        if self._best[0] is not last:
            found = self._point.gradient(self._best[0])
        self._jac = None if found is None else found[0]

    def result(self, ending: Ending, message: str) -> Result:
        """What is known now; while running, the point before the last step and the value there."""
        x, value = self._last if ending is Ending.RUNNING else self._best
        jac = None if self._jac is None else self._point.result(self._jac)
        nit = len(self._history) - (ending is not Ending.RUNNING)
        success = ending is Ending.CONVERGED
        x, calls = self._point.result(x), self._point.calls
        return Result(x, value, jac, success, int(ending), message, nit, calls, list(self._history))

    def _record(self, here: list[Tensor], loss: float) -> None:
        if math.isfinite(loss) or not self._history:
            self._last = here, loss
            better = loss >= self._best[1] if self._optimizer.maximize else loss <= self._best[1]
            if better or not math.isfinite(self._best[1]):
                self._best = here, loss
        self._history.append(loss)


def _optimizer(
    method: str | None, leaves: list[Tensor], k: int | None, lr: float | None, options: dict[str, Any]
) -> HyperplaneSearch:
    if "solver" in options:
        options["solver"] = solvers.find(options["solver"])
    size = sum(leaf.numel() for leaf in leaves)
    name = _default(size, k, options) if method is None else _known(method)
    _check_composition(name, options)
    if name == "hyperplane":
        options.setdefault("lr", 1.0)
    if name in _WITH_K:
        if k is None and "directions" not in options and name in _FEWEST:
            k = min(_FEWEST[name], size)
        options["k"] = k
    elif k is not None:
        raise TypeError(f"method {method!r} takes no k; expected it for {', '.join(map(repr, _WITH_K))} only.")
    if lr is not None:
        options["lr"] = lr
    _check_names(name, options)
    return METHODS[name](leaves, **options)


def _known(method: object) -> str:
    name = method.lower().replace("_", "-") if isinstance(method, str) else ""
    if name not in METHODS:
        hint = " Further arguments of fun are args=(...)." if isinstance(method, tuple) else ""
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}.{hint}")
    return name


def _default(size: int, k: int | None, options: dict[str, Any]) -> str:
    """The method where none is named. Its steps go downhill, and are halved until the loss does not rise."""
    if "directions" in options and "curvature" in options and "solver" in options:
        return "hyperplane"
    if "solver" not in options:
        options["solver"] = solvers.SaddleFree()
        options.setdefault("accept", Acceptance(_BACKTRACKS))
    if k is None and size <= _SMALL:
        return "newton"
    if k is None and "directions" not in options:
        options["directions"] = [Momentum(_HORIZONS), Gaussian(_FRESH)]
    return "fomoh-kd"


def _check_names(name: str, options: dict[str, Any]) -> None:
    """Raise for an option that the method does not take."""
    known = {*Options.__annotations__, *inspect.signature(METHODS[name].__init__).parameters} - {"self", "params"}
    known -= {"options"}
    unknown = [one for one in options if one not in known]
    if unknown:
        mine = ["tol", "ftol", "gtol", "maxiter", "maxfev", "disp"]
        raise TypeError(
            f"method {name!r} takes no {', '.join(map(repr, unknown))}; expected options among "
            f"{', '.join([*mine, *sorted(known)])}."
        )


def _check_composition(method: str, options: dict[str, Any]) -> None:
    """Raise unless there are directions, curvature and solver where the method has none of its own."""
    parts = ("directions", "curvature", "solver")
    missing = [name for name in parts if name not in options]
    if method == "hyperplane" and missing:
        raise TypeError(f"method 'hyperplane' lacks {', '.join(missing)}; expected all of {', '.join(parts)}.")
    if method not in ("hyperplane", "fomoh-kd") and ("directions" in options or "curvature" in options):
        raise TypeError(
            f"method {method!r} has its own directions and curvature; expected method='hyperplane' or 'fomoh-kd'."
        )


def _check_limits(ftol: float, gtol: float, maxiter: int, maxfev: int | None) -> None:
    for name, value in (("ftol", ftol), ("gtol", gtol)):
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number that is not negative.")
    if not isinstance(maxiter, int) or maxiter < 0:
        raise ValueError(f"maxiter is {maxiter!r}; expected a whole number from 0.")
    if maxfev is not None and (not isinstance(maxfev, int) or maxfev < 1):
        raise ValueError(f"maxfev is {maxfev!r}; expected a positive whole number or None.")
