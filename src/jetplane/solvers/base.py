"""What a solver is given and gives, and what all of them share."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from ..ad.jet import Quadratic


class Status(Enum):
    """How a step came out."""

    OK = "ok"
    NONFINITE = "the loss, slope, curvature or step is not finite"
    SINGULAR = "the curvature is singular, or could not be factorised"
    FLAT = "the slope is zero, or there is no curvature to divide by"
    REJECTED = "the step did not decrease the loss enough"


class Step(NamedTuple):
    """A step in the plane: theta moves by sum_k c_k v_k."""

    coefficients: Tensor  # (K,), zero unless the status is OK
    status: Status
    predicted: Tensor  # (), the model's decrease -(g @ c + c @ H @ c / 2)


@runtime_checkable
class Solver(Protocol):
    """Finds the step in a plane from the quadratic model there: a small frozen callable part of an optimizer.

    Solvers never raise on numbers: they give zero coefficients and say why.
    """

    descends: ClassVar[bool]  # coefficients @ slope < 0 for every finite, non-zero slope

    def __call__(self, model: Quadratic) -> Step: ...


@runtime_checkable
class Adaptive(Solver, Protocol):
    """A solver with one number (damping, radius, sigma) that follows how well the model predicts.

    The number lives with the caller: ``solver.at(state)(model)`` solves with it, and
    ``state = solver.update(state, predicted, actual)`` follows each step; ``solver.state`` is where it begins.
    """

    @property
    def state(self) -> float: ...

    def at(self, state: float) -> Self: ...

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float: ...


def adaptive(solver: Solver) -> TypeGuard[Adaptive]:
    """Whether a solver is adaptive. A protocol would look at all of its members each time, which a step would feel."""
    return _adapts(type(solver))


@functools.cache
def _adapts(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("state", "at", "update"))


class Plain(NamedTuple):
    """A finite model with a non-zero slope, in float64 on the CPU."""

    slope: Tensor  # (K,)
    curvature: Tensor  # (K, K)
    noise: Tensor | None = None  # (K, K), the covariance of the slope where it is known


class Failure(NamedTuple):
    """Why there are no coefficients."""

    status: Status


Method = Callable[[Plain], "Tensor | Failure"]
# the same for a slope and a curvature of a few numbers, in Python's own arithmetic
Few = Callable[[list[float], list[list[float]]], "list[float] | Failure"]

_FEW = 4  # K up to which tensors would take longer than their numbers


def solve(model: Quadratic, method: Method, *, descends: bool, limit: float = math.inf, few: Few | None = None) -> Step:
    """The step that ``method`` finds in float64, in the model's dtype and on its device, checked.

    A direction that is zero, as one that remembers a step before there was any, gets the coefficient zero whatever the
    method. Where rounding would turn a descending step uphill, it is replaced by the Cauchy step along -g, which has at
    most the length ``limit``. ``few`` is the method for small K, where there is one.
    """
    step = _solve_few(model, few, descends) if few is not None and model.k <= _FEW else None
    if step is not None:
        return step
    like = model.slope.detach()
    plain = plainly(model, torch.device("cpu"))
    if not (_finite(model.loss) and _finite(plain.slope) and _finite(plain.curvature)):
        return _stay(like, Status.NONFINITE)
    if not bool(plain.slope.any()):
        return _stay(like, Status.FLAT)
    zero = None if bool(plain.slope.all()) else zero_columns(plain)
    found = method(plain if zero is None else filled(plain, zero))
    if isinstance(found, Failure):
        return _stay(like, found.status)
    found = found if zero is None else torch.where(zero, 0.0, found)
    coefficients = found.to(like)
    if descends and _finite(coefficients) and not bool(coefficients @ like < 0):
        found = _cauchy(plain, limit)
        coefficients = found.to(like)
    predicted = predict(plain, found).to(like)
    if not (_finite(coefficients) and _finite(predicted)):
        return _stay(like, Status.NONFINITE)
    return Step(coefficients, Status.OK, predicted)


def _solve_few(model: Quadratic, few: Few, descends: bool) -> Step | None:
    """The step in the plane of a few directions; None where there is anything special about it."""
    like = model.slope.detach()
    slope, curvature = like.tolist(), model.curvature.detach().tolist()
    if not (_all_finite([model.loss.item(), *slope], *curvature) and all(slope)):
        return None
    found = few(slope, curvature)
    if isinstance(found, Failure):
        return _stay(like, found.status)
    coefficients = torch.tensor(found, dtype=like.dtype, device=like.device)
    rounded = found if like.dtype == torch.float64 else coefficients.tolist()
    predicted = -(dot(slope, found) + dot(found, [dot(row, found) for row in curvature]) / 2)
    if not _all_finite(rounded, [predicted]) or (descends and not dot(rounded, slope) < 0):
        return None
    return Step(coefficients, Status.OK, torch.tensor(predicted, dtype=like.dtype, device=like.device))


def dot(a: list[float], b: list[float]) -> float:
    """sum_k a_k b_k"""
    return sum(map(operator.mul, a, b))


def _all_finite(*rows: list[float]) -> bool:
    return all(math.isfinite(number) for row in rows for number in row)


def plainly(model: Quadratic, device: torch.device) -> Plain:
    """The model in float64."""
    parts = model.slope, model.curvature, model.noise
    slope, curvature, noise = (None if part is None else part.detach().to(device, torch.float64) for part in parts)
    assert slope is not None and curvature is not None
    return Plain(slope, curvature, noise)


def zero_columns(plain: Plain) -> Tensor:
    """(K,) bool: the directions without slope and without any curvature."""
    curved = plain.curvature.ne(0)
    return ~(plain.slope.ne(0) | curved.any(0) | curved.any(1))


def filled(plain: Plain, zero: Tensor) -> Plain:
    """The model with curvature for the directions that have none, so that it is no more singular than without them.

    The curvature is as large as the largest there is: a solver that looks at the extremes sees the same ones.
    """
    largest = plain.curvature.abs().max()
    return plain._replace(curvature=plain.curvature + torch.diag(zero * torch.where(largest > 0, largest, 1.0)))


def predict(plain: Plain, coefficients: Tensor) -> Tensor:
    """-(g @ c + c @ H @ c / 2)"""
    return -(plain.slope @ coefficients + coefficients @ plain.curvature @ coefficients / 2)


def _stay(like: Tensor, status: Status) -> Step:
    return Step(torch.zeros_like(like), status, like.new_zeros(()))


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _cauchy(plain: Plain, limit: float) -> Tensor:
    """-t g with t = |g|^2 / |g @ H @ g|, or as long as the limit allows."""
    unit = plain.slope / plain.slope.abs().max()
    unit = unit / unit.norm()
    curvature = float((unit @ plain.curvature @ unit).abs())
    slope = float(plain.slope @ unit)
    return -unit * min(limit, slope / curvature if curvature > 0 else slope)


def length(vectors: Tensor) -> Tensor:
    """The length of vectors (..., K), whose squares neither overflow nor vanish."""
    numbers = torch.finfo(vectors.dtype)
    largest = vectors.abs().amax(-1).clamp(numbers.tiny, numbers.max)
    return (vectors / largest.unsqueeze(-1)).norm(dim=-1) * largest


class Spectrum(NamedTuple):
    """H = Q diag(w) Q^T and the slope y = Q^T g in its axes."""

    values: Tensor  # (K,), ascending
    vectors: Tensor  # (K, K), columns
    slope: Tensor  # (K,)


def spectrum(plain: Plain) -> Spectrum | Failure:
    """The eigenvalues and axes of the curvature, whose two halves are averaged first."""
    try:
        values, vectors = torch.linalg.eigh((plain.curvature + plain.curvature.T) / 2)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return Failure(Status.SINGULAR)
    return Spectrum(values, vectors, vectors.T @ plain.slope)


def require_positive(**values: float) -> None:
    """Raises unless all the named numbers are positive and finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; expected a positive, finite number.")


def agreement(predicted: float | Tensor, actual: float | Tensor) -> float:
    """actual / predicted, and minus infinity where that says nothing good of the model."""
    predicted, actual = float(predicted), float(actual)
    if not (math.isfinite(predicted) and math.isfinite(actual) and predicted > 0):
        return -math.inf
    return actual / predicted


def followed(state: float, ratio: float, *, up: float, down: float, smallest: float) -> float:
    """The next damping, or sigma, after a step with this agreement: times ``up`` below 1/4, over ``down`` above 3/4.

    Example:
        >>> [followed(1.0, ratio, up=4, down=2, smallest=1e-12) for ratio in (0.1, 0.5, 0.9)]
        [4.0, 1.0, 0.5]
    """
    if ratio < 0.25:
        return min(up * state, 1e300)
    return max(state / down, min(state, smallest)) if ratio > 0.75 else state
