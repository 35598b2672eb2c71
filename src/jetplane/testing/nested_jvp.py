"""Second derivatives that nested torch.func.jvp gets wrong, against closed forms: why it is never an oracle here.

Each case is a scalar program with a fixed input x and direction v, and v^T H v worked out on paper.

    python -m jetplane.testing.nested_jvp

prints the table in Markdown, for the installed torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ad.run.register import register
from ..ad.run.transforms import quadratic
from .oracle import double_backward

__all__ = ["CASES", "Case", "by_double_backward", "by_jetplane", "by_nested_jvp", "markdown", "relative_error"]

Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Case:
    """A scalar program of several tensors, and its second derivative along one direction of all of them."""

    name: str
    program: Callable[..., Tensor]
    point: tuple[Any, ...]  # nested lists, one for each argument
    direction: tuple[Any, ...]  # the same shapes
    closed: float  # v^T H v by the formula
    formula: str
    rule: tuple[type, Callable[..., Tensor]] | None = None  # a custom Function and the program it equals

    def primals(self) -> tuple[Tensor, ...]:
        """The point as float64 tensors."""
        return tuple(torch.tensor(x, dtype=torch.float64) for x in self.point)

    def tangents(self) -> tuple[Tensor, ...]:
        """The direction as float64 tensors."""
        return tuple(torch.tensor(v, dtype=torch.float64) for v in self.direction)


# -- four ways to v^T H v -----------------------------------------------------------------------------------------


def by_nested_jvp(case: Case) -> float | str:
    """torch.func.jvp of torch.func.jvp; the exception's name where torch refuses."""
    tangents = case.tangents()

    def slope(*primals: Tensor) -> Tensor:
        return torch.func.jvp(case.program, primals, tangents)[1]

    try:
        return float(torch.func.jvp(slope, case.primals(), tangents)[1])
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


def by_jetplane(case: Case) -> float:
    """The curvature of jetplane along the one direction."""
    if case.rule is not None:
        register.composite(*case.rule)
    try:
        directions = tuple(v.unsqueeze(0) for v in case.tangents())
        return float(quadratic(case.program, case.primals(), directions).curvature)
    finally:
        if case.rule is not None:
            register.remove(case.rule[0])


def by_double_backward(case: Case) -> float:
    """Reverse over reverse mode."""
    leaves = [x.requires_grad_() for x in case.primals()]
    directions = [v.unsqueeze(0) for v in case.tangents()]
    return float(double_backward(lambda: case.program(*leaves), leaves, directions).curvature)


def by_differences(case: Case, step: float = 1e-3) -> float:
    """Central differences of the values alone, of fourth order."""
    primals, tangents = case.primals(), case.tangents()

    def at(t: float) -> float:
        return float(case.program(*(x + t * v for x, v in zip(primals, tangents, strict=True))))

    h = step
    return (-at(2 * h) + 16 * at(h) - 30 * at(0.0) + 16 * at(-h) - at(-2 * h)) / (12 * h * h)


def relative_error(value: float, exact: float) -> float:
    """``abs(value - exact) / abs(exact)``, absolute where the exact value is zero."""
    return abs(value - exact) / (abs(exact) or 1.0)


# -- closed forms -------------------------------------------------------------------------------------------------


def _normalised(x: Vector, v: Vector, eps: float) -> list[float]:
    """The second derivative of c / sqrt(s), c = x - mean(x), s = mean(c^2) + eps, along v.

    With u = v - mean(v), s' = 2 mean(c u) and s'' = 2 mean(u^2):
    y'' = -u s' s^(-3/2) + c (3/4 s'^2 s^(-5/2) - 1/2 s'' s^(-3/2)).
    """
    n = len(x)
    c = [a - math.fsum(x) / n for a in x]
    u = [b - math.fsum(v) / n for b in v]
    s = math.fsum(a * a for a in c) / n + eps
    s1 = 2 * math.fsum(a * b for a, b in zip(c, u, strict=True)) / n
    s2 = 2 * math.fsum(b * b for b in u) / n
    bend = 0.75 * s1 * s1 * s**-2.5 - 0.5 * s2 * s**-1.5
    return [-b * s1 * s**-1.5 + a * bend for a, b in zip(c, u, strict=True)]


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _columns(a: Matrix) -> list[list[float]]:
    return [list(column) for column in zip(*a, strict=True)]


def _times(a: Matrix, b: Matrix) -> list[list[float]]:
    return [[_dot(row, column) for column in _columns(b)] for row in a]


