"""Who watches the steps of an optimizer: nobody, or a journal that keeps the numbers each one is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..solvers import Status
from .moving import Moving
from .step_settings import Numbers

__all__ = ["NOBODY", "Moved", "Watcher"]


class Moved(NamedTuple):
    """A step that was taken, as numbers: with the directions they make the update once more, bit by bit."""

    now: Numbers  # before the step
    after: Numbers
    moving: Moving
    status: Status
    loss: Tensor  # (), before the step
    coefficients: Sequence[Tensor]  # (K,) for each plane, as the solver gave them
    factor: float  # on the update, by clipping and backtracking
    slopes: Sequence[Tensor]  # (K,) for each plane
    used: Sequence[bool]  # of each parameter: whether the closures read it
    block: int | None  # how many directions are summed up at a time; None: all
    absent: Sequence[int] = ()  # processes that were left out of it


class Watcher(Protocol):
    """What is told of the steps."""

    def before(self, now: Numbers) -> None:
        """A step is about to be taken. Raises where it could not be told of."""
        ...

    def after(self, moved: Moved) -> None:
        """A step was taken, and parameters and buffers are where it left them."""
        ...


class _Nobody:
    def before(self, now: Numbers) -> None:
        pass

    def after(self, moved: Moved) -> None:
        pass


NOBODY: Watcher = _Nobody()
