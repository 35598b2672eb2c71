"""The trust region."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..ad.jet import Quadratic
from .base import Failure, Plain, Step, agreement, length, require_positive, solve, spectrum
from .secular import shifted


@dataclass(frozen=True)
class TrustRegion:
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

    def __post_init__(self) -> None:
        require_positive(radius=self.radius, largest=self.largest)

    @property
    def state(self) -> float:
        return self.radius

    def at(self, state: float) -> Self:
        """The same solver with another radius."""
        return replace(self, radius=state)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next radius."""
        ratio = agreement(predicted, actual)
        if ratio < 0.25:
            return max(state / 4, torch.finfo(torch.float64).tiny)
        return min(2 * state, max(state, self.largest)) if ratio > 0.75 else state

    def __call__(self, model: Quadratic) -> Step:
        return solve(model, self._coefficients, descends=True, limit=self.radius)

    def _coefficients(self, plain: Plain) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        upper = float(length(found.slope)) / self.radius
        return shifted(found, lambda shift: torch.full_like(shift, self.radius), upper)
