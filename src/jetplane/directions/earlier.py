"""Families of directions as version 0.1.0 had them, and how they are used today.

Those had one protocol for what they remember and another for how many they are; both still work.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ..ad.run.directions import Directions
from .plane import NOTHING_LEARNT, Family, Learning, Learnt, Memory, Plane, Size, Start, Taken

__all__ = ["Remembering", "Resizable", "adopted"]


@runtime_checkable
class Remembering(Family, Protocol):
    """A family whose directions depend on the steps that were taken.

    Its memory lives in the optimizer, zero at first. A step that is not taken leaves it as it is.
    """

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """The names of its memory, each with the axes that its tensors have before those of their parameter."""
        ...

    def remember(self, memory: Memory, deltas: Sequence[Tensor], taken: Taken) -> None:
        """Note a step, by writing into the memory's tensors.

        ``deltas`` are the update, one tensor for each parameter, without weight decay and in the units of the
        directions, before a group's learning rate stretches them.
        """
        ...


@runtime_checkable
class Resizable(Family, Protocol):
    """A family whose K changes between steps.

    What it has learnt lives with the caller: ``family.at(size)`` is the family of the next step, and ``size =
    family.resized(size, advantage)`` follows each one; ``family.size`` is where it begins, None if it does not change.
    """

    @property
    def size(self) -> Size | None: ...

    @property
    def largest(self) -> Family:
        """The family when it has grown as far as it may."""
        ...

    def at(self, size: Size) -> Family: ...

    def half(self, size: Size) -> Family:
        """A family of about half the size, whose directions are the first ones of ``at(size)``."""
        ...

    def resized(self, size: Size, advantage: float) -> Size:
        """The next size, where the second half of the directions gained ``advantage`` more, for its cost, than all."""
        ...


def adopted(family: Family) -> Learning:
    """The family as the optimizers use it: itself, or wrapped where it is one of version 0.1.0."""
    return cast(Learning, family) if _learns(type(family)) else Earlier(family)


@cache
def _learns(kind: type) -> bool:
    """Whether families of a class are handed what they have learnt."""
    if not hasattr(kind, "init"):
        return False
    alone = len(inspect.signature(kind.draw).parameters) < 3  # type: ignore[attr-defined]  # self, plane, learnt
    if hasattr(kind, "remember") or (alone and kind.init is not Learning.init):
        raise TypeError(
            f"{kind.__name__} has init as well as the draw(plane) or remember of version 0.1.0; expected "
            "draw(plane, learnt) and update(learnt, taken)."
        )
    return not alone


@dataclass(frozen=True)
class Earlier(Learning):
    """A family with ``draw(plane)``: without a state, or one that remembers or changes its size as in version 0.1.0."""

    family: Any

    def count(self, leaves: Sequence[Tensor]) -> int:
        return int(self.family.count(leaves))

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        slots, size = self.init()
        if slots:
            return 0
        return int((self.family if size is None else self.family.largest).count(leaves))

    def init(self) -> Start:
        return Start(getattr(self.family, "slots", {}), getattr(self.family, "size", None))

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        family: Family = self.family if learnt.size is None else self.family.at(learnt.size)
        return family.draw(plane._replace(memory=learnt.memory) if learnt.memory else plane)

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        if learnt.memory:
            self.family.remember(learnt.memory, taken.deltas, taken)
        if learnt.size is None:
            return learnt
        half = self.family.half(learnt.size).count(taken.deltas)
        return learnt._replace(size=self.family.resized(learnt.size, taken.advantage(half)))
