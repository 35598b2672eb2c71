"""Units in which the numbers of a plane are of order one, so that no product of them overflows or vanishes.

With steps measured in 2^step and the loss in 2^-loss, the slope g is 2^(loss + step) g in these units and the curvature
H is 2^(loss + 2 step) H. Powers of two are exact, so that the step is the same one up to the ends of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic

__all__ = ["OWN", "Reach", "Units", "excess", "is_ordinary", "newton", "shifted_by", "sizes", "units_of"]

_ORDINARY = 200  # powers of two: with numbers up to 2^200 a step has up to 2^400, and its decrease up to 2^1000
_LARGEST = 2.0**1000


class Units(NamedTuple):
    """The powers of two."""

    step: int
    loss: int

    def model(self, plain: Quadratic) -> Quadratic:
        """A model in these units. A slope that would vanish keeps its sign."""
        if self == OWN:
            return plain
        power = self.loss + self.step
        slope = shifted_by(plain.slope, power)
        slope = torch.where(slope == 0, plain.slope.sign() / _LARGEST, slope)
        noise = None if plain.noise is None else shifted_by(plain.noise, 2 * power)
        return replace(plain, slope=slope, curvature=shifted_by(plain.curvature, power + self.step), noise=noise)

    def length(self, number: float) -> float:
        """A length of steps, as a radius, in these units."""
        return _shifted(number, -self.step)

    def curvature(self, number: float) -> float:
        """A curvature, as a damping, in these units."""
        return _shifted(number, self.loss + 2 * self.step)

    def cubic(self, number: float) -> float:
        """A third derivative, as sigma, in these units."""
        return _shifted(number, self.loss + 3 * self.step)


OWN = Units(0, 0)  # the plane's own

# log2 of a step's length from log2 of the largest slope and curvature, the latter -inf where there is none
Reach = Callable[[float, float], float]


def newton(slope: float, curvature: float) -> float:
    """The length of Newton's step; of -g where there is no curvature."""
    return slope - (curvature if math.isfinite(curvature) else 0.0)


def sizes(plain: Quadratic) -> tuple[float, float]:
    """log2 of the largest slope and curvature, -inf for zero."""
    return _log2(float(plain.slope.abs().max())), _log2(float(plain.curvature.abs().max()))


def is_ordinary(*sizes: float) -> bool:
    """Whether numbers of these sizes need no other units."""
    return all(abs(size) <= _ORDINARY or size == -math.inf for size in sizes)


def units_of(reach: float, slope: float, curvature: float) -> Units:
    """Units in which a step as long as ``reach`` is 1, and the larger one of slope and curvature too; all are log2."""
    step = round(reach)
    return Units(step, -round(max(step + slope, 2 * step + curvature)))


def excess(found: Tensor) -> int:
    """log2 of a step's length where that is far from 0, of about that size where it is not finite or vanished."""
    largest = float(found.abs().max())
    if math.isnan(largest) or math.isinf(largest):
        return 500
    size = _log2(largest)
    return 0 if is_ordinary(size) and largest else round(max(size, -500.0))


def shifted_by(numbers: Tensor, power: int) -> Tensor:
    """2^power numbers, also where 2^power itself is no number.

    Example:
        >>> shifted_by(torch.tensor(2.0**-1000, dtype=torch.float64), 2000) == 2.0**1000
        tensor(True)
    """
    while power:
        part = max(-1000, min(1000, power))
        numbers, power = numbers * 2.0**part, power - part
    return numbers


def _shifted(number: float, power: int) -> float:
    """The same for one positive number, which stays one."""
    if power == 0:
        return number
    logarithm = math.log2(number) + power
    if abs(logarithm) < 1000:
        return math.ldexp(number, power)
    return _LARGEST if logarithm > 0 else 1 / _LARGEST


def _log2(number: float) -> float:
    return math.log2(number) if number > 0 else -math.inf
