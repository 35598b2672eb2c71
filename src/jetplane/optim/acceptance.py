"""An optional test of a step before it is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Acceptance:
    """Take a step only if the loss at its end, evaluated there, is low enough; else halve it, or reject it.

    The step is accepted where ``actual >= fraction * max(predicted, 0)``: with ``fraction`` 0 where the loss does not
    rise. At most ``backtracks`` times the step is halved and tested again.

    Example:
        >>> test = Acceptance(backtracks=3, fraction=0.1)
        >>> test.holds(predicted=1.0, actual=0.2), test.holds(predicted=1.0, actual=0.05)
        (True, False)
        >>> test.holds(predicted=-1.0, actual=float("nan"))
        False
    """

    backtracks: int = 0
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.backtracks, int) or self.backtracks < 0:
            raise ValueError(f"backtracks is {self.backtracks!r}; expected a whole number from 0.")
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction is {self.fraction!r}; expected a number from 0, below 1.")

    def holds(self, predicted: float, actual: float) -> bool:
        """Whether a step with this predicted and actual decrease is accepted."""
        return math.isfinite(actual) and actual >= self.fraction * max(predicted, 0.0)


UNRAISED = Acceptance()  # a step that raises the loss is not taken

Choice = Acceptance | Literal[False] | None


def chosen(accept: Choice, solver: object) -> Acceptance | None:
    """The test of an optimizer's steps: what it was given, or without it (None) what its solver needs; False: none.

    Example:
        >>> from jetplane.solvers import SaddleFree, TrustRegion
        >>> chosen(None, TrustRegion()), chosen(None, SaddleFree()), chosen(False, TrustRegion())
        (Acceptance(backtracks=0, fraction=0.0), None, None)
    """
    if accept is None:
        return UNRAISED if getattr(solver, "rejects", False) else None
    return accept or None


@dataclass(frozen=True)
class Finite:
    """The test of a step that is evaluated for the solver's sake only: the loss at its end must be finite.

    Example:
        >>> Finite().holds(predicted=1.0, actual=-5.0), Finite().holds(predicted=1.0, actual=float("-inf"))
        (True, False)
    """

    backtracks: int = 0

    def holds(self, predicted: float, actual: float) -> bool:
        """Whether the loss was finite."""
        return math.isfinite(actual)
