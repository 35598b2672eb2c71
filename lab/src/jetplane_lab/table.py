"""All solvers on all test functions, beside torch.optim's and scipy's, from common starts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetplane import curvature, directions, optim, solvers

from .functions import FUNCTIONS, TestFunction, find
from .records import Row
from .rosenbrock import ADAM_LR, LR, Part

__all__ = ["Case", "Outcome", "cases", "markdown", "methods", "table"]

_FTOL, _GTOL, _QUIET = 1e-12, 1e-8, 3  # the tolerances of jetplane.minimize, for the loop around torch.optim as well


class Case(NamedTuple):
    """A function in a dimension, and how many directions the planes have there."""

    entry: TestFunction
    dim: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.entry.name} {self.dim}D"


class Outcome(NamedTuple):
    """Where a run ended, and what it cost."""

    x: Tensor
    calls: int  # of the function, with or without derivatives


Method = Callable[[Case, Tensor, int, int], Outcome]  # (case, start, seed, steps)


def cases() -> list[Case]:
    """Every function in 2D with K = 2, and the Rosenbrock function in 10D with K = 5."""
    flat = [Case(entry, entry.dim(2), 2) for entry in FUNCTIONS.values()]
    return [*flat, Case(find("rosenbrock"), 10, 5)]


# -- methods ------------------------------------------------------------------------------------------------------


def methods() -> dict[str, Method]:
    """All methods of the table, by label; scipy's only where it is installed."""
    accept = optim.Acceptance(backtracks=30)
    known: dict[str, Method] = {
        "FGD: Gaussian(1), NegativeSlope": _ours(1, solvers.NegativeSlope(), lr=LR, hessian=False),
        "FoMoH: Gaussian(1), AbsoluteCurvature": _ours(1, solvers.AbsoluteCurvature()),
        "FoMoH-BP: Gradient, AbsoluteCurvature": _named("fomoh-bp"),
        "FoMoH-KD: JitteredInverse": _ours(None, solvers.JitteredInverse()),
        "SaddleFree": _ours(None, solvers.SaddleFree(), accept=accept),
        "SoftAbs": _ours(None, solvers.SoftAbs(), accept=accept),
        "Damped": _ours(None, solvers.Damped(), accept=optim.Acceptance()),
        "TrustRegion": _ours(None, solvers.TrustRegion(), accept=optim.Acceptance()),
        "Cubic": _ours(None, solvers.Cubic(), accept=optim.Acceptance()),
        "Newton: Coordinate, JitteredInverse": _named("newton"),
        "torch.optim.SGD": _torch(lambda p: torch.optim.SGD(p, lr=2 * LR)),
        "torch.optim.Adam": _torch(lambda p: torch.optim.Adam(p, lr=ADAM_LR)),
        "torch.optim.LBFGS": _torch(lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe")),
    }
    if scipy() is not None:
        known["scipy trust-ncg"] = _trust_ncg
    return known


def scipy() -> Any:
    """scipy.optimize, or None where it is not installed."""
    try:
        import scipy.optimize  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    return scipy.optimize


def _ours(k: int | None, solver: Any, lr: float = 1.0, hessian: bool = True, accept: Any = None) -> Method:
    """A composition with K Gaussian directions; K is the case's where it is None."""

    def run(case: Case, start: Tensor, seed: int, steps: int) -> Outcome:
        parts = {
            "directions": directions.Gaussian(case.k if k is None else k),
            "curvature": curvature.ExactHessian() if hessian else curvature.NoCurvature(),
            "solver": solver,
        }
        return _minimize(case, start, "hyperplane", seed, steps, lr=lr, accept=accept, **parts)

    return run


def _named(name: str) -> Method:
    def run(case: Case, start: Tensor, seed: int, steps: int) -> Outcome:
        return _minimize(case, start, name, seed, steps, lr=1.0)

    return run


def _minimize(case: Case, start: Tensor, name: str, seed: int, steps: int, **options: Any) -> Outcome:
    options |= {"patience": None}  # an adaptive solver may reject many steps before its state fits
    options |= {"ftol": _FTOL, "gtol": _GTOL, "maxiter": steps, "seed": seed}
    result = optim.minimize(case.entry.function, start, name, **options)
    return Outcome(result.x, result.nfev)


def _torch(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Method:
    """One of torch.optim's, stopped by the rule that stops our own."""

    def run(case: Case, start: Tensor, seed: int, steps: int) -> Outcome:
        x = start.clone().requires_grad_()
        optimizer = make([x])
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            value = case.entry.function(x)
            value.backward()
            return value.detach()

        quiet, last = 0, math.inf
        for _ in range(steps):
            value = float(optimizer.step(closure))
            slope = 0.0 if x.grad is None else float(x.grad.norm())
            calm = abs(value - last) <= _FTOL * max(abs(value), 1.0) or slope <= _GTOL
            quiet, last = quiet + 1 if calm else 0, value
            if quiet == _QUIET or not math.isfinite(value):
                break
        return Outcome(x.detach(), calls)

    return run


def _trust_ncg(case: Case, start: Tensor, seed: int, steps: int) -> Outcome:
    """scipy's, with gradient and Hessian by autograd; the calls of all three count."""
    function = case.entry.function

    def tensor(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float64)

    gradient, hessian = torch.func.grad(function), torch.func.hessian(function)
    result = scipy().minimize(
        lambda x: float(function(tensor(x))),
        start.numpy(),
        method="trust-ncg",
        jac=lambda x: gradient(tensor(x)).numpy(),
        hess=lambda x: hessian(tensor(x)).numpy(),
        options={"maxiter": steps, "gtol": _GTOL},
    )
    return Outcome(tensor(result.x), int(result.nfev + result.njev + result.nhev))


# -- rows ---------------------------------------------------------------------------------------------------------


def table(seeds: int = 10, steps: int = 150) -> Part:
    """Every method on every case from every start."""
    known = methods()
    jobs = {
        f"{case.name}/{label}/{seed}": (case, label, seed)
        for case in cases()
        for label in known
        for seed in range(seeds)
    }

    def rows(done: Container[str]) -> Iterator[Row]:
        for key, (case, label, seed) in jobs.items():
            if key not in done:
                yield {
                    "key": key,
                    "case": case.name,
                    "method": label,
                    "seed": seed,
                    **measure(case, label, seed, steps),
                }

    return Part("table", {"steps": steps, "lr": LR, "adam": ADAM_LR}, list(jobs), rows)


def measure(case: Case, label: str, seed: int, steps: int) -> Row:
    """One run: the value above the minimum at its end (None: not finite), the calls and the seconds it took."""
    start = case.entry.start(case.dim, seed)
    begin = time.perf_counter()
    outcome = methods()[label](case, start, seed, steps)
    seconds = time.perf_counter() - begin
    value = float(case.entry.function(outcome.x)) - case.entry.minimum(case.dim)
    return {"above": value if abs(value) < 1e100 else None, "calls": outcome.calls, "seconds": seconds}


# -- Markdown -----------------------------------------------------------------------------------------------------

_TEXT = """\
Written by `jetplane rosenbrock --table`; do not edit. Each method runs from the same {seeds} starts: standard normal
for the Rosenbrock function, uniform in the function's usual box for the others; float64, one CPU thread. A run ends
when its value or slope has hardly changed for three steps (value by 1e-12, slope by 1e-8), or after {steps} steps.

- **median** is the median of the final value above the known minimum; a run that diverged counts as infinite.
- **found** counts the runs that end within 1e-6 of the global minimum. None of the methods searches globally: on a
  function with many minima the start decides.
- **calls** is the median number of function calls (`nfev`). One call of a plane method carries K slopes and K(K+1)/2
  curvatures; one of FGD a single slope; one of torch.optim a backward pass; for scipy the calls of function, gradient
  and Hessian are summed. Calls are therefore not equal in cost.
- **ms** is the median time of a run, dominated by the overhead of single operations on so few numbers: compare within
  this table only.

FoMoH-KD, SaddleFree, SoftAbs, Damped, TrustRegion and Cubic search planes of K fresh Gaussian directions, with K = 2 in
2D and K = 5 in 10D. FGD runs at lr = {lr:g}, SGD at {sgd:g}, Adam at {adam:g}, LBFGS with the strong Wolfe line search
(20 inner iterations a step), all others at lr = 1. SaddleFree and SoftAbs halve a step that ascends; Damped,
TrustRegion and Cubic reject it and adapt.

The paper's own methods (FGD, FoMoH, FoMoH-BP, FoMoH-KD, Newton) take every step: JitteredInverse goes to the stationary
point of the model, whatever its kind, so that it may end in a saddle or a maximum."""


def markdown(rows: Sequence[Row], versions: dict[str, str], seeds: int, steps: int) -> str:
    """The page: first who finds the minimum where, then everything."""
    names = [case.name for case in cases()]
    labels = list(dict.fromkeys(row["method"] for row in rows))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["method"]), []).append(row)
    lines = [
        "# Solvers on test functions",
        "",
        _TEXT.format(seeds=seeds, steps=steps, lr=LR, sgd=2 * LR, adam=ADAM_LR),
        "",
        *(f"{', '.join(f'{name} {version}' for name, version in versions.items())}.", ""),
        "## Runs that find the global minimum",
        "",
        f"Of {seeds}.",
        "",
        "| method | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
        *("| " + " | ".join([label, *(str(_found(groups[n, label])) for n in names)]) + " |" for label in labels),
        "",
        "## All results",
        "",
        "| function | method | median | found | calls | ms |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for (case, label), group in groups.items():
        above = statistics.median(math.inf if row["above"] is None else row["above"] for row in group)
        calls = statistics.median(row["calls"] for row in group)
        seconds = statistics.median(row["seconds"] for row in group)
        cells = [case, label, _value(above), str(_found(group)), f"{calls:g}", _milliseconds(seconds)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _found(rows: Sequence[Row]) -> int:
    return sum(row["above"] is not None and row["above"] < 1e-6 for row in rows)


def _value(above: float) -> str:
    if math.isinf(above):
        return "diverged"
    return "0" if above <= 0 else f"{above:.1e}"  # below zero by the rounding of the known minimum


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"
