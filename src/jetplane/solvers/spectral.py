"""Solvers that replace the eigenvalues of the curvature by positive numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Following, Step, require_positive, solve, spectrum
from .units import OWN, Units


@dataclass(frozen=True)
class SaddleFree(Following):
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

    def solve(self, model: Quadratic, state: None) -> Step:
        return solve(model, self._coefficients, descends=True)

    def _coefficients(self, plain: Quadratic, units: Units) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        size = found.values.abs()
        largest = float(size.max())
        divisor = size.clamp_min(self.floor * largest) if largest > 0 else torch.full_like(size, units.curvature(1.0))
        return -(found.vectors @ (found.slope / divisor))


@dataclass(frozen=True)
class SoftAbs(Following):
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

    def solve(self, model: Quadratic, state: None) -> Step:
        return solve(model, self._coefficients, descends=True, reach=self._reach)

    def _reach(self, slope: float, curvature: float) -> float:
        return slope - max(curvature, -math.log2(self.sharpness))

    def _coefficients(self, plain: Quadratic, units: Units) -> Tensor | Failure:
        found = spectrum(plain)
        if isinstance(found, Failure):
            return found
        least = units.curvature(1 / self.sharpness)
        sharpness = self.sharpness if units is OWN else 1 / least
        scaled = found.values.abs() * sharpness
        smooth = torch.where(scaled < math.sqrt(torch.finfo(scaled.dtype).eps), 1.0, scaled / torch.tanh(scaled))
        return -(found.vectors @ (found.slope / (smooth / sharpness)))
