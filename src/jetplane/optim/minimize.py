"""Minimisation of a function, shaped like scipy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.passes import check_leaf
from ..errors import OptimizationStalled
from ..solvers import Status, adaptive
from .named import FGD, FoMoH, FoMoHBP, FoMoHKD, Newton
from .result import Ending, Result
from .search import HyperplaneSearch
from .stalling import explain

__all__ = ["METHODS", "minimize"]

METHODS: dict[str, type[HyperplaneSearch]] = {
    "fgd": FGD,
    "fomoh": FoMoH,
    "fomoh-bp": FoMoHBP,
    "fomoh-kd": FoMoHKD,
    "newton": Newton,
    "hyperplane": HyperplaneSearch,
}
_WITH_K = ("fgd", "fomoh-kd")
_QUIET = 3  # iterations in a row: one random plane may lie along a level line by chance


@_torch.apart_from_graphs
def minimize(
    fun: Callable[[Any], Any],
    x0: Any,
    method: str = "fomoh-kd",
    *,
    k: int | None = None,
    lr: float | None = None,
    tol: float | None = None,
    ftol: float = 1e-12,
    gtol: float = 1e-8,
    maxiter: int = 1000,
    maxfev: int | None = None,
    seed: int = 0,
    callback: Callable[[Result], Any] | None = None,
    **options: Any,
) -> Result:
    """Minimise a scalar function of a tensor, or of a pytree of tensors, without backward passes.

    ``method`` is "fgd", "fomoh", "fomoh-bp", "fomoh-kd", "newton", or "hyperplane" with ``directions``, ``curvature``
    and ``solver`` for any composition; ``options`` go to the optimizer. ``x0`` is not changed.

    Converged means that in three iterations in a row the loss changed by at most ``ftol * max(|loss|, 1)``, or the
    norm of the slope along the directions was at most ``gtol``; ``tol`` sets both. ``fun`` is called at most ``maxfev``
    times. ``callback(intermediate_result)`` follows each iteration, and may raise StopIteration.

    x of the result is the best point that was seen. Steps that are rejected count as converged where they promised less
    than ``ftol`` allows; ``patience`` others in a row end the search as stalled.

    Example:
        >>> def rosenbrock(x):
        ...     return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()
        >>> result = minimize(rosenbrock, torch.tensor([-1.2, 1.0], dtype=torch.float64), k=2)
        >>> result.success, result.message
        (True, 'the tolerances are met.')
        >>> torch.testing.assert_close(result.x, torch.ones(2, dtype=torch.float64))
        >>> result.nfev == result.nit + 1  # one pass for each step, and the value at the end
        True
    """
    if not callable(fun):
        raise TypeError(f"fun is {type(fun).__name__}; expected a function.")
    if tol is not None:
        ftol = gtol = tol
    _check_bounds(ftol, gtol, maxiter, maxfev)
    point = _Point(fun, x0, math.inf if maxfev is None else maxfev)
    optimizer = _optimizer(method, point.leaves, k, lr, {**options, "seed": seed})
    search = _Search(point, optimizer, ftol, gtol)
    ending, message = Ending.ITERATIONS, f"the limit of {maxiter} iterations is reached."
    for _ in range(maxiter):
        try:
            quiet = search.step()
        except _Spent:
            ending, message = Ending.EVALUATIONS, f"the limit of {maxfev} evaluations is reached."
            break
        except OptimizationStalled as error:
            ending, message = Ending.STALLED, str(error)
            break
        if callback is not None and _stops(callback, search.result(Ending.RUNNING, "running.")):
            ending, message = Ending.CALLBACK, "`callback` raised `StopIteration`."
            break
        if quiet:
            ending, message = Ending.CONVERGED, "the tolerances are met."
            break
    search.finish()
    return search.result(ending, message)


def _stops(callback: Callable[[Result], Any], result: Result) -> bool:
    """Whether the callback ends the iterations."""
    try:
        callback(result)
    except StopIteration:
        return True
    return False


class _Spent(Exception):
    """The next call of fun would be one too many."""


class _Point:
    """The point that moves, and the function there, with its calls counted."""

    def __init__(self, fun: Callable[[Any], Any], x0: Any, most: float) -> None:
        given, self._structure = _torch.pytree.tree_flatten(x0)
        if not given:
            raise ValueError("x0 holds no tensor; expected at least one to move.")
        for position, leaf in enumerate(given):
            check_leaf(leaf, "x0" if len(given) == 1 else f"tensor {position} of x0")
        self.leaves: list[Tensor] = [leaf.detach().clone().requires_grad_() for leaf in given]
        self._fun = fun
        self._most = most
        self.calls = 0

    def tree(self) -> Any:
        """A copy of the point, with the structure of x0."""
        return _torch.pytree.tree_unflatten([leaf.detach().clone() for leaf in self.leaves], self._structure)

    def __call__(self, reserve: int = 1) -> Any:
        """The value at the point, unless only ``reserve`` calls are left: one is kept for the value at the end."""
        if self.calls + reserve >= self._most:
            raise _Spent
        self.calls += 1
        value = self._fun(_torch.pytree.tree_unflatten(self.leaves, self._structure))
        if isinstance(value, Tensor) and value.numel() != 1:  # an optimizer would take it for losses of samples
            raise ValueError(f"fun returned a tensor of shape {tuple(value.shape)}; expected a scalar.")
        return value


class _Search:
    """The iterations, and what is known of them."""

    def __init__(self, point: _Point, optimizer: HyperplaneSearch, ftol: float, gtol: float) -> None:
        self._point = point
        self._optimizer = optimizer
        self._ftol, self._gtol = ftol, gtol
        self._quiet = 0
        self._moved = False  # the last step was taken
        self._last = self._best = point.tree(), math.nan  # of the points with a finite value, with that value
        self._rejected, self._promised = 0, False  # steps in a row, and whether one of them promised much
        self._history: list[float] = []

    def step(self) -> bool:
        """One step; whether the tolerances are met."""
        here = self._point.tree()
        stalled: OptimizationStalled | None = None
        try:
            self._optimizer.step(self._point)
        except OptimizationStalled as error:
            stalled = error
        report = self._optimizer.report
        loss = float(report.loss)
        flat = math.isfinite(loss) and float(report.slope.double().norm()) <= self._gtol
        little = self._ftol * max(abs(loss), 1.0)
        still = self._moved and abs(loss - self._history[-1]) <= little
        done = self._in_vain(report.status, float(report.predicted) <= little)
        self._quiet = self._quiet + 1 if flat or still or done else 0
        self._moved = report.status is Status.OK
        self._record(here, loss)
        if stalled is not None:
            raise stalled
        if self._quiet < _QUIET and not done:
            self._check_rejected(float(report.predicted) <= little)
        return self._quiet >= _QUIET

    def _in_vain(self, status: Status, little: bool) -> bool:
        """Whether a step was rejected where there is only little to gain, and was from the first one on."""
        if status is not Status.REJECTED:
            self._rejected, self._promised = 0, False
            return False
        self._rejected, self._promised = self._rejected + 1, self._promised or not little
        return not self._promised

    def _check_rejected(self, little: bool) -> None:
        """Raise if too many steps were rejected; a solver with a state has to have come to short ones first."""
        patience = self._optimizer.patience
        if patience is not None and self._rejected >= patience and (little or not adaptive(self._optimizer.solver)):
            raise OptimizationStalled(explain(self._rejected, Status.REJECTED))

    def finish(self) -> None:
        """Find the value after the last step."""
        with torch.no_grad():
            self._record(self._point.tree(), float(self._point(reserve=0)))

    def result(self, ending: Ending, message: str) -> Result:
        """What is known now; while running, the point before the last step and the value there."""
        x, value = self._last if ending is Ending.RUNNING else self._best
        nit = len(self._history) - (ending is not Ending.RUNNING)
        success = ending is Ending.CONVERGED
        return Result(x, value, success, int(ending), message, nit, self._point.calls, list(self._history))

    def _record(self, here: Any, loss: float) -> None:
        if math.isfinite(loss) or not self._history:
            self._last = here, loss
            better = loss >= self._best[1] if self._optimizer.maximize else loss <= self._best[1]
            if better or not math.isfinite(self._best[1]):
                self._best = here, loss
        self._history.append(loss)


def _optimizer(
    method: str, leaves: list[Tensor], k: int | None, lr: float | None, options: dict[str, Any]
) -> HyperplaneSearch:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}.")
    _check_composition(method, options)
    if method == "hyperplane":
        options.setdefault("lr", 1.0)
    if method in _WITH_K:
        size = sum(leaf.numel() for leaf in leaves)
        options["k"] = k if k is not None else min(2 if method == "fomoh-kd" else 1, size)
    elif k is not None:
        raise TypeError(f"method {method!r} takes no k; expected it for {' and '.join(map(repr, _WITH_K))} only.")
    if lr is not None:
        options["lr"] = lr
    return METHODS[method](leaves, **options)


def _check_composition(method: str, options: dict[str, Any]) -> None:
    """Raise unless there are directions, curvature and solver where the method has none of its own."""
    parts = ("directions", "curvature", "solver")
    missing = [name for name in parts if name not in options]
    if method == "hyperplane" and missing:
        raise TypeError(f"method 'hyperplane' lacks {', '.join(missing)}; expected all of {', '.join(parts)}.")
    if method != "hyperplane" and ("directions" in options or "curvature" in options):
        raise TypeError(f"method {method!r} has its own directions and curvature; expected method='hyperplane'.")


def _check_bounds(ftol: float, gtol: float, maxiter: int, maxfev: int | None) -> None:
    for name, value in (("ftol", ftol), ("gtol", gtol)):
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number that is not negative.")
    if not isinstance(maxiter, int) or maxiter < 0:
        raise ValueError(f"maxiter is {maxiter!r}; expected a whole number from 0.")
    if maxfev is not None and (not isinstance(maxfev, int) or maxfev < 1):
        raise ValueError(f"maxfev is {maxfev!r}; expected a positive whole number or None.")
