"""The Rosenbrock study: one step of every method, their runs in 2D, and what the dimension of the plane is worth.

Each part is a list of keys and a generator of JSON-serialisable rows, one row a key, so that a run can be interrupted
and go on. Everything is float64 on the CPU, and a function of the settings alone.

| part | question |
| --- | --- |
| `single_step` | where does one step from one point lead, over many draws of the directions? |
| `histograms` | how are those steps distributed along the coordinates, the gradient and Newton's step? |
| `comparison` | how fast does each method fall in 2D? |
| `planes` | how does FoMoH-KD fall as K grows to D? |
| `descending` | and with a solver that never ascends? |
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jetplane as jp
from jetplane import directions, optim, solvers

from .functions import TestFunction
from .records import Row

__all__ = [
    "ADAM_LR",
    "LR",
    "Claim",
    "Contender",
    "Part",
    "claims",
    "comparison",
    "contenders",
    "descending",
    "draw",
    "ending",
    "fall_with_k",
    "histograms",
    "median_curve",
    "medians",
    "planes",
    "positive_definite_point",
    "rank_correlation",
    "single_step",
    "trajectory",
]

LR = 5e-4  # of FGD; twice this is already more than some starts bear
ADAM_LR = 0.2
_EPSILON = 1e-5  # what FoMoH adds to the absolute curvature


class Part(NamedTuple):
    """A part of the study: the keys of its rows, and the generator that makes those not done yet."""

    name: str
    settings: Row
    keys: list[str]
    rows: Callable[[Container[str]], Iterator[Row]]


# -- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A method in a comparison."""

    make: Callable[[list[Tensor], int], torch.optim.Optimizer]  # of the parameters and a seed
    backprop: bool = False


def contenders(lr: float = LR) -> dict[str, Contender]:
    """The methods of the comparison in 2D, by label."""
    return {
        "FGD": Contender(lambda p, seed: optim.FGD(p, lr=lr, seed=seed)),
        "FGD, 2 lr": Contender(lambda p, seed: optim.FGD(p, lr=2 * lr, seed=seed)),
        "SGD": Contender(lambda p, seed: torch.optim.SGD(p, lr=2 * lr), backprop=True),
        "Adam": Contender(lambda p, seed: torch.optim.Adam(p, lr=ADAM_LR), backprop=True),
        "FoMoH-BP": Contender(lambda p, seed: optim.FoMoHBP(p, lr=1.0, seed=seed), backprop=True),
        "FoMoH": Contender(lambda p, seed: optim.FoMoH(p, lr=1.0, seed=seed)),
        "FoMoH-2D": _plane(2),
        "Newton": _newton(),
    }


def _plane(k: int) -> Contender:
    return Contender(lambda p, seed: optim.FoMoHKD(p, lr=1.0, k=k, seed=seed))


def _descending_plane(k: int) -> Contender:
    solver, accept = solvers.SaddleFree(), optim.Acceptance(backtracks=30)
    return Contender(lambda p, seed: optim.FoMoHKD(p, lr=1.0, k=k, seed=seed, solver=solver, accept=accept))


def _newton() -> Contender:
    return Contender(lambda p, seed: optim.Newton(p, lr=1.0, seed=seed))


def trajectory(entry: TestFunction, contender: Contender, start: Tensor, seed: int, steps: int) -> Row:
    """The values before each step and after the last, and how the run ended.

    A run stops early when it diverges, or when it has stood still for three steps; its last value then stays.
    """
    x = start.clone().requires_grad_()
    optimizer = contender.make([x], seed)

    def closure() -> Any:  # a Tensor; torch's own annotation says float
        value = entry.function(x)
        if not isinstance(optimizer, optim.HyperplaneSearch):
            optimizer.zero_grad()
            value.backward()
        return value

    values: list[float] = []
    still = 0
    for _ in range(steps):
        before = x.detach().clone()
        values.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
        still = still + 1 if torch.equal(x, before) else 0
        if not abs(values[-1]) < 1e100 or still == 3:
            break
    values.append(float(entry.function(x.detach())))
    finite = [value for value in values if abs(value) < 1e100]
    diverged = len(finite) < len(values)
    end = "diverged" if diverged else ending(entry, x.detach())
    return {"values": finite, "end": end, "x": None if diverged else x.tolist()}


