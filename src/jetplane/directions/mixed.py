"""Families made of families: several one below the other, and one split by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import cast

from torch import Tensor

from ..ad.directions import Directions, Joined
from .plane import Family, Memory, Plane, Remembering, Resizable, Size, Taken

_GOLDEN = 0x1E3779B97F4A7C15  # an odd number of 61 bits without a pattern


@dataclass(frozen=True)
class Mixed:
    """The directions of several families, one family below the other; a list given as ``directions`` is one of these.

    Each family draws with a seed of its own, and has a memory of its own. The last one may change its size between
    steps.

    Example:
        >>> from jetplane.directions import Gaussian, PreviousStep
        >>> Mixed([PreviousStep(), Gaussian(31)]).count([torch.zeros(100)])
        32
    """

    families: Sequence[Family]

    def __post_init__(self) -> None:
        if isinstance(self.families, Family) or not isinstance(self.families, Sequence):
            name = type(self.families).__name__
            raise TypeError(
                f"the families of directions are {name}; expected a list such as [PreviousStep(), Gaussian(31)]."
            )
        if not self.families:
            raise ValueError("the list of directions is empty; expected at least one family.")
        for number, family in enumerate(self.families):
            if not isinstance(family, Family):
                name = type(family).__name__
                raise TypeError(f"entry {number} of the directions is {name}; expected a family such as Gaussian(31).")
            if number < len(self.families) - 1 and resizable(family) is not None:
                raise ValueError(f"entry {number} of the directions changes its size; expected it to be the last one.")
        object.__setattr__(self, "families", tuple(self.families))  # one form, which can be hashed

    def count(self, leaves: Sequence[Tensor]) -> int:
        return sum(family.count(leaves) for family in self.families)

    def draw(self, plane: Plane) -> Directions:
        drawn = []
        for number, family in enumerate(self.families):
            own = plane._replace(
                seed=plane.seed ^ (_GOLDEN * number % (1 << 63)), memory=self._own(number, plane.memory)
            )
            drawn.append(family.draw(own))
        return reduce(Joined, drawn)

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{number}.{name}": axes
            for number, family in enumerate(self.families)
            if isinstance(family, Remembering)
            for name, axes in family.slots.items()
        }

    def remember(self, memory: Memory, deltas: Sequence[Tensor], taken: Taken) -> None:
        for number, family in enumerate(self.families):
            if isinstance(family, Remembering):
                family.remember(self._own(number, memory), deltas, taken)

    @staticmethod
    def _own(number: int, memory: Memory) -> Memory:
        """The part of one family: names begin with its number."""
        start = f"{number}."
        return {name.removeprefix(start): tensors for name, tensors in memory.items() if name.startswith(start)}

    # -- size: that of the last family ------------------------------------------------------------------------------

    @property
    def size(self) -> Size | None:
        last = resizable(self.families[-1])
        return None if last is None else last.size

    @property
    def largest(self) -> Family:
        last = resizable(self.families[-1])
        return self if last is None else self._ending(last.largest)

    def at(self, size: Size) -> Family:
        return self._ending(self._last.at(size))

    def half(self, size: Size) -> Family:
        return self._ending(self._last.half(size))

    def resized(self, size: Size, advantage: float) -> Size:
        return self._last.resized(size, advantage)

    @property
    def _last(self) -> Resizable:
        last = self.families[-1]
        assert isinstance(last, Resizable)
        return last

    def _ending(self, last: Family) -> Mixed:
        return replace(self, families=(*self.families[:-1], last))


def resizable(family: Family) -> Resizable | None:
    """``family`` if its size changes between steps."""
    # a protocol would look at all of its members each time, which a step would feel
    return cast(Resizable, family) if getattr(family, "size", None) is not None else None


def layers_of(leaves: Sequence[Tensor]) -> list[int]:
    """The number of each parameter's layer, from 0: one begins at each parameter of two or more axes.

    Example:
        >>> layers_of([torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 3), torch.zeros(1)])
        [0, 0, 1, 1]
    """
    numbers: list[int] = []
    for leaf in leaves:
        numbers.append((numbers[-1] if numbers else -1) + (not numbers or leaf.ndim > 1))
    return numbers


@dataclass(frozen=True)
class PerLayer:
    """Each direction of a family split into one direction for each layer, zero in all others: K times the layers.

    The step then has a length for each layer of its own. A layer begins at each parameter of two or more axes and takes
    the vectors after it along, as a weight its bias; with ``by="parameter"`` each parameter is one.

    Example:
        >>> from jetplane.directions import PreviousStep
        >>> layers = [torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 3), torch.zeros(1)]
        >>> PerLayer(PreviousStep()).count(layers), PerLayer(PreviousStep(), by="parameter").count(layers)
        (2, 4)
    """

    family: Family
    by: str = "layer"

    def __post_init__(self) -> None:
        if not isinstance(self.family, Family):
            name = type(self.family).__name__
            raise TypeError(f"the family to split is {name}; expected a family of directions such as PreviousStep().")
        if resizable(self.family) is not None:
            raise ValueError("the family to split changes its size; expected one of a fixed size.")
        if self.by not in ("layer", "parameter"):
            raise ValueError(f"by is {self.by!r}; expected 'layer' or 'parameter'.")

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.family.count(leaves) * (max(self._layers(leaves)) + 1)

    def draw(self, plane: Plane) -> Directions:
        return _Split(self.family.draw(plane), self._layers(plane.leaves))

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        return self.family.slots if isinstance(self.family, Remembering) else {}

    def remember(self, memory: Memory, deltas: Sequence[Tensor], taken: Taken) -> None:
        if isinstance(self.family, Remembering):
            self.family.remember(memory, deltas, taken)

    def _layers(self, leaves: Sequence[Tensor]) -> list[int]:
        return list(range(len(leaves))) if self.by == "parameter" else layers_of(leaves)


@dataclass(frozen=True)
class _Split:
    """Row k L + l is row k of the directions in layer l of L, and zero elsewhere."""

    directions: Directions
    layers: Sequence[int]  # of each parameter

    @property
    def _count(self) -> int:
        return max(self.layers) + 1

    @property
    def k(self) -> int:
        return self.directions.k * self._count

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        count, layer = self._count, self.layers[position]
        first, last = start // count, -(-stop // count)
        rows = self.directions.rows(position, like, first, last)
        split = rows.new_zeros((last - first, count, *like.shape))
        split[:, layer] = rows
        return split.flatten(0, 1)[start - first * count : stop - first * count]
