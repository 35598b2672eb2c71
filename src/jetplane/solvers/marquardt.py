"""Levenberg-Marquardt steps: damped by what the model got wrong, shrunk by what is noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from . import traced
from .base import Numbered, Status, Step, agreement, followed, require_positive, solve


@dataclass(frozen=True)
class LevenbergMarquardt(Numbered):
    r"""c = -relaxation (H + damping D)^-1 g with D = diag(abs(H_kk)), Marquardt's scaling.

    Each direction is damped by its own curvature, so that the step does not depend on the directions' lengths. Damping
    1 halves the step along a direction that is conjugate to all others. Where H is indefinite the damping is raised for
    this step, until H + damping D is positive definite, by equal ratios up to a bound that always suffices.

    The damping is multiplied by ``up`` after a step whose actual decrease is below a quarter of the predicted one, and
    divided by ``down`` (not below ``smallest``) after one above three quarters. A batch knows how well its own loss is
    predicted, not how well that of the next one: damping that is low fits the noise of each batch, the more the larger
    K is. For a loss without noise choose a small ``smallest``.

    Where the noise of the slope is known (``Quadratic.noise``, the covariance N of the mean slope) and ``shrink``,

        c = -(H + damping D + N / s)^-1 g,

    which is the Wiener filter of the slope for a signal with the covariance s (H + damping D): directions are shortened
    by g^2 / (g^2 + noise), in the axes in which curvature and noise are diagonal. The strength s is what is left of the
    slope's square by the noise, in the metric of the damped curvature, per degree of freedom; at least ``least`` of
    it, so that the step never vanishes.

    ``relaxation`` below 1 goes that part of the way. The best step in one plane is greedy: it fits its batch, along
    the steep directions above all, at the cost of the planes to come. Little damping and a short step reach as far
    along flat directions as much damping does, and less far along steep ones.

    Example:
        >>> model = Quadratic(torch.tensor(0.0), torch.tensor([6.0, 0.0]), torch.diag(torch.tensor([2.0, 0.0])))
        >>> LevenbergMarquardt(damping=0.5)(model).coefficients  # a direction that is zero gets zero
        tensor([-2.,  0.])
    """

    damping: float = 1.0
    smallest: float = 1.0
    up: float = 4.0
    down: float = 3.0
    shrink: bool = True
    least: float = 0.1
    relaxation: float = 1.0
    descends: ClassVar[bool] = True
    noise: ClassVar[bool] = True
    number: ClassVar[str] = "damping"

    def __post_init__(self) -> None:
        require_positive(damping=self.damping, smallest=self.smallest)
        for name, value in (("up", self.up), ("down", self.down)):
            if not (math.isfinite(value) and value >= 1):
                raise ValueError(f"{name} is {value}; expected a finite number from 1.")
        for name, value in (("least", self.least), ("relaxation", self.relaxation)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} is {value}; expected a number above 0 and at most 1.")

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        """The next damping."""
        ratio = agreement(predicted, actual)
        return min(followed(state, ratio, up=self.up, down=self.down, smallest=self.smallest), max(state, _LARGEST))

    def traced_update(self, state: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """The next damping as a program that asks the host nothing."""
        after = traced.followed(state, predicted, actual, up=self.up, down=self.down, smallest=self.smallest)
        return torch.minimum(after, state.clamp_min(_LARGEST))

    def solve(self, model: Quadratic, state: float) -> Step:
        damping = torch.tensor(state, dtype=torch.float64, device="cpu")
        return solve(model, lambda plain, units: self._coefficients(plain, damping), descends=True)

    def traced(self, model: Quadratic, state: Tensor) -> traced.TracedStep:
        """The same step, with the damping ``state``, as a program that asks the host nothing."""
        found = torch.ones((), dtype=torch.bool, device=model.slope.device)
        return traced.solve(model, lambda plain: (self._coefficients(plain, state), found), Status.OK, descends=True)

    def _coefficients(self, plain: Quadratic, damping: Tensor) -> Tensor:
        """(K,), not finite where the numbers are too large. One program for both: all of it is tensor arithmetic."""
        scaled, units = _scaled(plain)
        damped = _damped(scaled.curvature, damping)
        found = damped.solve(scaled.slope)
        if self.shrink and scaled.noise is not None:
            found = _shrunk(scaled, damped, self.least)
        return -self.relaxation * found * units


class _Damped(NamedTuple):
    """H + d I, positive definite, and its Cholesky factor L."""

    matrix: Tensor  # (K, K)
    factor: Tensor  # (K, K), lower

    def solve(self, slope: Tensor) -> Tensor:
        return torch.cholesky_solve(slope.unsqueeze(1), self.factor).squeeze(1)


def _scaled(plain: Quadratic) -> tuple[Quadratic, Tensor]:
    """The model in units in which each direction has the curvature 1 or -1; and those units, (K,).

    A direction with slope but no curvature of its own is measured as the mean of the others.
    """
    curvature = (plain.curvature + plain.curvature.T) / 2
    size = curvature.diagonal().abs()
    mean = size.mean()
    units = torch.where(size > 0, size, torch.where(mean > 0, mean, 1.0)).rsqrt()
    square = units.unsqueeze(1) * units
    noise = None if plain.noise is None else (plain.noise + plain.noise.T) / 2 * square
    return Quadratic(plain.loss, plain.slope * units, curvature * square, noise), units


_TRIES = 8

# Curvatures have been scaled to 1. Where steps are so short that rounding hides what they gain, damping would grow on.
_LARGEST = 1e12


def _damped(curvature: Tensor, damping: Tensor) -> _Damped:
    """The first of some dampings, from ``damping`` on, that makes the curvature positive definite.

    That is here: no pivot below a tenth of it, so that the step along an axis of negative curvature is not too long.
    """
    # By Gershgorin no eigenvalue is below -bound: the last try always holds.
    bound = (2 * curvature.abs().sum(1).max()).clamp_min(damping)
    powers = torch.linspace(0.0, 1.0, _TRIES, dtype=curvature.dtype, device=curvature.device)
    tries = damping * (bound / damping) ** powers  # (tries,)
    identity = torch.eye(len(curvature), dtype=curvature.dtype, device=curvature.device)
    matrices = curvature + tries[:, None, None] * identity
    factors, info = torch.linalg.cholesky_ex(matrices)
    pivots = factors.diagonal(dim1=1, dim2=2).square().amin(1)
    holds = info.eq(0) & (pivots >= tries / 10)
    first = torch.arange(_TRIES, device=curvature.device) == holds.to(torch.int64).argmax()
    # a look-up by index here is C++ that does not compile, for processors with AVX-512 in torch 2.11
    return _Damped(*(torch.where(first[:, None, None], tries, 0.0).sum(0) for tries in (matrices, factors)))


def _shrunk(plain: Quadratic, damped: _Damped, least: float) -> Tensor:
    """(M + N / s)^-1 g for the damped curvature M and the noise N, with s by the method of moments.

    In the metric of M the slope has the expected square s tr(M^-1 H) + tr(M^-1 N), the signal's and the noise's.
    """
    noise = plain.noise
    assert noise is not None
    square = plain.slope @ damped.solve(plain.slope)
    freedom, power = (torch.cholesky_solve(part, damped.factor).diagonal().sum() for part in (plain.curvature, noise))
    freedom = torch.where(freedom > 0, freedom, float(len(noise)))
    strength = torch.maximum(square - power, least * square) / freedom
    strength = torch.where(strength > 0, strength, 1.0)  # no slope: no step, whatever this is
    factor, _ = torch.linalg.cholesky_ex(damped.matrix + noise / strength)
    return torch.cholesky_solve(plain.slope.unsqueeze(1), factor).squeeze(1)