def _adjugate(a: Matrix) -> list[list[float]]:
    """Of a 3 x 3 matrix: its columns are cross products of the rows."""

    def cross(x: Vector, y: Vector) -> list[float]:
        return [x[1] * y[2] - x[2] * y[1], x[2] * y[0] - x[0] * y[2], x[0] * y[1] - x[1] * y[0]]

    return _columns([cross(a[1], a[2]), cross(a[2], a[0]), cross(a[0], a[1])])


def _determinant(a: Matrix) -> float:
    return _times(a, _adjugate(a))[0][0]


def _trace_of_product(a: Matrix, b: Matrix) -> float:
    return math.fsum(_times(a, b)[i][i] for i in range(len(a)))


def _determinant_curvature(a: Matrix, v: Matrix) -> float:
    """det(A + tV) is a cubic in t; its t^2 coefficient is tr(A adj V)."""
    return 2 * _trace_of_product(a, _adjugate(v))


def _log_determinant_curvature(a: Matrix, v: Matrix) -> float:
    """-tr((A^-1 V)^2)."""
    determinant = _determinant(a)
    w = [[entry / determinant for entry in row] for row in _times(_adjugate(a), v)]
    return -_trace_of_product(w, w)


def _products_curvature(x: Vector, v: Vector) -> list[float]:
    """Of each prefix product: 2 sum_{i<j} v_i v_j prod_{k not i, j} x_k, without a division."""
    return [
        2
        * math.fsum(
            v[i] * v[j] * math.prod(x[k] for k in range(end) if k not in (i, j)) for j in range(end) for i in range(j)
        )
        for end in range(1, len(x) + 1)
    ]


def _reflections_curvature(a: Matrix, tau: Vector, da: Matrix, dtau: Vector) -> list[list[float]]:
    """Of H_1 H_2, H_k = 1 - tau_k w_k w_k^T with w_k = e_k + the entries of column k below the diagonal."""
    size = len(a)

    def outer(x: Vector, y: Vector, factor: float) -> list[list[float]]:
        return [[factor * p * q for q in y] for p in x]

    def add(*parts: Matrix) -> list[list[float]]:
        return [[math.fsum(entries) for entries in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]

    def reflection(k: int) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        w = [0.0 if i < k else 1.0 if i == k else a[i][k] for i in range(size)]
        d = [0.0 if i <= k else da[i][k] for i in range(size)]
        eye = [[float(i == j) for j in range(size)] for i in range(size)]
        value = add(eye, outer(w, w, -tau[k]))
        first = add(outer(w, w, -dtau[k]), outer(w, d, -tau[k]), outer(d, w, -tau[k]))
        second = add(outer(w, d, -2 * dtau[k]), outer(d, w, -2 * dtau[k]), outer(d, d, -2 * tau[k]))
        return value, first, second

    p, p1, p2 = reflection(0)
    q, q1, q2 = reflection(1)
    mixed = [[2 * entry for entry in row] for row in _times(p1, q1)]
    return add(_times(p2, q), mixed, _times(p, q2))


# -- the cases ----------------------------------------------------------------------------------------------------

_EPS = 1e-5
_X, _V, _W = [0.5, -1.25, 2.0, 0.75], [1.0, 0.5, -0.25, 2.0], [0.3, -0.7, 1.1, 0.4]
_A, _B = [[2.0, 1.0, 0.5], [-1.0, 1.5, 0.25], [0.5, -0.5, 1.0]], [[0.5, -1.0, 1.5], [1.0, 0.25, -0.5], [2.0, 1.0, -1.0]]
_SINGULAR = [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]]
_BATCH = [[0.5, 2.0], [-1.0, 0.25], [1.5, -0.75], [0.25, 1.0]]  # (samples, channels)
_BATCH_V = [[1.0, -0.5], [0.5, 2.0], [-0.25, 1.0], [2.0, 0.75]]
_BATCH_W = [[0.3, 0.9], [-0.7, 0.2], [1.1, -0.6], [0.4, 0.8]]
_REFLECTORS, _TAU = [[0.0, 0.0], [0.5, 0.0], [-0.75, 1.25]], [0.8, 1.2]
_REFLECTORS_V, _TAU_V = [[0.0, 0.0], [1.0, 0.0], [0.5, -2.0]], [0.3, -0.6]
_Q_W = [[0.3, -0.7], [1.1, 0.4], [-0.2, 0.9]]


def _weigh(weights: Any, value: Tensor) -> Tensor:
    return (torch.tensor(weights, dtype=value.dtype) * value).sum()


def _batch_norm_curvature(x: Matrix, v: Matrix, w: Matrix) -> float:
    channels = zip(_columns(x), _columns(v), _columns(w), strict=True)
    return math.fsum(_dot(wc, _normalised(xc, vc, _EPS)) for xc, vc, wc in channels)


