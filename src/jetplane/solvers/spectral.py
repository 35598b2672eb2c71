"""Solvers that replace the eigenvalues of the curvature by positive numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.jet import Quadratic
from .base import Failure, Plain, Step, require_positive, solve, spectrum


@dataclass(frozen=True)
class SaddleFree:
    """c = -|H|^-1 g: Newton's step where H is positive definite, away from saddles elsewhere.

    |H| = Q diag(max(|w|, floor max|w|)) Q^T for H = Q diag(w) Q^T. Where H is zero there is nothing to divide by, and
    the step is -g.

    Example:
        >>> slope, curvature = torch.tensor([2.0, 4.0]), torch.diag(torch.tensor([2.0, -4.0]))
        >>> SaddleFree()(Quadratic(torch.tensor(0.0), slope, curvature)).coefficients
        tensor([-1., -1.])
    """

    floor: float = 1e-8  # of the largest absolute eigenvalue
    descends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor is {self.floor}; expected a number above 0 and at most 1.")

    def __call__(self, model: Quadratic) -> Step:
        return solve(model, self._coefficients, descends=True)

    def _coefficients(self, plain: Plain) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        size = found.values.abs()
        largest = float(size.max())
        divisor = size.clamp_min(self.floor * largest) if largest > 0 else torch.ones_like(size)
        return -(found.vectors @ (found.slope / divisor))


@dataclass(frozen=True)
class SoftAbs:
    """c = -Q diag(1 / s(w)) Q^T g with the smooth absolute value s(w) = w coth(sharpness w).

    s is close to |w| far from zero and never below 1 / sharpness (Betancourt, arXiv:1212.4693).

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([1.0]), torch.zeros(1, 1))
        >>> SoftAbs(sharpness=10.0)(model).coefficients
        tensor([-10.])
    """

    sharpness: float = 1e3
    descends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(sharpness=self.sharpness)

    def __call__(self, model: Quadratic) -> Step:
        return solve(model, self._coefficients, descends=True)

    def _coefficients(self, plain: Plain) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        scaled = found.values.abs() * self.sharpness
        smooth = torch.where(scaled < math.sqrt(torch.finfo(scaled.dtype).eps), 1.0, scaled / torch.tanh(scaled))
        return -(found.vectors @ (found.slope / (smooth / self.sharpness)))
