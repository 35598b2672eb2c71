"""What an optimizer says of its steps, eager ones and traced ones alike."""

from __future__ import annotations

from typing import NamedTuple

from ..curvature import Curvature
from ..directions import Learning, Size
from ..solvers import Following
from ..solvers.adopted import Called
from .acceptance import Acceptance
from .fitting import Fitting

__all__ = ["Numbers", "StepSettings"]


class StepSettings(NamedTuple):
    """The parts and options of an optimizer."""

    family: Learning
    curvature: Curvature
    solver: Following
    samples: int
    clip: float | None
    maximize: bool
    accept: Acceptance | None
    chunk_size: int | None
    fitting: Fitting | None

    @property
    def evaluates(self) -> bool:
        """Whether the loss is evaluated at the end of a step."""
        return self.accept is not None or self.solver.init() is not None

    @property
    def samples_apart(self) -> bool:
        """Whether a closure may return the losses of single samples (B,): a part can do something with them."""
        return bool(getattr(self.curvature, "samples", True) or getattr(self._solver, "noise", False))

    @property
    def uses_noise(self) -> bool:
        """Whether the solver does something with the noise of the slope."""
        return bool(getattr(self._solver, "noise", False) and getattr(self._solver, "shrink", True))

    @property
    def _solver(self) -> object:
        return self.solver.solver if isinstance(self.solver, Called) else self.solver

    @property
    def repeats(self) -> bool:
        """Whether a step runs the closures more than once."""
        return self.evaluates or self.samples > 1 or self.chunked

    @property
    def chunked(self) -> bool:
        """Whether a plane may take several passes."""
        return self.chunk_size is not None or self.fitting is not None

    @property
    def sign(self) -> float:
        """Of the loss in what is minimised."""
        return -1.0 if self.maximize else 1.0


class Numbers(NamedTuple):
    """The numbers that all groups of an optimizer have in common, and that steps change."""

    seed: int
    step: int
    bad: int  # steps in a row that could not move the parameters; one without slope is none of them
    solver_state: float | None
    size: Size | None  # of directions whose K changes
