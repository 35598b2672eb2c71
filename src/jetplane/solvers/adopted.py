"""Solvers as version 0.1.0 had them, and how they are used today.

A solver that follows its model was given its state by ``at``, and there was a protocol for traced ones with and one for
those without a state; all of them still work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Following, Solver, Step
from .traced import TracedStep

__all__ = ["Adaptive", "Traceable", "TraceableAdaptive", "adaptive", "adopted", "traces"]


@runtime_checkable
class Adaptive(Solver, Protocol):
    """A solver with one number (damping, radius, sigma) that follows how well the model predicts.

    The number lives with the caller: ``solver.at(state)(model)`` solves with it, and
    ``state = solver.update(state, predicted, actual)`` follows each step; ``solver.state`` is where it begins.
    """

    @property
    def state(self) -> float: ...

    def at(self, state: float) -> Self: ...

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float: ...


@runtime_checkable
class Traceable(Protocol):
    """A solver that can be a part of a compiled step."""

    def traced(self, model: Quadratic) -> TracedStep: ...


@runtime_checkable
class TraceableAdaptive(Protocol):
    """A solver with a state that can be: its state is a tensor () in float64, which follows by where's."""

    def traced(self, model: Quadratic, state: Tensor) -> TracedStep: ...

    def traced_update(self, state: Tensor, predicted: Tensor, actual: Tensor) -> Tensor: ...


def adopted(solver: Solver) -> Following:
    """The solver as the optimizers use it: itself, or wrapped where it is one of version 0.1.0."""
    return cast(Following, solver) if _solves(type(solver)) else Called(solver)


@cache
def _solves(kind: type) -> bool:
    """Whether solvers of a class are handed their state, and are not called."""
    called = issubclass(kind, Following) and kind.__call__ is not Following.__call__
    return hasattr(kind, "init") and not called


def adaptive(solver: Solver) -> bool:
    """Whether a solver follows how well its model predicts."""
    return adopted(solver).init() is not None


def traces(solver: Following) -> bool:
    """Whether a solver can be a part of a compiled step."""
    traced = solver.solver if isinstance(solver, Called) else solver
    return hasattr(traced, "traced") and (solver.init() is None or hasattr(traced, "traced_update"))


@dataclass(frozen=True)
class Called(Following):
    """A solver that is called: one without a state, or one with ``state``, ``at`` and ``update``."""

    solver: Any
    descends: ClassVar[bool] = False  # nobody asks

    def init(self) -> float | None:
        follows = all(hasattr(self.solver, name) for name in ("state", "at", "update"))
        return float(self.solver.state) if follows else None

    def solve(self, model: Quadratic, state: float | None) -> Step:
        step: Step = self.solver(model) if state is None else self.solver.at(state)(model)
        return step

    def update(self, state: Any, predicted: float | Tensor, actual: float | Tensor) -> Any:
        return state if state is None else float(self.solver.update(state, predicted, actual))

    def traced(self, model: Quadratic, state: Tensor) -> TracedStep:
        step: TracedStep = self.solver.traced(model) if self.init() is None else self.solver.traced(model, state)
        return step

    def traced_update(self, state: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        after: Tensor = self.solver.traced_update(state, predicted, actual)
        return after
