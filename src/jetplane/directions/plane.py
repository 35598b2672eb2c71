"""What a family of directions is given, and what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..ad.run.directions import Directions

Memory = Mapping[str, list[Tensor]]  # by name; one tensor for each parameter
Size = tuple[int, float]  # how many directions, and the evidence for more (above 0) or fewer of them


class Plane(NamedTuple):
    """What a family may use to make the directions of one step."""

    seed: int | Tensor  # 64 bits; a tensor () where the step is traced
    step: int | Tensor  # from 0; likewise
    sample: int  # number of the plane within the step, from 0
    leaves: Sequence[Tensor]  # the parameters that move, in order
    gradient: Callable[[], list[Tensor]]  # one backward pass of the closure; only `Gradient` calls it
    memory: Memory = MappingProxyType({})  # for families of version 0.1.0; others are handed what they have learnt


class Taken(NamedTuple):
    """The plane of a step that was taken, for a family that learns from it."""

    directions: Directions  # as the family drew them
    coefficients: Tensor  # (K,)
    gains: Tensor  # (K,): -c_k g_k, each direction's share of the decrease by the slope
    # the update, one tensor for each parameter, without weight decay and in the units of the directions, before a
    # group's learning rate stretches them
    deltas: Sequence[Tensor] = ()
    # how much more, for its cost, the part of the plane beyond its first n directions gained than all of it
    advantage: Callable[[int], float] = lambda _: 0.0


class Start(NamedTuple):
    """What an optimizer keeps for a family, before the first step."""

    slots: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # names, with the axes in front of a parameter's own
    size: Size | None = None  # of a family whose K changes


class Learnt(NamedTuple):
    """What a family has learnt. It lives in the optimizer, and in its ``state_dict``."""

    memory: Memory = MappingProxyType({})  # a tensor for each slot and parameter, zero at first
    size: Size | None = None


NOTHING_KEPT, NOTHING_LEARNT = Start(), Learnt()


@runtime_checkable
class Family(Protocol):
    """A way to choose K directions: a small frozen callable part of an optimizer.

    This is all that one without a state needs. One that learns from its steps is a :class:`Learning`.
    """

    def count(self, leaves: Sequence[Tensor]) -> int:
        """K, the number of directions for these parameters."""
        ...

    def draw(self, plane: Plane) -> Directions:
        """The directions of one step; equal planes give equal rows."""
        ...


class Learning(ABC):
    """A family whose directions may depend on the steps that were taken; the defaults are those of one without a state.

    What it has learnt lives in the optimizer: it begins as ``family.init()`` says, ``family.draw(plane, learnt)`` makes
    the directions of a step, and ``learnt = family.update(learnt, taken)`` follows each one that is taken. A step that
    is not taken leaves it as it is.
    """

    @abstractmethod
    def count(self, leaves: Sequence[Tensor]) -> int:
        """K at the start, for these parameters."""

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        """How many directions a step makes anew, at most: those that remember may well lie in the plane of others."""
        return self.count(leaves)

    def init(self) -> Start:
        """What the optimizer is to keep."""
        return NOTHING_KEPT

    @abstractmethod
    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        """The directions of one step; equal planes and states give equal rows."""

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        """The state after a step: the memory's own tensors, written in place, and the next size."""
        return learnt


def entries(leaves: Sequence[Tensor]) -> int:
    """The number of entries of all parameters together: D."""
    return sum(leaf.numel() for leaf in leaves)