def _group_norm_curvature(x: Vector, v: Vector, w: Vector) -> float:
    halves = (slice(0, 2), slice(2, 4))
    return math.fsum(_dot(w[h], _normalised(x[h], v[h], 0.1)) for h in halves)


class Cube(torch.autograd.Function):
    """x^3, with the derivative written by hand, as torch's documentation shows it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


CASES = [
    Case(
        "layer_norm",
        lambda x: _weigh(_W, F.layer_norm(x, (4,), eps=_EPS)),
        (_X,),
        (_V,),
        _dot(_W, _normalised(_X, _V, _EPS)),
        "w . d2[c s^(-1/2)]",
    ),
    Case(
        "batch_norm",
        lambda x: _weigh(_BATCH_W, F.batch_norm(x, None, None, training=True, eps=_EPS)),
        (_BATCH,),
        (_BATCH_V,),
        _batch_norm_curvature(_BATCH, _BATCH_V, _BATCH_W),
        "the same, per channel",
    ),
    Case(
        "group_norm",
        lambda x: _weigh([_W], F.group_norm(x, 2, eps=0.1)),
        ([_X],),
        ([_V],),
        _group_norm_curvature(_X, _V, _W),
        "the same, per group",
    ),
    Case("det", torch.linalg.det, (_A,), (_B,), _determinant_curvature(_A, _B), "2 tr(A adj V)"),
    Case(
        "det of a singular matrix",
        torch.linalg.det,
        (_SINGULAR,),
        (_B,),
        _determinant_curvature(_SINGULAR, _B),
        "2 tr(A adj V)",
    ),
    Case(
        "slogdet",
        lambda a: torch.linalg.slogdet(a).logabsdet,
        (_A,),
        (_B,),
        _log_determinant_curvature(_A, _B),
        "-tr((A^-1 V)^2)",
    ),
    Case(
        "cumprod",
        lambda x: _weigh(_W, x.cumprod(0)),
        (_X,),
        (_V,),
        _dot(_W, _products_curvature(_X, _V)),
        "2 sum v_i v_j prod x_k",
    ),
    Case(
        "cumprod at a zero",
        lambda x: _weigh(_W, x.cumprod(0)),
        ([0.5, 0.0, 2.0, 0.75],),
        (_V,),
        _dot(_W, _products_curvature([0.5, 0.0, 2.0, 0.75], _V)),
        "2 sum v_i v_j prod x_k",
    ),
    Case(
        "cumprod at two zeros",
        lambda x: _weigh(_W, x.cumprod(0)),
        ([0.5, 0.0, 2.0, 0.0],),
        (_V,),
        _dot(_W, _products_curvature([0.5, 0.0, 2.0, 0.0], _V)),
        "2 sum v_i v_j prod x_k",
    ),
    Case(
        "householder_product",
        lambda a, tau: _weigh(_Q_W, torch.linalg.householder_product(a, tau)),
        (_REFLECTORS, _TAU),
        (_REFLECTORS_V, _TAU_V),
        math.fsum(
            _dot(w, q)  # the first two columns of H_1 H_2
            for w, q in zip(
                _columns(_Q_W), _columns(_reflections_curvature(_REFLECTORS, _TAU, _REFLECTORS_V, _TAU_V)), strict=False
            )
        ),
        "w . d2[H_1 H_2]",
    ),
    Case(
        "custom autograd.Function",
        lambda x: Cube.apply(x).sum(),
        (_X,),
        (_V,),
        math.fsum(6 * x * v * v for x, v in zip(_X, _V, strict=True)),
        "sum 6 x v^2",
        (Cube, lambda x: x**3),
    ),
]


def markdown() -> str:
    """The table of all cases for the installed torch."""
    lines = [
        f"v^T H v with torch {torch.__version__}, float64; relative errors against the closed form.",
        "",
        "| operation | closed form | value | nested torch.func.jvp | error | jetplane | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in CASES:
        theirs, ours = by_nested_jvp(case), _ours(case)
        cells = [case.name, f"`{case.formula}`", f"{case.closed:.9g}"]
        for value in (theirs, ours):
            cells += (
                [value, "-"] if isinstance(value, str) else [f"{value:.9g}", _error(relative_error(value, case.closed))]
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ours(case: Case) -> float | str:
    try:
        return by_jetplane(case)
    except NotImplementedError as error:
        return type(error).__name__


def _error(error: float) -> str:
    return f"**{error:.1%}**" if error > 1e-6 else f"{error:.0e}"


if __name__ == "__main__":
    print(markdown())
