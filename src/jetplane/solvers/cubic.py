"""Cubic regularisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Numbered, Step, agreement, followed, length, require_positive, solve, spectrum
from .secular import shifted
from .units import Units


@dataclass(frozen=True)
class Cubic(Numbered):
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
    rejects: ClassVar[bool] = True
    number: ClassVar[str] = "sigma"

    def __post_init__(self) -> None:
        require_positive(sigma=self.sigma, smallest=self.smallest)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next sigma."""
        return followed(state, agreement(predicted, actual), up=2, down=2, smallest=self.smallest)

    def solve(self, model: Quadratic, state: float) -> Step:
        return solve(model, partial(self._coefficients, state), descends=True, reach=partial(_reach, state))

    def _coefficients(self, sigma: float, plain: Quadratic, units: Units) -> Tensor | Failure:
        found, sigma = spectrum(plain), units.cubic(sigma)
        if isinstance(found, Failure):
            return found
        upper = math.sqrt(sigma * float(length(found.slope)))
        return shifted(found, lambda shift: shift / sigma, upper)


def _reach(sigma: float, slope: float, curvature: float) -> float:
    """Newton's step, or that of the cubic term alone."""
    return min(slope - curvature, (slope - math.log2(sigma)) / 2)
