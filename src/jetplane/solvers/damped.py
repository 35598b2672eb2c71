"""Levenberg-Marquardt damping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..ad.jet import Quadratic
from .base import Failure, Plain, Step, agreement, followed, require_positive, solve, spectrum


@dataclass(frozen=True)
class Damped:
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

    def __post_init__(self) -> None:
        require_positive(damping=self.damping, smallest=self.smallest)

    @property
    def state(self) -> float:
        return self.damping

    def at(self, state: float) -> Self:
        """The same solver with another damping."""
        return replace(self, damping=state)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next damping."""
        return followed(state, agreement(predicted, actual), up=4, down=3, smallest=self.smallest)

    def __call__(self, model: Quadratic) -> Step:
        return solve(model, self._coefficients, descends=True)

    def _coefficients(self, plain: Plain) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        lowest = float(found.values[0])
        damping = self.damping
        while lowest + damping < damping / 10 and damping < torch.finfo(torch.float64).max:
            damping *= 10
        return -(found.vectors @ (found.slope / (found.values + damping)))
