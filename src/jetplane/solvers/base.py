"""What a solver is given and gives, and what all of them share."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .units import OWN, Reach, Units, excess, is_ordinary, newton, shifted_by, sizes, units_of


class Status(Enum):
    """How a step came out."""

    OK = "ok"
    NONFINITE = "the loss, slope, curvature or step is not finite"
    SINGULAR = "the curvature is singular, or could not be factorised"
    FLAT = "the slope is zero, or the step too small for any number: there is nowhere to go, as at a minimum"
    REJECTED = "the step did not decrease the loss enough"


HEALTHY = (Status.OK, Status.FLAT)  # nothing is wrong, also where there is nowhere to go


class Step(NamedTuple):
    """A step in the plane: theta moves by sum_k c_k v_k.

    Example:
        >>> from jetplane import Quadratic
        >>> from jetplane.solvers import SaddleFree
        >>> model = Quadratic(torch.tensor(1.0), torch.tensor([1.0, -4.0]), torch.tensor([[2.0, 0.0], [0.0, -8.0]]))
        >>> step = SaddleFree()(model)
        >>> step.coefficients, step.status.name
        (tensor([-0.5000,  0.5000]), 'OK')
    """

    coefficients: Tensor  # (K,), zero unless the status is OK
    status: Status
    predicted: Tensor  # (), the model's decrease -(g @ c + c @ H @ c / 2)


@runtime_checkable
class Solver(Protocol):
    """Finds the step in a plane from the quadratic model there: a small frozen callable part of an optimizer.

    Solvers never raise on numbers: they give zero coefficients and say why. This is all that one without a state needs;
    one that follows how well its model predicts is a :class:`Following`.
    """

    descends: ClassVar[bool]  # coefficients @ slope < 0 for every finite, non-zero slope

    def __call__(self, model: Quadratic) -> Step: ...


class Following(ABC):
    """A solver as the optimizers use it, which may follow how well its model predicts.

    Its state, one number (damping, radius, sigma), lives with the caller: it begins as ``solver.init()``, None for a
    solver without one; ``solver.solve(model, state)`` solves with it, and ``state = solver.update(state, predicted,
    actual)`` follows each step. The defaults are those of a solver without a state.
    """

    descends: ClassVar[bool]
    noise: ClassVar[bool] = False  # it uses the noise of the slope, which the losses of single samples (B,) tell
    rejects: ClassVar[bool] = False  # its theory needs that steps which raise the loss are not taken

    def init(self) -> float | None:
        return None

    @abstractmethod
    def solve(self, model: Quadratic, state: Any) -> Step: ...

    def update(self, state: Any, predicted: float | Tensor, actual: float | Tensor) -> Any:
        """The next state."""
        return state

    def __call__(self, model: Quadratic) -> Step:
        return self.solve(model, self.init())


class Numbered(Following):
    """A solver whose state is one of its fields at the start."""

    number: ClassVar[str]  # the name of the field

    @property
    def state(self) -> float:
        """The state at the start."""
        return float(getattr(self, self.number))

    def init(self) -> float:
        return self.state

    def at(self, state: float) -> Self:
        """The same solver with another state at the start."""
        return replace(self, **{self.number: state})  # type: ignore[type-var]


class Failure(NamedTuple):
    """Why there are no coefficients."""

    status: Status


# of a finite model with a non-zero slope, in float64 on the CPU, in these units
Method = Callable[[Quadratic, Units], "Tensor | Failure"]
# the same for a slope and a curvature of a few numbers, in Python's own arithmetic
Few = Callable[[list[float], list[list[float]]], "list[float] | Failure"]

_SMALL, _LARGE = 2.0**-200, 2.0**200
_UNITS = 8  # times that a step is solved for: each of them is a fourth of all numbers nearer
_FEW = 4  # K up to which tensors would take longer than their numbers


def solve(
    model: Quadratic,
    method: Method,
    *,
    descends: bool,
    limit: float = math.inf,
    few: Few | None = None,
    reach: Reach | None = newton,
) -> Step:
    """The step that ``method`` finds in float64, in the model's dtype and on its device, checked.

    Where the numbers of the model are far from one, ``method`` gets it in other units, in which a step as long as
    ``reach`` says is 1; without one (None), for methods that take each direction by itself, it gets the model as it is.

    A direction that is zero, as one that remembers a step before there was any, gets the coefficient zero whatever the
    method. Where rounding would turn a descending step uphill, it is replaced by the Cauchy step along -g, which has at
    most the length ``limit``. ``few`` is the method for small K, where there is one.
    """
    step = _solve_few(model, few, descends) if few is not None and model.k <= _FEW else None
    if step is not None:
        return step
    like = model.slope.detach()
    plain = plainly(model, torch.device("cpu"))
    reason = _unsolvable(model.loss, plain)
    if reason is not None:
        return _stay(like, reason)
    size = sizes(plain)
    ordinary = is_ordinary(*size)
    if reach is None or ordinary:
        units, found = OWN, _found(plain, OWN, method)
    else:
        units, found = _in_units(plain, method, reach(*size))
    if isinstance(found, Failure):
        return _stay(like, found.status)
    coefficients = shifted_by(found, units.step).to(like)
    if descends and _finite(coefficients) and not _falls(coefficients, like, ordinary):
        found = _cauchy(units.model(plain), units.length(limit) if math.isfinite(limit) else limit)
        coefficients = shifted_by(found, units.step).to(like)
    return _checked(coefficients, _decrease(plain, shifted_by(found, units.step), ordinary).to(like))


def _found(plain: Quadratic, units: Units, method: Method) -> Tensor | Failure:
    """What the method finds, zero for directions that are zero."""
    zero = None if bool(plain.slope.all()) else zero_columns(plain)
    found = method(plain if zero is None else filled(plain, zero), units)
    return found if zero is None or isinstance(found, Failure) else torch.where(zero, 0.0, found)


def _in_units(plain: Quadratic, method: Method, reach: float) -> tuple[Units, Tensor | Failure]:
    """What the method finds in units in which it is of order one, and these units.

    How long a step is becomes known by solving: one that is not of order one is solved for again.
    """
    size = sizes(plain)
    for _ in range(_UNITS):
        units = units_of(reach, *size)
        found = _found(units.model(plain), units, method)
        away = 0 if isinstance(found, Failure) else excess(found)
        if not away:
            break
        reach = units.step + away
    return units, found


def _falls(coefficients: Tensor, slope: Tensor, ordinary: bool) -> bool:
    """Whether a step goes downhill."""
    if ordinary:
        return bool(coefficients @ slope < 0)
    return _exact_dot(_fractions(coefficients), _fractions(slope)) < 0


def _decrease(plain: Quadratic, coefficients: Tensor, ordinary: bool) -> Tensor:
    """The model's decrease."""
    if ordinary or not _finite(coefficients):
        return plain.decrease(coefficients)
    curvature = [_fractions(row) for row in plain.curvature]
    decrease = Quadratic.decrease_of(_fractions(plain.slope), curvature, _fractions(coefficients))
    try:
        return coefficients.new_tensor(float(decrease))
    except OverflowError:
        return coefficients.new_tensor(math.inf if decrease > 0 else -math.inf)


