"""The trust region."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Numbered, Step, agreement, length, require_positive, solve, spectrum
from .secular import shifted
from .units import Units


@dataclass(frozen=True)
class TrustRegion(Numbered):
    """The exact minimiser of the model in a ball: min g @ c + c @ H @ c / 2 subject to |c| <= radius.

    (H + mu I) c = -g with mu >= 0, H + mu I positive semidefinite and mu (radius - |c|) = 0. In the hard case, where
    -g has no part along the axis of the lowest, negative eigenvalue, the step goes along that axis to the boundary.

    The radius is divided by 4 after a step whose actual decrease is below a quarter of the predicted one, and doubled
    (up to ``largest``) after one above three quarters.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([3.0, 4.0]), torch.zeros(2, 2))
        >>> TrustRegion(radius=0.5)(model).coefficients
        tensor([-0.3000, -0.4000])
    """

    radius: float = 1.0
    largest: float = 1e6
    descends: ClassVar[bool] = True
    rejects: ClassVar[bool] = True
    number: ClassVar[str] = "radius"

    def __post_init__(self) -> None:
        require_positive(radius=self.radius, largest=self.largest)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next radius."""
        ratio = agreement(predicted, actual)
        if ratio < 0.25:
            return max(state / 4, torch.finfo(torch.float64).tiny)
        return min(2 * state, max(state, self.largest)) if ratio > 0.75 else state

    def solve(self, model: Quadratic, state: float) -> Step:
        return solve(
            model, partial(self._coefficients, state), descends=True, limit=state, reach=partial(_reach, state)
        )

    def _coefficients(self, radius: float, plain: Quadratic, units: Units) -> Tensor | Failure:
        found, radius = spectrum(plain), units.length(radius)
        if isinstance(found, Failure):
            return found
        upper = float(length(found.slope)) / radius
        return shifted(found, lambda shift: torch.full_like(shift, radius), upper)


def _reach(radius: float, slope: float, curvature: float) -> float:
    """Newton's step, or the boundary."""
    return min(slope - curvature, math.log2(radius))
