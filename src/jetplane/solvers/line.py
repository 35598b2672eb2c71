"""Solvers that look at one direction at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Failure, Following, Status, Step, solve
from .traced import TracedStep
from .traced import solve as solve_traced
from .units import Units


@dataclass(frozen=True)
class NegativeSlope(Following):
    """Forward gradient descent: c = -scale * g. A scale of 1/K averages over the directions.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([2.0, -1.0]), torch.zeros(2, 2))
        >>> NegativeSlope()(model).coefficients
        tensor([-2.,  1.])
    """

    scale: float = 1.0
    descends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}; expected a finite positive number.")

    def solve(self, model: Quadratic, state: None) -> Step:
        return solve(model, lambda plain, units: -self.scale * plain.slope, descends=True, few=self._few, reach=None)

    def _few(self, slope: list[float], curvature: list[list[float]]) -> list[float]:
        return [-self.scale * g for g in slope]

    def traced(self, model: Quadratic, state: Tensor | None = None) -> TracedStep:
        """The same step as a program that asks the host nothing."""
        found = torch.ones((), dtype=torch.bool, device=model.slope.device)
        return solve_traced(model, lambda plain: (-self.scale * plain.slope, found), Status.FLAT, descends=True)


@dataclass(frozen=True)
class AbsoluteCurvature(Following):
    """Each direction by itself: c_k = -g_k / (|H_kk| + eps), the FoMoH step.

    With ``eps`` 0, directions with slope but without curvature have no step: the status is SINGULAR.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([2.0]), torch.tensor([[-4.0]]))
        >>> AbsoluteCurvature(eps=0.0)(model).coefficients
        tensor([-0.5000])
    """

    eps: float = 1e-5
    descends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps is {self.eps}; expected a finite number, zero or more.")

    def solve(self, model: Quadratic, state: None) -> Step:
        return solve(model, self._coefficients, descends=True, few=self._few, reach=None)

    def traced(self, model: Quadratic, state: Tensor | None = None) -> TracedStep:
        """The same step as a program that asks the host nothing."""
        return solve_traced(model, self._quotients, Status.SINGULAR, descends=True)

    def _few(self, slope: list[float], curvature: list[list[float]]) -> list[float] | Failure:
        divisors = [abs(curvature[k][k]) + self.eps for k in range(len(slope))]
        return [-g / d for g, d in zip(slope, divisors, strict=True)] if all(divisors) else Failure(Status.SINGULAR)

    def _quotients(self, plain: Quadratic) -> tuple[Tensor, Tensor]:
        divisor = plain.curvature.diagonal().abs() + self.eps
        return -plain.slope / divisor, divisor.ne(0).all()

    def _coefficients(self, plain: Quadratic, units: Units) -> Tensor | Failure:
        divisor = plain.curvature.diagonal().abs() + self.eps
        if not bool(divisor.all()):
            return Failure(Status.SINGULAR)
        return -plain.slope / divisor