def _fractions(numbers: Tensor) -> list[Fraction]:
    """Numbers whose products are numbers, however large or small."""
    return [*map(Fraction, numbers.tolist())]


def _exact_dot(a: list[Fraction], b: list[Fraction]) -> Fraction:
    return sum(map(operator.mul, a, b), Fraction(0))


def _checked(coefficients: Tensor, predicted: Tensor) -> Step:
    """The step, unless its numbers are not finite, or too small to be any."""
    if not (_finite(coefficients) and _finite(predicted)):
        return _stay(coefficients, Status.NONFINITE)
    if not bool(coefficients.any()):
        return _stay(coefficients, Status.FLAT)
    return Step(coefficients, Status.OK, predicted)


def _unsolvable(loss: Tensor, plain: Quadratic) -> Status | None:
    """Why there is nothing to solve, None where there is."""
    if not (_finite(loss) and _finite(plain.slope) and _finite(plain.curvature)):
        return Status.NONFINITE
    return None if bool(plain.slope.any()) else Status.FLAT


def _solve_few(model: Quadratic, few: Few, descends: bool) -> Step | None:
    """The step in the plane of a few directions; None where there is anything special about it."""
    like = model.slope.detach()
    slope, curvature = like.tolist(), model.curvature.detach().tolist()
    if not (_all_finite([model.loss.item(), *slope], *curvature) and all(slope) and _few_ordinary(slope, *curvature)):
        return None
    found = few(slope, curvature)
    if isinstance(found, Failure):
        return _stay(like, found.status)
    coefficients = torch.tensor(found, dtype=like.dtype, device=like.device)
    rounded = found if like.dtype == torch.float64 else coefficients.tolist()
    decrease = Quadratic.decrease_of(slope, curvature, found)
    predicted = torch.tensor(decrease, dtype=like.dtype, device=like.device)
    # the model's dtype may be too short for the decrease, though not for the coefficients
    small = not any(rounded) or (descends and not dot(rounded, slope) < 0)
    if small or not _all_finite(rounded, [predicted.item()]):
        return None
    return Step(coefficients, Status.OK, predicted)


def dot(a: list[float], b: list[float]) -> float:
    """sum_k a_k b_k"""
    return sum(map(operator.mul, a, b))


def _all_finite(*rows: list[float]) -> bool:
    return all(math.isfinite(number) for row in rows for number in row)


def _few_ordinary(*rows: list[float]) -> bool:
    """Whether numbers need no other units."""
    sizes = [max(map(abs, row)) for row in rows]
    slope, curvature = sizes[0], max(sizes[1:])
    return _SMALL <= slope <= _LARGE and (curvature == 0.0 or _SMALL <= curvature <= _LARGE)


def plainly(model: Quadratic, device: torch.device) -> Quadratic:
    """The model in float64; the loss stays as it is, for no solver computes with it."""
    parts = model.slope, model.curvature, model.noise
    slope, curvature, noise = (None if part is None else part.detach().to(device, torch.float64) for part in parts)
    assert slope is not None and curvature is not None
    return Quadratic(model.loss, slope, curvature, noise)


def zero_columns(plain: Quadratic) -> Tensor:
    """(K,) bool: the directions without slope and without any curvature."""
    curved = plain.curvature.ne(0)
    return ~(plain.slope.ne(0) | curved.any(0) | curved.any(1))


def filled(plain: Quadratic, zero: Tensor) -> Quadratic:
    """The model with curvature for the directions that have none, so that it is no more singular than without them.

    The curvature is as large as the largest there is: a solver that looks at the extremes sees the same ones.
    """
    largest = plain.curvature.abs().max()
    return replace(plain, curvature=plain.curvature + torch.diag(zero * torch.where(largest > 0, largest, 1.0)))


def _stay(like: Tensor, status: Status) -> Step:
    return Step(torch.zeros_like(like), status, like.new_zeros(()))


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _cauchy(plain: Quadratic, limit: float) -> Tensor:
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


def spectrum(plain: Quadratic) -> Spectrum | Failure:
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
