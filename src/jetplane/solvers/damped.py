"""Levenberg-Marquardt damping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Numbered, Step, agreement, followed, require_positive, solve, spectrum
from .units import Units


@dataclass(frozen=True)
class Damped(Numbered):
    """c = -(H + d I)^-1 g, with d = damping, ten times more until H + d I is positive definite.

    Positive definite means here that the lowest eigenvalue of H + d I is at least d / 10, so that the step is not
    longer than 10 |g| / d.

    The damping is multiplied by 4 after a step whose actual decrease is below a quarter of the predicted one, and
    divided by 3 (down to ``smallest``) after one above three quarters.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([6.0]), torch.tensor([[2.0]]))
        >>> Damped(damping=1.0)(model).coefficients
        tensor([-2.])
    """

    damping: float = 1e-3
    smallest: float = 1e-12
    descends: ClassVar[bool] = True
    rejects: ClassVar[bool] = True
    number: ClassVar[str] = "damping"

    def __post_init__(self) -> None:
        require_positive(damping=self.damping, smallest=self.smallest)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next damping."""
        return followed(state, agreement(predicted, actual), up=4, down=3, smallest=self.smallest)

    def solve(self, model: Quadratic, state: float) -> Step:
        return solve(model, partial(self._coefficients, state), descends=True, reach=partial(_reach, state))

    def _coefficients(self, damping: float, plain: Quadratic, units: Units) -> Tensor | Failure:
        found, damping = spectrum(plain), units.curvature(damping)
        if isinstance(found, Failure):
            return found
        lowest = float(found.values[0])
        while lowest + damping < damping / 10 and damping < torch.finfo(torch.float64).max:
            damping *= 10
        return -(found.vectors @ (found.slope / (found.values + damping)))


def _reach(damping: float, slope: float, curvature: float) -> float:
    return slope - max(curvature, math.log2(damping))