def ending(entry: TestFunction, x: Tensor) -> str:
    """What kind of point this is: the minimum, a local minimum, a saddle, a maximum, or none of them yet.

    A point counts as a local minimum when its Hessian is positive definite and the quadratic model falls by less than
    1e-3 from here, which a run in slow convergence passes long before its gradient vanishes.
    """
    above = float(entry.function(x)) - entry.minimum(len(x))
    if above < 1e-6:
        return "minimum"
    gradient, hessian = jp.gradient(entry.function, x), jp.hessian(entry.function, x)
    curvatures = torch.linalg.eigvalsh(hessian)
    if bool((curvatures > 0).all()):
        fall = float(gradient @ torch.linalg.solve(hessian, gradient)) / 2
        return "local minimum" if fall < 1e-3 < above - fall else "under way"
    if float(gradient.norm()) > 1e-6:
        return "under way"
    return "maximum" if bool((curvatures < 0).all()) else "saddle"


class _Job(NamedTuple):
    """A run: seed s gives the start, and with the draw the method's directions."""

    method: str
    seed: int
    draw: int

    @property
    def key(self) -> str:
        return f"{self.method}/{self.seed}/{self.draw}"

    @property
    def directions(self) -> int:
        return self.seed + 1000 * self.draw


def _runs(
    name: str, entry: TestFunction, dim: int, methods: dict[str, Contender], jobs: list[_Job], steps: int, extra: Row
) -> Part:
    def rows(done: Container[str]) -> Iterator[Row]:
        for job in jobs:
            if job.key not in done:
                result = trajectory(entry, methods[job.method], entry.start(dim, job.seed), job.directions, steps)
                yield {"key": job.key, **job._asdict(), **result}

    return Part(name, {"function": entry.name, "dim": dim, "steps": steps, **extra}, [job.key for job in jobs], rows)


def comparison(entry: TestFunction, seeds: int = 10, steps: int = 1000, lr: float = LR) -> Part:
    """All methods in 2D (or the function's own dimension) from common starts."""
    methods = contenders(lr)
    jobs = [_Job(label, seed, 0) for label in methods for seed in range(seeds)]
    return _runs("comparison", entry, entry.dim(2), methods, jobs, steps, {"lr": lr, "adam": ADAM_LR})


def planes(
    entry: TestFunction, dim: int = 10, ks: Sequence[int] = (), seeds: int = 10, steps: int = 100, draws: int = 10
) -> Part:
    """FoMoH-KD for every K, and Newton, in a higher dimension from common starts.

    Each start is run with several independent draws of the directions: where K is a little less than D a plane is often
    indefinite, single runs are thrown far uphill, and a median over ten runs still depends on the draw. Newton draws
    nothing, and K = D spans the whole space in any draw, so one is enough for them.

    Ten draws were chosen after three had given a rank correlation of K with the median of 0.53 at step 100; ten give
    0.90. Twenty further draws, run once to confirm it with the step fixed beforehand, gave 1.00; of those draws alone
    (ten runs each) 16 of 20 reach 0.9, of the first ten draws 4.
    """
    dim, ks = _plane_sizes(entry, dim, ks)
    methods = {f"K = {k}": _plane(k) for k in ks} | {"Newton": _newton()}
    once = (f"K = {dim}", "Newton")
    jobs = [
        _Job(label, seed, draw)
        for label in methods
        for draw in range(1 if label in once else draws)
        for seed in range(seeds)
    ]
    return _runs("planes", entry, dim, methods, jobs, steps, {})


def descending(entry: TestFunction, dim: int = 10, ks: Sequence[int] = (), seeds: int = 10, steps: int = 100) -> Part:
    """The same planes with absolute eigenvalues, and steps that are halved until the value does not rise."""
    dim, ks = _plane_sizes(entry, dim, ks)
    methods = {f"K = {k}": _descending_plane(k) for k in ks} | {"Newton": _newton()}
    jobs = [_Job(label, seed, 0) for label in methods for seed in range(seeds)]
    return _runs("descending", entry, dim, methods, jobs, steps, {"solver": "SaddleFree", "backtracks": 30})


def _plane_sizes(entry: TestFunction, dim: int, ks: Sequence[int]) -> tuple[int, list[int]]:
    dim = entry.dim(dim)
    ks = list(ks) or list(range(min(2, dim), dim + 1))
    if max(ks) > dim:
        raise ValueError(f"K = {max(ks)} is more than the {dim} dimensions of the {entry.name} function.")
    return dim, ks


