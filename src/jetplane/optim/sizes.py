"""What the directions of a plane gain for their cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..ad.algebra.jet import Quadratic
from ..curvature import Curvature, is_late
from ..solvers import Step

__all__ = ["advantage", "passes"]


def passes(curvature: Curvature, k: int) -> int:
    """The cost of a plane with K directions, in products of a layer's size: 1 is a forward pass.

    Example:
        >>> from jetplane.curvature import ExactHessian, NoCurvature
        >>> passes(ExactHessian(), 3), passes(NoCurvature(), 3)
        (22, 7)
    """
    pairs = curvature.pairs(k)
    second = 0 if is_late(curvature) else len(pairs.pairs)
    return 1 + 2 * k + second + (k * k if pairs.shape == "all" else len(pairs.pairs)) * (second > 0)


def advantage(model: Quadratic, solver: Callable[[Quadratic], Step], curvature: Curvature, half: int) -> float:
    """How much more, for its cost, the part of the plane beyond its first ``half`` directions gains than all of it.

    Both gains are the decrease that the solver's step is predicted to make; zero where they say nothing.
    """
    gain, less = float(solver(model).predicted), float(solver(_first(model, half)).predicted)
    cost, before = passes(curvature, model.k), passes(curvature, half)
    if not (math.isfinite(gain) and math.isfinite(less) and gain > 0):
        return 0.0
    return (gain - less) / (cost - before) / (gain / cost) - 1.0


def _first(model: Quadratic, k: int) -> Quadratic:
    """The model on the first K of its directions."""
    noise = None if model.noise is None else model.noise[:k, :k]
    return replace(model, slope=model.slope[:k], curvature=model.curvature[:k, :k], noise=noise)
