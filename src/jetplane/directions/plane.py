"""What a family of directions is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..ad.directions import Directions

Memory = Mapping[str, list[Tensor]]  # by name; one tensor for each parameter


class Plane(NamedTuple):
    """What a family may use to make the directions of one step."""

    seed: int | Tensor  # 64 bits; a tensor () where the step is traced
    step: int | Tensor  # from 0; likewise
    sample: int  # number of the plane within the step, from 0
    leaves: Sequence[Tensor]  # the parameters that move, in order
    gradient: Callable[[], list[Tensor]]  # one backward pass of the closure; only `Gradient` calls it
    memory: Memory = MappingProxyType({})  # what the optimizer keeps for a family that remembers


class Taken(NamedTuple):
    """The plane of a step that was taken, for a family that remembers."""

    directions: Directions  # as the family drew them
    coefficients: Tensor  # (K,)
    gains: Tensor  # (K,): -c_k g_k, each direction's share of the decrease by the slope


@runtime_checkable
class Family(Protocol):
    """A way to choose K directions: a small frozen callable part of an optimizer."""

    def count(self, leaves: Sequence[Tensor]) -> int:
        """K, the number of directions for these parameters."""
        ...

    def draw(self, plane: Plane) -> Directions:
        """The directions of one step; equal planes give equal rows."""
        ...


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


Size = tuple[int, float]  # how many directions, and the evidence for more (above 0) or fewer of them


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


def entries(leaves: Sequence[Tensor]) -> int:
    """The number of entries of all parameters together: D."""
    return sum(leaf.numel() for leaf in leaves)
