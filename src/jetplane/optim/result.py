"""What a minimisation found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

__all__ = ["Ending", "Result"]


class Ending(IntEnum):
    """Why a minimisation ended: the numbers of ``Result.status``."""

    RUNNING = -1
    CONVERGED = 0
    ITERATIONS = 1
    EVALUATIONS = 2
    STALLED = 3
    CALLBACK = 99  # as in scipy


@dataclass(frozen=True)
class Result:
    """The outcome of :func:`jetplane.minimize`, with the names of scipy's OptimizeResult."""

    x: Any  # the structure of x0
    fun: float  # at x
    success: bool  # whether a tolerance was met
    status: int  # an Ending
    message: str
    nit: int  # steps
    nfev: int  # calls of fun
    history: list[float] = field(repr=False)  # fun at x0 and after each step