# -- one step -----------------------------------------------------------------------------------------------------


def positive_definite_point(entry: TestFunction, dim: int = 2, tries: int = 1000) -> tuple[Tensor, int]:
    """The first seeded start whose Hessian is positive definite, and its seed: only there has FoMoH's step a mean."""
    for seed in range(tries):
        point = entry.start(dim, seed)
        if float(torch.linalg.eigvalsh(jp.hessian(entry.function, point)).min()) > 0:
            return point, seed
    raise RuntimeError(f"none of {tries} random points of the {entry.name} function has a positive definite Hessian.")


def draw(point: Tensor, samples: int, k: int, seed: int = 0) -> Tensor:
    """The Gaussian directions (samples, K, D) of so many steps."""
    plane = directions.Plane(seed, 0, 0, [point], lambda: [])
    rows = directions.Gaussian(samples * k).draw(plane).rows(0, point, 0, samples * k)
    return rows.reshape(samples, k, -1)


def single_step(entry: TestFunction, samples: int = 10_000, lr: float = LR) -> Part:
    """Many samples of each method's step from one point in 2D, all from one gradient and one Hessian.

    The slopes V g and curvatures V H V^T of all samples are products of matrices, so that 10,000 steps take
    milliseconds; a test compares some of them with the optimizers' own.
    """
    dim = entry.dim(2)
    keys = ["point", "FGD", "FoMoH", "FoMoH-2D", "FoMoH-BP", "Newton"]

    def rows(done: Container[str]) -> Iterator[Row]:
        point, seed = positive_definite_point(entry, dim)
        g, h = jp.gradient(entry.function, point), jp.hessian(entry.function, point)
        v, w = draw(point, samples, 1), draw(point, samples, 2, seed=1)
        steps = {
            "FGD": lambda: -lr * (v @ g) * v[:, 0],
            "FoMoH": lambda: _line(v[:, 0], g, h),
            "FoMoH-2D": lambda: -(torch.linalg.solve(w @ h @ w.mT, w @ g)[:, None, :] @ w)[:, 0],
            "FoMoH-BP": lambda: _line(g[None], g, h),
            "Newton": lambda: -torch.linalg.solve(h, g)[None],
        }
        facts = {"point": point, "gradient": g, "hessian": h, "value": entry.function(point)}
        if "point" not in done:
            yield {"key": "point", "seed": seed, "lr": lr, **{name: fact.tolist() for name, fact in facts.items()}}
        for method, step in steps.items():
            if method not in done:
                yield {"key": method, "method": method, "steps": step().tolist()}

    settings = {"function": entry.name, "dim": dim, "samples": samples, "lr": lr, "epsilon": _EPSILON}
    return Part("single-step", settings, keys, rows)


