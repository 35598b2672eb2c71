"""Cubic regularisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from ..ad.jet import Quadratic
from .base import Failure, Plain, Step, agreement, followed, length, require_positive, solve, spectrum
from .secular import shifted


@dataclass(frozen=True)
class Cubic:
    """The exact minimiser of the cubic model: min g @ c + c @ H @ c / 2 + sigma |c|^3 / 3.

    (H + mu I) c = -g with mu = sigma |c| and H + mu I positive semidefinite (Nesterov and Polyak 2006; Cartis, Gould
    and Toint 2011). ``predicted`` is the decrease of the quadratic model, as for all solvers.

    sigma is doubled after a step whose actual decrease is below a quarter of the predicted one, and halved (down to
    ``smallest``) after one above three quarters.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([4.0]), torch.zeros(1, 1))
        >>> Cubic(sigma=1.0)(model).coefficients  # 4 = sigma c^2
        tensor([-2.])
    """

    sigma: float = 1.0
    smallest: float = 1e-12
    descends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(sigma=self.sigma, smallest=self.smallest)

    @property
    def state(self) -> float:
        return self.sigma

    def at(self, state: float) -> Self:
        """The same solver with another sigma."""
        return replace(self, sigma=state)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next sigma."""
        return followed(state, agreement(predicted, actual), up=2, down=2, smallest=self.smallest)

    def __call__(self, model: Quadratic) -> Step:
        return solve(model, self._coefficients, descends=True)

    def _coefficients(self, plain: Plain) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        upper = math.sqrt(self.sigma * float(length(found.slope)))
        return shifted(found, lambda shift: shift / self.sigma, upper)
