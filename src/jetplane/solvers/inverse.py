"""The paper's solver in K dimensions."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Following, Status, Step, dot, require_positive, solve
from .traced import TracedStep
from .traced import inverse as small_inverse
from .traced import solve as solve_traced
from .units import Units


@dataclass(frozen=True)
class JitteredInverse(Following):
    """Newton's step in the plane: c = -(H + jitter I)^-1 g, as in the paper's published code.

    The plain inverse is tried first. While the matrix is singular in float64, or the result not finite, the jitter is
    added to the diagonal, ``factor`` times more at each further try; after ``tries`` tries in all the status is
    SINGULAR.

    This is the stationary point of the model, not its minimum: where H has a negative eigenvalue the step may ascend.
    `SaddleFree`, `Damped`, `TrustRegion` and `Cubic` are equal or close to it where H is positive definite, and
    descend everywhere.

    Example:
        >>> slope, curvature = torch.tensor([2.0, 4.0]), torch.diag(torch.tensor([2.0, -4.0]))
        >>> step = JitteredInverse()(Quadratic(torch.tensor(0.0), slope, curvature))
        >>> step.coefficients
        tensor([-1.,  1.])
        >>> assert step.coefficients @ slope > 0  # uphill
    """

    jitter: float = 1e-3
    factor: float = 10.0
    tries: int = 10
    descends: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_positive(jitter=self.jitter)
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise ValueError(f"factor is {self.factor}; expected a finite number above 1.")
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}; expected at least one.")

    def solve(self, model: Quadratic, state: None) -> Step:
        return solve(model, self._coefficients, descends=False, few=self._few)

    def traced(self, model: Quadratic, state: Tensor | None = None) -> TracedStep:
        """The same step as a program that asks the host nothing."""
        return solve_traced(model, self._first_regular, Status.SINGULAR, descends=False)

    def _first_regular(self, plain: Quadratic) -> tuple[Tensor, Tensor]:
        """All tries at once, and the first of them that holds."""
        identity = torch.eye(len(plain.slope), dtype=plain.slope.dtype, device=plain.slope.device)
        attempt = torch.arange(self.tries, device=plain.slope.device)
        extra = torch.zeros(self.tries, dtype=plain.slope.dtype, device=plain.slope.device)
        for number in range(1, self.tries):  # not a tensor of numbers, which on CUDA would be copied there at each step
            extra = torch.where(attempt == number, self._extra(number), extra)
        matrices = plain.curvature + extra[:, None, None] * identity
        inverses = small_inverse(matrices)
        coefficients = -(inverses * plain.slope).sum(-1)  # (tries, K)
        holds = coefficients.isfinite().all(-1) & (_condition(matrices, inverses) < _limit(matrices))
        first = holds.to(torch.int64).argmax()
        return coefficients.index_select(0, first.reshape(1)).squeeze(0), holds.any()

    def _extra(self, attempt: int) -> float:
        return self.jitter * self.factor ** (attempt - 1) if attempt else 0.0

    def _few(self, slope: list[float], curvature: list[list[float]]) -> list[float] | Failure:
        for attempt in range(self.tries):
            extra, matrix = self._extra(attempt), curvature
            if attempt:
                matrix = [[h + extra if i == j else h for j, h in enumerate(row)] for i, row in enumerate(curvature)]
            inverse = _inverted(matrix)
            if inverse is not None and _norm(matrix) * _norm(inverse) < 1 / sys.float_info.epsilon:
                return [-dot(row, slope) for row in inverse]
        return Failure(Status.SINGULAR)

    def _coefficients(self, plain: Quadratic, units: Units) -> Tensor | Failure:
        identity = torch.eye(len(plain.slope), dtype=plain.slope.dtype, device=plain.slope.device)
        for attempt in range(self.tries):
            extra = units.curvature(self._extra(attempt)) if attempt else 0.0
            matrix = plain.curvature + extra * identity
            inverse, info = torch.linalg.inv_ex(matrix)
            coefficients = -(inverse @ plain.slope)
            if int(info) == 0 and bool(coefficients.isfinite().all()) and not _singular(matrix, inverse):
                return coefficients
        return Failure(Status.SINGULAR)


def _inverted(matrix: list[list[float]]) -> list[list[float]] | None:
    """The inverse by elimination with pivots, None where there is none.

    Example:
        >>> _inverted([[0.0, 2.0], [4.0, 0.0]])
        [[0.0, 0.25], [0.5, 0.0]]
    """
    k = len(matrix)
    rows = [[*row, *(1.0 if i == j else 0.0 for j in range(k))] for i, row in enumerate(matrix)]
    for column in range(k):
        place = max(range(column, k), key=lambda n: abs(rows[n][column]))
        if rows[place][column] == 0.0:
            return None
        rows[column], rows[place] = rows[place], rows[column]
        pivot = rows[column]
        for n in range(k):
            if n != column:
                factor = rows[n][column] / pivot[column]
                rows[n] = [a - factor * b for a, b in zip(rows[n], pivot, strict=True)]
                rows[n][column] = 0.0  # a rest of rounding would be multiplied by the inverse of the next pivots
    return [[number / row[n] for number in row[k:]] for n, row in enumerate(rows)]


def _norm(matrix: list[list[float]]) -> float:
    """The largest sum of a column's absolute values."""
    return max(sum(map(abs, column)) for column in zip(*matrix, strict=True))


def _singular(matrix: Tensor, inverse: Tensor) -> bool:
    """Singular up to rounding: a factorisation need not meet an exact zero."""
    return not bool(_condition(matrix, inverse) < _limit(matrix))


def _condition(matrix: Tensor, inverse: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(inverse, 1)


def _limit(matrix: Tensor) -> float:
    return 1 / torch.finfo(matrix.dtype).eps
