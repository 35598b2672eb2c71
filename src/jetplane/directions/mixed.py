"""Families made of families: several one below the other, and one split by layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce

from torch import Tensor

from ..ad.run.directions import Directions, Joined
from .earlier import adopted
from .plane import NOTHING_KEPT, NOTHING_LEARNT, Family, Learning, Learnt, Plane, Start, Taken

_GOLDEN = 0x1E3779B97F4A7C15  # an odd number of 61 bits without a pattern


@dataclass(frozen=True)
class Mixed(Learning):
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
            if number < len(self.families) - 1 and adopted(family).init().size is not None:
                raise ValueError(f"entry {number} of the directions changes its size; expected it to be the last one.")
        object.__setattr__(self, "families", tuple(self.families))  # one form, which can be hashed

    @cached_property
    def _parts(self) -> tuple[Learning, ...]:
        return tuple(adopted(family) for family in self.families)

    def count(self, leaves: Sequence[Tensor]) -> int:
        return sum(family.count(leaves) for family in self.families)

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return sum(part.fresh(leaves) for part in self._parts)

    def init(self) -> Start:
        return self._start

    @cached_property
    def _start(self) -> Start:
        starts = [part.init() for part in self._parts]
        slots = {f"{n}.{name}": axes for n, one in enumerate(starts) for name, axes in one.slots.items()}
        return Start(slots, starts[-1].size)

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        if not learnt.memory:
            learnt = learnt._replace(memory=plane.memory)
        drawn = []
        for number, part in enumerate(self._parts):
            own = plane._replace(seed=plane.seed ^ (_GOLDEN * number % (1 << 63)), memory={})
            drawn.append(part.draw(own, self._own(number, learnt)))
        return reduce(Joined, drawn)

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        after = learnt
        for number, part in enumerate(self._parts):
            if part.init() != NOTHING_KEPT:
                before = sum(one.count(taken.deltas) for one in self._parts[:number])
                advantage = partial(_beyond, taken.advantage, before)
                after = part.update(self._own(number, learnt), taken._replace(advantage=advantage))
        return learnt._replace(size=after.size)

    def _own(self, number: int, learnt: Learnt) -> Learnt:
        """The part of one family: names of its memory begin with its number, and the last one may change its size."""
        start, size = f"{number}.", learnt.size if number == len(self.families) - 1 else None
        own = {name.removeprefix(start): kept for name, kept in learnt.memory.items() if name.startswith(start)}
        return Learnt(own, size)


def _beyond(advantage: Callable[[int], float], before: int, count: int) -> float:
    return advantage(before + count)


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
class PerLayer(Learning):
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
        if adopted(self.family).init().size is not None:
            raise ValueError("the family to split changes its size; expected one of a fixed size.")
        if self.by not in ("layer", "parameter"):
            raise ValueError(f"by is {self.by!r}; expected 'layer' or 'parameter'.")

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.family.count(leaves) * (max(self._layers(leaves)) + 1)

    @cached_property
    def _part(self) -> Learning:
        return adopted(self.family)

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return 0 if self.init().slots else self.count(leaves)

    def init(self) -> Start:
        return self._part.init()

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return _Split(self._part.draw(plane, learnt), self._layers(plane.leaves))

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        return self._part.update(learnt, taken)

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