def _line(v: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """FoMoH's step along each row of v (N, D)."""
    return -((v @ g) / (((v @ h) * v).sum(1).abs() + _EPSILON))[:, None] * v


def histograms(single: Sequence[Row], bins: int = 80) -> Iterator[Row]:
    """How the steps of each method are distributed, along each axis.

    The axes are the coordinates and the unit vectors of the negative gradient and of Newton's step. All methods share
    the bins of an axis, which hold the middle 99% of every method; ``outside`` counts the rest.
    """
    rows = {row["key"]: row for row in single}
    g, newton = _vector(rows["point"]["gradient"]), _vector(rows["Newton"]["steps"][0])
    axes = {f"coordinate {i + 1}": unit for i, unit in enumerate(torch.eye(len(g), dtype=g.dtype))}
    axes |= {"along the negative gradient": -g / g.norm(), "along Newton's step": newton / newton.norm()}
    methods = ("FGD", "FoMoH", "FoMoH-2D")
    for axis, unit in axes.items():
        along = {method: _vector(rows[method]["steps"]) @ unit for method in methods}
        tails = torch.tensor([0.005, 0.995], dtype=g.dtype)
        ends = torch.stack([torch.quantile(a, tails) for a in along.values()])
        low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
        margin = 0.02 * (high - low)
        edges = torch.linspace(low - margin, high + margin, bins + 1, dtype=g.dtype)
        for method, a in along.items():
            counts = torch.histogram(a, edges).hist.long()
            yield {
                **{"key": f"{axis}/{method}", "axis": axis, "method": method, "mean": float(a.mean())},
                **{"sd": float(a.std()), "edges": edges.tolist(), "counts": counts.tolist()},
                **{"outside": len(a) - int(counts.sum()), "newton": float(newton @ unit), "gradient": float(g @ unit)},
            }


def _vector(numbers: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# -- medians and claims -------------------------------------------------------------------------------------------


def median_curve(rows: Sequence[Row], steps: int, minimum: float = 0.0) -> list[float]:
    """The median over runs of the value above the minimum, before step 0 to after the last.

    A run that stood still keeps its value; one that diverged counts as infinite.
    """
    padded = []
    for row in rows:
        values = [value - minimum for value in row["values"][: steps + 1]]
        last = math.inf if row["end"] == "diverged" else values[-1]
        padded.append(values + [last] * (steps + 1 - len(values)))
    return [statistics.median(column) for column in zip(*padded, strict=True)]


def medians(rows: Sequence[Row], steps: int, minimum: float = 0.0) -> dict[str, list[float]]:
    """The median curve of every method, by label."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["method"], []).append(row)
    return {label: median_curve(group, steps, minimum) for label, group in groups.items()}


class Claim(NamedTuple):
    """A statement of the paper, whether it holds in these data, and the numbers."""

    text: str
    holds: bool
    numbers: str


def claims(
    entry: TestFunction,
    single: Sequence[Row],
    compared: Sequence[Row],
    in_planes: Sequence[Row],
    descended: Sequence[Row],
    steps: int,
    plane_steps: int,
) -> list[Claim]:
    """What the paper says of this study, held against the data."""
    return [
        *_claims_of_one_step(single),
        *_claims_of_comparison(medians(compared, steps, entry.minimum(entry.dim(2))), steps),
        *_claims_of_planes(entry, in_planes, plane_steps),
        *_claims_of_descent(descended, plane_steps),
    ]


def _claims_of_one_step(single: Sequence[Row]) -> Iterator[Claim]:
    rows = {row["key"]: row for row in single}
    g, newton = _vector(rows["point"]["gradient"]), _vector(rows["Newton"]["steps"][0])
    steps = {method: _vector(rows[method]["steps"]) for method in ("FGD", "FoMoH", "FoMoH-2D")}
    mean = {method: samples.mean(0) for method, samples in steps.items()}
    sd = {method: float(samples.var(0).sum().sqrt()) for method, samples in steps.items()}
    angle = math.degrees(math.acos(min(1.0, float(-mean["FGD"] @ g / (mean["FGD"].norm() * g.norm())))))
    error = steps["FGD"].std(0) / math.sqrt(len(steps["FGD"]))
    away = float(((mean["FGD"] + rows["point"]["lr"] * g) / error).abs().max())
    yield Claim(
        "The mean of FGD's step is the gradient's, -lr times the gradient.",
        away < 4,
        f"{angle:.2f} degrees apart, at most {away:.1f} standard errors of the mean off in a coordinate",
    )
    off = float((mean["FoMoH-2D"] - newton).norm() / newton.norm())
    yield Claim("The mean of FoMoH-2D's step is Newton's step.", off < 1e-6, f"relative distance {off:.1e}")
    spread = ", ".join(f"{method} {value:.1e}" for method, value in sd.items())
    smallest = sd["FoMoH-2D"] < min(sd["FGD"], sd["FoMoH"])
    yield Claim("FoMoH-2D's step has the smallest variance.", smallest, f"standard deviation: {spread}")


def _claims_of_comparison(curves: dict[str, list[float]], steps: int) -> Iterator[Claim]:
    mark = min(100, steps)
    at = {label: curve[mark] for label, curve in curves.items()}
    numbers = ", ".join(f"{label} {at[label]:.1e}" for label in ("FoMoH-2D", "FoMoH", "FGD", "FGD, 2 lr"))
    ordered = at["FoMoH-2D"] < at["FoMoH"] < min(at["FGD"], at["FGD, 2 lr"])
    yield Claim("In 2D, FoMoH-2D is below FoMoH, and FoMoH below FGD.", ordered, f"medians at step {mark}: {numbers}")
    first = next((i for i, value in enumerate(curves["FoMoH-2D"]) if value < 1e-10), None)
    found = f"reached at step {first}" if first is not None else "never reached"
    yield Claim("In 2D, FoMoH-2D's median is under 1e-10 within 60 steps.", first is not None and first <= 60, found)
    backprop = {label: at[label] for label, one in contenders().items() if one.backprop}
    numbers = ", ".join(f"{label} {at[label]:.1e}" for label in ("FoMoH-2D", "FoMoH", *backprop))
    below = max(at["FoMoH-2D"], at["FoMoH"]) < min(backprop.values())
    yield Claim(
        "In 2D, the forward-only FoMoH and FoMoH-2D are below the methods with backprop (SGD, Adam, FoMoH-BP).",
        below,
        f"medians at step {mark}: {numbers}",
    )


def _claims_of_planes(entry: TestFunction, rows: Sequence[Row], steps: int) -> Iterator[Claim]:
    dim = next(len(row["x"]) for row in rows if row["x"])
    curves = medians(rows, steps, entry.minimum(dim))
    ks = {int(label.removeprefix("K = ")): curve for label, curve in curves.items() if label != "Newton"}
    if len(ks) > 2:
        yield _claim_of_fall(dim, rows, steps)
        yield _claim_of_order(dim, {k: curve[steps] for k, curve in ks.items()})
    if dim in ks:
        yield _claim_of_newton(dim, ks[dim], curves["Newton"])


def _claim_of_fall(dim: int, rows: Sequence[Row], steps: int) -> Claim:
    correlation = fall_with_k(rows, steps)
    draws = sorted({row["draw"] for row in rows})
    alone = [fall_with_k(rows, steps, draw) for draw in draws]
    early = ", ".join(f"{fall_with_k(rows, step):.2f} at {step}" for step in (30, 60) if step < steps)
    numbers = [f"rank correlation {correlation:.2f} at step {steps} over {len(draws)} draw(s) of directions"]
    numbers += [early] if early else []
    numbers += [f"a draw alone gives {min(alone):.2f} to {max(alone):.2f}"]
    numbers += [f"{sum(one >= 0.9 for one in alone)} of {len(draws)} reach 0.9"]
    text = f"In {dim}D, the medians fall as K grows (rank correlation at least 0.9 at the last step)."
    return Claim(text, correlation >= 0.9, "; ".join(numbers))


def _claim_of_order(dim: int, last: dict[int, float]) -> Claim:
    """``last``: the median at the last step, by K."""
    pairs = itertools.pairwise(sorted(last))
    above = [f"K = {k} ({last[k]:.1e})" for before, k in pairs if not last[k] < last[before]]
    found = f"not below the K before: {', '.join(above)}" if above else "every K is below the one before"
    return Claim(f"In {dim}D, the order of the medians at the last step is perfect.", not above, found)


def _claim_of_newton(dim: int, full: Sequence[float], newton: Sequence[float]) -> Claim:
    """``full``: the curve of as many directions as dimensions."""
    both = list(zip(full, newton, strict=True))
    apart = max(abs(math.log10(a / b)) for a, b in both if min(a, b) > 1e-10)
    together = all(max(a, b) < 1e-9 for a, b in both if min(a, b) <= 1e-10)
    return Claim(
        f"In {dim}D, K = {dim} lies on Newton's curve.",
        apart < 0.01 and together,
        f"the medians above 1e-10 differ by a factor of at most {10**apart:.6g}",
    )


def _claims_of_descent(rows: Sequence[Row], steps: int) -> Iterator[Claim]:
    if len({row["method"] for row in rows}) > 3:
        correlation = fall_with_k(rows, steps)
        text = "Beyond the paper: with steps that never ascend (SaddleFree, halved), the medians fall as K grows."
        yield Claim(text, correlation >= 0.9, f"rank correlation {correlation:.2f} at step {steps} with one draw")


def fall_with_k(rows: Sequence[Row], steps: int, draw: int | None = None) -> float:
    """The rank correlation of -K with the median at a step, over all draws or one; methods drawn once count in each."""
    once = {row["method"] for row in rows} - {row["method"] for row in rows if row["draw"]}
    picked = [row for row in rows if draw is None or row["draw"] == draw or row["method"] in once]
    curves = medians([row for row in picked if row["method"] != "Newton"], steps)
    return rank_correlation([-int(k.removeprefix("K = ")) for k in curves], [c[steps] for c in curves.values()])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [b + (e - 1) / 2 for b, e in zip(below, equal, strict=True)]
